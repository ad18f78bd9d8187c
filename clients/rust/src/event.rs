//! What a connection tells its owner without being asked.

use fanfare_proto::frame::{Incoming, MemberIn, MessageIn, PresenceIn, op};

/// The first frame of a connection, and the answer to a refreshed token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connected {
    pub connection_id: String,
    pub connection_key: String,
    pub client_id: Option<String>,
    pub node_id: String,
    pub resumed: bool,
    pub heartbeat_ms: u64,
    pub resume_window_ms: u64,
    pub max_message_bytes: usize,
    /// Epoch milliseconds; absent when the credential does not expire.
    pub expires: Option<u64>,
    /// Epoch milliseconds.
    pub server_time: u64,
}

/// Where a channel stands: the answer to an attach, or unasked when continuity was lost or the modes changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attached {
    pub channel: String,
    /// Opaque: all up to here.
    pub serial: String,
    pub resumed: bool,
    /// [`Event::Members`] follows. False: nobody is present, or the modes leave presence out.
    pub presence: bool,
    pub modes: Vec<String>,
    pub warning: Option<String>,
}

/// Messages of one publish on one channel, in order.
#[derive(Debug)]
pub struct Delivery {
    pub channel: String,
    pub serial: String,
    pub messages: Vec<MessageIn>,
}

/// Who came, changed or went on one channel, in order.
#[derive(Debug)]
pub struct Presence {
    pub channel: String,
    /// Where the channel's messages stand.
    pub serial: String,
    pub events: Vec<PresenceIn>,
}

/// Everybody who is present on a channel.
#[derive(Debug)]
pub struct Members {
    pub channel: String,
    pub members: Vec<MemberIn>,
}

#[derive(Debug)]
pub enum Event {
    Messages(Delivery),
    Presence(Presence),
    /// After an attach: what was known of the channel's members is replaced by this.
    Members(Members),
    /// The credential was refreshed.
    Connected(Connected),
    /// Unasked.
    Attached(Attached),
    /// Unasked: a refreshed credential no longer covers the channel.
    Detached {
        channel: String,
        error: Option<String>,
        code: Option<u32>,
    },
    /// The token is about to expire at `expires` (epoch milliseconds): [`crate::Handle::refresh`] it.
    AuthRequired {
        expires: Option<u64>,
    },
    /// Come back after that delay, elsewhere. The end follows.
    Disconnected {
        code: u32,
        error: Option<String>,
        reconnect_after_ms: u64,
    },
    /// Without a channel the connection is over and must not be retried unchanged; the end follows.
    Error {
        code: u32,
        error: String,
        channel: Option<String>,
    },
    /// Always the last event.
    Ended(Ending),
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The node closed with this WebSocket close code (1005: none was given).
    Closed { code: u16, reason: String },
    /// No frame came for the heartbeat and 10 s more.
    Silent,
    /// The link broke, or the node broke the protocol.
    Lost(String),
}

/// The event that a frame without a waiting request stands for; none for a heartbeat and what is unknown.
pub(crate) fn of(frame: Incoming) -> Option<Event> {
    match frame.op {
        op::MESSAGE => Some(Event::Messages(Delivery {
            channel: frame.channel.unwrap_or_default(),
            serial: frame.serial.unwrap_or_default(),
            messages: frame.messages,
        })),
        op::PRESENCE => Some(Event::Presence(Presence {
            channel: frame.channel.unwrap_or_default(),
            serial: frame.serial.unwrap_or_default(),
            events: frame
                .presence
                .and_then(|events| serde_json::from_str(events.get()).ok())
                .unwrap_or_default(),
        })),
        op::SYNC => Some(Event::Members(Members {
            channel: frame.channel.unwrap_or_default(),
            members: frame.members,
        })),
        op::CONNECTED => Some(Event::Connected(connected(frame))),
        op::ATTACHED => Some(Event::Attached(attached(frame))),
        op::DETACHED => Some(Event::Detached {
            channel: frame.channel.unwrap_or_default(),
            error: frame.error,
            code: frame.code,
        }),
        op::AUTH => Some(Event::AuthRequired { expires: frame.expires }),
        op::DISCONNECTED => Some(Event::Disconnected {
            code: frame.code.unwrap_or_default(),
            error: frame.error,
            reconnect_after_ms: frame.reconnect_after_ms.unwrap_or_default(),
        }),
        op::ERROR => Some(Event::Error {
            code: frame.code.unwrap_or_default(),
            error: frame.error.unwrap_or_default(),
            channel: frame.channel,
        }),
        _ => None,
    }
}

pub(crate) fn connected(frame: Incoming) -> Connected {
    Connected {
        connection_id: frame.connection_id.unwrap_or_default(),
        connection_key: frame.connection_key.unwrap_or_default(),
        client_id: frame.client_id,
        node_id: frame.node_id.unwrap_or_default(),
        resumed: frame.resumed.unwrap_or_default(),
        heartbeat_ms: frame.heartbeat_ms.unwrap_or_default(),
        resume_window_ms: frame.resume_window_ms.unwrap_or_default(),
        max_message_bytes: frame.max_message_bytes.unwrap_or_default(),
        expires: frame.expires,
        server_time: frame.server_time.unwrap_or_default(),
    }
}

pub(crate) fn attached(frame: Incoming) -> Attached {
    Attached {
        channel: frame.channel.unwrap_or_default(),
        serial: frame.serial.unwrap_or_default(),
        resumed: frame.resumed.unwrap_or_default(),
        presence: frame.presence.is_some_and(|presence| presence.get() == "true"),
        modes: frame.modes.unwrap_or_default(),
        warning: frame.warning,
    }
}
