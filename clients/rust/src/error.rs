//! What can go wrong, for the caller to decide on.

use std::{fmt, io};

#[derive(Debug)]
pub enum Error {
    /// The address is not of a form that [`crate::Options::url`] takes.
    BadUrl(String),
    /// Not `<secret>.<keyName>`.
    BadKey,
    /// A value that cannot be signed or sent as it is.
    BadValue(String),
    Io(io::Error),
    /// The node answered the upgrade with an HTTP error; `error` and `reason` are those of its body.
    Http {
        status: u16,
        error: String,
        reason: Option<String>,
    },
    /// The node refused the request (op 2) or the connection (op 7).
    Refused {
        code: u32,
        error: String,
    },
    /// Connecting or closing took too long.
    TimedOut,
    /// The connection is over; whether an unanswered publish was stored is not known.
    Closed,
    /// The other side does not speak the protocol.
    Protocol(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BadUrl(reason) => write!(f, "unusable address: {reason}"),
            Self::BadKey => f.write_str("a key has the form <secret>.<keyName>"),
            Self::BadValue(reason) => f.write_str(reason),
            Self::Io(_) => f.write_str("the connection failed"),
            Self::Http { status, error, .. } => write!(f, "the node answered {status}: {error}"),
            Self::Refused { code, error } => write!(f, "refused with code {code}: {error}"),
            Self::TimedOut => f.write_str("timed out"),
            Self::Closed => f.write_str("the connection is closed"),
            Self::Protocol(reason) => write!(f, "unexpected answer: {reason}"),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io(source) => Some(source),
            _ => None,
        }
    }
}

impl From<io::Error> for Error {
    fn from(source: io::Error) -> Self {
        Self::Io(source)
    }
}
