//! Events of the outbox: their stored form, and the body in which a target receives a batch.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use fanfare_proto::envelope::{EnvelopeHead, write_envelope};
use fanfare_proto::trace::TraceContext;
use sha2::{Digest as _, Sha256};

use crate::model::AccountId;
use crate::origin::history::StoreError;

/// The kind of an event, as envelopes and headers name it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventSource {
    Message,
    Presence,
    /// The first connection has attached to the channel.
    Occupied,
    /// The last connection has detached from the channel.
    Vacated,
}

impl EventSource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Message => "channel.message",
            Self::Presence => "channel.presence",
            Self::Occupied => "channel.occupied",
            Self::Vacated => "channel.vacated",
        }
    }

    fn to_byte(self) -> u8 {
        match self {
            Self::Message => 0,
            Self::Presence => 1,
            Self::Occupied => 2,
            Self::Vacated => 3,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        let all = [Self::Message, Self::Presence, Self::Occupied, Self::Vacated];
        all.into_iter().find(|source| source.to_byte() == byte)
    }
}

/// One integration or queue of one account.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TargetId {
    /// `<account>/<integration>` or `<account>/queue:<queue id>`; no part holds a slash, and no integration's id a colon.
    text: Arc<str>,
}

/// Prefix of the id of a queue.
const QUEUE: &str = "queue:";
/// Separator of a target and the rule that selected the event, in the stored form.
const RULE_SEPARATOR: char = '\t';

/// A target of an event, and the queue's rule that selected the event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Addressee {
    pub target: TargetId,
    /// `None` for an integration, or a queue without rules.
    pub rule_id: Option<Arc<str>>,
}

impl Addressee {
    /// Id in the envelope and the headers: of the integration, of the rule, or of the queue itself.
    pub(super) fn rule_id(&self) -> &str {
        let (_, id) = self.target.parts();
        self.rule_id.as_deref().unwrap_or_else(|| id.strip_prefix(QUEUE).unwrap_or(id))
    }

    fn encoded_bytes(&self) -> usize {
        self.target.as_str().len()
            + self.rule_id.as_ref().map_or(0, |rule| RULE_SEPARATOR.len_utf8() + rule.len())
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&(self.encoded_bytes() as u32).to_be_bytes());
        out.extend_from_slice(self.target.as_str().as_bytes());
        if let Some(rule_id) = &self.rule_id {
            out.push(RULE_SEPARATOR as u8);
            out.extend_from_slice(rule_id.as_bytes());
        }
    }

    fn from_text(text: &str) -> Self {
        match text.split_once(RULE_SEPARATOR) {
            Some((target, rule_id)) => {
                Self { target: TargetId::from_text(target), rule_id: Some(rule_id.into()) }
            }
            None => Self { target: TargetId::from_text(text), rule_id: None },
        }
    }
}

impl From<TargetId> for Addressee {
    fn from(target: TargetId) -> Self {
        Self { target, rule_id: None }
    }
}

impl TargetId {
    pub fn new(account: &AccountId, integration: &str) -> Self {
        Self { text: format!("{account}/{integration}").into() }
    }

    pub fn of_queue(account: &AccountId, queue_id: &str) -> Self {
        Self { text: format!("{account}/{QUEUE}{queue_id}").into() }
    }

    /// Id of the queue; `None` for an integration.
    pub fn queue_id(&self) -> Option<&str> {
        self.parts().1.strip_prefix(QUEUE)
    }

    pub(super) fn from_text(text: &str) -> Self {
        Self { text: text.into() }
    }

    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The account, and the integration or `queue:` with the queue's id.
    pub fn parts(&self) -> (&str, &str) {
        self.text.split_once('/').unwrap_or((&self.text, ""))
    }
}

impl fmt::Display for TargetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl fmt::Debug for TargetId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// One message or presence event, with its targets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OutboxEvent {
    /// Time of writing on the clock by which rows expire, in epoch milliseconds.
    pub written_ms: u64,
    pub source: EventSource,
    pub node_id: Arc<str>,
    pub account: AccountId,
    pub channel: Box<str>,
    /// Targets of the event, at least one.
    pub targets: Vec<Addressee>,
    /// Trace context of the event's publish, if it is traced.
    pub trace: Option<Box<TraceContext>>,
    /// The JSON text of the history record, with its id.
    pub record: Bytes,
}

impl OutboxEvent {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.record.len() + 128);
        out.extend_from_slice(&self.written_ms.to_be_bytes());
        out.push(self.source.to_byte());
        put_text(&mut out, &self.node_id);
        put_text(&mut out, self.account.as_str());
        put_text(&mut out, &self.channel);
        let entries = self.targets.len() + usize::from(self.trace.is_some());
        out.extend_from_slice(&(entries as u32).to_be_bytes());
        self.targets.iter().for_each(|addressee| addressee.put(&mut out));
        if let Some(trace) = &self.trace {
            put_text(&mut out, &trace_entry(trace));
        }
        out.extend_from_slice(&self.record);
        out
    }

    /// Length of the output of [`OutboxEvent::encode`].
    pub(super) fn encoded_bytes(&self) -> usize {
        let texts = [&*self.node_id, self.account.as_str(), &self.channel];
        let targets = self.targets.iter().map(Addressee::encoded_bytes);
        let trace = self.trace.iter().map(|trace| trace_entry(trace).len());
        let text_bytes: usize =
            texts.into_iter().map(str::len).chain(targets).chain(trace).map(|bytes| 4 + bytes).sum();
        8 + 1 + 4 + text_bytes + self.record.len()
    }

    pub(super) fn decode(value: &[u8]) -> Result<Self, StoreError> {
        Self::try_decode(value).ok_or_else(|| StoreError::failed("an event of the outbox cannot be read"))
    }

    /// Id of a batch with this event alone; always the same.
    pub(super) fn single_event_id(&self, target: &TargetId, sequence: u64) -> Box<str> {
        let mut hash = Sha256::new();
        hash.update(target.as_str());
        hash.update(sequence.to_be_bytes());
        hash.update(self.written_ms.to_be_bytes());
        hash.update(&self.record);
        let hash: [u8; 32] = hash.finalize().into();
        format!("evt_{}", URL_SAFE_NO_PAD.encode(&hash[..16])).into()
    }

    /// The entry of this target.
    pub(super) fn addressee(&self, target: &TargetId) -> Option<&Addressee> {
        self.targets.iter().find(|addressee| addressee.target == *target)
    }

    /// Rule by which this target has the event.
    pub(super) fn rule_id(&self, target: &TargetId) -> Option<&str> {
        self.addressee(target).map(Addressee::rule_id)
    }

    fn try_decode(mut value: &[u8]) -> Option<Self> {
        let written_ms = u64::from_be_bytes(take(&mut value, 8)?.try_into().ok()?);
        let source = EventSource::from_byte(*take(&mut value, 1)?.first()?)?;
        let node_id = take_text(&mut value)?.into();
        let account = AccountId::new(take_text(&mut value)?);
        let channel = take_text(&mut value)?.into();
        let count = u32::from_be_bytes(take(&mut value, 4)?.try_into().ok()?);
        let (mut targets, mut trace) = (Vec::new(), None);
        for _ in 0..count {
            let text = take_text(&mut value)?;
            match text.strip_prefix(RULE_SEPARATOR) {
                Some(entry) => trace = read_trace_entry(entry),
                None => targets.push(Addressee::from_text(text)),
            }
        }
        let record = Bytes::copy_from_slice(value);
        Some(Self { written_ms, source, node_id, account, channel, targets, trace, record })
    }
}

/// Encodes the trace as a target without a name; versions without traces skip it.
fn trace_entry(trace: &TraceContext) -> String {
    format!("{RULE_SEPARATOR}{trace} {}", trace.state)
}

/// Returns `None` for the format of a later version; the event is then only not traced.
fn read_trace_entry(entry: &str) -> Option<Box<TraceContext>> {
    let (parent, state) = entry.split_once(' ')?;
    TraceContext::parse(parent, state).map(Box::new)
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u32).to_be_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn take<'a>(value: &mut &'a [u8], count: usize) -> Option<&'a [u8]> {
    let (taken, rest) = value.split_at_checked(count)?;
    *value = rest;
    Some(taken)
}

fn take_text<'a>(value: &mut &'a [u8]) -> Option<&'a str> {
    let length = u32::from_be_bytes(take(value, 4)?.try_into().ok()?);
    std::str::from_utf8(take(value, length as usize)?).ok()
}

/// Builds the body in which a target receives these events, which are of one channel, source, node and rule.
pub(super) fn envelope(events: &[(u64, Arc<OutboxEvent>)], rule_id: &str) -> Bytes {
    let Some((_, first)) = events.first() else { return Bytes::new() };
    let head = EnvelopeHead {
        source: first.source.as_str(),
        account_id: first.account.as_str(),
        channel: &first.channel,
        node_id: &first.node_id,
        rule_id,
    };
    let mut body = Vec::new();
    write_envelope(&mut body, &head, events.iter().map(|(_, event)| &*event.record));
    body.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event() -> OutboxEvent {
        let account = AccountId::new("acme");
        OutboxEvent {
            written_ms: 5,
            source: EventSource::Presence,
            node_id: "n1".into(),
            channel: "a\u{1f600}\"b".into(),
            targets: vec![
                TargetId::new(&account, "orders").into(),
                Addressee { target: TargetId::of_queue(&account, "7"), rule_id: Some("9".into()) },
                TargetId::of_queue(&account, "8").into(),
            ],
            trace: None,
            record: Bytes::from_static(b"{\"id\":1}"),
            account,
        }
    }

    const PARENT: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn traced() -> OutboxEvent {
        OutboxEvent { trace: TraceContext::parse(PARENT, "a=1").map(Box::new), ..event() }
    }

    #[test]
    fn a_traced_event_is_read_by_every_version() {
        let event = traced();
        let encoded = event.encode();
        assert_eq!(encoded.len(), event.encoded_bytes());
        assert_eq!(OutboxEvent::decode(&encoded), Ok(event.clone()));
        let head = encoded.len() - event.record.len();
        (0..head).for_each(|length| assert!(OutboxEvent::decode(&encoded[..length]).is_err(), "{length}"));
        // A version without traces reads the entry as a target for which no event waits.
        let Addressee { target, rule_id } =
            Addressee::from_text(&trace_entry(event.trace.as_ref().expect("it has one")));
        assert_eq!((target.as_str(), rule_id.as_deref()), ("", Some(&*format!("{PARENT} a=1"))));
    }

    #[test]
    fn an_event_without_a_trace_is_written_as_before_traces() {
        let (event, encoded) = (event(), event().encode());
        let texts = ["n1", "acme", "a\u{1f600}\"b"].iter().map(|text| 4 + text.len()).sum::<usize>();
        let targets = ["acme/orders", "acme/queue:7\t9", "acme/queue:8"]
            .iter()
            .map(|text| 4 + text.len())
            .sum::<usize>();
        assert_eq!(encoded.len(), 8 + 1 + texts + 4 + targets + event.record.len());
    }

    #[test]
    fn an_event_is_read_as_it_was_written() {
        for source in [EventSource::Message, EventSource::Occupied, EventSource::Vacated] {
            let event = OutboxEvent { source, ..event() };
            assert_eq!(OutboxEvent::decode(&event.encode()), Ok(event));
        }
        let event = event();
        assert_eq!(OutboxEvent::decode(&event.encode()), Ok(event.clone()));
        let encoded = event.encode();
        assert_eq!(encoded.len(), event.encoded_bytes());
        let head = encoded.len() - event.record.len();
        for length in 0..head {
            assert!(OutboxEvent::decode(&encoded[..length]).is_err(), "{length}");
        }
    }

    #[test]
    fn rule_of_a_target_is_its_integration_rule_or_queue() {
        let event = event();
        let account = AccountId::new("acme");
        assert_eq!(event.rule_id(&TargetId::new(&account, "orders")), Some("orders"));
        assert_eq!(event.rule_id(&TargetId::of_queue(&account, "7")), Some("9"));
        assert_eq!(event.rule_id(&TargetId::of_queue(&account, "8")), Some("8"));
        assert_eq!(event.rule_id(&TargetId::new(&account, "other")), None);
    }

    #[test]
    fn an_envelope_has_the_records_in_their_order() {
        let (one, other) = (event(), OutboxEvent { record: Bytes::from_static(b"{\"id\":2}"), ..event() });
        let body: serde_json::Value =
            serde_json::from_slice(&envelope(&[(1, one.into()), (2, other.into())], "orders")).expect("JSON");
        let expected = serde_json::json!({
            "source": "channel.presence", "accountId": "acme", "channel": "a\u{1f600}\"b", "nodeId": "n1",
            "ruleId": "orders", "items": [{"id": 1}, {"id": 2}],
        });
        assert_eq!(body, expected);
    }
}
