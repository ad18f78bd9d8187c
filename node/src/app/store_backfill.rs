//! Store backfill: the messages of a channel that another node's incarnation stored.

use std::sync::Arc;

use fanfare_proto::frame::{self, MessageOut};
use fanfare_proto::http::read_record;

use crate::accounts::Accounts;
use crate::cluster::routing::StoreBackfillQuery;
use crate::model::{ClientId, Clock, ConnectionId, ForwardedParts, message_bytes};
use crate::origin::history::{Direction, HistoryQuery, HistoryRow, HistoryStore, RowKind};

/// Rows read at most, of all incarnations; with more of them in between there is no answer.
const ROWS_MAX: usize = 20_000;
/// Bytes of texts returned at most.
const BYTES_MAX: usize = 4 * 1024 * 1024;
const PAGE_ROWS: usize = 500;
const PAGE_BYTES: usize = 512 * 1024;
/// Assumed bound of the difference between the clocks of nodes.
const APART_MS: u64 = 60_000;
const HOUR_MS: u64 = 3_600_000;

/// Reads the messages after the last received one. None if the channel keeps no history, the store fails or is not shared, or the
/// incarnation may have kept other channels.
pub(super) async fn read_backfill(
    store: Arc<dyn HistoryStore>,
    accounts: Arc<Accounts>,
    clock: Clock,
    behind: StoreBackfillQuery,
) -> Option<Vec<ForwardedParts>> {
    let key = behind.key;
    let directory = accounts.current();
    let policy = directory.account(key.account())?.policy(key.channel());
    if !policy.history || !store.is_shared() {
        return None;
    }
    let kept = store.recent_policies().await;
    let kept = kept
        .inspect_err(|error| tracing::warn!(%error, "store backfill failed: history policies not read"))
        .ok()?;
    let (mut kept, incarnation) = (kept, behind.incarnation);
    kept.retain(|(of, _)| *of == incarnation);
    if kept.is_empty() || kept.iter().any(|(_, policies)| *policies != directory.history_policies()) {
        return None;
    }
    let now_ms = clock.expiry_ms();
    let since_ms = u64::try_from(behind.since.as_millis()).ok()?;
    let start_ms = now_ms.saturating_sub(since_ms).saturating_sub(APART_MS);
    let mut query = HistoryQuery {
        key,
        kind: RowKind::Messages,
        limit: PAGE_ROWS,
        bytes_max: PAGE_BYTES,
        start_ms: Some(start_ms),
        end_ms: None,
        oldest_ms: now_ms.saturating_sub(u64::from(policy.retention_hours) * HOUR_MS),
        cursor: None,
        direction: Direction::Backwards,
        until: None,
    };
    if query.oldest_ms > start_ms {
        return None;
    }
    let (mut found, mut seen, mut bytes) = (Vec::new(), 0, 0);
    loop {
        let page = store.read(query.clone()).await;
        let page =
            page.inspect_err(|error| tracing::warn!(%error, "store backfill failed: messages not read"));
        let page = page.ok()?;
        seen += page.rows.len();
        let mut of_incarnation =
            page.rows.iter().filter(|row| row.position.incarnation == behind.incarnation);
        let is_reached = of_incarnation.by_ref().any(|row| {
            let is_reached = row.position.sequence <= behind.sequence;
            if !is_reached {
                bytes += row.json.len();
                found.push(parts(row));
            }
            is_reached
        });
        let Some(next) = page.next.filter(|_| !is_reached) else { break };
        if seen > ROWS_MAX || bytes > BYTES_MAX {
            return None;
        }
        query.cursor = Some(next);
    }
    found.reverse();
    found.into_iter().collect()
}

/// Parses a stored row; none for a foreign one.
fn parts(row: &HistoryRow) -> Option<ForwardedParts> {
    let record = read_record(&row.json)
        .inspect_err(|error| tracing::error!(%error, "stored record cannot be decoded"))
        .ok()?;
    let (name, client_id) = (record.name.as_deref(), record.client_id.as_deref());
    let message = MessageOut { id: &record.id, name, data: record.data, extras: record.extras };
    let mut text = Vec::with_capacity(row.json.len() + 64);
    frame::encode_message(&message, record.timestamp, &record.connection_id, client_id, &mut text);
    Some(ForwardedParts {
        incarnation: row.position.incarnation,
        first: row.position.sequence,
        last: row.position.sequence,
        timestamp_ms: record.timestamp,
        connection_id: ConnectionId::parse(&record.connection_id)?,
        client_id: client_id.map(ClientId::stored),
        messages: vec![text.into()],
        bytes: message_bytes(name, record.data, record.extras, client_id) as u64,
    })
}
