//! Writes to many sockets with one call of the kernel, where the system has that.

#[cfg(not(target_os = "linux"))]
mod elsewhere;
#[cfg(target_os = "linux")]
mod linux;

use std::os::fd::BorrowedFd;

#[cfg(not(target_os = "linux"))]
pub(super) use elsewhere::Ring;
#[cfg(target_os = "linux")]
pub(super) use linux::Ring;

use crate::hub::{Begun, Outbox};

/// One write to a socket, of what its outbox begins with.
#[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "nothing reads it where there is no ring"))]
pub(super) struct Write<'a> {
    /// Where its outcome belongs.
    pub(super) at: usize,
    pub(super) socket: BorrowedFd<'a>,
    pub(super) outbox: &'a Outbox,
}

/// What is known of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Written {
    Known(Begun),
    /// The kernel may have taken some, may take more yet, and nobody will be told.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only a ring can fail so"))]
    Unknown,
}

impl Written {
    pub(super) const NOTHING: Self = Self::Known(Begun::Nothing);
}
