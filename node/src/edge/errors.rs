//! The one table of what a refusal is called: HTTP status, socket code, body and headers.

use std::borrow::Cow;

use fanfare_proto::frame::code;
use fanfare_proto::http::ErrorBody;

use crate::auth::{ExchangeError, RevokeError, Unauthorized};
use crate::model::{DraftError, NameError};
use crate::origin::history::StoreError;
use crate::origin::queues::QueueError;
use crate::publish::PublishError;

/// What went wrong, without its sentence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Malformed,
    BadName,
    TooLarge,
    /// The coding of a body.
    UnsupportedCoding,
    Unauthorized,
    /// A signed or unsigned token request that is refused; the one 401 with a sentence of its own.
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

impl Kind {
    /// HTTP status and socket code. What only HTTP can answer has the code of a bad request.
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

/// The challenge of every 401 (RFC 9110 §11.6.1). A browser shows no window for it.
pub const CHALLENGE: &str = r#"Bearer realm="fanfare""#;

/// A request that is not served: body `{"error", "reason"?}` and the headers that go with it.
///
/// The sentence names fields and limits, never a credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    pub kind: Kind,
    pub error: Cow<'static, str>,
    pub reason: Option<&'static str>,
    pub retry_after_s: Option<u64>,
    /// The methods that the path knows, for 405.
    pub allow: Option<&'static str>,
}

impl Refusal {
    pub fn new(kind: Kind, error: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, error: error.into(), reason: None, retry_after_s: None, allow: None }
    }

    pub fn malformed(error: impl Into<Cow<'static, str>>) -> Self {
        Self::new(Kind::Malformed, error)
    }

    pub fn unauthorized() -> Self {
        Self::new(Kind::Unauthorized, "unauthorized")
    }

    pub fn forbidden(operation: &str) -> Self {
        Self::new(Kind::Forbidden, format!("the capability does not allow {operation} here"))
    }

    /// Authenticated, but what is asked is not for whoever holds a token.
    pub fn key_required() -> Self {
        Self::new(Kind::Forbidden, "this needs a key, not a token")
    }

    pub fn not_found() -> Self {
        Self::new(Kind::NotFound, "not found")
    }

    pub fn method_not_allowed(allow: &'static str) -> Self {
        Self { allow: Some(allow), ..Self::new(Kind::MethodNotAllowed, "method not allowed") }
    }

    pub fn body_too_large(bytes_max: usize) -> Self {
        Self::new(Kind::TooLarge, format!("the body is over the limit of {bytes_max} bytes"))
    }

    pub fn upgrade_required() -> Self {
        Self::new(Kind::UpgradeRequired, "this address takes WebSocket upgrades only")
    }

    pub fn not_wired() -> Self {
        Self::new(Kind::Unavailable, "not wired on this node")
    }

    /// The connections could not be walked over in time, or there are as many event streams as may be.
    pub fn unanswered() -> Self {
        Self { retry_after_s: Some(1), ..Self::new(Kind::Unavailable, "the node is busy, try again") }
    }

    /// There are as many connections as the node may have.
    pub fn full() -> Self {
        let text = "the node has no room for another connection, try again or elsewhere";
        Self { retry_after_s: Some(1), ..Self::new(Kind::Unavailable, text) }
    }

    /// Another node could not be asked, or this one is too busy.
    pub fn unreached() -> Self {
        let text = "not every node has answered in time, try again";
        Self { retry_after_s: Some(1), ..Self::new(Kind::Unavailable, text) }
    }

    pub fn internal() -> Self {
        Self::new(Kind::Internal, "internal error")
    }

    /// More requests than `http_publishes_per_second` or failed token requests than their limit.
    pub fn rate_limit(retry_after_s: u64) -> Self {
        Self {
            reason: Some("rate_limit"),
            retry_after_s: Some(retry_after_s),
            ..Self::new(Kind::Limited, "too many requests")
        }
    }

    /// The tenant has as many connections as its plan allows.
    pub fn connection_limit() -> Self {
        Self { reason: Some("connection_limit"), ..Self::new(Kind::Limited, "too many connections") }
    }

    /// Nothing was done; the same request may pass in a moment.
    pub fn busy() -> Self {
        Self { retry_after_s: Some(1), ..Self::new(Kind::Unavailable, "the store is busy") }
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
        if matches!(self.kind, Kind::Unauthorized | Kind::TokenRefused) {
            headers.push(("www-authenticate", CHALLENGE.to_owned()));
        }
        if let Some(seconds) = self.retry_after_s {
            headers.push(("retry-after", seconds.to_string()));
        }
        if self.kind == Kind::UnsupportedCoding {
            headers.push(("accept-encoding", "gzip, deflate".to_owned()));
        }
        if self.kind == Kind::UpgradeRequired {
            headers.push(("connection", "upgrade".to_owned()));
            headers.push(("upgrade", "websocket".to_owned()));
            headers.push(("sec-websocket-version", "13".to_owned()));
        }
        headers
    }
}

impl From<Unauthorized> for Refusal {
    fn from(_: Unauthorized) -> Self {
        Self::unauthorized()
    }
}

impl From<ExchangeError> for Refusal {
    fn from(error: ExchangeError) -> Self {
        let kind = match &error {
            ExchangeError::TooMany => return Self::rate_limit(1),
            ExchangeError::Malformed(_) => Kind::Malformed,
            ExchangeError::Mac(_) | ExchangeError::Timestamp { .. } | ExchangeError::NonceUsed => {
                Kind::TokenRefused
            }
            ExchangeError::Capability { .. } => Kind::Forbidden,
            ExchangeError::Unavailable => Kind::Unavailable,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<RevokeError> for Refusal {
    fn from(error: RevokeError) -> Self {
        let kind = match &error {
            RevokeError::NotTheKey => Kind::Forbidden,
            RevokeError::Malformed(_) => Kind::Malformed,
            RevokeError::TooManyClientIds { .. } => Kind::Limited,
            RevokeError::Unavailable => Kind::Unavailable,
        };
        let reason = (kind == Kind::Limited).then_some("rate_limit");
        Self { reason, ..Self::new(kind, error.to_string()) }
    }
}

/// A channel's name was refused.
impl From<NameError> for Refusal {
    fn from(error: NameError) -> Self {
        Self::new(Kind::BadName, format!("channel {error}"))
    }
}

impl From<DraftError> for Refusal {
    fn from(error: DraftError) -> Self {
        let kind = match &error {
            DraftError::TooLarge { .. } | DraftError::TooMany { .. } => Kind::TooLarge,
            DraftError::Name { .. } | DraftError::Bad(_) => Kind::Malformed,
        };
        Self::new(kind, error.to_string())
    }
}

impl From<PublishError> for Refusal {
    fn from(error: PublishError) -> Self {
        match error {
            PublishError::Draft(draft) => draft.into(),
            PublishError::Busy => Self::busy(),
            PublishError::Unavailable => Self::new(Kind::Unavailable, error.to_string()),
        }
    }
}

/// A read of history was not answered. What the store said is for the log, not for the client.
impl From<StoreError> for Refusal {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Busy => Self::busy(),
            StoreError::Off => Self::new(Kind::Unavailable, "this node keeps no history"),
            StoreError::ShutDown | StoreError::Failed(_) => {
                Self::new(Kind::Unavailable, "the store does not answer")
            }
        }
    }
}

/// The text of the broker or the store is for the log, not for the client.
impl From<QueueError> for Refusal {
    fn from(error: QueueError) -> Self {
        let kind = match error {
            QueueError::UnknownQueue | QueueError::UnknownRule => Kind::NotFound,
            QueueError::Malformed(_) => Kind::Malformed,
            QueueError::Forbidden => Kind::Forbidden,
            QueueError::TooMany { .. } | QueueError::TooLarge => Kind::Limited,
            QueueError::Busy => Kind::Unavailable,
            QueueError::Store(error) => return error.into(),
            QueueError::Broker(_) => {
                let text = "the broker of the queues does not answer, or has refused";
                return Self { retry_after_s: Some(1), ..Self::new(Kind::Unavailable, text) };
            }
        };
        let reason = (kind == Kind::Limited).then_some("queue_limit");
        Self { reason, ..Self::new(kind, error.to_string()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_by_a_ceiling_carries_its_reason() {
        for refusal in [
            Refusal::rate_limit(1),
            Refusal::connection_limit(),
            ExchangeError::TooMany.into(),
            RevokeError::TooManyClientIds { client_ids_max: 2 }.into(),
            QueueError::TooMany { queues_max: 2 }.into(),
        ] {
            assert_eq!(refusal.kind.status(), 429);
            assert!(refusal.reason.is_some(), "{refusal:?}");
        }
        assert!(Refusal::from(RevokeError::Unavailable).reason.is_none());
    }
}
