//! The stream that hyper serves: what the shard had read, then the socket; plain, or under TLS.

use std::io::{self, ErrorKind, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::silence::{Silence, Turns};
use super::stall::Stall;
use crate::edge::ClientSocket;
use crate::edge::errors::{Kind, Refusal};
use crate::edge::http;
use crate::edge::link::Link;
use crate::edge::proxies::Forwarded;
use crate::edge::socket::{HttpConnection, Permit, refusal_bytes};
use crate::model::Limits;
use crate::telemetry::Limit;
use crate::tls::TlsConnection;

const CORS_HEADER: &[u8] = b"access-control-allow-origin";

/// A socket with what was read of it before.
pub(super) struct ReadStream {
    socket: Socket,
    read: Vec<u8>,
    taken: usize,
    /// An answer of ours that is being written in place of hyper's.
    own: Vec<u8>,
    headers: Headers,
    /// Boxed, since the task of a connection has room for several of this stream.
    silence: Box<Silence>,
    stall: Stall,
    permit: Permit,
}

/// Whether hyper takes as many headers as the bytes of a head can hold. To have room for them costs each request several
/// microseconds, so it is asked for when a head comes that has many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Headers {
    Few,
    /// hyper refused a head, which the client was not told.
    TooMany,
    Many,
}

impl ReadStream {
    /// Must run within a tokio runtime. A client that takes nothing of an answer for too long is given up.
    pub(super) fn new(connection: HttpConnection, limits: &Limits) -> io::Result<Self> {
        let HttpConnection { link, permit, read } = connection;
        let stall = Stall::new(Duration::from_millis(limits.http_stall_ms));
        Ok(Self {
            socket: Socket::new(link)?,
            read,
            taken: 0,
            own: Vec::new(),
            headers: Headers::Few,
            silence: Box::new(Silence::new(limits)),
            stall,
            permit,
        })
    }

    /// Until the runtime knows that it can be written to. hyper takes a connection for done whose answer to a refused upgrade it
    /// could not write at once, and then the client never gets that answer.
    pub(super) async fn writable(&self) -> io::Result<()> {
        self.socket.tcp.writable().await
    }

    /// To be told of each request.
    pub(super) fn turns(&self) -> Turns {
        self.silence.turns()
    }

    pub(super) fn client_socket(&self) -> ClientSocket {
        ClientSocket(Arc::downgrade(&self.socket.tcp))
    }

    /// What hyper has read and not used stands before what is still to be read.
    pub(super) fn give_back(&mut self, read: &[u8]) {
        self.read = [read, &self.read[self.taken..]].concat();
        self.taken = 0;
    }

    pub(super) fn headers(&mut self) -> &mut Headers {
        &mut self.headers
    }

    /// Says in our form what hyper says by itself, if it does.
    fn take_in_our_form(&mut self, bytes: &[u8]) -> bool {
        let Some((refusal, date)) = Self::in_our_form(bytes) else { return false };
        if self.headers == Headers::Few && bytes.starts_with(b"HTTP/1.1 431") {
            self.headers = Headers::TooMany;
        } else {
            http::refused(http::NO_ROUTE, &refusal);
            self.own = refusal_bytes(&refusal, date);
        }
        true
    }

    /// hyper answers a head that it cannot read by itself, with a status and nothing else. Every answer of ours
    /// has the CORS headers, so one without them is hyper's; what it says is said in our form instead. It is a
    /// whole head and nothing else, which no part of a body of ours can be.
    fn in_our_form(bytes: &[u8]) -> Option<(Refusal, String)> {
        let status = bytes.strip_prefix(b"HTTP/1.1 ")?.first_chunk::<3>()?;
        let ours = || bytes.windows(CORS_HEADER.len()).any(|part| part.eq_ignore_ascii_case(CORS_HEADER));
        if status[0] != b'4' || ours() {
            return None;
        }
        let mut headers = [httparse::EMPTY_HEADER; 16];
        let mut head = httparse::Response::new(&mut headers);
        if head.parse(bytes) != Ok(httparse::Status::Complete(bytes.len())) {
            return None;
        }
        let date = head.headers.iter().find(|header| header.name.eq_ignore_ascii_case("date"))?;
        let date = String::from_utf8_lossy(date.value).into_owned();
        let refusal = match status {
            b"431" => Refusal::new(Kind::HeadersTooLarge, "the request's headers are over the limit"),
            b"414" => Refusal::new(Kind::HeadersTooLarge, "the request's address is over the limit"),
            b"408" => Refusal::new(Kind::TimedOut, "the request did not arrive in time"),
            _ => Refusal::malformed("the request is malformed"),
        };
        match refusal.kind {
            Kind::HeadersTooLarge => Limit::HeaderBytes.hit(),
            Kind::TimedOut => Limit::HeaderMs.hit(),
            _ => {}
        }
        Some((refusal, date))
    }

    fn poll_own(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.own.is_empty() {
            let written = ready!(Pin::new(&mut self.socket).poll_write(cx, &self.own))?;
            self.own.drain(..written);
        }
        Poll::Ready(Ok(()))
    }

    fn watch<T>(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        let part = self.socket.tls.as_mut().is_some_and(|tls| tls.take_progress());
        self.stall.watch(cx, &self.socket.tcp, part, written)
    }

    pub(super) fn into_parts(self) -> Option<(Link<std::net::TcpStream>, Permit, Vec<u8>)> {
        Some((self.socket.into_link().ok()?, self.permit, self.read))
    }
}

impl AsyncRead for ReadStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.taken < self.read.len() {
            let count = (self.read.len() - self.taken).min(buffer.remaining());
            buffer.put_slice(&self.read[self.taken..self.taken + count]);
            self.taken += count;
            if self.taken == self.read.len() {
                (self.read, self.taken) = (Vec::new(), 0);
            }
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.socket).poll_read(cx, buffer);
        let came = buffer.filled().len() > before;
        if read.is_pending() && self.silence.is_over(cx) {
            // As if the client had closed, which ends the connection in good form.
            return Poll::Ready(Ok(()));
        }
        if came {
            self.silence.broken();
        }
        read
    }
}

impl AsyncWrite for ReadStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.take_in_our_form(bytes) {
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.watch(cx, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = match self.poll_own(cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut self.socket).poll_flush(cx),
            own => own,
        };
        self.watch(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.headers == Headers::TooMany {
            return Poll::Ready(Ok(()));
        }
        let closed = match self.poll_own(cx) {
            Poll::Ready(Ok(())) => Pin::new(&mut self.socket).poll_shutdown(cx),
            own => own,
        };
        self.watch(cx, closed)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let whole = slices.iter().filter(|slice| !slice.is_empty()).count() == 1;
        if let Some(first) = slices.iter().find(|slice| whole && !slice.is_empty())
            && self.take_in_our_form(first)
        {
            return Poll::Ready(Ok(slices.iter().map(|slice| slice.len()).sum()));
        }
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.watch(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}

/// A socket of the runtime, plain or under TLS.
struct Socket {
    /// Another owner watches for its end and does nothing else.
    tcp: Arc<TcpStream>,
    tls: Option<Box<TlsConnection>>,
    forwarded: Option<Box<Forwarded>>,
}

impl Socket {
    fn new(link: Link<std::net::TcpStream>) -> io::Result<Self> {
        let Link { socket, tls, forwarded } = link;
        Ok(Self { tcp: Arc::new(TcpStream::from_std(socket)?), tls, forwarded })
    }

    /// Fails while somebody watches.
    fn into_link(self) -> io::Result<Link<std::net::TcpStream>> {
        let tcp = Arc::into_inner(self.tcp).ok_or(ErrorKind::ResourceBusy)?;
        Ok(Link { socket: tcp.into_std()?, tls: self.tls, forwarded: self.forwarded })
    }

    fn poll_read_plain(&self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            match self.tcp.try_read_buf(buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => ready!(self.tcp.poll_read_ready(cx))?,
                read => return Poll::Ready(read.map(drop)),
            }
        }
    }

    fn poll_write_plain(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match write(&self.tcp) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => ready!(self.tcp.poll_write_ready(cx))?,
                written => return Poll::Ready(written),
            }
        }
    }

    /// Runs a step of TLS until it does not wait for the socket to take something.
    fn poll_step<T>(
        &mut self,
        cx: &mut Context<'_>,
        step: impl Fn(&mut TlsConnection, &mut Ready<'_>) -> io::Result<T>,
    ) -> Option<Poll<io::Result<T>>> {
        let tls = self.tls.as_mut()?;
        loop {
            match step(tls, &mut Ready(&self.tcp)) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => match self.tcp.poll_write_ready(cx) {
                    Poll::Ready(Ok(())) => {}
                    Poll::Ready(Err(error)) => return Some(Poll::Ready(Err(error))),
                    Poll::Pending => return Some(Poll::Pending),
                },
                done => return Some(Poll::Ready(done)),
            }
        }
    }

    fn poll_read_tls(&mut self, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            let Some(tls) = &mut self.tls else { return Poll::Ready(Ok(())) };
            match tls.read(&mut Ready(&self.tcp), buffer.initialize_unfilled()) {
                Ok(taken) => {
                    buffer.advance(taken.bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // What TLS answers by itself may have found the socket full.
                    if let Some(Poll::Ready(Err(error))) = self.poll_step(cx, |tls, tcp| tls.flush(tcp)) {
                        return Poll::Ready(Err(error));
                    }
                    ready!(self.tcp.poll_read_ready(cx))?;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.tls {
            Some(_) => self.poll_read_tls(cx, buffer),
            None => self.poll_read_plain(cx, buffer),
        }
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.poll_step(cx, |tls, tcp| tls.write(tcp, &[IoSlice::new(bytes)])) {
            Some(written) => written,
            None => self.poll_write_plain(cx, |tcp| tcp.try_write(bytes)),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.poll_step(cx, |tls, tcp| tls.write(tcp, slices)) {
            Some(written) => written,
            None => self.poll_write_plain(cx, |tcp| tcp.try_write_vectored(slices)),
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.poll_step(cx, |tls, tcp| tls.flush(tcp)) {
            Some(flushed) => flushed,
            None => Poll::Ready(Ok(())),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Some(closed) = self.poll_step(cx, |tls, tcp| tls.close(tcp)) {
            ready!(closed)?;
        }
        Poll::Ready(socket2::SockRef::from(&*self.tcp).shutdown(Shutdown::Write))
    }
}

/// A socket of the runtime as one that does not block. A call that finds it not ready makes the runtime look again.
struct Ready<'a>(&'a TcpStream);

impl io::Read for Ready<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(buffer)
    }
}

impl io::Write for Ready<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        self.0.try_write_vectored(slices)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_whole_head_of_hypers_own_is_said_in_our_form() {
        let own = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ndate: now\r\ncontent-length: 0\r\n\r\n";
        let said = ReadStream::in_our_form(own).expect("said anew");
        assert_eq!(said, (Refusal::malformed("the request is malformed"), "now".to_owned()));
        let ours = b"HTTP/1.1 404 Not Found\r\naccess-control-allow-origin: *\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(ReadStream::in_our_form(ours), None);
        // What clients publish is found in bodies, of which any part may be a write.
        let stored = format!("{}\"}}]}}", "HTTP/1.1 4".repeat(6_000));
        assert_eq!(ReadStream::in_our_form(stored.as_bytes()), None);
        let in_a_chunk = b"HTTP/1.1 400 x\n\n\r\n0\r\n\r\n";
        assert_eq!(ReadStream::in_our_form(in_a_chunk), None);
    }
}
