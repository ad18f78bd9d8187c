//! Errors of connections and requests.

use std::{fmt, io};

/// Reasons for which a connection or a request fails.
#[derive(Debug)]
pub enum Error {
    /// Address that is not of a form that [`crate::Options::url`] takes, with the reason.
    BadUrl(String),
    /// Key that is not `<secret>.<keyName>`.
    BadKey,
    /// Value that cannot be signed or sent as it is, with the reason.
    BadValue(String),
    /// Address that accepts no connection.
    Unreachable {
        /// `host:port` that was tried.
        address: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// Certificate of the node that the client does not accept.
    Untrusted {
        /// Name that the certificate must be for.
        host: String,
        /// Sentence for a person.
        reason: String,
        /// Whether no trusted authority has signed the certificate. The one that has, or the certificate
        /// itself if it is self-signed, can be named in [`crate::Options::authorities`].
        unknown_issuer: bool,
    },
    /// Link that broke while it was opened.
    Io(io::Error),
    /// HTTP error in answer to the upgrade.
    Http {
        /// HTTP status.
        status: u16,
        /// Sentence of the answer's body.
        error: String,
        /// Name of the limit that was reached, of the answer's body.
        reason: Option<String>,
    },
    /// Refusal of the request (op 2) or the connection (op 7) by the node.
    Refused {
        /// Number of the error, one of `code` of the socket protocol.
        code: u32,
        /// Sentence for a person.
        error: String,
    },
    /// Notice of the node that it does not accept the connection now (op 4).
    Disconnected {
        /// Number of the error, one of `code` of the socket protocol.
        code: u32,
        /// Sentence for a person.
        error: String,
        /// Milliseconds after which to try again.
        reconnect_after_ms: u64,
    },
    /// Failure of the [`crate::TokenSource`], or of the exchange of its TokenRequest.
    NoToken(String),
    /// Denial of a token for this client: status 403 of an auth URL or of the exchange of a TokenRequest.
    TokenDenied(String),
    /// Attempt to connect or close that took too long.
    TimedOut,
    /// End of the connection, which is not resumed. An unanswered publish may have been stored or not.
    Closed,
    /// Unknown outcome of a publish: the connection was lost and resumed, and the publish may have been
    /// stored or not.
    Unknown(String),
    /// Answer that is not of the protocol.
    Protocol(String),
}

impl Error {
    /// Tells whether the same attempt, unchanged, would fail again.
    pub fn is_final(&self) -> bool {
        match self {
            Self::BadUrl(_)
            | Self::BadKey
            | Self::BadValue(_)
            | Self::Refused { .. }
            | Self::TokenDenied(_) => true,
            Self::Http { status, .. } => (400..500).contains(status) && ![408, 429].contains(status),
            _ => false,
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadUrl(reason) => write!(f, "unusable address: {reason}"),
            Self::BadKey => f.write_str("a key has the form <secret>.<keyName>"),
            Self::BadValue(reason) => f.write_str(reason),
            Self::Unreachable { address, .. } => write!(f, "cannot connect to {address}"),
            Self::Untrusted { host, reason, .. } => {
                write!(f, "the certificate of {host} is not accepted: {reason}")
            }
            Self::Io(_) => f.write_str("the connection failed"),
            Self::Http { status, error, .. } => write!(f, "the node answered {status}: {error}"),
            Self::Refused { code, error } => write!(f, "refused with code {code}: {error}"),
            Self::Disconnected { code, error, .. } => {
                write!(f, "told to come back later, code {code}: {error}")
            }
            Self::NoToken(reason) => write!(f, "no token: {reason}"),
            Self::TokenDenied(reason) => write!(f, "no token is given to this client: {reason}"),
            Self::TimedOut => f.write_str("timed out"),
            Self::Closed => f.write_str("the connection is closed"),
            Self::Unknown(reason) => write!(f, "stored or not, that is not known: {reason}"),
            Self::Protocol(reason) => write!(f, "unexpected answer: {reason}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(source) | Self::Unreachable { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(source: io::Error) -> Self {
        Self::Io(source)
    }
}
