//! The keys of the outbox's rows.
//!
//! `events`: sequence. `waiting`: target, channel, sequence. `batches`: target, channel. `dead`: target, sequence. Texts are preceded by
//! their length, so rows of one target, and of one of its channels, are adjacent and in the order of their sequences.

use crate::origin::outbox::TargetId;

pub(super) fn sequence(sequence: u64) -> [u8; 8] {
    sequence.to_be_bytes()
}

pub(super) fn target(target: &TargetId) -> Vec<u8> {
    let mut key = Vec::with_capacity(target.as_str().len() + 2);
    put(&mut key, target.as_str());
    key
}

pub(super) fn channel(target: &TargetId, channel: &str) -> Vec<u8> {
    let mut key = self::target(target);
    put(&mut key, channel);
    key
}

pub(super) fn waiting(target: &TargetId, channel: &str, sequence: u64) -> Vec<u8> {
    let mut key = self::channel(target, channel);
    key.extend_from_slice(&sequence.to_be_bytes());
    key
}

pub(super) fn dead(target: &TargetId, sequence: u64) -> Vec<u8> {
    let mut key = self::target(target);
    key.extend_from_slice(&sequence.to_be_bytes());
    key
}

/// Parses a key of `waiting` as target, channel and sequence.
pub(super) fn parse_waiting(key: &[u8]) -> Option<(TargetId, &str, u64)> {
    let (target, rest) = take(key)?;
    let (channel, rest) = take(rest)?;
    Some((TargetId::from_text(target), channel, u64::from_be_bytes(rest.try_into().ok()?)))
}

/// Parses a key of `dead` as target and sequence.
pub(super) fn parse_dead(key: &[u8]) -> Option<(TargetId, u64)> {
    let (target, rest) = take(key)?;
    Some((TargetId::from_text(target), u64::from_be_bytes(rest.try_into().ok()?)))
}

pub(super) fn parse_sequence(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.try_into().ok()?))
}

fn put(key: &mut Vec<u8>, text: &str) {
    key.extend_from_slice(&(text.len() as u32).to_be_bytes());
    key.extend_from_slice(text.as_bytes());
}

fn take(key: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = key.split_first_chunk::<4>()?;
    let (text, rest) = rest.split_at_checked(u32::from_be_bytes(*length) as usize)?;
    Some((std::str::from_utf8(text).ok()?, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::AccountId;

    #[test]
    fn keys_are_read_back_and_keep_channels_apart() {
        let one = TargetId::new(&AccountId::new("acme"), "orders");
        for name in ["a", "a\0b", "\u{1f600}", ""] {
            let key = waiting(&one, name, 7);
            assert_eq!(parse_waiting(&key), Some((one.clone(), name, 7)));
            assert!(key.starts_with(&channel(&one, name)) && key.starts_with(&target(&one)));
        }
        assert!(!waiting(&one, "ab", 1).starts_with(&channel(&one, "a")));
        assert_eq!(parse_dead(&dead(&one, 9)), Some((one, 9)));
    }
}
