//! Targets that have reached their bounds.

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn full_target_loses_its_oldest_events_to_the_dead_letters() {
    let folder = tempfile::tempdir().expect("a folder");
    let limits = Limits { integration_bytes: 1_000, integration_dead_bytes: 1_000, ..Limits::default() };
    let receiver = Arc::new(OutboxTestReceiver::default());
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &limits);
    node.put("a", 0..5).await;
    node.stop().await;
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &limits);
    node.put("a", 5..50).await;
    let depth = node.depth();
    assert!(depth.bytes <= 1_000 && depth.events >= 5, "{depth:?}");
    assert!(depth.dead_bytes <= 1_100 && depth.dead_events >= 5, "{depth:?}");
    let node = node.begin();
    node.until_empty().await;
    let received = receiver.numbers("a");
    assert_eq!(received, (50 - received.len() as u64..50).collect::<Vec<_>>());
    assert_eq!(received.len() as u64, depth.events);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn event_is_delivered_or_a_dead_letter_but_not_both() {
    let folder = tempfile::tempdir().expect("a folder");
    let limits = Limits { integration_bytes: 1_000, ..Limits::default() };
    let receiver = Arc::new(OutboxTestReceiver::default());
    let held = Arc::clone(&receiver.hold).lock_owned().await;
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 1", &limits).begin();
    node.put("a", 0..1).await;
    node.until("an attempt", || !receiver.received.lock().is_empty()).await;
    node.put("a", 1..50).await;
    assert!(node.depth().dead_events > 10, "{:?}", node.depth());
    drop(held);
    node.until_empty().await;
    let received = receiver.numbers("a");
    assert_eq!(received[0], 0, "it was under way when the target was full");
    let first = 51 - received.len() as u64;
    assert_eq!(received[1..], (first..50).collect::<Vec<_>>());
    assert_eq!(node.depth().dead_events, 50 - received.len() as u64);
    node.stop().await;
}
