//! The time of day, for signing and comparing.

/// Epoch milliseconds.
#[expect(clippy::disallowed_methods, reason = "a test stands outside of the node, whose clock it checks")]
pub fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).expect("this century")
}

/// Epoch seconds.
pub fn now_s() -> u64 {
    now_ms() / 1000
}
