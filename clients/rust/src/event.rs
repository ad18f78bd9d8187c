//! What a connection tells its owner without being asked.

use std::fmt;
use std::time::Duration;

use fanfare_proto::frame::{Incoming, MemberIn, MessageIn, PresenceIn, op};
use fanfare_proto::http::Occupancy;

/// The first frame of a connection, and the answer to a refreshed token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connected {
    /// In every message that the connection publishes; it stays the same while the connection is taken up in time.
    pub connection_id: String,
    /// What a further connection takes this one up with. Secret.
    pub connection_key: String,
    /// Who the connection is to others, if anybody.
    pub client_id: Option<String>,
    pub node_id: String,
    /// This is the former connection, taken up, or the same one with a fresh token.
    pub resumed: bool,
    /// A side that has said nothing for so long says that it lives.
    pub heartbeat_ms: u64,
    /// A lost connection, and what was missed on its channels, is kept for so long.
    pub resume_window_ms: u64,
    /// Name, data, extras and client id of one message, as JSON text.
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
    /// After an attach with a serial, and unasked: nothing is missing. A first attach has `false`, and nothing to miss.
    pub resumed: bool,
    /// [`Event::Members`] follows. False: nobody is present, or the modes leave presence out.
    pub presence: bool,
    /// What is delivered: of `subscribe`, `publish`, `presence` those that were asked for and are granted.
    pub modes: Vec<String>,
    /// What of the attach was not done as asked.
    pub warning: Option<String>,
}

/// Messages of one publish on one channel, in order.
#[derive(Debug)]
pub struct Delivery {
    pub channel: String,
    /// All up to here; an attach with it goes on after these messages.
    pub serial: String,
    pub messages: Vec<MessageIn>,
}

/// Who came, changed or went on one channel, in order.
#[derive(Debug)]
pub struct Presence {
    pub channel: String,
    /// Where the channel's messages stand on the node. No place to go on from: messages that were missed may follow.
    pub serial: String,
    pub events: Vec<PresenceIn>,
}

/// Everybody who is present on a channel.
#[derive(Debug)]
pub struct Members {
    pub channel: String,
    pub members: Vec<MemberIn>,
}

/// How many are at a channel, after an attach that asked for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelOccupancy {
    pub channel: String,
    pub occupancy: Occupancy,
    /// All nodes are counted; else the one that says it, as another one has not answered.
    pub is_of_all: bool,
}

/// What [`crate::Client::next`] gives.
#[derive(Debug)]
pub enum Event {
    /// Something was published.
    Messages(Delivery),
    /// Somebody came, changed or went.
    Presence(Presence),
    /// After an attach: what was known of the channel's members is replaced by this.
    Members(Members),
    /// How many are at the channel now.
    Occupancy(ChannelOccupancy),
    /// The credential was refreshed, or a lost connection is back; `resumed` says whether it is the same one to the node and
    /// to others. What each channel has missed is said by [`Event::Attached`].
    Connected(Connected),
    /// Unasked: continuity was lost or the modes changed; and, after a lost connection is back, where the channel goes on.
    /// With `resumed: false` messages may be missing before the next one.
    Attached(Attached),
    /// Unasked: the credential does not cover the channel any more.
    Detached { channel: String, error: Option<String>, code: Option<u32> },
    /// The token is about to expire at `expires` (epoch milliseconds): [`crate::Handle::refresh`] it. Where there is a
    /// [`crate::TokenSource`], only when that has failed or its token was refused; `error` says why.
    AuthRequired { expires: Option<u64>, error: Option<String> },
    /// The connection is lost, and is tried again after the delay, until it is back or refused.
    Disconnected { ending: Ending, retry_in: Duration },
    /// Something on the channel was refused that no request waits for, such as a member that enters again.
    Error { code: u32, error: String, channel: Option<String> },
    /// Always the last event.
    Ended(Ending),
}

/// How a connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// The node said to come back after that delay (op 4).
    Disconnected { code: u32, error: String, reconnect_after_ms: u64 },
    /// The node refused it (op 7), or another connection in its place (an HTTP status, times 100), or the application denied
    /// a token for that (40300): not to be tried again unchanged.
    Refused { code: u32, error: String },
    /// The node closed with this WebSocket close code (1005: none was given) and without another word.
    Closed { code: u16, reason: String },
    /// No frame came for the heartbeat and 10 s more.
    Silent,
    /// The link broke, or the node broke the protocol.
    Lost(String),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Disconnected { code, error, .. } => {
                write!(f, "the node says to come back later, code {code}: {error}")
            }
            Self::Refused { code, error } => write!(f, "refused with code {code}: {error}"),
            Self::Closed { code, reason } if reason.is_empty() => write!(f, "closed with code {code}"),
            Self::Closed { code, reason } => write!(f, "closed with code {code}: {reason}"),
            Self::Silent => f.write_str("nothing was heard"),
            Self::Lost(reason) => write!(f, "the link broke: {reason}"),
        }
    }
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
        op::OCCUPANCY => Some(Event::Occupancy(ChannelOccupancy {
            channel: frame.channel.unwrap_or_default(),
            occupancy: frame.occupancy.unwrap_or_default(),
            is_of_all: frame.source.as_deref() == Some("cluster"),
        })),
        op::CONNECTED => Some(Event::Connected(connected(frame))),
        op::ATTACHED => Some(Event::Attached(attached(frame))),
        op::DETACHED => Some(Event::Detached {
            channel: frame.channel.unwrap_or_default(),
            error: frame.error,
            code: frame.code,
        }),
        op::AUTH => Some(Event::AuthRequired { expires: frame.expires, error: None }),
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
