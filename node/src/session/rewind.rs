//! Rewind: the number and age of messages before a first attach.

use fanfare_proto::frame::code;

use super::{Context, PublishResult};
use crate::telemetry::Limit;

/// The last messages before an attach, oldest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rewind {
    /// Maximum number of messages.
    pub count: usize,
    /// Oldest time of a message, in epoch milliseconds.
    pub since_ms: u64,
    /// True if more was asked for than the capability allows: a rewind that finds fewer than `count` messages then warns.
    pub is_cut: bool,
}

impl Rewind {
    /// Parses `"N"`, or a time such as `"10s"` or `"5m"`. Beyond the resume window the capability `history` is needed.
    pub(super) fn parse(text: &str, history: bool, cx: Context<'_>) -> Result<Self, PublishResult> {
        let (count_max, window_ms) = (cx.limits.rewind_messages, cx.limits.resume_window_ms);
        let (count, back_ms) = read(text, count_max).ok_or_else(|| {
            Limit::RewindMessages.hit_if(text.parse::<usize>().is_ok_and(|count| count > count_max));
            PublishResult::Refused {
                code: code::BAD_REQUEST,
                error: format!("rewind must be a count of 1 to {count_max}, or a time in seconds or minutes such as 10s or 5m"),
                reason: None,
            }
        })?;
        let is_cut = !history && back_ms.is_none_or(|back_ms| back_ms > window_ms);
        let back_ms = if is_cut { Some(window_ms) } else { back_ms };
        let since_ms = back_ms.map_or(0, |back_ms| cx.now_ms.saturating_sub(back_ms));
        Ok(Self { count, since_ms, is_cut })
    }
}

/// Parses a number of messages, and their greatest age in milliseconds.
fn read(text: &str, count_max: usize) -> Option<(usize, Option<u64>)> {
    let (digits, unit_ms) = match text.as_bytes().last()? {
        b's' => (&text[..text.len() - 1], Some(1_000)),
        b'm' => (&text[..text.len() - 1], Some(60_000)),
        _ => (text, None),
    };
    if !digits.bytes().all(|digit| digit.is_ascii_digit()) {
        return None;
    }
    let number = digits.parse::<u64>().ok().filter(|number| *number > 0)?;
    match unit_ms {
        Some(unit_ms) => Some((count_max, Some(number.checked_mul(unit_ms)?))),
        None => usize::try_from(number).ok().filter(|count| *count <= count_max).map(|count| (count, None)),
    }
}

#[cfg(test)]
mod tests {
    use super::read;

    #[test]
    fn counts_and_times_and_nothing_else() {
        for (text, expected) in [
            ("1", Some((1, None))),
            ("100", Some((100, None))),
            ("007", Some((7, None))),
            ("1s", Some((100, Some(1_000)))),
            ("5m", Some((100, Some(300_000)))),
        ] {
            assert_eq!(read(text, 100), expected, "{text}");
        }
        let too_long = format!("{}m", u64::MAX);
        let bad = [
            "",
            "0",
            "101",
            "-1",
            "+1",
            "1.5",
            "1h",
            "s",
            "m",
            "0s",
            " 1",
            "1 s",
            "é",
            "１",
            "18446744073709551616",
        ];
        for text in bad.into_iter().chain([too_long.as_str()]) {
            assert_eq!(read(text, 100), None, "{text}");
        }
    }
}
