//! Which members each connection has, over all channels.

use std::collections::BTreeSet;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use crate::model::{ChannelKey, ClientId, ConnectionId};

/// Changed only under the lock of the channel in question, so that it never contradicts the channels.
#[derive(Debug, Default)]
pub(super) struct Roster {
    connections: DashMap<ConnectionId, Present>,
}

#[derive(Debug, Default)]
struct Present {
    /// Rises each time another socket takes the connection up.
    epoch: u64,
    members: BTreeSet<(ChannelKey, ClientId)>,
}

impl Roster {
    pub(super) fn count(&self, connection_id: ConnectionId) -> usize {
        self.connections.get(&connection_id).map_or(0, |present| present.members.len())
    }

    /// None when the connection has no members.
    pub(super) fn epoch(&self, connection_id: ConnectionId) -> Option<u64> {
        self.connections.get(&connection_id).map(|present| present.epoch)
    }

    /// Never lowers it.
    pub(super) fn raise_epoch(&self, connection_id: ConnectionId, epoch: u64) {
        if let Some(mut present) = self.connections.get_mut(&connection_id) {
            present.epoch = present.epoch.max(epoch);
        }
    }

    pub(super) fn add(&self, connection_id: ConnectionId, epoch: u64, key: ChannelKey, client_id: ClientId) {
        let mut present = self.connections.entry(connection_id).or_default();
        present.epoch = present.epoch.max(epoch);
        present.members.insert((key, client_id));
    }

    pub(super) fn remove(&self, connection_id: ConnectionId, key: &ChannelKey, client_id: &ClientId) {
        if let Entry::Occupied(mut present) = self.connections.entry(connection_id) {
            present.get_mut().members.remove(&(key.clone(), client_id.clone()));
            if present.get().members.is_empty() {
                present.remove();
            }
        }
    }

    pub(super) fn members(&self, connection_id: ConnectionId) -> Vec<(ChannelKey, ClientId)> {
        let present = self.connections.get(&connection_id);
        present.map_or_else(Vec::new, |present| present.members.iter().cloned().collect())
    }

    pub(super) fn any(&self, connection_id: ConnectionId, wanted: impl Fn(&ChannelKey) -> bool) -> bool {
        let present = self.connections.get(&connection_id);
        present.is_some_and(|present| present.members.iter().any(|(key, _)| wanted(key)))
    }
}
