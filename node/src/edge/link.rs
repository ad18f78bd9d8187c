//! A client connection's socket as its shard sees it: plain, or under TLS.

use std::io::{self, IoSlice, Read as _, Write};
use std::net::{IpAddr, Shutdown, SocketAddr};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd};

use mio::net::TcpStream;

use super::proxies::{self, ProxiedClient};
use crate::tls::{TlsConnection, TlsRead};

/// Socket of a client with its TLS state. `S` is the socket type of the serving side; the TLS state moves along between sides.
#[derive(Debug)]
pub struct ClientLink<S> {
    pub socket: S,
    /// TLS state; boxed, so that a plain connection pays one pointer for it.
    pub tls: Option<Box<TlsConnection>>,
    /// Client behind a proxy. None: the client is the peer of the socket.
    pub forwarded: Option<Box<ProxiedClient>>,
}

impl<S> ClientLink<S> {
    pub fn plain(socket: S) -> Self {
        Self { socket, tls: None, forwarded: None }
    }

    /// The same connection over another socket type.
    pub fn map<T>(self, form: impl FnOnce(S) -> T) -> ClientLink<T> {
        ClientLink { socket: form(self.socket), tls: self.tls, forwarded: self.forwarded }
    }

    /// Sets the address of the client behind a proxy.
    pub(super) fn set_client(&mut self, client: IpAddr) {
        self.forwarded = Some(Box::new(ProxiedClient::From(client)));
    }

    /// The client's address; `peer` is the socket's own peer.
    pub(super) fn client(&self, peer: SocketAddr) -> IpAddr {
        match self.forwarded.as_deref() {
            Some(ProxiedClient::From(client)) => *client,
            Some(ProxiedClient::Awaited) | None => peer.ip().to_canonical(),
        }
    }
}

impl ClientLink<TcpStream> {
    /// # Errors
    /// Those of [`TlsConnection::read`], also for a plain socket; before them, those of a PROXY header that is awaited.
    pub(super) fn read(&mut self, buffer: &mut [u8]) -> io::Result<TlsRead> {
        if self.forwarded.as_deref() == Some(&ProxiedClient::Awaited) {
            let client = proxies::take_header(&mut self.socket, buffer)?;
            self.forwarded = client.map(|client| Box::new(ProxiedClient::From(client)));
        }
        match &mut self.tls {
            Some(tls) => tls.read(&mut self.socket, buffer),
            None => {
                let bytes = self.socket.read(buffer)?;
                // A short read has emptied the socket, and the end comes as an event of its own.
                Ok(TlsRead { bytes, more: bytes == buffer.len() })
            }
        }
    }

    /// The socket of a plain connection, to which bytes can be written as they are. None under TLS.
    pub(super) fn plain_socket(&self) -> Option<BorrowedFd<'_>> {
        self.tls.is_none().then(|| self.socket.as_fd())
    }

    /// True if TLS holds bytes that the socket has not accepted.
    pub(super) fn wants_write(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// True if the socket accepted any part of a write that was not completed.
    pub(super) fn take_progress(&mut self) -> bool {
        self.tls.as_mut().is_some_and(|tls| tls.take_progress())
    }

    /// Sends the close message of TLS, if there is TLS. A part that the socket does not accept at once is dropped.
    pub(super) fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close(&mut self.socket).ok();
        }
    }

    /// Closes the writing side.
    pub(super) fn shutdown_write(&mut self) {
        self.close();
        self.socket.shutdown(Shutdown::Write).ok();
    }
}

impl Write for ClientLink<TcpStream> {
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

/// Number of bytes in the socket that the client has not acknowledged; none if the system cannot tell.
#[expect(unsafe_code, reason = "there is no safe call for what a socket has not sent")]
pub(super) fn unsent(socket: &impl AsRawFd) -> Option<libc::c_int> {
    let mut bytes = 0;
    // SAFETY: the call writes an integer through a pointer to one that lives here.
    let known = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) } == 0;
    known.then_some(bytes)
}
