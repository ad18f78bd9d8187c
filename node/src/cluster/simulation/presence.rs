//! Presence in a simulated cluster: the requests of clients, the leaves that nodes issue, and the members that there must be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use super::watch::{SimMembers, name_of, text_of};
use super::{CHANNELS, CLIENTS, SimWorld};
use crate::model::{
    ClientId, ConnectionId, MemberId, PresenceAction, SessionLocation, SessionOwnership, SessionTakeover,
};
use crate::publish::{DelayedLeave, PresenceRequest};

const NAMES: [&str; 3] = ["ann", "bob", "cid"];
/// Interval of the check for orphaned members, as in production.
const ORPHANED_CHECK_INTERVAL: Duration = Duration::from_millis(250);
const COMPARE_EVERY: Duration = Duration::from_secs(2);
/// Longest time until a node notices that a socket is gone.
const NOTICED_MS: u64 = 10_000;
/// Resume window, longer than the simulation.
const WINDOW: Duration = Duration::from_secs(600);

/// Members that a client intends to be present: by channel and name, with data.
type IntendedMembers = BTreeMap<(usize, Box<str>), String>;

/// The session of a client.
#[derive(Default)]
pub(super) struct SimSession {
    /// Latest ownership of the session; none before the first connection, and after the client has closed it.
    ownership: Option<SessionOwnership>,
    intended: IntendedMembers,
}

/// A lost socket that its node notices later.
pub(super) struct HalfOpenSocket {
    node: usize,
    delayed_leave: DelayedLeave,
    noticed: Duration,
}

impl SimSession {
    fn member(&self, name: &str) -> Option<MemberId> {
        let connection_id = self.ownership?.connection_id;
        Some(MemberId { connection_id, client_id: ClientId::of(name) })
    }
}

impl SimWorld {
    fn node_of(&self, client: usize) -> Option<usize> {
        let at = self.clients[client].at.as_ref()?;
        self.nodes[at.node].is_alive.then_some(at.node)
    }

    /// A client enters, updates or leaves with one of its members.
    pub(super) fn act(&mut self, client: usize) {
        if self.node_of(client).is_none() {
            return;
        }
        let membership = (self.random.usize(..CHANNELS), Box::from(NAMES[self.random.usize(..NAMES.len())]));
        let (action, data) = (self.random.u8(..8), self.random.u32(..1_000).to_string());
        let wants = &mut self.people[client].intended;
        let (action, data) = match action {
            0..3 => {
                wants.remove(&membership);
                (PresenceAction::Leave, None)
            }
            3..6 => {
                wants.insert(membership.clone(), data.clone());
                (PresenceAction::Enter, Some(data))
            }
            _ => {
                wants.insert(membership.clone(), data.clone());
                (PresenceAction::Update, Some(data))
            }
        };
        self.present(client, &membership, action, data);
    }

    fn present(
        &self,
        client: usize,
        (channel, name): &(usize, Box<str>),
        action: PresenceAction,
        data: Option<String>,
    ) {
        let (Some(node), person) = (self.node_of(client), &self.people[client]) else { return };
        let (Some(member), Some(ownership)) = (person.member(name), person.ownership) else { return };
        let request = PresenceRequest {
            key: self.keys[*channel].clone(),
            account: Arc::clone(&self.account),
            member,
            epoch: ownership.epoch,
            action,
            data: data.map(|data| RawValue::from_string(data).expect("a number is JSON")),
        };
        let done = |result: Result<(), _>| result.expect("nobody is refused");
        self.nodes[node].publisher.present(request, Box::new(done));
    }

    /// Connects the client to this node and lets its members enter again. After a takeover the node keeps the members that it knows: if it
    /// has not heard of a leave, the client has not left.
    pub(super) fn arrive(&mut self, client: usize, node: usize) {
        let (hub, routing) = (Arc::clone(&self.nodes[node].hub), Arc::clone(&self.nodes[node].routing));
        self.sockets += 1;
        let (slot, incarnation) = (client as u32, hub.incarnation());
        let location = SessionLocation { incarnation, shard: 0, slot, generation: self.sockets };
        let is_known = |other: u64| {
            other == incarnation
                || routing.incarnation_status(other, WINDOW).is_some()
                || self.is_earlier_incarnation(node, other)
        };
        let previous =
            self.people[client].ownership.filter(|ownership| is_known(ownership.location.incarnation));
        let previous = previous.filter(|_| self.is_calm || self.random.u8(..4) > 0);
        let ownership = match previous {
            Some(SessionOwnership { connection_id, epoch, .. }) => {
                SessionOwnership { connection_id, epoch: epoch + 1 + self.random.u64(..3), location }
            }
            None => {
                let connection_id = ConnectionId::from_bytes(self.random.u128(..).to_be_bytes());
                SessionOwnership { connection_id, epoch: 0, location }
            }
        };
        self.people[client].ownership = Some(ownership);
        if previous.is_none() {
            let person = &self.people[client];
            let came =
                person.intended.keys().filter_map(|(of, name)| Some((*of, name_of(&person.member(name)?))));
            self.came.extend(came);
        }
        if let Some(previous) = previous {
            self.moves += 1;
            self.nodes[node]
                .publisher
                .take_over_session(&SessionTakeover { ownership, previous: previous.location });
            for (channel, key) in self.keys.iter().enumerate() {
                let members = hub.members(key);
                for (id, member) in
                    members.iter().filter(|(id, _)| id.connection_id == ownership.connection_id)
                {
                    let membership = (channel, Box::from(id.client_id.as_str()));
                    self.people[client].intended.entry(membership).or_insert_with(|| {
                        assert!(!self.is_healed, "seed {}: {id:?} has left and is there again", self.seed);
                        text_of(&member.data)
                    });
                }
            }
        }
        for (membership, data) in self.people[client].intended.clone() {
            self.present(client, &membership, PresenceAction::Enter, Some(data));
        }
    }

    /// Ends the client's socket on a live node: closed or lost, and noticed at once or later.
    pub(super) fn depart(&mut self, client: usize, node: usize) {
        let person = &mut self.people[client];
        let Some(ownership) = person.ownership else { return };
        let account = Arc::clone(&self.account);
        let delayed_leave = DelayedLeave {
            connection_id: ownership.connection_id,
            owner: ownership.owner(),
            account,
            keeps: None,
        };
        let (publisher, now) = (&self.nodes[node].publisher, self.began + self.now);
        match self.random.u8(..4) {
            0 => {
                person.ownership = None;
                publisher.schedule_leave(delayed_leave, now);
            }
            1 => {
                let noticed = self.now + Duration::from_millis(self.random.u64(..NOTICED_MS));
                self.half_open.push(HalfOpenSocket { node, delayed_leave, noticed });
            }
            _ => publisher.schedule_leave(delayed_leave, now + self.presence_timeout),
        }
    }

    /// Makes nodes notice all lost sockets.
    pub(super) fn notice_all(&mut self) {
        self.half_open.iter_mut().for_each(|socket| socket.noticed = self.now);
    }

    /// Periodic work of nodes on members.
    pub(super) async fn look_after_members(&mut self) {
        let now = self.began + self.now;
        for socket in self.half_open.extract_if(.., |socket| socket.noticed <= self.now) {
            let node = &self.nodes[socket.node];
            if node.is_alive {
                node.publisher.schedule_leave(socket.delayed_leave, now + self.presence_timeout);
            }
        }
        let account = Arc::clone(&self.account);
        for index in self.alive() {
            let node = &mut self.nodes[index];
            while node.publisher.process_due_leave(now).await.is_ok() {}
            if node.due[1] <= self.now {
                node.due[1] += ORPHANED_CHECK_INTERVAL;
                node.publisher.remove_orphaned_members(&|_| Arc::clone(&account), now).await;
            }
            if node.due[2] <= self.now {
                node.due[2] += COMPARE_EVERY;
                node.routing.compare_members();
            }
        }
    }

    /// Ids of the present connections.
    fn connections(&self) -> BTreeSet<ConnectionId> {
        let here = (0..CLIENTS).filter(|client| self.node_of(*client).is_some());
        here.filter_map(|client| self.people[client].ownership)
            .map(|ownership| ownership.connection_id)
            .collect()
    }

    /// Members that must be present on a channel.
    pub(super) fn present_on(&self, channel: usize) -> SimMembers {
        let here = (0..CLIENTS).filter(|client| self.node_of(*client).is_some());
        let wants = here.flat_map(|client| {
            let person = &self.people[client];
            let of_channel = person.intended.iter().filter(move |((of, _), _)| *of == channel);
            of_channel.filter_map(|((_, name), data)| Some((name_of(&person.member(name)?), data.clone())))
        });
        wants.collect()
    }

    /// Members that a node lists on a channel, limited to matching connections.
    fn listed(&self, node: usize, channel: usize, is_match: impl Fn(ConnectionId) -> bool) -> SimMembers {
        let members = self.nodes[node].hub.members(&self.keys[channel]);
        let members = members.into_iter().filter(|(id, _)| is_match(id.connection_id));
        members.map(|(id, member)| (name_of(&id), text_of(&member.data))).collect()
    }

    /// Asserts that every node lists every present member with its data and owner.
    pub(super) fn check_healed(&self) {
        let (here, alive, at) = (self.connections(), self.alive(), self.at());
        for node in alive.iter().copied() {
            for channel in 0..CHANNELS {
                let listed = self.listed(node, channel, |connection| here.contains(&connection));
                assert_eq!(listed, self.present_on(channel), "{at}, node {node}, channel {channel}");
            }
            for client in 0..CLIENTS {
                let Some(ownership) =
                    self.people[client].ownership.filter(|_| self.node_of(client).is_some())
                else {
                    continue;
                };
                if let Some(owner) = self.nodes[node].hub.presence_owner(ownership.connection_id) {
                    assert_eq!(owner, ownership.owner(), "{at}, client {client} as node {node} has it");
                }
            }
        }
    }

    /// Asserts that no absent member is listed anywhere, nor seen by a client.
    pub(super) fn check_no_other_members(&self) {
        let at = self.at();
        for node in self.alive() {
            for channel in 0..CHANNELS {
                let listed = self.listed(node, channel, |_| true);
                assert_eq!(listed, self.present_on(channel), "{at}, node {node}, channel {channel}");
            }
            for other in self.alive() {
                let incarnation = self.nodes[other].peer.incarnation;
                let [here, there] = [node, other].map(|at| self.nodes[at].hub.presence_digests(incarnation));
                assert!(here == there, "{at}: node {node} does not know whom {other} has");
            }
        }
        for (index, client) in self.clients.iter().enumerate() {
            for (channel, key) in self.keys.iter().enumerate() {
                if let Some(watch) = client.watch(key) {
                    let present = self.present_on(channel);
                    assert_eq!(watch.seen, present, "{at}, client {index}, channel {channel}");
                }
            }
        }
    }

    pub(super) fn at(&self) -> String {
        format!("seed {}, {} ms", self.seed, self.now.as_millis())
    }
}
