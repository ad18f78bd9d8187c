use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use super::layout::Layout;
use super::{Fanout, Progress};
use crate::histogram::Histogram;
use crate::load::Meter;
use crate::load::link::Link;
use crate::wire::dialect::ReplyKind;
use crate::wire::reader::SHARED_BYTES;
use crate::wire::stamp::Stamp;
use crate::{NotCarried, Result, os, procfs};

/// Length of the warm-up, which fills caches and lets late wake-ups of the handshakes pass.
const WARM_UP: Duration = Duration::from_secs(2);
const PAUSE: Duration = Duration::from_millis(500);
/// Greatest time until the slow subscribers are blocked.
const BLOCKED_WITHIN: Duration = Duration::from_secs(15);
/// Time after the last publish within which an answer, or a delivery of the warm-up, must come.
const LATE_MAX: Duration = Duration::from_secs(5);

pub(super) struct Publishing {
    plan: Fanout,
    layout: Arc<Layout>,
    names: Vec<String>,
    links: Vec<Link>,
    progress: Arc<Progress>,
    shared: Vec<u8>,
    /// Number of publishes that the server has acknowledged.
    acks: u32,
}

/// Outcome of the publishing: the counts before the measured part, its times, and how late its messages were
/// sent.
pub(super) struct PublishingResult {
    pub(super) meter: Meter,
    pub(super) segments_before: u64,
    /// Beginning and end of the measured part, on the monotonic clock.
    pub(super) began_ns: u64,
    pub(super) ended_ns: u64,
    pub(super) lag: Histogram,
}

impl Publishing {
    pub(super) fn new(plan: Fanout, layout: Arc<Layout>, links: Vec<Link>, progress: Arc<Progress>) -> Self {
        let names = (0..plan.channels as u32).map(Layout::name).collect();
        Self { plan, layout, names, links, progress, shared: vec![0; SHARED_BYTES], acks: 0 }
    }

    /// Publishes at the due times, whether or not the server keeps up.
    pub(super) fn run(mut self) -> Result<PublishingResult> {
        let measured = (f64::from(self.plan.seconds) * self.plan.rate).round() as u32;
        let warm_up = self.warm_up()?;
        self.settle(warm_up)?;
        let meter = Meter::start(&self.plan.target.server_pids)?;
        self.progress.timed_from.store(warm_up, Ordering::Release);
        let began_ns = os::monotonic_ns();
        let segments_before = procfs::segments_sent()?;
        let lag = self.publish(warm_up..warm_up + measured)?;
        self.finish(warm_up + measured)?;
        Ok(PublishingResult { meter, segments_before, began_ns, ended_ns: os::monotonic_ns(), lag })
    }

    /// Publishes until the slow subscribers are blocked, and gives the number of messages.
    fn warm_up(&mut self) -> Result<u32> {
        let of = |time: Duration, rate: f64| (time.as_secs_f64() * rate).ceil() as u32;
        let mut published = of(WARM_UP, self.plan.rate);
        self.publish(0..published)?;
        let deadline = Instant::now() + BLOCKED_WITHIN;
        while self.plan.slow > 0 && !self.progress.slow_blocked.load(Ordering::Acquire) {
            if Instant::now() > deadline {
                return Err("nobody was slow: what was not read is less than what buffers take".into());
            }
            let more = published + of(PAUSE, self.plan.rate);
            self.publish(published..more)?;
            published = more;
        }
        Ok(published)
    }

    /// Waits until all published messages are received, so that the measured part does not include work of the warm-up.
    fn settle(&mut self, published: u32) -> Result<()> {
        let deadline = Instant::now() + LATE_MAX;
        let expected = self.layout.expected_in_all(published);
        loop {
            thread::sleep(PAUSE);
            (0..self.links.len()).try_for_each(|at| self.read(at))?;
            let received = self.progress.received.load(Ordering::Acquire);
            if received >= expected {
                return Ok(());
            }
            if Instant::now() > deadline {
                let received = format!("{received} of {expected} deliveries of the warm-up were received");
                return Err(NotCarried(format!("{received} within {LATE_MAX:?} after it")).into());
            }
        }
    }

    fn publish(&mut self, sequences: Range<u32>) -> Result<Histogram> {
        let began_ns = os::monotonic_ns();
        let mut lag = Histogram::default();
        for (nth, sequence) in sequences.enumerate() {
            let due_ns = began_ns + (nth as f64 / self.plan.rate * 1e9) as u64;
            thread::sleep(Duration::from_nanos(due_ns.saturating_sub(os::monotonic_ns())));
            // The message carries the time at which it was due, so that a late generator makes the latency longer.
            let data = Stamp { sent_ns: due_ns, sequence }.data(self.plan.bytes);
            lag.record(os::monotonic_ns().saturating_sub(due_ns));
            let channel = self.layout.channel_of(sequence);
            let at = channel % self.links.len();
            let frame = self.plan.target.dialect.publish(sequence + 1, &self.names[channel], &data);
            self.links[at].send(frame).map_err(|error| lost(at, &error))?;
            self.progress.published.store(sequence + 1, Ordering::Release);
            self.read(at)?;
        }
        Ok(lag)
    }

    /// Waits until the sockets have taken all, and the server has acknowledged each publish if its protocol has acks.
    fn finish(&mut self, published: u32) -> Result<()> {
        let deadline = Instant::now() + LATE_MAX;
        let awaited = if self.plan.target.dialect.acks() { published } else { 0 };
        while self.acks < awaited || self.links.iter().any(Link::has_unsent) {
            if Instant::now() > deadline {
                let unsent = self.links.iter().filter(|link| link.has_unsent()).count();
                let taken = format!("{} of {awaited} publishes were acked in time", self.acks);
                return Err(NotCarried(format!("{taken}, {unsent} publishers had more to send")).into());
            }
            thread::sleep(Duration::from_millis(1));
            (0..self.links.len()).try_for_each(|at| self.read(at))?;
        }
        Ok(())
    }

    fn read(&mut self, at: usize) -> Result<()> {
        let Self { links, shared, acks, .. } = self;
        let dialect = links[at].dialect();
        let mut refused = None;
        links[at]
            .read(os::monotonic_ns(), shared, |piece| match dialect.reply_kind(piece) {
                ReplyKind::Done => *acks += 1,
                ReplyKind::Refused => refused = Some(String::from_utf8_lossy(piece).into_owned()),
                ReplyKind::Other => {}
            })
            .map_err(|error| lost(at, &error))?;
        // Sends bytes that the socket did not take before. A server that reads slowly delays the publisher.
        links[at].flush().map_err(|error| lost(at, &error))?;
        refused.map_or(Ok(()), |text| Err(format!("a publish was answered {text}").into()))
    }
}

fn lost(publisher: usize, error: &io::Error) -> NotCarried {
    NotCarried(format!("publisher {publisher} was lost: {error}"))
}
