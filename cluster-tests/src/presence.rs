//! Presence from the view of clients: enter, list and watch.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::time::Instant;

use crate::{Node, SOON, Socket, http, wait_until};

/// Sends a presence request, which must succeed.
pub async fn present(socket: &mut Socket, action: &str, channel: &str, more: Value) {
    let mut request = json!({"op": 12, "channel": channel, "action": action});
    request.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    let answer = socket.ask(request).await;
    assert_eq!(answer["op"], 1, "{answer}");
}

/// Reads the next event: its action, client id and data.
pub async fn event(socket: &mut Socket) -> (String, String, Value) {
    let frame = socket.find("a presence event", |frame| frame["op"] == 12).await;
    read(&frame)
}

/// Gives action, client id and data of an event's frame.
pub fn read(frame: &Value) -> (String, String, Value) {
    let event = &frame["presence"][0];
    let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
    (text("action"), text("clientId"), event["data"].clone())
}

/// Reads a list of members over all its pages; gives the data by client id.
pub async fn listed(socket: &mut Socket) -> BTreeMap<String, Value> {
    let mut members = BTreeMap::new();
    loop {
        let page = socket.find("a page of members", |frame| frame["op"] == 14).await;
        if take_page(&page, &mut members) {
            return members;
        }
    }
}

/// Adds the members of a page; true for the last page.
fn take_page(page: &Value, members: &mut BTreeMap<String, Value>) -> bool {
    for member in page["members"].as_array().expect("members") {
        let name = member["clientId"].as_str().expect("a clientId").to_owned();
        assert!(members.insert(name, member["data"].clone()).is_none(), "{member} twice");
    }
    page["more"] == false
}

/// Attaches, and gives the list of members.
pub async fn attach(socket: &mut Socket, channel: &str) -> BTreeMap<String, Value> {
    let attached = socket.attach(channel).await;
    if attached["presence"] == true { listed(socket).await } else { BTreeMap::new() }
}

/// Gives a node's answer for a channel's members over HTTP.
pub async fn members(node: &Node, channel: &str) -> Value {
    let authorization = http::basic(&node.key());
    let headers = [("authorization", authorization.as_str())];
    let path = format!("/api/channels/{channel}/presence");
    let response = http::request(node.addr(), "GET", &path, &headers, "").await;
    assert_eq!(response.status, 200);
    serde_json::from_slice(&response.body).expect("JSON")
}

/// Gives the client ids of the members, sorted.
pub async fn names(node: &Node, channel: &str) -> Vec<String> {
    let listed = members(node, channel).await;
    let name = |member: &Value| member["clientId"].as_str().expect("a clientId").to_owned();
    let mut names: Vec<_> = listed["members"].as_array().expect("members").iter().map(name).collect();
    names.sort();
    names
}

/// A client that keeps the list of members by events. Fails the test on an event that contradicts the list.
pub struct Watcher {
    socket: Socket,
    pub list: BTreeMap<String, Value>,
    /// Pages so far of an incomplete list.
    pages: BTreeMap<String, Value>,
    /// All events since the attach: action and client id.
    pub events: Vec<(String, String)>,
}

impl Watcher {
    pub async fn on(node: &Node, channel: &str) -> Self {
        let mut socket = Socket::open(node, "").await;
        let list = attach(&mut socket, channel).await;
        Self { socket, list, pages: BTreeMap::new(), events: Vec::new() }
    }

    /// Takes the next event or list; false if none comes before `end`.
    pub async fn take_until(&mut self, end: Instant) -> bool {
        while let Ok(frame) = self.socket.next_within(end.saturating_duration_since(Instant::now())).await {
            // After a continuity loss the channel is attached again, and a list follows unless there are no members.
            let is_alone = frame["op"] == 9 && frame["presence"] == false;
            if is_alone || frame["op"] == 14 && take_page(&frame, &mut self.pages) {
                self.list = std::mem::take(&mut self.pages);
                return true;
            }
            if frame["op"] != 12 {
                continue;
            }
            let (action, name, data) = read(&frame);
            let was_there = match &*action {
                "leave" => self.list.remove(&name).is_some(),
                _ => self.list.insert(name.clone(), data).is_some(),
            };
            assert_eq!(was_there, action != "enter", "{frame}");
            self.events.push((action, name));
            return true;
        }
        false
    }

    /// Takes events until the list is as expected; false if it is not by `end`.
    pub async fn has_by(&mut self, expected: &BTreeMap<String, Value>, end: Instant) -> bool {
        while self.list != *expected {
            if !self.take_until(end).await {
                return false;
            }
        }
        true
    }

    /// Asserts that no event comes for this time.
    pub async fn assert_quiet(&mut self, within: Duration) {
        let (known, end) = (self.events.len(), Instant::now() + within);
        while self.take_until(end).await {
            assert_eq!(self.events[known..], [], "nothing was to happen");
        }
    }
}

/// Waits until each node lists these members.
pub async fn until_members_on_all(nodes: &[Node], channel: &str, expected: &[&str]) {
    for node in nodes {
        let what = format!("{expected:?} on {channel}");
        wait_until(SOON, &what, async || names(node, channel).await == expected).await;
    }
}
