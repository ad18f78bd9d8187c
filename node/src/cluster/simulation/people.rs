//! Who is present in a simulated cluster: what clients ask for, what nodes do about those who are gone, and what there must be.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;

use super::watch::{Seen, name_of, text_of};
use super::{CHANNELS, CLIENTS, World};
use crate::model::{ClientId, ConnectionId, MemberId, Place, PresenceAction, TakenUp, Tenure};
use crate::publish::{Departure, PresenceRequest};

const NAMES: [&str; 3] = ["ann", "bob", "cid"];
/// As often as nodes do so.
const ORPHANS_LOOK: Duration = Duration::from_millis(250);
const COMPARE_EVERY: Duration = Duration::from_secs(2);
/// How long a node may take to notice that a socket is gone.
const NOTICED_MS: u64 = 10_000;
/// Connections may be taken up in all of the simulation.
const WINDOW: Duration = Duration::from_secs(600);

/// Whom a client wants to be present: by channel and name, with data.
type Wants = BTreeMap<(usize, Box<str>), String>;

/// The connection of a client.
#[derive(Default)]
pub(super) struct Person {
    /// Where it is served, or was; none before the first time, and after the client has closed it.
    tenure: Option<Tenure>,
    wants: Wants,
}

/// A socket that is gone, which its node notices later.
pub(super) struct HalfOpen {
    node: usize,
    departure: Departure,
    noticed: Duration,
}

impl Person {
    fn member(&self, name: &str) -> Option<MemberId> {
        let connection_id = self.tenure?.connection_id;
        Some(MemberId { connection_id, client_id: ClientId::of(name) })
    }
}

impl World {
    fn node_of(&self, client: usize) -> Option<usize> {
        let at = self.clients[client].at.as_ref()?;
        self.nodes[at.node].is_alive.then_some(at.node)
    }

    /// A client does something about one of its members.
    pub(super) fn act(&mut self, client: usize) {
        if self.node_of(client).is_none() {
            return;
        }
        let place = (self.random.usize(..CHANNELS), Box::from(NAMES[self.random.usize(..NAMES.len())]));
        let (action, data) = (self.random.u8(..8), self.random.u32(..1_000).to_string());
        let wants = &mut self.people[client].wants;
        let (action, data) = match action {
            0..3 => {
                wants.remove(&place);
                (PresenceAction::Leave, None)
            }
            3..6 => {
                wants.insert(place.clone(), data.clone());
                (PresenceAction::Enter, Some(data))
            }
            _ => {
                wants.insert(place.clone(), data.clone());
                (PresenceAction::Update, Some(data))
            }
        };
        self.present(client, &place, action, data);
    }

    fn present(
        &self,
        client: usize,
        (channel, name): &(usize, Box<str>),
        action: PresenceAction,
        data: Option<String>,
    ) {
        let (Some(node), person) = (self.node_of(client), &self.people[client]) else { return };
        let (Some(member), Some(tenure)) = (person.member(name), person.tenure) else { return };
        let request = PresenceRequest {
            key: self.keys[*channel].clone(),
            account: Arc::clone(&self.account),
            member,
            epoch: tenure.epoch,
            action,
            data: data.map(|data| RawValue::from_string(data).expect("a number is JSON")),
        };
        let done = |result: Result<(), _>| result.expect("nobody is refused");
        self.nodes[node].publisher.present(request, Box::new(done));
    }

    /// The client has a socket of this node, and its members enter again. Of a connection that is taken up the node keeps whom it
    /// knows: where it has not heard of a leave, the client has not left.
    pub(super) fn arrive(&mut self, client: usize, node: usize) {
        let (hub, routing) = (Arc::clone(&self.nodes[node].hub), Arc::clone(&self.nodes[node].routing));
        self.sockets += 1;
        let (slot, incarnation) = (client as u32, hub.incarnation());
        let place = Place { incarnation, shard: 0, slot, generation: self.sockets };
        let is_known = |run: u64| {
            run == incarnation || routing.run(run, WINDOW).is_some() || self.is_former_run(node, run)
        };
        let former = self.people[client].tenure.filter(|tenure| is_known(tenure.place.incarnation));
        let former = former.filter(|_| self.is_calm || self.random.u8(..4) > 0);
        let tenure = match former {
            Some(Tenure { connection_id, epoch, .. }) => {
                Tenure { connection_id, epoch: epoch + 1 + self.random.u64(..3), place }
            }
            None => {
                let connection_id = ConnectionId::from_bytes(self.random.u128(..).to_be_bytes());
                Tenure { connection_id, epoch: 0, place }
            }
        };
        self.people[client].tenure = Some(tenure);
        if former.is_none() {
            let person = &self.people[client];
            let came =
                person.wants.keys().filter_map(|(of, name)| Some((*of, name_of(&person.member(name)?))));
            self.came.extend(came);
        }
        if let Some(former) = former {
            self.moves += 1;
            self.nodes[node].publisher.taken_up(&TakenUp { tenure, former: former.place });
            for (channel, key) in self.keys.iter().enumerate() {
                let members = hub.members(key);
                for (id, member) in members.iter().filter(|(id, _)| id.connection_id == tenure.connection_id)
                {
                    let place = (channel, Box::from(id.client_id.as_str()));
                    self.people[client].wants.entry(place).or_insert_with(|| {
                        assert!(!self.is_healed, "seed {}: {id:?} has left and is there again", self.seed);
                        text_of(&member.data)
                    });
                }
            }
        }
        for (place, data) in self.people[client].wants.clone() {
            self.present(client, &place, PresenceAction::Enter, Some(data));
        }
    }

    /// The client's socket on a node that lives is gone: it is closed, or lost, and that shows at once or later.
    pub(super) fn depart(&mut self, client: usize, node: usize) {
        let person = &mut self.people[client];
        let Some(tenure) = person.tenure else { return };
        let account = Arc::clone(&self.account);
        let departure =
            Departure { connection_id: tenure.connection_id, owner: tenure.owner(), account, keeps: None };
        let (publisher, now) = (&self.nodes[node].publisher, self.began + self.now);
        match self.random.u8(..4) {
            0 => {
                person.tenure = None;
                publisher.depart(departure, now);
            }
            1 => {
                let noticed = self.now + Duration::from_millis(self.random.u64(..NOTICED_MS));
                self.half_open.push(HalfOpen { node, departure, noticed });
            }
            _ => publisher.depart(departure, now + self.grace),
        }
    }

    /// From here on nothing is gone that its node does not know of.
    pub(super) fn notice_all(&mut self) {
        self.half_open.iter_mut().for_each(|socket| socket.noticed = self.now);
    }

    /// What nodes do about members from time to time.
    pub(super) async fn look_after_members(&mut self) {
        let now = self.began + self.now;
        for socket in self.half_open.extract_if(.., |socket| socket.noticed <= self.now) {
            let node = &self.nodes[socket.node];
            if node.is_alive {
                node.publisher.depart(socket.departure, now + self.grace);
            }
        }
        let account = Arc::clone(&self.account);
        for index in self.alive() {
            let node = &mut self.nodes[index];
            while node.publisher.let_leave(now).await.is_ok() {}
            if node.due[1] <= self.now {
                node.due[1] += ORPHANS_LOOK;
                node.publisher.let_orphans_leave(&|_| Arc::clone(&account), now).await;
            }
            if node.due[2] <= self.now {
                node.due[2] += COMPARE_EVERY;
                node.routing.compare_members();
            }
        }
    }

    /// The connections that are there.
    fn connections(&self) -> BTreeSet<ConnectionId> {
        let here = (0..CLIENTS).filter(|client| self.node_of(*client).is_some());
        here.filter_map(|client| self.people[client].tenure).map(|tenure| tenure.connection_id).collect()
    }

    /// Who is to be present on a channel.
    pub(super) fn present_on(&self, channel: usize) -> Seen {
        let here = (0..CLIENTS).filter(|client| self.node_of(*client).is_some());
        let wants = here.flat_map(|client| {
            let person = &self.people[client];
            let of_channel = person.wants.iter().filter(move |((of, _), _)| *of == channel);
            of_channel.filter_map(|((_, name), data)| Some((name_of(&person.member(name)?), data.clone())))
        });
        wants.collect()
    }

    /// Whom a node lists, if `wanted` holds of the connection.
    fn listed(&self, node: usize, channel: usize, wanted: impl Fn(ConnectionId) -> bool) -> Seen {
        let members = self.nodes[node].hub.members(&self.keys[channel]);
        let members = members.into_iter().filter(|(id, _)| wanted(id.connection_id));
        members.map(|(id, member)| (name_of(&id), text_of(&member.data))).collect()
    }

    /// Every node has whoever is there, as it is there, and knows where.
    pub(super) fn check_healed(&self) {
        let (here, alive, at) = (self.connections(), self.alive(), self.at());
        for node in alive.iter().copied() {
            for channel in 0..CHANNELS {
                let listed = self.listed(node, channel, |connection| here.contains(&connection));
                assert_eq!(listed, self.present_on(channel), "{at}, node {node}, channel {channel}");
            }
            for client in 0..CLIENTS {
                let Some(tenure) = self.people[client].tenure.filter(|_| self.node_of(client).is_some())
                else {
                    continue;
                };
                if let Some(owner) = self.nodes[node].hub.presence_owner(tenure.connection_id) {
                    assert_eq!(owner, tenure.owner(), "{at}, client {client} as node {node} has it");
                }
            }
        }
    }

    /// Nobody is present anywhere who is gone, and clients know it.
    pub(super) fn check_nobody_else(&self) {
        let at = self.at();
        for node in self.alive() {
            for channel in 0..CHANNELS {
                let listed = self.listed(node, channel, |_| true);
                assert_eq!(listed, self.present_on(channel), "{at}, node {node}, channel {channel}");
            }
            for other in self.alive() {
                let run = self.nodes[other].peer.incarnation;
                let [here, there] = [node, other].map(|at| self.nodes[at].hub.presence_digests(run));
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
