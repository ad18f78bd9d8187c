//! Paths of the HTTP interface that name a channel, and percent-encoding.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

/// Operations on a channel, by the end of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// The channel itself: the path ends with its name.
    Channel,
    /// `/publish`.
    Publish,
    /// `/history`.
    History,
    /// `/presence`.
    Presence,
    /// `/presence/history`.
    PresenceHistory,
}

/// A path below `/api/channels/`, taken apart.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelRoute {
    /// Decoded channel name, not checked.
    pub channel: String,
    /// Operation that the path ends with.
    pub operation: Operation,
}

/// Reasons for which a path is refused: HTTP 400.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathError {
    /// `%` without two hexadecimal digits.
    Escape,
    /// Decoded text that is not UTF-8.
    Utf8,
}

impl fmt::Display for PathError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Escape => "path holds a malformed percent escape",
            Self::Utf8 => "channel in the path is not valid UTF-8",
        })
    }
}

impl std::error::Error for PathError {}

/// Ends of paths, the longest first: the first one that leaves a channel name decides.
const OPERATIONS: [(&str, Operation); 5] = [
    ("/presence/history", Operation::PresenceHistory),
    ("/presence", Operation::Presence),
    ("/publish", Operation::Publish),
    ("/history", Operation::History),
    ("", Operation::Channel),
];

/// Reads a path as the client sent it, without its query. Gives `None` for a path of another kind.
///
/// The operation is found before decoding. The rest is percent-decoded exactly once; `+` is a plus.
///
/// # Errors
/// The channel name cannot be decoded.
pub fn route(raw_path: &str) -> Result<Option<ChannelRoute>, PathError> {
    let Some(rest) = raw_path.strip_prefix("/api/channels/") else { return Ok(None) };
    let matched = OPERATIONS.iter().find_map(|(suffix, operation)| {
        let channel = rest.strip_suffix(suffix)?;
        (!channel.is_empty()).then_some((channel, *operation))
    });
    let Some((encoded, operation)) = matched else { return Ok(None) };
    Ok(Some(ChannelRoute { channel: decode(encoded)?, operation }))
}

/// Percent-decodes one part of a path.
///
/// # Errors
/// An escape is malformed, or the result is not UTF-8.
pub fn decode(encoded: &str) -> Result<String, PathError> {
    let mut escapes = encoded.split('%').skip(1);
    let is_escape = |text: &str| text.len() >= 2 && text.bytes().take(2).all(|byte| byte.is_ascii_hexdigit());
    if !escapes.all(is_escape) {
        return Err(PathError::Escape);
    }
    let decoded = percent_decode_str(encoded).decode_utf8().map_err(|_| PathError::Utf8)?;
    Ok(decoded.into_owned())
}

const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Percent-encodes one part of a path: all but letters, digits, `-`, `_`, `.` and `~`.
pub fn encode(part: &str) -> String {
    utf8_percent_encode(part, ENCODED).to_string()
}

/// Percent-encodes a channel name for a path, so that [`route`] finds it again.
pub fn encode_channel(channel: &str) -> String {
    encode(channel)
}
