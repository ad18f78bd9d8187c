//! Who is present: one row for each member, written with the event that makes it so, and gone with its leave.

use std::collections::HashMap;
use std::sync::Arc;

use fjall::{OwnedWriteBatch, Slice};
use serde_json::value::RawValue;

use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, FormerMember, MemberId, PresenceAction,
    PresenceEvent,
};

use super::keys;
use super::tables::Table;

/// Of the rows' form.
const VERSION: u8 = 1;

/// What an event makes of its member: the row's key, and its value unless the member leaves.
pub(super) type MemberRow = (Slice, Option<Slice>);

#[derive(Clone)]
pub(super) struct Members(pub(super) Table);

impl Members {
    /// Of several rows of one member the last counts: what a batch writes twice has no order.
    pub(super) fn add(&self, batch: &mut OwnedWriteBatch, rows: impl Iterator<Item = MemberRow>) {
        let last: HashMap<Slice, Option<Slice>> = rows.collect();
        for (key, value) in last {
            match value {
                Some(value) => batch.insert(self.0.keyspace(), key, value),
                None => batch.remove(self.0.keyspace(), key),
            }
        }
    }

    /// Every row, in no order.
    pub(super) fn all(&self) -> fjall::Result<Vec<FormerMember>> {
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

/// None: the row is damaged, or of a later form.
fn read(key: &[u8], value: &[u8]) -> Option<FormerMember> {
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
    Some(FormerMember {
        key: ChannelKey::new(AccountId::new(account), ChannelName::stored(channel)),
        member: MemberId { connection_id: ConnectionId::from_bytes(*connection_id), client_id },
        epoch: u64::from_be_bytes(*epoch),
        data,
        timestamp_ms: u64::from_be_bytes(*timestamp_ms),
    })
}
