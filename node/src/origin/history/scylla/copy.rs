//! Copy of another store's rows, written as its node would have written them here. Writing a row again gives the same row.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use scylla::value::{CqlValue, Row};
use serde::Deserialize;
use tokio::time::Instant;

use super::buckets::{BucketFill, HistoryBucket, indexed_until_ms};
use super::members::{self, MemberChange};
use super::rows::{self, BucketRowBatch, BucketedRow, NewRow};
use super::values::{conditional, number, ordered, ttl_s};
use super::{NONCE_SLACK_MS, ScyllaShared, ScyllaStore, failed, ids, metrics, node, queues, revocations};
use crate::model::{ChannelKey, ClaimedNonce, PresenceEvent, RestoredMember, random_bytes};
use crate::origin::history::copy::{CopiedChannelRows, CopyPiece, DedupWindows, StoredId};
use crate::origin::history::{HistoryPosition, RowKind, StoreError};

/// Time for which the database may refuse or be unreachable before the copy ends.
const PATIENCE: Duration = Duration::from_secs(60);
const AGAIN_AFTER: Duration = Duration::from_millis(250);

/// A copy in progress.
pub(in super::super) struct CopyWriter {
    shared: Arc<ScyllaShared>,
    /// Fill level of the partition of the channel and day that is copied. It starts with the first row, so that every copy assigns the
    /// same partitions.
    filling: BucketFill,
    /// Partition that was indexed last.
    indexed_bucket: Option<HistoryBucket>,
}

/// A piece in the form in which it is written.
enum PieceWrite {
    Parts(ChannelKey, Vec<BucketRowBatch>),
    Other(CopyPiece),
}

impl CopyWriter {
    pub(in super::super) fn new(target: &ScyllaStore) -> Self {
        Self { shared: Arc::clone(&target.shared), filling: BucketFill::new(0), indexed_bucket: None }
    }

    /// Reads the id of the messages table, which differs from that of an earlier table of the same name.
    pub(in super::super) async fn table(&self) -> Result<String, StoreError> {
        let statement =
            "SELECT id FROM system_schema.tables WHERE keyspace_name = ? AND table_name = 'history'";
        let database = self.shared.database();
        let found = database.session.query_unpaged(statement, (&*self.shared.connection.keyspace,)).await;
        let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
        let row: Row = rows.first_row().map_err(failed)?;
        match row.columns.first() {
            Some(Some(CqlValue::Uuid(id))) => Ok(id.to_string()),
            _ => Err(failed("the database does not say which table it is")),
        }
    }

    pub(in super::super) fn dedup_windows(&self) -> DedupWindows {
        let options = &self.shared.options;
        let (ids_ms, nonces_ms) = (options.idempotency_window_ms, options.nonce_memory_ms);
        DedupWindows { ids_ms, nonces_ms, now_ms: self.shared.time.now_ms() }
    }

    /// Begins to write a piece. Pieces come in the order of the source; the futures may be awaited in any order.
    pub(in super::super) fn begin(
        &mut self,
        piece: CopyPiece,
    ) -> impl Future<Output = Result<(), StoreError>> + use<> {
        let shared = Arc::clone(&self.shared);
        let write = match piece {
            CopyPiece::Rows(rows) => self.assign_buckets(rows),
            other => PieceWrite::Other(other),
        };
        async move {
            let until = Instant::now() + PATIENCE;
            loop {
                match write.run(&shared).await {
                    Err(_) if Instant::now() < until => tokio::time::sleep(AGAIN_AFTER).await,
                    result => return result,
                }
            }
        }
    }

    /// Imports the source node's own record, unless a node of that name has already begun here.
    pub(in super::super) async fn finish(
        self,
        highest_ms: u64,
        incarnations: Option<Vec<u8>>,
    ) -> Result<(), StoreError> {
        self.shared.wrote_up_to(highest_ms);
        node::save_highest(&self.shared).await?;
        match incarnations {
            Some(incarnations) => node::import_incarnations(&self.shared, incarnations).await,
            None => Ok(()),
        }
    }

    fn assign_buckets(&mut self, channel: CopiedChannelRows) -> PieceWrite {
        let CopiedChannelRows { kind, key, retention_ms: kept_ms, is_first_part: begins, rows } = channel;
        let (shared, bounds) = (&self.shared, self.shared.buckets.bounds);
        if begins {
            self.filling = BucketFill::new(rows.first().map_or(0, |(position, _)| position.timestamp_ms));
            self.indexed_bucket = None;
        }
        let (names, mut parts) = (rows::names(&key), Vec::new());
        for (position, record) in rows {
            let kept_until_ms = position.timestamp_ms.saturating_add(kept_ms);
            let row = NewRow { position, id: id_of(kind, position, &record), record };
            let bucket = self.filling.assign(bounds, position.timestamp_ms, row.bytes());
            let Some(ttl) = ttl_s(kept_until_ms, shared.time.now_ms()) else { continue };
            let is_new = self.indexed_bucket.replace(bucket) != Some(bucket);
            let index_until_ms = is_new.then(|| indexed_until_ms(kept_until_ms));
            rows::add(
                &mut parts,
                BucketedRow::new(shared, &names, (kind, bucket), &row, ttl, index_until_ms),
            );
        }
        PieceWrite::Parts(key, parts)
    }
}

impl PieceWrite {
    async fn run(&self, shared: &ScyllaShared) -> Result<(), StoreError> {
        match self {
            Self::Parts(key, parts) => {
                for part in parts {
                    rows::write_row_batch(shared, key, part).await?;
                }
                Ok(())
            }
            Self::Other(CopyPiece::Rows(_)) => Ok(()),
            Self::Other(CopyPiece::Ids(ids)) => all(ids.iter().map(|id| write_id(shared, id))).await,
            Self::Other(CopyPiece::Nonces(nonces)) => {
                all(nonces.iter().map(|kept| claim(shared, kept))).await
            }
            Self::Other(CopyPiece::Revocations(revocations)) => {
                all(revocations.iter().map(|revocation| revocations::write(shared, revocation.clone()))).await
            }
            Self::Other(CopyPiece::Members(stored_members)) => write_members(shared, stored_members).await,
            Self::Other(CopyPiece::Queues(rows)) => {
                all(rows.iter().map(|row| queues::copy(shared, row))).await
            }
            Self::Other(CopyPiece::Metrics(rows)) => metrics::write(shared, rows.clone()).await,
        }
    }
}

async fn all(
    writes: impl Iterator<Item = impl Future<Output = Result<(), StoreError>>>,
) -> Result<(), StoreError> {
    try_join_all(writes).await.map(drop)
}

/// Stores the claim of an id. Its message is already stored, so the claim needs no row. An existing claim stays.
async fn write_id(shared: &ScyllaShared, stored: &StoredId) -> Result<(), StoreError> {
    let StoredId { scope, id, stamp, timestamp_ms } = stored;
    let until_ms = timestamp_ms.saturating_add(shared.options.idempotency_window_ms + ids::SLACK_MS);
    let Some(ttl) = ttl_s(until_ms, shared.time.now_ms()) else { return Ok(()) };
    let database = shared.database();
    let (account, channel, key_name, client_id, id) = ids::names(scope, id);
    let (incarnation, sequence) = (ordered(stamp.incarnation), number(stamp.sequence));
    // Incarnations draw their own owner, so this random one belongs to none.
    let owner = i64::from_be_bytes(random_bytes());
    let values = (
        account,
        channel,
        key_name,
        client_id,
        id,
        owner,
        incarnation,
        sequence,
        number(*timestamp_ms),
        ids::NO_ROW,
        ttl,
    );
    conditional(&database.session, &database.statements.insert_id, values).await.map(drop)
}

async fn claim(shared: &ScyllaShared, kept: &ClaimedNonce) -> Result<(), StoreError> {
    let memory_ms = shared.options.nonce_memory_ms + NONCE_SLACK_MS;
    let Some(ttl) = ttl_s(memory_ms, kept.age_ms) else { return Ok(()) };
    let database = shared.database();
    let values = (&*kept.nonce.key_name, number(kept.nonce.timestamp_ms), &*kept.nonce.nonce, ttl);
    conditional(&database.session, &database.statements.claim_nonce, values).await.map(drop)
}

/// Writes the members, if the node has no cluster; otherwise they are never read.
async fn write_members(shared: &ScyllaShared, stored_members: &[RestoredMember]) -> Result<(), StoreError> {
    if !shared.options.keeps_members {
        return Ok(());
    }
    let changes: Vec<_> = stored_members.iter().map(MemberChange::of_stored).collect();
    members::write(shared, changes.iter()).await
}

/// Returns the row's id as the live write has it: that of the message, or a unique one for a presence event.
fn id_of(kind: RowKind, position: HistoryPosition, record: &str) -> Box<str> {
    #[derive(Deserialize)]
    struct RecordId {
        #[serde(default)]
        id: Box<str>,
    }
    match kind {
        RowKind::Messages => {
            serde_json::from_str::<RecordId>(record).map_or_else(|_| "".into(), |named| named.id)
        }
        RowKind::Presence => PresenceEvent::id_at(position.incarnation, position.sequence).into(),
    }
}
