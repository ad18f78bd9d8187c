//! The body in which an integration receives records of one channel, in the format of
//! `docs/guides/webhooks.md`.

use crate::writer::{Object, write_array};

/// The fields of an envelope without its records.
#[derive(Debug, Clone, Copy)]
pub struct EnvelopeHead<'a> {
    /// `channel.message`, `channel.presence`, `channel.occupied` or `channel.vacated`.
    pub source: &'a str,
    /// Account in which the events happened.
    pub account_id: &'a str,
    /// Channel of all records.
    pub channel: &'a str,
    /// Node at which the events entered.
    pub node_id: &'a str,
    /// Id of the integration, or of the queue's rule; that of the queue if it has no rules.
    pub rule_id: &'a str,
}

/// Appends the compact JSON text of an envelope. Each record is a JSON text itself.
pub fn write_envelope<'a>(
    out: &mut Vec<u8>,
    head: &EnvelopeHead<'_>,
    records: impl IntoIterator<Item = &'a [u8]>,
) {
    let mut object = Object::begin(out);
    object
        .text("source", head.source)
        .text("accountId", head.account_id)
        .text("channel", head.channel)
        .text("nodeId", head.node_id)
        .text("ruleId", head.rule_id);
    write_array(object.field("items"), records, |out, record| out.extend_from_slice(record));
    object.end();
}
