//! Every byte format of Fanfare: socket frames, HTTP bodies and paths, and the text a TokenRequest signs.
//!
//! Nothing here knows time, state or input and output; what comes from outside is read with bounds.

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
