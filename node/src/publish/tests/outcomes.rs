use super::*;

#[test]
fn a_store_that_fails_leaves_the_outcome_unknown() {
    for error in [StoreError::Busy, StoreError::Failed("no disk".into())] {
        let node = PublishTestNode::new();
        *node.store.append_error.lock() = Some(error.clone());
        let outcome = node.outcome(node.request("a", vec![plain("1")]));
        assert_eq!(outcome, Err(PublishError::Unavailable), "{error}");
        assert_eq!(node.delivered().len(), 1, "live delivery does not depend on the store");
        assert_eq!(node.outcome(node.request("a", vec![given("x")])), Err(PublishError::Unavailable));
    }
}

#[test]
fn a_look_up_that_fails_publishes_nothing() {
    for (error, expected) in [
        (StoreError::Busy, PublishError::Busy),
        (StoreError::Failed("no disk".into()), PublishError::Unavailable),
    ] {
        let node = PublishTestNode::new();
        *node.store.find_error.lock() = Some(error);
        let outcome = node.outcome(node.request("a", vec![plain("1"), given("x")]));
        assert_eq!(outcome, Err(expected));
        assert!(node.delivered().is_empty());
        assert_eq!(node.store.take_calls(), [find(&["x"])]);
        *node.store.find_error.lock() = None;
        assert_eq!(node.acked("a", vec![given("x")]), [1], "nothing was numbered");
    }
}

#[test]
fn publish_to_full_store_is_refused_before_numbering() {
    let node = PublishTestNode::new();
    *node.store.full.lock() = true;
    for messages in [vec![plain("1")], vec![given("x")]] {
        assert_eq!(node.outcome(node.request("a", messages)), Err(PublishError::Busy));
    }
    assert_eq!(node.store.take_calls(), [], "not even looked up");
    assert_eq!(node.acked("off:a", vec![plain("1")]), [1], "nothing of it is to be stored");
    node.store.take_calls();
    node.delivered();
    node.target.deliveries.lock().clear();

    *node.store.full.lock() = false;
    *node.store.holds.lock() = true;
    let answered = node.begin(node.request("a", vec![plain("1"), given("x")]), false);
    *node.store.full.lock() = true;
    node.store.release();
    assert_eq!(one(&answered), Err(PublishError::Busy), "full by the time that the ids are known");
    assert_eq!(node.store.take_calls(), [find(&["x"])]);
    assert!(node.delivered().is_empty());
    *node.store.full.lock() = false;
    assert_eq!(node.acked("a", vec![given("x")]), [1], "nothing was numbered");
}

#[tokio::test]
async fn publish_to_congested_shards_is_refused_before_numbering() {
    let node = PublishTestNode::waiting(Duration::from_millis(50));
    node.target.congested.store(true, Ordering::SeqCst);
    let refused = node.publisher.publish_and_wait(node.request("a", vec![plain("1")])).await;
    assert_eq!(refused, Err(PublishError::Busy), "nothing of it is anywhere");
    assert_eq!(node.store.take_calls(), []);
    node.target.congested.store(false, Ordering::SeqCst);
    assert_eq!(node.acked("a", vec![plain("1")]), [1], "nothing was numbered");
}

#[test]
fn publish_that_failed_to_store_is_not_a_repeat() {
    let node = PublishTestNode::new();
    *node.store.append_error.lock() = Some(StoreError::Busy);
    assert_eq!(node.outcome(node.request("a", vec![given("x")])), Err(PublishError::Unavailable));
    *node.store.append_error.lock() = None;
    assert_eq!(node.acked("a", vec![given("x")]), [2]);
    assert_eq!(node.acked("a", vec![given("x")]), [2]);
}

#[test]
fn the_rules_of_the_channel_say_what_is_kept() {
    let cases = [("a", Some(72)), ("short:a", Some(24)), ("off:a", None)];
    for (channel, retention_hours) in cases {
        let node = PublishTestNode::new();
        assert_eq!(node.acked(channel, vec![plain("1")]), [1], "{channel}");
        assert_eq!(node.acked(channel, vec![given("x"), given("x")]), [2, 2], "{channel}");
        assert_eq!(node.acked(channel, vec![given("x")]), [2], "{channel}: ids hold with history off too");
        let expected =
            [append(&[1], retention_hours), find(&["x"]), append(&[2], retention_hours), find(&["x"])];
        assert_eq!(node.store.take_calls(), expected, "{channel}");
        assert_eq!(node.delivered().len(), 2, "{channel}");
    }
}

#[test]
fn a_refused_draft_refuses_all_and_numbers_nothing() {
    let long = |bytes: usize| Draft { name: Some("n".repeat(bytes).into()), ..Draft::default() };
    let data = |bytes: usize| plain(&format!("\"{}\"", "d".repeat(bytes - 2)));
    let too_large = DraftError::TooLarge { bytes: 65_537, bytes_max: 65_536 };
    let cases: [(&str, Vec<Draft>, Option<DraftError>); 5] = [
        ("no message", vec![], None),
        ("a long id", vec![plain("1"), given(&"i".repeat(129))], None),
        ("an empty id", vec![given("x"), given("")], None),
        ("a long name", vec![long(257)], None),
        ("too large", vec![plain("1"), data(65_537)], Some(too_large)),
    ];
    let node = PublishTestNode::new();
    for (case, messages, expected) in cases {
        for queued in [false, true] {
            let outcome = one(&node.begin(node.request("a", messages.clone()), queued));
            match (&outcome, &expected) {
                (Err(PublishError::Draft(error)), Some(expected)) => assert_eq!(error, expected, "{case}"),
                (Err(PublishError::Draft(DraftError::Name { .. } | DraftError::Bad(_))), None) => {}
                _ => panic!("{case}: {outcome:?}"),
            }
        }
    }
    assert_eq!((node.store.take_calls(), node.delivered()), (vec![], vec![]));
    let at_the_limits = vec![given(&"i".repeat(128)), long(256), data(65_536)];
    assert_eq!(node.acked("a", at_the_limits), [1, 2, 3], "nothing was numbered before");
}

#[test]
fn the_client_id_counts_in_the_size() {
    let node = PublishTestNode::new();
    let draft = || plain(&format!("\"{}\"", "d".repeat(65_536 - 2)));
    assert_eq!(node.acked("a", vec![draft()]), [1]);
    let mut request = node.request("a", vec![draft()]);
    request.client_id = Some(ClientId::of("a"));
    let error = DraftError::TooLarge { bytes: 65_539, bytes_max: 65_536 };
    assert_eq!(node.outcome(request), Err(PublishError::Draft(error)));
}

#[test]
fn a_publish_without_subscribers_is_stored_all_the_same() {
    let node = PublishTestNode::new();
    let request = node.request("a", vec![plain("1")]);
    let (channel, _) = node.hub.attach(&request.key, 0);
    node.hub.detach(&channel, 0);
    assert_eq!(sequences(node.outcome(request)), [1]);
    assert_eq!(node.store.take_calls(), [append(&[1], Some(72))]);
    assert!(node.delivered().is_empty());
}

/// The ack waits for both at the same time, so two slow ones take as long as the slower one.
#[test]
fn ack_waits_for_the_store_and_peer_acks_in_parallel() {
    let begin = || {
        let (answered, confirmed) = (Arc::new(Mutex::new(Vec::new())), Mutex::new(None));
        let answers = Arc::clone(&answered);
        let done: StoreCallback = Box::new(move |result| answers.lock().push(result));
        let stored = after_both(done, |when_confirmed| *confirmed.lock() = Some(when_confirmed));
        let confirmed =
            confirmed.into_inner().expect("receipts are waited for before the store has answered");
        (answered, stored, confirmed)
    };
    let (answered, stored, confirmed) = begin();
    stored(Ok(()));
    assert_eq!(*answered.lock(), []);
    confirmed(Ok(()));
    assert_eq!(*answered.lock(), [Ok(())]);
    let (answered, stored, confirmed) = begin();
    confirmed(Ok(()));
    assert_eq!(*answered.lock(), []);
    stored(Ok(()));
    assert_eq!(*answered.lock(), [Ok(())]);
    let (answered, stored, confirmed) = begin();
    stored(Err(StoreError::Busy));
    assert_eq!(*answered.lock(), [Err(StoreError::Busy)], "no receipt makes it stored");
    confirmed(Ok(()));
    assert_eq!(answered.lock().len(), 1);
}
