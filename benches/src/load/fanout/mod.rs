//! Fan-out: publishes at a constant rate to one channel or many, with many subscribers.

mod hearing;
mod layout;
mod publishing;
mod slow;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};

use super::opening::open;
use super::tally::Faults;
use super::{Cost, Target};
use crate::wire::stamp::DATA_BYTES_MIN;
use crate::{Result, procfs};
use hearing::Subscribers;
use layout::Layout;
use publishing::{Publishing, PublishingResult};
use slow::SlowReaders;

pub use slow::SlowReaderStats;

#[derive(Args, Clone)]
pub struct Fanout {
    #[command(flatten)]
    pub target: Target,
    /// Number of subscribers, each with a connection.
    #[arg(long)]
    pub subscribers: usize,
    /// Number of channels, which are published to in turn.
    #[arg(long, default_value_t = 1)]
    pub channels: usize,
    /// Number of channels that each subscriber is attached to.
    #[arg(long, default_value_t = 1)]
    pub attached: usize,
    /// Puts subscribers into groups that have all their channels in common; the channels of a group are published to
    /// one after the other. Without it two channels share a random number of subscribers.
    #[arg(long)]
    pub groups: bool,
    /// Number of connections that publish; each channel is always published to by the same one.
    #[arg(long, default_value_t = 1)]
    pub publishers: usize,
    /// Address of another node of the cluster for the publishers; without it they use that of the subscribers.
    #[arg(long)]
    pub publish_at: Option<SocketAddr>,
    /// Number of subscribers that never read and have small buffers; nothing is expected of them. One that the server
    /// closes is replaced, and the measured part begins when the first ones are blocked.
    #[arg(long, default_value_t = 0)]
    pub slow: usize,
    /// Messages per second over all channels, constant however slow the server is.
    #[arg(long)]
    pub rate: f64,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u32,
    /// Size of a message's data.
    #[arg(long, default_value_t = 128)]
    pub bytes: usize,
    /// Microseconds between two reads of a subscriber, as if the network delivered many segments at once.
    #[arg(long, default_value_t = 0)]
    pub rest_us: u32,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    /// Deliveries in the measured part.
    pub deliveries: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub cost: Cost,
    /// TCP segments with data that the whole machine sent in the measured part: deliveries, publishes and their
    /// answers.
    pub segments: u64,
    pub memory: Memory,
    /// Faults over the whole run, warm-up included.
    pub faults: Faults,
    /// Figures of the subscribers that do not read; `None` without any.
    pub slow: Option<SlowReaderStats>,
    /// Time by which the generator sent later than due: the 99th percentile, then the maximum.
    pub lag_p99_ms: f64,
    pub lag_max_ms: f64,
}

/// Greatest memory during the run, read once a second.
#[derive(Serialize, Deserialize, Clone, Copy, Default)]
pub struct Memory {
    /// Resident memory of the server.
    pub resident_bytes: u64,
    /// Memory in all TCP buffers of the machine, both ends together.
    pub socket_bytes: u64,
}

impl Fanout {
    pub fn run(&self) -> Result<Outcome> {
        self.check()?;
        let reading = self.subscribers - self.slow;
        let deal = if self.groups { Layout::in_groups } else { Layout::by_chance };
        let layout = Arc::new(deal(self.subscribers, self.channels, self.attached, reading));
        let names =
            |subscriber: usize| layout.channels_of(subscriber).iter().map(|channel| Layout::name(*channel));
        let subscribers = open(&self.target, reading, names)?;
        let publishing_at = match self.publish_at {
            Some(address) => Target { address, ..self.target.clone() },
            None => self.target.clone(),
        };
        let publishers = open(&publishing_at, self.publishers, |publisher| self.listening(publisher))?;
        let progress = Arc::new(Progress::default());
        let publishing =
            Publishing::new(self.clone(), Arc::clone(&layout), publishers, Arc::clone(&progress));
        let slow = (self.slow > 0)
            .then(|| SlowReaders::open(&self.target, &layout, self.subscribers))
            .transpose()?;
        let slow = slow.map(|readers| {
            let progress = Arc::clone(&progress);
            thread::spawn(move || readers.run_until_done(&progress))
        });
        let publishing = {
            let progress = Arc::clone(&progress);
            thread::spawn(move || {
                let published = publishing.run();
                progress.done.store(true, Ordering::Release);
                published
            })
        };
        let servers = self.target.server_pids.clone();
        let rest = Duration::from_micros(self.rest_us.into());
        let received = Subscribers::new(subscribers, Arc::clone(&layout), servers).hear(&progress, rest);
        let published = publishing.join().map_err(|_| "the publisher's thread panicked")?;
        // An error of the subscribers says more than that of the publishers.
        let received = received?;
        let PublishingResult { meter, segments_before, began_ns, ended_ns, lag } = published?;
        let cost = meter.stop()?;
        let segments = procfs::segments_sent()?.saturating_sub(segments_before);
        let slow = slow.map(|readers| readers.join().map_err(|_| "the thread of the slow ones panicked"));
        let slow = slow.transpose()?.transpose()?;
        let published = progress.published.load(Ordering::Acquire);
        Ok(Outcome {
            deliveries: received.latency.total(),
            p50_ms: received.latency.quantile_ms(0.5),
            p99_ms: received.latency.quantile_ms(0.99),
            cost,
            segments,
            memory: received.memory,
            faults: received.tally.finish(|subscription| layout.expected(subscription, published)),
            slow: slow.map(|readers| readers.outcome(began_ns, ended_ns)),
            lag_p99_ms: lag.quantile_ms(0.99),
            lag_max_ms: lag.highest_ms(),
        })
    }

    /// Gives the channels that a publisher must attach to be allowed to publish.
    fn listening(&self, publisher: usize) -> impl Iterator<Item = String> {
        let listens = self.target.dialect.publishers_listen();
        let own = (publisher as u32..self.channels as u32).step_by(self.publishers);
        own.filter(move |_| listens).map(Layout::name)
    }

    fn check(&self) -> Result<()> {
        if self.slow > self.subscribers {
            return Err("--slow is at most --subscribers".into());
        }
        if self.bytes < DATA_BYTES_MIN || self.rate <= 0.0 {
            return Err(format!("--bytes is at least {DATA_BYTES_MIN} and --rate above 0").into());
        }
        if self.publishers == 0 || self.attached == 0 || self.attached > self.channels {
            return Err(
                "--publishers and --attached are at least 1, and --attached at most --channels".into()
            );
        }
        Ok(())
    }
}

/// Progress that the publisher's thread and the subscribers' thread share.
struct Progress {
    published: AtomicU32,
    /// Number of messages that arrived, without duplicates.
    received: AtomicU64,
    /// Number of the first message whose latency is recorded.
    timed_from: AtomicU32,
    /// Whether each slow subscriber was blocked once, or closed by the server.
    slow_blocked: AtomicBool,
    done: AtomicBool,
}

impl Default for Progress {
    fn default() -> Self {
        Self {
            published: AtomicU32::new(0),
            received: AtomicU64::new(0),
            timed_from: AtomicU32::new(u32::MAX),
            slow_blocked: AtomicBool::new(false),
            done: AtomicBool::new(false),
        }
    }
}
