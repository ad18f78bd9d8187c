//! Clients that reconnect to whatever node they are sent to, and count the messages that are published and received.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::presence::{self, present};
use crate::socket::SocketEnd;
use crate::wait::until_each_grows;
use crate::{SOON, Socket};

const CHANNEL: &str = "room";
const AGAIN: Duration = Duration::from_millis(50);

/// Addresses that clients get in turn, as behind a balancer.
#[derive(Clone)]
pub struct NodeSelector {
    key: Arc<str>,
    addresses: Arc<Mutex<(Vec<SocketAddr>, usize)>>,
    /// Messages that were published twice, since the first socket ended before the ack. Subscribers may get them twice.
    in_doubt: Arc<Mutex<HashSet<(u64, u64)>>>,
}

impl NodeSelector {
    /// Sends clients to each of these addresses in turn.
    pub fn to(addresses: &[SocketAddr], key: &str) -> Self {
        let addresses = Arc::new(Mutex::new((addresses.to_vec(), 0)));
        Self { key: key.into(), addresses, in_doubt: Arc::default() }
    }

    /// Sends clients only to these addresses from now on.
    pub fn turn_to(&self, addresses: &[SocketAddr]) {
        self.addresses.lock().unwrap_or_else(PoisonError::into_inner).0 = addresses.to_vec();
    }

    fn next(&self) -> SocketAddr {
        let mut addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
        addresses.1 += 1;
        addresses.0[addresses.1 % addresses.0.len()]
    }

    async fn open(&self) -> Socket {
        self.open_with("").await
    }

    async fn open_with(&self, query: &str) -> Socket {
        let end = Instant::now() + SOON;
        loop {
            if let Some(socket) = Socket::try_open(self.next(), query, &self.key).await {
                return socket;
            }
            assert!(Instant::now() < end, "waited in vain for a node to connect to");
            sleep(AGAIN).await;
        }
    }

    fn is_in_doubt(&self, message: (u64, u64)) -> bool {
        self.in_doubt.lock().unwrap_or_else(PoisonError::into_inner).contains(&message)
    }
}

/// A publisher of `[from, number]`, one message after another.
pub struct Publisher {
    selector: NodeSelector,
    socket: Socket,
    from: u64,
    next: u64,
}

impl Publisher {
    pub async fn new(selector: &NodeSelector, from: u64) -> Self {
        Self { selector: selector.clone(), socket: selector.open().await, from, next: 0 }
    }

    /// Gives the publisher's number, and the number that it publishes next.
    pub fn published(&self) -> (u64, u64) {
        (self.from, self.next)
    }

    /// Publishes `count` messages; all are acknowledged when this returns.
    pub async fn publish(&mut self, count: u64) {
        for _ in 0..count {
            while !self.publish_next().await {
                self.socket = self.selector.open().await;
            }
            self.next += 1;
        }
    }

    fn mark_in_doubt(&self) {
        let mut in_doubt = self.selector.in_doubt.lock().unwrap_or_else(PoisonError::into_inner);
        in_doubt.insert((self.from, self.next));
    }

    /// Publishes the next message; false if the publisher must reconnect first.
    async fn publish_next(&mut self) -> bool {
        let id = self.next.to_string();
        let data = json!([self.from, self.next]);
        self.socket.try_send(&json!({"op": 13, "id": id, "channel": CHANNEL, "data": data})).await;
        loop {
            match self.socket.next_within(SOON).await {
                Ok(answer) if answer["id"] == *id && answer["op"] == 1 => return true,
                // A request without an answer before the op 4 was not accepted.
                Ok(goodbye) if goodbye["op"] == 4 => return false,
                // The outcome is unknown: the node may have accepted the message.
                Ok(refused) if refused["id"] == *id && refused["code"] == 50003 => {
                    self.mark_in_doubt();
                    return false;
                }
                Ok(other) if other["id"] == *id => {
                    unreachable!("{} is not published: {other}", self.next)
                }
                Ok(_) => {}
                Err(SocketEnd::Silence) => unreachable!("{} is not answered", self.next),
                Err(SocketEnd::Gone | SocketEnd::Closed(_)) => {
                    self.mark_in_doubt();
                    return false;
                }
            }
        }
    }
}

/// Members that reconnect wherever they are sent.
pub struct Members {
    stop: watch::Sender<bool>,
    running: JoinSet<()>,
}

impl Members {
    /// Enters as `member-0`, `member-1`, … in the channel of a [`Load`].
    pub async fn enter(selector: &NodeSelector, count: usize) -> Self {
        let stop = watch::Sender::new(false);
        let mut running = JoinSet::new();
        for number in 0..count {
            let name = format!("member-{number}");
            let mut socket = selector.open_with(&format!("?clientId={name}")).await;
            present(&mut socket, "enter", CHANNEL, json!({})).await;
            running.spawn(keep_present(selector.clone(), socket, name, stop.subscribe()));
        }
        Self { stop, running }
    }

    /// Ends the members; each has kept its connection id all the time.
    pub async fn end(self) {
        self.stop.send_replace(true);
        self.running.join_all().await;
    }
}

async fn keep_present(selector: NodeSelector, mut socket: Socket, name: String, stop: watch::Receiver<bool>) {
    while !*stop.borrow() {
        match socket.next_within(Duration::from_millis(100)).await {
            Ok(goodbye) if goodbye["op"] == 4 => {}
            Ok(_) | Err(SocketEnd::Silence) => continue,
            Err(SocketEnd::Gone | SocketEnd::Closed(_)) => {}
        }
        let previous = socket.connected["connectionId"].clone();
        let key = socket.connected["connectionKey"].as_str().expect("a key").to_owned();
        drop(socket);
        socket = selector.open_with(&format!("?clientId={name}&resume={key}")).await;
        assert_eq!(socket.connected["connectionId"], previous, "{name} keeps its connection");
    }
}

/// A subscriber of all messages, on changing nodes. Fails the test on a missing or duplicate message, and on a
/// continuity loss.
pub struct Subscriber {
    selector: NodeSelector,
    socket: Option<Socket>,
    serial: Value,
    /// Next number, by publisher.
    next: HashMap<u64, u64>,
    /// Number of its attempts to reconnect.
    pub moves: u64,
    /// Presence events that it received.
    pub seen: Vec<(String, String, Value)>,
    answers: Arc<AtomicU64>,
    /// Answer to the last attach. The next field is the last frame.
    answered: Value,
    last: Value,
}

impl fmt::Debug for Subscriber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { serial, next, moves, answered, last, .. } = self;
        write!(
            f,
            "at {}, {serial} with {next:?}, {moves} moves, came back to {answered}, heard {last}",
            self.node()
        )
    }
}

impl Subscriber {
    pub async fn new(selector: &NodeSelector) -> Self {
        let mut socket = selector.open().await;
        let serial = socket.attach(CHANNEL).await["serial"].clone();
        let (selector, socket, next) = (selector.clone(), Some(socket), HashMap::new());
        let (answers, answered, last) = (Arc::default(), Value::Null, Value::Null);
        Self { selector, socket, serial, next, moves: 0, seen: Vec::new(), answers, answered, last }
    }

    /// Closes the connection, until the next read.
    pub fn leave(&mut self) {
        self.socket = None;
    }

    pub fn node(&self) -> &Value {
        self.socket.as_ref().map_or(&Value::Null, |socket| &socket.connected["nodeId"])
    }

    /// Reads until it has all messages up to these numbers of publishers.
    pub async fn read_to(&mut self, published: &[(u64, u64)]) {
        let end = Instant::now() + 3 * SOON;
        let lacks = |next: &HashMap<u64, u64>| {
            published.iter().any(|(from, count)| next.get(from).copied().unwrap_or(0) < *count)
        };
        while lacks(&self.next) {
            assert!(Instant::now() < end, "waited in vain: {self:?} of {published:?}");
            self.read(SOON).await;
        }
    }

    /// Reads one frame, or reconnects; false if nothing came in this time.
    pub async fn read(&mut self, within: Duration) -> bool {
        let Some(socket) = &mut self.socket else {
            self.reconnect().await;
            return true;
        };
        let received = socket.next_within(within).await;
        if let Ok(frame) = &received {
            self.last.clone_from(frame);
        }
        match received {
            Ok(frame) if frame["op"] == 13 => self.take(&frame),
            Ok(frame) if frame["op"] == 9 => self.take_serial(&frame),
            Ok(frame) if frame["op"] == 4 => self.leave(),
            Ok(frame) if frame["op"] == 12 => self.seen.push(presence::read(&frame)),
            Ok(_) => {}
            Err(SocketEnd::Silence) => return false,
            Err(SocketEnd::Gone | SocketEnd::Closed(_)) => self.leave(),
        }
        true
    }

    async fn reconnect(&mut self) {
        let mut socket = self.selector.open().await;
        let attach = json!({"op": 8, "id": "back", "channel": CHANNEL, "serial": self.serial});
        self.moves += 1;
        if !socket.try_send(&attach).await {
            return;
        }
        loop {
            let received = socket.next_within(SOON).await;
            if let Ok(frame) = &received {
                self.answered.clone_from(frame);
            }
            match received {
                Ok(attached) if attached["id"] == "back" => {
                    assert_eq!(attached["op"], 9, "{attached}");
                    self.socket = Some(socket);
                    self.take_serial(&attached);
                    self.answers.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                Ok(goodbye) if goodbye["op"] == 4 => return,
                Ok(_) => {}
                Err(SocketEnd::Silence) => unreachable!("an attach is not answered"),
                Err(_) => return,
            }
        }
    }

    fn take_serial(&mut self, attached: &Value) {
        assert_ne!(attached["resumed"], false, "it is told of a loss: {attached}, {self:?}");
        self.serial = attached["serial"].clone();
    }

    fn take(&mut self, frame: &Value) {
        for message in frame["messages"].as_array().expect("a message frame") {
            let part = |at: usize| message["data"][at].as_u64().expect("a number");
            let (from, number) = (part(0), part(1));
            let next = self.next.entry(from).or_default();
            if number < *next && self.selector.is_in_doubt((from, number)) {
                continue;
            }
            assert_eq!(number, *next, "of publisher {from}, at {}", self.serial);
            *next = number + 1;
        }
        self.serial = frame["serial"].clone();
    }
}

/// Publishers and subscribers of one selector, which run until [`Load::end`].
pub struct Load {
    stop: watch::Sender<bool>,
    /// Number of messages of each publisher, once all have ended.
    published: watch::Sender<Option<Vec<(u64, u64)>>>,
    publishers: JoinSet<(u64, u64)>,
    subscribers: JoinSet<Subscriber>,
    /// Number of acks of each publisher.
    acked: Vec<watch::Receiver<u64>>,
    answers: Vec<Arc<AtomicU64>>,
}

impl Load {
    /// Starts the load; each publisher waits for `every` between two messages.
    pub async fn begin(
        selector: &NodeSelector,
        publishers: u64,
        subscribers: usize,
        every: Duration,
    ) -> Self {
        let mut load = Self {
            stop: watch::Sender::new(false),
            published: watch::Sender::new(None),
            publishers: JoinSet::new(),
            subscribers: JoinSet::new(),
            acked: Vec::new(),
            answers: Vec::new(),
        };
        for _ in 0..subscribers {
            let subscriber = Subscriber::new(selector).await;
            load.answers.push(Arc::clone(&subscriber.answers));
            load.subscribers.spawn(read_all(subscriber, load.published.subscribe()));
        }
        for from in 0..publishers {
            load.publish_at(selector, from, every).await;
        }
        load
    }

    /// Adds a publisher with a selector of its own.
    pub async fn publish_at(&mut self, selector: &NodeSelector, from: u64, every: Duration) {
        let (mut publisher, stop) = (Publisher::new(selector, from).await, self.stop.subscribe());
        let (acks, acked) = watch::channel(0);
        self.acked.push(acked);
        self.publishers.spawn(async move {
            while !*stop.borrow() {
                publisher.publish(1).await;
                acks.send_modify(|count| *count += 1);
                sleep(every).await;
            }
            publisher.published()
        });
    }

    /// Waits until each publisher has got `count` more acks.
    pub async fn until_acked(&self, count: u64) {
        until_each_grows(3 * SOON, &self.acked, count).await;
    }

    /// Gives the number of answered reconnects of each subscriber.
    pub fn answers(&self) -> Vec<u64> {
        self.answers.iter().map(|answers| answers.load(Ordering::Relaxed)).collect()
    }

    /// Ends the load; gives the subscribers, each of which has received all messages.
    pub async fn end(self) -> Vec<Subscriber> {
        self.stop.send_replace(true);
        let published = self.publishers.join_all().await;
        self.published.send_replace(Some(published));
        self.subscribers.join_all().await
    }
}

/// Reads until the publishers have ended, and all their messages are received.
async fn read_all(
    mut subscriber: Subscriber,
    mut published: watch::Receiver<Option<Vec<(u64, u64)>>>,
) -> Subscriber {
    while published.borrow_and_update().is_none() {
        subscriber.read(Duration::from_millis(100)).await;
    }
    let published = published.borrow().clone().unwrap_or_default();
    subscriber.read_to(&published).await;
    subscriber
}
