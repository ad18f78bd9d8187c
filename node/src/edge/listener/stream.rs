//! Stream that hyper serves: first the bytes that the shard has read, then the socket, plain or under TLS.

use std::io::{self, ErrorKind, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::idle_timeout::{IdleTimeout, RequestCounter};
use super::write_timeout::WriteTimeout;
use crate::edge::ClientSocket;
use crate::edge::errors::{HttpRefusal, RefusalKind};
use crate::edge::http;
use crate::edge::link::ClientLink;
use crate::edge::proxies::ProxiedClient;
use crate::edge::socket::{ConnectionPermit, HttpConnection, refusal_bytes};
use crate::model::Limits;
use crate::telemetry::Limit;
use crate::tls::TlsConnection;

const CORS_HEADER: &[u8] = b"access-control-allow-origin";

/// A socket with bytes that were read from it before.
pub(super) struct ReadStream {
    socket: HttpSocket,
    read: Vec<u8>,
    taken: usize,
    /// Answer of this node that is being written in place of hyper's.
    own: Vec<u8>,
    headers: HeaderCapacity,
    /// Boxed, since the task of a connection holds several copies of this stream.
    idle_timeout: Box<IdleTimeout>,
    write_timeout: WriteTimeout,
    permit: ConnectionPermit,
}

/// Number of header slots. Space for as many headers as the bytes of a head can hold would cost each request several microseconds, so it is
/// reserved only once a head with many headers arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeaderCapacity {
    Standard,
    /// More headers than slots: hyper refused the head before the client got an answer, and the node reads it again
    /// with more slots.
    TooMany,
    Extended,
}

impl ReadStream {
    /// Wraps a connection. Must run within a tokio runtime. A client that takes nothing of an answer for too long is given up.
    pub(super) fn new(connection: HttpConnection, limits: &Limits) -> io::Result<Self> {
        let HttpConnection { link, permit, read } = connection;
        let stall = WriteTimeout::new(Duration::from_millis(limits.http_stall_ms));
        Ok(Self {
            socket: HttpSocket::new(link)?,
            read,
            taken: 0,
            own: Vec::new(),
            headers: HeaderCapacity::Standard,
            idle_timeout: Box::new(IdleTimeout::new(limits)),
            write_timeout: stall,
            permit,
        })
    }

    /// Waits until the runtime knows that the socket is writable. hyper gives up a connection if it cannot write the answer to a refused
    /// upgrade at once, and then the client would never get that answer.
    pub(super) async fn writable(&self) -> io::Result<()> {
        self.socket.tcp.writable().await
    }

    /// Counter that must be told of each request.
    pub(super) fn turns(&self) -> RequestCounter {
        self.idle_timeout.turns()
    }

    pub(super) fn client_socket(&self) -> ClientSocket {
        ClientSocket(Arc::downgrade(&self.socket.tcp))
    }

    /// Puts bytes that hyper has read and not used before the bytes that are still to be read.
    pub(super) fn give_back(&mut self, read: &[u8]) {
        self.read = [read, &self.read[self.taken..]].concat();
        self.taken = 0;
    }

    pub(super) fn headers(&mut self) -> &mut HeaderCapacity {
        &mut self.headers
    }

    /// Replaces an answer that hyper makes by itself. True if it did.
    fn replace_hyper_response(&mut self, bytes: &[u8]) -> bool {
        let Some((refusal, date)) = Self::translate_hyper_response(bytes) else { return false };
        if self.headers == HeaderCapacity::Standard && bytes.starts_with(b"HTTP/1.1 431") {
            self.headers = HeaderCapacity::TooMany;
        } else {
            http::count_refusal(http::NO_ROUTE, &refusal);
            self.own = refusal_bytes(&refusal, date);
        }
        true
    }

    /// Parses an answer that hyper makes by itself. For a head that it cannot read hyper sends only a status. Every answer of this node has
    /// the CORS headers, so one without them is hyper's. It consists of a head alone, so no part of a body can be taken for one.
    fn translate_hyper_response(bytes: &[u8]) -> Option<(HttpRefusal, String)> {
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
            b"431" => {
                HttpRefusal::new(RefusalKind::HeadersTooLarge, "the request's headers are over the limit")
            }
            b"414" => {
                HttpRefusal::new(RefusalKind::HeadersTooLarge, "the request's address is over the limit")
            }
            b"408" => HttpRefusal::new(RefusalKind::TimedOut, "the request did not arrive in time"),
            _ => HttpRefusal::malformed("the request is malformed"),
        };
        match refusal.kind {
            RefusalKind::HeadersTooLarge => Limit::HeaderBytes.hit(),
            RefusalKind::TimedOut => Limit::HeaderMs.hit(),
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
        self.write_timeout.watch(cx, &self.socket.tcp, part, written)
    }

    pub(super) fn into_parts(self) -> Option<(ClientLink<std::net::TcpStream>, ConnectionPermit, Vec<u8>)> {
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
        if read.is_pending() && self.idle_timeout.has_expired(cx) {
            // Pretends that the client has closed, which ends the connection cleanly.
            return Poll::Ready(Ok(()));
        }
        if came {
            self.idle_timeout.record_activity();
        }
        read
    }
}

impl AsyncWrite for ReadStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.replace_hyper_response(bytes) {
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
        if self.headers == HeaderCapacity::TooMany {
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
            && self.replace_hyper_response(first)
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
struct HttpSocket {
    /// Shared with a watcher of the connection's end, which does nothing else.
    tcp: Arc<TcpStream>,
    tls: Option<Box<TlsConnection>>,
    forwarded: Option<Box<ProxiedClient>>,
}

impl HttpSocket {
    fn new(link: ClientLink<std::net::TcpStream>) -> io::Result<Self> {
        let ClientLink { socket, tls, forwarded } = link;
        Ok(Self { tcp: Arc::new(TcpStream::from_std(socket)?), tls, forwarded })
    }

    /// Takes the socket out of the runtime. Fails while a watcher shares it.
    fn into_link(self) -> io::Result<ClientLink<std::net::TcpStream>> {
        let tcp = Arc::into_inner(self.tcp).ok_or(ErrorKind::ResourceBusy)?;
        Ok(ClientLink { socket: tcp.into_std()?, tls: self.tls, forwarded: self.forwarded })
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

    /// Repeats a step of TLS until it does not wait for space in the socket.
    fn poll_step<T>(
        &mut self,
        cx: &mut Context<'_>,
        step: impl Fn(&mut TlsConnection, &mut NonblockingSocket<'_>) -> io::Result<T>,
    ) -> Option<Poll<io::Result<T>>> {
        let tls = self.tls.as_mut()?;
        loop {
            match step(tls, &mut NonblockingSocket(&self.tcp)) {
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
            match tls.read(&mut NonblockingSocket(&self.tcp), buffer.initialize_unfilled()) {
                Ok(taken) => {
                    buffer.advance(taken.bytes);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    // An answer of TLS itself may have found the socket full.
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

impl AsyncRead for HttpSocket {
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

impl AsyncWrite for HttpSocket {
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

/// The socket as a non-blocking one for TLS. A call that would block makes the runtime wait for readiness.
struct NonblockingSocket<'a>(&'a TcpStream);

impl io::Read for NonblockingSocket<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.try_read(buffer)
    }
}

impl io::Write for NonblockingSocket<'_> {
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
        let translated = ReadStream::translate_hyper_response(own).expect("said anew");
        assert_eq!(translated, (HttpRefusal::malformed("the request is malformed"), "now".to_owned()));
        let ours = b"HTTP/1.1 404 Not Found\r\naccess-control-allow-origin: *\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(ReadStream::translate_hyper_response(ours), None);
        // Message data is part of bodies, and any part of a body may be one write.
        let stored = format!("{}\"}}]}}", "HTTP/1.1 4".repeat(6_000));
        assert_eq!(ReadStream::translate_hyper_response(stored.as_bytes()), None);
        let in_a_chunk = b"HTTP/1.1 400 x\n\n\r\n0\r\n\r\n";
        assert_eq!(ReadStream::translate_hyper_response(in_a_chunk), None);
    }
}
