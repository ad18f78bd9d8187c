//! Socket writes through io_uring.

#[cfg(test)]
mod tests;

use std::io::{self, ErrorKind, IoSlice};
use std::mem;
use std::os::fd::AsRawFd as _;

use io_uring::{IoUring, opcode, squeue, types};

use super::{SocketWrite, SocketWriteResult};
use crate::hub::PriorWrite;

/// Writes per system call.
const ENTRIES: usize = 64;
/// Flags of a write: it takes what fits into the socket and never waits, so it is complete when the system call returns. A closed peer is
/// an error and no signal.
const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

pub(in crate::edge::socket) struct IoUringWriter(IoUring);

impl IoUringWriter {
    /// Creates a ring for the calling thread only.
    ///
    /// # Errors
    /// The system has no io_uring, an unsuitable one, or none for this process.
    pub(in crate::edge::socket) fn new() -> io::Result<Self> {
        let mut ring = IoUring::builder();
        ring.setup_single_issuer().setup_defer_taskrun().setup_submit_all();
        ring.build(ENTRIES as u32).map(Self)
    }

    /// Writes once to each of these sockets, and stores the outcome at its index in `written`, where nothing was written before. No outbox
    /// is empty.
    ///
    /// # Errors
    /// The ring is unusable from now on. The outcomes in `written` are valid nevertheless.
    pub(in crate::edge::socket) fn write(
        &mut self,
        writes: &[SocketWrite<'_>],
        written: &mut [SocketWriteResult],
    ) -> io::Result<()> {
        writes.chunks(ENTRIES).try_for_each(|writes| self.write_at_once(writes, written))
    }

    fn write_at_once(
        &mut self,
        writes: &[SocketWrite<'_>],
        written: &mut [SocketWriteResult],
    ) -> io::Result<()> {
        let count = writes.iter().map(|write| write.outbox.slice_count()).sum();
        let mut slices: Vec<IoSlice<'_>> = Vec::with_capacity(count);
        writes.iter().for_each(|write| slices.extend(write.outbox.slices()));
        let mut heads = Vec::with_capacity(writes.len());
        let mut rest = &mut slices[..];
        for write in writes {
            let (own, others) = rest.split_at_mut(write.outbox.slice_count());
            heads.push(head(own));
            rest = others;
        }
        for (at, (write, head)) in writes.iter().zip(&heads).enumerate() {
            self.push(&entry(write, head).user_data(at as u64));
            written[write.at] = SocketWriteResult::Unknown;
        }
        let mut left = writes.len();
        let ended = loop {
            let submitted = self.0.submit_and_wait(left);
            for done in self.0.completion() {
                left -= 1;
                written[writes[done.user_data() as usize].at] =
                    SocketWriteResult::Known(begun(done.result()));
            }
            match submitted {
                _ if left == 0 => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => break error,
                Ok(0) => break ErrorKind::WriteZero.into(),
                Ok(_) => {}
            }
        };
        let untaken = self.0.submission().len();
        Self::settle(writes, untaken, written);
        if left > untaken {
            mem::forget((slices, heads));
        }
        Err(ended)
    }

    /// Resets the outcomes of entries that the kernel has not taken. It takes entries in order, and no further call is made, so it never
    /// will.
    fn settle(writes: &[SocketWrite<'_>], untaken: usize, written: &mut [SocketWriteResult]) {
        for write in &writes[writes.len() - untaken..] {
            written[write.at] = SocketWriteResult::NOTHING;
        }
    }

    #[expect(unsafe_code, reason = "the kernel reads what an entry points to")]
    fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: `write_at_once` returns when each entry that the kernel has taken is done with. Of which that is not
        // known is `SocketWriteResult::Unknown`, and what it points to is never given back.
        let pushed = unsafe { self.0.submission().push(entry) };
        pushed.expect("there is room for as many as are written in one call");
    }
}

/// Ring entry of a write. `head` belongs to the same write.
fn entry(write: &SocketWrite<'_>, head: &libc::msghdr) -> squeue::Entry {
    let socket = types::Fd(write.socket.as_raw_fd());
    let mut slices = write.outbox.slices();
    match (slices.next(), slices.next()) {
        // For a single slice the kernel has less to copy.
        (Some(only), None) if u32::try_from(only.len()).is_ok() => {
            opcode::Send::new(socket, only.as_ptr(), only.len() as u32).flags(FLAGS).build()
        }
        _ => opcode::SendMsg::new(socket, head).flags(FLAGS as u32).build(),
    }
}

#[expect(unsafe_code, reason = "some systems have more fields in it than can be named")]
fn head(slices: &mut [IoSlice<'_>]) -> libc::msghdr {
    // SAFETY: it holds numbers and pointers, for which 0 stands for there being nothing.
    let mut head: libc::msghdr = unsafe { mem::zeroed() };
    // An `IoSlice` has the layout of an `iovec`.
    head.msg_iov = slices.as_mut_ptr().cast();
    head.msg_iovlen = slices.len() as _;
    head
}

/// Outcome of an entry. Errors are ignored here: the socket is then written to again by a call of its own, which returns the error if it
/// persists.
fn begun(result: i32) -> PriorWrite {
    match usize::try_from(result) {
        Ok(0) => PriorWrite::Nothing,
        Ok(taken) => PriorWrite::Took(taken),
        Err(_) if result == -libc::EAGAIN => PriorWrite::Full,
        Err(_) => PriorWrite::Nothing,
    }
}
