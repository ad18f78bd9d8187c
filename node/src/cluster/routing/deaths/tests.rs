//! What becomes of runs whose lanes end, and who is owed what of them.

use super::super::super::inbound::{EndedRun, Inbound as _, Interest, Peer};
use super::super::fixture::{Node, PEER};
use super::*;
use crate::hub::Interest as _;
use crate::testing::SharedLocal;

const RUN: u64 = 7;

fn standing(is_dead: bool) -> [Standing; 1] {
    [Standing { incarnation: RUN, is_dead, is_draining: false, is_elsewhere: false, has_clients: true }]
}

fn draining(is_dead: bool) -> [Standing; 1] {
    [Standing { is_draining: true, ..standing(is_dead)[0] }]
}

/// A member with two lanes.
fn met() -> (Deaths, Instant) {
    let mut deaths = Deaths::default();
    deaths.opened(RUN, 0);
    deaths.opened(RUN, 1);
    assert_eq!(deaths.look(&standing(false), Instant::now()), []);
    (deaths, Instant::now())
}

#[test]
fn peer_that_said_goodbye_owes_nothing() {
    let (mut deaths, now) = met();
    deaths.left(RUN);
    assert!(!deaths.ended(RUN, 0, false, now) && !deaths.ended(RUN, 1, false, now + 9 * AT_ONCE));
    assert_eq!(deaths.look(&standing(true), Instant::now()), []);
    let gone = Fate::Gone { is_told: true, is_doubtful: false, is_met: true };
    assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
}

#[test]
fn peer_streams_that_end_whole_and_together_leave_no_doubt() {
    for (whole, apart, is_doubtful) in [
        ([true, true], AT_ONCE, false),
        ([true, true], AT_ONCE + Duration::from_millis(1), true),
        ([true, false], Duration::ZERO, true),
        ([false, true], Duration::ZERO, true),
    ] {
        let (mut deaths, now) = met();
        assert!(!deaths.ended(RUN, 0, whole[0], now), "it may live");
        assert!(!deaths.ended(RUN, 1, whole[1], now + apart), "it may live");
        let died = Fate::Died { is_doubtful, is_met: true };
        assert_eq!(deaths.look(&standing(true), Instant::now()), [(RUN, died)], "{whole:?} {apart:?}");
        assert_eq!(deaths.look(&standing(true), Instant::now()), [], "it was told");
        let gone = Fate::Gone { is_told: true, is_doubtful, is_met: true };
        assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
        assert!(deaths.runs.is_empty());
    }
}

#[test]
fn peer_that_outlives_its_peer_streams_is_in_doubt() {
    for (later, is_doubtful) in [(NOTICED_WITHIN, false), (NOTICED_WITHIN + AT_ONCE, true)] {
        let (mut deaths, now) = met();
        deaths.ended(RUN, 0, true, now);
        deaths.ended(RUN, 1, true, now);
        let died = Fate::Died { is_doubtful, is_met: true };
        assert_eq!(deaths.look(&standing(true), now + later), [(RUN, died)]);
    }
}

#[test]
fn peer_down_by_gossip_is_in_doubt_when_its_peer_streams_end() {
    let (mut deaths, now) = met();
    let died = Fate::Died { is_doubtful: false, is_met: true };
    assert_eq!(deaths.look(&standing(true), Instant::now()), [(RUN, died)]);
    assert!(!deaths.ended(RUN, 0, false, now));
    assert!(deaths.ended(RUN, 1, false, now));
    assert_eq!(deaths.look(&standing(false), Instant::now()), [(RUN, Fate::Back)]);
    assert_eq!(deaths.look(&standing(false), Instant::now()), []);
}

#[test]
fn peer_restarted_before_it_is_missed_is_retired_untold() {
    let (mut deaths, now) = met();
    deaths.ended(RUN, 0, true, now);
    deaths.ended(RUN, 1, true, now);
    let gone = Fate::Gone { is_told: false, is_doubtful: false, is_met: true };
    assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
}

#[test]
fn drained_peer_with_whole_peer_streams_is_not_reported_down() {
    let (mut deaths, now) = met();
    assert_eq!(deaths.look(&draining(false), Instant::now()), []);
    deaths.ended(RUN, 0, true, now);
    deaths.ended(RUN, 1, true, now);
    assert_eq!(deaths.look(&draining(true), Instant::now()), []);
    let gone = Fate::Gone { is_told: true, is_doubtful: false, is_met: true };
    assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
}

#[test]
fn draining_peer_that_ends_without_goodbye_is_reported_once() {
    let (mut deaths, _) = met();
    assert_eq!(deaths.unfinished(&draining(false)), [0; 0]);
    assert_eq!(deaths.unfinished(&standing(true)), [0; 0]);
    assert_eq!(deaths.unfinished(&draining(true)), [RUN]);
    deaths.look(&draining(true), Instant::now());
    assert_eq!(deaths.unfinished(&draining(true)), [0; 0]);
    let (mut deaths, _) = met();
    deaths.left(RUN);
    assert_eq!(deaths.unfinished(&draining(true)), [0; 0]);
    assert_eq!(Deaths::default().unfinished(&draining(true)), [0; 0], "it was never met");
}

#[test]
fn missing_messages_may_date_back_to_a_stall_of_this_node() {
    let (mut deaths, _) = met();
    let ago = |seconds| Instant::now() - Duration::from_secs(seconds);
    deaths.looked(ago(12));
    deaths.looked(ago(12) + STOOD_STILL - Duration::from_millis(100));
    assert_eq!(deaths.troubled_for(RUN), NOTICED_WITHIN);
    deaths.looked(ago(2));
    deaths.looked(ago(2) + STOOD_STILL / 2);
    let troubled_for = deaths.troubled_for(RUN);
    let expected = NOTICED_WITHIN + Duration::from_secs(11);
    assert!(expected <= troubled_for && troubled_for < expected + STOOD_STILL, "{troubled_for:?}");
}

#[test]
fn peer_that_was_never_met_leaves_no_state() {
    let mut deaths = Deaths::default();
    assert_eq!(deaths.look(&standing(false), Instant::now()), []);
    let died = Fate::Died { is_doubtful: false, is_met: false };
    assert_eq!(deaths.look(&standing(true), Instant::now()), [(RUN, died)]);
    let gone = Fate::Gone { is_told: true, is_doubtful: false, is_met: false };
    assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
    deaths.opened(9, 0);
    assert_eq!(deaths.look(&[], Instant::now()), [], "no member yet");
    assert!(!deaths.ended(9, 0, false, Instant::now()) && deaths.runs.is_empty());
}

#[tokio::test]
async fn attach_done_after_peer_fell_silent_is_owed_nothing_of_it() {
    let node = Node::new();
    node.finds_the_peer();
    node.has_a_link();
    node.is_attached_to();
    let is_owed = |silent: Instant| !node.routing.unheard(PEER, true, Some(silent)).is_empty();
    let moment = Duration::from_millis(1);
    assert!(!is_owed(Instant::now() + moment), "whoever attaches waits for it");
    node.loses_its_links();
    let let_in = node.routing.own.lock()[&node.number()].let_in;
    let let_in = let_in.expect("nobody is waited for");
    assert!(!is_owed(let_in) && is_owed(let_in + moment));
    node.says_joined(0, 0, Vec::new());
    assert!(!is_owed(let_in + moment), "it has said how far it was");
}

/// It was not waited for, so nobody knows what it had published when those who attached were let in.
#[tokio::test]
async fn attach_before_silence_of_unawaited_peer_stays_owed() {
    let node = Node::new();
    node.routing.set_local(SharedLocal::new(9, |_| Some(Vec::new())));
    let other = Peer { node_id: "n8".into(), incarnation: 8 };
    node.finds(&[&other]);
    node.has_a_link();
    node.is_attached_to();
    let silent = Instant::now();
    while Instant::now() == silent {}
    let is_owed = || !node.routing.unheard(PEER, true, Some(silent)).is_empty();
    assert!(is_owed());
    node.says_joined_as(&other, 0, 0, Vec::new());
    assert!(node.routing.own.lock()[&node.number()].let_in.is_some());
    assert!(is_owed());
}

/// Who was on it may have missed what it had for its own clients alone.
#[tokio::test]
async fn a_death_ends_older_positions_and_a_goodbye_does_not() {
    for leaves in [false, true] {
        let node = Node::new();
        node.finds_the_peer();
        node.routing.look_for_deaths(&standing(false));
        node.routing.lane_opened(&node.peer, 0);
        assert!(!node.routing.has_lost());
        if leaves {
            node.routing.interest(&node.peer, Interest::Left { lanes: 1, is_all: true });
        }
        node.routing.lane_ended(&node.peer, 0, true);
        node.routing.look_for_deaths(&standing(true));
        assert_eq!(node.routing.has_lost(), !leaves);
        let told = |has_left| EndedRun { incarnation: 9, ago_ms: 1, has_left };
        let node = Node::new();
        node.routing.interest(&node.peer, Interest::Ended { runs: vec![told(leaves)] });
        assert_eq!(node.routing.has_lost(), !leaves, "of one that it never heard");
    }
}

#[tokio::test]
async fn a_goodbye_before_all_was_taken_over_ends_older_positions() {
    let node = Node::new();
    node.finds_the_peer();
    node.routing.interest(&node.peer, Interest::Left { lanes: 1, is_all: false });
    assert!(node.routing.has_lost());
}

/// It may have died just before this node began.
#[tokio::test]
async fn unheard_peer_with_clients_may_have_lost_messages() {
    let node = Node::new();
    let unheard = Standing { incarnation: RUN, has_clients: true, ..Standing::default() };
    node.routing.look_for_deaths(&[Standing { has_clients: false, ..unheard }]);
    assert!(!node.routing.has_lost(), "it begins");
    node.routing.look_for_deaths(&[unheard]);
    assert!(node.routing.has_lost());
    node.finds_the_peer();
    assert!(!node.routing.has_lost(), "it is heard");
}

#[test]
fn down_peer_counts_as_possible_loss_only_for_a_time() {
    let (mut deaths, now) = met();
    let long_ago = Instant::now() - Duration::from_secs(60);
    for lane in [0, 1] {
        deaths.ended(RUN, lane, true, long_ago.min(now));
    }
    assert!(deaths.has_lost(Duration::from_secs(90)) && !deaths.has_lost(Duration::from_secs(50)));
}

#[test]
fn ending_or_doubtful_peer_streams_may_have_lost_messages() {
    let lately = Duration::from_secs(50);
    let (mut deaths, now) = met();
    assert!(!deaths.has_lost(lately));
    deaths.ended(RUN, 0, true, now);
    assert!(deaths.has_lost(lately), "the other one follows");
    let (mut deaths, now) = met();
    let long_ago = now - Duration::from_secs(60);
    deaths.ended(RUN, 0, false, long_ago);
    deaths.ended(RUN, 1, false, long_ago);
    assert!(deaths.has_lost(lately), "it goes on behind a cut");
}
