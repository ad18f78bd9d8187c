//! Which members each connection has, over all channels, and which run of a node it is of.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::Mutex;

use crate::model::{AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, Digest, Owner};

/// What all members of a run's connections come to in each part of the channels: equal where the members are.
pub type Digests = [u64; PARTS];

/// Into how many parts channels are divided to be compared between nodes, each a bit of a word.
pub const PARTS: usize = 64;

/// A number of the channel, the same on every node. Its remainder says in which of the parts it is.
pub fn channel_number(key: &ChannelKey) -> u64 {
    Digest::default().of(key.account().as_str().as_bytes()).of(key.channel().as_bytes()).number()
}

/// Whether the channel is in one of these parts.
pub fn is_in(key: &ChannelKey, parts: u64) -> bool {
    parts & (1 << part_of(key)) != 0
}

fn part_of(key: &ChannelKey) -> usize {
    (channel_number(key) % PARTS as u64) as usize
}

/// The members are changed only under the lock of the channel in question, so that it never contradicts the channels.
#[derive(Debug)]
pub(super) struct Roster {
    /// Of this run.
    own: u64,
    connections: DashMap<ConnectionId, Present>,
    /// By run; only of those that have members.
    runs: Mutex<HashMap<u64, Sum>>,
    /// How many members of this run the channels of each account have; only those that have some.
    crowds: DashMap<AccountId, HashMap<ChannelName, usize>>,
}

#[derive(Debug)]
struct Present {
    owner: Owner,
    /// The number of the last presence event of this node when it became the owner's.
    since: u64,
    /// Each with a number of all that it is, but for whose the connection is.
    members: BTreeMap<(ChannelKey, ClientId), u64>,
}

#[derive(Debug)]
struct Sum {
    members: usize,
    digests: Digests,
}

impl Roster {
    pub(super) fn new(own: u64) -> Self {
        Self { own, connections: DashMap::new(), runs: Mutex::default(), crowds: DashMap::new() }
    }

    pub(super) fn count(&self, connection_id: ConnectionId) -> usize {
        self.connections.get(&connection_id).map_or(0, |present| present.members.len())
    }

    /// None when the connection has no members.
    pub(super) fn owner(&self, connection_id: ConnectionId) -> Option<Owner> {
        self.connections.get(&connection_id).map(|present| present.owner)
    }

    /// With the number of the last presence event by then.
    pub(super) fn owned_since(&self, connection_id: ConnectionId) -> Option<(Owner, u64)> {
        self.connections.get(&connection_id).map(|present| (present.owner, present.since))
    }

    /// The connection is another owner's from now on, unless the one it has is the greater one.
    pub(super) fn take_over(&self, connection_id: ConnectionId, owner: Owner, since: u64) {
        if let Some(mut present) = self.connections.get_mut(&connection_id) {
            self.raise(&mut present, owner, since);
        }
    }

    /// The member is there, and like this.
    pub(super) fn put(
        &self,
        connection_id: ConnectionId,
        owner: Owner,
        since: u64,
        (key, client_id): (ChannelKey, ClientId),
        digest: u64,
    ) {
        let none = || Present { owner, since, members: BTreeMap::new() };
        let mut present = self.connections.entry(connection_id).or_insert_with(none);
        self.raise(&mut present, owner, since);
        let owner = present.owner;
        if let Some(former) = present.members.insert((key.clone(), client_id), digest) {
            self.subtract(owner, &key, former);
        }
        self.add(owner, &key, digest);
    }

    pub(super) fn remove(&self, connection_id: ConnectionId, key: &ChannelKey, client_id: &ClientId) {
        let Entry::Occupied(mut present) = self.connections.entry(connection_id) else { return };
        let owner = present.get().owner;
        if let Some(digest) = present.get_mut().members.remove(&(key.clone(), client_id.clone())) {
            self.subtract(owner, key, digest);
        }
        if present.get().members.is_empty() {
            present.remove();
        }
    }

    pub(super) fn members(&self, connection_id: ConnectionId) -> Vec<(ChannelKey, ClientId)> {
        let present = self.connections.get(&connection_id);
        present.map_or_else(Vec::new, |present| present.members.keys().cloned().collect())
    }

    pub(super) fn any(&self, connection_id: ConnectionId, wanted: impl Fn(&ChannelKey) -> bool) -> bool {
        let present = self.connections.get(&connection_id);
        present.is_some_and(|present| present.members.keys().any(|(key, _)| wanted(key)))
    }

    /// The account's channels with members of this run, and how many.
    pub(super) fn crowded(&self, account: &AccountId) -> Vec<(ChannelName, usize)> {
        let channels = self.crowds.get(account);
        channels.map_or_else(Vec::new, |channels| {
            channels.iter().map(|(name, members)| (name.clone(), *members)).collect()
        })
    }

    /// Those of whose connections there are members.
    pub(super) fn runs(&self) -> Vec<u64> {
        self.runs.lock().keys().copied().collect()
    }

    pub(super) fn digests(&self, run: u64) -> Digests {
        self.runs.lock().get(&run).map_or([0; PARTS], |sum| sum.digests)
    }

    /// Connections with members, of all runs of which `wanted` holds. Looks at every connection.
    pub(super) fn of_runs(&self, wanted: impl Fn(u64) -> bool) -> Vec<(ConnectionId, Owner)> {
        let wanted = self.connections.iter().filter(|present| wanted(present.owner.incarnation));
        wanted.map(|present| (*present.key(), present.owner)).collect()
    }

    /// The channels of their members in these parts. Looks at every member.
    pub(super) fn channels(&self, wanted: impl Fn(u64) -> bool, parts: u64) -> BTreeSet<ChannelKey> {
        let mut channels = BTreeSet::new();
        for present in self.connections.iter().filter(|present| wanted(present.owner.incarnation)) {
            let keys = present.members.keys().map(|(key, _)| key).filter(|key| is_in(key, parts));
            channels.extend(keys.cloned());
        }
        channels
    }

    fn raise(&self, present: &mut Present, owner: Owner, since: u64) {
        if present.owner >= owner {
            return;
        }
        let former = std::mem::replace(&mut present.owner, owner);
        present.since = since;
        for ((key, _), digest) in &present.members {
            self.subtract(former, key, *digest);
            self.add(owner, key, *digest);
        }
    }

    fn add(&self, owner: Owner, key: &ChannelKey, digest: u64) {
        let mut runs = self.runs.lock();
        let run = owner.incarnation;
        let sum = runs.entry(run).or_insert(Sum { members: 0, digests: [0; PARTS] });
        sum.members += 1;
        let part = &mut sum.digests[part_of(key)];
        *part = part.wrapping_add(share(digest, owner));
        drop(runs);
        if run == self.own {
            let mut account = self.crowds.entry(key.account().clone()).or_default();
            *account.entry(key.name().clone()).or_default() += 1;
        }
    }

    fn subtract(&self, owner: Owner, key: &ChannelKey, digest: u64) {
        let mut runs = self.runs.lock();
        let run = owner.incarnation;
        if let Some(sum) = runs.get_mut(&run) {
            sum.members -= 1;
            let part = &mut sum.digests[part_of(key)];
            *part = part.wrapping_sub(share(digest, owner));
            if sum.members == 0 {
                runs.remove(&run);
            }
        }
        drop(runs);
        if run != self.own {
            return;
        }
        if let Some(mut account) = self.crowds.get_mut(key.account())
            && let Some(members) = account.get_mut(key.name())
        {
            *members -= 1;
            if *members == 0 {
                account.remove(key.name());
            }
        }
        self.crowds.remove_if(key.account(), |_, account| account.is_empty());
    }
}

/// What a member adds to the sum of a run. Nodes that do not agree in which epoch a connection is differ in it.
fn share(digest: u64, owner: Owner) -> u64 {
    Digest::default().of(&digest.to_be_bytes()).of(&owner.epoch.to_be_bytes()).number()
}
