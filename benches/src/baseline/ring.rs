//! Writes to many sockets with one system call, by io_uring.

use std::io::{self, IoSlice};
use std::mem;
use std::os::fd::RawFd;

use io_uring::{IoUring, opcode, types};

/// Number of writes in one call, that of the node.
const ENTRIES: u32 = 64;
/// Flags of a write. Without `MSG_DONTWAIT` io_uring would wait for a full socket, even a non-blocking one, and the
/// whole call with it.
const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

pub(super) struct Ring(IoUring);

/// Frames for one socket. The socket takes all of them, or the write fails.
pub(super) struct Write<'a> {
    /// Number of the connection.
    pub(super) to: usize,
    pub(super) socket: RawFd,
    pub(super) parts: Vec<IoSlice<'a>>,
}

impl Ring {
    pub(super) fn new() -> io::Result<Self> {
        IoUring::builder().setup_single_issuer().setup_defer_taskrun().build(ENTRIES).map(Self)
    }

    /// Writes with one call, and gives the connections whose sockets did not take all of their write.
    pub(super) fn write(&mut self, writes: &[Write<'_>]) -> io::Result<Vec<usize>> {
        let mut failed = Vec::new();
        for writes in writes.chunks(ENTRIES as usize) {
            let heads: Vec<libc::msghdr> = writes.iter().map(|write| head(&write.parts)).collect();
            for (at, (write, head)) in writes.iter().zip(&heads).enumerate() {
                let socket = types::Fd(write.socket);
                let entry = match &write.parts[..] {
                    // A single write is cheaper than a vector of one.
                    [only] => {
                        opcode::Send::new(socket, only.as_ptr(), only.len() as u32).flags(FLAGS).build()
                    }
                    _ => opcode::SendMsg::new(socket, head).flags(FLAGS as u32).build(),
                };
                self.push(&entry.user_data(at as u64));
            }
            let mut left = writes.len();
            while left > 0 {
                match self.0.submit_and_wait(left) {
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    submitted => drop(submitted?),
                }
                for done in self.0.completion() {
                    left -= 1;
                    let Write { to, parts, .. } = &writes[done.user_data() as usize];
                    let bytes: usize = parts.iter().map(|part| part.len()).sum();
                    if usize::try_from(done.result()) != Ok(bytes) {
                        failed.push(*to);
                    }
                }
            }
        }
        Ok(failed)
    }

    #[expect(unsafe_code, reason = "the kernel reads what an entry points to")]
    fn push(&mut self, entry: &io_uring::squeue::Entry) {
        // SAFETY: `write` returns after the last completion, so what it was given outlives the kernel's use of it.
        let pushed = unsafe { self.0.submission().push(entry) };
        pushed.expect("there is room for as many as are written in one call");
    }
}

#[expect(unsafe_code, reason = "some systems have more fields in it than can be named")]
fn head(parts: &[IoSlice<'_>]) -> libc::msghdr {
    // SAFETY: the struct holds numbers and pointers, for which 0 is a valid value.
    let mut head: libc::msghdr = unsafe { mem::zeroed() };
    // An `IoSlice` has the layout of an `iovec`, and the kernel only reads the bytes.
    head.msg_iov = parts.as_ptr().cast_mut().cast();
    head.msg_iovlen = parts.len() as _;
    head
}
