//! Frames of the realtime socket, without their WebSocket headers.

mod client;
mod draft;
mod request;
mod server;

pub use client::{Incoming, MemberIn, MessageIn, PresenceIn, encode_request, parse_server};
pub use draft::Draft;
pub use request::{Attach, Body, FrameError, JSON_BYTES_MAX, PresenceRequest, Request, parse, parse_within};
pub use server::{
    Attached, Connected, MemberOut, MessageOut, PresenceOut, ServerFrame, SyncPage, encode, encode_message,
    encode_messages, encode_presence, encode_written,
};

/// How the frames of a connection are spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Format {
    /// Text frames.
    #[default]
    Json,
    /// Binary frames.
    MsgPack,
}

/// The `op` of a frame.
pub mod op {
    pub const HEARTBEAT: i64 = 0;
    pub const ACK: i64 = 1;
    pub const NACK: i64 = 2;
    pub const CONNECTED: i64 = 3;
    pub const DISCONNECTED: i64 = 4;
    pub const CLOSE: i64 = 5;
    pub const CLOSED: i64 = 6;
    pub const ERROR: i64 = 7;
    pub const ATTACH: i64 = 8;
    pub const ATTACHED: i64 = 9;
    pub const DETACH: i64 = 10;
    pub const DETACHED: i64 = 11;
    pub const PRESENCE: i64 = 12;
    pub const MESSAGE: i64 = 13;
    pub const SYNC: i64 = 14;
    pub const AUTH: i64 = 15;
    pub const OCCUPANCY: i64 = 16;
}

/// The `code` of a frame.
pub mod code {
    pub const BAD_REQUEST: u32 = 40000;
    pub const BAD_NAME: u32 = 40003;
    pub const TOO_LARGE: u32 = 40009;
    pub const CREDENTIAL: u32 = 40100;
    pub const TOKEN: u32 = 40140;
    pub const TOKEN_EXPIRED: u32 = 40142;
    pub const CAPABILITY: u32 = 40160;
    /// The connection was taken up by another socket.
    pub const TAKEN_UP: u32 = 40800;
    pub const LIMIT: u32 = 42900;
    pub const INTERNAL: u32 = 50000;
    /// The outcome is unknown; retry with the same id.
    pub const UNAVAILABLE: u32 = 50003;
}

/// WebSocket close codes.
pub mod close {
    pub const NORMAL: u16 = 1000;
    pub const PROTOCOL: u16 = 1002;
    pub const BAD_UTF8: u16 = 1007;
    pub const POLICY: u16 = 1008;
    pub const TOO_BIG: u16 = 1009;
    pub const DRAINING: u16 = 1012;
    pub const CREDENTIAL: u16 = 4001;
    pub const CAPABILITY: u16 = 4003;
    pub const SLOW: u16 = 4008;
    pub const RATE: u16 = 4029;
}
