//! One channel, one publisher at a constant rate, many subscribers.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use mio::{Events, Poll};
use serde::{Deserialize, Serialize};

use super::link::Link;
use super::opening::open;
use super::tally::{Faults, Tally};
use super::{Cost, Meter, Target};
use crate::histogram::Histogram;
use crate::wire::frames::{self, op};
use crate::wire::reader::SHARED_BYTES;
use crate::wire::stamp::{DATA_BYTES_MIN, Finder, Stamp};
use crate::{Result, os};

const CHANNEL: &str = "bench:fanout";
/// Before the measured part: warms caches and brings late wake-ups of the handshakes to rest.
const WARM_UP: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(500);
/// How long after the last publish a delivery may come before it counts as lost.
const GRACE: Duration = Duration::from_secs(5);

#[derive(Args, Clone)]
pub struct Fanout {
    #[command(flatten)]
    pub target: Target,
    #[arg(long)]
    pub subscribers: usize,
    /// Messages per second, constant whatever the server does.
    #[arg(long)]
    pub rate: f64,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u32,
    /// Size of a message's data.
    #[arg(long, default_value_t = 128)]
    pub bytes: usize,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    /// Of the measured part.
    pub deliveries: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub cost: Cost,
    /// Of the whole run, warm-up included.
    pub faults: Faults,
    /// How much later than due the generator sent, at the 99th percentile and at worst.
    pub lag_p99_ms: f64,
    pub lag_max_ms: f64,
}

impl Fanout {
    pub fn run(&self) -> Result<Outcome> {
        if self.bytes < DATA_BYTES_MIN || self.rate <= 0.0 {
            return Err(format!("--bytes is at least {DATA_BYTES_MIN} and --rate above 0").into());
        }
        let subscribers = open(&self.target, self.subscribers, |_| Some(CHANNEL.to_owned()))?;
        let publisher = open(&self.target, 1, |_| None)?.remove(0);
        let shared = Arc::new(Progress::default());
        let publishing = {
            let (plan, shared) = (self.clone(), Arc::clone(&shared));
            thread::spawn(move || {
                let published = plan.publish(publisher, &shared);
                shared.done.store(true, Ordering::Release);
                published
            })
        };
        let heard = Subscribers::new(subscribers, self.warm_up_messages()).hear(&shared);
        let (meter, lag) = publishing.join().map_err(|_| "the publisher's thread panicked")??;
        let cost = meter.stop()?;
        let heard = heard?;
        Ok(Outcome {
            deliveries: heard.latency.total(),
            p50_ms: heard.latency.quantile_ms(0.5),
            p99_ms: heard.latency.quantile_ms(0.99),
            cost,
            faults: heard.tally.finish(shared.published.load(Ordering::Acquire)),
            lag_p99_ms: lag.quantile_ms(0.99),
            lag_max_ms: lag.highest_ms(),
        })
    }

    fn warm_up_messages(&self) -> u32 {
        (WARM_UP.as_secs_f64() * self.rate).ceil() as u32
    }

    /// Publishes at the due times, whatever comes back. Returns the meter started before the measured part.
    fn publish(&self, mut link: Link, progress: &Progress) -> Result<(Meter, Histogram)> {
        let warm_up = self.warm_up_messages();
        let measured = (f64::from(self.seconds) * self.rate).round() as u32;
        let mut answers = Answers::default();
        self.publish_range(&mut link, 0..warm_up, progress, &mut answers)?;
        thread::sleep(PAUSE);
        let meter = Meter::start(self.target.server_pid)?;
        let lag = self.publish_range(&mut link, warm_up..warm_up + measured, progress, &mut answers)?;
        let deadline = Instant::now() + GRACE;
        while answers.acks < warm_up + measured {
            if Instant::now() > deadline {
                return Err(format!("{} of {} publishes were acked", answers.acks, warm_up + measured).into());
            }
            thread::sleep(Duration::from_millis(1));
            answers.read(&mut link)?;
        }
        Ok((meter, lag))
    }

    fn publish_range(
        &self,
        link: &mut Link,
        sequences: Range<u32>,
        progress: &Progress,
        answers: &mut Answers,
    ) -> Result<Histogram> {
        let began_ns = os::monotonic_ns();
        let mut lag = Histogram::default();
        for (nth, sequence) in sequences.enumerate() {
            let due_ns = began_ns + (nth as f64 / self.rate * 1e9) as u64;
            thread::sleep(Duration::from_nanos(due_ns.saturating_sub(os::monotonic_ns())));
            // The time in the message is when it was due: a late generator counts against the latency, not for it.
            let data = Stamp { sent_ns: due_ns, sequence }.data(self.bytes);
            lag.record(os::monotonic_ns().saturating_sub(due_ns));
            link.send(&frames::publish(u64::from(sequence), CHANNEL, &data))?;
            progress.published.store(sequence + 1, Ordering::Release);
            answers.read(link)?;
        }
        Ok(lag)
    }
}

/// How far the publisher's thread is.
#[derive(Default)]
struct Progress {
    published: AtomicU32,
    done: AtomicBool,
}

/// What the publisher has been told.
struct Answers {
    shared: Vec<u8>,
    acks: u32,
}

impl Default for Answers {
    fn default() -> Self {
        Self { shared: vec![0; SHARED_BYTES], acks: 0 }
    }
}

impl Answers {
    fn read(&mut self, link: &mut Link) -> Result<()> {
        let mut refused = None;
        let acks = &mut self.acks;
        link.read(os::monotonic_ns(), &mut self.shared, |text| match frames::op(text) {
            Some(op::ACK) => *acks += 1,
            Some(op::HEARTBEAT) => {}
            _ => refused = Some(String::from_utf8_lossy(text).into_owned()),
        })?;
        refused.map_or(Ok(()), |text| Err(format!("a publish was answered {text}").into()))
    }
}

struct Subscribers {
    links: Vec<Link>,
    finder: Finder,
    /// Messages before this one are not timed.
    timed_from: u32,
    tally: Tally,
    latency: Histogram,
}

impl Subscribers {
    fn new(links: Vec<Link>, timed_from: u32) -> Self {
        let tally = Tally::new(links.len());
        Self { links, finder: Finder::default(), timed_from, tally, latency: Histogram::default() }
    }

    /// Reads until the publisher is done and everyone has everything, or the grace is over.
    fn hear(mut self, progress: &Progress) -> Result<Self> {
        let mut poll = Poll::new()?;
        for (at, link) in self.links.iter_mut().enumerate() {
            link.register(poll.registry(), at)?;
        }
        let mut events = Events::with_capacity(1024);
        let mut shared = vec![0; SHARED_BYTES];
        let mut done_at = None;
        loop {
            match poll.poll(&mut events, Some(Duration::from_millis(20))) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in events.iter().filter(|event| event.is_readable()) {
                self.read(event.token().0, &mut shared)?;
            }
            if progress.done.load(Ordering::Acquire) {
                let expected =
                    u64::from(progress.published.load(Ordering::Acquire)) * self.links.len() as u64;
                let since = *done_at.get_or_insert_with(Instant::now);
                if self.tally.received() >= expected || since.elapsed() > GRACE {
                    return Ok(self);
                }
            }
        }
    }

    fn read(&mut self, at: usize, shared: &mut [u8]) -> Result<()> {
        let Self { links, finder, timed_from, tally, latency } = self;
        let read = links[at].read(os::monotonic_ns(), shared, |text| {
            finder.each(text, |stamp| {
                tally.got(at, stamp.sequence);
                if stamp.sequence >= *timed_from {
                    latency.record(os::monotonic_ns().saturating_sub(stamp.sent_ns));
                }
            });
        });
        read.map_err(|error| format!("subscriber {at} was lost: {error}").into())
    }
}
