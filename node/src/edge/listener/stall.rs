//! The end of a connection whose client takes nothing of what waits for it.

use std::io::{self, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

use crate::edge::link::unsent;

/// Watches the writes of one connection. It costs a timer while one of them waits, and nothing else.
pub(super) struct Stall {
    time_max: Duration,
    waiting: Option<Waiting>,
}

struct Waiting {
    end: Pin<Box<Sleep>>,
    unsent: Option<libc::c_int>,
}

impl Stall {
    pub(super) fn new(time_max: Duration) -> Self {
        Self { time_max, waiting: None }
    }

    /// Passes on what a write came to. `part`: the socket took something of it.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] when the client has taken nothing for the time; what was sent to it is forgotten.
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
        let waiting = self
            .waiting
            .get_or_insert_with(|| Waiting { end: Box::pin(sleep(time_max)), unsent: unsent(socket) });
        if part {
            waiting.begin_again(socket, time_max);
        }
        while waiting.end.as_mut().poll(cx).is_ready() {
            // The socket asks for more only when a good part of its buffer is free, and a slow client takes long to get there.
            if unsent(socket) >= waiting.unsent {
                socket2::SockRef::from(socket).set_linger(Some(Duration::ZERO)).ok();
                return Poll::Ready(Err(io::Error::new(ErrorKind::TimedOut, "the client does not read")));
            }
            waiting.begin_again(socket, time_max);
        }
        Poll::Pending
    }
}

impl Waiting {
    fn begin_again(&mut self, socket: &TcpStream, time_max: Duration) {
        self.unsent = unsent(socket);
        self.end.as_mut().reset(Instant::now() + time_max);
    }
}
