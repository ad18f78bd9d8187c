//! Encoding of messages that are forwarded to another node.

use bytes::Bytes;
use fanfare_proto::frame;
use fanfare_proto::peer::v1;
use fanfare_proto::trace::TraceContext;

use crate::hub::{DeliveryContent, MessageDelivery};
use crate::model::{ChannelKey, ClientId, PublishedMessages};

/// Typical bytes of a message's text beside its data.
const TEXT_BYTES: usize = 256;

/// One publish of this node, with the span in which it is forwarded.
pub(super) fn traced(published: &PublishedMessages, trace: Option<&TraceContext>) -> v1::Forward {
    let mut forward = of(published);
    if let Some(trace) = trace {
        (forward.traceparent, forward.tracestate) = (trace.parent(), trace.state.to_string());
    }
    forward
}

/// A delivery of this node, forwarded so that another node delivers it too.
pub(super) fn again(delivery: &MessageDelivery) -> v1::Forward {
    match delivery.content() {
        DeliveryContent::Own(published) => of(published),
        DeliveryContent::Forwarded(forwarded) => v1::Forward {
            channel: Some(named(&forwarded.key)),
            incarnation: forwarded.incarnation,
            first: forwarded.first,
            last: forwarded.last,
            timestamp_ms: forwarded.timestamp_ms,
            connection_id: Bytes::copy_from_slice(forwarded.connection_id.as_bytes()),
            client_id: forwarded.client_id.as_ref().map(|id| id.as_str().to_owned()),
            messages: forwarded.messages.clone(),
            bytes: forwarded.bytes,
            ..v1::Forward::default()
        },
    }
}

fn of(published: &PublishedMessages) -> v1::Forward {
    let PublishedMessages { timestamp_ms, client_id, messages, .. } = published;
    let connection_id = published.connection_id.to_string();
    let client_id = client_id.as_ref().map(ClientId::as_str);
    let written = messages.iter().map(|message| {
        let data_bytes = message.data.as_ref().map_or(0, |data| data.get().len());
        let mut text = Vec::with_capacity(TEXT_BYTES + data_bytes);
        frame::encode_message(&message.as_sent(), *timestamp_ms, &connection_id, client_id, &mut text);
        text.into()
    });
    v1::Forward {
        channel: Some(named(&published.key)),
        incarnation: published.incarnation,
        first: messages.first().map_or(0, |message| message.sequence),
        last: published.last().sequence,
        timestamp_ms: *timestamp_ms,
        connection_id: Bytes::copy_from_slice(published.connection_id.as_bytes()),
        client_id: client_id.map(str::to_owned),
        messages: written.collect(),
        bytes: published.bytes,
        ..v1::Forward::default()
    }
}

pub(super) fn named(key: &ChannelKey) -> v1::Channel {
    v1::Channel { account: key.account().as_str().to_owned(), name: key.channel().to_owned() }
}
