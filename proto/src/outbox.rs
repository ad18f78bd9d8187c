//! Bodies of `/outbox` on the operators' listener.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The answer of `GET /outbox`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetList {
    /// Those with events, and those that are disabled.
    pub targets: Vec<TargetState>,
}

/// One target, and its events in the outbox of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetState {
    /// `account/integration`, or `account/queue:` and the queue's id.
    pub target: String,
    /// `webhook`, `amqp`, `lambda`, `sns` or `queue`. None: the node does not know the target, and sends it nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    pub waiting_events: u64,
    pub waiting_bytes: u64,
    /// When the oldest event that waits was written, in milliseconds of the epoch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_ms: Option<u64>,
    pub dead_events: u64,
    pub dead_bytes: u64,
    /// The target has answered that it is gone (410): all for it becomes dead letters until its settings change or an operator retries.
    pub disabled: bool,
    /// Why the last attempt since the start of the node failed. None: it did not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventState {
    Waiting,
    /// A dead letter.
    Dead,
}

impl EventState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Dead => "dead",
        }
    }
}

/// The answer of `GET /outbox/{account}/{target}`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EventPage {
    pub events: Vec<EventView>,
    /// As `after` it asks for the events behind these; none: these are the last ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// One event that a target has yet to receive, or will not receive any more.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    /// Its number in the outbox of this node.
    pub event: u64,
    pub state: EventState,
    pub channel: String,
    /// `channel.message`, `channel.presence`, `channel.occupied` or `channel.vacated`.
    pub source: String,
    pub written_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead_ms: Option<u64>,
    /// Why it is a dead letter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// As it stands in the envelope.
    pub item: Box<RawValue>,
}

/// The body of `POST /outbox/{account}/{target}/retry`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retry {
    /// None: all dead letters of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<u64>>,
}

/// The answer to it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retried {
    /// Dead letters that wait for the target again.
    pub events: u64,
    /// Dead letters that the target still has.
    pub left: u64,
}
