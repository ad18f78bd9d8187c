//! What can go wrong, for the caller to decide on.

use std::{fmt, io};

/// Why a connection or a request came to nothing.
#[derive(Debug)]
pub enum Error {
    /// The address is not of a form that [`crate::Options::url`] takes.
    BadUrl(String),
    /// Not `<secret>.<keyName>`.
    BadKey,
    /// A value that cannot be signed or sent as it is.
    BadValue(String),
    /// Nobody takes connections at `host:port`.
    Unreachable { address: String, source: io::Error },
    /// The node's certificate is not taken. With `unknown_issuer` the one that signed it, or itself when it signed itself,
    /// can be named in [`crate::Options::authorities`].
    Untrusted { host: String, reason: String, unknown_issuer: bool },
    /// The link broke while it was opened.
    Io(io::Error),
    /// The node answered the upgrade with an HTTP error; `error` and `reason` are those of its body.
    Http { status: u16, error: String, reason: Option<String> },
    /// The node refused the request (op 2) or the connection (op 7).
    Refused { code: u32, error: String },
    /// The node has no place for the connection at the moment (op 4).
    Disconnected { code: u32, error: String, reconnect_after_ms: u64 },
    /// The [`crate::TokenSource`] failed, or the exchange of its TokenRequest.
    NoToken(String),
    /// The application gives this client no token: status 403 of an auth URL or of the exchange of a TokenRequest.
    TokenDenied(String),
    /// Connecting or closing took too long.
    TimedOut,
    /// The connection is over and is not taken up again; whether an unanswered publish was stored is not known.
    Closed,
    /// The connection was lost and taken up again, and whether this publish was stored is not known.
    Unknown(String),
    /// The other side does not speak the protocol.
    Protocol(String),
}

impl Error {
    /// Trying again unchanged would end the same.
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
