//! The ids of recent messages, by which a message that is delivered again is dropped.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher as _, RandomState};

use fanfare_proto::frame::MessageIn;

/// Time in which a publish with the same id is the same message, by the node's clock.
pub(crate) const WINDOW_MS: u64 = 120_000;
/// Greatest number of ids; beyond it the oldest are forgotten early. They take some 3 MiB.
const IDS_MAX: usize = 65_536;

#[derive(Default)]
pub(crate) struct SeenMessages {
    hasher: RandomState,
    /// Timestamp of each message, by the hash of channel, client id and message id.
    timestamps: HashMap<u64, u64>,
    /// Hashes and timestamps in the order of arrival.
    order: VecDeque<(u64, u64)>,
}

impl SeenMessages {
    /// Remembers a message. Gives `false` if it was seen within the window. Client ids are told apart, since
    /// a message id is unique for its publisher alone.
    pub(crate) fn is_new(&mut self, channel: &str, message: &MessageIn) -> bool {
        let key = self.hasher.hash_one((channel, &message.client_id, &message.id));
        let now = message.timestamp;
        if self.timestamps.get(&key).is_some_and(|seen| now.abs_diff(*seen) < WINDOW_MS) {
            return false;
        }
        while let Some(&(oldest, at)) = self.order.front()
            && (self.order.len() >= IDS_MAX || now.saturating_sub(at) >= WINDOW_MS)
        {
            self.order.pop_front();
            if self.timestamps.get(&oldest) == Some(&at) {
                self.timestamps.remove(&oldest);
            }
        }
        self.timestamps.insert(key, now);
        self.order.push_back((key, now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(id: &str, client_id: Option<&str>, timestamp: u64) -> MessageIn {
        MessageIn {
            id: id.into(),
            name: None,
            data: None,
            extras: None,
            client_id: client_id.map(Into::into),
            connection_id: "c_1".into(),
            timestamp,
        }
    }

    #[test]
    fn repeated_id_is_dropped_within_window_and_new_after_it() {
        let mut seen = SeenMessages::default();
        for (id, client, timestamp, expected) in [
            ("a", None, 1_000, true),
            ("a", None, 2_000, false),
            ("a", Some("ann"), 2_000, true),
            ("b", None, 120_999, true),
            ("a", None, 120_999, false),
            ("a", None, 121_000, true),
            ("a", None, 122_000, false),
        ] {
            assert_eq!(seen.is_new("c", &message(id, client, timestamp)), expected, "{id} at {timestamp}");
        }
        assert!(seen.is_new("other", &message("a", None, 2_000)));
    }

    #[test]
    fn remembered_ids_are_bounded() {
        let mut seen = SeenMessages::default();
        for number in 0..3 * IDS_MAX {
            assert!(seen.is_new("c", &message(&number.to_string(), None, 5)));
        }
        assert_eq!((seen.order.len(), seen.timestamps.len()), (IDS_MAX, IDS_MAX));
        assert!(!seen.is_new("c", &message(&(2 * IDS_MAX).to_string(), None, 5)), "the latest are there");
        assert!(seen.is_new("c", &message("1", None, 6)));
        assert!(seen.is_new("c", &message("late", None, 5 + 2 * WINDOW_MS)));
        assert_eq!((seen.order.len(), seen.timestamps.len()), (1, 1));
    }
}
