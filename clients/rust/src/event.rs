//! Events: what a client gets from its connection without a request.

use std::fmt;
use std::time::Duration;

use fanfare_proto::frame::{Incoming, MemberIn, MessageIn, PresenceIn, op};
use fanfare_proto::http::Occupancy;

/// The node's first frame on a connection, and its answer to a refreshed token.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Connected {
    /// Connection id, which every message of the connection has. A resumed connection keeps it.
    pub connection_id: String,
    /// Key by which a further connection resumes this one. Secret.
    pub connection_key: String,
    /// Client id of the connection; `None` if it has none.
    pub client_id: Option<String>,
    /// Name of the node in the cluster.
    pub node_id: String,
    /// Whether this is the former connection, resumed, or the same one with a fresh token.
    pub resumed: bool,
    /// Milliseconds of silence after which either side sends a heartbeat.
    pub heartbeat_ms: u64,
    /// Milliseconds for which the node keeps a lost connection, and what its channels missed.
    pub resume_window_ms: u64,
    /// Greatest size of a message: the JSON texts of name, data, extras and client id, in bytes.
    pub max_message_bytes: usize,
    /// End of the credential, in epoch milliseconds; `None` if it has none.
    pub expires: Option<u64>,
    /// Clock of the node, in epoch milliseconds.
    pub server_time: u64,
}

/// The state of an attached channel: in answer to an attach, or unasked after a loss of continuity or a
/// change of modes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Attached {
    /// Channel name.
    pub channel: String,
    /// Channel position at which delivery goes on; opaque text.
    pub serial: String,
    /// Whether no message is missing since the serial of the attach. A first attach has `false`, and misses
    /// nothing.
    pub resumed: bool,
    /// Whether [`Event::Members`] follows. False: the channel has no members, or the modes leave presence
    /// out.
    pub presence: bool,
    /// Modes that were requested and are granted: of `subscribe`, `publish` and `presence`.
    pub modes: Vec<String>,
    /// Sentence for a person about what the attach did not get.
    pub warning: Option<String>,
}

/// The messages of one publish on one channel, in their order.
#[derive(Debug)]
pub struct Delivery {
    /// Channel name.
    pub channel: String,
    /// Channel position after these messages, from which an attach goes on.
    pub serial: String,
    /// Messages of the publish, without those that were delivered before.
    pub messages: Vec<MessageIn>,
}

/// Changes of members of one channel, in their order.
#[derive(Debug)]
pub struct Presence {
    /// Channel name.
    pub channel: String,
    /// Position of the channel's messages at the node. Do not resume from it: messages that were missed may
    /// follow.
    pub serial: String,
    /// Entries, updates and leaves.
    pub events: Vec<PresenceIn>,
}

/// The list of all members of one channel.
#[derive(Debug)]
pub struct Members {
    /// Channel name.
    pub channel: String,
    /// All members of all nodes.
    pub members: Vec<MemberIn>,
}

/// Numbers of connections and members at a channel, after an attach that asked for them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelOccupancy {
    /// Channel name.
    pub channel: String,
    /// The numbers.
    pub occupancy: Occupancy,
    /// Whether all nodes are counted. False: the answering node alone, since another one has not answered.
    pub is_of_all: bool,
}

/// An event, from [`crate::Client::next`].
#[derive(Debug)]
pub enum Event {
    /// Messages of an attached channel.
    Messages(Delivery),
    /// Changes of members of an attached channel.
    Presence(Presence),
    /// List of members after an attach, which replaces what was known of them.
    Members(Members),
    /// Numbers of connections and members at a channel.
    Occupancy(ChannelOccupancy),
    /// New credential in force, or a connection after a lost one; `resumed` says whether it is the same to
    /// the node and to other clients. [`Event::Attached`] says what each channel missed.
    Connected(Connected),
    /// State of a channel after a loss of continuity, a change of modes or a lost connection. With `resumed:
    /// false` messages may be missing before the next one.
    Attached(Attached),
    /// End of a channel's delivery: the credential does not cover it any more.
    Detached {
        /// Channel name.
        channel: String,
        /// Sentence for a person.
        error: Option<String>,
        /// Number of the error, one of `code` of the socket protocol.
        code: Option<u32>,
    },
    /// Request for a new token: [`crate::Handle::refresh`] it. With a [`crate::TokenSource`], this comes only
    /// if the source has failed or the node has refused its token.
    AuthRequired {
        /// End of the present token, in epoch milliseconds, if known.
        expires: Option<u64>,
        /// Reason for which the source's token is not in force.
        error: Option<String>,
    },
    /// Loss of the connection. The client tries again after the delay, until it is back or refused.
    Disconnected {
        /// End of the lost connection.
        ending: Ending,
        /// Time until the first attempt.
        retry_in: Duration,
    },
    /// Refusal on a channel that belongs to no request of the application, such as that of a member that
    /// enters again.
    Error {
        /// Number of the error, one of `code` of the socket protocol.
        code: u32,
        /// Sentence for a person.
        error: String,
        /// Channel name.
        channel: Option<String>,
    },
    /// End of the last connection, and the last event.
    Ended(Ending),
}

/// The end of a connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ending {
    /// Notice of the node to connect again after a delay (op 4).
    Disconnected {
        /// Number of the error, one of `code` of the socket protocol.
        code: u32,
        /// Sentence for a person.
        error: String,
        /// Milliseconds after which to connect again.
        reconnect_after_ms: u64,
    },
    /// Refusal that would come again for the same attempt: of the connection (op 7), of one after it (an HTTP
    /// status), or of a token by the application.
    Refused {
        /// Number of the error: that of op 7, an HTTP status times 100, or 40300 for a denied token.
        code: u32,
        /// Sentence for a person.
        error: String,
    },
    /// WebSocket close of the node without another word.
    Closed {
        /// Close code of the WebSocket; 1005 if the node gave none.
        code: u16,
        /// Text of the close frame.
        reason: String,
    },
    /// Silence of the node for its heartbeat and 10 s more.
    Silent,
    /// Broken link, or a node that broke the protocol, with the reason.
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

/// Makes the event of a frame that answers no request. Gives `None` for a heartbeat and an unknown kind.
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
