//! Bodies of `/outbox` on the admin listener, described in `docs/operations/outbox.md`.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// The answer of `GET /outbox`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TargetList {
    /// Targets that have events, and targets that are disabled.
    pub targets: Vec<TargetState>,
}

/// One target with its events in the outbox of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TargetState {
    /// `account/integration`, or `account/queue:` and the queue's id.
    pub target: String,
    /// `webhook`, `amqp`, `lambda`, `sns` or `queue`; `None` if the node does not know the target, and sends
    /// it nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Number of events that are yet to be delivered.
    pub waiting_events: u64,
    /// Size of the waiting events, in bytes.
    pub waiting_bytes: u64,
    /// Time at which the oldest waiting event was written, in epoch milliseconds; `None` if none waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub oldest_ms: Option<u64>,
    /// Number of dead letters.
    pub dead_events: u64,
    /// Size of the dead letters, in bytes.
    pub dead_bytes: u64,
    /// Whether the target has answered that it is gone (410). Its events become dead letters until its
    /// settings change or an operator retries.
    pub disabled: bool,
    /// Reason for which the last attempt since the start of the node failed; `None` if it did not fail.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<String>,
}

/// State of an event in the outbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EventState {
    /// Event that is yet to be delivered.
    Waiting,
    /// Dead letter: the node does not send the event any more.
    Dead,
}

impl EventState {
    /// Gives the text of the JSON bodies and of the query parameter `state`.
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
    /// Events of this page, in the order of their numbers.
    pub events: Vec<EventView>,
    /// Value of `after` for the next page; `None` on the last page.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// One event of a target, waiting or dead.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    /// Number of the event in the outbox of this node.
    pub event: u64,
    /// Waiting or dead.
    pub state: EventState,
    /// Channel of the event.
    pub channel: String,
    /// `channel.message`, `channel.presence`, `channel.occupied` or `channel.vacated`.
    pub source: String,
    /// Time at which the event was written, in epoch milliseconds.
    pub written_ms: u64,
    /// Time at which the event became a dead letter, in epoch milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead_ms: Option<u64>,
    /// Reason for which the event is a dead letter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// JSON text of the record, as the target would receive it.
    pub item: Box<RawValue>,
}

/// The body of `POST /outbox/{account}/{target}/retry`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Retry {
    /// Numbers of the dead letters to send again; `None`: all of the target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub events: Option<Vec<u64>>,
}

/// The answer of `POST /outbox/{account}/{target}/retry`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retried {
    /// Number of dead letters that wait again.
    pub events: u64,
    /// Number of dead letters that the target still has.
    pub left: u64,
}
