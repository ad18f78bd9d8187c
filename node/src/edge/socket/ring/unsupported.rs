//! A system without io_uring.

use std::convert::Infallible;
use std::io;

use super::{SocketWrite, SocketWriteResult};

pub(in crate::edge::socket) struct UnsupportedIoUring(Infallible);

impl UnsupportedIoUring {
    pub(in crate::edge::socket) fn new() -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::edge::socket) fn write(
        &mut self,
        _: &[SocketWrite<'_>],
        _: &mut [SocketWriteResult],
    ) -> io::Result<()> {
        match self.0 {}
    }
}
