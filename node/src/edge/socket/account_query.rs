//! Queries over all live connections of an account, and the merge of the shards' answers.
//!
//! An answer holds one page, however many connections there are.

mod channel_order;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use tokio::sync::oneshot;

use super::connection::OpenSocket;
use crate::auth::PrincipalKind;
use crate::model::{AccountId, ChannelName, ClientId, ConnectionId};

pub use channel_order::{ChannelOrder, ChannelSortKey};

/// Distinct client ids that one shard keeps for a page of channels; beyond it the page is cut short.
const CLIENT_IDS_MAX: usize = 200_000;

/// One query on its way over the connections of one shard.
pub struct AccountQuery {
    pub(super) account: AccountId,
    pub(super) question: AccountQuestion,
}

pub(super) enum AccountQuestion {
    Connections { page: ConnectionsPage, reply: oneshot::Sender<ConnectionsPage> },
    Channels { page: ChannelsPage, reply: oneshot::Sender<ChannelsPage> },
    CloseClient { client_id: ClientId, closed: u64, reply: oneshot::Sender<u64> },
}

impl AccountQuery {
    /// False when the caller has gone.
    pub(super) fn is_awaited(&self) -> bool {
        let abandoned = match &self.question {
            AccountQuestion::Connections { reply, .. } => reply.is_closed(),
            AccountQuestion::Channels { reply, .. } => reply.is_closed(),
            // A close that has begun is completed in any case.
            AccountQuestion::CloseClient { .. } => false,
        };
        !abandoned
    }

    /// Visits one open connection; true when it must be closed.
    pub(super) fn visit(&mut self, open: &OpenSocket) -> bool {
        let session = &open.session;
        if session.principal().account.id != self.account {
            return false;
        }
        match &mut self.question {
            AccountQuestion::Connections { page, .. } => page.add(open),
            AccountQuestion::Channels { page, .. } => page.add(session.channels(), session.client_id()),
            AccountQuestion::CloseClient { client_id, closed, .. } => {
                let meant = session.client_id() == Some(client_id);
                *closed += u64::from(meant);
                return meant;
            }
        }
        false
    }

    /// Sends the answer after all connections were visited.
    pub(super) fn answer(self) {
        // The caller may have gone meanwhile.
        match self.question {
            AccountQuestion::Connections { page, reply } => drop(reply.send(page)),
            AccountQuestion::Channels { page, reply } => drop(reply.send(page)),
            AccountQuestion::CloseClient { closed, reply, .. } => drop(reply.send(closed)),
        }
    }
}

/// Order of connections: newest first, then by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionSortKey {
    pub connected_ms: Reverse<u64>,
    pub connection_id: ConnectionId,
}

/// One live connection.
#[derive(Debug, Clone)]
pub struct ConnectionRow {
    pub client_id: Option<ClientId>,
    /// Sorted by name.
    pub channels: Vec<ChannelName>,
    pub transport: &'static str,
    pub authenticated: bool,
}

/// A page of connections after a cursor.
#[derive(Debug, Clone)]
pub struct ConnectionsPage {
    limit: usize,
    after: Option<ConnectionSortKey>,
    /// Rows of the page; one more than the limit shows that there are more.
    rows: BTreeMap<ConnectionSortKey, ConnectionRow>,
}

impl ConnectionsPage {
    pub fn new(limit: usize, after: Option<ConnectionSortKey>) -> Self {
        Self { limit, after, rows: BTreeMap::new() }
    }

    fn add(&mut self, open: &OpenSocket) {
        let session = &open.session;
        let connection_id = session.connection_id();
        let sort_key = ConnectionSortKey { connected_ms: Reverse(open.opened_ms), connection_id };
        self.insert(sort_key, || ConnectionRow {
            client_id: session.client_id().cloned(),
            channels: session.channels().cloned().collect(),
            transport: open.transport.as_str(),
            authenticated: session.principal().kind != PrincipalKind::Anonymous,
        });
    }

    fn insert(&mut self, sort_key: ConnectionSortKey, row: impl FnOnce() -> ConnectionRow) {
        let full = self.rows.len() > self.limit;
        let beyond = || self.rows.last_key_value().is_some_and(|(last, _)| sort_key > *last);
        if self.after.is_some_and(|after| sort_key <= after) || full && beyond() {
            return;
        }
        self.rows.insert(sort_key, row());
        if self.rows.len() > self.limit + 1 {
            self.rows.pop_last();
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        for (sort_key, row) in other.rows {
            self.insert(sort_key, || row);
        }
    }

    /// The rows in order, and whether more follow.
    pub fn finish(self) -> (Vec<(ConnectionSortKey, ConnectionRow)>, bool) {
        let more = self.rows.len() > self.limit;
        (self.rows.into_iter().take(self.limit).collect(), more)
    }
}

/// Connections and clients of one channel.
#[derive(Debug, Clone, PartialEq, Eq)]
struct ChannelRow {
    name: ChannelName,
    connections: u64,
    clients: HashSet<ClientId>,
}

impl ChannelRow {
    fn new(name: ChannelName) -> Self {
        Self { name, connections: 0, clients: HashSet::new() }
    }

    /// Number of distinct client ids, or of connections if none has a client id.
    fn subscribers(&self) -> u64 {
        if self.clients.is_empty() { self.connections } else { self.clients.len() as u64 }
    }
}

/// A page of channels after a cursor, with their subscribers.
#[derive(Debug, Clone)]
pub struct ChannelsPage {
    limit: usize,
    client_ids_max: usize,
    order: ChannelOrder,
    after: Option<ChannelSortKey>,
    /// Channels, each counted from its first connection on. Channels from `bound` on were cut and are never added again.
    rows: BTreeMap<ChannelSortKey, ChannelRow>,
    bound: Option<ChannelSortKey>,
    client_ids: usize,
}

impl ChannelsPage {
    pub fn new(limit: usize, order: ChannelOrder, after: Option<ChannelSortKey>) -> Self {
        Self {
            limit,
            client_ids_max: CLIENT_IDS_MAX,
            order,
            after,
            rows: BTreeMap::new(),
            bound: None,
            client_ids: 0,
        }
    }

    /// Adds one connection.
    fn add<'a>(&mut self, channels: impl Iterator<Item = &'a ChannelName>, client_id: Option<&ClientId>) {
        for channel in channels {
            let sort_key = self.order.sort_key(channel);
            let before = self.after.is_some_and(|after| sort_key <= after);
            if before || self.bound.is_some_and(|bound| sort_key >= bound) {
                continue;
            }
            let row = self.rows.entry(sort_key).or_insert_with(|| ChannelRow::new(channel.clone()));
            row.connections += 1;
            if let Some(client_id) = client_id
                && !row.clients.contains(client_id)
            {
                row.clients.insert(client_id.clone());
                self.client_ids += 1;
            }
            self.cut();
        }
    }

    /// Drops the last channels until the page fits its limits.
    fn cut(&mut self) {
        while self.rows.len() > self.limit || self.client_ids > self.client_ids_max && self.rows.len() > 1 {
            if let Some((sort_key, row)) = self.rows.pop_last() {
                self.client_ids -= row.clients.len();
                self.bound = Some(sort_key);
            }
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.bound = match (self.bound.take(), other.bound) {
            (Some(own), Some(other)) => Some(own.min(other)),
            (own, other) => own.or(other),
        };
        for (sort_key, row) in other.rows {
            let own = self.rows.entry(sort_key).or_insert_with(|| ChannelRow::new(row.name));
            own.connections += row.connections;
            self.client_ids -= own.clients.len();
            own.clients.extend(row.clients);
            self.client_ids += own.clients.len();
        }
        if let Some(bound) = &self.bound {
            let beyond = self.rows.split_off(bound);
            self.client_ids -= beyond.values().map(|row| row.clients.len()).sum::<usize>();
        }
        self.cut();
    }

    /// Name, connections and subscribers of each channel, by name, and the key of the last channel if more follow.
    pub fn finish(self) -> (Vec<(ChannelName, u64, u64)>, Option<ChannelSortKey>) {
        let last = self.rows.last_key_value().map(|(sort_key, _)| *sort_key).filter(|_| self.bound.is_some());
        let count = |row: ChannelRow| {
            let subscribers = row.subscribers();
            (row.name, row.connections, subscribers)
        };
        let mut rows: Vec<_> = self.rows.into_values().map(count).collect();
        rows.sort_unstable();
        (rows, last)
    }
}
