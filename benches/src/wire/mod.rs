//! The bytes between generator and server: just enough of WebSocket and of the protocols to measure with.

pub mod centrifuge;
pub mod dialect;
pub mod frames;
pub mod handshake;
pub mod http;
pub mod nats;
pub mod pusher;
pub mod reader;
pub mod stamp;
pub mod websocket;
