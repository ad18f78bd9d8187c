//! Who is present on a node that is alone: one row for each member, gone with its leave.

use std::collections::HashMap;
use std::sync::Arc;

use futures_util::TryStreamExt as _;
use futures_util::future::{try_join, try_join_all};
use serde_json::value::RawValue;

use super::values::{natural, number, written_at};
use super::{Shared, failed};
use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, FormerMember, MemberId, PresenceAction,
    PresenceEvent,
};
use crate::origin::history::StoreError;

/// Rows in one batch.
const BATCH_ROWS_MAX: usize = 100;

/// What an event makes of its member.
pub(super) struct MemberChange {
    key: ChannelKey,
    member: MemberId,
    /// None: it has left.
    state: Option<State>,
    /// Of two changes the one with the higher number is the later.
    number: i64,
}

struct State {
    epoch: u64,
    data: Option<Arc<RawValue>>,
    timestamp_ms: u64,
}

impl MemberChange {
    pub(super) fn of(event: &PresenceEvent, number: i64) -> Self {
        let PresenceEvent { key, member, owner, data, timestamp_ms, .. } = event;
        let state = State { epoch: owner.epoch, data: data.clone(), timestamp_ms: *timestamp_ms };
        let state = (event.action != PresenceAction::Leave).then_some(state);
        Self { key: key.clone(), member: member.clone(), state, number }
    }

    /// Of a member that is there, as another store has it.
    pub(super) fn kept(former: &FormerMember) -> Self {
        let FormerMember { key, member, epoch, data, timestamp_ms } = former;
        let state = State { epoch: *epoch, data: data.clone(), timestamp_ms: *timestamp_ms };
        let number = written_at(*timestamp_ms);
        Self { key: key.clone(), member: member.clone(), state: Some(state), number }
    }

    pub(super) fn bytes(&self) -> usize {
        let data = self.state.as_ref().and_then(|state| state.data.as_ref());
        size_of::<Self>() + data.map_or(0, |data| data.get().len())
    }
}

type Written = (Arc<str>, String, String, Vec<u8>, String, i64, String, i64, i64);
type Removed = (i64, Arc<str>, String, String, Vec<u8>, String);

/// Of several changes of one member the last counts.
pub(super) async fn write(
    shared: &Shared,
    changes: impl Iterator<Item = &MemberChange>,
) -> Result<(), StoreError> {
    let last: HashMap<_, _> = changes.map(|change| ((&change.key, &change.member), change)).collect();
    if last.is_empty() {
        return Ok(());
    }
    let (mut written, mut removed): (Vec<Written>, Vec<Removed>) = (Vec::new(), Vec::new());
    for ((key, member), change) in last {
        let node_id = Arc::clone(&shared.options.node_id);
        let (account, channel) = (key.account().as_str().to_owned(), key.channel().to_owned());
        let connection_id = member.connection_id.as_bytes().to_vec();
        let client_id = member.client_id.as_str().to_owned();
        match &change.state {
            None => removed.push((change.number, node_id, account, channel, connection_id, client_id)),
            Some(State { epoch, data, timestamp_ms }) => {
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

type Found = (String, String, Vec<u8>, String, i64, String, i64);

/// Every member of this node, in no order.
pub(super) async fn all(shared: &Shared) -> Result<Vec<FormerMember>, StoreError> {
    let database = shared.database();
    let (session, statements) = (&database.session, &database.statements);
    let rows = session.execute_iter(statements.members.clone(), (&*shared.options.node_id,)).await;
    let mut rows = rows.map_err(failed)?.rows_stream::<Found>().map_err(failed)?;
    let mut all = Vec::new();
    while let Some(row) = rows.try_next().await.map_err(failed)? {
        all.extend(read(row));
    }
    Ok(all)
}

/// None: the row is damaged.
fn read(
    (account, channel, connection_id, client_id, epoch, data, timestamp_ms): Found,
) -> Option<FormerMember> {
    let connection_id = ConnectionId::from_bytes(connection_id.try_into().ok()?);
    let data = match data {
        text if text.is_empty() => None,
        text => Some(Arc::from(RawValue::from_string(text).ok()?)),
    };
    Some(FormerMember {
        key: ChannelKey::new(AccountId::new(&account), ChannelName::stored(&channel)),
        member: MemberId { connection_id, client_id: ClientId::stored(&client_id) },
        epoch: epoch.cast_unsigned(),
        data,
        timestamp_ms: natural(timestamp_ms),
    })
}
