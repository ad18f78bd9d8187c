//! Publishes and presence changes that the nodes have acknowledged, and the frames that subscribers receive.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;

use fanfare::model::Stamp;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::nodes::{NODES, Nodes};
use crate::recording::{Log, StoredItem};
use crate::socket::{Socket, request};
use crate::{SOON, is_kept};

/// The text of a message or a change, as a node gives it.
type Text = fn(&Value) -> String;
/// Channel and text of an item: the data of a message, or the action and client id of a presence change.
pub(crate) type ReceivedItem = (String, String);

/// A message or a presence change that a node has acknowledged.
#[derive(Debug, Clone)]
pub(crate) struct AckedItem {
    pub(crate) node: usize,
    pub(crate) channel: String,
    pub(crate) text: String,
    /// Incarnation and sequence, if the answer has them.
    pub(crate) stamp: Option<Stamp>,
}

/// All that the nodes have acknowledged in a test.
#[derive(Debug, Default)]
pub(crate) struct AckedItems {
    pub(crate) messages: Vec<AckedItem>,
    pub(crate) changes: Vec<AckedItem>,
}

impl AckedItems {
    /// Records a message whose data is this text.
    pub(crate) fn message(&mut self, node: usize, channel: &str, data: &str, stamp: Option<Stamp>) {
        let (channel, text) = (channel.to_owned(), json!(data).to_string());
        self.messages.push(AckedItem { node, channel, text, stamp });
    }

    pub(crate) fn change(&mut self, node: usize, channel: &str, text: &str) {
        let (channel, text) = (channel.to_owned(), text.to_owned());
        self.changes.push(AckedItem { node, channel, text, stamp: None });
    }

    /// Expected items of a channel, sorted.
    pub(crate) fn expected_on(&self, channel: &str) -> Vec<ReceivedItem> {
        let all = self.messages.iter().chain(&self.changes).filter(|one| one.channel == channel);
        let mut received: Vec<_> = all.map(|one| (one.channel.clone(), one.text.clone())).collect();
        received.sort();
        received
    }

    /// Asserts that each item was to be stored once, at its origin, and that nothing else was.
    pub(crate) fn assert_stored_once(&self, log: &Log) {
        assert_once(log, &log.messages, &self.messages);
        assert_once(log, &log.changes, &self.changes);
        assert!(log.ids.is_empty(), "who published remembers them for all: {:?}", log.ids);
    }

    /// Asserts that every node reads the same from the store: each message once, if the channel keeps history.
    pub(crate) async fn assert_read_once(&self, nodes: &Nodes, channel: &str) {
        let messages = ("history", "messages", data_of as Text, &self.messages);
        let changes = ("presence/history", "events", change_of as Text, &self.changes);
        for (path, name, text, acknowledged) in [messages, changes] {
            let on_channel = acknowledged.iter().filter(|one| one.channel == channel && is_kept(channel));
            let mut expected: Vec<_> = on_channel.map(|one| one.text.clone()).collect();
            expected.sort();
            for node in 0..NODES {
                let path = format!("GET /api/channels/{channel}/{path}?limit=1000");
                let page = request(nodes.addr(node), &path, "").await;
                let mut read: Vec<_> = page[name].as_array().expect("a list").iter().map(text).collect();
                read.sort();
                assert_eq!(read, expected, "{path} of node {node}");
            }
        }
    }
}

fn assert_once(log: &Log, recorded: &[StoredItem], acknowledged: &[AckedItem]) {
    let (mut stored, mut last) = (HashMap::new(), HashMap::new());
    for one in recorded {
        assert_eq!(
            log.incarnations.get(&one.stamp.incarnation),
            Some(&one.node),
            "it is of this node: {one:?}"
        );
        assert_eq!(one.owner, one.stamp.incarnation, "it is its own: {one:?}");
        assert_eq!(one.is_kept, is_kept(&one.channel), "{one:?}");
        let before = last.insert((one.node, &one.channel), one.stamp.sequence);
        assert!(before < Some(one.stamp.sequence), "numbers rise, {before:?} was before {one:?}");
        let before = stored.insert((&one.channel, &one.text), one);
        assert!(before.is_none(), "stored twice: {before:?} and {one:?}");
    }
    for one in acknowledged {
        let found = stored.remove(&(&one.channel, &one.text));
        let found = found.unwrap_or_else(|| unreachable!("acknowledged and not stored: {one:?}"));
        assert_eq!(found.node, one.node, "{one:?} and {found:?}");
        assert_eq!(found.stamp, one.stamp.unwrap_or(found.stamp), "{one:?} and {found:?}");
    }
    assert!(stored.is_empty(), "stored, and nobody was owed it: {:?}", stored.values());
}

/// A client of one node, which publishes over a socket and over HTTP.
pub(crate) struct Publisher {
    pub(crate) node: usize,
    addr: SocketAddr,
    pub(crate) socket: Socket,
}

impl Publisher {
    pub(crate) async fn on_each(nodes: &Nodes) -> Vec<Self> {
        let on = async |node| {
            let addr = nodes.addr(node);
            Self { node, addr, socket: Socket::open(addr, "").await }
        };
        join_all((0..NODES).map(on)).await
    }

    /// Publishes all data in one request over the socket.
    pub(crate) async fn publish(&mut self, acknowledged: &mut AckedItems, channel: &str, data: &[String]) {
        let stamps = self.socket.publish(channel, &messages(data)).await;
        assert_eq!(stamps.len(), data.len());
        for (data, stamp) in data.iter().zip(stamps) {
            acknowledged.message(self.node, channel, data, Some(stamp));
        }
    }

    /// Publishes each data in a request of its own; all are sent before the first is answered.
    pub(crate) async fn publish_each(
        &mut self,
        acknowledged: &mut AckedItems,
        channel: &str,
        data: &[String],
    ) {
        let mut ids = Vec::new();
        for one in messages(data) {
            ids.push(self.socket.start_publish(channel, &[one]).await);
        }
        for (data, id) in data.iter().zip(ids) {
            let [stamp] = self.socket.published(&id).await[..] else {
                unreachable!("one message, one stamp")
            };
            acknowledged.message(self.node, channel, data, Some(stamp));
        }
    }

    /// Publishes all data in one request over HTTP, to each of these channels.
    pub(crate) async fn post(&self, acknowledged: &mut AckedItems, channels: &[&str], data: &[String]) {
        match channels {
            [channel] => self.post_one(channel, &messages(data)).await,
            channels => {
                let body = json!({"channels": channels, "messages": messages(data)}).to_string();
                let answer = request(self.addr, "POST /api/publish", &body).await;
                let results = answer["results"].as_array().expect("results");
                assert!(results.iter().all(|result| result["published"] == true), "{answer}");
            }
        }
        for channel in channels {
            data.iter().for_each(|data| acknowledged.message(self.node, channel, data, None));
        }
    }

    /// Publishes to one channel over HTTP, without recording it.
    pub(crate) async fn post_one(&self, channel: &str, messages: &[Value]) {
        let path = format!("POST /api/channels/{channel}/publish");
        let answer = request(self.addr, &path, &json!(messages).to_string()).await;
        assert_eq!(answer["published"], true, "{answer}");
    }
}

fn messages(data: &[String]) -> Vec<Value> {
    data.iter().map(|data| json!({"data": data})).collect()
}

/// A client that is attached to some channels on one node.
pub(crate) struct Subscriber {
    pub(crate) socket: Socket,
    pub(crate) received: Vec<ReceivedItem>,
}

impl Subscriber {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket, received: Vec::new() }
    }

    pub(crate) async fn on_each(nodes: &Nodes, channels: &[&str]) -> Vec<Self> {
        let mut subscribers = Vec::new();
        for mut socket in nodes.sockets().await {
            for channel in channels {
                socket.attach(channel, &json!({})).await;
            }
            subscribers.push(Self::new(socket));
        }
        subscribers
    }

    /// Reads until all of these have been received; gives the position of the last frame.
    pub(crate) async fn receive_all(&mut self, expected: impl IntoIterator<Item = ReceivedItem>) -> Value {
        let mut missing: HashSet<ReceivedItem> = expected.into_iter().collect();
        missing.retain(|one| !self.received.contains(one));
        let mut position = Value::Null;
        while !missing.is_empty() {
            let frame = self.socket.next_within(SOON).await;
            let frame = frame.unwrap_or_else(|| unreachable!("waited in vain for {missing:?}"));
            let received = received_in(&frame);
            if !received.is_empty() {
                position = frame["serial"].clone();
            }
            missing.retain(|one| !received.contains(one));
            self.received.extend(received);
        }
        position
    }
}

/// Asserts that every subscriber of the channel receives each expected item once. Then each node publishes once more,
/// and a duplicate would come before that.
pub(crate) async fn assert_received_once(
    nodes: &Nodes,
    subscribers: &mut [Subscriber],
    acknowledged: &mut AckedItems,
    channel: &str,
) {
    let so_far = acknowledged.expected_on(channel);
    for subscriber in &mut *subscribers {
        subscriber.receive_all(so_far.iter().cloned()).await;
    }
    let last = format!("last after {}", so_far.len());
    for mut publisher in Publisher::on_each(nodes).await {
        let data = format!("{last} of node {}", publisher.node);
        publisher.publish(acknowledged, channel, &[data]).await;
    }
    let expected = acknowledged.expected_on(channel);
    for (place, subscriber) in subscribers.iter_mut().enumerate() {
        subscriber.receive_all(expected.iter().cloned()).await;
        let on_channel = subscriber.received.iter().filter(|(of, _)| of == channel);
        let mut received: Vec<_> = on_channel.cloned().collect();
        received.sort();
        assert_eq!(received, expected, "of subscriber {place}");
    }
}

fn received_in(frame: &Value) -> Vec<ReceivedItem> {
    let (name, text): (_, Text) = match frame["op"].as_u64() {
        Some(12) => ("presence", change_of),
        Some(13) => ("messages", data_of),
        _ => return Vec::new(),
    };
    let channel = frame["channel"].as_str().expect("a channel");
    frame[name].as_array().expect("a list").iter().map(|one| (channel.to_owned(), text(one))).collect()
}

fn data_of(message: &Value) -> String {
    message["data"].to_string()
}

fn change_of(event: &Value) -> String {
    let part = |name: &str| event[name].as_str().unwrap_or_default().to_owned();
    format!("{} {} {}", part("action"), part("clientId"), event["data"])
}
