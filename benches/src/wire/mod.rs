//! Wire formats between generator and server: as much of WebSocket and of the protocols as the measurements need.

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
