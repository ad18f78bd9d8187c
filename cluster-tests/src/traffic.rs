//! Publishers on several nodes who number what they say, and subscribers who notice what is missing, twice or out of order.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::cluster::Cluster;
use crate::raw::{FIN, TEXT};
use crate::socket::Ended;
use crate::{Node, SOON, Socket, wait_until};

const CHANNELS: usize = 3;
const PUBLISHERS_MAX: u64 = 8;
const EVERY: Duration = Duration::from_millis(10);
/// From a request to its answer: what a node may wait for others, and what a busy machine adds to it.
const ANSWER_MAX: Duration = Duration::from_secs(8);

/// Of each publisher and channel.
pub type Numbers = HashMap<(u64, String), u64>;

pub fn channel(number: usize) -> String {
    format!("room:{number}")
}

pub fn channels() -> impl Iterator<Item = String> {
    (0..CHANNELS).map(channel)
}

/// Those who publish, until they are told to end or their node is gone.
pub struct Publishers {
    end: watch::Sender<bool>,
    running: JoinSet<Numbers>,
    count: u64,
    may_be_late: bool,
}

impl Publishers {
    pub fn none() -> Self {
        Self { end: watch::channel(false).0, running: JoinSet::new(), count: 0, may_be_late: false }
    }

    /// Those who come from here on may be told that their node did not know the outcome in time.
    pub fn patient(self) -> Self {
        Self { may_be_late: true, ..self }
    }

    /// One more, on this node.
    pub async fn add(&mut self, node: &Node) {
        assert!(self.count < PUBLISHERS_MAX, "so many are known to subscribers");
        let socket = Socket::open(node, "").await;
        self.running.spawn(publish(self.count, socket, self.end.subscribe(), self.may_be_late));
        self.count += 1;
    }

    pub async fn on(nodes: &[Node]) -> Self {
        let mut publishers = Self::none();
        for node in nodes {
            publishers.add(node).await;
        }
        publishers
    }

    /// Ends them all. Gives how many messages of each were acknowledged; these and at most one more were published.
    pub async fn end(mut self) -> Numbers {
        self.end.send(true).ok();
        let mut acknowledged = Numbers::new();
        while let Some(ended) = self.running.join_next().await {
            acknowledged.extend(ended.expect("a publisher does not fail"));
        }
        acknowledged
    }
}

async fn publish(from: u64, mut socket: Socket, end: watch::Receiver<bool>, may_be_late: bool) -> Numbers {
    let mut acknowledged: Numbers = channels().map(|channel| ((from, channel), 0)).collect();
    let mut numbers = acknowledged.clone();
    while !*end.borrow() {
        for (of, number) in &mut numbers {
            let begun = Instant::now();
            // All before it from the third number on were not acknowledged.
            let data = [from, *number, acknowledged[of]];
            let message = json!({"op": 13, "id": "p", "channel": of.1, "data": data});
            if !socket.raw().send(FIN | TEXT, message.to_string().as_bytes()).await {
                return acknowledged;
            }
            let ack = loop {
                match socket.next_within(ANSWER_MAX).await {
                    Ok(frame) if frame["id"] == "p" => break frame,
                    Ok(_) => {}
                    Err(Ended::Silence) => {
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
            }
        }
        sleep(EVERY).await;
    }
    acknowledged
}

/// What a subscriber has heard. Whatever a channel's publisher says comes in order and once, and what does not come is told.
#[derive(Debug, Clone, Default)]
pub struct Heard {
    /// The number that comes next.
    next: Numbers,
    /// Of whom it was told, since the last message, that some may be missing.
    told: HashSet<(u64, String)>,
    /// How often it was told, by channel.
    losses: HashMap<String, u64>,
    /// Its position, by channel.
    serials: HashMap<String, Value>,
    missing: u64,
}

impl Heard {
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
            let told = self.told.remove(&of);
            let known = self.next.insert(of, part(1) + 1);
            let next = known.unwrap_or_default();
            assert!(part(1) >= next, "{message} came twice or late on {channel}, {next} was next");
            let is_all = part(1) == next || part(2) <= next;
            assert!(told || is_all, "silent gap: {message} on {channel}, {next} was next");
            self.missing += known.map_or(0, |next| part(1) - next);
        }
        self.serials.insert(channel, frame["serial"].clone());
    }

    /// Who is not resumed begins anew: what it has had may come again.
    fn begin(&mut self, channel: &str, attached: &Value, is_back: bool) {
        self.serials.insert(channel.to_owned(), attached["serial"].clone());
        if attached["resumed"] == false {
            *self.losses.entry(channel.to_owned()).or_default() += u64::from(is_back);
            self.next.retain(|(_, of), _| of != channel);
            self.excuse(channel);
        }
    }

    /// What comes next of the channel may be any number.
    fn excuse(&mut self, channel: &str) {
        self.told.extend((0..PUBLISHERS_MAX).map(|from| (from, channel.to_owned())));
    }

    /// How often it was told that messages may be missing, over all channels.
    pub fn losses(&self) -> u64 {
        self.losses.values().sum()
    }

    /// Messages that it was told may be missing, and that were.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Of what was acknowledged, it has the last or was told that something may be missing.
    pub fn has_or_misses(&self, acknowledged: &Numbers) -> bool {
        let is_fine = |of: &(u64, String), count| {
            self.told.contains(of) || self.next.get(of).copied().unwrap_or_default() >= count
        };
        acknowledged.iter().all(|(of, count)| is_fine(of, *count))
    }

    /// Whether it has the last of what was acknowledged.
    pub fn has(&self, acknowledged: &Numbers) -> bool {
        acknowledged.iter().all(|(of, count)| self.next.get(of).copied().unwrap_or_default() >= *count)
    }
}

/// A client that is attached to all channels and reads for itself.
pub struct Subscriber {
    pub name: String,
    heard: watch::Receiver<Heard>,
    end: watch::Sender<bool>,
    reading: JoinSet<Heard>,
}

impl Subscriber {
    pub async fn on(node: &Node, name: &str) -> Self {
        Self::after(node, name, Heard::default()).await
    }

    /// One on each of these nodes.
    pub async fn on_each(nodes: &[Node], name: &str) -> Vec<Self> {
        let mut subscribers = Vec::new();
        for node in nodes {
            subscribers.push(Self::on(node, name).await);
        }
        subscribers
    }

    /// One that was elsewhere before, and has heard this.
    pub async fn after(node: &Node, name: &str, mut heard: Heard) -> Self {
        let mut socket = Socket::open(node, "").await;
        for channel in channels() {
            let mut attach = json!({"op": 8, "channel": channel});
            if let Some(serial) = heard.serials.get(&channel) {
                attach["serial"] = serial.clone();
            }
            let is_back = attach["serial"] != Value::Null;
            let attached = socket.ask(attach).await;
            assert_eq!(attached["op"], 9, "{attached}");
            heard.begin(&channel, &attached, is_back);
        }
        let (tell, told) = watch::channel(heard.clone());
        let (end, ended) = watch::channel(false);
        let mut reading = JoinSet::new();
        reading.spawn(read(socket, heard, tell, ended));
        Self { name: name.to_owned(), heard: told, end, reading }
    }

    pub fn heard(&self) -> Heard {
        self.heard.borrow().clone()
    }

    /// Goes away.
    pub async fn leave(mut self) -> Heard {
        self.end.send(true).ok();
        self.reading.join_next().await.expect("it reads").expect("a subscriber does not fail")
    }

    /// Waits until it has what was acknowledged, and nothing more is on its way.
    pub async fn settle(self, acknowledged: &Numbers) -> Heard {
        self.settle_after(acknowledged, &Numbers::new()).await
    }

    /// The same, where a run has ended: it has what was acknowledged there, too, or was told that it may be missing.
    pub async fn settle_after(mut self, acknowledged: &Numbers, ended: &Numbers) -> Heard {
        let end = Instant::now() + SOON;
        let has_all = |heard: &Heard| heard.has(acknowledged) && heard.has_or_misses(ended);
        while !has_all(&self.heard.borrow_and_update()) {
            let left = end.saturating_duration_since(Instant::now());
            let came = tokio::time::timeout(left, self.heard.changed()).await;
            if !matches!(came, Ok(Ok(()))) {
                let heard = self.leave().await;
                unreachable!("not all of {acknowledged:?} and {ended:?} has come: {heard:?}");
            }
        }
        self.leave().await
    }
}

/// Waits until each subscriber has heard what was acknowledged, and until whoever comes back has missed nothing again; the nodes must
/// be well.
pub async fn end_well(cluster: &mut Cluster, acknowledged: &Numbers, subscribers: Vec<Subscriber>) {
    end_well_after(cluster, acknowledged, &Numbers::new(), subscribers).await;
    for node in cluster.nodes() {
        assert_eq!(node.metric("fanfare_runs_begun_anew_total").await, 0.0, "who ran all the time goes on");
    }
}

/// The same, where runs have ended with what they had acknowledged.
pub async fn end_well_after(
    cluster: &mut Cluster,
    acknowledged: &Numbers,
    ended: &Numbers,
    subscribers: Vec<Subscriber>,
) {
    let mut last = Heard::default();
    for subscriber in subscribers {
        let (name, heard) = (subscriber.name.clone(), subscriber.settle_after(acknowledged, ended).await);
        println!("{name}: told {} times, {} missing", heard.losses(), heard.missing());
        last = heard;
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
    mut heard: Heard,
    tell: watch::Sender<Heard>,
    mut ended: watch::Receiver<bool>,
) -> Heard {
    loop {
        let frame = tokio::select! {
            _ = ended.changed() => return heard,
            frame = socket.next_within(SOON) => frame,
        };
        match frame {
            Ok(frame) => {
                heard.take(&frame);
                tell.send_replace(heard.clone());
            }
            Err(Ended::Silence) => {}
            Err(_) => return heard,
        }
    }
}
