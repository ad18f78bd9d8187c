//! The answer of a webhook → what becomes of the batch.

use std::time::{Duration, UNIX_EPOCH};

use super::Outcome;

/// A target that asks for more has this: nothing is tried again for longer.
const AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// `retry_after`: the text of the header.
pub(super) fn outcome(status: u16, retry_after: Option<&str>, now_ms: u64) -> Outcome {
    let reason = format!("status {status}");
    match status {
        200..=299 => Outcome::Delivered,
        410 => Outcome::Gone,
        408 | 425 | 429 | 500.. => {
            Outcome::Retry { reason, after: retry_after.and_then(|text| after(text, now_ms)) }
        }
        _ => Outcome::Rejected { reason },
    }
}

/// Seconds, or a date; another text asks for nothing.
pub(super) fn after(text: &str, now_ms: u64) -> Option<Duration> {
    let text = text.trim();
    let asked = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are more than the most.
        Duration::from_secs(text.parse().unwrap_or(u64::MAX))
    } else {
        let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
        date.saturating_sub(Duration::from_millis(now_ms))
    };
    Some(asked.min(AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_decides_what_becomes_of_a_batch() {
        let of = |status| outcome(status, Some("7"), 0);
        for status in [200, 201, 202, 204, 299] {
            assert_eq!(of(status), Outcome::Delivered, "{status}");
        }
        for status in [408, 425, 429, 500, 502, 503, 504, 599, 999] {
            let (reason, after) = (format!("status {status}"), Some(Duration::from_secs(7)));
            assert_eq!(of(status), Outcome::Retry { reason, after });
        }
        for status in [100, 101, 199, 300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 405, 413, 422, 451] {
            assert_eq!(of(status), Outcome::Rejected { reason: format!("status {status}") });
        }
        assert_eq!(of(410), Outcome::Gone);
    }

    #[test]
    fn retry_after_is_seconds_or_a_date_and_at_most_a_day() {
        // Sun, 06 Nov 1994 08:49:37 GMT.
        let now_ms = 784_111_777_000;
        for (text, seconds) in [
            ("0", Some(0)),
            (" 120 ", Some(120)),
            ("86400", Some(86_400)),
            ("86401", Some(86_400)),
            ("99999999999999999999999999", Some(86_400)),
            ("Sun, 06 Nov 1994 08:50:37 GMT", Some(60)),
            ("Sunday, 06-Nov-94 08:50:37 GMT", Some(60)),
            ("Sun, 06 Nov 1994 08:48:37 GMT", Some(0)),
            ("Mon, 06 Nov 2090 08:49:37 GMT", Some(86_400)),
            ("", None),
            ("-1", None),
            ("+1", None),
            ("1.5", None),
            ("soon", None),
        ] {
            assert_eq!(after(text, now_ms), seconds.map(Duration::from_secs), "{text}");
        }
    }
}
