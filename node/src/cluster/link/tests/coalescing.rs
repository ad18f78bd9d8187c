//! Conditions that end the coalescing of a stream early.

use std::pin::pin;

use futures_util::FutureExt as _;
use tokio::time::Instant;

use super::super::queue::{AWAITED_MAX, BATCH_BYTES, BUSY, BUSY_AFTER_ONE, COALESCE_FOR, coalescing_end};
use super::*;

fn later() -> Instant {
    Instant::now() + Duration::from_secs(3_600)
}

fn is_coalescing(queue: &PeerQueue) -> bool {
    queue.coalesced(later()).now_or_never().is_none()
}

#[tokio::test]
async fn only_urgent_items_end_the_coalescing() {
    let queue = PeerQueue::new(QueueBounds::default());
    let stream = queue.open(0);
    let mut coalesced = pin!(queue.coalesced(later()));
    assert!(coalesced.as_mut().now_or_never().is_none());
    drop(queue.push(Bytes::from_static(b"a publish"), None));
    assert!(coalesced.as_mut().now_or_never().is_none());
    drop(queue.push(Bytes::from_static(b"a request"), None));
    queue.hurry();
    assert!(coalesced.as_mut().now_or_never().is_some());
    assert!(!is_coalescing(&queue), "it has not gone yet");
    assert!(matches!(queue.pull(stream), BatchPull::Batch(_)));
    assert!(is_coalescing(&queue), "what was in a hurry has gone");
    queue.hurry();
    assert!(is_coalescing(&queue), "nothing waits");
}

#[test]
fn items_soon_after_a_batch_coalesce_from_the_first_item_on() {
    let made = Instant::now();
    for (after, items, expected) in [
        (Duration::ZERO, 1, Some(COALESCE_FOR)),
        (BUSY_AFTER_ONE, 1, Some(COALESCE_FOR)),
        (BUSY_AFTER_ONE + Duration::from_nanos(1), 1, None),
        (BUSY_AFTER_ONE + Duration::from_nanos(1), 2, Some(COALESCE_FOR)),
        (BUSY, 2, Some(COALESCE_FOR)),
        (BUSY + Duration::from_nanos(1), 1_000, None),
    ] {
        let first = made + after;
        assert_eq!(
            coalescing_end(first, made, items).map(|until| until - first),
            expected,
            "{after:?}, {items}"
        );
    }
}

#[tokio::test]
async fn queue_without_need_to_coalesce_sends_at_once() {
    let queue = PeerQueue::new(QueueBounds::default());
    let stream = queue.open(0);
    let push = |bytes| drop(queue.push(Bytes::from(vec![0; bytes]), None));
    assert_eq!(queue.coalesces_until(), None, "nothing waits");
    push(1);
    assert_eq!(queue.coalesces_until(), None, "nothing went before");
    // Repeated when the machine was too slow for the stream to count as busy.
    let soon_after_a_batch = async || {
        loop {
            assert!(matches!(queue.pull(stream), BatchPull::Batch(_)));
            push(1);
            if queue.coalesces_until().is_some() {
                break;
            }
            tokio::task::yield_now().await;
        }
    };
    timeout(DEADLINE, soon_after_a_batch()).await.expect("soon enough after a batch");
    push(BATCH_BYTES);
    assert_eq!(queue.coalesces_until(), None, "there is enough for a whole batch");
    timeout(DEADLINE, soon_after_a_batch()).await.expect("soon enough after a batch");
    queue.open(0);
    assert_eq!(queue.coalesces_until(), None, "there are batches to be sent again");
}

/// All publishers of the last batch publish again, so no further item is expected.
#[tokio::test]
async fn publishers_that_await_each_ack_are_not_coalesced() {
    const FIRST: ConnectionId = ConnectionId::from_bytes([1; 16]);
    const SECOND: ConnectionId = ConnectionId::from_bytes([2; 16]);
    let goes_at_once = |before: &[Option<ConnectionId>], confirms: bool, then: &[Option<ConnectionId>]| {
        let queue = PeerQueue::new(QueueBounds::default());
        let stream = queue.open(0);
        let push =
            |publisher: &Option<ConnectionId>| drop(queue.push(Bytes::from_static(b"item"), *publisher));
        before.iter().for_each(push);
        let BatchPull::Batch(batch) = queue.pull(stream) else { panic!("there is one") };
        if confirms {
            queue.confirm(batch.sequence);
        }
        let mut waits_for_more = pin!(queue.coalesced(later()));
        assert!(waits_for_more.as_mut().now_or_never().is_none(), "nobody is back");
        then.iter().for_each(push);
        let is_woken = waits_for_more.now_or_never().is_some();
        assert!(!is_woken || queue.coalesces_until().is_none());
        is_woken
    };
    let (first, second) = (Some(FIRST), Some(SECOND));
    assert!(goes_at_once(&[first], true, &[first]));
    assert!(!goes_at_once(&[first], false, &[first]), "it does not wait for its acks");
    assert!(!goes_at_once(&[first], true, &[second]), "others publish as well");
    assert!(goes_at_once(&[first], true, &[second, first]));
    assert!(!goes_at_once(&[first, second], true, &[second]));
    assert!(goes_at_once(&[first, second], true, &[second, first]));
    assert!(!goes_at_once(&[first, first], true, &[first]), "it had two under way");
    assert!(goes_at_once(&[first, first], true, &[first, first]));
    assert!(!goes_at_once(&[first, None], true, &[first, None]), "not all was published");
    assert!(goes_at_once(&[first; AWAITED_MAX], true, &[first; AWAITED_MAX]));
    assert!(!goes_at_once(&[first; AWAITED_MAX + 1], true, &[first; AWAITED_MAX + 1]), "they are many");
}

#[tokio::test]
async fn coalescing_ends_in_time() {
    let queue = PeerQueue::new(QueueBounds::default());
    let until = Instant::now() + Duration::from_millis(1);
    timeout(DEADLINE, queue.coalesced(until)).await.expect("it ends by itself");
    assert!(Instant::now() >= until);
}

#[tokio::test]
async fn an_attach_and_what_is_asked_are_in_a_hurry() {
    let interest = PeerItem::interest(&InterestMessage::SnapshotRequest);
    let added = PeerItem::interest(&InterestMessage::Added {
        key: ChannelKey::new(AccountId::new("acme"), ChannelName::of("room")),
        number: 1,
        round: 0,
        sequence: 0,
    });
    assert!(added.is_waited_for);
    assert!(PeerItem::request(1, &PeerRequest::Load).is_waited_for);
    assert!(PeerItem::answer(1, &PeerAnswer::Done).is_waited_for);
    assert!(!interest.is_waited_for);
    assert!(!forward(1, "room", 1, 16).is_waited_for);
}
