//! Failures of peers: the doubt that the end of their streams leaves, and the channels that it concerns.

use super::super::super::inbound::{EndedIncarnation, Inbound as _, InterestMessage, Peer};
use super::super::fixture::{PEER, RoutingTestNode};
use super::*;
use crate::hub::InterestAnnouncer as _;
use crate::testing::SharedLocal;

const INCARNATION: u64 = 7;

fn status(is_down: bool) -> [GossipStatus; 1] {
    [GossipStatus {
        incarnation: INCARNATION,
        is_down,
        is_draining: false,
        is_seen_by_others: false,
        has_clients: true,
    }]
}

fn draining(is_down: bool) -> [GossipStatus; 1] {
    [GossipStatus { is_draining: true, ..status(is_down)[0] }]
}

/// A member with two streams.
fn met() -> (NodeFailures, Instant) {
    let mut node_failures = NodeFailures::default();
    node_failures.stream_opened(INCARNATION, 0);
    node_failures.stream_opened(INCARNATION, 1);
    assert_eq!(node_failures.look(&status(false), Instant::now()), []);
    (node_failures, Instant::now())
}

#[test]
fn peer_that_said_goodbye_leaves_nothing_in_doubt() {
    let (mut node_failures, now) = met();
    node_failures.left(INCARNATION);
    assert!(
        !node_failures.stream_ended(INCARNATION, 0, false, now)
            && !node_failures.stream_ended(INCARNATION, 1, false, now + 9 * AT_ONCE)
    );
    assert_eq!(node_failures.look(&status(true), Instant::now()), []);
    let removed = MembershipChange::Removed { is_reported: true, is_in_doubt: false, is_met: true };
    assert_eq!(node_failures.look(&[], Instant::now()), [(INCARNATION, removed)]);
}

#[test]
fn peer_streams_that_end_whole_and_together_leave_no_doubt() {
    for (contiguous, apart, is_in_doubt) in [
        ([true, true], AT_ONCE, false),
        ([true, true], AT_ONCE + Duration::from_millis(1), true),
        ([true, false], Duration::ZERO, true),
        ([false, true], Duration::ZERO, true),
    ] {
        let (mut node_failures, now) = met();
        assert!(!node_failures.stream_ended(INCARNATION, 0, contiguous[0], now), "it may live");
        assert!(!node_failures.stream_ended(INCARNATION, 1, contiguous[1], now + apart), "it may live");
        let died = MembershipChange::Down { is_in_doubt, is_met: true };
        assert_eq!(
            node_failures.look(&status(true), Instant::now()),
            [(INCARNATION, died)],
            "{contiguous:?} {apart:?}"
        );
        assert_eq!(node_failures.look(&status(true), Instant::now()), [], "it was told");
        let removed = MembershipChange::Removed { is_reported: true, is_in_doubt, is_met: true };
        assert_eq!(node_failures.look(&[], Instant::now()), [(INCARNATION, removed)]);
        assert!(node_failures.incarnations.is_empty());
    }
}

#[test]
fn peer_that_outlives_its_peer_streams_is_in_doubt() {
    for (later, is_in_doubt) in [(NOTICED_WITHIN, false), (NOTICED_WITHIN + AT_ONCE, true)] {
        let (mut node_failures, now) = met();
        node_failures.stream_ended(INCARNATION, 0, true, now);
        node_failures.stream_ended(INCARNATION, 1, true, now);
        let died = MembershipChange::Down { is_in_doubt, is_met: true };
        assert_eq!(node_failures.look(&status(true), now + later), [(INCARNATION, died)]);
    }
}

#[test]
fn peer_down_by_gossip_is_in_doubt_when_its_peer_streams_end() {
    let (mut node_failures, now) = met();
    let died = MembershipChange::Down { is_in_doubt: false, is_met: true };
    assert_eq!(node_failures.look(&status(true), Instant::now()), [(INCARNATION, died)]);
    assert!(!node_failures.stream_ended(INCARNATION, 0, false, now));
    assert!(node_failures.stream_ended(INCARNATION, 1, false, now));
    assert_eq!(node_failures.look(&status(false), Instant::now()), [(INCARNATION, MembershipChange::Back)]);
    assert_eq!(node_failures.look(&status(false), Instant::now()), []);
}

#[test]
fn peer_restarted_before_it_is_missed_is_retired_untold() {
    let (mut node_failures, now) = met();
    node_failures.stream_ended(INCARNATION, 0, true, now);
    node_failures.stream_ended(INCARNATION, 1, true, now);
    let removed = MembershipChange::Removed { is_reported: false, is_in_doubt: false, is_met: true };
    assert_eq!(node_failures.look(&[], Instant::now()), [(INCARNATION, removed)]);
}

#[test]
fn drained_peer_with_whole_peer_streams_is_not_reported_down() {
    let (mut node_failures, now) = met();
    assert_eq!(node_failures.look(&draining(false), Instant::now()), []);
    node_failures.stream_ended(INCARNATION, 0, true, now);
    node_failures.stream_ended(INCARNATION, 1, true, now);
    assert_eq!(node_failures.look(&draining(true), Instant::now()), []);
    let removed = MembershipChange::Removed { is_reported: true, is_in_doubt: false, is_met: true };
    assert_eq!(node_failures.look(&[], Instant::now()), [(INCARNATION, removed)]);
}

#[test]
fn draining_peer_that_ends_without_goodbye_is_reported_once() {
    let (mut node_failures, _) = met();
    assert_eq!(node_failures.ended_while_draining(&draining(false)), [0; 0]);
    assert_eq!(node_failures.ended_while_draining(&status(true)), [0; 0]);
    assert_eq!(node_failures.ended_while_draining(&draining(true)), [INCARNATION]);
    node_failures.look(&draining(true), Instant::now());
    assert_eq!(node_failures.ended_while_draining(&draining(true)), [0; 0]);
    let (mut node_failures, _) = met();
    node_failures.left(INCARNATION);
    assert_eq!(node_failures.ended_while_draining(&draining(true)), [0; 0]);
    assert_eq!(NodeFailures::default().ended_while_draining(&draining(true)), [0; 0], "it was never met");
}

#[test]
fn missing_messages_may_date_back_to_a_stall_of_this_node() {
    let (mut node_failures, _) = met();
    let ago = |seconds| Instant::now() - Duration::from_secs(seconds);
    node_failures.looked(ago(12));
    node_failures.looked(ago(12) + STALL_AFTER - Duration::from_millis(100));
    assert_eq!(node_failures.troubled_for(INCARNATION), NOTICED_WITHIN);
    node_failures.looked(ago(2));
    node_failures.looked(ago(2) + STALL_AFTER / 2);
    let troubled_for = node_failures.troubled_for(INCARNATION);
    let expected = NOTICED_WITHIN + Duration::from_secs(11);
    assert!(expected <= troubled_for && troubled_for < expected + STALL_AFTER, "{troubled_for:?}");
}

#[test]
fn peer_that_was_never_met_leaves_no_state() {
    let mut node_failures = NodeFailures::default();
    assert_eq!(node_failures.look(&status(false), Instant::now()), []);
    let died = MembershipChange::Down { is_in_doubt: false, is_met: false };
    assert_eq!(node_failures.look(&status(true), Instant::now()), [(INCARNATION, died)]);
    let removed = MembershipChange::Removed { is_reported: true, is_in_doubt: false, is_met: false };
    assert_eq!(node_failures.look(&[], Instant::now()), [(INCARNATION, removed)]);
    node_failures.stream_opened(9, 0);
    assert_eq!(node_failures.look(&[], Instant::now()), [], "no member yet");
    assert!(
        !node_failures.stream_ended(9, 0, false, Instant::now()) && node_failures.incarnations.is_empty()
    );
}

#[tokio::test]
async fn attach_done_after_peer_fell_silent_is_not_unconfirmed() {
    let node = RoutingTestNode::new();
    node.finds_the_peer();
    node.has_a_link();
    node.is_attached_to();
    let is_unconfirmed =
        |silent: Instant| !node.routing.unconfirmed_channels(PEER, true, Some(silent)).is_empty();
    let moment = Duration::from_millis(1);
    assert!(!is_unconfirmed(Instant::now() + moment), "whoever attaches waits for it");
    node.loses_its_links();
    let let_in = node.routing.local_interest.lock()[&node.number()].let_in;
    let let_in = let_in.expect("nobody is waited for");
    assert!(!is_unconfirmed(let_in) && is_unconfirmed(let_in + moment));
    node.says_joined(0, 0, Vec::new());
    assert!(!is_unconfirmed(let_in + moment), "it has said how far it was");
}

/// The attach barrier did not wait for the peer, so messages from before it opened may be missing.
#[tokio::test]
async fn attach_before_silence_of_unawaited_peer_stays_unconfirmed() {
    let node = RoutingTestNode::new();
    node.routing.set_local(SharedLocal::new(9, |_| Some(Vec::new())));
    let other = Peer { node_id: "n8".into(), incarnation: 8 };
    node.finds(&[&other]);
    node.has_a_link();
    node.is_attached_to();
    let silent = Instant::now();
    while Instant::now() == silent {}
    let is_unconfirmed = || !node.routing.unconfirmed_channels(PEER, true, Some(silent)).is_empty();
    assert!(is_unconfirmed());
    node.says_joined_as(&other, 0, 0, Vec::new());
    assert!(node.routing.local_interest.lock()[&node.number()].let_in.is_some());
    assert!(is_unconfirmed());
}

/// Clients of the peer may have missed messages that only the peer had.
#[tokio::test]
async fn node_failure_ends_older_positions_and_goodbye_does_not() {
    for leaves in [false, true] {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.routing.update_node_failures(&status(false));
        node.routing.stream_opened(&node.peer, 0);
        assert!(!node.routing.has_recent_loss());
        if leaves {
            node.routing.interest(&node.peer, InterestMessage::Goodbye { streams: 1, is_all: true });
        }
        node.routing.stream_ended(&node.peer, 0, true);
        node.routing.update_node_failures(&status(true));
        assert_eq!(node.routing.has_recent_loss(), !leaves);
        let ended = |has_left| EndedIncarnation { incarnation: 9, ago_ms: 1, has_left };
        let node = RoutingTestNode::new();
        node.routing
            .interest(&node.peer, InterestMessage::IncarnationsEnded { incarnations: vec![ended(leaves)] });
        assert_eq!(node.routing.has_recent_loss(), !leaves, "of one that it never heard");
    }
}

#[tokio::test]
async fn a_goodbye_before_all_was_taken_over_ends_older_positions() {
    let node = RoutingTestNode::new();
    node.finds_the_peer();
    node.routing.interest(&node.peer, InterestMessage::Goodbye { streams: 1, is_all: false });
    assert!(node.routing.has_recent_loss());
}

/// The peer may have failed just before this node began.
#[tokio::test]
async fn unmet_peer_with_clients_may_have_lost_messages() {
    let node = RoutingTestNode::new();
    let silent = GossipStatus { incarnation: INCARNATION, has_clients: true, ..GossipStatus::default() };
    node.routing.update_node_failures(&[GossipStatus { has_clients: false, ..silent }]);
    assert!(!node.routing.has_recent_loss(), "it begins");
    node.routing.update_node_failures(&[silent]);
    assert!(node.routing.has_recent_loss());
    node.finds_the_peer();
    assert!(!node.routing.has_recent_loss(), "it is heard");
}

#[test]
fn down_peer_counts_as_possible_loss_only_for_a_time() {
    let (mut node_failures, now) = met();
    let long_ago = Instant::now() - Duration::from_secs(60);
    for stream in [0, 1] {
        node_failures.stream_ended(INCARNATION, stream, true, long_ago.min(now));
    }
    assert!(
        node_failures.has_lost(Duration::from_secs(90)) && !node_failures.has_lost(Duration::from_secs(50))
    );
}

#[test]
fn ending_peer_streams_or_those_in_doubt_may_have_lost_some() {
    let lately = Duration::from_secs(50);
    let (mut node_failures, now) = met();
    assert!(!node_failures.has_lost(lately));
    node_failures.stream_ended(INCARNATION, 0, true, now);
    assert!(node_failures.has_lost(lately), "the other one follows");
    let (mut node_failures, now) = met();
    let long_ago = now - Duration::from_secs(60);
    node_failures.stream_ended(INCARNATION, 0, false, long_ago);
    node_failures.stream_ended(INCARNATION, 1, false, long_ago);
    assert!(node_failures.has_lost(lately), "it goes on behind a cut");
}
