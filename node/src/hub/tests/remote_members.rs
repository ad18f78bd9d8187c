//! Remote members: which node may change which member, and that nodes with the same information agree.

use std::collections::{BTreeMap, VecDeque};

use serde_json::value::RawValue;

use super::*;
use crate::model::{
    ClientId, ForwardedPresence, MemberData, MemberId, PresenceAction, PresenceEvent, RemoteMember,
    RemoteMembersPage, SessionOwner,
};
use PresenceAction::{Enter, Leave, Update};

/// Incarnations of other nodes.
const ONE: u64 = 11;
const OTHER: u64 = 22;

fn connection(n: u8) -> ConnectionId {
    ConnectionId::from_bytes([n; 16])
}

fn id(n: u8) -> MemberId {
    MemberId { connection_id: connection(n), client_id: ClientId::of(&format!("client-{n}")) }
}

fn data(text: &str) -> MemberData {
    Some(Arc::from(RawValue::from_string(text.to_owned()).unwrap()))
}

fn remote_member(n: u8, (epoch, incarnation): (u64, u64), text: &str) -> RemoteMember {
    let owner = SessionOwner { epoch, incarnation };
    RemoteMember { member: id(n), owner, data: data(text), timestamp_ms: NOW_MS }
}

/// A hub with a subscriber on channel `a`.
struct HubTestNode {
    hub: Hub,
    target: Arc<HubTestTarget>,
}

impl HubTestNode {
    fn new() -> Self {
        let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
        hub.attach(&key("a"), 0);
        Self { hub, target: Arc::clone(&targets[0]) }
    }

    fn receive_change(&self, action: PresenceAction, remote: RemoteMember) {
        self.hub.apply_remote_change(ForwardedPresence::new(key("a"), action, remote));
    }

    fn receive_members(&self, by: u64, members: Vec<RemoteMember>, known: u64) {
        self.receive_members_beside(by, members, known, &[]);
    }

    /// Applies a page of peer `by` that must not restore members of the incarnations `excluded`.
    fn receive_members_beside(&self, by: u64, members: Vec<RemoteMember>, known: u64, excluded: &[u64]) {
        let page = RemoteMembersPage::new(key("a"), by, None, members, true);
        self.hub.apply_remote_members(page, Some(known), |incarnation| excluded.contains(&incarnation));
    }

    /// The events that subscribers got since the last call.
    fn events(&self) -> Vec<String> {
        let presence = std::mem::take(&mut *self.target.presence.lock());
        let numbers: Vec<u64> = presence.iter().map(|delivery| delivery.event.sequence).collect();
        assert!(numbers.is_sorted_by(|one, next| one < next), "{numbers:?}");
        let text = |delivery: &Arc<PresenceDelivery>| {
            let event = &delivery.event;
            let data = event.data.as_ref().map_or("-", |data| data.get());
            format!("{} {} {data}", event.action, &event.member.client_id.as_str()["client-".len()..])
        };
        presence.iter().map(text).collect()
    }

    fn own(&self, epoch: u64) -> SessionOwner {
        SessionOwner { epoch, incarnation: self.hub.incarnation() }
    }

    fn changes(&self, n: u8, epoch: u64, action: PresenceAction, text: &str) -> Option<Arc<PresenceEvent>> {
        let change = PresenceChange { member: id(n), epoch, action, data: data(text) };
        let mut made = None;
        let presented = self.hub.present(&key("a"), change, &Limits::default(), |action, data, stamp| {
            let event = PresenceEvent::new(key("a"), id(n), epoch, action, data, stamp);
            made = Some(Arc::clone(&event));
            event
        });
        presented.unwrap();
        made
    }

    fn members(&self) -> Vec<(MemberId, String)> {
        let text = |data: MemberData| data.map_or_else(String::new, |data| data.get().to_owned());
        self.hub.members(&key("a")).into_iter().map(|(id, member)| (id, text(member.data))).collect()
    }
}

#[test]
fn changes_become_what_they_are_here() {
    let node = HubTestNode::new();
    node.receive_change(Leave, remote_member(1, (0, ONE), "0"));
    node.receive_change(Enter, remote_member(1, (0, ONE), "1"));
    node.receive_change(Enter, remote_member(1, (0, ONE), "1"));
    node.receive_change(Update, remote_member(1, (0, ONE), "1"));
    node.receive_change(Update, remote_member(2, (0, ONE), "2"));
    node.receive_change(Leave, remote_member(1, (0, ONE), "3"));
    node.receive_change(Leave, remote_member(1, (0, ONE), "3"));
    assert_eq!(node.events(), ["enter 1 1", "update 1 1", "enter 2 2", "leave 1 3"]);
    assert_eq!(node.members(), [(id(2), "2".to_owned())]);
    assert_eq!(node.hub.channel_member_counts(key("a").account()), [], "none of them is of this node");
}

/// A client re-entered at a node that did not know yet that it was present.
#[test]
fn member_reentering_unchanged_at_another_node_makes_no_event() {
    let (node, other) = (HubTestNode::new(), HubTestNode::new());
    let again =
        |n, epoch, text| RemoteMember { timestamp_ms: NOW_MS + 9, ..remote_member(n, (epoch, OTHER), text) };
    for n in 1..=4 {
        node.receive_change(Enter, remote_member(n, (0, ONE), "1"));
    }
    assert_eq!(node.events().len(), 4);
    let known = node.hub.presence_sequence();
    node.receive_change(Enter, again(1, 1, "1"));
    node.receive_members(OTHER, vec![again(1, 1, "1"), again(2, 1, "1"), again(3, 1, "3")], known);
    assert_eq!(node.events(), ["update 3 3"]);
    node.receive_change(Update, again(4, 1, "1"));
    assert_eq!(node.events(), ["update 4 1"], "it is said that it changes");
    // Everything else is as that node has it.
    for (n, text) in [(1, "1"), (2, "1"), (3, "3"), (4, "1")] {
        other.receive_change(Enter, again(n, 1, text));
        assert_eq!(
            node.hub.presence_owner(connection(n)),
            Some(SessionOwner { epoch: 1, incarnation: OTHER })
        );
    }
    assert_eq!(node.hub.presence_digests(OTHER), other.hub.presence_digests(OTHER));
    // A page made earlier does not concern members that entered later.
    node.receive_members(OTHER, vec![], known);
    node.hub.remove_unlisted_members(&key("a"), OTHER, known);
    assert!(node.events().is_empty());
}

#[test]
fn only_the_greatest_owner_of_a_connection_is_accepted() {
    let node = HubTestNode::new();
    node.receive_change(Enter, remote_member(1, (5, ONE), "1"));
    for lesser in [(4, OTHER), (5, ONE - 1), (0, ONE)] {
        node.receive_change(Update, remote_member(1, lesser, "2"));
        node.receive_change(Leave, remote_member(1, lesser, "2"));
    }
    assert_eq!(node.events(), ["enter 1 1"]);
    node.receive_change(Update, remote_member(1, (5, OTHER), "2"));
    node.receive_change(Leave, remote_member(1, (5, ONE), "1"));
    node.hub.take_over_presence(connection(1), SessionOwner { epoch: 6, incarnation: ONE });
    node.receive_change(Leave, remote_member(1, (5, OTHER), "2"));
    assert_eq!(node.events(), ["update 1 2"]);
    assert_eq!(node.hub.presence_owner(connection(1)), Some(SessionOwner { epoch: 6, incarnation: ONE }));
    node.receive_change(Leave, remote_member(1, (6, ONE), "2"));
    assert_eq!(node.events(), ["leave 1 2"]);
}

#[test]
fn peers_cannot_change_own_members_of_a_node() {
    let node = HubTestNode::new();
    node.changes(1, 3, Enter, "1");
    let own = (9, node.hub.incarnation());
    for action in [Enter, Update, Leave] {
        node.receive_change(action, remote_member(1, own, "2"));
        node.receive_change(action, remote_member(2, own, "2"));
    }
    node.receive_members(ONE, vec![remote_member(1, own, "2"), remote_member(2, own, "2")], u64::MAX);
    node.receive_members(ONE, vec![], u64::MAX);
    assert_eq!(node.events(), ["enter 1 1"]);
    // Another node owns the connection now, and a change of an earlier epoch does not count.
    node.hub.take_over_presence(connection(1), SessionOwner { epoch: 4, incarnation: ONE });
    assert!(node.changes(1, 3, Update, "2").is_none());
    node.hub.remove_lost_member(&key("a"), id(1), node.own(3), u64::MAX, |_, _, _| {
        unreachable!("it is another's")
    });
    assert_eq!(node.hub.channel_member_counts(key("a").account()), []);
    node.hub.take_over_presence(connection(1), node.own(5));
    assert!(node.changes(1, 5, Update, "2").is_some());
    assert_eq!(node.hub.channel_member_counts(key("a").account()), [(ChannelName::of("a"), 1)]);
}

#[test]
fn members_sent_by_node_replace_only_that_nodes_members() {
    let node = HubTestNode::new();
    for (n, owner) in [(1, ONE), (2, ONE), (3, OTHER), (4, ONE)] {
        node.receive_change(Enter, remote_member(n, (0, owner), "1"));
    }
    node.changes(5, 0, Enter, "1");
    let known = node.hub.presence_sequence();
    node.receive_change(Enter, remote_member(6, (0, ONE), "1"));
    node.events();
    let members = vec![
        remote_member(1, (0, ONE), "1"),
        remote_member(4, (0, ONE), "2"),
        remote_member(7, (0, ONE), "1"),
    ];
    node.receive_members(ONE, members, known);
    assert_eq!(node.events(), ["leave 2 1", "update 4 2", "enter 7 1"], "6 came while it was told");
    // A page does not concern members before or after it.
    let part = |after: Option<u8>, n: u8, is_last| {
        let members = vec![remote_member(n, (0, ONE), "3")];
        let page = RemoteMembersPage::new(key("a"), ONE, after.map(id), members, is_last);
        node.hub.apply_remote_members(page, Some(u64::MAX), |_| false);
    };
    part(Some(1), 4, false);
    assert_eq!(node.events(), ["update 4 3"]);
    part(Some(4), 7, true);
    assert_eq!(node.events(), ["leave 6 1", "update 7 3"]);
    node.hub.remove_unlisted_members(&key("a"), ONE, u64::MAX);
    assert_eq!(node.events(), ["leave 1 1", "leave 4 3", "leave 7 3"]);
    assert_eq!(node.members().len(), 2);
}

#[test]
fn known_remote_member_is_not_replaced_by_an_older_page() {
    let node = HubTestNode::new();
    node.receive_change(Enter, remote_member(1, (3, ONE), "1"));
    node.events();
    let ended = vec![remote_member(1, (2, ONE), "0"), remote_member(2, (2, ONE), "2")];
    node.receive_members(OTHER, ended, u64::MAX);
    assert_eq!(node.events(), ["enter 2 2"]);
}

/// A partitioned node has not heard which members left meanwhile.
#[test]
fn member_of_self_reporting_peer_not_restored_by_another_peer() {
    let node = HubTestNode::new();
    let ended = || vec![remote_member(1, (2, ONE), "0")];
    node.receive_members_beside(OTHER, ended(), u64::MAX, &[ONE]);
    assert!(node.events().is_empty());
    node.receive_members(OTHER, ended(), u64::MAX);
    assert_eq!(node.events(), ["enter 1 0"]);
}

#[test]
fn connection_that_moves_during_a_snapshot_does_not_leave() {
    let node = HubTestNode::new();
    node.receive_change(Enter, remote_member(1, (0, ONE), "1"));
    let known = node.hub.presence_sequence();
    node.hub.take_over_presence(connection(1), SessionOwner { epoch: 1, incarnation: OTHER });
    node.events();
    node.receive_members(OTHER, vec![], known);
    node.hub.remove_unlisted_members(&key("a"), OTHER, known);
    assert!(node.events().is_empty());
}

#[test]
fn nodes_differ_that_know_a_connection_in_another_epoch() {
    let (node, other) = (HubTestNode::new(), HubTestNode::new());
    let same = || node.hub.presence_digests(ONE) == other.hub.presence_digests(ONE);
    for node in [&node, &other] {
        node.receive_change(Enter, remote_member(1, (0, ONE), "1"));
    }
    assert!(same());
    node.hub.take_over_presence(connection(1), SessionOwner { epoch: 1, incarnation: ONE });
    assert!(!same());
    other.events();
    other.receive_members(ONE, vec![remote_member(1, (1, ONE), "1")], other.hub.presence_sequence());
    assert!(same() && other.events().is_empty());
    for node in [&node, &other] {
        node.receive_change(Leave, remote_member(1, (1, ONE), "1"));
        assert_eq!(node.hub.presence_digests(ONE), [0; crate::hub::PARTS]);
    }
}

/// A reproducible sequence of random numbers.
struct PseudoRandom(u64);

impl PseudoRandom {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// A message between two nodes, delivered in order.
enum HubTestMessage {
    Changed(PresenceAction, RemoteMember),
    Takeover(ConnectionId, SessionOwner),
}

/// Nodes whose changes arrive late, or never.
struct HubTestCluster {
    nodes: Vec<HubTestNode>,
    streams: BTreeMap<(usize, usize), VecDeque<HubTestMessage>>,
    /// Node and epoch of each connection.
    homes: BTreeMap<u8, (usize, u64)>,
}

impl HubTestCluster {
    fn send(&mut self, from: usize, sent: impl Fn() -> HubTestMessage) {
        for to in (0..self.nodes.len()).filter(|to| *to != from) {
            self.streams.entry((from, to)).or_default().push_back(sent());
        }
    }

    fn deliver(&mut self, from: usize, to: usize, count: usize) {
        let stream = self.streams.entry((from, to)).or_default();
        for sent in stream.drain(..count.min(stream.len())) {
            match sent {
                HubTestMessage::Changed(action, remote) => self.nodes[to].receive_change(action, remote),
                HubTestMessage::Takeover(connection, owner) => {
                    self.nodes[to].hub.take_over_presence(connection, owner)
                }
            }
        }
    }

    fn step(&mut self, chance: &mut PseudoRandom, epoch: u64) {
        let n = chance.below(12) as u8;
        let count = self.nodes.len() as u64;
        let (at, of_epoch) = *self.homes.entry(n).or_insert((usize::from(n) % count as usize, 0));
        match chance.below(10) {
            0..6 => {
                let action = [Enter, Update, Leave][chance.below(3) as usize];
                let text = chance.below(100).to_string();
                if let Some(event) = self.nodes[at].changes(n, of_epoch, action, &text) {
                    self.send(at, || {
                        let PresenceEvent { action, owner, data, timestamp_ms, .. } = &*event;
                        let (owner, data, timestamp_ms) = (*owner, data.clone(), *timestamp_ms);
                        HubTestMessage::Changed(
                            *action,
                            RemoteMember { member: id(n), owner, data, timestamp_ms },
                        )
                    });
                }
            }
            6 => {
                let to = chance.below(count) as usize;
                self.homes.insert(n, (to, epoch));
                let owner = self.nodes[to].own(epoch);
                self.nodes[to].hub.take_over_presence(connection(n), owner);
                self.send(to, || HubTestMessage::Takeover(connection(n), owner));
            }
            7 => {
                let stream = (chance.below(count) as usize, chance.below(count) as usize);
                self.streams.remove(&stream);
            }
            _ => {
                let (from, to) = (chance.below(count) as usize, chance.below(count) as usize);
                self.deliver(from, to, chance.below(8) as usize);
            }
        }
    }

    fn send_members(&self, from: usize, to: usize) {
        let own = self.nodes[from].hub.incarnation();
        let known = self.nodes[to].hub.presence_sequence();
        let mut after: Option<MemberId> = None;
        loop {
            let send_page = |part: &[RemoteMember], is_last| {
                let page = RemoteMembersPage::new(key("a"), own, after.clone(), part.to_vec(), is_last);
                (part.last().map(|last| last.member.clone()).filter(|_| !is_last), page)
            };
            let is_own = |incarnation| incarnation == own;
            let (end, page) =
                self.nodes[from].hub.with_members_page(&key("a"), after.as_ref(), 2_000, is_own, send_page);
            self.nodes[to].hub.apply_remote_members(page, Some(known), |_| false);
            after = end;
            if after.is_none() {
                return;
            }
        }
    }
}

#[test]
fn nodes_agree_on_members_after_full_sync() {
    for seed in 0..300 {
        let mut chance = PseudoRandom(seed);
        let mut nodes = HubTestCluster {
            nodes: (0..3).map(|_| HubTestNode::new()).collect(),
            streams: BTreeMap::new(),
            homes: BTreeMap::new(),
        };
        for epoch in 1..200 {
            nodes.step(&mut chance, epoch);
        }
        // Twice: a node that learns late that it lost a connection announces it only then.
        for _ in 0..2 {
            for from in 0..3 {
                for to in (0..3).filter(|to| *to != from) {
                    nodes.deliver(from, to, usize::MAX);
                    nodes.send_members(from, to);
                }
            }
        }
        let members = nodes.nodes[0].members();
        for node in &nodes.nodes {
            assert_eq!(node.members(), members, "seed {seed}");
            for of in &nodes.nodes {
                let incarnation = of.hub.incarnation();
                assert_eq!(
                    node.hub.presence_digests(incarnation),
                    of.hub.presence_digests(incarnation),
                    "seed {seed}"
                );
            }
            // A watching client was sent the events that led to this state.
            let mut seen = BTreeMap::new();
            for event in node.events() {
                let [action, name, data] = *event.split(' ').collect::<Vec<_>>() else { panic!("{event}") };
                let previous = match action {
                    "leave" => seen.remove(name),
                    _ => seen.insert(name.to_owned(), data.to_owned()),
                };
                assert_eq!(previous.is_some(), action != "enter", "seed {seed}: {event}");
            }
            let watched: Vec<_> = seen.into_iter().collect();
            let mut listed: Vec<_> = members
                .iter()
                .map(|(id, data)| (id.client_id.as_str()["client-".len()..].to_owned(), data.clone()))
                .collect();
            listed.sort();
            assert_eq!(watched, listed, "seed {seed}");
        }
    }
}
