//! What another store held, written as its node would have written it here. Each row is the same however often it is written.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use scylla::value::{CqlValue, Row};
use serde::Deserialize;
use tokio::time::Instant;

use super::buckets::{Bucket, Filling, told_until_ms};
use super::members::{self, MemberChange};
use super::rows::{self, NewRow, Part, PlacedRow};
use super::values::{conditional, number, ordered, ttl_s};
use super::{NONCE_SLACK_MS, Scylla, Shared, failed, ids, metrics, node, queues, revocations};
use crate::model::{ChannelKey, FormerMember, KeptNonce, PresenceEvent, random_bytes};
use crate::origin::history::copy::{ChannelRows, Memory, Piece, StoredId};
use crate::origin::history::{Position, RowKind, StoreError};

/// How long the database may refuse or be away before the copy ends.
const PATIENCE: Duration = Duration::from_secs(60);
const AGAIN_AFTER: Duration = Duration::from_millis(250);

/// One copy under way.
pub(in super::super) struct Copying {
    shared: Arc<Shared>,
    /// The partitions of the channel and day that is copied: from its first row on, so that every copy of it finds the same.
    filling: Filling,
    /// The index was told of it last.
    told: Option<Bucket>,
}

/// A piece, as it is written.
enum Write {
    Parts(ChannelKey, Vec<Part>),
    Other(Piece),
}

impl Copying {
    pub(in super::super) fn new(target: &Scylla) -> Self {
        Self { shared: Arc::clone(&target.shared), filling: Filling::new(0), told: None }
    }

    /// The table of messages, as the database tells it from a former one of its name.
    pub(in super::super) async fn table(&self) -> Result<String, StoreError> {
        let asked = "SELECT id FROM system_schema.tables WHERE keyspace_name = ? AND table_name = 'history'";
        let database = self.shared.database();
        let found = database.session.query_unpaged(asked, (&*self.shared.connection.keyspace,)).await;
        let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
        let row: Row = rows.first_row().map_err(failed)?;
        match row.columns.first() {
            Some(Some(CqlValue::Uuid(id))) => Ok(id.to_string()),
            _ => Err(failed("the database does not say which table it is")),
        }
    }

    pub(in super::super) fn memory(&self) -> Memory {
        let options = &self.shared.options;
        let (ids_ms, nonces_ms) = (options.idempotency_window_ms, options.nonce_memory_ms);
        Memory { ids_ms, nonces_ms, now_ms: self.shared.time.now_ms() }
    }

    /// Takes pieces in the order of the source; what it gives may be awaited in any order.
    pub(in super::super) fn begin(
        &mut self,
        piece: Piece,
    ) -> impl Future<Output = Result<(), StoreError>> + use<> {
        let shared = Arc::clone(&self.shared);
        let write = match piece {
            Piece::Rows(rows) => self.place(rows),
            other => Write::Other(other),
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

    /// Takes over what the source's node noted of itself, unless one of its name has begun here.
    pub(in super::super) async fn finish(
        self,
        highest_ms: u64,
        runs: Option<Vec<u8>>,
    ) -> Result<(), StoreError> {
        self.shared.wrote_up_to(highest_ms);
        node::note_highest(&self.shared).await?;
        match runs {
            Some(runs) => node::take_over(&self.shared, runs).await,
            None => Ok(()),
        }
    }

    fn place(&mut self, channel: ChannelRows) -> Write {
        let ChannelRows { kind, key, kept_ms, begins, rows } = channel;
        let (shared, bounds) = (&self.shared, self.shared.buckets.bounds);
        if begins {
            self.filling = Filling::new(rows.first().map_or(0, |(position, _)| position.timestamp_ms));
            self.told = None;
        }
        let (names, mut parts) = (rows::names(&key), Vec::new());
        for (position, record) in rows {
            let kept_until_ms = position.timestamp_ms.saturating_add(kept_ms);
            let row = NewRow { position, id: id_of(kind, position, &record), record };
            let bucket = self.filling.place(bounds, position.timestamp_ms, row.bytes());
            let Some(ttl) = ttl_s(kept_until_ms, shared.time.now_ms()) else { continue };
            let is_new = self.told.replace(bucket) != Some(bucket);
            let tell_until_ms = is_new.then(|| told_until_ms(kept_until_ms));
            rows::add(&mut parts, PlacedRow::new(shared, &names, (kind, bucket), &row, ttl, tell_until_ms));
        }
        Write::Parts(key, parts)
    }
}

impl Write {
    async fn run(&self, shared: &Shared) -> Result<(), StoreError> {
        match self {
            Self::Parts(key, parts) => {
                for part in parts {
                    rows::write_part(shared, key, part).await?;
                }
                Ok(())
            }
            Self::Other(Piece::Rows(_)) => Ok(()),
            Self::Other(Piece::Ids(ids)) => all(ids.iter().map(|id| write_id(shared, id))).await,
            Self::Other(Piece::Nonces(nonces)) => all(nonces.iter().map(|kept| claim(shared, kept))).await,
            Self::Other(Piece::Revocations(revocations)) => {
                all(revocations.iter().map(|revocation| revocations::write(shared, revocation.clone()))).await
            }
            Self::Other(Piece::Members(former)) => write_members(shared, former).await,
            Self::Other(Piece::Queues(rows)) => all(rows.iter().map(|row| queues::copy(shared, row))).await,
            Self::Other(Piece::Metrics(rows)) => metrics::write(shared, rows.clone()).await,
        }
    }
}

async fn all(
    writes: impl Iterator<Item = impl Future<Output = Result<(), StoreError>>>,
) -> Result<(), StoreError> {
    try_join_all(writes).await.map(drop)
}

/// Its message is stored, so the claim is one of which no row is asked for. One that is there stays.
async fn write_id(shared: &Shared, stored: &StoredId) -> Result<(), StoreError> {
    let StoredId { scope, id, stamp, timestamp_ms } = stored;
    let until_ms = timestamp_ms.saturating_add(shared.options.idempotency_window_ms + ids::SLACK_MS);
    let Some(ttl) = ttl_s(until_ms, shared.time.now_ms()) else { return Ok(()) };
    let database = shared.database();
    let (account, channel, key_name, client_id, id) = ids::names(scope, id);
    let (incarnation, sequence) = (ordered(stamp.incarnation), number(stamp.sequence));
    // A run draws its own, so this one is nobody's.
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

async fn claim(shared: &Shared, kept: &KeptNonce) -> Result<(), StoreError> {
    let memory_ms = shared.options.nonce_memory_ms + NONCE_SLACK_MS;
    let Some(ttl) = ttl_s(memory_ms, kept.age_ms) else { return Ok(()) };
    let database = shared.database();
    let values = (&*kept.nonce.key_name, number(kept.nonce.timestamp_ms), &*kept.nonce.nonce, ttl);
    conditional(&database.session, &database.statements.claim_nonce, values).await.map(drop)
}

/// Nobody asks for the members of a node that is not alone.
async fn write_members(shared: &Shared, former: &[FormerMember]) -> Result<(), StoreError> {
    if !shared.options.keeps_members {
        return Ok(());
    }
    let changes: Vec<_> = former.iter().map(MemberChange::kept).collect();
    members::write(shared, changes.iter()).await
}

/// As the live write has it: of a message its own, of an event one that no other has.
fn id_of(kind: RowKind, position: Position, record: &str) -> Box<str> {
    #[derive(Deserialize)]
    struct Named {
        #[serde(default)]
        id: Box<str>,
    }
    match kind {
        RowKind::Messages => {
            serde_json::from_str::<Named>(record).map_or_else(|_| "".into(), |named| named.id)
        }
        RowKind::Presence => PresenceEvent::id_at(position.incarnation, position.sequence).into(),
    }
}
