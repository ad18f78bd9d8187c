//! Frames of the realtime socket without their WebSocket headers, in the format of `docs/socket-protocol.md`.

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

/// Encoding of the frames of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Format {
    /// JSON in text frames.
    #[default]
    Json,
    /// MessagePack in binary frames.
    MsgPack,
}

/// Values of `op`, the kind of a frame. The direction of each stands in its comment.
pub mod op {
    /// Heartbeat of either side. One with an `id` is answered by the same frame.
    pub const HEARTBEAT: i64 = 0;
    /// Answer of the server: a request is carried out.
    pub const ACK: i64 = 1;
    /// Answer of the server: a request is refused.
    pub const NACK: i64 = 2;
    /// First frame of the server on an accepted connection, and its second answer to a new token.
    pub const CONNECTED: i64 = 3;
    /// Notice of the server before a close: the client may connect again.
    pub const DISCONNECTED: i64 = 4;
    /// Request of the client to end the connection.
    pub const CLOSE: i64 = 5;
    /// Answer of the server to a close, before the socket ends.
    pub const CLOSED: i64 = 6;
    /// Notice of the server: an error on a channel, or without a channel the end of the connection, after
    /// which the client does not connect again.
    pub const ERROR: i64 = 7;
    /// Request of the client for the delivery of a channel.
    pub const ATTACH: i64 = 8;
    /// Answer of the server to an attach, or its notice that an attachment has changed.
    pub const ATTACHED: i64 = 9;
    /// Request of the client to end the delivery of a channel.
    pub const DETACH: i64 = 10;
    /// Answer of the server to a detach, or its notice that it has ended a delivery.
    pub const DETACHED: i64 = 11;
    /// Presence request of the client, or presence event from the server.
    pub const PRESENCE: i64 = 12;
    /// Publish of the client, or messages from the server.
    pub const MESSAGE: i64 = 13;
    /// Page of the members of a channel, from the server.
    pub const SYNC: i64 = 14;
    /// New token of the client, or request of the server for one.
    pub const AUTH: i64 = 15;
    /// Numbers of connections and members at a channel, from the server.
    pub const OCCUPANCY: i64 = 16;
}

/// Values of `code`, the reason of a frame that refuses or ends something.
pub mod code {
    /// Malformed request, or a value that a field cannot have.
    pub const BAD_REQUEST: u32 = 40000;
    /// Channel name that is not allowed.
    pub const BAD_NAME: u32 = 40003;
    /// Message, publish or data of a member over a limit.
    pub const TOO_LARGE: u32 = 40009;
    /// Credential that the node does not accept, or no longer.
    pub const CREDENTIAL: u32 = 40100;
    /// New token that the node does not accept; the connection keeps its old one.
    pub const TOKEN: u32 = 40140;
    /// Token that has ended or is about to.
    pub const TOKEN_EXPIRED: u32 = 40142;
    /// Request that the capability does not cover.
    pub const CAPABILITY: u32 = 40160;
    /// Session takeover: another socket has resumed the connection.
    pub const TAKEN_OVER: u32 = 40800;
    /// Limit that is reached; `reason` may name it.
    pub const LIMIT: u32 = 42900;
    /// Internal error of the node.
    pub const INTERNAL: u32 = 50000;
    /// Service that is not available now. The outcome of a publish is unknown; the client may send it again
    /// with the same id.
    pub const UNAVAILABLE: u32 = 50003;
}

/// WebSocket close codes of the server: registered ones (RFC 6455 §7.4), and Fanfare's own from 4000 on.
pub mod close {
    /// Close that the client asked for.
    pub const NORMAL: u16 = 1000;
    /// Frame of the client that breaks the protocol.
    pub const PROTOCOL: u16 = 1002;
    /// Text of the client that is not UTF-8.
    pub const BAD_UTF8: u16 = 1007;
    /// Use against the rules, such as too many pings.
    pub const POLICY: u16 = 1008;
    /// Message of the client that is too big, has too many fragments or is under way for too long.
    pub const TOO_BIG: u16 = 1009;
    /// Node that goes away.
    pub const DRAINING: u16 = 1012;
    /// Credential that has ended or is refused or revoked, or a session that another socket has resumed.
    pub const CREDENTIAL: u16 = 4001;
    /// Client id whose connections the account has closed.
    pub const CAPABILITY: u16 = 4003;
    /// Client that takes frames too slowly.
    pub const SLOW: u16 = 4008;
    /// Tenant that has as many connections as it may.
    pub const RATE: u16 = 4029;
}
