//! Members: one row for each, written in the same commit as its presence event and removed with its leave.

use std::collections::HashMap;
use std::sync::Arc;

use fjall::{OwnedWriteBatch, Slice};
use serde_json::value::RawValue;

use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, MemberId, PresenceAction, PresenceEvent,
    RestoredMember,
};

use super::keys;
use super::tables::Table;

/// Version of the row format.
const VERSION: u8 = 1;

/// Key of a member's row, and its new value; `None` removes the row because the member leaves.
pub(super) type MemberRow = (Slice, Option<Slice>);

#[derive(Clone)]
pub(super) struct MemberRows(pub(super) Table);

impl MemberRows {
    /// Adds the changes to the batch. Of several changes of one member only the last is added, since writes of one key in a batch have no
    /// order.
    pub(super) fn add(&self, batch: &mut OwnedWriteBatch, rows: impl Iterator<Item = MemberRow>) {
        let last: HashMap<Slice, Option<Slice>> = rows.collect();
        for (key, value) in last {
            match value {
                Some(value) => batch.insert(self.0.keyspace(), key, value),
                None => batch.remove(self.0.keyspace(), key),
            }
        }
    }

    /// Reads all rows, in no order.
    pub(super) fn all(&self) -> fjall::Result<Vec<RestoredMember>> {
        let mut all = Vec::new();
        for row in self.0.keyspace().iter() {
            let (key, value) = row.into_inner()?;
            all.extend(read(&key, &value));
        }
        Ok(all)
    }
}

pub(super) fn row(event: &PresenceEvent, (name, value): &mut (Vec<u8>, Vec<u8>)) -> MemberRow {
    let PresenceEvent { key, member, owner, data, timestamp_ms, .. } = event;
    keys::member_key(key, member, name);
    let name = Slice::from(name.as_slice());
    if event.action == PresenceAction::Leave {
        return (name, None);
    }
    value.clear();
    value.push(VERSION);
    value.extend_from_slice(&timestamp_ms.to_be_bytes());
    value.extend_from_slice(&owner.epoch.to_be_bytes());
    // No JSON text is empty, so an empty one says that there is none.
    value.extend_from_slice(data.as_ref().map_or("", |data| data.get()).as_bytes());
    (name, Some(Slice::from(value.as_slice())))
}

/// Returns `None` if the row is damaged, or of a later format.
fn read(key: &[u8], value: &[u8]) -> Option<RestoredMember> {
    let (account, rest) = keys::take_part(key)?;
    let (channel, rest) = keys::take_part(rest)?;
    let (connection_id, client_id) = rest.split_first_chunk()?;
    let client_id = ClientId::stored(std::str::from_utf8(client_id).ok()?);
    let rest = value.strip_prefix(&[VERSION])?;
    let (timestamp_ms, rest) = rest.split_first_chunk()?;
    let (epoch, data) = rest.split_first_chunk()?;
    let data = match std::str::from_utf8(data).ok()? {
        "" => None,
        text => Some(Arc::from(RawValue::from_string(text.to_owned()).ok()?)),
    };
    Some(RestoredMember {
        key: ChannelKey::new(AccountId::new(account), ChannelName::stored(channel)),
        member: MemberId { connection_id: ConnectionId::from_bytes(*connection_id), client_id },
        epoch: u64::from_be_bytes(*epoch),
        data,
        timestamp_ms: u64::from_be_bytes(*timestamp_ms),
    })
}
