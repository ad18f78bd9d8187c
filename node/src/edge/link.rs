//! A connection's socket as its shard sees it: plain, or under TLS.

use std::io::{self, IoSlice, Read as _, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd};

use mio::net::TcpStream;

use super::proxies::{self, Forwarded};
use crate::tls::{Taken, TlsConnection};

/// `S` is the socket of whoever serves it; the state of TLS goes with it from one to the other.
#[derive(Debug)]
pub struct Link<S> {
    pub socket: S,
    /// Boxed: a plain connection pays a pointer for it.
    pub tls: Option<Box<TlsConnection>>,
    /// None: its client is whoever has connected.
    pub forwarded: Option<Box<Forwarded>>,
}

impl<S> Link<S> {
    pub fn plain(socket: S) -> Self {
        Self { socket, tls: None, forwarded: None }
    }

    /// The same connection over another form of its socket.
    pub fn map<T>(self, form: impl FnOnce(S) -> T) -> Link<T> {
        Link { socket: form(self.socket), tls: self.tls, forwarded: self.forwarded }
    }

    /// Its client is another than has connected.
    pub(super) fn set_client(&mut self, client: IpAddr) {
        self.forwarded = Some(Box::new(Forwarded::From(client)));
    }

    /// The client's address, where `peer` has connected.
    pub(super) fn client(&self, peer: SocketAddr) -> IpAddr {
        match self.forwarded.as_deref() {
            Some(Forwarded::From(client)) => *client,
            Some(Forwarded::Awaited) | None => peer.ip().to_canonical(),
        }
    }
}

impl Link<TcpStream> {
    /// # Errors
    /// Those of [`TlsConnection::read`], also for a plain socket; before them, those of a PROXY header that is awaited.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> io::Result<Taken> {
        if self.forwarded.as_deref() == Some(&Forwarded::Awaited) {
            let client = proxies::take_header(&mut self.socket, buffer)?;
            self.forwarded = client.map(|client| Box::new(Forwarded::From(client)));
        }
        match &mut self.tls {
            Some(tls) => tls.read(&mut self.socket, buffer),
            None => {
                let bytes = self.socket.read(buffer)?;
                // A short read has emptied the socket, and the end comes as an event of its own.
                Ok(Taken { bytes, more: bytes == buffer.len() })
            }
        }
    }

    /// What is written to it goes to the client as it is.
    pub(super) fn plain_socket(&self) -> Option<BorrowedFd<'_>> {
        self.tls.is_none().then(|| self.socket.as_fd())
    }

    /// TLS holds bytes that the socket has not taken.
    pub(super) fn wants_write(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Whether the socket took anything of a write that did not come to its end.
    pub(super) fn take_progress(&mut self) -> bool {
        self.tls.as_mut().is_some_and(|tls| tls.take_progress())
    }

    /// Says that nothing more is written, where TLS has a word for it. What the socket does not take is not said.
    pub(super) fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close(&mut self.socket).ok();
        }
    }

    /// Ends the writing side.
    pub(super) fn shutdown_write(&mut self) {
        self.close();
        self.socket.shutdown(Shutdown::Write).ok();
    }
}

impl Write for Link<TcpStream> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.write(&mut self.socket, &[IoSlice::new(bytes)]),
            None => self.socket.write(bytes),
        }
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.tls {
            Some(tls) => tls.write(&mut self.socket, slices),
            None => self.socket.write_vectored(slices),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.tls {
            Some(tls) => tls.flush(&mut self.socket),
            None => Ok(()),
        }
    }
}

/// Bytes that the socket took and the client has not acknowledged; none where the system cannot tell.
#[expect(unsafe_code, reason = "there is no safe call for what a socket has not sent")]
pub(super) fn unsent(socket: &impl AsRawFd) -> Option<libc::c_int> {
    let mut bytes = 0;
    // SAFETY: the call writes an integer through a pointer to one that lives here.
    let known = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } == 0;
    known.then_some(bytes)
}
