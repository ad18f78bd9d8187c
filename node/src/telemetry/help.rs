//! HELP texts of the metrics that other modules register.

/// Counters without labels, which begin at 0.
const COUNTERS: [(&str, &str); 26] = [
    ("fanfare_continuity_losses_total", "Subscribers told that messages may be missing"),
    ("fanfare_tls_handshakes_failed_total", "TLS handshakes of clients that failed"),
    ("fanfare_admin_connections_full_total", "Admin connections that waited because the listener was full"),
    (
        "fanfare_clock_steps_total",
        "Steps of the system clock by more than a minute, and starts with a clock that had stepped",
    ),
    ("fanfare_outbox_skipped_total", "Publishes not kept for a target that answered 410"),
    ("fanfare_outbox_discarded_total", "Events of deleted queues that were discarded"),
    ("fanfare_outbox_dead_letters_total", "Events that became dead letters"),
    ("fanfare_outbox_dead_letters_dropped_total", "Dead letters dropped over the limit of a target"),
    ("fanfare_outbox_retried_total", "Dead letters that an operator moved back to the outbox"),
    (
        "fanfare_forwards_sent_total",
        "Publishes queued for a peer, once for each peer with interest in the channel",
    ),
    ("fanfare_forwards_taken_total", "Publishes received from peers"),
    ("fanfare_id_claims_sent_total", "Requests to a peer to claim message ids"),
    (
        "fanfare_id_claims_unanswered_total",
        "Requests to claim message ids that a peer did not answer in time",
    ),
    ("fanfare_ids_forgotten_total", "Message ids published by peers that the store did not take"),
    ("fanfare_pauses_total", "Stalls of gossip for 2 s or more, while the node ran"),
    ("fanfare_presence_events_total", "Members that entered, changed or left by way of this node"),
    ("fanfare_presence_repairs_total", "Presence resyncs: members of a peer requested again"),
    ("fanfare_runs_begun_anew_total", "Restarts in place after a stall of the process"),
    (
        "fanfare_queue_connections_closed_total",
        "Connections to the broker closed because their key was changed or may not consume",
    ),
    (
        "fanfare_queue_rows_unreadable_total",
        "Readings of an account's queues that failed, as of a later version",
    ),
    ("fanfare_queue_limit_refusals_total", "Queues and rules refused for the ceiling of their account"),
    ("fanfare_tenant_counts_told_total", "Messages to peers with changed numbers of connections"),
    ("fanfare_tenants_uncounted_total", "Tenants reported by a peer beyond the number that is kept of it"),
    (
        "fanfare_proxy_headers_refused_total",
        "Connections of trusted proxies that did not begin with a header of the PROXY protocol",
    ),
    ("fanfare_spans_exported_total", "Spans that the collector of traces has taken"),
    ("fanfare_tls_certificate_errors_total", "Readings of the certificate that were refused"),
];

/// Counters with labels. The modules that know the labels make them begin at 0.
const LABELLED_COUNTERS: [(&str, &str); 16] = [
    ("fanfare_backups_total", "Backups of the data folder, by outcome"),
    ("fanfare_admin_refusals_total", "Requests to the admin listener refused, by reason"),
    ("fanfare_broker_checks_total", "Questions of the broker about users answered, by check and outcome"),
    ("fanfare_broker_refusals_total", "Users of the broker refused, by reason"),
    ("fanfare_nacks_total", "Requests over sockets refused, by code"),
    ("fanfare_peer_handshakes_refused_total", "Connections to the peer listener refused, by reason"),
    ("fanfare_socket_closes_total", "Sockets ended by the node, by close code"),
    ("fanfare_auth_failures_total", "Credentials and token requests refused, by reason"),
    ("fanfare_connections_refused_total", "Connections refused by a full node, by reason"),
    (
        "fanfare_integration_events_total",
        "Events of attempts to deliver to integrations, by kind and outcome",
    ),
    (
        "fanfare_integration_retries_total",
        "Attempts to deliver to integrations that came after a failed one, by kind",
    ),
    ("fanfare_gossip_dropped_total", "Datagrams of gossip dropped, by reason"),
    ("fanfare_http_requests_total", "HTTP requests answered, by route and status"),
    ("fanfare_limit_hits_total", "Requests refused and connections closed for a limit, by limit"),
    ("fanfare_spans_dropped_total", "Spans that did not reach the collector of traces, by reason"),
    ("fanfare_queue_repairs_total", "Queues and bounds put back on the broker, by kind"),
];
const GAUGES: [(&str, &str); 28] = [
    (
        "fanfare_last_backup_timestamp_seconds",
        "When the last complete backup started; 0: none since the start",
    ),
    ("fanfare_blocked_connections", "Connections whose socket is full"),
    ("fanfare_connections", "Open sockets and event streams, by transport and format"),
    ("fanfare_drain_connections", "Connections that a draining node still has"),
    ("fanfare_draining", "1 once the node was asked to stop"),
    ("fanfare_memory_max_bytes", "Memory that the node may take; 0: there is no ceiling"),
    ("fanfare_memory_used_bytes", "Memory that counts against the ceiling; 0 where there is none"),
    ("fanfare_peer_stream_lag_seconds", "Age of the oldest item that a peer has not acknowledged, by peer"),
    ("fanfare_peer_stream_waiting_bytes", "Bytes of items that a peer has not acknowledged, by peer"),
    ("fanfare_peer_stream_waiting_items", "Items that a peer has not acknowledged, by peer"),
    ("fanfare_shard_inbox_bytes", "Bytes that wait for a thread of sockets, by shard"),
    ("fanfare_shard_outbox_bytes", "Bytes that wait for sockets that are full, by shard"),
    ("fanfare_store_queue_bytes", "Bytes that the store has not written yet"),
    ("fanfare_store_queue_rows", "Rows that the store has not written yet"),
    ("fanfare_certificate_stale", "1 while the certificate was refused and an earlier one is in use"),
    ("fanfare_connections_max", "Sockets and event streams that the node admits"),
    ("fanfare_degraded", "1 while a part of the node fails, by reason"),
    ("fanfare_open_files", "Files that the process has open"),
    ("fanfare_outbox_bytes", "Bytes of events that wait for integrations, by kind"),
    ("fanfare_outbox_dead_letters", "Events that integrations will not receive any more, by kind"),
    ("fanfare_occupied_channels", "Channels of this node that integrations were told are occupied"),
    ("fanfare_outbox_absent_events", "Events that wait for a target that the directory does not have"),
    ("fanfare_outbox_events", "Events that wait for integrations, by kind"),
    ("fanfare_outbox_oldest_seconds", "Age of the oldest event that waits for an integration, by kind"),
    ("fanfare_open_files_max", "Files that the process may open"),
    (
        "fanfare_queue_strays",
        "Queues on the broker that are named like account queues and are not in the store",
    ),
    ("fanfare_peers_known", "Peers that are reachable and have sent their interest"),
    ("fanfare_tls_certificate_generation", "Rises when a changed certificate is applied"),
];

const HISTOGRAMS: [(&str, &str); 1] =
    [("fanfare_store_duration_seconds", "How long the store took for a call, by store and operation")];

pub(super) fn describe() {
    for (name, help) in COUNTERS {
        metrics::describe_counter!(name, help);
        metrics::counter!(name).increment(0);
    }
    for (name, help) in LABELLED_COUNTERS {
        metrics::describe_counter!(name, help);
    }
    for (name, help) in HISTOGRAMS {
        metrics::describe_histogram!(name, help);
    }
    for (name, help) in GAUGES {
        metrics::describe_gauge!(name, help);
    }
}
