//! Order of the messages that a client receives from one publisher, checked against the losses that the node reports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::Value;
use tokio::time::Instant;

/// The state of one channel.
#[derive(Debug, Default)]
pub struct ChannelSequence {
    pub serial: Option<Value>,
    /// The next number. A client accepts any first number.
    pub next: Option<u64>,
    /// A `resumed: false` has come since the last message.
    pub is_loss_reported: bool,
    /// The `resumed: false` covers the numbers below: they were acknowledged before it.
    loss_covers_below: u64,
    received: BTreeSet<u64>,
    /// Numbers that a gap after a `resumed: false` skipped. They may come late.
    lost: BTreeSet<u64>,
    /// Time of the first arrival of each message.
    first: BTreeMap<u64, Instant>,
}

impl ChannelSequence {
    /// Returns the age of a message that the client has had before.
    pub fn age_of_duplicate(&mut self, number: u64) -> Option<Duration> {
        let first = self.first.get(&number).map(Instant::elapsed);
        self.first.entry(number).or_insert_with(Instant::now);
        first
    }

    /// Notes a reported loss at a time when `acknowledged` messages are acknowledged.
    pub fn report_loss(&mut self, acknowledged: u64) {
        self.is_loss_reported = true;
        self.loss_covers_below = acknowledged;
        // After a loss the client may receive older messages again.
        self.received.clear();
    }

    /// Takes a message. Returns the number of messages that a reported gap skipped, or the broken invariant.
    pub fn take(&mut self, number: u64, is_in_doubt: bool) -> Result<u64, &'static str> {
        if self.received.contains(&number) {
            return if is_in_doubt { Ok(0) } else { Err("came twice") };
        }
        let next = self.next.unwrap_or(number);
        if number < next && is_in_doubt {
            // A second attempt under the same id does not show which messages follow.
            return Ok(0);
        }
        if number < next && !self.is_loss_reported {
            // A late message of a reported gap.
            return if self.lost.remove(&number) { Ok(0) } else { Err("came late") };
        }
        if number > next.max(self.loss_covers_below) && !self.is_loss_reported {
            return Err("silent gap");
        }
        self.lost.extend(next..number);
        self.received.insert(number);
        (self.next, self.is_loss_reported) = (Some(number + 1), false);
        Ok(number.saturating_sub(next))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of messages that reported gaps skipped; `None` stands for a `resumed: false`, at a time when
    /// all earlier messages are acknowledged.
    fn found(numbers: &[Option<u64>]) -> Result<u64, &'static str> {
        let mut sequence = ChannelSequence::default();
        let mut missing = 0;
        for number in numbers {
            match number {
                Some(number) => missing += sequence.take(*number, false)?,
                None => sequence.report_loss(sequence.next.unwrap_or(0)),
            }
        }
        Ok(missing)
    }

    #[test]
    fn silent_gap_duplicate_and_late_message_are_detected() {
        assert_eq!(found(&[Some(4), Some(5), Some(6)]), Ok(0));
        assert_eq!(found(&[Some(4), Some(6)]), Err("silent gap"));
        assert_eq!(found(&[Some(4), Some(5), Some(5)]), Err("came twice"));
        assert_eq!(found(&[Some(4), Some(3)]), Err("came late"));
    }

    #[test]
    fn reported_loss_restarts_sequence_and_counts_missing_messages() {
        assert_eq!(found(&[Some(4), None, Some(7), Some(8)]), Ok(2));
        assert_eq!(found(&[Some(4), None, Some(7), Some(6)]), Ok(2), "it comes late, and was told");
        assert_eq!(found(&[Some(4), Some(5), None, Some(4), Some(5)]), Ok(0));
        assert_eq!(found(&[Some(4), None, Some(7), Some(9)]), Err("silent gap"));
    }

    #[test]
    fn reported_loss_covers_messages_acknowledged_before_it() {
        let mut sequence = ChannelSequence::default();
        assert_eq!(sequence.take(4, false), Ok(0));
        sequence.report_loss(9);
        assert_eq!(sequence.take(5, false), Ok(0), "it comes late");
        assert_eq!(sequence.take(9, false), Ok(3));
        assert_eq!(sequence.take(7, false), Ok(0), "as does this one");
        assert_eq!(sequence.take(11, false), Err("silent gap"));
    }

    #[test]
    fn message_republished_under_its_id_may_come_twice() {
        let mut sequence = ChannelSequence::default();
        assert_eq!(sequence.take(0, false), Ok(0));
        assert_eq!(sequence.take(1, true), Ok(0));
        assert_eq!(sequence.take(1, true), Ok(0));
        assert_eq!(sequence.take(2, false), Ok(0));
        sequence.report_loss(3);
        assert_eq!((sequence.take(1, true), sequence.next), (Ok(0), Some(3)), "all before it are there");
    }
}
