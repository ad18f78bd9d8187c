use fanfare_proto::outbox::{EventState, Retried};

use super::*;

fn rejected() -> DeliveryOutcome {
    DeliveryOutcome::Rejected { reason: "400".to_owned() }
}

fn orders() -> TargetId {
    TargetId::new(&AccountId::new("acme"), "orders")
}

async fn events(node: &OutboxTestNode, state: EventState, limit: usize) -> Vec<(u64, String)> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let query = EventQuery { state, after, limit };
        let page = node.outbox.events(&orders(), query).await.expect("readable");
        assert!(page.events.len() <= limit);
        found.extend(page.events.iter().map(|event| (event.event, event.item.get().to_owned())));
        let Some(next) = page.next else { return found };
        after = Some(EventQuery::cursor(&next).expect("a cursor"));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_are_shown_and_sent_again_behind_the_rest() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([rejected(), rejected()]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 2", &Limits::default());
    node.put("a", 0..2).await;
    let node = node.begin();
    node.until("dead letters", || node.depth().dead_events == 2).await;
    node.put("b", 2..3).await;
    node.until("a further one", || node.depth().dead_events == 3).await;
    let dead = events(&node, EventState::Dead, 2).await;
    assert_eq!(
        dead.iter().map(|(_, item)| &**item).collect::<Vec<_>>(),
        [r#"{"n":0}"#, r#"{"n":1}"#, r#"{"n":2}"#]
    );
    let targets = node.outbox.targets().await;
    let state = &targets[0];
    assert_eq!((state.target.as_str(), state.kind.as_deref()), ("acme/orders", Some("webhook")));
    assert_eq!((state.dead_events, state.waiting_events, state.disabled), (3, 0, false));
    // An attempt is under way; its repetition has the same events.
    receiver.answers.lock().push_back(retry());
    node.put("a", 3..4).await;
    node.until("an attempt", || receiver.of("a").len() == 2).await;
    let one = vec![dead[1].0];
    assert_eq!(node.outbox.retry(&orders(), Some(one.clone())).await, Ok(Retried { events: 1, left: 2 }));
    assert_eq!(node.outbox.retry(&orders(), Some(one)).await, Ok(Retried { events: 0, left: 2 }));
    assert_eq!(node.outbox.retry(&orders(), None).await, Ok(Retried { events: 2, left: 0 }));
    node.until_empty().await;
    let of_a: Vec<_> = receiver.of("a").into_iter().skip(1).map(|(_, numbers)| numbers).collect();
    assert_eq!(of_a, [vec![3], vec![3], vec![1, 0]]);
    assert_eq!(receiver.of("b")[1].1, [2]);
    assert_eq!(node.outbox.targets().await, []);
    assert!(node.outbox.engine.tables.events.keyspace().is_empty().expect("readable"), "all is forgotten");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_enables_a_gone_target_and_outlasts_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([DeliveryOutcome::Gone]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default()).begin();
    node.put("a", 0..1).await;
    node.until("a dead letter", || node.depth().dead_events == 1).await;
    node.stop().await;
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    assert!(node.outbox.targets().await[0].disabled);
    assert_eq!(node.outbox.retry(&orders(), None).await, Ok(Retried { events: 1, left: 0 }));
    assert_eq!(events(&node, EventState::Waiting, 1).await.len(), 1);
    assert_eq!(events(&node, EventState::Dead, 1).await, []);
    node.stop().await;
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    assert!(!node.outbox.targets().await[0].disabled);
    let node = node.begin();
    node.until_empty().await;
    assert_eq!(receiver.numbers("a"), [0, 0]);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn retry_stops_where_the_outbox_is_half_full() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering((0..3_000).map(|_| rejected()));
    let limits = Limits { integration_bytes: 100_000, ..Limits::default() };
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 100", &limits).begin();
    node.put("a", 0..1_500).await;
    node.until("dead letters", || node.depth().dead_events == 1_500).await;
    node.stop().await;
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &limits);
    let Ok(Retried { events, left }) = node.outbox.retry(&orders(), None).await else {
        unreachable!("the disk takes them")
    };
    assert!(events >= 500 && left >= 500 && events + left == 1_500, "{events} {left}");
    node.stop().await;
}
