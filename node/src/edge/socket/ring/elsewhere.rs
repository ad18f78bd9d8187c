//! A system without io_uring.

use std::convert::Infallible;
use std::io;

use super::{Write, Written};

pub(in crate::edge::socket) struct Ring(Infallible);

impl Ring {
    pub(in crate::edge::socket) fn new() -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(in crate::edge::socket) fn write(&mut self, _: &[Write<'_>], _: &mut [Written]) -> io::Result<()> {
        match self.0 {}
    }
}
