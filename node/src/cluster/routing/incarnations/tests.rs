use super::super::fixture::{PEER, RoutingTestNode};
use super::super::{GossipStatus, PeerAddr};
use super::*;

#[tokio::test]
async fn incarnation_without_peer_stream_is_known_alive_or_ended() {
    let node = RoutingTestNode::new();
    let known_status = || node.routing.incarnation_status(PEER, Duration::from_secs(60));
    assert_eq!(known_status(), None);
    for (is_down, expected) in [(false, IncarnationStatus::Alive), (true, IncarnationStatus::Ended)] {
        let status = GossipStatus { incarnation: PEER, is_down, ..GossipStatus::default() };
        node.routing.update_node_failures(&[status]);
        assert_eq!(known_status(), Some(expected));
    }
    node.routing.update_node_failures(&[]);
    assert_eq!(known_status(), Some(IncarnationStatus::Ended), "also when it runs again under another one");
    assert_eq!(node.routing.incarnation_status(PEER, Duration::ZERO), None);
    let back = GossipStatus { incarnation: PEER, ..GossipStatus::default() };
    node.routing.update_node_failures(&[GossipStatus { is_down: true, ..back }]);
    node.routing.update_node_failures(&[back]);
    assert_eq!(known_status(), Some(IncarnationStatus::Alive));
}

#[tokio::test]
async fn silent_incarnation_is_alive_until_it_is_down() {
    let node = RoutingTestNode::new();
    node.finds_the_peer();
    let known_status = || node.routing.incarnation_status(PEER, Duration::from_secs(60));
    let addr = ([127, 0, 0, 1], 1).into();
    node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
    let silent = GossipStatus { incarnation: PEER, ..GossipStatus::default() };
    for (status, expected) in [
        (silent, IncarnationStatus::Alive),
        (GossipStatus { is_draining: true, ..silent }, IncarnationStatus::Ended),
        (GossipStatus { is_down: true, ..silent }, IncarnationStatus::Ended),
    ] {
        node.routing.update_node_failures(&[status]);
        assert_eq!(known_status(), Some(expected), "nobody misses one that leaves");
    }
}

#[tokio::test]
async fn end_of_an_incarnation_is_sent_to_peers_when_noticed() {
    let node = RoutingTestNode::new();
    node.finds_the_peer();
    node.has_a_link();
    let is_sent = || {
        let says = node.says();
        let item = |ago_ms| {
            let ended = EndedIncarnation { incarnation: 9, ago_ms, has_left: false };
            PeerItem::interest(&InterestMessage::IncarnationsEnded { incarnations: vec![ended] })
        };
        (0..1_000).any(|ago_ms| says.contains(&item(ago_ms)))
    };
    assert!(!is_sent());
    node.routing.update_node_failures(&[GossipStatus {
        incarnation: 9,
        is_down: true,
        ..GossipStatus::default()
    }]);
    assert!(is_sent());
}

#[tokio::test]
async fn incarnation_seen_only_by_other_nodes_is_alive() {
    let node = RoutingTestNode::new();
    let addr = ([127, 0, 0, 1], 1).into();
    node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
    for (is_down, is_seen_by_others, expected) in [
        (true, true, IncarnationStatus::Alive),
        (false, false, IncarnationStatus::Alive),
        (true, false, IncarnationStatus::Ended),
    ] {
        let status =
            GossipStatus { incarnation: PEER, is_down, is_seen_by_others, ..GossipStatus::default() };
        node.routing.update_node_failures(&[status]);
        assert_eq!(node.routing.incarnation_status(PEER, Duration::from_secs(60)), Some(expected));
    }
}

#[test]
fn incarnation_ends_once_until_it_was_back() {
    let (mut known, begun) = (KnownIncarnations::default(), Instant::now());
    let at = |seconds| begun + Duration::from_secs(seconds);
    let ended = |known: &KnownIncarnations| [1, 2].map(|incarnation| known.ended(incarnation));
    known.set_alive(&[1, 2], at(0));
    assert_eq!(ended(&known), [None, None]);
    assert_eq!(known.set_alive(&[2], at(1)), [1]);
    assert!(known.set_alive(&[2], at(2)).is_empty());
    assert_eq!(ended(&known), [Some(at(1)), None]);
    known.set_alive(&[1], at(3));
    assert_eq!(ended(&known), [None, Some(at(3))]);
    for incarnation in 0..=ENDED_MAX as u64 {
        known.set_alive(&[incarnation + 10], at(incarnation + 4));
    }
    assert_eq!((ended(&known), known.ended(10)), ([None; 2], Some(at(5))), "the earliest goes");
    assert_eq!(known.seen.len(), ENDED_MAX + 1);
}

#[test]
fn reported_end_of_an_incarnation_is_kept_and_passed_on() {
    let (mut known, begun) = (KnownIncarnations::default(), Instant::now());
    let now = begun + Duration::from_secs(5);
    known.set_alive(&[1, 2], begun);
    known.set_alive(&[1], begun + Duration::from_secs(1));
    let of = |incarnation, ago_ms| EndedIncarnation { incarnation, ago_ms, has_left: false };
    known.record_reported(&[of(1, 3_000), of(2, 3_000), of(3, 3_000), of(4, u64::MAX)], now);
    let mut all = known.all_ended(now);
    all.sort_unstable();
    let expected = [of(2, 4_000), of(3, 3_000)];
    assert_eq!(all, expected, "what was seen counts, and not what nobody can have seen");
    assert_eq!(known.survivors_of(3).collect::<Vec<_>>(), [1]);
    known.record_reported(&[of(3, 1_000)], now);
    assert_eq!(known.reported[&3], now - Duration::from_secs(1), "who has heard it last");
    known.record_down(5, now);
    known.record_reported(&[of(5, 4_000)], now);
    assert_eq!(known.reported[&5], now - Duration::from_secs(4), "this one may just have begun");
    known.record_reported(&[of(5, 5_000)], now);
    assert_eq!(known.reported[&5], now - Duration::from_secs(4));
    known.set_alive(&[1, 3, 5], now);
    assert!(known.reported.is_empty());
    let many: Vec<_> = (10..).map(|incarnation| of(incarnation, incarnation)).take(2 * ENDED_MAX).collect();
    known.record_reported(&many, begun + Duration::from_secs(60));
    assert!(known.reported.len() == ENDED_MAX && known.reported.contains_key(&10), "the earliest goes");
}

/// Clients of the ended incarnation may have missed messages that it had for them alone.
#[test]
fn incarnation_that_ended_without_goodbye_has_lost_messages() {
    let (mut known, now) = (KnownIncarnations::default(), Instant::now() + Duration::from_secs(60));
    let lately = Duration::from_secs(9);
    let of = |incarnation, ago_ms, has_left| EndedIncarnation { incarnation, ago_ms, has_left };
    known.record_reported(&[of(1, 1_000, true), of(2, 10_000, false)], now);
    assert!(!known.has_lost(lately, now));
    known.record_reported(&[of(3, 9_000, false)], now);
    assert!(known.has_lost(lately, now) && !known.has_lost(lately, now + Duration::from_millis(1)));
    known.record_reported(&[of(3, 9_000, true)], now);
    assert!(!known.has_lost(lately, now), "another one has heard its goodbye");
    known.set_alive(&[4], now);
    known.left(4);
    known.set_alive(&[], now);
    assert!(!known.has_lost(lately, now));
    let mut ended = known.all_ended(now);
    ended.sort_unstable();
    assert_eq!(ended, [of(1, 1_000, true), of(2, 10_000, false), of(3, 9_000, true), of(4, 0, true)]);
    known.set_alive(&[5], now);
    known.set_alive(&[], now);
    assert!(known.has_lost(lately, now), "it was heard and is not any more");
}

#[test]
fn node_that_began_after_incarnation_ended_is_no_survivor() {
    let (mut known, begun) = (KnownIncarnations::default(), Instant::now());
    let alive = [&[1, 2, 3][..], &[1, 2], &[2], &[2, 3, 4], &[3, 4]];
    let mut next = alive.iter().zip(0..);
    let mut survivors = |incarnation: u64, steps: usize| {
        for (alive, seconds) in next.by_ref().take(steps) {
            known.set_alive(alive, begun + Duration::from_secs(seconds));
        }
        known.survivors_of(incarnation).collect::<Vec<_>>()
    };
    assert_eq!(survivors(1, 4), [2, 3], "3 was not heard just when 1 ended");
    assert_eq!(survivors(1, 1), [3]);
    assert_eq!(survivors(2, 0), [3, 4]);
    assert_eq!(survivors(9, 0), [3, 4], "it ended before this node began");
}
