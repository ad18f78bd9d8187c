//! Limits of the configuration that were hit.

macro_rules! limits {
    ($($variant:ident $name:literal)*) => {
        /// A limit for which a request is refused or a connection closed; its name is that of the setting.
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
    BatchChannels "batch_channels"
    ChannelNameBytes "channel_name_bytes"
    ClientIdBytes "client_id_bytes"
    Connections "connections"
    ControlsPerSecond "controls_per_second"
    FailedTokenRequestsPerSecond "failed_token_requests_per_second"
    HeaderBytes "header_bytes"
    HeaderMs "header_ms"
    HeartbeatMs "heartbeat_ms"
    HttpBodiesBytes "http_bodies_bytes"
    HttpBodyBytes "http_body_bytes"
    HttpBodyMs "http_body_ms"
    HttpPublishesPerSecond "http_publishes_per_second"
    MessageBytes "message_bytes"
    MessageIdBytes "message_id_bytes"
    NameBytes "name_bytes"
    OutboxBytes "outbox_bytes"
    PingsPerSecond "pings_per_second"
    PresenceBytes "presence_bytes"
    PresenceConnectionMembers "presence_connection_members"
    PresenceDataBytes "presence_data_bytes"
    PresenceMembers "presence_members"
    PublishMessages "publish_messages"
    PublishesPerSecond "publishes_per_second"
    RevokedClientIds "revoked_client_ids"
    SocketMessageBytes "socket_message_bytes"
    SocketMessageFragments "socket_message_fragments"
    SocketMessageMs "socket_message_ms"
    SseChannels "sse_channels"
    SseStreams "sse_streams"
    TokenRequestBytes "token_request_bytes"
}

impl Limit {
    /// Counts that something was refused or closed for it.
    pub fn hit(self) {
        metrics::counter!("fanfare_limit_hits_total", "limit" => self.name()).increment(1);
    }
}

/// Makes the counters, so that they are there before any limit was hit.
pub(super) fn begin() {
    for limit in Limit::ALL {
        metrics::counter!("fanfare_limit_hits_total", "limit" => limit.name()).increment(0);
    }
}
