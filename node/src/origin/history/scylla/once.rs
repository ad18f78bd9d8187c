//! The leave of a member whose node has died, which several others may make: all of them write it to one place, that of the first.

use super::buckets::{Bucket, day_of};
use super::ids::SLACK_MS;
use super::values::{conditional, kind_value, position, position_values, written_at};
use super::{Shared, failed};
use crate::model::ChannelKey;
use crate::origin::history::{Position, RowKind, StoreError};

/// So long after the first node the last one may write.
const LATE_MS: u64 = 120_000;
/// In the place of the key and the client id of a message, which are never empty.
const NOBODY: &str = "";

/// Where the event is to be written; none when it is there.
pub(super) async fn claim(
    shared: &Shared,
    key: &ChannelKey,
    id: &str,
    own: (Position, Bucket),
) -> Result<Option<(Position, Bucket)>, StoreError> {
    let database = shared.database();
    let (account, channel) = (key.account().as_str(), key.channel());
    let (timestamp_ms, sequence, incarnation) = position_values(own.0);
    let ttl = i32::try_from((LATE_MS + SLACK_MS) / 1_000).unwrap_or(i32::MAX);
    let owner = written_at(own.0.timestamp_ms);
    let bucket = own.1.number;
    let values =
        (account, channel, NOBODY, NOBODY, id, owner, incarnation, sequence, timestamp_ms, bucket, ttl);
    let answer = conditional(&database.session, &database.statements.insert_id, values).await?;
    if answer.applied {
        return Ok(Some(own));
    }
    let number = |name| answer.number(name).ok_or_else(|| failed("a claim says nothing of its place"));
    let (incarnation, sequence) = (number("incarnation")?, number("sequence")?);
    let timestamp_ms = number("timestamp_ms")?;
    let bucket = i32::try_from(number("bucket")?).map_err(failed)?;
    let first = position((timestamp_ms, sequence, incarnation));
    let bucket = Bucket { day: day_of(first.timestamp_ms), number: bucket };
    let kind = kind_value(RowKind::Presence);
    let values = (account, channel, kind, bucket.day, bucket.number, timestamp_ms, sequence, incarnation);
    let found = database.session.execute_unpaged(&database.statements.find_row, values).await;
    let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
    Ok((rows.rows_num() == 0).then_some((first, bucket)))
}
