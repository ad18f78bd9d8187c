//! Counters of refusals and closes other than for credentials and limits, by reason.

use fanfare_proto::frame::{close, code};

use super::RATE_LIMITED;

const NACKS: &str = "fanfare_nacks_total";
const CLOSES: &str = "fanfare_socket_closes_total";
const LOSSES: &str = "fanfare_continuity_losses_total";
const TLS: &str = "fanfare_tls_handshakes_failed_total";
const ADMIN: &str = "fanfare_admin_refusals_total";
const PEERS: &str = "fanfare_peer_handshakes_refused_total";

const CODES: [u32; 9] = [
    code::BAD_REQUEST,
    code::BAD_NAME,
    code::TOO_LARGE,
    code::CREDENTIAL,
    code::TOKEN,
    code::CAPABILITY,
    code::LIMIT,
    code::INTERNAL,
    code::UNAVAILABLE,
];
const CLOSE_CODES: [u16; 9] = [
    close::PROTOCOL,
    close::BAD_UTF8,
    close::POLICY,
    close::TOO_BIG,
    close::DRAINING,
    close::CREDENTIAL,
    close::CAPABILITY,
    close::SLOW,
    close::RATE,
];

/// Reason for which the admin listener refuses a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AdminRefusal {
    Token,
    Origin,
}

impl AdminRefusal {
    const ALL: [Self; 2] = [Self::Token, Self::Origin];

    fn name(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Origin => "origin",
        }
    }

    pub fn count(self) {
        metrics::counter!(ADMIN, "reason" => self.name()).increment(1);
        tracing::warn!(target: RATE_LIMITED, reason = self.name(), "admin request refused");
    }
}

/// Reason for which a connection to the peer listener is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerRefusal {
    /// The TLS handshake failed.
    Tls,
    /// The TLS handshake took too long.
    Timeout,
    /// Too many handshakes or open connections of one source.
    TooMany,
    /// A peer with a certificate of the cluster opened a stream that this node refuses.
    Stream,
}

impl PeerRefusal {
    const ALL: [Self; 4] = [Self::Tls, Self::Timeout, Self::TooMany, Self::Stream];

    fn name(self) -> &'static str {
        match self {
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::TooMany => "too_many",
            Self::Stream => "stream",
        }
    }

    pub fn count(self, detail: &str) {
        metrics::counter!(PEERS, "reason" => self.name()).increment(1);
        tracing::info!(target: RATE_LIMITED, reason = self.name(), detail, "peer connection refused");
    }
}

/// Counts a socket request that the node refuses with this code.
pub fn count_nack(code: u32) {
    metrics::counter!(NACKS, "code" => code.to_string()).increment(1);
}

/// Counts a socket that the node closes with this code.
pub fn count_close(code: u16) {
    if code != close::NORMAL {
        metrics::counter!(CLOSES, "code" => code.to_string()).increment(1);
    }
}

/// Counts a subscriber that gets `resumed: false`.
pub fn count_loss() {
    metrics::counter!(LOSSES).increment(1);
}

/// Counts a client whose TLS handshake fails.
pub fn count_tls_failure(error: &dyn std::error::Error) {
    metrics::counter!(TLS).increment(1);
    tracing::info!(target: RATE_LIMITED, %error, "tls handshake failed");
}

/// Registers the counters, so that they exist before the first refusal.
pub(super) fn begin() {
    for code in CODES {
        metrics::counter!(NACKS, "code" => code.to_string()).increment(0);
    }
    for code in CLOSE_CODES {
        metrics::counter!(CLOSES, "code" => code.to_string()).increment(0);
    }
    for refusal in AdminRefusal::ALL {
        metrics::counter!(ADMIN, "reason" => refusal.name()).increment(0);
    }
    for refusal in PeerRefusal::ALL {
        metrics::counter!(PEERS, "reason" => refusal.name()).increment(0);
    }
    metrics::counter!(LOSSES).increment(0);
    metrics::counter!(TLS).increment(0);
}
