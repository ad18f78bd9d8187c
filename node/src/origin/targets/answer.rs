//! Conversion of a webhook's response to the outcome of the batch.

use std::time::{Duration, UNIX_EPOCH};

use super::DeliveryOutcome;

/// Longest delay that a target may ask for.
const AFTER_MAX: Duration = Duration::from_secs(24 * 3600);

/// Converts a response; `retry_after` is the text of that header.
pub(super) fn outcome(status: u16, retry_after: Option<&str>, now_ms: u64) -> DeliveryOutcome {
    let reason = format!("status {status}");
    match status {
        200..=299 => DeliveryOutcome::Delivered,
        410 => DeliveryOutcome::Gone,
        408 | 425 | 429 | 500.. => {
            DeliveryOutcome::Retry { reason, after: retry_after.and_then(|text| after(text, now_ms)) }
        }
        _ => DeliveryOutcome::Rejected { reason },
    }
}

/// Parses a delay in seconds, or a date; `None` for any other text.
pub(super) fn after(text: &str, now_ms: u64) -> Option<Duration> {
    let text = text.trim();
    let requested = if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit exceed the longest delay anyway.
        Duration::from_secs(text.parse().unwrap_or(u64::MAX))
    } else {
        let date = httpdate::parse_http_date(text).ok()?.duration_since(UNIX_EPOCH).ok()?;
        date.saturating_sub(Duration::from_millis(now_ms))
    };
    Some(requested.min(AFTER_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_decides_what_becomes_of_a_batch() {
        let of = |status| outcome(status, Some("7"), 0);
        for status in [200, 201, 202, 204, 299] {
            assert_eq!(of(status), DeliveryOutcome::Delivered, "{status}");
        }
        for status in [408, 425, 429, 500, 502, 503, 504, 599, 999] {
            let (reason, after) = (format!("status {status}"), Some(Duration::from_secs(7)));
            assert_eq!(of(status), DeliveryOutcome::Retry { reason, after });
        }
        for status in [100, 101, 199, 300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 405, 413, 422, 451] {
            assert_eq!(of(status), DeliveryOutcome::Rejected { reason: format!("status {status}") });
        }
        assert_eq!(of(410), DeliveryOutcome::Gone);
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
