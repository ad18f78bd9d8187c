//! MessagePack as another spelling of JSON: the service works on JSON texts.

mod read;
mod write;

use std::fmt;

pub use read::to_json;
pub(crate) use read::to_json_with_gaps;
pub use write::from_json;

/// Why a MessagePack value was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// It ends within a value.
    Truncated,
    /// Something follows the value.
    Trailing,
    /// A string is not UTF-8, a map key is not a string, or a byte means nothing.
    Malformed(&'static str),
    /// Well formed, but JSON cannot say it.
    Unsupported(&'static str),
    Nesting {
        nesting_max: usize,
    },
    /// The JSON text would be longer.
    TooLarge {
        json_bytes_max: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("MessagePack ends within a value"),
            Self::Trailing => f.write_str("something follows the MessagePack value"),
            Self::Malformed(text) => write!(f, "MessagePack is malformed: {text}"),
            Self::Unsupported(text) => write!(f, "MessagePack holds {text}"),
            Self::Nesting { nesting_max } => write!(f, "nesting is deeper than {nesting_max}"),
            Self::TooLarge { json_bytes_max } => {
                write!(f, "JSON text is over the limit of {json_bytes_max} bytes")
            }
        }
    }
}

impl std::error::Error for Error {}
