//! Durations and sizes in human form.

use std::time::Duration;

const DURATION_UNITS: [(&str, u64); 4] = [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000)];
const SIZE_UNITS: [(&str, u64); 3] = [("KiB", 1 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];

/// Parses `500ms`, `25s`, `5m`, `1h`.
///
/// # Errors
/// The text says what was expected.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    with_unit(text, &DURATION_UNITS)
        .map(Duration::from_millis)
        .ok_or_else(|| format!("expected a duration such as 500ms, 25s, 5m or 2h, got `{text}`"))
}

pub(super) fn show_duration(duration: Duration) -> String {
    let ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let (unit, ms_per_unit) = DURATION_UNITS
        .into_iter()
        .rev()
        .find(|(_, ms_per_unit)| ms > 0 && ms.is_multiple_of(*ms_per_unit))
        .unwrap_or(("ms", 1));
    format!("{}{unit}", ms / ms_per_unit)
}

/// Milliseconds, plain or as a duration.
pub(super) fn parse_ms(text: &str) -> Result<u64, String> {
    plain(text)
        .or_else(|| with_unit(text, &DURATION_UNITS))
        .ok_or_else(|| expected("milliseconds or a duration such as 30s", text))
}

/// Bytes, plain or with a unit.
pub(super) fn parse_bytes(text: &str) -> Result<u64, String> {
    plain(text)
        .or_else(|| with_unit(text, &SIZE_UNITS))
        .ok_or_else(|| expected("bytes or a size such as 64KiB", text))
}

pub(super) fn parse_count(text: &str) -> Result<u64, String> {
    plain(text).ok_or_else(|| expected("a whole number", text))
}

fn expected(what: &str, text: &str) -> String {
    if is_digits(text) { format!("{text} is too large") } else { format!("expected {what}, got `{text}`") }
}

fn plain(text: &str) -> Option<u64> {
    is_digits(text).then(|| text.parse().ok()).flatten()
}

fn is_digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn with_unit(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    plain(number)?.checked_mul(*factor)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations() {
        for (text, ms) in [("500ms", 500), ("25s", 25_000), ("5m", 300_000), ("1h", 3_600_000), ("0s", 0)] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "25", "s", "-1s", "+1s", "1.5s", "1 s", "1d", "99999999999999999999s"] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
        for text in ["500ms", "25s", "5m", "1h", "0ms", "90s"] {
            assert_eq!(show_duration(parse_duration(text).expect("a duration")), text);
        }
    }

    #[test]
    fn sizes() {
        assert_eq!(parse_bytes("65536"), Ok(65_536));
        assert_eq!(parse_bytes("64KiB"), Ok(65_536));
        assert_eq!(parse_bytes("2MiB"), Ok(2 * 1024 * 1024));
        assert!(parse_bytes("64KB").is_err());
        assert!(parse_bytes("99999999999GiB").is_err());
    }
}
