//! Writes to many sockets with one system call, if the system can.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod unsupported;

use std::os::fd::BorrowedFd;

#[cfg(target_os = "linux")]
pub(super) use linux::IoUringWriter;
#[cfg(not(target_os = "linux"))]
pub(super) use unsupported::UnsupportedIoUring as IoUringWriter;

use crate::hub::{PriorWrite, SocketOutbox};

/// One write to a socket, of the start of its outbox.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nothing reads it where there is no ring"))]
pub(super) struct SocketWrite<'a> {
    /// Index of the outcome.
    pub(super) at: usize,
    pub(super) socket: BorrowedFd<'a>,
    pub(super) outbox: &'a SocketOutbox,
}

/// Outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SocketWriteResult {
    Known(PriorWrite),
    /// Unknown: the kernel may have written some bytes, may write more, and will not report that.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only a ring can fail so"))]
    Unknown,
}

impl SocketWriteResult {
    pub(super) const NOTHING: Self = Self::Known(PriorWrite::Nothing);
}
