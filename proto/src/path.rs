//! Channel names in paths.

use std::fmt;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, utf8_percent_encode};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    /// The channel itself: the path ends with its name.
    Channel,
    Publish,
    History,
    Presence,
    PresenceHistory,
}

/// What a path below `/api/channels/` names; the channel is decoded but its name not checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelRoute {
    pub channel: String,
    pub operation: Operation,
}

/// HTTP 400.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathError {
    Escape,
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

/// Longest first: the first that leaves a channel decides.
const OPERATIONS: [(&str, Operation); 5] = [
    ("/presence/history", Operation::PresenceHistory),
    ("/presence", Operation::Presence),
    ("/publish", Operation::Publish),
    ("/history", Operation::History),
    ("", Operation::Channel),
];

/// The channel and operation of a path as it came, without query; none when it is no path of this kind.
///
/// The operation is matched before decoding, then the rest is percent-decoded exactly once (`+` is a plus).
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

/// Percent-encodes one part of a path.
pub fn encode(part: &str) -> String {
    utf8_percent_encode(part, ENCODED).to_string()
}

/// The form that always names this channel in a path.
pub fn encode_channel(channel: &str) -> String {
    encode(channel)
}
