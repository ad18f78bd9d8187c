//! Every bound of the service with its default, in one place.

/// Size of one publish on its way to a peer, which takes it in one piece.
pub const FORWARD_BYTES_MAX: usize = 15 * 1024 * 1024;
/// Bytes of a message beside its text and the clientId: ids, a time, and the names of its fields.
const FORWARD_MESSAGE_BYTES: usize = 160;

/// Sizes in bytes, times in milliseconds, rates per second; 0 means no limit where the field says so.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Compact JSON texts of name, data, extras and clientId of one message.
    pub message_bytes: usize,
    /// Size of one socket message after reassembly.
    pub socket_message_bytes: usize,
    pub socket_message_fragments: usize,
    pub socket_message_ms: u64,
    pub http_body_bytes: usize,
    /// Bodies of all requests in progress together, except small ones.
    pub http_bodies_bytes: usize,
    /// Unwritten answers of all connections together, except small ones.
    pub http_answers_bytes: usize,
    /// Time from the end of the headers to the end of the body.
    pub http_body_ms: u64,
    /// Time after which a client is given up that takes nothing of its answer, or sends nothing of its body.
    pub http_stall_ms: u64,
    /// Size of the records of one history page; the record that reaches it is the last.
    pub history_page_bytes: usize,
    /// Entries of one page when no `limit` is asked for, and the maximum of `limit`.
    pub page_limit: usize,
    pub page_limit_max: usize,
    /// Retention of channels for which the directory has no rule.
    pub history_retention_hours: u32,
    pub token_request_bytes: usize,
    /// Nesting depth of any JSON or MessagePack.
    pub nesting: usize,
    pub channel_name_bytes: usize,
    pub client_id_bytes: usize,
    pub message_id_bytes: usize,
    /// Length of an event name.
    pub name_bytes: usize,
    pub presence_data_bytes: usize,
    /// Channels attached per connection.
    pub attached_channels: usize,
    /// Members on one channel.
    pub presence_members: usize,
    /// Members of one connection, over all channels.
    pub presence_connection_members: usize,
    /// Memory of the members of all channels of the node, including their bookkeeping.
    pub presence_bytes: usize,
    /// Presence timeout: from the loss of a connection until its members leave.
    pub presence_grace_ms: u64,
    /// Messages in one publish; over HTTP in all channels of a batch together.
    pub publish_messages: usize,
    /// Channels of one batch over HTTP.
    pub batch_channels: usize,
    /// Bytes of the messages of one HTTP batch times the number of its channels.
    pub batch_bytes: usize,
    /// Messages per second and socket; 0: no limit.
    pub publishes_per_second: u32,
    pub publish_burst: u32,
    /// Messages per second and key over HTTP; 0 (the default): no limit.
    pub http_publishes_per_second: u32,
    /// Attach, detach, presence and auth frames per second and socket; 0: no limit.
    pub controls_per_second: u32,
    pub control_burst: u32,
    pub pings_per_second: u32,
    /// Failed token exchanges per second, address and key; 0: no limit.
    pub failed_token_requests_per_second: u32,
    /// Lifetime of a token whose request asks for none, and the maximum.
    pub token_ttl_default_ms: u64,
    pub token_ttl_max_ms: u64,
    pub nonce_characters_min: usize,
    pub nonce_characters_max: usize,
    /// Time for which a nonce is remembered, in milliseconds.
    pub nonce_memory_ms: u64,
    /// Nonces remembered in each window of `nonce_memory_ms`.
    pub remembered_nonces: usize,
    /// Tolerance of a token request's timestamp against the clock, in both directions.
    pub token_request_window_ms: u64,
    pub token_bytes: usize,
    /// Tolerance of a JWT's `iat` ahead of the clock.
    pub jwt_ahead_ms: u64,
    /// Time from `iat` to `exp` of a JWT; only whole seconds count.
    pub jwt_lifetime_ms: u64,
    /// ClientIds of one key with revoked tokens at a time.
    pub revoked_client_ids: usize,
    /// Time for which the system clock must keep a step of more than a minute before anything expires by it.
    pub clock_hold_ms: u64,
    pub resume_window_ms: u64,
    /// Messages from before a first attach that a rewind gives at most.
    pub rewind_messages: usize,
    /// Lost connections that are remembered for a session takeover; beyond it the oldest are forgotten.
    pub lost_connections: usize,
    /// Memory of the replay buffer of one channel, and of all replay buffers of the node.
    pub ring_bytes: usize,
    pub rings_bytes: usize,
    /// Silence of the server after which it sends a heartbeat.
    pub heartbeat_ms: u64,
    /// Extra silence of a client, beyond two heartbeat intervals, after which it is given up.
    pub heartbeat_grace_ms: u64,
    pub header_bytes: usize,
    /// Time from accept (or the first byte of a further request) to the end of the headers.
    pub header_ms: u64,
    /// Silence of a connection between an answer and the next request.
    pub http_idle_ms: u64,
    /// Live frames that wait for one connection.
    pub outbox_bytes: usize,
    /// Time after which a connection that takes none of its waiting frames is closed as a slow consumer.
    pub outbox_stall_ms: u64,
    /// Coalescing window: the longest time for which a busy shard collects before it reads and writes again; 0: no
    /// wait.
    pub delivery_window_ms: u64,
    pub idempotency_window_ms: u64,
    /// Time after which the outcome of an unanswered store operation is unknown.
    pub store_wait_ms: u64,
    /// Stored size of the events that wait for one integration; the oldest beyond it become dead letters.
    pub integration_bytes: u64,
    /// Size of the dead letters of one integration; the oldest beyond it are dropped.
    pub integration_dead_bytes: u64,
    /// Time from the publish of an event: a delivery attempt that fails later is the last.
    pub integration_retry_ms: u64,
    /// Metric rows kept in memory that the store does not have yet, in account minutes.
    pub metric_minutes: usize,
    /// Connections this node accepts at once; 0: what the open-file limit allows.
    pub connections: usize,
    /// Memory near which no further client is accepted; 0: the limit of the process's cgroup.
    pub memory_bytes: u64,
    /// Open event streams of the node.
    pub sse_streams: usize,
    /// Channels of one event stream.
    pub sse_channels: usize,
    /// Interval at which a node with far more connections than others asks some of its clients to reconnect elsewhere;
    /// 0: never.
    pub rebalance_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_bytes: 65_536,
            socket_message_bytes: 524_288,
            socket_message_fragments: 64,
            socket_message_ms: 30_000,
            http_body_bytes: 2 * 1024 * 1024,
            http_bodies_bytes: 64 * 1024 * 1024,
            http_answers_bytes: 64 * 1024 * 1024,
            http_body_ms: 30_000,
            http_stall_ms: 10_000,
            history_page_bytes: 1024 * 1024,
            page_limit: 100,
            page_limit_max: 1_000,
            history_retention_hours: 72,
            token_request_bytes: 16 * 1024,
            nesting: 64,
            channel_name_bytes: 512,
            client_id_bytes: 256,
            message_id_bytes: 128,
            name_bytes: 256,
            presence_data_bytes: 16 * 1024,
            attached_channels: 200,
            presence_members: 5_000,
            presence_connection_members: 10_000,
            presence_bytes: 256 * 1024 * 1024,
            presence_grace_ms: 15_000,
            publish_messages: 10_000,
            batch_channels: 1_000,
            batch_bytes: 64 * 1024 * 1024,
            publishes_per_second: 200,
            publish_burst: 400,
            http_publishes_per_second: 0,
            controls_per_second: 50,
            control_burst: 400,
            pings_per_second: 10,
            failed_token_requests_per_second: 100,
            token_ttl_default_ms: 3_600_000,
            token_ttl_max_ms: 172_800_000,
            nonce_characters_min: 16,
            nonce_characters_max: 128,
            nonce_memory_ms: 600_000,
            remembered_nonces: 4_000_000,
            token_request_window_ms: 120_000,
            token_bytes: 8 * 1024,
            jwt_ahead_ms: 120_000,
            jwt_lifetime_ms: 172_800_000,
            revoked_client_ids: 1_000,
            clock_hold_ms: 3_600_000,
            resume_window_ms: 120_000,
            rewind_messages: 100,
            lost_connections: 100_000,
            ring_bytes: 4 * 1024 * 1024,
            rings_bytes: 256 * 1024 * 1024,
            heartbeat_ms: 15_000,
            heartbeat_grace_ms: 10_000,
            header_bytes: 16 * 1024,
            header_ms: 10_000,
            http_idle_ms: 75_000,
            outbox_bytes: 1024 * 1024,
            outbox_stall_ms: 10_000,
            delivery_window_ms: 1,
            idempotency_window_ms: 120_000,
            store_wait_ms: 2_000,
            integration_bytes: 1024 * 1024 * 1024,
            integration_dead_bytes: 256 * 1024 * 1024,
            integration_retry_ms: 24 * 3_600_000,
            metric_minutes: 200_000,
            connections: 0,
            memory_bytes: 0,
            sse_streams: 10_000,
            sse_channels: 20,
            rebalance_ms: 0,
        }
    }
}

impl Limits {
    /// The maximal size of one publish on its way to a peer, given the other limits.
    pub fn forward_bytes(&self) -> usize {
        // MessagePack texts are at least a sixth of their JSON form.
        let texts = self.http_body_bytes.max(self.socket_message_bytes.saturating_mul(6));
        // Characters that JSON escapes with a backslash take two bytes.
        let each = self.client_id_bytes.saturating_mul(2).saturating_add(FORWARD_MESSAGE_BYTES);
        self.publish_messages.saturating_mul(each).saturating_add(texts)
    }

    /// Time from a revocation until no token is left that it could refuse.
    pub fn revocation_kept_ms(&self) -> u64 {
        self.jwt_lifetime_ms.saturating_add(self.jwt_ahead_ms)
    }
}
