//! The bytes between generator and server: just enough of WebSocket and of the frames to measure with.

pub mod frames;
pub mod handshake;
pub mod reader;
pub mod stamp;
pub mod websocket;
