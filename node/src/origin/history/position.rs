//! Position of a row in a channel's history.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// Position of a row, ordered from oldest to newest. Its text form, 32 base64url characters, is a cursor without account or channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HistoryPosition {
    pub timestamp_ms: u64,
    pub sequence: u64,
    pub incarnation: u64,
}

impl HistoryPosition {
    pub const BYTES: usize = 24;

    /// Encodes the position big-endian, so that bytes sort like positions.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.timestamp_ms.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[16..].copy_from_slice(&self.incarnation.to_be_bytes());
        bytes
    }

    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let field = |at: usize| u64::from_be_bytes(std::array::from_fn(|i| bytes[at + i]));
        Self { timestamp_ms: field(0), sequence: field(8), incarnation: field(16) }
    }
}

impl fmt::Display for HistoryPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&URL_SAFE_NO_PAD.encode(self.to_bytes()))
    }
}

/// Error: the text is not a cursor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidCursor;

impl fmt::Display for InvalidCursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("is not a cursor")
    }
}

impl std::error::Error for InvalidCursor {}

impl FromStr for HistoryPosition {
    type Err = InvalidCursor;

    fn from_str(text: &str) -> Result<Self, InvalidCursor> {
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| InvalidCursor)?;
        Ok(Self::from_bytes(bytes.try_into().map_err(|_| InvalidCursor)?))
    }
}
