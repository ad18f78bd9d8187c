//! Table of refusals: HTTP status, socket code, body and headers.

use std::borrow::Cow;

use fanfare_proto::frame::code;
use fanfare_proto::http::ErrorBody;

use crate::auth::{ExchangeError, RevokeError, Unauthorized};
use crate::model::{DraftError, NameError};
use crate::origin::history::StoreError;
use crate::origin::queues::QueueError;
use crate::publish::PublishError;

/// Kind of a refusal, without its sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RefusalKind {
    Malformed,
    BadName,
    TooLarge,
    /// Unknown coding of a body.
    UnsupportedCoding,
    Unauthorized,
    /// Signed or unsigned token request that is refused; the only 401 with a sentence of its own.
    TokenRefused,
    Forbidden,
    NotFound,
    MethodNotAllowed,
    TimedOut,
    UpgradeRequired,
    HeadersTooLarge,
    Limited,
    Internal,
    Unavailable,
}

impl RefusalKind {
    /// HTTP status and socket code. A kind that occurs over HTTP only has the code of a bad request.
    const fn row(self) -> (u16, u32) {
        match self {
            Self::Malformed => (400, code::BAD_REQUEST),
            Self::BadName => (400, code::BAD_NAME),
            Self::TooLarge => (413, code::TOO_LARGE),
            Self::UnsupportedCoding => (415, code::BAD_REQUEST),
            Self::Unauthorized | Self::TokenRefused => (401, code::CREDENTIAL),
            Self::Forbidden => (403, code::CAPABILITY),
            Self::NotFound => (404, code::BAD_REQUEST),
            Self::MethodNotAllowed => (405, code::BAD_REQUEST),
            Self::TimedOut => (408, code::BAD_REQUEST),
            Self::UpgradeRequired => (426, code::BAD_REQUEST),
            Self::HeadersTooLarge => (431, code::BAD_REQUEST),
            Self::Limited => (429, code::LIMIT),
            Self::Internal => (500, code::INTERNAL),
            Self::Unavailable => (503, code::UNAVAILABLE),
        }
    }

    pub const fn status(self) -> u16 {
        self.row().0
    }

    pub const fn code(self) -> u32 {
        self.row().1
    }
}

/// The challenge of every 401 (RFC 9110 §11.6.1). Browsers show no login window for this scheme.
pub const CHALLENGE: &str = r#"Bearer realm="fanfare""#;

/// A request that is not served: body `{"error", "reason"?}` and the headers that go with it.
///
/// The sentence names fields and limits, never a credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpRefusal {
    pub kind: RefusalKind,
    pub error: Cow<'static, str>,
    pub reason: Option<&'static str>,
    pub retry_after_s: Option<u64>,
    /// Methods of the path, for 405.
    pub allow: Option<&'static str>,
}

impl HttpRefusal {
    pub fn new(kind: RefusalKind, error: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, error: error.into(), reason: None, retry_after_s: None, allow: None }
    }

    pub fn malformed(error: impl Into<Cow<'static, str>>) -> Self {
        Self::new(RefusalKind::Malformed, error)
    }

    pub fn unauthorized() -> Self {
        Self::new(RefusalKind::Unauthorized, "unauthorized")
    }

    pub fn forbidden(operation: &str) -> Self {
        Self::new(RefusalKind::Forbidden, format!("the capability does not allow {operation} here"))
    }

    /// Authenticated by a token, but the request needs a key.
    pub fn key_required() -> Self {
        Self::new(RefusalKind::Forbidden, "this needs a key, not a token")
    }

    pub fn not_found() -> Self {
        Self::new(RefusalKind::NotFound, "not found")
    }

    pub fn method_not_allowed(allow: &'static str) -> Self {
        Self { allow: Some(allow), ..Self::new(RefusalKind::MethodNotAllowed, "method not allowed") }
    }

    pub fn body_too_large(bytes_max: usize) -> Self {
        Self::new(RefusalKind::TooLarge, format!("the body is over the limit of {bytes_max} bytes"))
    }

    pub fn upgrade_required() -> Self {
        Self::new(RefusalKind::UpgradeRequired, "this address takes WebSocket upgrades only")
    }

    pub fn not_wired() -> Self {
        Self::new(RefusalKind::Unavailable, "not wired on this node")
    }

    /// The connection scan took too long, or the limit of event streams is reached.
    pub fn unanswered() -> Self {
        Self { retry_after_s: Some(1), ..Self::new(RefusalKind::Unavailable, "the node is busy, try again") }
    }

    /// Connection limit of the node reached.
    pub fn full() -> Self {
        let text = "the node has no room for another connection, try again or elsewhere";
        Self { retry_after_s: Some(1), ..Self::new(RefusalKind::Unavailable, text) }
    }

    /// Another node could not be asked, or this node is too busy.
    pub fn peers_unavailable() -> Self {
        let text = "not every node has answered in time, try again";
        Self { retry_after_s: Some(1), ..Self::new(RefusalKind::Unavailable, text) }
    }

    pub fn internal() -> Self {
        Self::new(RefusalKind::Internal, "internal error")
    }

    /// Publishes over `http_publishes_per_second`, or too many failed token requests.
    pub fn rate_limit(retry_after_s: u64) -> Self {
        Self {
            reason: Some("rate_limit"),
            retry_after_s: Some(retry_after_s),
            ..Self::new(RefusalKind::Limited, "too many requests")
        }
    }

    /// Connection limit of the tenant reached.
    pub fn connection_limit() -> Self {
        Self { reason: Some("connection_limit"), ..Self::new(RefusalKind::Limited, "too many connections") }
    }

    /// The store is busy and nothing was done; the same request may succeed soon.
    pub fn busy() -> Self {
        Self { retry_after_s: Some(1), ..Self::new(RefusalKind::Unavailable, "the store is busy") }
    }

    /// The JSON text of the body.
    pub fn body(&self) -> Vec<u8> {
        let body = ErrorBody { error: self.error.to_string(), reason: self.reason.map(str::to_owned) };
        serde_json::to_vec(&body).unwrap_or_default()
    }

    /// Headers beside `content-type` and those of CORS, names in lower case.
    pub fn headers(&self) -> Vec<(&'static str, String)> {
        let mut headers = Vec::new();
        if let Some(allow) = self.allow {
            headers.push(("allow", allow.to_owned()));
        }
        if matches!(self.kind, RefusalKind::Unauthorized | RefusalKind::TokenRefused) {
            headers.push(("www-authenticate", CHALLENGE.to_owned()));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.push(("retry-after", seconds.to_string()));
        }
        if self.kind == RefusalKind::UnsupportedCoding {
            headers.push(("accept-encoding", "gzip, deflate".to_owned()));
        }
        if self.kind == RefusalKind::UpgradeRequired {
            headers.push(("connection", "upgrade".to_owned()));
            headers.push(("upgrade", "websocket".to_owned()));
            headers.push(("sec-websocket-version", "13".to_owned()));
        }
        headers
    }
}

impl From<Unauthorized> for HttpRefusal {
    fn from(_: Unauthorized) -> Self {
        Self::unauthorized()
    }
}

impl From<ExchangeError> for HttpRefusal {
    fn from(error: ExchangeError) -> Self {
        let kind = match &error {
            ExchangeError::TooMany => return Self::rate_limit(1),
            ExchangeError::Malformed(_) => RefusalKind::Malformed,
            ExchangeError::Mac(_) | ExchangeError::Timestamp { .. } | ExchangeError::NonceUsed => {
                RefusalKind::TokenRefused
            }
            ExchangeError::Capability { .. } => RefusalKind::Forbidden,
            ExchangeError::Unavailable => RefusalKind::Unavailable,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<RevokeError> for HttpRefusal {
    fn from(error: RevokeError) -> Self {
        let kind = match &error {
            RevokeError::NotTheKey => RefusalKind::Forbidden,
            RevokeError::Malformed(_) => RefusalKind::Malformed,
            RevokeError::TooManyClientIds { .. } => RefusalKind::Limited,
            RevokeError::Unavailable => RefusalKind::Unavailable,
        };
        let reason = (kind == RefusalKind::Limited).then_some("rate_limit");
        Self { reason, ..Self::new(kind, error.to_string()) }
    }
}

/// Refusal of a channel name.
impl From<NameError> for HttpRefusal {
    fn from(error: NameError) -> Self {
        Self::new(RefusalKind::BadName, format!("channel {error}"))
    }
}

impl From<DraftError> for HttpRefusal {
    fn from(error: DraftError) -> Self {
        let kind = match &error {
            DraftError::TooLarge { .. } | DraftError::TooMany { .. } => RefusalKind::TooLarge,
            DraftError::Name { .. } | DraftError::Bad(_) => RefusalKind::Malformed,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<PublishError> for HttpRefusal {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Draft(draft) => draft.into(),
            PublishError::Busy => Self::busy(),
            PublishError::Unavailable => Self::new(RefusalKind::Unavailable, error.to_string()),
        }
    }
}

/// Refusal of a history read that failed. The store's text goes to the log, not to the client.
impl From<StoreError> for HttpRefusal {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Busy => Self::busy(),
            StoreError::Off => Self::new(RefusalKind::Unavailable, "this node keeps no history"),
            StoreError::ShutDown | StoreError::Failed(_) => {
                Self::new(RefusalKind::Unavailable, "the store does not answer")
            }
        }
    }
}

/// Refusal of a queue request that failed. The text of the broker or the store goes to the log, not to the client.
impl From<QueueError> for HttpRefusal {
    fn from(error: QueueError) -> Self {
        let kind = match error {
            QueueError::UnknownQueue | QueueError::UnknownRule => RefusalKind::NotFound,
            QueueError::Malformed(_) => RefusalKind::Malformed,
            QueueError::Forbidden => RefusalKind::Forbidden,
            QueueError::TooMany { .. } | QueueError::TooLarge => RefusalKind::Limited,
            QueueError::Busy => RefusalKind::Unavailable,
            QueueError::Store(error) => return error.into(),
            QueueError::Broker(_) => {
                let text = "the broker of the queues does not answer, or has refused";
                return Self { retry_after_s: Some(1), ..Self::new(RefusalKind::Unavailable, text) };
            }
        };
        let reason = (kind == RefusalKind::Limited).then_some("queue_limit");
        Self { reason, ..Self::new(kind, error.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_by_a_ceiling_carries_its_reason() {
        for refusal in [
            HttpRefusal::rate_limit(1),
            HttpRefusal::connection_limit(),
            ExchangeError::TooMany.into(),
            RevokeError::TooManyClientIds { client_ids_max: 2 }.into(),
            QueueError::TooMany { queues_max: 2 }.into(),
        ] {
            assert_eq!(refusal.kind.status(), 429);
            assert!(refusal.reason.is_some(), "{refusal:?}");
        }
        assert!(HttpRefusal::from(RevokeError::Unavailable).reason.is_none());
    }
}
