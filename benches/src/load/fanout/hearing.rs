use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use mio::{Events, Poll};

use super::layout::Layout;
use super::{Memory, Progress};
use crate::histogram::Histogram;
use crate::load::link::Link;
use crate::load::tally::Tally;
use crate::wire::dialect::ReplyKind;
use crate::wire::stamp::Finder;
use crate::{NotCarried, Result, os, procfs};

/// Time after the last publish at which a missing delivery counts as lost.
const LATE_MAX: Duration = Duration::from_secs(5);
/// Interval at which memory is read.
const GLANCE: Duration = Duration::from_secs(1);
/// Size of the buffer: a server may put all that waits for a client into one frame.
const SHARED_BYTES: usize = 4 * 1024 * 1024;

pub(super) struct Subscribers {
    /// Connections of the subscribers that read.
    links: Vec<Link>,
    layout: Arc<Layout>,
    finder: Finder,
    server_pids: Vec<u32>,
    pub(super) tally: Tally,
    pub(super) latency: Histogram,
    pub(super) memory: Memory,
}

impl Subscribers {
    pub(super) fn new(links: Vec<Link>, layout: Arc<Layout>, server_pids: Vec<u32>) -> Self {
        let tally = Tally::new(layout.subscriptions());
        let (finder, latency, memory) = (Finder::default(), Histogram::default(), Memory::default());
        Self { links, layout, finder, server_pids, tally, latency, memory }
    }

    /// Reads until the publisher is done and every subscriber has every message, or `LATE_MAX` has passed. Sleeps for
    /// `rest` after each read.
    pub(super) fn hear(mut self, progress: &Progress, rest: Duration) -> Result<Self> {
        let mut poll = Poll::new()?;
        for (at, link) in self.links.iter_mut().enumerate() {
            link.register(poll.registry(), at)?;
        }
        let mut events = Events::with_capacity(1024);
        let mut shared = vec![0; SHARED_BYTES];
        let (mut looked_at, mut done) = (Instant::now(), None);
        loop {
            match poll.poll(&mut events, Some(Duration::from_millis(20))) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                polled => polled?,
            }
            for event in events.iter().filter(|event| event.is_readable()) {
                self.read(event.token().0, &mut shared, progress)?;
            }
            if !rest.is_zero() {
                thread::sleep(rest);
            }
            progress.received.store(self.tally.received(), Ordering::Release);
            if looked_at.elapsed() > GLANCE {
                self.look_at_memory()?;
                looked_at = Instant::now();
            }
            if progress.done.load(Ordering::Acquire) {
                let (since, expected) = *done.get_or_insert_with(|| {
                    let published = progress.published.load(Ordering::Acquire);
                    (Instant::now(), self.layout.expected_in_all(published))
                });
                if self.tally.received() >= expected || since.elapsed() > LATE_MAX {
                    return Ok(self);
                }
            }
        }
    }

    fn read(&mut self, at: usize, shared: &mut [u8], progress: &Progress) -> Result<()> {
        let Self { links, layout, finder, tally, latency, .. } = self;
        let dialect = links[at].dialect();
        let mut refused = None;
        let read = links[at].read(os::monotonic_ns(), shared, |piece| {
            let found = finder.each(piece, |stamp| {
                match layout.sequence_at(at, stamp.sequence) {
                    Some((subscription, sequence)) => tally.record(subscription, sequence),
                    None => tally.record_astray(),
                }
                if stamp.sequence >= progress.timed_from.load(Ordering::Relaxed) {
                    latency.record(os::monotonic_ns().saturating_sub(stamp.sent_ns));
                }
            });
            if !found && dialect.reply_kind(piece) == ReplyKind::Refused {
                refused = Some(String::from_utf8_lossy(piece).into_owned());
            }
        });
        let refused = refused.map_or(Ok(()), |text| Err(io::Error::other(text)));
        let lost = |error| NotCarried(format!("subscriber {at} was lost: {error}"));
        Ok(read.and(refused).map_err(lost)?)
    }

    fn look_at_memory(&mut self) -> Result<()> {
        let Memory { resident_bytes, socket_bytes } = self.memory;
        self.memory = Memory {
            resident_bytes: resident_bytes.max(procfs::resident_bytes_of(&self.server_pids)?),
            socket_bytes: socket_bytes.max(procfs::socket_bytes()?),
        };
        Ok(())
    }
}
