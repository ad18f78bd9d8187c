//! Frames that wait for one connection's socket.

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use bytes::Bytes;

/// Frames per vectored write.
const SLICES_MAX: usize = 64;
/// Slots kept by an empty outbox.
const IDLE_SLOTS: usize = 4;

/// A queue of shared frames. Its owner bounds it: the connection closes as a slow consumer when
/// [`SocketOutbox::live_bytes`] passes the limit.
#[derive(Debug, Default)]
pub struct SocketOutbox {
    frames: VecDeque<Bytes>,
    bytes: usize,
    /// Bytes of the first frame that the socket has taken.
    written: usize,
    /// Bytes of the waiting answers, and the total at which the last of them ends.
    answers: usize,
    answers_end: u64,
    /// Total bytes that the socket has taken.
    taken: u64,
    /// Bytes of the last replay page, pulled for this connection alone.
    replayed: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Flush {
    Drained,
    /// The socket is full; `progress`: it took at least one byte.
    Blocked {
        progress: bool,
    },
}

/// Result of a write of [`SocketOutbox::slices`] that another caller made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PriorWrite {
    /// No write, or it failed before any byte.
    Nothing,
    Took(usize),
    /// The socket is full and took nothing.
    Full,
}

impl SocketOutbox {
    pub fn push(&mut self, frame: Bytes) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }

    /// Queues an answer to a request of the client, as opposed to a delivery.
    pub fn push_answer(&mut self, frame: Bytes) {
        self.answers = self.answers() + frame.len();
        self.push(frame);
        self.answers_end = self.taken + self.bytes as u64;
    }

    /// Queues a replay page, pulled because little was waiting: it does not count as live.
    pub fn push_replay(&mut self, frames: impl Iterator<Item = Bytes>) {
        let before = self.bytes;
        frames.for_each(|frame| self.push(frame));
        self.replayed = self.bytes - before;
    }

    /// Waiting bytes without the last replay page.
    pub fn live_bytes(&self) -> usize {
        self.bytes.saturating_sub(self.replayed)
    }

    /// Bytes of answers that the client has not taken; reset only when the last of them is taken.
    pub fn answers(&self) -> usize {
        if self.taken < self.answers_end { self.answers } else { 0 }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// Drops all frames but a partly written one, so that a closing frame can still be sent.
    pub fn keep_partial_frame(&mut self) {
        self.frames.truncate(usize::from(self.written > 0));
        self.bytes = self.frames.front().map_or(0, |frame| frame.len() - self.written);
        (self.answers, self.answers_end, self.replayed) = (0, self.taken, 0);
    }

    /// The slices of one vectored write.
    pub fn slices(&self) -> impl Iterator<Item = IoSlice<'_>> {
        let mut skip = self.written;
        let frames = self.frames.iter().take(SLICES_MAX);
        frames.map(move |frame| IoSlice::new(&frame[std::mem::take(&mut skip)..]))
    }

    pub fn slice_count(&self) -> usize {
        self.frames.len().min(SLICES_MAX)
    }

    /// Leaks the frames, which an unfinished write of the kernel may still read.
    pub fn leak(&mut self) {
        std::mem::forget(std::mem::take(self));
    }

    /// Writes and flushes until the queue is empty or the socket is full.
    pub fn flush(&mut self, socket: &mut impl io::Write) -> io::Result<Flush> {
        self.flush_after(PriorWrite::Nothing, socket)
    }

    /// Flushes after a first write that was made already.
    pub fn flush_after(&mut self, begun: PriorWrite, socket: &mut impl io::Write) -> io::Result<Flush> {
        let mut progress = false;
        match begun {
            PriorWrite::Nothing => {}
            PriorWrite::Took(taken) => {
                progress = true;
                self.advance(taken);
            }
            PriorWrite::Full => return Ok(Flush::Blocked { progress }),
        }
        while let Some(first) = self.frames.front() {
            let result = if self.frames.len() == 1 {
                socket.write(&first[self.written..])
            } else {
                let mut slices = [IoSlice::new(&[]); SLICES_MAX];
                let count = self.fill(&mut slices);
                socket.write_vectored(&slices[..count])
            };
            match result {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(taken) => {
                    progress = true;
                    self.advance(taken);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    return Ok(Flush::Blocked { progress });
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if self.frames.capacity() > IDLE_SLOTS {
            self.frames = VecDeque::new();
        }
        self.replayed = 0;
        match socket.flush() {
            Ok(()) => Ok(Flush::Drained),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Flush::Blocked { progress }),
            Err(error) => Err(error),
        }
    }

    fn fill<'a>(&'a self, slices: &mut [IoSlice<'a>; SLICES_MAX]) -> usize {
        slices.iter_mut().zip(self.slices()).for_each(|(to, slice)| *to = slice);
        self.slice_count()
    }

    fn advance(&mut self, mut taken: usize) {
        self.bytes -= taken;
        self.taken += taken as u64;
        while let Some(first) = self.frames.front() {
            let left = first.len() - self.written;
            if taken < left {
                self.written += taken;
                return;
            }
            taken -= left;
            self.written = 0;
            self.frames.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A socket that takes `capacity` bytes and then is full.
    struct BoundedTestSocket {
        taken: Vec<u8>,
        capacity: usize,
    }

    impl io::Write for BoundedTestSocket {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let count = bytes.len().min(self.capacity);
            if count == 0 {
                return Err(io::ErrorKind::WouldBlock.into());
            }
            self.capacity -= count;
            self.taken.extend_from_slice(&bytes[..count]);
            Ok(count)
        }

        fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
            self.write(&slices.iter().flat_map(|slice| slice.to_vec()).collect::<Vec<_>>())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn outbox(frames: usize) -> (SocketOutbox, Vec<u8>) {
        let mut outbox = SocketOutbox::default();
        let mut all = Vec::new();
        for number in 0..frames {
            let frame = format!("frame {number};").into_bytes();
            all.extend_from_slice(&frame);
            outbox.push(frame.into());
        }
        (outbox, all)
    }

    #[test]
    fn every_split_of_the_stream_arrives_whole() {
        for capacity in 0..120 {
            let (mut outbox, all) = outbox(10);
            let mut socket = BoundedTestSocket { taken: Vec::new(), capacity };
            let first = outbox.flush(&mut socket).expect("this socket never fails");
            assert_eq!(first == Flush::Drained, all.len() <= capacity);
            assert_eq!(outbox.bytes(), all.len() - socket.taken.len());
            socket.capacity = usize::MAX;
            assert_eq!(outbox.flush(&mut socket).expect("this socket never fails"), Flush::Drained);
            assert_eq!(socket.taken, all);
        }
    }

    #[test]
    fn outbox_continues_a_flush_that_io_uring_began() {
        for taken in 1..=80 {
            let (mut outbox, all) = outbox(10);
            let slices: Vec<u8> = outbox.slices().flat_map(|slice| slice.to_vec()).collect();
            assert_eq!(slices, all);
            let mut socket = BoundedTestSocket { taken: slices[..taken].to_vec(), capacity: 20 };
            let flushed =
                outbox.flush_after(PriorWrite::Took(taken), &mut socket).expect("this socket never fails");
            let drained = all.len() <= taken + 20;
            assert_eq!(flushed, if drained { Flush::Drained } else { Flush::Blocked { progress: true } });
            let rest: Vec<u8> = outbox.slices().flat_map(|slice| slice.to_vec()).collect();
            assert_eq!([socket.taken, rest].concat(), all);
        }
        let (mut outbox, all) = outbox(10);
        let mut socket = BoundedTestSocket { taken: Vec::new(), capacity: 20 };
        let flushed = outbox.flush_after(PriorWrite::Full, &mut socket).expect("this socket never fails");
        assert_eq!((flushed, outbox.bytes()), (Flush::Blocked { progress: false }, all.len()));
    }

    #[test]
    fn more_frames_than_one_write_takes() {
        let (mut outbox, all) = outbox(3 * SLICES_MAX + 1);
        let mut socket = BoundedTestSocket { taken: Vec::new(), capacity: usize::MAX };
        assert_eq!(outbox.flush(&mut socket).expect("this socket never fails"), Flush::Drained);
        assert_eq!(socket.taken, all);
    }

    #[test]
    fn answers_count_until_the_last_is_taken() {
        let (mut outbox, _) = outbox(1);
        outbox.push_answer(Bytes::from_static(b"answer"));
        outbox.push(Bytes::from_static(b"live"));
        let mut socket = BoundedTestSocket { taken: Vec::new(), capacity: 13 };
        outbox.flush(&mut socket).expect("this socket never fails");
        assert_eq!(outbox.answers(), 6);
        socket.capacity = 2;
        outbox.flush(&mut socket).expect("this socket never fails");
        assert_eq!((outbox.answers(), outbox.bytes()), (0, 3));
        outbox.push_answer(Bytes::from_static(b"next"));
        assert_eq!(outbox.answers(), 4);
    }

    #[test]
    fn replayed_bytes_in_outbox_do_not_count_as_live() {
        let (mut outbox, _) = outbox(1);
        outbox.push_replay([Bytes::from_static(b"missed"), Bytes::from_static(b"too")].into_iter());
        assert_eq!((outbox.bytes(), outbox.live_bytes()), (17, 8));
        outbox.push(Bytes::from_static(b"live"));
        assert_eq!(outbox.live_bytes(), 12);
        let mut socket = BoundedTestSocket { taken: Vec::new(), capacity: usize::MAX };
        outbox.flush(&mut socket).expect("this socket never fails");
        outbox.push(Bytes::from_static(b"live"));
        assert_eq!(outbox.live_bytes(), 4);
    }

    #[test]
    fn an_ending_follows_the_frame_that_was_begun() {
        let (mut outbox, _) = outbox(3);
        let mut socket = BoundedTestSocket { taken: Vec::new(), capacity: 4 };
        outbox.flush(&mut socket).expect("this socket never fails");
        outbox.keep_partial_frame();
        outbox.push(Bytes::from_static(b"end"));
        socket.capacity = usize::MAX;
        outbox.flush(&mut socket).expect("this socket never fails");
        assert_eq!(socket.taken, b"frame 0;end");
        assert_eq!(outbox.bytes(), 0);
    }
}
