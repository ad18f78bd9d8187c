//! Publishes as fast as they are acked, with a fixed number under way on each channel.

use std::collections::VecDeque;
use std::io;
use std::iter;
use std::time::{Duration, Instant};

use clap::Args;
use mio::{Events, Poll};
use serde::{Deserialize, Serialize};

use super::link::Link;
use super::opening::open;
use super::{Cost, Meter, Target};
use crate::histogram::Histogram;
use crate::wire::frames::{self, op};
use crate::wire::reader::SHARED_BYTES;
use crate::wire::stamp::{DATA_BYTES_MIN, Stamp};
use crate::{Result, os};

const WARM_UP: Duration = Duration::from_secs(2);
/// Time without an ack after which the measurement fails.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Args, Clone)]
pub struct Publish {
    #[command(flatten)]
    pub target: Target,
    #[arg(long, default_value_t = 16)]
    pub connections: usize,
    /// Number of channels of each connection, to which no other connection publishes.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub channels: u32,
    /// Publishes under way on each channel.
    #[arg(long, default_value_t = 64)]
    pub window: usize,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Size of a message's data.
    #[arg(long, default_value_t = 128)]
    pub bytes: usize,
    /// Gives each message an id of its own, by which the server detects a repeat.
    #[arg(long)]
    pub ids: bool,
    /// Process of the database behind the server, for its CPU time; repeated if the database has several.
    #[arg(long = "database-pid")]
    pub database_pids: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub acked_per_s: f64,
    pub ack_p50_ms: f64,
    pub ack_p99_ms: f64,
    pub cost: Cost,
    pub database_cpu_s: f64,
}

impl Publish {
    pub fn run(&self) -> Result<Outcome> {
        if self.bytes < DATA_BYTES_MIN {
            return Err(format!("--bytes is at least {DATA_BYTES_MIN}").into());
        }
        let mut pipelines = Pipelines::open(self)?;
        pipelines.pump(Instant::now() + WARM_UP)?;
        pipelines.latency = Histogram::default();
        let meter = Meter::start(&self.target.server_pids)?;
        let database = Meter::start(&self.database_pids)?;
        pipelines.pump(Instant::now() + Duration::from_secs(self.seconds))?;
        let (cost, database_cpu_s) = (meter.stop()?, database.stop()?.server_cpu_s);
        Ok(Outcome {
            acked_per_s: pipelines.latency.total() as f64 / cost.wall_s,
            ack_p50_ms: pipelines.latency.quantile_ms(0.5),
            ack_p99_ms: pipelines.latency.quantile_ms(0.99),
            cost,
            database_cpu_s,
        })
    }
}

struct Pipelines {
    all: Vec<Pipeline>,
    poll: Poll,
    latency: Histogram,
}

impl Pipelines {
    fn open(plan: &Publish) -> Result<Self> {
        let poll = Poll::new()?;
        let mut all = Vec::with_capacity(plan.connections);
        for (at, mut link) in open(&plan.target, plan.connections, |_| None)?.into_iter().enumerate() {
            link.register(poll.registry(), at)?;
            let mut pipeline = Pipeline::new(link, at, plan);
            let each = (0..plan.channels as usize).flat_map(|channel| iter::repeat_n(channel, plan.window));
            pipeline.fill(each)?;
            all.push(pipeline);
        }
        Ok(Self { all, poll, latency: Histogram::default() })
    }

    /// Sends a publish for each ack, until the time is over.
    fn pump(&mut self, until: Instant) -> Result<()> {
        let mut events = Events::with_capacity(256);
        let mut shared = vec![0; SHARED_BYTES];
        let mut last_ack = (self.latency.total(), Instant::now());
        while Instant::now() < until {
            match self.poll.poll(&mut events, Some(Duration::from_millis(50))) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in &events {
                self.all[event.token().0].turn(&mut shared, &mut self.latency)?;
            }
            if self.latency.total() > last_ack.0 {
                last_ack = (self.latency.total(), Instant::now());
            } else if last_ack.1.elapsed() > PATIENCE {
                return Err(format!("no ack for {PATIENCE:?}").into());
            }
        }
        Ok(())
    }
}

/// A connection with its unanswered publishes, by request id from `first` on.
struct Pipeline {
    link: Link,
    channels: Vec<String>,
    data_bytes: usize,
    /// Number of the connection, which its message ids contain; `None`: the messages have no ids.
    ids: Option<usize>,
    first: u64,
    sent: VecDeque<PendingPublish>,
}

struct PendingPublish {
    at_ns: u64,
    channel: usize,
    is_acked: bool,
}

impl Pipeline {
    fn new(link: Link, number: usize, plan: &Publish) -> Self {
        let count = plan.channels as usize;
        let channels = (number * count..(number + 1) * count).map(|at| format!("bench:publish:{at}"));
        let (channels, ids) = (channels.collect(), plan.ids.then_some(number));
        Self { link, channels, data_bytes: plan.bytes, ids, first: 0, sent: VecDeque::new() }
    }

    fn turn(&mut self, shared: &mut [u8], latency: &mut Histogram) -> Result<()> {
        let (mut free, mut wrong) = (Vec::new(), None);
        let (now_ns, first, sent) = (os::monotonic_ns(), self.first, &mut self.sent);
        self.link.read(now_ns, shared, |text| {
            let id = frames::request_id(text).filter(|_| frames::op(text) == Some(op::ACK));
            let acked = id.and_then(|id| sent.get_mut(usize::try_from(id.checked_sub(first)?).ok()?));
            match acked.filter(|sent| !sent.is_acked) {
                Some(acked) => {
                    acked.is_acked = true;
                    free.push(acked.channel);
                    latency.record(now_ns.saturating_sub(acked.at_ns));
                }
                None if frames::op(text) == Some(op::HEARTBEAT) => {}
                None => wrong = Some(String::from_utf8_lossy(text).into_owned()),
            }
        })?;
        if let Some(text) = wrong {
            return Err(format!("with publishes from {first} on under way the answer was {text}").into());
        }
        while self.sent.pop_front_if(|sent| sent.is_acked).is_some() {
            self.first += 1;
        }
        self.fill(free)
    }

    /// Sends one publish to each of these channels in one write, after the bytes that the socket did not take before.
    fn fill(&mut self, channels: impl IntoIterator<Item = usize>) -> Result<()> {
        let at_ns = os::monotonic_ns();
        for channel in channels {
            let id = self.first + self.sent.len() as u64;
            let data = Stamp { sent_ns: at_ns, sequence: id as u32 }.data(self.data_bytes);
            let name = &self.channels[channel];
            self.link.push(match self.ids {
                Some(number) => frames::publish_with_id(id, name, &format!("{at_ns}-{number}-{id}"), &data),
                None => frames::publish(id, name, &data),
            });
            self.sent.push_back(PendingPublish { at_ns, channel, is_acked: false });
        }
        Ok(self.link.flush()?)
    }
}
