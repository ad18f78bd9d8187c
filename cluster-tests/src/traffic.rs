//! Publishers on several nodes that number their messages, and subscribers that check for missing, duplicate and
//! reordered messages.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::raw::{FIN, TEXT};
use crate::socket::SocketEnd;
use crate::wait::until_each_grows;
use crate::{Node, SOON, Socket, wait_until};

const CHANNELS: usize = 3;
const PUBLISHERS_MAX: u64 = 8;
const EVERY: Duration = Duration::from_millis(10);
/// Greatest time from a request to its answer: a node's wait for its peers, and some more on a busy machine.
const ANSWER_MAX: Duration = Duration::from_secs(8);

/// Acks of each publisher after which a cluster is under load: thirty in each channel.
pub const LOAD: u64 = 90;

/// Number of messages, by publisher and channel.
pub type Numbers = HashMap<(u64, String), u64>;

pub fn channel(number: usize) -> String {
    format!("room:{number}")
}

pub fn channels() -> impl Iterator<Item = String> {
    (0..CHANNELS).map(channel)
}

/// Clients that publish until they are stopped or their node is gone.
pub struct Publishers {
    end: watch::Sender<bool>,
    running: JoinSet<Numbers>,
    /// Number of acks of each publisher.
    acked: Vec<watch::Receiver<u64>>,
    count: u64,
    may_be_late: bool,
}

impl Publishers {
    pub fn none() -> Self {
        Self {
            end: watch::channel(false).0,
            running: JoinSet::new(),
            acked: Vec::new(),
            count: 0,
            may_be_late: false,
        }
    }

    /// Lets publishers that are added from here on accept the answer that the outcome is unknown.
    pub fn patient(self) -> Self {
        Self { may_be_late: true, ..self }
    }

    /// Adds a publisher on this node.
    pub async fn add(&mut self, node: &Node) {
        assert!(self.count < PUBLISHERS_MAX, "so many are known to subscribers");
        let socket = Socket::open(node, "").await;
        let (acks, acked) = watch::channel(0);
        self.acked.push(acked);
        self.running.spawn(publish(self.count, socket, self.end.subscribe(), self.may_be_late, acks));
        self.count += 1;
    }

    pub async fn on(nodes: &[Node]) -> Self {
        let mut publishers = Self::none();
        for node in nodes {
            publishers.add(node).await;
        }
        publishers
    }

    /// Waits until each publisher has got `count` more acks. One whose node is gone has ended, and is not waited for.
    pub async fn until_acked(&self, count: u64) {
        until_each_grows(3 * SOON, &self.acked, count).await;
    }

    /// Stops all publishers. Gives the number of acknowledged messages of each; at most one more was published.
    pub async fn end(mut self) -> Numbers {
        self.end.send(true).ok();
        let mut acknowledged = Numbers::new();
        while let Some(ended) = self.running.join_next().await {
            acknowledged.extend(ended.expect("a publisher does not fail"));
        }
        acknowledged
    }
}

async fn publish(
    from: u64,
    mut socket: Socket,
    end: watch::Receiver<bool>,
    may_be_late: bool,
    acks: watch::Sender<u64>,
) -> Numbers {
    let mut acknowledged: Numbers = channels().map(|channel| ((from, channel), 0)).collect();
    let mut numbers = acknowledged.clone();
    while !*end.borrow() {
        for (of, number) in &mut numbers {
            let begun = Instant::now();
            // Publisher, number of the message, and number of acknowledged messages: those between the two were not
            // acknowledged.
            let data = [from, *number, acknowledged[of]];
            let message = json!({"op": 13, "id": "p", "channel": of.1, "data": data});
            if !socket.raw().send(FIN | TEXT, message.to_string().as_bytes()).await {
                return acknowledged;
            }
            let ack = loop {
                match socket.next_within(ANSWER_MAX).await {
                    Ok(frame) if frame["id"] == "p" => break frame,
                    Ok(_) => {}
                    Err(SocketEnd::Silence) => {
                        unreachable!("publisher {from} was not answered within {ANSWER_MAX:?}")
                    }
                    Err(_) => return acknowledged,
                }
            };
            assert!(ack["op"] == 1 || may_be_late && ack["code"] == 50003, "{ack}");
            assert!(begun.elapsed() <= ANSWER_MAX, "an ack took {:?}", begun.elapsed());
            *number += 1;
            if ack["op"] == 1 {
                acknowledged.insert(of.clone(), *number);
                acks.send_modify(|count| *count += 1);
            }
        }
        sleep(EVERY).await;
    }
    acknowledged
}

/// Messages that a subscriber has received. Those of a publisher on a channel must come in order and once,
/// and missing ones must be reported as a loss.
#[derive(Debug, Clone, Default)]
pub struct ReceivedMessages {
    /// Next number.
    next: Numbers,
    /// Publishers and channels of which messages may be missing, as reported since their last message.
    excused: HashSet<(u64, String)>,
    /// Number of reported losses, by channel.
    losses: HashMap<String, u64>,
    /// Latest serial, by channel.
    serials: HashMap<String, Value>,
    missing: u64,
}

impl ReceivedMessages {
    pub fn take(&mut self, frame: &Value) {
        let channel = frame["channel"].as_str().unwrap_or_default().to_owned();
        if frame["op"] == 9 {
            self.serials.insert(channel.clone(), frame["serial"].clone());
            if frame["resumed"] == false {
                *self.losses.entry(channel.clone()).or_default() += 1;
                self.excuse(&channel);
            }
        }
        if frame["op"] != 13 {
            return;
        }
        for message in frame["messages"].as_array().expect("a message frame") {
            let part = |at: usize| message["data"][at].as_u64().expect("a number");
            let of = (part(0), channel.clone());
            let reported = self.excused.remove(&of);
            let known = self.next.insert(of, part(1) + 1);
            let next = known.unwrap_or_default();
            assert!(part(1) >= next, "{message} came twice or late on {channel}, {next} was next");
            let is_all = part(1) == next || part(2) <= next;
            assert!(reported || is_all, "silent gap: {message} on {channel}, {next} was next");
            self.missing += known.map_or(0, |next| part(1) - next);
        }
        self.serials.insert(channel, frame["serial"].clone());
    }

    /// Notes an attach. Without a resume any number may come next, and earlier messages may come again.
    fn begin(&mut self, channel: &str, attached: &Value, is_back: bool) {
        self.serials.insert(channel.to_owned(), attached["serial"].clone());
        if attached["resumed"] == false {
            *self.losses.entry(channel.to_owned()).or_default() += u64::from(is_back);
            self.next.retain(|(_, of), _| of != channel);
            self.excuse(channel);
        }
    }

    /// Lets any number come next in the channel.
    fn excuse(&mut self, channel: &str) {
        self.excused.extend((0..PUBLISHERS_MAX).map(|from| (from, channel.to_owned())));
    }

    /// Number of reported losses, over all channels.
    pub fn losses(&self) -> u64 {
        self.losses.values().sum()
    }

    /// Number of messages that were missing after a reported loss.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Tells whether the subscriber has the last of the acknowledged messages, or was told that some may be
    /// missing.
    pub fn has_or_may_miss(&self, acknowledged: &Numbers) -> bool {
        let is_fine = |of: &(u64, String), count| {
            self.excused.contains(of) || self.next.get(of).copied().unwrap_or_default() >= count
        };
        acknowledged.iter().all(|(of, count)| is_fine(of, *count))
    }

    /// Whether it has the last of the acknowledged messages.
    pub fn has_all(&self, acknowledged: &Numbers) -> bool {
        acknowledged.iter().all(|(of, count)| self.next.get(of).copied().unwrap_or_default() >= *count)
    }
}

/// A client that is attached to all channels and reads for itself.
pub struct Subscriber {
    pub name: String,
    received: watch::Receiver<ReceivedMessages>,
    end: watch::Sender<bool>,
    reading: JoinSet<ReceivedMessages>,
}

impl Subscriber {
    pub async fn on(node: &Node, name: &str) -> Self {
        Self::after(node, name, ReceivedMessages::default()).await
    }

    /// Starts a subscriber on each of these nodes.
    pub async fn on_each(nodes: &[Node], name: &str) -> Vec<Self> {
        let mut subscribers = Vec::new();
        for node in nodes {
            subscribers.push(Self::on(node, name).await);
        }
        subscribers
    }

    /// Starts a subscriber that was on another node before, with the messages that it received there.
    pub async fn after(node: &Node, name: &str, mut received: ReceivedMessages) -> Self {
        let mut socket = Socket::open(node, "").await;
        for channel in channels() {
            let mut attach = json!({"op": 8, "channel": channel});
            if let Some(serial) = received.serials.get(&channel) {
                attach["serial"] = serial.clone();
            }
            let is_back = attach["serial"] != Value::Null;
            let attached = socket.ask(attach).await;
            assert_eq!(attached["op"], 9, "{attached}");
            received.begin(&channel, &attached, is_back);
        }
        let (report, reported) = watch::channel(received.clone());
        let (end, ended) = watch::channel(false);
        let mut reading = JoinSet::new();
        reading.spawn(read(socket, received, report, ended));
        Self { name: name.to_owned(), received: reported, end, reading }
    }

    pub fn received(&self) -> ReceivedMessages {
        self.received.borrow().clone()
    }

    /// Stops the subscriber; gives the messages that it received.
    pub async fn leave(mut self) -> ReceivedMessages {
        self.end.send(true).ok();
        self.reading.join_next().await.expect("it reads").expect("a subscriber does not fail")
    }

    /// Waits until the subscriber has all acknowledged messages, and stops it.
    pub async fn settle(self, acknowledged: &Numbers) -> ReceivedMessages {
        self.settle_after(acknowledged, &Numbers::new()).await
    }

    /// Waits as [`Subscriber::settle`] does. The messages in `ended`, of incarnations that have ended, must also be
    /// received or reported as a loss.
    pub async fn settle_after(mut self, acknowledged: &Numbers, ended: &Numbers) -> ReceivedMessages {
        let end = Instant::now() + SOON;
        let has_all =
            |received: &ReceivedMessages| received.has_all(acknowledged) && received.has_or_may_miss(ended);
        while !has_all(&self.received.borrow_and_update()) {
            let left = end.saturating_duration_since(Instant::now());
            let came = tokio::time::timeout(left, self.received.changed()).await;
            if !matches!(came, Ok(Ok(()))) {
                let received = self.leave().await;
                unreachable!("not all of {acknowledged:?} and {ended:?} has come: {received:?}");
            }
        }
        self.leave().await
    }
}

/// Waits until each subscriber has all acknowledged messages, and until a resuming client is resumed on every node.
/// Asserts that the nodes are well.
pub async fn assert_converged(cluster: &mut Cluster, acknowledged: &Numbers, subscribers: Vec<Subscriber>) {
    assert_converged_with_losses(cluster, acknowledged, &Numbers::new(), subscribers).await;
    for node in cluster.nodes() {
        assert_eq!(node.metric("fanfare_runs_begun_anew_total").await, 0.0, "who ran all the time goes on");
    }
}

/// Waits as [`assert_converged`] does, with the messages in `ended` of incarnations that have ended.
pub async fn assert_converged_with_losses(
    cluster: &mut Cluster,
    acknowledged: &Numbers,
    ended: &Numbers,
    subscribers: Vec<Subscriber>,
) {
    let mut last = ReceivedMessages::default();
    for subscriber in subscribers {
        let (name, received) = (subscriber.name.clone(), subscriber.settle_after(acknowledged, ended).await);
        println!("{name}: told {} times, {} missing", received.losses(), received.missing());
        last = received;
    }
    for node in cluster.nodes() {
        wait_until(SOON, "who comes back to be resumed", async || {
            let losses = last.losses();
            last = Subscriber::after(node, "back", last.clone()).await.leave().await;
            last.losses() == losses
        })
        .await;
    }
    for node in cluster.nodes() {
        node.assert_well().await;
    }
}

async fn read(
    mut socket: Socket,
    mut received: ReceivedMessages,
    report: watch::Sender<ReceivedMessages>,
    mut ended: watch::Receiver<bool>,
) -> ReceivedMessages {
    loop {
        let frame = tokio::select! {
            _ = ended.changed() => return received,
            frame = socket.next_within(SOON) => frame,
        };
        match frame {
            Ok(frame) => {
                received.take(&frame);
                report.send_replace(received.clone());
            }
            Err(SocketEnd::Silence) => {}
            Err(_) => return received,
        }
    }
}
