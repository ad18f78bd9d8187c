//! Publishes as fast as they are acked, with a fixed number under way on each connection.

use std::collections::VecDeque;
use std::io;
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
/// No ack at all for so long ends the measurement.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Args, Clone)]
pub struct Publish {
    #[command(flatten)]
    pub target: Target,
    /// Each publishes to a channel of its own.
    #[arg(long, default_value_t = 16)]
    pub connections: usize,
    /// Publishes under way on each connection.
    #[arg(long, default_value_t = 64)]
    pub window: usize,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Size of a message's data.
    #[arg(long, default_value_t = 128)]
    pub bytes: usize,
    /// A process of the database behind the server, for its CPU time; repeated where several work together.
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
            let mut pipeline = Pipeline::new(link, at, plan.bytes);
            pipeline.fill(plan.window)?;
            all.push(pipeline);
        }
        Ok(Self { all, poll, latency: Histogram::default() })
    }

    /// Sends one more for each ack, until the time is over.
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

/// A connection with its publishes under way, oldest first.
struct Pipeline {
    link: Link,
    channel: String,
    data_bytes: usize,
    sent: u64,
    sent_at_ns: VecDeque<u64>,
}

impl Pipeline {
    fn new(link: Link, number: usize, data_bytes: usize) -> Self {
        Self {
            link,
            channel: format!("bench:publish:{number}"),
            data_bytes,
            sent: 0,
            sent_at_ns: VecDeque::new(),
        }
    }

    fn turn(&mut self, shared: &mut [u8], latency: &mut Histogram) -> Result<()> {
        let mut acked = 0;
        let mut wrong = None;
        let now_ns = os::monotonic_ns();
        let oldest = self.sent - self.sent_at_ns.len() as u64;
        let sent_at_ns = &mut self.sent_at_ns;
        self.link.read(now_ns, shared, |text| match frames::op(text) {
            Some(op::ACK) if frames::request_id(text) == Some(oldest + acked) => {
                acked += 1;
                let sent_ns = sent_at_ns.pop_front().unwrap_or(now_ns);
                latency.record(now_ns.saturating_sub(sent_ns));
            }
            Some(op::HEARTBEAT) => {}
            _ => wrong = Some(String::from_utf8_lossy(text).into_owned()),
        })?;
        if let Some(text) = wrong {
            return Err(format!("publish {} was answered {text}", oldest + acked).into());
        }
        self.fill(acked as usize)
    }

    /// Sends so many more, in one write; also what the socket did not take before.
    fn fill(&mut self, count: usize) -> Result<()> {
        let now_ns = os::monotonic_ns();
        for _ in 0..count {
            let data = Stamp { sent_ns: now_ns, sequence: self.sent as u32 }.data(self.data_bytes);
            self.link.push(frames::publish(self.sent, &self.channel, &data));
            self.sent_at_ns.push_back(now_ns);
            self.sent += 1;
        }
        Ok(self.link.flush()?)
    }
}
