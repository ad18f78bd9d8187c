//! Acks of publishes: when they are given, and on which task.

use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use super::super::fixture::RoutingTestNode;
use super::*;
use crate::cluster::link::{BatchPull, PeerQueue, QueueBounds};
use crate::model::ConnectionId;

const ITEMS: usize = 5_000;
const DEADLINE: Duration = Duration::from_secs(20);
/// Time for which an ack waits for a peer.
const SECOND: Duration = Duration::from_secs(1);

/// Two peer queues, one of them small, and the number of the acks that were given for items in them.
struct AckTestStreams {
    node: RoutingTestNode,
    wide: PeerQueue,
    narrow: PeerQueue,
    given: Arc<AtomicUsize>,
}

impl AckTestStreams {
    fn new() -> Self {
        let narrow = PeerQueue::new(QueueBounds { bytes: 1024, items: 1 });
        let given = Arc::new(AtomicUsize::new(0));
        Self { node: RoutingTestNode::new(), wide: PeerQueue::new(QueueBounds::default()), narrow, given }
    }

    fn ack_after(&self, acks: Vec<PeerAck>) {
        let given = Arc::clone(&self.given);
        self.node.routing.on_peer_acks(acks, move || {
            given.fetch_add(1, Ordering::Relaxed);
        });
    }

    /// Returns the time from `since` until an ack is given.
    async fn waited(&self, since: Instant) -> Duration {
        while self.given() == 0 {
            assert!(since.elapsed() < DEADLINE);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        since.elapsed()
    }

    fn given(&self) -> usize {
        self.given.load(Ordering::Relaxed)
    }
}

fn item() -> Bytes {
    Bytes::from_static(b"item")
}

/// Sends all waiting items of a queue, and confirms them at once.
fn confirm_all(queue: &PeerQueue) {
    let stream = queue.open(0);
    let mut last = 0;
    while let BatchPull::Batch(batch) = queue.pull(stream) {
        last = batch.sequence;
    }
    queue.confirm(last);
}

#[tokio::test]
async fn confirming_task_gives_all_acks_itself() {
    let streams = AckTestStreams::new();
    for _ in 0..ITEMS {
        streams.ack_after(vec![streams.wide.push(item(), None)]);
    }
    assert_eq!(streams.given(), 0);
    // More acks than a task may poll before it yields: all are given here, and none is left to another task.
    confirm_all(&streams.wide);
    assert_eq!(streams.given(), ITEMS);
}

#[tokio::test]
async fn an_ack_waits_for_all_its_peers() {
    let streams = AckTestStreams::new();
    streams.ack_after(vec![streams.narrow.push(item(), None), streams.wide.push(item(), None)]);
    confirm_all(&streams.wide);
    assert_eq!(streams.given(), 0);
    confirm_all(&streams.narrow);
    assert_eq!(streams.given(), 1);
}

#[tokio::test]
async fn ack_is_given_at_once_if_peer_confirmed_before() {
    let streams = AckTestStreams::new();
    let ack = streams.wide.push(item(), None);
    confirm_all(&streams.wide);
    streams.ack_after(vec![ack]);
    assert_eq!(streams.given(), 1);
}

#[tokio::test]
async fn push_that_loses_peer_acks_does_not_run_their_callbacks() {
    let streams = AckTestStreams::new();
    let channel = Arc::new(Mutex::new(0));
    let (seen, began) = (Arc::clone(&channel), Instant::now());
    streams.node.routing.on_peer_acks(vec![streams.narrow.push(item(), None)], move || *seen.lock() += 1);
    {
        let _held = channel.lock();
        assert!(streams.narrow.push(item(), None).is_lost(), "it holds no second one");
    }
    while *channel.lock() == 0 {
        assert!(began.elapsed() < DEADLINE);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_ack_waits_for_a_second_and_no_longer() {
    let streams = AckTestStreams::new();
    let began = Instant::now();
    streams.ack_after(vec![streams.wide.push(item(), None)]);
    let waited = streams.waited(began).await;
    assert!((SECOND..=SECOND + 2 * LATE_LOOK).contains(&waited), "{waited:?}");
    confirm_all(&streams.wide);
    assert_eq!(streams.given(), 1, "once");
}

#[tokio::test(start_paused = true)]
async fn ack_with_message_ids_waits_a_second_for_peer_acks() {
    let streams = AckTestStreams::new();
    let began = Instant::now();
    let given = Arc::clone(&streams.given);
    let done = move || {
        given.fetch_add(1, Ordering::Relaxed);
    };
    let (key, from) = (streams.node.key.clone(), ConnectionId::random());
    let published = PublishedMessages::new(key, 1, 1, from, None, "k".into(), Vec::new());
    streams.node.routing.on_peer_acks_and_ids(vec![streams.wide.push(item(), None)], &published, done);
    let waited = streams.waited(began).await;
    assert!((SECOND..=SECOND + LATE_LOOK).contains(&waited), "{waited:?}");
}

#[tokio::test]
async fn an_ack_that_panics_takes_no_other_with_it() {
    let streams = AckTestStreams::new();
    let panics = || panic!("as it should");
    streams.node.routing.on_peer_acks(vec![streams.wide.push(item(), None)], panics);
    streams.ack_after(vec![streams.wide.push(item(), None)]);
    confirm_all(&streams.wide);
    assert_eq!(streams.given(), 1);
    // Too late, both.
    streams.node.routing.on_peer_acks(vec![streams.narrow.push(item(), None)], panics);
    streams.ack_after(vec![streams.wide.push(item(), None)]);
    let began = Instant::now();
    while streams.given() == 1 {
        assert!(began.elapsed() < DEADLINE);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
