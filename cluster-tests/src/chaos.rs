//! Faults in a random order under load, and two invariants. Each subscriber receives each acknowledged message in order, or a
//! `resumed: false`. The history holds each acknowledged message once.
//!
//! Each channel has one publisher. It publishes a number when a node has acknowledged the number before, and changes the node for that
//! if it must. A subscriber that receives a number without the number before therefore lacks an acknowledged message.

mod channel_sequence;
mod subscriber;

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::Cluster;
use crate::socket::SocketEnd;
use crate::{Network, Node, SOON, Socket, history};
pub use channel_sequence::ChannelSequence;
use subscriber::Subscriber;

const CHANNELS: usize = 12;
const PUBLISHERS: usize = 6;
const SUBSCRIBERS: usize = 18;
/// A publisher without an answer by then tries again at another node, under the same id.
const ANSWER_MAX: Duration = Duration::from_secs(3);
const EVERY: Duration = Duration::from_millis(20);
const AGAIN: Duration = Duration::from_millis(50);

/// A fault of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// SIGKILL, then a start.
    Kill,
    /// SIGTERM, then a start.
    Terminate,
    /// SIGSTOP for 2.5 to 6 s, long enough for peers to declare the node down.
    Stop,
    /// SIGSTOP for at most a second, too short for that.
    Blink,
    /// A cut of all links to the other nodes. The nodes need hosts of their own.
    Cut,
}

/// The faults of a course, its length and its seed. The same seed chooses the same faults; the machine decides their timing.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub time: Duration,
    pub faults: Vec<Fault>,
}

impl Plan {
    /// Reads `FANFARE_CHAOS_SEED` (default 1) and `FANFARE_CHAOS_SECONDS` (default `seconds`).
    pub fn of(faults: &[Fault], seconds: u64) -> Self {
        let number = |name: &str| Some(std::env::var(name).ok()?.parse::<u64>().expect("a number"));
        let time = Duration::from_secs(number("FANFARE_CHAOS_SECONDS").unwrap_or(seconds));
        Self { seed: number("FANFARE_CHAOS_SEED").unwrap_or(1), time, faults: faults.to_vec() }
    }
}

/// Counts of one course.
#[derive(Debug, Default)]
pub struct Report {
    pub published: u64,
    pub attaches: u64,
    /// `resumed: false` on a resume, or while attached.
    pub losses: u64,
    /// Messages that subscribers lacked after a `resumed: false`.
    pub missing: u64,
    /// Messages that came once more after a `resumed: false`, and the age of the oldest.
    pub again: u64,
    pub oldest: Duration,
}

/// A generator of pseudorandom numbers (SplitMix64).
#[derive(Debug, Clone)]
struct Dice(u64);

impl Dice {
    fn below(&mut self, count: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % count
    }

    fn between(&mut self, from: Duration, to: Duration) -> Duration {
        let span = u64::try_from((to - from).as_millis()).expect("a short time");
        from + Duration::from_millis(self.below(span))
    }
}

/// State that all clients share.
struct Shared {
    key: String,
    addresses: Mutex<Vec<SocketAddr>>,
    /// Messages with an unanswered attempt, by channel and number. Subscribers may receive them twice under the same id.
    in_doubt: Mutex<HashSet<(String, u64)>>,
    /// Acknowledged messages of each channel.
    acknowledged: Mutex<HashMap<String, u64>>,
    begun: Instant,
}

impl Shared {
    /// A connection to a random node; `None` if it does not answer.
    async fn open(&self, dice: &mut Dice) -> Option<Socket> {
        let addr = {
            let addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
            addresses[dice.below(addresses.len() as u64) as usize]
        };
        timeout(ANSWER_MAX, Socket::try_open(addr, "", &self.key)).await.ok().flatten()
    }

    fn is_in_doubt(&self, channel: &str, number: u64) -> bool {
        let in_doubt = self.in_doubt.lock().unwrap_or_else(PoisonError::into_inner);
        in_doubt.contains(&(channel.to_owned(), number))
    }

    fn acknowledged(&self, channel: &str) -> u64 {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner).get(channel).copied().unwrap_or(0)
    }

    fn at(&self) -> String {
        format!("{:.1} s", self.begun.elapsed().as_secs_f64())
    }
}

fn channel(number: usize) -> String {
    format!("chaos:{number}")
}

/// Carries out the plan, and fails the test on a broken invariant. `keeps_history` includes the history.
pub async fn run(
    cluster: &mut Cluster,
    network: Option<&Network>,
    plan: &Plan,
    keeps_history: bool,
) -> Report {
    println!("{plan:?}");
    let addresses = cluster.nodes().iter().map(Node::addr).collect();
    let shared = Arc::new(Shared {
        key: cluster.nodes()[0].key(),
        addresses: Mutex::new(addresses),
        in_doubt: Mutex::default(),
        acknowledged: Mutex::default(),
        begun: Instant::now(),
    });
    let mut dice = Dice(plan.seed);
    let (end, ended) = watch::channel(false);
    let (published, all) = watch::channel(None);
    let mut subscribers = JoinSet::new();
    for number in 0..SUBSCRIBERS {
        let channels = (0..3).map(|step| channel((number + step * 5) % CHANNELS)).collect();
        let dice = Dice(dice.below(u64::MAX));
        let is_cut = number % 2 == 0;
        let subscriber = Subscriber::new(number, channels, dice, is_cut, Arc::clone(&shared));
        subscribers.spawn(subscriber.run(all.clone()));
    }
    let mut publishers = JoinSet::new();
    for number in 0..PUBLISHERS {
        let dice = Dice(dice.below(u64::MAX));
        publishers.spawn(publish(number, dice, Arc::clone(&shared), ended.clone()));
    }
    let until = Instant::now() + plan.time;
    while Instant::now() < until {
        sleep(dice.between(Duration::from_millis(500), Duration::from_secs(2))).await;
        let fault = plan.faults[dice.below(plan.faults.len() as u64) as usize];
        let node = dice.below(cluster.nodes().len() as u64) as usize;
        println!("{} {fault:?} of n{node}", shared.at());
        inject_fault(cluster, network, fault, node, &mut dice).await;
        println!("{} over", shared.at());
        let addresses: Vec<_> = cluster.nodes().iter().map(Node::addr).collect();
        *shared.addresses.lock().unwrap_or_else(PoisonError::into_inner) = addresses;
        cluster.until_linked().await;
    }
    end.send_replace(true);
    let mut counts: Vec<(String, u64)> = Vec::new();
    while let Some(ended) = publishers.join_next().await {
        counts.extend(ended.expect("a publisher does not fail"));
    }
    published.send_replace(Some(counts.clone()));
    let mut report = Report { published: counts.iter().map(|(_, count)| count).sum(), ..Report::default() };
    while let Some(ended) = subscribers.join_next().await {
        let subscriber_counts = ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        report.attaches += subscriber_counts.attaches;
        report.losses += subscriber_counts.losses;
        report.missing += subscriber_counts.missing;
        report.again += subscriber_counts.again;
        report.oldest = report.oldest.max(subscriber_counts.oldest);
    }
    if keeps_history {
        for (channel, count) in &counts {
            assert_stored_once(cluster, channel, *count).await;
        }
    }
    for node in cluster.nodes() {
        node.assert_no_panic();
    }
    println!("{report:?}");
    report
}

async fn inject_fault(
    cluster: &mut Cluster,
    network: Option<&Network>,
    fault: Fault,
    node: usize,
    dice: &mut Dice,
) {
    match fault {
        Fault::Kill | Fault::Terminate => {
            if fault == Fault::Terminate {
                cluster.nodes()[node].stop().await;
            } else {
                cluster.nodes()[node].kill();
            }
            sleep(dice.between(Duration::ZERO, Duration::from_secs(3))).await;
            cluster.restart(node).await;
        }
        Fault::Stop => {
            let node = &cluster.nodes()[node];
            let times = node.metric("fanfare_runs_begun_anew_total").await as u64;
            node.pause();
            sleep(dice.between(Duration::from_millis(2_500), Duration::from_secs(6))).await;
            node.resume_until_restarted(times + 1).await;
        }
        Fault::Blink => {
            let node = &cluster.nodes()[node];
            node.pause();
            sleep(dice.between(Duration::from_millis(300), Duration::from_secs(1))).await;
            node.resume();
        }
        Fault::Cut => {
            let network = network.expect("nodes that are apart");
            let hosts: Vec<_> = cluster.nodes().iter().map(Node::host).collect();
            let (before, after) = hosts.split_at(node);
            let cuts = network.split(&after[..1], &[before, &after[1..]].concat());
            sleep(dice.between(Duration::from_millis(300), Duration::from_secs(6))).await;
            drop(cuts);
        }
    }
}

/// Returns the number of acknowledged messages of each channel.
async fn publish(
    number: usize,
    mut dice: Dice,
    shared: Arc<Shared>,
    end: watch::Receiver<bool>,
) -> Vec<(String, u64)> {
    let own = (0..CHANNELS).filter(|at| at % PUBLISHERS == number);
    let mut counts: Vec<(String, u64)> = own.map(|at| (channel(at), 0)).collect();
    let mut socket = None;
    while !*end.borrow() {
        for (channel, count) in &mut counts {
            let deadline = Instant::now() + 6 * SOON;
            while !publish_one(&mut socket, channel, *count, &mut dice, &shared).await {
                assert!(Instant::now() < deadline, "{channel} {count} is never acknowledged");
                sleep(AGAIN).await;
            }
            *count += 1;
            let mut acknowledged = shared.acknowledged.lock().unwrap_or_else(PoisonError::into_inner);
            acknowledged.insert(channel.clone(), *count);
        }
        sleep(EVERY).await;
    }
    counts
}

/// Returns false if the publisher must try again.
async fn publish_one(
    place: &mut Option<Socket>,
    channel: &str,
    number: u64,
    dice: &mut Dice,
    shared: &Shared,
) -> bool {
    let Some(mut socket) = place.take() else {
        *place = shared.open(dice).await;
        return false;
    };
    let message = json!([{"id": format!("{channel}/{number}"), "data": number}]);
    let request = json!({"op": 13, "id": "p", "channel": channel, "messages": message});
    let mut is_acknowledged = false;
    if socket.try_send(&request).await {
        let until = Instant::now() + ANSWER_MAX;
        loop {
            match socket.next_within(until.saturating_duration_since(Instant::now())).await {
                Ok(answer) if answer["id"] == "p" => {
                    assert!(answer["op"] == 1 || answer["code"] == 50003, "{answer}");
                    is_acknowledged = answer["op"] == 1;
                    break;
                }
                // A draining node still answers the requests that it accepted.
                Ok(_) => {}
                Err(SocketEnd::Silence | SocketEnd::Gone | SocketEnd::Closed(_)) => break,
            }
        }
    }
    if is_acknowledged {
        *place = Some(socket);
    } else {
        let mut in_doubt = shared.in_doubt.lock().unwrap_or_else(PoisonError::into_inner);
        in_doubt.insert((channel.to_owned(), number));
    }
    is_acknowledged
}

async fn assert_stored_once(cluster: &mut Cluster, channel: &str, count: u64) {
    let node = &cluster.nodes()[0];
    let records = history::read_all(node.addr(), &node.key(), channel, "limit=1000&direction=forwards").await;
    let stored: Vec<_> = records.iter().map(|record| record["data"].as_u64().expect("a number")).collect();
    let mut sorted = stored.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..count).collect::<Vec<_>>(), "the history of {channel}");
}
