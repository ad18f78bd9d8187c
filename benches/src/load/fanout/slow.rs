//! Subscribers that read nothing. Each slot has one at any time: one that the server closes is replaced.
//!
//! A client that does not read cannot see that the server has closed its connection, because the close is behind the
//! unread bytes. So each slow subscriber also publishes, and a listener checks whether the server still delivers its
//! messages.

use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use socket2::{Domain, Socket, Type};

use super::Progress;
use super::layout::Layout;
use crate::load::Target;
use crate::load::link::Link;
use crate::load::opening::{open, open_over};
use crate::wire::reader::SHARED_BYTES;
use crate::wire::stamp::{DATA_BYTES_MIN, Finder, Stamp};
use crate::{NotCarried, Result, os};

/// Interval at which each slow subscriber publishes.
const GLANCE: Duration = Duration::from_millis(10);
/// Time without a message of a slow subscriber after which its replacement is opened.
const SILENCE_NS: u64 = 30_000_000;
/// Time for which a replaced subscriber is kept in doubt, since its messages may only be late.
const DOUBT_NS: u64 = 300_000_000;
/// Time without growth of the unread bytes after which a subscriber counts as blocked.
const STILL_NS: u64 = 50_000_000;

/// Size of the client's receive buffer.
const BUFFER_BYTES: usize = 4096;
/// TCP segment size. The server's kernel buffers a multiple of it: with that of loopback, megabytes, which would take
/// seconds to fill.
const SEGMENT_BYTES: u32 = 536;

/// Figures of the slow subscribers. The shares are those of the slot with the smallest share.
#[derive(Serialize, Deserialize, Clone, Copy, Debug, PartialEq)]
pub struct SlowReaderStats {
    /// Share of the measured part in which a slow subscriber was attached.
    pub attached: f64,
    /// Share of the measured part in which a slow subscriber was attached and blocked.
    pub blocked: f64,
    /// Number of subscribers that the server closed, over all slots and the whole run.
    pub given_up: usize,
}

pub(super) struct SlowReaders {
    target: Target,
    layout: Arc<Layout>,
    /// Channel on which the slow subscribers publish and the listener receives.
    channel: String,
    listener: Link,
    finder: Finder,
    slots: Vec<ReaderSlot>,
    /// Number of connections opened so far; each connection has its number as id.
    opened: u32,
}

struct ReaderSlot {
    subscriber: usize,
    current: Option<Reader>,
    /// Subscribers that were replaced, each with the time. Their messages may only be late, so they are kept for
    /// `DOUBT_NS`.
    in_doubt: Vec<(Reader, u64)>,
    past: Vec<ServedPeriod>,
}

struct Reader {
    link: Link,
    number: u32,
    last_id: u32,
    stay: ServedPeriod,
    /// Size of the unread bytes, and the time since which it has not grown.
    unread_bytes: usize,
    still_since_ns: u64,
}

/// Time in which a connection was served, and the time from which on it was blocked.
#[derive(Clone, Copy)]
struct ServedPeriod {
    from_ns: u64,
    until_ns: u64,
    blocked_ns: Option<u64>,
}

impl SlowReaders {
    /// Opens one slow subscriber for each subscriber that does not read.
    pub(super) fn open(target: &Target, layout: &Arc<Layout>, subscribers: usize) -> Result<Self> {
        let channel = Layout::name(layout.channels() as u32);
        let listener = open(target, 1, |_| Some(channel.clone()))?.remove(0);
        let slot =
            |subscriber| ReaderSlot { subscriber, current: None, in_doubt: Vec::new(), past: Vec::new() };
        let slots = (layout.reading..subscribers).map(slot).collect();
        let (target, layout, finder) = (target.clone(), Arc::clone(layout), Finder::default());
        let mut readers = Self { target, layout, channel, listener, finder, slots, opened: 0 };
        (0..readers.slots.len()).try_for_each(|at| readers.replace(at))?;
        Ok(readers)
    }

    /// Keeps the slow readers attached until the publisher is done.
    pub(super) fn run_until_done(mut self, progress: &Progress) -> Result<Self> {
        let mut shared = vec![0; SHARED_BYTES];
        while !progress.done.load(Ordering::Acquire) {
            thread::sleep(GLANCE);
            self.listen(&mut shared)?;
            for at in 0..self.slots.len() {
                self.look_at(at)?;
            }
            if self.slots.iter().all(ReaderSlot::was_blocked) {
                progress.slow_blocked.store(true, Ordering::Release);
            }
        }
        self.listen(&mut shared)?;
        Ok(self)
    }

    /// Gives the figures of the slow readers between two times.
    pub(super) fn outcome(&self, from_ns: u64, until_ns: u64) -> SlowReaderStats {
        let least = |since: fn(&ServedPeriod) -> Option<u64>| {
            let shares = self.slots.iter().map(|slot| share(slot.served_periods(), since, from_ns, until_ns));
            shares.fold(1.0, f64::min)
        };
        SlowReaderStats {
            attached: least(|stay| Some(stay.from_ns)),
            blocked: least(|stay| stay.blocked_ns),
            given_up: self.slots.iter().map(|slot| slot.past.len() + slot.in_doubt.len()).sum(),
        }
    }

    fn listen(&mut self, shared: &mut [u8]) -> Result<()> {
        let Self { listener, finder, slots, .. } = self;
        let read = listener.read(os::monotonic_ns(), shared, |piece| {
            finder.each(piece, |stamp| {
                let readers = slots.iter_mut().flat_map(|slot| {
                    slot.current.iter_mut().chain(slot.in_doubt.iter_mut().map(|(reader, _)| reader))
                });
                for reader in readers.filter(|reader| reader.number == stamp.sequence) {
                    reader.stay.until_ns = reader.stay.until_ns.max(stamp.sent_ns);
                }
            });
        });
        let lost = |error| NotCarried(format!("who listens to the slow ones was lost: {error}"));
        Ok(read.map_err(lost)?)
    }

    fn look_at(&mut self, at: usize) -> Result<()> {
        let (now_ns, dialect) = (os::monotonic_ns(), self.target.dialect);
        self.slots[at].resolve_in_doubt(now_ns);
        let Some(reader) = &mut self.slots[at].current else { return self.replace(at) };
        reader.look(now_ns);
        let stamp = Stamp { sent_ns: now_ns, sequence: reader.number };
        reader.last_id += 1;
        let request = dialect.publish(reader.last_id, &self.channel, &stamp.data(DATA_BYTES_MIN));
        let is_silent = now_ns.saturating_sub(reader.stay.until_ns) > SILENCE_NS;
        if is_silent || reader.link.send(request).is_err() { self.replace(at) } else { Ok(()) }
    }

    fn replace(&mut self, at: usize) -> Result<()> {
        let slot = &mut self.slots[at];
        slot.in_doubt.extend(slot.current.take().map(|reader| (reader, os::monotonic_ns())));
        let own = self.layout.channels_of(slot.subscriber).iter().map(|channel| Layout::name(*channel));
        // In some protocols a client must be attached to publish. Such a subscriber does not read its own messages
        // either.
        let spoken_on = self.target.dialect.publishers_listen().then(|| self.channel.clone());
        let names: Vec<String> = own.chain(spoken_on).collect();
        let link = open_over(&self.target, 1, |_| names.clone(), narrow)?.remove(0);
        self.opened += 1;
        let now_ns = os::monotonic_ns();
        let stay = ServedPeriod { from_ns: now_ns, until_ns: now_ns, blocked_ns: None };
        let (number, last_id) = (self.opened, FIRST_ID);
        slot.current = Some(Reader { link, number, last_id, stay, unread_bytes: 0, still_since_ns: now_ns });
        Ok(())
    }
}

/// First request id of a publish, above the ids of the subscriptions.
const FIRST_ID: u32 = 1_000;

/// Connects with a small receive buffer and a small segment size. Both must be set before the connect.
fn narrow(target: &Target) -> std::io::Result<TcpStream> {
    let socket = Socket::new(Domain::for_address(target.address), Type::STREAM, None)?;
    socket.set_recv_buffer_size(BUFFER_BYTES)?;
    socket.set_tcp_mss(SEGMENT_BYTES)?;
    socket.connect(&target.address.into())?;
    Ok(socket.into())
}

impl ReaderSlot {
    fn was_blocked(&self) -> bool {
        self.served_periods().any(|stay| stay.blocked_ns.is_some()) || !self.past.is_empty()
    }

    /// Closes subscribers in doubt whose end is known: all their messages were received after all, or none for
    /// `DOUBT_NS`.
    fn resolve_in_doubt(&mut self, now_ns: u64) {
        let Self { in_doubt, past, .. } = self;
        in_doubt.retain(|(reader, since_ns)| {
            let is_received = reader.stay.until_ns + 2 * GLANCE.as_nanos() as u64 >= *since_ns;
            let is_known = is_received || now_ns.saturating_sub(*since_ns) > DOUBT_NS;
            past.extend(is_known.then_some(reader.stay));
            !is_known
        });
    }

    fn served_periods(&self) -> impl Iterator<Item = ServedPeriod> {
        let present = self.in_doubt.iter().map(|(reader, _)| reader).chain(&self.current);
        self.past.iter().copied().chain(present.map(|reader| reader.stay))
    }
}

impl Reader {
    /// Notes whether the kernel still takes bytes for this subscriber.
    fn look(&mut self, now_ns: u64) {
        // A connection that was reset has no unread bytes, and its next publish fails.
        let unread_bytes = self.link.unread_bytes().unwrap_or(0);
        if unread_bytes != self.unread_bytes {
            (self.unread_bytes, self.still_since_ns) = (unread_bytes, now_ns);
        } else if unread_bytes > 0 && now_ns - self.still_since_ns >= STILL_NS {
            self.stay.blocked_ns.get_or_insert(self.still_since_ns);
        }
    }
}

/// Gives the share of the time between `from_ns` and `until_ns` that the periods cover together, each counted from
/// `since`.
fn share(
    stays: impl Iterator<Item = ServedPeriod>,
    since: fn(&ServedPeriod) -> Option<u64>,
    from_ns: u64,
    until_ns: u64,
) -> f64 {
    let mut spans: Vec<(u64, u64)> = stays.filter_map(|stay| Some((since(&stay)?, stay.until_ns))).collect();
    spans.sort_unstable();
    let (mut filled_ns, mut reached_ns) = (0, from_ns);
    for (began_ns, ended_ns) in spans {
        let ended_ns = ended_ns.min(until_ns);
        filled_ns += ended_ns.saturating_sub(began_ns.max(reached_ns));
        reached_ns = reached_ns.max(ended_ns);
    }
    filled_ns as f64 / until_ns.saturating_sub(from_ns).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_of_the_measured_part() {
        let stay = |from_ns, until_ns, blocked_ns| ServedPeriod { from_ns, until_ns, blocked_ns };
        let stays =
            [stay(160, 300, Some(180)), stay(0, 120, Some(50)), stay(130, 150, None), stay(140, 145, None)];
        let attached = share(stays.into_iter(), |stay| Some(stay.from_ns), 100, 200);
        assert_eq!(attached, 0.8, "20 until 120, 20 until 150 however many there are, and 40 from 160 on");
        assert_eq!(share(stays.into_iter(), |stay| stay.blocked_ns, 100, 200), 0.4);
    }
}
