//! Every byte format of Fanfare: socket frames, HTTP bodies and paths, messages between nodes, and the text
//! that a TokenRequest signs.
//!
//! The crate knows no time, state or I/O. It reads what comes from outside within bounds.

#![warn(missing_docs)]

pub mod envelope;
pub mod frame;
pub mod http;
pub mod json;
pub mod msgpack;
pub mod outbox;
pub mod path;
#[cfg(feature = "peer")]
pub mod peer;
pub mod queue;
pub mod serial;
pub mod token;
pub mod trace;
pub mod webhook;

mod writer;
