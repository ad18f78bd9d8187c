//! The body in which an integration receives records of one channel.

use crate::writer::{Object, write_array};

/// All of an envelope but its records.
#[derive(Debug, Clone, Copy)]
pub struct EnvelopeHead<'a> {
    /// `channel.message`, `channel.presence`, `channel.occupied` or `channel.vacated`.
    pub source: &'a str,
    pub account_id: &'a str,
    pub channel: &'a str,
    /// The node at which the records entered.
    pub node_id: &'a str,
    /// The id of the integration, or of the rule of a queue.
    pub rule_id: &'a str,
}

/// Appends the compact JSON text of an envelope; each record is a JSON text already.
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
