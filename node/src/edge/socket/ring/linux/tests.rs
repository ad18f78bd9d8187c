use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

use super::*;
use crate::hub::{Flush, Outbox};

/// None where the system refuses it, which is only taken on machines of others.
fn ring() -> Option<Ring> {
    match Ring::new() {
        Ok(ring) => Some(ring),
        Err(error) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no io_uring: {error}");
            eprintln!("NOT TESTED, there is no io_uring: {error}");
            None
        }
    }
}

/// A connection with what waits for it, and its other end.
struct Pair {
    socket: TcpStream,
    client: TcpStream,
    outbox: Outbox,
    /// All that was ever pushed.
    pushed: Vec<u8>,
}

impl Pair {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        let (socket, _) = listener.accept().unwrap();
        socket.set_nonblocking(true).unwrap();
        Self { socket, client, outbox: Outbox::default(), pushed: Vec::new() }
    }

    /// With as little room as the system gives.
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

    /// Past its outbox.
    fn fill(&mut self) {
        while let Ok(count) = self.socket.write(&[7; 64 * 1024]) {
            self.pushed.extend_from_slice(&[7; 64 * 1024][..count]);
        }
    }

    fn first_bytes(&self) -> usize {
        self.outbox.slices().map(|slice| slice.len()).sum()
    }

    fn flush(&mut self, written: Written) -> std::io::Result<Flush> {
        let Written::Known(begun) = written else { panic!("what was written is not known") };
        self.outbox.flush_begun(begun, &mut self.socket)
    }

    /// Writes the rest as room is made, and compares what came with what was pushed.
    fn finish(mut self) {
        let mut came = Vec::new();
        let mut buffer = [0; 16 * 1024];
        let deadline = Instant::now() + Duration::from_secs(10);
        while came.len() < self.pushed.len() && Instant::now() < deadline {
            // The socket may have room a moment after its client has read.
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

fn write(ring: &mut Ring, pairs: &[&Pair]) -> (Vec<Written>, std::io::Result<()>) {
    let mut writes = Vec::new();
    for (at, Pair { socket, outbox, .. }) in pairs.iter().copied().enumerate() {
        writes.push(Write { at, socket: socket.as_fd(), outbox });
    }
    let mut written = vec![Written::NOTHING; pairs.len()];
    let result = ring.write(&writes, &mut written);
    (written, result)
}

fn write_all(ring: &mut Ring, pairs: &[&Pair]) -> Vec<Written> {
    let (written, result) = write(ring, pairs);
    result.expect("the ring works");
    written
}

#[test]
fn each_socket_takes_its_own() {
    let Some(mut ring) = ring() else { return };
    // More sockets than one call takes, and more frames than one write does.
    let mut pairs: Vec<_> = (0..150).map(|_| Pair::new()).collect();
    for round in 0..3 {
        for (number, pair) in pairs.iter_mut().enumerate() {
            pair.push(1 + (number + round) % 70, 40);
        }
        let written = write_all(&mut ring, &pairs.iter().collect::<Vec<_>>());
        for (pair, written) in pairs.iter_mut().zip(written) {
            assert_eq!(written, Written::Known(Begun::Took(pair.first_bytes())));
            assert_eq!(pair.flush(written).unwrap(), Flush::Drained);
        }
    }
    pairs.into_iter().for_each(Pair::finish);
}

#[test]
fn socket_with_partial_write_continues_with_the_rest() {
    let Some(mut ring) = ring() else { return };
    let (mut one, mut many, mut other) = (Pair::small(), Pair::small(), Pair::new());
    one.push(1, 1024 * 1024);
    many.push(64, 16 * 1024);
    other.push(3, 100);
    let written = write_all(&mut ring, &[&one, &many, &other]);
    for (pair, written) in [&mut one, &mut many].into_iter().zip(&written) {
        let Written::Known(Begun::Took(taken)) = *written else { panic!("{written:?}") };
        assert!((1..pair.first_bytes()).contains(&taken), "{taken}");
        assert_eq!(pair.flush(*written).unwrap(), Flush::Blocked { progress: true });
    }
    assert_eq!(other.flush(written[2]).unwrap(), Flush::Drained);
    [one, many, other].into_iter().for_each(Pair::finish);
}

#[test]
fn a_full_socket_takes_nothing_and_nobody_waits_for_it() {
    let Some(mut ring) = ring() else { return };
    let (mut single, mut several) = (Pair::small(), Pair::small());
    let deadline = Instant::now() + Duration::from_secs(10);
    // A socket has room again for a moment, until that of the client is full too.
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
        if written == [Written::Known(Begun::Full); 2] {
            assert_eq!(flushed, [const { Flush::Blocked { progress: false } }; 2]);
            break;
        }
    }
    [single, several].into_iter().for_each(Pair::finish);
}

#[test]
fn closed_socket_fails_its_own_write_alone() {
    let Some(mut ring) = ring() else { return };
    let (mut gone, mut ended, mut other) = (Pair::new(), Pair::new(), Pair::new());
    // With something unread, so that the other side is told at once.
    gone.socket.write_all(b"x").unwrap();
    drop(std::mem::replace(&mut gone.client, Pair::new().client));
    ended.socket.shutdown(std::net::Shutdown::Write).unwrap();
    for pair in [&mut gone, &mut ended, &mut other] {
        pair.push(2, 100);
    }
    let written = write_all(&mut ring, &[&gone, &ended, &other]);
    assert_eq!(written[..2], [Written::NOTHING; 2]);
    let kinds = [ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];
    assert!(kinds.contains(&gone.flush(written[0]).unwrap_err().kind()));
    assert!(kinds.contains(&ended.flush(written[1]).unwrap_err().kind()));
    assert_eq!(other.flush(written[2]).unwrap(), Flush::Drained);
    other.finish();
}

/// From now on every call fails.
#[expect(unsafe_code, reason = "only so can there be something else where the ring is")]
fn break_down(ring: &Ring) {
    let other = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: what the descriptor stood for is used by nobody but this ring, which hears of it from the kernel.
    assert!(unsafe { libc::dup2(other.as_raw_fd(), ring.0.as_raw_fd()) } >= 0);
}

#[test]
fn a_ring_that_fails_has_written_nothing() {
    let Some(mut ring) = ring() else { return };
    let mut pairs: Vec<_> = (0..100).map(|_| Pair::new()).collect();
    pairs.iter_mut().for_each(|pair| pair.push(3, 100));
    break_down(&ring);
    let (written, result) = write(&mut ring, &pairs.iter().collect::<Vec<_>>());
    result.expect_err("nothing is where the ring was");
    for (pair, written) in pairs.iter_mut().zip(written) {
        assert_eq!(written, Written::NOTHING);
        assert_eq!(pair.flush(written).unwrap(), Flush::Drained);
    }
    pairs.into_iter().for_each(Pair::finish);
}

#[test]
fn of_a_call_that_failed_the_last_ones_were_not_written() {
    const KNOWN: Written = Written::Known(Begun::Took(3));
    let outbox = Outbox::default();
    let file = std::io::stderr();
    let writes = [3, 1, 0].map(|at| Write { at, socket: file.as_fd(), outbox: &outbox });
    for (untaken, expected) in [
        (0, [Written::Unknown, Written::Unknown, Written::NOTHING, KNOWN]),
        (1, [Written::NOTHING, Written::Unknown, Written::NOTHING, KNOWN]),
        (2, [Written::NOTHING, Written::NOTHING, Written::NOTHING, KNOWN]),
    ] {
        let mut written = [Written::Unknown, Written::Unknown, Written::NOTHING, KNOWN];
        Ring::settle(&writes, untaken, &mut written);
        assert_eq!(written, expected);
    }
}
