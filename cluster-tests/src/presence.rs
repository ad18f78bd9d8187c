//! Who is present, as clients ask and see it.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::{Node, SOON, Socket, http, wait_until};

/// Asks to be something on a channel, which succeeds.
pub async fn present(socket: &mut Socket, action: &str, channel: &str, more: Value) {
    let mut request = json!({"op": 12, "channel": channel, "action": action});
    request.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    let answer = socket.ask(request).await;
    assert_eq!(answer["op"], 1, "{answer}");
}

/// The next event, as its action, who it is, and the data.
pub async fn event(socket: &mut Socket) -> (String, String, Value) {
    let frame = socket.find("a presence event", |frame| frame["op"] == 12).await;
    read(&frame)
}

/// The same of a frame.
pub fn read(frame: &Value) -> (String, String, Value) {
    let event = &frame["presence"][0];
    let text = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
    (text("action"), text("clientId"), event["data"].clone())
}

/// The members on a page, or several, of a list; by who they are, with their data.
pub async fn listed(socket: &mut Socket) -> BTreeMap<String, Value> {
    let mut members = BTreeMap::new();
    loop {
        let page = socket.find("a page of members", |frame| frame["op"] == 14).await;
        for member in page["members"].as_array().expect("members") {
            let name = member["clientId"].as_str().expect("a clientId").to_owned();
            assert!(members.insert(name, member["data"].clone()).is_none(), "{member} twice");
        }
        if page["more"] == false {
            return members;
        }
    }
}

/// Attaches, and gives the list of who is there; none when nobody is.
pub async fn attach(socket: &mut Socket, channel: &str) -> BTreeMap<String, Value> {
    let attached = socket.attach(channel).await;
    if attached["presence"] == true { listed(socket).await } else { BTreeMap::new() }
}

/// What a node answers over HTTP.
pub async fn members(node: &Node, channel: &str) -> Value {
    let authorization = http::basic(&node.key());
    let headers = [("authorization", authorization.as_str())];
    let path = format!("/api/channels/{channel}/presence");
    let response = http::request(node.addr(), "GET", &path, &headers, "").await;
    assert_eq!(response.status, 200);
    serde_json::from_slice(&response.body).expect("JSON")
}

/// Who is there by that, sorted.
pub async fn names(node: &Node, channel: &str) -> Vec<String> {
    let listed = members(node, channel).await;
    let name = |member: &Value| member["clientId"].as_str().expect("a clientId").to_owned();
    let mut names: Vec<_> = listed["members"].as_array().expect("members").iter().map(name).collect();
    names.sort();
    names
}

/// Waits until each node gives these members.
pub async fn until_everywhere(nodes: &[Node], channel: &str, expected: &[&str]) {
    for node in nodes {
        let what = format!("{expected:?} on {channel}");
        wait_until(SOON, &what, async || names(node, channel).await == expected).await;
    }
}
