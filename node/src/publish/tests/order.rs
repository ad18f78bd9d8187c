use super::*;

#[test]
fn publish_without_ids_delivers_at_once_and_acks_when_stored() {
    let node = PublishTestNode::new();
    *node.store.holds.lock() = true;
    let answered = node.begin(node.request("a", vec![plain("1"), plain("2")]), false);
    assert_eq!(node.delivered().len(), 2, "delivery does not wait for the store");
    assert!(answered.lock().is_empty(), "the ack does");
    assert_eq!(node.store.take_calls(), [append(&[1, 2], Some(72))], "nothing to look up");
    node.store.release();
    assert_eq!(sequences(one(&answered)), [1, 2]);
}

#[test]
fn queued_publish_waits_behind_earlier_id_lookup() {
    let node = PublishTestNode::new();
    *node.store.holds.lock() = true;
    let first = node.begin(node.request("a", vec![given("x")]), false);
    let second = node.begin(node.request("a", vec![plain("1")]), true);
    assert!(node.delivered().is_empty());
    assert_eq!(node.store.take_calls(), [find(&["x"]), find(&[])]);
    node.store.release();
    assert_eq!((sequences(one(&first)), sequences(one(&second))), (vec![1], vec![2]));
    assert_eq!(node.delivered()[0], "x");
}

#[test]
fn unqueued_publish_does_not_wait_for_earlier_id_lookup() {
    let node = PublishTestNode::new();
    *node.store.holds.lock() = true;
    let looked_up = node.begin(node.request("a", vec![given("x")]), false);
    let at_once = node.begin(node.request("a", vec![plain("1")]), false);
    assert_eq!(node.delivered().len(), 1);
    node.store.release();
    assert_eq!((sequences(one(&at_once)), sequences(one(&looked_up))), (vec![1], vec![2]));
}

#[test]
fn concurrent_publishes_are_stored_in_sequence_order() {
    let node = PublishTestNode::new();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let node = &node;
            scope.spawn(move || {
                for turn in 0..500 {
                    let id = format!("{thread}-{turn}");
                    let draft = if turn % 3 == 0 { given(&id) } else { plain("1") };
                    node.acked("a", vec![draft]);
                }
            });
        }
    });
    let appended: Vec<u64> = (node.store.take_calls().into_iter())
        .filter_map(|call| match call {
            PublishStoreCall::Append { sequences, .. } => Some(sequences),
            PublishStoreCall::Find(_) | PublishStoreCall::Presence { .. } => None,
        })
        .flatten()
        .collect();
    assert!(appended.into_iter().eq(1..=2_000));
    let deliveries = node.target.deliveries.lock();
    assert!(deliveries.iter().map(|delivery| delivery.offset()).eq(1..=2_000));
}

#[test]
fn a_look_up_that_comes_too_late_publishes_nothing() {
    let node = PublishTestNode::waiting(Duration::ZERO);
    assert_eq!(node.outcome(node.request("a", vec![given("x")])), Err(PublishError::Unavailable));
    assert_eq!(one(&node.begin(node.request("a", vec![plain("1")]), true)), Err(PublishError::Unavailable));
    assert_eq!(node.store.take_calls(), [find(&["x"]), find(&[])]);
    assert!(node.delivered().is_empty());
    assert_eq!(node.acked("a", vec![plain("1")]), [1]);
}
