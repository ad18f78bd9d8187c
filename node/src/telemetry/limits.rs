//! Limits of the configuration that were hit.

macro_rules! limits {
    ($($variant:ident $name:literal)*) => {
        /// A limit for which a request is refused or a connection closed; named as its setting.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Limit {
            $($variant),*
        }

        impl Limit {
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),*
                }
            }
        }
    };
}

limits! {
    AttachedChannels "attached_channels"
    BatchBytes "batch_bytes"
    BatchChannels "batch_channels"
    ChannelNameBytes "channel_name_bytes"
    ClientIdBytes "client_id_bytes"
    Connections "connections"
    ControlsPerSecond "controls_per_second"
    FailedTokenRequestsPerSecond "failed_token_requests_per_second"
    HeaderBytes "header_bytes"
    HeaderMs "header_ms"
    HeartbeatMs "heartbeat_ms"
    HttpAnswersBytes "http_answers_bytes"
    HttpBodiesBytes "http_bodies_bytes"
    HttpBodyBytes "http_body_bytes"
    HttpBodyMs "http_body_ms"
    HttpIdleMs "http_idle_ms"
    HttpPublishesPerSecond "http_publishes_per_second"
    HttpStallMs "http_stall_ms"
    MemoryBytes "memory_bytes"
    MessageBytes "message_bytes"
    MessageIdBytes "message_id_bytes"
    NameBytes "name_bytes"
    Nesting "nesting"
    NonceCharactersMax "nonce_characters_max"
    NonceCharactersMin "nonce_characters_min"
    OutboxBytes "outbox_bytes"
    OutboxStallMs "outbox_stall_ms"
    PingsPerSecond "pings_per_second"
    PresenceBytes "presence_bytes"
    PresenceConnectionMembers "presence_connection_members"
    PresenceDataBytes "presence_data_bytes"
    PresenceMembers "presence_members"
    PublishMessages "publish_messages"
    PublishesPerSecond "publishes_per_second"
    RevokedClientIds "revoked_client_ids"
    RewindMessages "rewind_messages"
    SocketMessageBytes "socket_message_bytes"
    SocketMessageFragments "socket_message_fragments"
    SocketMessageMs "socket_message_ms"
    SseChannels "sse_channels"
    SseStreams "sse_streams"
    TokenBytes "token_bytes"
    TokenRequestBytes "token_request_bytes"
    TokenTtlMaxMs "token_ttl_max_ms"
}

impl Limit {
    /// Counts a refusal or close because of the limit.
    pub fn hit(self) {
        metrics::counter!("fanfare_limit_hits_total", "limit" => self.name()).increment(1);
    }

    /// Counts a refusal if it was because of this limit.
    pub fn hit_if(self, is_exceeded: bool) {
        if is_exceeded {
            self.hit();
        }
    }
}

/// Registers the counters, so that they exist before any limit was hit.
pub(super) fn begin() {
    for limit in Limit::ALL {
        metrics::counter!("fanfare_limit_hits_total", "limit" => limit.name()).increment(0);
    }
}
