//! Claims of the leaves of members whose node is down. Several nodes may write such an event; all of them write it at the position of the
//! first.

use super::buckets::{HistoryBucket, day_of};
use super::ids::SLACK_MS;
use super::values::{conditional, kind_value, position, position_values, written_at};
use super::{ScyllaShared, failed};
use crate::model::ChannelKey;
use crate::origin::history::{HistoryPosition, RowKind, StoreError};

/// Time after the first node's write within which the last node may write the event.
const LATE_MS: u64 = 120_000;
/// Replaces the key name and clientId of a message, which are never empty.
const NO_KEY_OR_CLIENT: &str = "";

/// Claims the event. Returns the position and partition at which to write it, or `None` if it is stored already.
pub(super) async fn claim(
    shared: &ScyllaShared,
    key: &ChannelKey,
    id: &str,
    own: (HistoryPosition, HistoryBucket),
) -> Result<Option<(HistoryPosition, HistoryBucket)>, StoreError> {
    let database = shared.database();
    let (account, channel) = (key.account().as_str(), key.channel());
    let (timestamp_ms, sequence, incarnation) = position_values(own.0);
    let ttl = i32::try_from((LATE_MS + SLACK_MS) / 1_000).unwrap_or(i32::MAX);
    let owner = written_at(own.0.timestamp_ms);
    let bucket = own.1.number;
    let values = (
        account,
        channel,
        NO_KEY_OR_CLIENT,
        NO_KEY_OR_CLIENT,
        id,
        owner,
        incarnation,
        sequence,
        timestamp_ms,
        bucket,
        ttl,
    );
    let answer = conditional(&database.session, &database.statements.insert_id, values).await?;
    if answer.applied {
        return Ok(Some(own));
    }
    let number = |name| answer.number(name).ok_or_else(|| failed("a claim says nothing of its place"));
    let (incarnation, sequence) = (number("incarnation")?, number("sequence")?);
    let timestamp_ms = number("timestamp_ms")?;
    let bucket = i32::try_from(number("bucket")?).map_err(failed)?;
    let first = position((timestamp_ms, sequence, incarnation));
    let bucket = HistoryBucket { day: day_of(first.timestamp_ms), number: bucket };
    let kind = kind_value(RowKind::Presence);
    let values = (account, channel, kind, bucket.day, bucket.number, timestamp_ms, sequence, incarnation);
    let found = database.session.execute_unpaged(&database.statements.find_row, values).await;
    let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
    Ok((rows.rows_num() == 0).then_some((first, bucket)))
}
