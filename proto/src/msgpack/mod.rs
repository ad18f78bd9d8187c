//! MessagePack as another spelling of JSON: the service works on JSON texts.

mod read;
mod write;

use std::fmt;

pub use read::to_json;
pub(crate) use read::to_json_with_gaps;
pub use write::from_json;

/// Reasons for which a MessagePack value is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// Input that ends within a value.
    Truncated,
    /// Input with bytes after the value.
    Trailing,
    /// Input with a string that is not UTF-8, a map key that is no string, or a reserved byte.
    Malformed(&'static str),
    /// Well-formed value that JSON has not: binary data, an extension type, or a number that is not finite.
    Unsupported(&'static str),
    /// Value with more levels of nesting than allowed.
    Nesting {
        /// Levels that are allowed.
        nesting_max: usize,
    },
    /// Value whose JSON text is over the limit.
    TooLarge {
        /// Bytes that are allowed.
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
