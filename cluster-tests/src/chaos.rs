//! Faults in a random order under load, and what must hold whatever happens: each message that was acknowledged has come to each
//! subscriber in its order, or the subscriber was told that something may be missing; and it is in the history once.
//!
//! Each channel has one publisher, who publishes a number when the one before is acknowledged, wherever it has to go for that. So whoever
//! hears a number and has not heard the one before lacks something that was acknowledged.

mod subscriber;

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::cluster::Cluster;
use crate::network::Cut;
use crate::socket::Ended;
use crate::{Network, Node, SOON, Socket, history};
use subscriber::Subscriber;

const CHANNELS: usize = 12;
const PUBLISHERS: usize = 6;
const SUBSCRIBERS: usize = 18;
/// An attempt without an answer by then is made again elsewhere, under the same id.
const ANSWER_MAX: Duration = Duration::from_secs(3);
const EVERY: Duration = Duration::from_millis(20);
const AGAIN: Duration = Duration::from_millis(50);

/// What befalls one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It is killed, and started again.
    Kill,
    /// It is asked to leave, and started again.
    Terminate,
    /// It stands still for so long that it is dead.
    Stop,
    /// It stands still for no longer than a second.
    Blink,
    /// It is cut off from the others, on nodes that are apart.
    Cut,
}

/// What is done for how long. The seed decides all that is decided at random; what becomes of it depends on the machine, too.
#[derive(Debug, Clone)]
pub struct Plan {
    pub seed: u64,
    pub time: Duration,
    pub faults: Vec<Fault>,
}

impl Plan {
    /// Of these faults, as the environment has it: `FANFARE_CHAOS_SEED` (1 without it) and `FANFARE_CHAOS_SECONDS`.
    pub fn of(faults: &[Fault], seconds: u64) -> Self {
        let number = |name: &str| Some(std::env::var(name).ok()?.parse::<u64>().expect("a number"));
        let time = Duration::from_secs(number("FANFARE_CHAOS_SECONDS").unwrap_or(seconds));
        Self { seed: number("FANFARE_CHAOS_SEED").unwrap_or(1), time, faults: faults.to_vec() }
    }
}

/// What came of it, beside that all held.
#[derive(Debug, Default)]
pub struct Report {
    pub published: u64,
    pub attaches: u64,
    /// Attaches with a position, and losses told to who was attached.
    pub told: u64,
    /// Messages that were missing where it was told.
    pub missing: u64,
}

/// Random numbers of which the same seed gives the same.
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

/// What all clients know together.
struct Shared {
    key: String,
    addresses: Mutex<Vec<SocketAddr>>,
    /// Messages of which an attempt had no answer, by channel and number: they may come once more under their id.
    unsure: Mutex<HashSet<(String, u64)>>,
    begun: Instant,
}

impl Shared {
    /// None where nobody is, or does not answer.
    async fn open(&self, dice: &mut Dice) -> Option<Socket> {
        let addr = {
            let addresses = self.addresses.lock().unwrap_or_else(PoisonError::into_inner);
            addresses[dice.below(addresses.len() as u64) as usize]
        };
        timeout(ANSWER_MAX, Socket::try_open(addr, "", &self.key)).await.ok().flatten()
    }

    fn is_unsure(&self, channel: &str, number: u64) -> bool {
        let unsure = self.unsure.lock().unwrap_or_else(PoisonError::into_inner);
        unsure.contains(&(channel.to_owned(), number))
    }

    fn at(&self) -> String {
        format!("{:.1} s", self.begun.elapsed().as_secs_f64())
    }
}

fn channel(number: usize) -> String {
    format!("chaos:{number}")
}

/// Carries out the plan and fails the test where something does not hold. With `keeps_history` all must be stored once, too.
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
        unsure: Mutex::default(),
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
        befall(cluster, network, fault, node, &mut dice).await;
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
        let heard = ended.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()));
        report.attaches += heard.attaches;
        report.told += heard.told;
        report.missing += heard.missing;
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

async fn befall(
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
            node.resume_anew(times + 1).await;
        }
        Fault::Blink => {
            let node = &cluster.nodes()[node];
            node.pause();
            sleep(dice.between(Duration::from_millis(300), Duration::from_secs(1))).await;
            node.resume();
        }
        Fault::Cut => {
            let network = network.expect("nodes that are apart");
            let cuts: Vec<Cut> = {
                let (own, others): (Vec<_>, Vec<_>) =
                    cluster.nodes().iter().enumerate().partition(|(at, _)| *at == node);
                let hosts = |nodes: &[(usize, &Node)]| {
                    nodes.iter().map(|(_, node)| node.host().clone()).collect::<Vec<_>>()
                };
                let (own, others) = (hosts(&own), hosts(&others));
                network.split(&own.iter().collect::<Vec<_>>(), &others.iter().collect::<Vec<_>>())
            };
            sleep(dice.between(Duration::from_millis(300), Duration::from_secs(6))).await;
            drop(cuts);
        }
    }
}

/// Gives how many it has published in each of its channels; all of them were acknowledged.
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
        }
        sleep(EVERY).await;
    }
    counts
}

/// False when it is to be tried again, elsewhere.
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
                // It is to go elsewhere, and is answered before.
                Ok(_) => {}
                Err(Ended::Silence | Ended::Gone | Ended::Closed(_)) => break,
            }
        }
    }
    if is_acknowledged {
        *place = Some(socket);
    } else {
        let mut unsure = shared.unsure.lock().unwrap_or_else(PoisonError::into_inner);
        unsure.insert((channel.to_owned(), number));
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
