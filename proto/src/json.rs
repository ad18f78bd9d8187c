//! JSON text from outside: checks before serde reads it, and small writers.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

/// Reasons for which a text is refused before its syntax is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Error {
    /// Text that is not UTF-8.
    Utf8,
    /// Text with more levels of nesting than allowed.
    Nesting {
        /// Levels that are allowed.
        nesting_max: usize,
    },
    /// A `\u` escape of one half of a surrogate pair.
    LoneSurrogate,
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Utf8 => f.write_str("text is not valid UTF-8"),
            Self::Nesting { nesting_max } => write!(f, "nesting is deeper than {nesting_max}"),
            Self::LoneSurrogate => f.write_str("text holds a lone surrogate"),
        }
    }
}

impl std::error::Error for Error {}

/// Checks UTF-8, nesting and surrogate escapes, and drops insignificant white space. Each open bracket is a
/// level.
///
/// The result is borrowed if no white space stands between tokens. Its syntax is not checked.
///
/// # Errors
/// [`Error`] says which check fails.
pub fn tidy(input: &[u8], nesting_max: usize) -> Result<Cow<'_, str>, Error> {
    let text = std::str::from_utf8(input).map_err(|_| Error::Utf8)?.trim_matches(is_space_char);
    let bytes = text.as_bytes();
    let mut tidied: Option<String> = None;
    let (mut at, mut kept_to, mut depth) = (0, 0, 0_usize);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => at = string_end(bytes, at + 1)?,
            b'{' | b'[' => {
                depth += 1;
                if depth > nesting_max {
                    return Err(Error::Nesting { nesting_max });
                }
                at += 1;
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                at += 1;
            }
            b' ' | b'\t' | b'\n' | b'\r' => {
                let end = space_end(bytes, at);
                // White space between two scalars stays, or `1 2` would become a valid 12.
                if is_structural(bytes[at - 1]) || bytes.get(end).is_some_and(|next| is_structural(*next)) {
                    tidied
                        .get_or_insert_with(|| String::with_capacity(text.len()))
                        .push_str(&text[kept_to..at]);
                    kept_to = end;
                }
                at = end;
            }
            _ => at += 1,
        }
    }
    Ok(match tidied {
        None => Cow::Borrowed(text),
        Some(mut tidied) => {
            tidied.push_str(&text[kept_to..]);
            Cow::Owned(tidied)
        }
    })
}

/// Reads an optional field, for serde's `deserialize_with`: `null` is `Some("null")`, an absent field `None`.
/// The field needs `#[serde(default)]`, too.
pub fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(deserializer).map(Some)
}

/// Reads an optional field as [`present`] does, borrowed from the input.
pub(crate) fn present_ref<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(deserializer).map(Some)
}

/// Appends a JSON string literal.
pub fn write_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("a vector takes every byte");
}

/// Gives the string that a JSON value is, or `None` for another value.
pub(crate) fn as_text(value: &RawValue) -> Option<Cow<'_, str>> {
    let literal = value.get();
    let inner = literal.strip_prefix('"')?.strip_suffix('"')?;
    if inner.contains('\\') {
        serde_json::from_str(literal).ok().map(Cow::Owned)
    } else {
        Some(Cow::Borrowed(inner))
    }
}

/// Gives the text of a serde error without the place and the value.
///
/// The place is that of a tidied or converted text, unknown to the sender. The value may be a key or a token
/// in the wrong place; the expectation that follows it in the text names the field.
pub(crate) fn error_text(error: &serde_json::Error) -> String {
    let mut text = error.to_string();
    text.truncate(text.rfind(" at line ").unwrap_or(text.len()));
    if text.starts_with("invalid ") {
        let expected = text.rfind(", expected ").map_or(0, |comma| comma + ", ".len());
        text.drain(..expected);
    }
    text.truncate(text.floor_char_boundary(ERROR_TEXT_BYTES_MAX));
    if error.is_syntax() || error.is_eof() { format!("not JSON: {text}") } else { text }
}

const ERROR_TEXT_BYTES_MAX: usize = 200;

fn is_space_char(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\n' | '\r')
}

fn is_structural(byte: u8) -> bool {
    matches!(byte, b'{' | b'}' | b'[' | b']' | b':' | b',')
}

pub(crate) fn space_end(bytes: &[u8], from: usize) -> usize {
    let is_token = |byte: &u8| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
    bytes[from..].iter().position(is_token).map_or(bytes.len(), |length| from + length)
}

/// The index after the closing quote of the string whose first character is at `from`.
fn string_end(bytes: &[u8], mut from: usize) -> Result<usize, Error> {
    loop {
        let rest = bytes.get(from..).unwrap_or_default();
        let Some(length) = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')) else {
            return Ok(bytes.len());
        };
        from += length;
        match (bytes[from], bytes.get(from + 1)) {
            (b'"', _) => return Ok(from + 1),
            (_, Some(b'u')) => from = unicode_escape_end(bytes, from)?,
            _ => from += 2,
        }
    }
}

/// The index after the escaped code unit (or the pair of them) at `at`.
fn unicode_escape_end(bytes: &[u8], at: usize) -> Result<usize, Error> {
    match code_unit(bytes, at) {
        Some(0xD800..=0xDBFF) => match code_unit(bytes, at + 6) {
            Some(0xDC00..=0xDFFF) => Ok(at + 12),
            _ => Err(Error::LoneSurrogate),
        },
        Some(0xDC00..=0xDFFF) => Err(Error::LoneSurrogate),
        Some(_) => Ok(at + 6),
        None => Ok(at + 2),
    }
}

fn code_unit(bytes: &[u8], at: usize) -> Option<u32> {
    let digits = bytes.get(at..at + 6)?.strip_prefix(b"\\u")?;
    digits.iter().try_fold(0, |unit, digit| Some(unit * 16 + char::from(*digit).to_digit(16)?))
}
