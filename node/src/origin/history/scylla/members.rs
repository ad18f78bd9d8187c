//! Members of a node without a cluster: one row for each, removed with its leave.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::TryStreamExt as _;
use futures_util::future::{try_join, try_join_all};
use serde_json::value::RawValue;

use super::values::{natural, number, written_at};
use super::{ScyllaShared, failed};
use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, MemberId, PresenceAction, PresenceEvent,
    RestoredMember,
};
use crate::origin::history::StoreError;

/// Rows in one batch.
const BATCH_ROWS_MAX: usize = 100;

/// Change that a presence event makes to its member.
pub(super) struct MemberChange {
    key: ChannelKey,
    member: MemberId,
    /// New state; `None` if the member has left.
    state: Option<StoredMemberState>,
    /// Order of changes: of two changes the one with the higher number is the later.
    number: i64,
}

struct StoredMemberState {
    epoch: u64,
    data: Option<Arc<RawValue>>,
    timestamp_ms: u64,
}

impl MemberChange {
    pub(super) fn of(event: &PresenceEvent, number: i64) -> Self {
        let PresenceEvent { key, member, owner, data, timestamp_ms, .. } = event;
        let state = StoredMemberState { epoch: owner.epoch, data: data.clone(), timestamp_ms: *timestamp_ms };
        let state = (event.action != PresenceAction::Leave).then_some(state);
        Self { key: key.clone(), member: member.clone(), state, number }
    }

    /// Builds the change for a present member that another store has.
    pub(super) fn of_stored(stored: &RestoredMember) -> Self {
        let RestoredMember { key, member, epoch, data, timestamp_ms } = stored;
        let state = StoredMemberState { epoch: *epoch, data: data.clone(), timestamp_ms: *timestamp_ms };
        let number = written_at(*timestamp_ms);
        Self { key: key.clone(), member: member.clone(), state: Some(state), number }
    }

    pub(super) fn bytes(&self) -> usize {
        let data = self.state.as_ref().and_then(|state| state.data.as_ref());
        size_of::<Self>() + data.map_or(0, |data| data.get().len())
    }
}

type MemberInsertValues = (Arc<str>, String, String, Vec<u8>, String, i64, String, i64, i64);
type MemberDeleteValues = (i64, Arc<str>, String, String, Vec<u8>, String);

/// Writes the changes; of several changes of one member the last one counts.
pub(super) async fn write(
    shared: &ScyllaShared,
    changes: impl Iterator<Item = &MemberChange>,
) -> Result<(), StoreError> {
    let last: HashMap<_, _> = changes.map(|change| ((&change.key, &change.member), change)).collect();
    if last.is_empty() {
        return Ok(());
    }
    let (mut written, mut removed): (Vec<MemberInsertValues>, Vec<MemberDeleteValues>) =
        (Vec::new(), Vec::new());
    for ((key, member), change) in last {
        let node_id = Arc::clone(&shared.options.node_id);
        let (account, channel) = (key.account().as_str().to_owned(), key.channel().to_owned());
        let connection_id = member.connection_id.as_bytes().to_vec();
        let client_id = member.client_id.as_str().to_owned();
        match &change.state {
            None => removed.push((change.number, node_id, account, channel, connection_id, client_id)),
            Some(StoredMemberState { epoch, data, timestamp_ms }) => {
                // No JSON text is empty, so an empty one says that there is none.
                let data = data.as_ref().map_or("", |data| data.get()).to_owned();
                let (epoch, timestamp_ms) = (epoch.cast_signed(), number(*timestamp_ms));
                written.push((
                    node_id,
                    account,
                    channel,
                    connection_id,
                    client_id,
                    epoch,
                    data,
                    timestamp_ms,
                    change.number,
                ));
            }
        }
    }
    let database = shared.database();
    let statements = &database.statements;
    let writing =
        written.chunks(BATCH_ROWS_MAX).map(|rows| database.write_all(&statements.insert_member, rows));
    let removing =
        removed.chunks(BATCH_ROWS_MAX).map(|rows| database.write_all(&statements.delete_member, rows));
    let (writing, removing): (Vec<_>, Vec<_>) = (writing.collect(), removing.collect());
    try_join(try_join_all(writing), try_join_all(removing)).await.map(drop)
}

type MemberColumns = (String, String, Vec<u8>, String, i64, String, i64);

/// Reads all members of this node, in no order.
pub(super) async fn all(shared: &ScyllaShared) -> Result<Vec<RestoredMember>, StoreError> {
    let database = shared.database();
    let (session, statements) = (&database.session, &database.statements);
    let rows = session.execute_iter(statements.members.clone(), (&*shared.options.node_id,)).await;
    let mut rows = rows.map_err(failed)?.rows_stream::<MemberColumns>().map_err(failed)?;
    let mut all = Vec::new();
    while let Some(row) = rows.try_next().await.map_err(failed)? {
        all.extend(read(row));
    }
    Ok(all)
}

/// Returns `None` if the row is damaged.
fn read(
    (account, channel, connection_id, client_id, epoch, data, timestamp_ms): MemberColumns,
) -> Option<RestoredMember> {
    let connection_id = ConnectionId::from_bytes(connection_id.try_into().ok()?);
    let data = match data {
        text if text.is_empty() => None,
        text => Some(Arc::from(RawValue::from_string(text).ok()?)),
    };
    Some(RestoredMember {
        key: ChannelKey::new(AccountId::new(&account), ChannelName::stored(&channel)),
        member: MemberId { connection_id, client_id: ClientId::stored(&client_id) },
        epoch: epoch.cast_unsigned(),
        data,
        timestamp_ms: natural(timestamp_ms),
    })
}
