//! Conversions between values of the program and of the database.

use scylla::client::session::Session;
use scylla::response::query_result::QueryResult;
use scylla::serialize::row::SerializeRow;
use scylla::statement::prepared::PreparedStatement;
use scylla::value::{CqlValue, Row};

use crate::origin::history::{HistoryPosition, RowKind, StoreError};

use super::failed;

/// Longest time to live that the database accepts, in seconds.
const TTL_S_MAX: u64 = 20 * 365 * 24 * 3_600;

pub(super) fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(super) fn natural(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

/// Maps an unsigned number to a signed one with the same order.
pub(super) fn ordered(value: u64) -> i64 {
    (value ^ (1 << 63)).cast_signed()
}

pub(super) fn unordered(value: i64) -> u64 {
    value.cast_unsigned() ^ (1 << 63)
}

pub(super) fn position(value: (i64, i64, i64)) -> HistoryPosition {
    let (timestamp_ms, sequence, incarnation) = value;
    HistoryPosition {
        timestamp_ms: natural(timestamp_ms),
        sequence: natural(sequence),
        incarnation: unordered(incarnation),
    }
}

pub(super) fn position_values(position: HistoryPosition) -> (i64, i64, i64) {
    let HistoryPosition { timestamp_ms, sequence, incarnation } = position;
    (number(timestamp_ms), number(sequence), ordered(incarnation))
}

pub(super) fn kind_value(kind: RowKind) -> i8 {
    match kind {
        RowKind::Messages => 0,
        RowKind::Presence => 1,
    }
}

/// Time to live of a row that is kept until `until_ms`; `None` if that has passed.
pub(super) fn ttl_s(until_ms: u64, now_ms: u64) -> Option<i32> {
    let left_ms = until_ms.checked_sub(now_ms).filter(|left_ms| *left_ms > 0)?;
    i32::try_from(left_ms.div_ceil(1_000).min(TTL_S_MAX)).ok()
}

/// Write time in microseconds; of two writes the database keeps the one with the later time.
pub(super) fn written_at(timestamp_ms: u64) -> i64 {
    number(timestamp_ms.saturating_mul(1_000))
}

/// Outcome of a conditional statement. The other columns of the answer differ between databases.
pub(super) struct ConditionalResult {
    pub(super) applied: bool,
    columns: Vec<(String, Option<CqlValue>)>,
}

impl ConditionalResult {
    pub(super) fn number(&self, name: &str) -> Option<i64> {
        let (_, value) = self.columns.iter().find(|(column, _)| column == name)?;
        match value {
            Some(CqlValue::BigInt(number)) => Some(*number),
            Some(CqlValue::Int(number)) => Some(i64::from(*number)),
            _ => None,
        }
    }
}

pub(super) async fn conditional(
    session: &Session,
    statement: &PreparedStatement,
    values: impl SerializeRow,
) -> Result<ConditionalResult, StoreError> {
    let answer = session.execute_unpaged(statement, values).await.map_err(failed)?;
    read_applied(answer)
}

fn read_applied(answer: QueryResult) -> Result<ConditionalResult, StoreError> {
    let rows = answer.into_rows_result().map_err(failed)?;
    let names: Vec<String> = rows.column_specs().iter().map(|column| column.name().to_owned()).collect();
    let row: Row = rows.first_row().map_err(failed)?;
    let columns: Vec<_> = names.into_iter().zip(row.columns).collect();
    let applied = columns.iter().find(|(name, _)| name == "[applied]");
    match applied {
        Some((_, Some(CqlValue::Boolean(applied)))) => Ok(ConditionalResult { applied: *applied, columns }),
        _ => Err(failed("the database did not say whether a condition held")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_keep_their_order() {
        let mut positions = Vec::new();
        for timestamp_ms in [0, 1, 1 << 40] {
            for sequence in [0, 1, 1 << 60] {
                for incarnation in [0, 1, u64::MAX / 2, u64::MAX / 2 + 1, u64::MAX] {
                    positions.push(HistoryPosition { timestamp_ms, sequence, incarnation });
                }
            }
        }
        assert!(positions.is_sorted());
        assert!(positions.iter().map(|at| position_values(*at)).is_sorted());
        for at in positions {
            assert_eq!(position(position_values(at)), at);
        }
    }

    #[test]
    fn expired_value_has_no_ttl_left() {
        assert_eq!(ttl_s(1_000, 1_000), None);
        assert_eq!(ttl_s(1_000, 2_000), None);
        assert_eq!(ttl_s(1_001, 1_000), Some(1));
        assert_eq!(ttl_s(u64::MAX, 0), Some(630_720_000));
    }
}
