use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use super::*;
use crate::hub::{Flush, SocketOutbox};

/// A ring; none if the system refuses it, which fails the test in CI.
fn ring() -> Option<IoUringWriter> {
    match IoUringWriter::new() {
        Ok(ring) => Some(ring),
        Err(error) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no io_uring: {error}");
            eprintln!("NOT TESTED, there is no io_uring: {error}");
            None
        }
    }
}

/// A connection with its outbox, and the client's end.
struct SocketPair {
    socket: TcpStream,
    client: TcpStream,
    outbox: SocketOutbox,
    /// All bytes that were ever pushed.
    pushed: Vec<u8>,
}

impl SocketPair {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, client, outbox: SocketOutbox::default(), pushed: Vec::new() }
    }

    /// A pair with the smallest buffers that the system allows.
    fn small() -> Self {
        let pair = Self::new();
        socket2::SockRef::from(&pair.socket).set_send_buffer_size(1).unwrap();
        pair
    }

    fn push(&mut self, frames: usize, bytes: usize) {
        for _ in 0..frames {
            let frame: Vec<u8> = std::iter::repeat_with(|| fastrand::u8(..)).take(bytes).collect();
            self.pushed.extend_from_slice(&frame);
            self.outbox.push(frame.into());
        }
    }

    /// Fills the socket, bypassing the outbox.
    fn fill(&mut self) {
        while let Ok(count) = self.socket.write(&[7; 64 * 1024]) {
            self.pushed.extend_from_slice(&[7; 64 * 1024][..count]);
        }
    }

    fn first_bytes(&self) -> usize {
        self.outbox.slices().map(|slice| slice.len()).sum()
    }

    fn flush(&mut self, written: SocketWriteResult) -> std::io::Result<Flush> {
        let SocketWriteResult::Known(begun) = written else { panic!("what was written is not known") };
        self.outbox.flush_after(begun, &mut self.socket)
    }

    /// Writes the rest as the client reads, and compares what arrives with what was pushed.
    fn finish(mut self) {
        let mut came = Vec::new();
        let mut buffer = [0; 16 * 1024];
        let deadline = Instant::now() + Duration::from_secs(10);
        while came.len() < self.pushed.len() && Instant::now() < deadline {
            // The socket may have space only a moment after the client has read.
            match self.client.read(&mut buffer) {
                Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
                Ok(count) => came.extend_from_slice(&buffer[..count]),
            }
            self.outbox.flush(&mut self.socket).expect("the client is there");
        }
        assert!(came == self.pushed, "each byte once and in order");
        drop(self.socket);
        assert_eq!(self.client.read(&mut buffer).expect("the end"), 0, "and nothing more");
    }
}

fn write(ring: &mut IoUringWriter, pairs: &[&SocketPair]) -> (Vec<SocketWriteResult>, std::io::Result<()>) {
    let mut writes = Vec::new();
    for (at, SocketPair { socket, outbox, .. }) in pairs.iter().copied().enumerate() {
        writes.push(SocketWrite { at, socket: socket.as_fd(), outbox });
    }
    let mut written = vec![SocketWriteResult::NOTHING; pairs.len()];
    let result = ring.write(&writes, &mut written);
    (written, result)
}

fn write_all(ring: &mut IoUringWriter, pairs: &[&SocketPair]) -> Vec<SocketWriteResult> {
    let (written, result) = write(ring, pairs);
    result.expect("the ring works");
    written
}

#[test]
fn sockets_get_their_own_frames_in_one_call() {
    let Some(mut ring) = ring() else { return };
    // More sockets than one call takes, and more frames than one write takes.
    let mut pairs: Vec<_> = (0..150).map(|_| SocketPair::new()).collect();
    for round in 0..3 {
        for (number, pair) in pairs.iter_mut().enumerate() {
            pair.push(1 + (number + round) % 70, 40);
        }
        let written = write_all(&mut ring, &pairs.iter().collect::<Vec<_>>());
        for (pair, written) in pairs.iter_mut().zip(written) {
            assert_eq!(written, SocketWriteResult::Known(PriorWrite::Took(pair.first_bytes())));
            assert_eq!(pair.flush(written).unwrap(), Flush::Drained);
        }
    }
    pairs.into_iter().for_each(SocketPair::finish);
}

#[test]
fn socket_with_partial_write_continues_with_the_rest() {
    let Some(mut ring) = ring() else { return };
    let (mut one, mut many, mut other) = (SocketPair::small(), SocketPair::small(), SocketPair::new());
    one.push(1, 1024 * 1024);
    many.push(64, 16 * 1024);
    other.push(3, 100);
    let written = write_all(&mut ring, &[&one, &many, &other]);
    for (pair, written) in [&mut one, &mut many].into_iter().zip(&written) {
        let SocketWriteResult::Known(PriorWrite::Took(taken)) = *written else { panic!("{written:?}") };
        assert!((1..pair.first_bytes()).contains(&taken), "{taken}");
        assert_eq!(pair.flush(*written).unwrap(), Flush::Blocked { progress: true });
    }
    assert_eq!(other.flush(written[2]).unwrap(), Flush::Drained);
    [one, many, other].into_iter().for_each(SocketPair::finish);
}

#[test]
fn full_socket_takes_nothing_and_blocks_no_writer() {
    let Some(mut ring) = ring() else { return };
    let (mut single, mut several) = (SocketPair::small(), SocketPair::small());
    let deadline = Instant::now() + Duration::from_secs(10);
    // A socket has space again for a moment, until the client's buffer is full too.
    loop {
        assert!(Instant::now() < deadline, "they are never full");
        for (pair, frames) in [(&mut single, 1), (&mut several, 5)] {
            if pair.outbox.is_empty() {
                pair.fill();
                pair.push(frames, 1000);
            }
        }
        let written = write_all(&mut ring, &[&single, &several]);
        let flushed = [single.flush(written[0]).unwrap(), several.flush(written[1]).unwrap()];
        if written == [SocketWriteResult::Known(PriorWrite::Full); 2] {
            assert_eq!(flushed, [const { Flush::Blocked { progress: false } }; 2]);
            break;
        }
    }
    [single, several].into_iter().for_each(SocketPair::finish);
}

#[test]
fn closed_socket_fails_its_own_write_alone() {
    let Some(mut ring) = ring() else { return };
    let (mut closed, mut ended, mut other) = (SocketPair::new(), SocketPair::new(), SocketPair::new());
    // Unread bytes, so that the close reaches the other side as a reset.
    closed.socket.write_all(b"x").unwrap();
    drop(std::mem::replace(&mut closed.client, SocketPair::new().client));
    ended.socket.shutdown(std::net::Shutdown::Write).unwrap();
    for pair in [&mut closed, &mut ended, &mut other] {
        pair.push(2, 100);
    }
    let written = write_all(&mut ring, &[&closed, &ended, &other]);
    assert_eq!(written[..2], [SocketWriteResult::NOTHING; 2]);
    let kinds = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
    assert!(kinds.contains(&closed.flush(written[0]).unwrap_err().kind()));
    assert!(kinds.contains(&ended.flush(written[1]).unwrap_err().kind()));
    assert_eq!(other.flush(written[2]).unwrap(), Flush::Drained);
    other.finish();
}

/// Breaks the ring, so that every later call fails.
#[expect(unsafe_code, reason = "only so can there be something else where the ring is")]
fn break_down(ring: &IoUringWriter) {
    let other = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: what the descriptor stood for is used by nobody but this ring, which hears of it from the kernel.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), ring.0.as_raw_fd()) } >= 0);
}

#[test]
fn failed_io_uring_has_written_nothing() {
    let Some(mut ring) = ring() else { return };
    let mut pairs: Vec<_> = (0..100).map(|_| SocketPair::new()).collect();
    pairs.iter_mut().for_each(|pair| pair.push(3, 100));
    break_down(&ring);
    let (written, result) = write(&mut ring, &pairs.iter().collect::<Vec<_>>());
    result.expect_err("nothing is where the ring was");
    for (pair, written) in pairs.iter_mut().zip(written) {
        assert_eq!(written, SocketWriteResult::NOTHING);
        assert_eq!(pair.flush(written).unwrap(), Flush::Drained);
    }
    pairs.into_iter().for_each(SocketPair::finish);
}

#[test]
fn failed_call_has_not_written_to_its_last_sockets() {
    const KNOWN: SocketWriteResult = SocketWriteResult::Known(PriorWrite::Took(3));
    let outbox = SocketOutbox::default();
    let file = std::io::stderr();
    let writes = [3, 1, 0].map(|at| SocketWrite { at, socket: file.as_fd(), outbox: &outbox });
    for (untaken, expected) in [
        (0, [SocketWriteResult::Unknown, SocketWriteResult::Unknown, SocketWriteResult::NOTHING, KNOWN]),
        (1, [SocketWriteResult::NOTHING, SocketWriteResult::Unknown, SocketWriteResult::NOTHING, KNOWN]),
        (2, [SocketWriteResult::NOTHING, SocketWriteResult::NOTHING, SocketWriteResult::NOTHING, KNOWN]),
    ] {
        let mut written =
            [SocketWriteResult::Unknown, SocketWriteResult::Unknown, SocketWriteResult::NOTHING, KNOWN];
        IoUringWriter::settle(&writes, untaken, &mut written);
        assert_eq!(written, expected);
    }
}
