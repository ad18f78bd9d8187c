//! Timeout of a connection whose client takes nothing of the pending bytes.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::edge::link::unsent;
use crate::telemetry::Limit;

/// Number of progress checks within the timeout, which delays the end by one interval at most.
const LOOKS: u32 = 8;

/// Write timeout of one connection. Needs a timer only while a write waits.
pub(super) struct WriteTimeout {
    time_max: Duration,
    waiting: Option<StalledWrite>,
}

struct StalledWrite {
    look: Pin<Box<Sleep>>,
    progress: WriteProgress,
}

impl WriteTimeout {
    pub(super) fn new(time_max: Duration) -> Self {
        Self { time_max, waiting: None }
    }

    /// Passes on the result of a write. `part`: the socket accepted part of it.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the client has taken nothing within the time limit; pending bytes are dropped.
    pub(super) fn watch<T>(
        &mut self,
        cx: &mut Context<'_>,
        socket: &TcpStream,
        part: bool,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let time_max = self.time_max;
        let waiting = self.waiting.get_or_insert_with(|| {
            let (progress, look) = WriteProgress::begin(Instant::now(), unsent(socket), time_max);
            StalledWrite { look: Box::pin(sleep_until(look)), progress }
        });
        if part {
            waiting.progress = WriteProgress::begin(Instant::now(), unsent(socket), time_max).0;
        }
        while waiting.look.as_mut().poll(cx).is_ready() {
            let Some(look) = waiting.progress.look(Instant::now(), unsent(socket), time_max) else {
                Limit::HttpStallMs.hit();
                socket2::SockRef::from(socket).set_linger(Some(Duration::ZERO)).ok();
                return Poll::Ready(Err(io::Error::new(ErrorKind::TimedOut, "the client does not read")));
            };
            waiting.look.as_mut().reset(look);
        }
        Poll::Pending
    }
}

/// Progress of the client while a write waits. The socket becomes writable only when a good part of its buffer is free, which takes a slow
/// client long.
struct WriteProgress {
    /// Time at which the client is given up, unless it takes some bytes.
    end: Instant,
    unsent: Option<libc::c_int>,
}

impl WriteProgress {
    /// Starts the wait. Also returns the time of the first check.
    fn begin(now: Instant, unsent: Option<libc::c_int>, time_max: Duration) -> (Self, Instant) {
        (Self { end: now + time_max, unsent }, now + time_max / LOOKS)
    }

    /// Checks progress. Returns the time of the next check; none when the client must be given up.
    fn look(&mut self, now: Instant, unsent: Option<libc::c_int>, time_max: Duration) -> Option<Instant> {
        if unsent < self.unsent {
            self.end = now + time_max;
        } else if now >= self.end {
            return None;
        }
        self.unsent = unsent;
        Some((now + time_max / LOOKS).min(self.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME_MAX: Duration = Duration::from_secs(8);

    /// Time after which a client is given up. `unsent` yields its unsent bytes at each time, in ms since the beginning.
    fn ended_after(unsent: impl Fn(u128) -> Option<libc::c_int>) -> Duration {
        let began = Instant::now();
        let (mut progress, mut now) = WriteProgress::begin(began, unsent(0), TIME_MAX);
        while let Some(next) = progress.look(now, unsent((now - began).as_millis()), TIME_MAX) {
            assert!(next > now);
            now = next;
        }
        now - began
    }

    #[test]
    fn the_time_begins_when_something_was_taken_last() {
        assert_eq!(ended_after(|_| Some(100)), TIME_MAX, "nothing is taken");
        assert_eq!(ended_after(|_| None), TIME_MAX, "the system cannot tell");
        for last_ms in [1, 999, 1_000, 1_001, 7_999, 40_500] {
            let last = Duration::from_millis(last_ms);
            let ended = ended_after(|ms| Some(100_000 - ms.min(u128::from(last_ms)) as libc::c_int));
            assert!(ended >= last + TIME_MAX && ended < last + TIME_MAX / 8 * 9, "{last:?}: {ended:?}");
        }
        let slow = |ms: u128| Some(100 - (ms.min(60_000) / 7_900) as libc::c_int);
        assert!(ended_after(slow) > Duration::from_secs(60), "a byte in nearly the time is enough");
    }
}
