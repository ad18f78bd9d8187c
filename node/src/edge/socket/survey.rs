//! Questions about all live connections of an account, and how the answers of the shards become one.
//!
//! An answer holds a page and no more, however many connections there are.

mod places;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashSet};

use tokio::sync::oneshot;

use super::connection::Open;
use crate::auth::PrincipalKind;
use crate::model::{AccountId, ChannelName, ClientId, ConnectionId};

pub use places::{ChannelOrder, ChannelPlace};

/// Distinct client ids that one shard keeps for a page of channels; beyond it the page is cut short.
const CLIENT_IDS_MAX: usize = 200_000;

/// One question, on its way over the connections of one shard.
pub struct Survey {
    pub(super) account: AccountId,
    pub(super) question: Question,
}

pub(super) enum Question {
    Connections { page: ConnectionsPage, reply: oneshot::Sender<ConnectionsPage> },
    Channels { page: ChannelsPage, reply: oneshot::Sender<ChannelsPage> },
    CloseClient { client_id: ClientId, closed: u64, reply: oneshot::Sender<u64> },
}

impl Survey {
    /// False when nobody waits for the answer any more.
    pub(super) fn is_awaited(&self) -> bool {
        let abandoned = match &self.question {
            Question::Connections { reply, .. } => reply.is_closed(),
            Question::Channels { reply, .. } => reply.is_closed(),
            // What was begun is done for all.
            Question::CloseClient { .. } => false,
        };
        !abandoned
    }

    /// Takes in one open connection; true when it is to be closed.
    pub(super) fn visit(&mut self, open: &Open) -> bool {
        let session = &open.session;
        if session.principal().account.id != self.account {
            return false;
        }
        match &mut self.question {
            Question::Connections { page, .. } => page.add(open),
            Question::Channels { page, .. } => page.add(session.channels(), session.client_id()),
            Question::CloseClient { client_id, closed, .. } => {
                let meant = session.client_id() == Some(client_id);
                *closed += u64::from(meant);
                return meant;
            }
        }
        false
    }

    /// Every connection was visited.
    pub(super) fn answer(self) {
        // Who asked may have gone meanwhile.
        match self.question {
            Question::Connections { page, reply } => drop(reply.send(page)),
            Question::Channels { page, reply } => drop(reply.send(page)),
            Question::CloseClient { closed, reply, .. } => drop(reply.send(closed)),
        }
    }
}

/// Where a connection stands among all: newest first, then by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConnectionPlace {
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

/// The first connections after a place.
#[derive(Debug, Clone)]
pub struct ConnectionsPage {
    limit: usize,
    after: Option<ConnectionPlace>,
    /// One more than the limit tells that there are more.
    rows: BTreeMap<ConnectionPlace, ConnectionRow>,
}

impl ConnectionsPage {
    pub fn new(limit: usize, after: Option<ConnectionPlace>) -> Self {
        Self { limit, after, rows: BTreeMap::new() }
    }

    fn add(&mut self, open: &Open) {
        let session = &open.session;
        let connection_id = session.connection_id();
        let place = ConnectionPlace { connected_ms: Reverse(open.opened_ms), connection_id };
        self.insert(place, || ConnectionRow {
            client_id: session.client_id().cloned(),
            channels: session.channels().cloned().collect(),
            transport: open.transport.as_str(),
            authenticated: session.principal().kind != PrincipalKind::Anonymous,
        });
    }

    fn insert(&mut self, place: ConnectionPlace, row: impl FnOnce() -> ConnectionRow) {
        let full = self.rows.len() > self.limit;
        let beyond = || self.rows.last_key_value().is_some_and(|(last, _)| place > *last);
        if self.after.is_some_and(|after| place <= after) || full && beyond() {
            return;
        }
        self.rows.insert(place, row());
        if self.rows.len() > self.limit + 1 {
            self.rows.pop_last();
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        for (place, row) in other.rows {
            self.insert(place, || row);
        }
    }

    /// The rows in order, and whether more follow.
    pub fn finish(self) -> (Vec<(ConnectionPlace, ConnectionRow)>, bool) {
        let more = self.rows.len() > self.limit;
        (self.rows.into_iter().take(self.limit).collect(), more)
    }
}

/// Who is attached to a channel.
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

    /// Distinct client ids, or connections when nobody says who they are.
    fn subscribers(&self) -> u64 {
        if self.clients.is_empty() { self.connections } else { self.clients.len() as u64 }
    }
}

/// The first channels after a place, with who is attached to them.
#[derive(Debug, Clone)]
pub struct ChannelsPage {
    limit: usize,
    client_ids_max: usize,
    order: ChannelOrder,
    after: Option<ChannelPlace>,
    /// Every channel here is counted from its first connection on: what is from `bound` on never comes in again.
    rows: BTreeMap<ChannelPlace, ChannelRow>,
    bound: Option<ChannelPlace>,
    client_ids: usize,
}

impl ChannelsPage {
    pub fn new(limit: usize, order: ChannelOrder, after: Option<ChannelPlace>) -> Self {
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

    /// Takes in one connection.
    fn add<'a>(&mut self, channels: impl Iterator<Item = &'a ChannelName>, client_id: Option<&ClientId>) {
        for channel in channels {
            let place = self.order.place(channel);
            let before = self.after.is_some_and(|after| place <= after);
            if before || self.bound.is_some_and(|bound| place >= bound) {
                continue;
            }
            let row = self.rows.entry(place).or_insert_with(|| ChannelRow::new(channel.clone()));
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

    /// Gives up the last channels until the rest is a page that may be kept.
    fn cut(&mut self) {
        while self.rows.len() > self.limit || self.client_ids > self.client_ids_max && self.rows.len() > 1 {
            if let Some((place, row)) = self.rows.pop_last() {
                self.client_ids -= row.clients.len();
                self.bound = Some(place);
            }
        }
    }

    pub(super) fn merge(&mut self, other: Self) {
        self.bound = match (self.bound.take(), other.bound) {
            (Some(own), Some(other)) => Some(own.min(other)),
            (own, other) => own.or(other),
        };
        for (place, row) in other.rows {
            let own = self.rows.entry(place).or_insert_with(|| ChannelRow::new(row.name));
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

    /// Name, connections and subscribers by name, and the place of the last of them if more follow.
    pub fn finish(self) -> (Vec<(ChannelName, u64, u64)>, Option<ChannelPlace>) {
        let last = self.rows.last_key_value().map(|(place, _)| *place).filter(|_| self.bound.is_some());
        let count = |row: ChannelRow| {
            let subscribers = row.subscribers();
            (row.name, row.connections, subscribers)
        };
        let mut rows: Vec<_> = self.rows.into_values().map(count).collect();
        rows.sort_unstable();
        (rows, last)
    }
}
