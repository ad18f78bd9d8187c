//! The sending end of a link, fed in one of two ways: publishes that were encoded before go straight into the queues of
//! the peer streams; or the publish path numbers, encodes and queues each publish and waits for its peer ack.

use std::collections::{HashSet, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use fanfare::cluster::inbound::{Inbound, Peer};
use fanfare::cluster::link::{GrpcPeerLinks, LinkSettings, PeerAck, PeerAddr, PeerItem, PeerLinks};
use fanfare::hub::channel_number;
use fanfare::tasks::Tasks;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use super::End;
use super::origin::Origin;
use super::sink::INCARNATION as SINK;
use crate::Result;
use crate::load::{Cost, Meter};

const WARM_UP: Duration = Duration::from_secs(1);
/// Number of channels: far more than peer streams, so that each stream has as much to carry.
const CHANNELS: usize = 256;
/// Number of publishes that are encoded before and sent again and again.
const ENCODED: usize = 4 * CHANNELS;
/// Number of items from one peer ack that is awaited to the next.
const CHUNK: usize = 512;
/// Greatest size of the unacked items, well within the queue of a peer stream.
const UNDER_WAY_BYTES: usize = 12 * 1024 * 1024;
const PATIENCE: Duration = Duration::from_secs(10);
const GLANCE: Duration = Duration::from_micros(100);

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    pub end: End,
    /// Address of the sink.
    #[arg(long)]
    pub sink: SocketAddr,
    /// Process id of the sink, for its CPU time.
    #[arg(long)]
    pub sink_pid: u32,
    #[arg(long, value_enum)]
    pub fed: FeedMode,
    /// Messages of one publish.
    #[arg(long, default_value_t = 1)]
    pub together: usize,
    /// Size of a message's data.
    #[arg(long, default_value_t = 200)]
    pub bytes: usize,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Empty folder for the files of the source.
    #[arg(long)]
    pub folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FeedMode {
    /// Encoded publishes, straight into the queues.
    Encoded,
    /// Publishes through the publish path.
    Published,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    /// Messages that the sink acked in the measured part, per second.
    pub messages_per_s: f64,
    /// Size of one publish as it is sent.
    pub item_bytes: usize,
    /// Number of all messages that were sent, warm-up included.
    pub sent: u64,
    /// Cost of the sink as `server`, and of this end as `generator`.
    pub cost: Cost,
}

pub fn print(runtime: &Runtime, options: &Options) -> Result<()> {
    println!("{}", serde_json::to_string(&run(runtime, options)?)?);
    Ok(())
}

fn run(runtime: &Runtime, options: &Options) -> Result<Outcome> {
    let _in_runtime = runtime.enter();
    let source = Source::link(runtime, options)?;
    let items = source.encode()?;
    let item_bytes = items.first().map_or(0, |(_, item)| item.bytes());
    let window = UNDER_WAY_BYTES / item_bytes.max(1);
    let feed = |time: Duration| match options.fed {
        FeedMode::Encoded => source.send(&items, window, time),
        FeedMode::Published => source.publish(window, time),
    };
    let warm_up = feed(WARM_UP)?;
    let meter = Meter::start(&[options.sink_pid])?;
    let sent = feed(Duration::from_secs(options.seconds))?;
    let cost = meter.stop()?;
    let messages = |publishes: u64| publishes * options.together as u64;
    let messages_per_s = messages(sent) as f64 / cost.wall_s;
    Ok(Outcome { messages_per_s, item_bytes, sent: messages(ENCODED as u64 + warm_up + sent), cost })
}

/// Forwarded items, each with the number that chooses its peer stream.
type EncodedItems = Vec<(u64, PeerItem)>;

struct Source<'a> {
    runtime: &'a Runtime,
    options: &'a Options,
    origin: Origin,
    feed: Arc<Feed>,
}

impl<'a> Source<'a> {
    /// Connects to the sink, and waits until the link is up.
    fn link(runtime: &'a Runtime, options: &'a Options) -> Result<Self> {
        let tasks = Arc::new(Tasks::new(runtime.handle().clone()));
        let origin = Origin::new(&options.folder, &tasks, CHANNELS, options.bytes)?;
        let own = Peer { node_id: "source".into(), incarnation: origin.hub.incarnation() };
        let inbound = Arc::clone(&origin.routing) as Arc<dyn Inbound>;
        let links = GrpcPeerLinks::new(own, options.end.tls()?, inbound, tasks, LinkSettings::default());
        let feed = Arc::new(Feed {
            links,
            keeps_bytes: options.bytes,
            keeps: AtomicBool::new(false),
            kept: Mutex::default(),
        });
        origin.routing.begin(RecordingLinks(Arc::clone(&feed)));
        let sink = Peer { node_id: "sink".into(), incarnation: SINK };
        origin.routing.set_peers(vec![PeerAddr { peer: sink, addr: options.sink }], vec![SINK]);
        let source = Self { runtime, options, origin, feed };
        wait_until("the link to be up", || source.feed.links.is_up(SINK))?;
        Ok(source)
    }

    /// Publishes `ENCODED` messages, and keeps the items that are forwarded.
    fn encode(&self) -> Result<EncodedItems> {
        self.feed.keeps.store(true, Ordering::SeqCst);
        let acked = Arc::new(AtomicU64::new(0));
        (0..ENCODED).for_each(|nth| self.publish_one(nth, &acked));
        wait_until("the first publishes to be acked", || acked.load(Ordering::Acquire) == ENCODED as u64)?;
        self.feed.keeps.store(false, Ordering::SeqCst);
        let mut items = std::mem::take(&mut *self.feed.kept.lock().unwrap_or_else(PoisonError::into_inner));
        // Other items, such as digests of members, may be as large as a publish.
        let numbers: HashSet<u64> = self.origin.channels().iter().map(channel_number).collect();
        items.retain(|(number, _)| numbers.contains(number));
        match items.len() {
            ENCODED => Ok(items),
            other => Err(format!("{other} of {ENCODED} publishes were forwarded").into()),
        }
    }

    /// Sends items for the time; gives the number that was sent and acked.
    fn send(&self, items: &EncodedItems, window: usize, time: Duration) -> Result<u64> {
        let links = &self.feed.links;
        let until = Instant::now() + time;
        // For each chunk, the last peer ack of each stream: it comes when all acks before it have come.
        let mut under_way: VecDeque<Vec<PeerAck>> = VecDeque::new();
        let mut sent = 0;
        let mut all = items.iter().cycle();
        while Instant::now() < until {
            let mut last: Vec<Option<PeerAck>> = (0..links.stream_count()).map(|_| None).collect();
            for (hash, item) in all.by_ref().take(CHUNK) {
                last[(hash % links.stream_count() as u64) as usize] = Some(links.send(SINK, *hash, item));
            }
            sent += CHUNK as u64;
            under_way.push_back(last.into_iter().flatten().collect());
            if under_way.len() * CHUNK > window {
                self.wait_for_acks(under_way.pop_front())?;
            }
        }
        under_way.into_iter().try_for_each(|acks| self.wait_for_acks(Some(acks)))?;
        Ok(sent)
    }

    fn wait_for_acks(&self, acks: Option<Vec<PeerAck>>) -> Result<()> {
        for ack in acks.into_iter().flatten() {
            let confirmed = async { tokio::time::timeout(PATIENCE, ack).await };
            match self.runtime.block_on(confirmed) {
                Ok(Ok(())) => {}
                Ok(Err(_)) => return Err("a lane has lost what it had".into()),
                Err(_) => return Err(format!("no receipt for {PATIENCE:?}").into()),
            }
        }
        Ok(())
    }

    /// Publishes for the time; gives the number of publishes that were acked.
    fn publish(&self, window: usize, time: Duration) -> Result<u64> {
        let acked = Arc::new(AtomicU64::new(0));
        let until = Instant::now() + time;
        let mut published = 0;
        while Instant::now() < until {
            if published - acked.load(Ordering::Acquire) >= window as u64 {
                thread::sleep(GLANCE);
                continue;
            }
            for _ in 0..CHUNK {
                self.publish_one(published as usize, &acked);
                published += 1;
            }
        }
        wait_until("all publishes to be acked", || acked.load(Ordering::Acquire) == published)?;
        Ok(published)
    }

    fn publish_one(&self, nth: usize, acked: &Arc<AtomicU64>) {
        let acked = Arc::clone(acked);
        let done = move |result: std::result::Result<_, _>| {
            acked.fetch_add(u64::from(result.is_ok()), Ordering::Release);
        };
        self.origin.publish(nth, self.options.together, Box::new(done));
    }
}

fn wait_until(what: &str, holds: impl Fn() -> bool) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        if Instant::now() > deadline {
            return Err(format!("waited for {PATIENCE:?} for {what}").into());
        }
        thread::sleep(GLANCE);
    }
    Ok(())
}

/// The links, and the forwarded items while they are kept.
struct Feed {
    links: GrpcPeerLinks,
    keeps: AtomicBool,
    /// Least size of an item that is kept: smaller ones have no messages.
    keeps_bytes: usize,
    kept: Mutex<EncodedItems>,
}

struct RecordingLinks(Arc<Feed>);

impl PeerLinks for RecordingLinks {
    fn set_peers(&self, peers: Vec<PeerAddr>) {
        self.0.links.set_peers(peers);
    }

    fn stream_count(&self) -> usize {
        self.0.links.stream_count()
    }

    fn send(&self, to_incarnation: u64, channel_hash: u64, item: &PeerItem) -> PeerAck {
        let feed = &self.0;
        if feed.keeps.load(Ordering::Relaxed) && item.bytes() > feed.keeps_bytes {
            let mut kept = feed.kept.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push((channel_hash, item.clone()));
        }
        feed.links.send(to_incarnation, channel_hash, item)
    }

    fn is_up(&self, incarnation: u64) -> bool {
        self.0.links.is_up(incarnation)
    }
}
