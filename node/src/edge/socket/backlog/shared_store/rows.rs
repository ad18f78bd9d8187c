//! Positions among the rows of several incarnations.

use fanfare_proto::serial::Serial;

use super::SharedStoreCursor;
use crate::origin::history::HistoryPosition;

/// True if a row outside the position was certainly missed. A row of a retired incarnation that the position does not name may be older
/// than the position.
pub(super) fn is_surely_missed(reading: &SharedStoreCursor, row: HistoryPosition) -> bool {
    let is_named = |serial: &Serial| serial.sequence_of(row.incarnation).is_some();
    is_named(&reading.position) || is_named(&reading.live_until)
}

/// Store position before all rows from this time on.
pub(super) fn behind(timestamp_ms: u64) -> HistoryPosition {
    let timestamp_ms = timestamp_ms.saturating_sub(1);
    HistoryPosition { timestamp_ms, sequence: u64::MAX, incarnation: u64::MAX }
}

/// Position of a client that gets exactly these rows, and then every message after the attach position.
pub(super) fn before(attach_position: &Serial, rows: &[HistoryPosition]) -> Serial {
    let mut first = Serial::default();
    // Rows are newest first, so this goes from the oldest to the newest.
    for row in rows.iter().rev().filter(|row| row.sequence > 0) {
        if first.sequence_of(row.incarnation).is_none() {
            first.advance(row.incarnation, row.sequence - 1);
        }
    }
    let others =
        attach_position.entries().iter().filter(|(incarnation, _)| first.sequence_of(*incarnation).is_none());
    let others: Vec<(u64, u64)> = others.copied().collect();
    others.into_iter().for_each(|(incarnation, sequence)| first.advance(incarnation, sequence));
    first
}
