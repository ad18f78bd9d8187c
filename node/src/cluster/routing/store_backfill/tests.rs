use std::sync::atomic::Ordering;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::poll;

use super::super::super::inbound::Inbound as _;
use super::super::super::link::PeerItem;
use super::super::GossipStatus;
use super::super::fixture::{PEER, RoutingTestNode};
use super::*;
use crate::hub::ResumeStart;
use crate::model::{ChannelName, ConnectionId, ForwardedParts};
use crate::testing::SharedLocal;

/// A node with a subscriber whose store settles `settles` times.
fn node(settles: usize) -> (RoutingTestNode, Arc<SharedLocal>) {
    let (node, local) = (RoutingTestNode::new(), SharedLocal::new(settles, |_| None));
    node.routing.set_local(Arc::clone(&local) as Arc<dyn LocalNode>);
    node.is_attached_to();
    (node, local)
}

#[tokio::test]
async fn requests_during_a_settle_share_the_next_settle() {
    let (node, local) = node(0);
    let settle = || node.routing.settle(&node.key);
    let mut first = Box::pin(settle());
    assert!(poll!(&mut first).is_pending());
    while local.requests.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let mut later = Box::pin(join_all((0..20).map(|_| settle())));
    assert!(poll!(&mut later).is_pending());
    local.settling.add_permits(1);
    assert!(first.await);
    assert!(poll!(&mut later).is_pending(), "what they ask for begins after they asked");
    local.settling.add_permits(1);
    assert_eq!(later.await, [true; 20]);
    assert_eq!(local.requests.load(Ordering::SeqCst), 2);
}

#[tokio::test]
async fn silent_peer_gets_one_settle_request_for_all_callers() {
    let (node, _) = node(9);
    node.finds_the_peer();
    node.has_a_link();
    let begun = Instant::now();
    let settled = join_all((0..20).map(|_| node.routing.settle(&node.key))).await;
    assert_eq!(settled, [false; 20]);
    assert!(begun.elapsed() < 2 * SETTLE_WAIT);
    let is_request =
        |item: &PeerItem| (0..99).any(|number| *item == PeerItem::request(number, &PeerRequest::Settle));
    assert_eq!(node.says().iter().filter(|item| is_request(item)).count(), 1);
}

#[tokio::test]
async fn settle_fails_if_peer_or_local_store_does_not_settle() {
    for (answer, local_settles, is_settled) in [
        (Some(PeerAnswer::Done), 1, true),
        (Some(PeerAnswer::Done), 0, false),
        (Some(PeerAnswer::Unknown), 1, false),
        (None, 1, false),
    ] {
        let (node, _) = node(local_settles);
        node.finds_the_peer();
        node.has_a_link();
        let answers = async {
            // Answers all numbers, since that of the request is not known.
            for number in (1..20).cycle().take(1_900) {
                match answer.clone() {
                    Some(answer) => node.routing.answer_received(&node.peer, number, answer),
                    None => node.routing.link(&node.peer, false),
                }
                node.says_joined(0, number, Vec::new());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let (settled, ()) = tokio::join!(node.routing.settle(&node.key), answers);
        assert_eq!(settled, is_settled, "{answer:?} {local_settles}");
    }
}

/// A node with a down peer that was received up to sequence 5.
fn with_down_peer(stored: fn(&StoreBackfillQuery) -> Option<Vec<ForwardedParts>>) -> RoutingTestNode {
    let node = RoutingTestNode::new();
    node.routing.set_local(SharedLocal::new(9, stored));
    node.finds_the_peer();
    node.has_a_link();
    node.is_attached_to();
    let retired = Stamp { incarnation: 99, sequence: 4 };
    node.says_joined(5, 0, vec![retired]);
    node.says_joined(5, 1, vec![Stamp { sequence: 6, ..retired }]);
    node.loses_the_peer();
    node
}

/// An incarnation behind a partition may take publishes, so one read is not enough.
#[tokio::test]
async fn incarnation_that_may_go_on_is_read_each_time() {
    for (is_contiguous, read_again) in [(true, Vec::new()), (false, vec![PEER])] {
        let node = RoutingTestNode::new();
        node.routing.set_local(SharedLocal::new(9, |_| Some(Vec::new())));
        node.sees_the_peer_die(is_contiguous);
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        let nothing = Serial::default();
        let complete = || node.routing.complete_from_store(&node.key, &nothing);
        complete().await.expect("it is read");
        assert_eq!(complete().await, Some(read_again.clone()));
        assert_eq!(channel.is_in_doubt_except(&[]), !is_contiguous);
        assert!(!channel.is_in_doubt_except(&[PEER]));
        node.routing.update_node_failures(&[]);
        let is_sure = async {
            while channel.is_in_doubt_except(&[]) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(SETTLE_WAIT, is_sure).await.expect("it does not go on");
    }
}

fn one_row(behind: &StoreBackfillQuery) -> Option<Vec<ForwardedParts>> {
    let connection_id = ConnectionId::from_bytes([7; 16]);
    let StoreBackfillQuery { incarnation, sequence, .. } = *behind;
    let (first, last) = (sequence + 1, sequence + 1);
    let messages = vec![Bytes::from_static(b"{}")];
    Some(vec![ForwardedParts {
        incarnation,
        first,
        last,
        timestamp_ms: 1,
        connection_id,
        client_id: None,
        messages,
        bytes: 2,
    }])
}

/// The attach barrier opened while there was no link to the peer, which lived on for a moment.
#[tokio::test]
async fn down_peer_rows_decide_resume_if_its_position_was_unknown() {
    let status =
        |is_down| GossipStatus { incarnation: PEER, is_down, has_clients: true, ..GossipStatus::default() };
    let nothing: fn(&StoreBackfillQuery) -> _ = |_| Some(Vec::new());
    for (stored, resumes) in [(nothing, true), (one_row, false), (|_: &StoreBackfillQuery| None, false)] {
        let node = RoutingTestNode::new();
        node.routing.set_local(SharedLocal::new(9, stored));
        node.finds_the_peer();
        node.has_a_link();
        node.routing.stream_opened(&node.peer, 0);
        node.routing.update_node_failures(&[status(false)]);
        node.loses_its_links();
        // Items of the peer still come.
        while node.routing.node_failures.lock().is_ending(PEER) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        node.is_attached_to();
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        let position = channel.position().serial();
        node.routing.stream_ended(&node.peer, 0, true);
        node.routing.update_node_failures(&[status(true)]);
        assert!(channel.is_in_doubt_except(&[]), "until it is read");
        let is_sure = async {
            while channel.is_in_doubt_except(&[]) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(SETTLE_WAIT, is_sure).await.expect("it is read");
        let start = node.routing.hub.resume_start(&node.key, &position);
        assert_eq!(start == ResumeStart::Live, resumes, "{start:?}");
    }
}

#[tokio::test]
async fn resume_fails_over_down_incarnation_that_store_cannot_read() {
    let node = with_down_peer(|_| None);
    assert_eq!(node.routing.complete_from_store(&node.key, &Serial::single(PEER, 5)).await, None);
    let node = with_down_peer(|behind| {
        assert_eq!((behind.incarnation, behind.sequence), (PEER, 5));
        Some(Vec::new())
    });
    assert_eq!(node.routing.complete_from_store(&node.key, &Serial::single(PEER, 5)).await, Some(vec![PEER]));
    let channel = node.routing.hub.live(&node.key).expect("it is attached to");
    assert_eq!(channel.position().serial().sequence_of(99), Some(6), "others have heard so much of it");
    let other_key = ChannelKey::new(node.key.account().clone(), ChannelName::of("other"));
    assert_eq!(node.routing.complete_from_store(&other_key, &Serial::default()).await, None);
}
