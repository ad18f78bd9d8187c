//! A publish request, and its answer.

use std::fmt;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::PublishDone;
use crate::accounts::Account;
use crate::model::{ChannelKey, ClientId, ConnectionId, Draft, DraftError, KeyName, NameError, Stamp};
use crate::telemetry::{Limit, TraceSpan};

/// Messages of one publisher for one channel, from a principal whose capability was checked.
#[derive(Debug)]
pub struct PublishRequest {
    pub key: ChannelKey,
    pub account: Arc<Account>,
    /// The key of the credential: part of the scope of given ids.
    pub key_name: KeyName,
    pub connection_id: ConnectionId,
    pub client_id: Option<ClientId>,
    /// Messages in publish order; all are accepted or none.
    pub messages: Vec<Draft>,
    /// Span that ends with the publish.
    pub span: TraceSpan,
}

impl PublishRequest {
    pub(super) fn take_span(&mut self) -> TraceSpan {
        std::mem::take(&mut self.span)
    }

    pub(super) fn refuse(mut self, error: PublishError, done: PublishDone) {
        self.span.fail(error.reason());
        done(Err(error));
    }
}

/// The stamp of each message, in the order of the request; a repeated id has the stamp of its first publish.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishAck {
    pub stamps: Vec<Stamp>,
}

impl PublishAck {
    /// The stamps as clients see them.
    pub fn serials(&self) -> Vec<String> {
        self.stamps
            .iter()
            .map(|stamp| Serial::single(stamp.incarnation, stamp.sequence).to_string())
            .collect()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishError {
    /// Nothing was published.
    Draft(DraftError),
    /// No message is known to be stored: the client retries with the same id.
    Unavailable,
    /// Nothing was published: too much waits for the store or a shard.
    Busy,
}

impl PublishError {
    /// The reason as one word, for traces.
    pub(super) fn reason(&self) -> &'static str {
        match self {
            Self::Draft(_) => "refused",
            Self::Unavailable => "unavailable",
            Self::Busy => "busy",
        }
    }
}

impl fmt::Display for PublishError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Draft(error) => error.fmt(f),
            Self::Busy => f.write_str("the store is busy, nothing was published"),
            Self::Unavailable => {
                f.write_str("it was not confirmed in time, and may have been done: retry with the same id")
            }
        }
    }
}

impl std::error::Error for PublishError {}

/// The limit that a message exceeds.
pub(super) fn limit_of(error: &DraftError) -> Option<Limit> {
    match error {
        DraftError::TooLarge { .. } => Some(Limit::MessageBytes),
        DraftError::Name { field: "name", error: NameError::TooLong { .. } } => Some(Limit::NameBytes),
        DraftError::Name { field: "id", error: NameError::TooLong { .. } } => Some(Limit::MessageIdBytes),
        _ => None,
    }
}
