//! The table `[limits]`: every field of [`Limits`], as the compiler checks.

use super::field::Form;
use super::quantity::{parse_bytes, parse_count, parse_ms};
use super::settings::Setting;
use crate::model::Limits;

macro_rules! limits {
    ($($field:ident $least:literal ..= $most:literal: $doc:literal;)*) => {
        pub(super) static LIMITS: &[Setting] = &[$(Setting {
            table: Some("limits"),
            name: stringify!($field),
            form: Form::Number,
            value: unit(stringify!($field)),
            doc: $doc,
            read: |config, text| {
                let number = read(stringify!($field), text, $least, $most)?;
                config.limits.$field = number.try_into().map_err(|_| format!("{text} is too large"))?;
                Ok(())
            },
            show: |config| Some(config.limits.$field.to_string()),
        }),*];

        /// Fails to compile when a limit is missing from the table.
        const _: fn(Limits) = |Limits { $($field: _),* }| ();
    };
}

limits! {
    message_bytes 1..=16_777_216: "name, data, extras and clientId of one message, as compact JSON texts together";
    socket_message_bytes 1..=67_108_864: "One message of the socket after reassembly";
    socket_message_fragments 1..=65_536: "Fragments of one message of the socket";
    socket_message_ms 1..=3_600_000: "From the first fragment of a message of the socket to its last";
    http_body_bytes 1..=1_073_741_824: "Body of an HTTP request";
    http_bodies_bytes 65_536..=1_099_511_627_776: "Bodies over 16 KiB of all HTTP requests under way together; who finds no room is told to try again";
    http_answers_bytes 65_536..=1_099_511_627_776: "Answers over 16 KiB of all HTTP connections that are not written yet; who finds no room is told to try again";
    http_body_ms 1..=3_600_000: "From the end of a request's headers to the end of its body";
    http_stall_ms 1..=3_600_000: "An HTTP client that for this long takes nothing of an answer that waits for it, or sends nothing of its body, is given up";
    history_page_bytes 1..=67_108_864: "Records of one page of history; the record that reaches it is the last, and the link leads on";
    page_limit 1..=10_000: "Entries of one page of history or of a listing, when no limit is asked for";
    page_limit_max 1..=10_000: "The largest limit of a page that can be asked for; what is beyond is clamped to it";
    history_retention_hours 1..=87_840: "How long history is kept where the directory does not say";
    token_request_bytes 1..=1_048_576: "Body of a token request";
    nesting 1..=120: "Nesting of any JSON or MessagePack";
    channel_name_bytes 1..=4_096: "Name of a channel";
    client_id_bytes 1..=4_096: "clientId";
    message_id_bytes 1..=4_096: "Message id given by a client";
    name_bytes 1..=4_096: "Event name";
    presence_data_bytes 1..=1_048_576: "Data of a presence member";
    attached_channels 1..=1_000_000: "Channels attached per connection";
    presence_members 1..=1_000_000: "Presence members per channel";
    presence_connection_members 1..=1_000_000: "Presence members per connection, over all channels";
    presence_bytes 65_536..=1_099_511_627_776: "Presence members of all channels of the node together, each with 1 KiB beside its data and names; one account has at most three quarters";
    presence_grace_ms 0..=3_600_000: "From the loss of a connection until its presence members leave";
    publish_messages 1..=1_000_000: "Messages in one publish; those to all channels of a batch together";
    batch_channels 1..=100_000: "Channels of one batch over HTTP";
    batch_bytes 1_024..=4_294_967_296: "Messages of one batch over HTTP, times the channels that they go to";
    publishes_per_second 0..=4_294_967_295: "Messages published per socket; 0: no limit";
    publish_burst 1..=4_294_967_295: "Messages that a socket may publish at once";
    http_publishes_per_second 0..=4_294_967_295: "Messages published over HTTP per key; 0: no limit";
    controls_per_second 0..=4_294_967_295: "Attach, detach, presence and auth frames per socket; 0: no limit";
    control_burst 1..=4_294_967_295: "Attach, detach, presence and auth frames that a socket may send at once";
    pings_per_second 1..=4_294_967_295: "WebSocket pings per socket";
    failed_token_requests_per_second 0..=4_294_967_295: "Failed token requests per address and key; 0: no limit";
    token_ttl_default_ms 1..=31_536_000_000: "How long a token holds when the request does not say";
    token_ttl_max_ms 1..=31_536_000_000: "How long a token may be asked to hold";
    nonce_characters_min 1..=22: "Characters of the nonce of a token request, at least; the client library sends 22";
    nonce_characters_max 22..=4_096: "Characters of the nonce of a token request, at most";
    nonce_memory_ms 60_000..=86_400_000: "How long the nonce of a token request is remembered; at least twice token_request_window_ms";
    remembered_nonces 1_000..=1_000_000_000: "Nonces remembered of each stretch of nonce_memory_ms, on the disk; beyond it token requests are answered 503";
    token_request_window_ms 1_000..=43_200_000: "How far the timestamp of a token request may be from the clock, before it and after";
    token_bytes 1..=65_536: "Token";
    jwt_ahead_ms 1_000..=86_400_000: "How far the iat of a JWT may be ahead of the clock";
    jwt_lifetime_ms 1_000..=31_536_000_000: "From iat to exp of a JWT, in whole seconds";
    revoked_client_ids 1..=1_000_000: "clientIds per key whose tokens are revoked at a time";
    clock_hold_ms 0..=604_800_000: "How long the clock keeps a new time after a step of more than a minute before anything expires by it";
    resume_window_ms 1..=86_400_000: "How long a lost connection can be resumed without a gap";
    rewind_messages 1..=10_000: "Messages that a first attach may ask for of what was published before it";
    lost_connections 0..=16_777_216: "Lost connections that can be taken up; beyond it the oldest are forgotten";
    ring_bytes 0..=1_073_741_824: "Recent messages of one channel that are kept in memory for who resumes";
    rings_bytes 0..=1_099_511_627_776: "The same of all channels of the node together";
    heartbeat_ms 100..=3_600_000: "The server sends a heartbeat after this much silence of its own";
    heartbeat_grace_ms 0..=3_600_000: "A client that is silent for twice heartbeat_ms and this is given up";
    header_bytes 1_024..=65_536: "Headers of a request, whatever their number";
    header_ms 1..=3_600_000: "From the start of a connection or request to the end of its headers";
    http_idle_ms 1..=3_600_000: "From the end of an answer over HTTP to the first byte of a further request; longer than a balancer keeps idle connections";
    outbox_bytes 1..=1_073_741_824: "Live frames that wait for one connection; beyond it the connection is closed as slow";
    outbox_stall_ms 1..=3_600_000: "A connection that takes no waiting frame for this long is closed as slow";
    delivery_window_ms 0..=50: "A busy shard collects for so long before it writes again; at rest nothing waits. 0: it never waits";
    idempotency_window_ms 1..=86_400_000: "How long a message id given by a client is remembered";
    store_wait_ms 1..=3_600_000: "A store that does not answer for this long leaves the outcome unknown";
    integration_bytes 65_536..=1_099_511_627_776: "Events that wait for one integration on this node; beyond it the oldest become dead letters";
    integration_dead_bytes 65_536..=1_099_511_627_776: "Dead letters of one integration on this node; beyond it the oldest are dropped";
    integration_retry_ms 1_000..=2_592_000_000: "How long after its publish an event is sent again to an integration that fails";
    metric_minutes 1..=1_000_000_000: "Minutes of accounts whose metric rows are kept in memory, where the store does not have them; the oldest go first";
    sse_streams 0..=4_294_967_295: "Event streams that the node keeps open; 0: none";
    sse_channels 1..=1_000: "Channels of one event stream";
    connections 0..=4_294_967_295: "Connections of this node; 0: as many as the open-file limit allows";
    memory_bytes 0..=1_152_921_504_606_846_975: "Memory of the node; from nine tenths of it on new sockets and event streams are refused; 0: what its cgroup allows";
    rebalance_ms 0..=86_400_000: "How often a node with far more connections than others asks some to go there; 0: only when it is asked to";
}

/// The unit, which is the last part of the name.
const fn unit(name: &str) -> &'static str {
    if ends_with(name, "_bytes") {
        "BYTES"
    } else if ends_with(name, "_ms") {
        "MILLISECONDS"
    } else if ends_with(name, "_per_second") {
        "PER SECOND"
    } else if ends_with(name, "_hours") {
        "HOURS"
    } else {
        "COUNT"
    }
}

const fn ends_with(name: &str, end: &str) -> bool {
    let (name, end) = (name.as_bytes(), end.as_bytes());
    let mut i = 0;
    while i < end.len() {
        if name.len() < end.len() || name[name.len() - end.len() + i] != end[i] {
            return false;
        }
        i += 1;
    }
    true
}

fn read(name: &str, text: &str, least: u64, most: u64) -> Result<u64, String> {
    let number = match unit(name) {
        "BYTES" => parse_bytes(text),
        "MILLISECONDS" => parse_ms(text),
        _ => parse_count(text),
    }?;
    if (least..=most).contains(&number) {
        Ok(number)
    } else {
        Err(format!("must be between {least} and {most}, got `{text}`"))
    }
}
