//! Roster: the presence members of every connection, over all channels, with the connection's owner.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::Mutex;

use crate::model::{AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, Digest, SessionOwner};

/// Digests of the members of one incarnation's connections, one for each part of the channels. Equal where the members
/// are equal.
pub type PresenceDigests = [u64; PARTS];

/// Number of parts into which the channels are divided for anti-entropy; each is a bit of a word.
pub const PARTS: usize = 64;

/// A hash of the channel, the same on every node. Its remainder is the channel's part.
pub fn channel_number(key: &ChannelKey) -> u64 {
    Digest::default().of(key.account().as_str().as_bytes()).of(key.channel().as_bytes()).number()
}

/// Whether the channel is in one of these parts, given as a bit set.
pub fn is_in(key: &ChannelKey, parts: u64) -> bool {
    parts & (1 << part_of(key)) != 0
}

fn part_of(key: &ChannelKey) -> usize {
    (channel_number(key) % PARTS as u64) as usize
}

/// The members of all connections. Changed only under the lock of the channel, so that it never contradicts the
/// channels.
#[derive(Debug)]
pub(super) struct Roster {
    /// Incarnation of this node.
    own: u64,
    connections: DashMap<ConnectionId, ConnectionMembers>,
    /// Digests by incarnation; only of those that have members.
    incarnations: Mutex<HashMap<u64, IncarnationDigests>>,
    /// Number of members of this incarnation by account and channel; only of channels that have some.
    member_counts: DashMap<AccountId, HashMap<ChannelName, usize>>,
}

#[derive(Debug)]
struct ConnectionMembers {
    owner: SessionOwner,
    /// Number of this node's last presence event when the owner took the connection over.
    since: u64,
    /// Members, each with a digest of its whole state except the owner.
    members: BTreeMap<(ChannelKey, ClientId), u64>,
}

#[derive(Debug)]
struct IncarnationDigests {
    members: usize,
    digests: PresenceDigests,
}

impl Roster {
    pub(super) fn new(own: u64) -> Self {
        Self {
            own,
            connections: DashMap::new(),
            incarnations: Mutex::default(),
            member_counts: DashMap::new(),
        }
    }

    pub(super) fn count(&self, connection_id: ConnectionId) -> usize {
        self.connections.get(&connection_id).map_or(0, |present| present.members.len())
    }

    /// The owner of a connection; none when it has no members.
    pub(super) fn owner(&self, connection_id: ConnectionId) -> Option<SessionOwner> {
        self.connections.get(&connection_id).map(|present| present.owner)
    }

    /// The owner of a connection, and the number of the last presence event when it became the owner.
    pub(super) fn owned_since(&self, connection_id: ConnectionId) -> Option<(SessionOwner, u64)> {
        self.connections.get(&connection_id).map(|present| (present.owner, present.since))
    }

    /// Makes `owner` the connection's owner, unless the present one is greater.
    pub(super) fn take_over(&self, connection_id: ConnectionId, owner: SessionOwner, since: u64) {
        if let Some(mut present) = self.connections.get_mut(&connection_id) {
            self.raise(&mut present, owner, since);
        }
    }

    /// Adds or replaces a member.
    pub(super) fn put(
        &self,
        connection_id: ConnectionId,
        owner: SessionOwner,
        since: u64,
        (key, client_id): (ChannelKey, ClientId),
        digest: u64,
    ) {
        let none = || ConnectionMembers { owner, since, members: BTreeMap::new() };
        let mut present = self.connections.entry(connection_id).or_insert_with(none);
        self.raise(&mut present, owner, since);
        let owner = present.owner;
        if let Some(previous) = present.members.insert((key.clone(), client_id), digest) {
            self.subtract(owner, &key, previous);
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

    pub(super) fn any(&self, connection_id: ConnectionId, is_match: impl Fn(&ChannelKey) -> bool) -> bool {
        let present = self.connections.get(&connection_id);
        present.is_some_and(|present| present.members.keys().any(|(key, _)| is_match(key)))
    }

    /// The account's channels with members of this incarnation, and their number.
    pub(super) fn channel_member_counts(&self, account: &AccountId) -> Vec<(ChannelName, usize)> {
        let channels = self.member_counts.get(account);
        channels.map_or_else(Vec::new, |channels| {
            channels.iter().map(|(name, members)| (name.clone(), *members)).collect()
        })
    }

    /// Incarnations whose connections have members.
    pub(super) fn incarnations(&self) -> Vec<u64> {
        self.incarnations.lock().keys().copied().collect()
    }

    pub(super) fn digests(&self, incarnation: u64) -> PresenceDigests {
        self.incarnations.lock().get(&incarnation).map_or([0; PARTS], |sum| sum.digests)
    }

    /// Connections with members, of all incarnations for which `is_match` holds. Visits every connection.
    pub(super) fn connections_of(&self, is_match: impl Fn(u64) -> bool) -> Vec<(ConnectionId, SessionOwner)> {
        let matching = self.connections.iter().filter(|present| is_match(present.owner.incarnation));
        matching.map(|present| (*present.key(), present.owner)).collect()
    }

    /// The channels of such members in these parts. Visits every member.
    pub(super) fn channels(&self, is_match: impl Fn(u64) -> bool, parts: u64) -> BTreeSet<ChannelKey> {
        let mut channels = BTreeSet::new();
        for present in self.connections.iter().filter(|present| is_match(present.owner.incarnation)) {
            let keys = present.members.keys().map(|(key, _)| key).filter(|key| is_in(key, parts));
            channels.extend(keys.cloned());
        }
        channels
    }

    fn raise(&self, present: &mut ConnectionMembers, owner: SessionOwner, since: u64) {
        if present.owner >= owner {
            return;
        }
        let previous = std::mem::replace(&mut present.owner, owner);
        present.since = since;
        for ((key, _), digest) in &present.members {
            self.subtract(previous, key, *digest);
            self.add(owner, key, *digest);
        }
    }

    fn add(&self, owner: SessionOwner, key: &ChannelKey, digest: u64) {
        let mut incarnations = self.incarnations.lock();
        let incarnation = owner.incarnation;
        let sum =
            incarnations.entry(incarnation).or_insert(IncarnationDigests { members: 0, digests: [0; PARTS] });
        sum.members += 1;
        let part = &mut sum.digests[part_of(key)];
        *part = part.wrapping_add(contribution(digest, owner));
        drop(incarnations);
        if incarnation == self.own {
            let mut account = self.member_counts.entry(key.account().clone()).or_default();
            *account.entry(key.name().clone()).or_default() += 1;
        }
    }

    fn subtract(&self, owner: SessionOwner, key: &ChannelKey, digest: u64) {
        let mut incarnations = self.incarnations.lock();
        let incarnation = owner.incarnation;
        if let Some(sum) = incarnations.get_mut(&incarnation) {
            sum.members -= 1;
            let part = &mut sum.digests[part_of(key)];
            *part = part.wrapping_sub(contribution(digest, owner));
            if sum.members == 0 {
                incarnations.remove(&incarnation);
            }
        }
        drop(incarnations);
        if incarnation != self.own {
            return;
        }
        if let Some(mut account) = self.member_counts.get_mut(key.account())
            && let Some(members) = account.get_mut(key.name())
        {
            *members -= 1;
            if *members == 0 {
                account.remove(key.name());
            }
        }
        self.member_counts.remove_if(key.account(), |_, account| account.is_empty());
    }
}

/// The contribution of a member to the digest of an incarnation. Includes the epoch, so that nodes which disagree about
/// it have different digests.
fn contribution(digest: u64, owner: SessionOwner) -> u64 {
    Digest::default().of(&digest.to_be_bytes()).of(&owner.epoch.to_be_bytes()).number()
}
