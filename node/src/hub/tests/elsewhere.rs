//! Members of other nodes: who may say what of whom, and that nodes which were told all know the same.

use std::collections::{BTreeMap, VecDeque};

use serde_json::value::RawValue;

use super::*;
use crate::model::{
    ClientId, ForwardedPresence, MemberData, MemberId, Owner, PresenceAction, PresenceEvent, ToldMember,
    ToldMembers,
};
use PresenceAction::{Enter, Leave, Update};

/// Runs of other nodes.
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

fn told(n: u8, (epoch, incarnation): (u64, u64), text: &str) -> ToldMember {
    let owner = Owner { epoch, incarnation };
    ToldMember { member: id(n), owner, data: data(text), timestamp_ms: NOW_MS }
}

/// A hub whose channel `a` somebody listens to.
struct Node {
    hub: Hub,
    target: Arc<Target>,
}

impl Node {
    fn new() -> Self {
        let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
        hub.attach(&key("a"), 0);
        Self { hub, target: Arc::clone(&targets[0]) }
    }

    fn hears(&self, action: PresenceAction, told: ToldMember) {
        self.hub.presented(ForwardedPresence::new(key("a"), action, told));
    }

    fn is_told(&self, by: u64, members: Vec<ToldMember>, known: u64) {
        self.is_told_beside(by, members, known, &[]);
    }

    /// These runs tell of themselves.
    fn is_told_beside(&self, by: u64, members: Vec<ToldMember>, known: u64, tell: &[u64]) {
        let told = ToldMembers::new(key("a"), by, None, members, true);
        self.hub.told_members(told, Some(known), |run| tell.contains(&run));
    }

    /// What subscribers got since this was last asked.
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

    fn own(&self, epoch: u64) -> Owner {
        Owner { epoch, incarnation: self.hub.incarnation() }
    }

    fn changes(&self, n: u8, epoch: u64, action: PresenceAction, text: &str) -> Option<Arc<PresenceEvent>> {
        let change = Change { member: id(n), epoch, action, data: data(text) };
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
    let node = Node::new();
    node.hears(Leave, told(1, (0, ONE), "0"));
    node.hears(Enter, told(1, (0, ONE), "1"));
    node.hears(Enter, told(1, (0, ONE), "1"));
    node.hears(Update, told(1, (0, ONE), "1"));
    node.hears(Update, told(2, (0, ONE), "2"));
    node.hears(Leave, told(1, (0, ONE), "3"));
    node.hears(Leave, told(1, (0, ONE), "3"));
    assert_eq!(node.events(), ["enter 1 1", "update 1 1", "enter 2 2", "leave 1 3"]);
    assert_eq!(node.members(), [(id(2), "2".to_owned())]);
    assert_eq!(node.hub.crowded(key("a").account()), [], "none of them is of this node");
}

/// Somebody came back to a node that did not know yet who was present.
#[test]
fn member_reentering_elsewhere_unchanged_causes_no_event() {
    let (node, other) = (Node::new(), Node::new());
    let again = |n, epoch, text| ToldMember { timestamp_ms: NOW_MS + 9, ..told(n, (epoch, OTHER), text) };
    for n in 1..=4 {
        node.hears(Enter, told(n, (0, ONE), "1"));
    }
    assert_eq!(node.events().len(), 4);
    let known = node.hub.presence_sequence();
    node.hears(Enter, again(1, 1, "1"));
    node.is_told(OTHER, vec![again(1, 1, "1"), again(2, 1, "1"), again(3, 1, "3")], known);
    assert_eq!(node.events(), ["update 3 3"]);
    node.hears(Update, again(4, 1, "1"));
    assert_eq!(node.events(), ["update 4 1"], "it is said that it changes");
    // All else is as that node has it.
    for (n, text) in [(1, "1"), (2, "1"), (3, "3"), (4, "1")] {
        other.hears(Enter, again(n, 1, text));
        assert_eq!(node.hub.presence_owner(connection(n)), Some(Owner { epoch: 1, incarnation: OTHER }));
    }
    assert_eq!(node.hub.presence_digests(OTHER), other.hub.presence_digests(OTHER));
    // What had been told by then says nothing of those who came later.
    node.is_told(OTHER, vec![], known);
    node.hub.untold_members(&key("a"), OTHER, known);
    assert!(node.events().is_empty());
}

#[test]
fn the_greatest_owner_of_a_connection_is_heard() {
    let node = Node::new();
    node.hears(Enter, told(1, (5, ONE), "1"));
    for lesser in [(4, OTHER), (5, ONE - 1), (0, ONE)] {
        node.hears(Update, told(1, lesser, "2"));
        node.hears(Leave, told(1, lesser, "2"));
    }
    assert_eq!(node.events(), ["enter 1 1"]);
    node.hears(Update, told(1, (5, OTHER), "2"));
    node.hears(Leave, told(1, (5, ONE), "1"));
    node.hub.take_over_presence(connection(1), Owner { epoch: 6, incarnation: ONE });
    node.hears(Leave, told(1, (5, OTHER), "2"));
    assert_eq!(node.events(), ["update 1 2"]);
    assert_eq!(node.hub.presence_owner(connection(1)), Some(Owner { epoch: 6, incarnation: ONE }));
    node.hears(Leave, told(1, (6, ONE), "2"));
    assert_eq!(node.events(), ["leave 1 2"]);
}

#[test]
fn of_its_own_members_a_node_lets_nobody_else_speak() {
    let node = Node::new();
    node.changes(1, 3, Enter, "1");
    let own = (9, node.hub.incarnation());
    for action in [Enter, Update, Leave] {
        node.hears(action, told(1, own, "2"));
        node.hears(action, told(2, own, "2"));
    }
    node.is_told(ONE, vec![told(1, own, "2"), told(2, own, "2")], u64::MAX);
    node.is_told(ONE, vec![], u64::MAX);
    assert_eq!(node.events(), ["enter 1 1"]);
    // It is another's from now on, and what is said here of a former epoch does not count.
    node.hub.take_over_presence(connection(1), Owner { epoch: 4, incarnation: ONE });
    assert!(node.changes(1, 3, Update, "2").is_none());
    node.hub.depart(&key("a"), id(1), node.own(3), u64::MAX, |_, _, _| unreachable!("it is another's"));
    assert_eq!(node.hub.crowded(key("a").account()), []);
    node.hub.take_over_presence(connection(1), node.own(5));
    assert!(node.changes(1, 5, Update, "2").is_some());
    assert_eq!(node.hub.crowded(key("a").account()), [(ChannelName::of("a"), 1)]);
}

#[test]
fn members_told_by_node_replace_only_that_nodes_members() {
    let node = Node::new();
    for (n, owner) in [(1, ONE), (2, ONE), (3, OTHER), (4, ONE)] {
        node.hears(Enter, told(n, (0, owner), "1"));
    }
    node.changes(5, 0, Enter, "1");
    let known = node.hub.presence_sequence();
    node.hears(Enter, told(6, (0, ONE), "1"));
    node.events();
    let members = vec![told(1, (0, ONE), "1"), told(4, (0, ONE), "2"), told(7, (0, ONE), "1")];
    node.is_told(ONE, members, known);
    assert_eq!(node.events(), ["leave 2 1", "update 4 2", "enter 7 1"], "6 came while it was told");
    // Parts say nothing of who stands before or behind them.
    let part = |after: Option<u8>, n: u8, is_last| {
        let members = vec![told(n, (0, ONE), "3")];
        let told = ToldMembers::new(key("a"), ONE, after.map(id), members, is_last);
        node.hub.told_members(told, Some(u64::MAX), |_| false);
    };
    part(Some(1), 4, false);
    assert_eq!(node.events(), ["update 4 3"]);
    part(Some(4), 7, true);
    assert_eq!(node.events(), ["leave 6 1", "update 7 3"]);
    node.hub.untold_members(&key("a"), ONE, u64::MAX);
    assert_eq!(node.events(), ["leave 1 1", "leave 4 3", "leave 7 3"]);
    assert_eq!(node.members().len(), 2);
}

#[test]
fn of_members_of_others_what_is_known_already_stays() {
    let node = Node::new();
    node.hears(Enter, told(1, (3, ONE), "1"));
    node.events();
    let ended = vec![told(1, (2, ONE), "0"), told(2, (2, ONE), "2")];
    node.is_told(OTHER, ended, u64::MAX);
    assert_eq!(node.events(), ["enter 2 2"]);
}

/// A node that was behind a cut has not heard who has left meanwhile.
#[test]
fn member_of_self_reporting_peer_not_restored_by_another_peer() {
    let node = Node::new();
    let ended = || vec![told(1, (2, ONE), "0")];
    node.is_told_beside(OTHER, ended(), u64::MAX, &[ONE]);
    assert!(node.events().is_empty());
    node.is_told(OTHER, ended(), u64::MAX);
    assert_eq!(node.events(), ["enter 1 0"]);
}

#[test]
fn a_connection_that_moves_while_its_node_tells_does_not_leave() {
    let node = Node::new();
    node.hears(Enter, told(1, (0, ONE), "1"));
    let known = node.hub.presence_sequence();
    node.hub.take_over_presence(connection(1), Owner { epoch: 1, incarnation: OTHER });
    node.events();
    node.is_told(OTHER, vec![], known);
    node.hub.untold_members(&key("a"), OTHER, known);
    assert!(node.events().is_empty());
}

#[test]
fn nodes_differ_that_know_a_connection_in_another_epoch() {
    let (node, other) = (Node::new(), Node::new());
    let same = || node.hub.presence_digests(ONE) == other.hub.presence_digests(ONE);
    for node in [&node, &other] {
        node.hears(Enter, told(1, (0, ONE), "1"));
    }
    assert!(same());
    node.hub.take_over_presence(connection(1), Owner { epoch: 1, incarnation: ONE });
    assert!(!same());
    other.events();
    other.is_told(ONE, vec![told(1, (1, ONE), "1")], other.hub.presence_sequence());
    assert!(same() && other.events().is_empty());
    for node in [&node, &other] {
        node.hears(Leave, told(1, (1, ONE), "1"));
        assert_eq!(node.hub.presence_digests(ONE), [0; crate::hub::PARTS]);
    }
}

/// A number that seems to come by chance.
struct Chance(u64);

impl Chance {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// What one node has on its way to another, in its order.
enum Sent {
    Changed(PresenceAction, ToldMember),
    TakenUp(ConnectionId, Owner),
}

/// Nodes whose changes come late, or not at all.
struct Nodes {
    nodes: Vec<Node>,
    lanes: BTreeMap<(usize, usize), VecDeque<Sent>>,
    /// Where each connection is, and in which epoch.
    places: BTreeMap<u8, (usize, u64)>,
}

impl Nodes {
    fn send(&mut self, from: usize, sent: impl Fn() -> Sent) {
        for to in (0..self.nodes.len()).filter(|to| *to != from) {
            self.lanes.entry((from, to)).or_default().push_back(sent());
        }
    }

    fn deliver(&mut self, from: usize, to: usize, count: usize) {
        let lane = self.lanes.entry((from, to)).or_default();
        for sent in lane.drain(..count.min(lane.len())) {
            match sent {
                Sent::Changed(action, told) => self.nodes[to].hears(action, told),
                Sent::TakenUp(connection, owner) => self.nodes[to].hub.take_over_presence(connection, owner),
            }
        }
    }

    fn step(&mut self, chance: &mut Chance, epoch: u64) {
        let n = chance.below(12) as u8;
        let count = self.nodes.len() as u64;
        let (at, of_epoch) = *self.places.entry(n).or_insert((usize::from(n) % count as usize, 0));
        match chance.below(10) {
            0..6 => {
                let action = [Enter, Update, Leave][chance.below(3) as usize];
                let text = chance.below(100).to_string();
                if let Some(event) = self.nodes[at].changes(n, of_epoch, action, &text) {
                    self.send(at, || {
                        let PresenceEvent { action, owner, data, timestamp_ms, .. } = &*event;
                        let (owner, data, timestamp_ms) = (*owner, data.clone(), *timestamp_ms);
                        Sent::Changed(*action, ToldMember { member: id(n), owner, data, timestamp_ms })
                    });
                }
            }
            6 => {
                let to = chance.below(count) as usize;
                self.places.insert(n, (to, epoch));
                let owner = self.nodes[to].own(epoch);
                self.nodes[to].hub.take_over_presence(connection(n), owner);
                self.send(to, || Sent::TakenUp(connection(n), owner));
            }
            7 => {
                let lane = (chance.below(count) as usize, chance.below(count) as usize);
                self.lanes.remove(&lane);
            }
            _ => {
                let (from, to) = (chance.below(count) as usize, chance.below(count) as usize);
                self.deliver(from, to, chance.below(8) as usize);
            }
        }
    }

    fn tell(&self, from: usize, to: usize) {
        let own = self.nodes[from].hub.incarnation();
        let known = self.nodes[to].hub.presence_sequence();
        let mut after: Option<MemberId> = None;
        loop {
            let tell = |part: &[ToldMember], is_last| {
                let told = ToldMembers::new(key("a"), own, after.clone(), part.to_vec(), is_last);
                (part.last().map(|last| last.member.clone()).filter(|_| !is_last), told)
            };
            let wanted = |run| run == own;
            let (end, told) =
                self.nodes[from].hub.tell_members(&key("a"), after.as_ref(), 2_000, wanted, tell);
            self.nodes[to].hub.told_members(told, Some(known), |_| false);
            after = end;
            if after.is_none() {
                return;
            }
        }
    }
}

#[test]
fn nodes_that_have_told_each_other_all_know_the_same() {
    for seed in 0..300 {
        let mut chance = Chance(seed);
        let mut nodes = Nodes {
            nodes: (0..3).map(|_| Node::new()).collect(),
            lanes: BTreeMap::new(),
            places: BTreeMap::new(),
        };
        for epoch in 1..200 {
            nodes.step(&mut chance, epoch);
        }
        // Twice, since who learns late that a connection is its own no more tells so only then.
        for _ in 0..2 {
            for from in 0..3 {
                for to in (0..3).filter(|to| *to != from) {
                    nodes.deliver(from, to, usize::MAX);
                    nodes.tell(from, to);
                }
            }
        }
        let members = nodes.nodes[0].members();
        for node in &nodes.nodes {
            assert_eq!(node.members(), members, "seed {seed}");
            for of in &nodes.nodes {
                let run = of.hub.incarnation();
                assert_eq!(node.hub.presence_digests(run), of.hub.presence_digests(run), "seed {seed}");
            }
            // Who watches was told how it came to this.
            let mut seen = BTreeMap::new();
            for event in node.events() {
                let [action, name, data] = *event.split(' ').collect::<Vec<_>>() else { panic!("{event}") };
                let former = match action {
                    "leave" => seen.remove(name),
                    _ => seen.insert(name.to_owned(), data.to_owned()),
                };
                assert_eq!(former.is_some(), action != "enter", "seed {seed}: {event}");
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
