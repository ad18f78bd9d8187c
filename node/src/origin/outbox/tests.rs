mod full;
mod operator;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::*;
use crate::accounts::Accounts;
use crate::model::ChannelName;

const SOON: Duration = Duration::from_secs(10);
const HOUR_MS: u64 = 3_600_000;

/// A target that records its deliveries and gives scripted answers.
#[derive(Default)]
struct OutboxTestReceiver {
    received: Mutex<Vec<TargetDelivery>>,
    /// Answers to the next attempts; further ones are answered `Delivered`.
    answers: Mutex<VecDeque<DeliveryOutcome>>,
    /// Lock that delays the end of every attempt.
    hold: Arc<tokio::sync::Mutex<()>>,
}

impl TargetTransport for OutboxTestReceiver {
    fn send<'a>(
        &'a self,
        _: &'a TargetEndpoint,
        delivery: &'a TargetDelivery,
    ) -> BoxFuture<'a, DeliveryOutcome> {
        self.received.lock().push(delivery.clone());
        let outcome = self.answers.lock().pop_front().unwrap_or(DeliveryOutcome::Delivered);
        Box::pin(async {
            drop(self.hold.lock().await);
            outcome
        })
    }
}

impl OutboxTestReceiver {
    fn answering(outcomes: impl IntoIterator<Item = DeliveryOutcome>) -> Arc<Self> {
        Arc::new(Self { answers: Mutex::new(outcomes.into_iter().collect()), ..Self::default() })
    }

    /// Batches of one channel as received: the event id, and the numbers.
    fn of(&self, channel: &str) -> Vec<(Box<str>, Vec<u64>)> {
        let received = self.received.lock();
        let of_channel = received.iter().filter(|delivery| &*delivery.channel == channel);
        let numbers = |delivery: &TargetDelivery| {
            let body: serde_json::Value = serde_json::from_slice(&delivery.body).expect("JSON");
            let items = body["items"].as_array().expect("items");
            items.iter().map(|item| item["n"].as_u64().expect("a number")).collect()
        };
        of_channel.map(|delivery| (delivery.event_id.clone(), numbers(delivery))).collect()
    }

    fn numbers(&self, channel: &str) -> Vec<u64> {
        self.of(channel).into_iter().flat_map(|(_, numbers)| numbers).collect()
    }
}

/// One account with two targets; the second one is for presence only.
fn accounts(settings: &str) -> Arc<Accounts> {
    let text = format!(
        r#"
        [[tenants]]
        id = "acme"
        [[tenants.accounts]]
        id = "acme"
        [[tenants.accounts.integrations]]
        id = "orders"
        kind = "webhook"
        events = ["message"]
        url = "https://example.com/hook"
        secret = "hush"
        {settings}
        [[tenants.accounts.integrations]]
        id = "people"
        kind = "webhook"
        channels = ["chat:*"]
        events = ["presence"]
        url = "https://example.com/people"
        secret = "hush"
        "#
    );
    Accounts::from_text(&text).expect("a directory")
}

struct OutboxTestNode {
    outbox: EventOutbox,
    tasks: Arc<Tasks>,
    clock: Clock,
}

impl OutboxTestNode {
    fn start(folder: &Path, receiver: &Arc<OutboxTestReceiver>, settings: &str, limits: &Limits) -> Self {
        let clock = Clock::manual(1_000 * HOUR_MS);
        let (accounts, transport) = (accounts(settings), Arc::clone(receiver) as Arc<dyn TargetTransport>);
        let outbox = EventOutbox::open(
            folder,
            limits,
            &clock,
            &"n1".into(),
            (&accounts, Some(QueueCatalog::default())),
            transport,
        )
        .expect("opened");
        let tasks = Arc::new(Tasks::new(Handle::current()));
        Self { outbox, tasks, clock }
    }

    fn begin(self) -> Self {
        self.outbox.begin(&self.tasks);
        self
    }

    /// Writes these numbers, each as an event of its own.
    async fn put(&self, channel: &str, numbers: impl IntoIterator<Item = u64>) {
        let account =
            Arc::clone(self.outbox.engine.accounts.current().accounts().next().expect("an account"));
        let name = ChannelName::new(channel, &Limits::default()).expect("a name");
        let key = ChannelKey::new(account.id.clone(), name);
        let targets = self.outbox.routes(&account, &key, EventSource::Message).of(None);
        for number in numbers {
            let record = format!(r#"{{"n":{number}}}"#).into_bytes();
            let event = self.outbox.event(&key, EventSource::Message, targets.clone(), record);
            let (done, is_done) = oneshot::channel();
            let done: StoreCallback = Box::new(move |result| drop(done.send(result)));
            self.outbox.put(vec![event], done);
            assert_eq!(is_done.await, Ok(Ok(())));
        }
    }

    fn depth(&self) -> TargetDepth {
        self.outbox.engine.depths.of(&TargetId::new(&AccountId::new("acme"), "orders"))
    }

    async fn until(&self, what: &str, is_so: impl Fn() -> bool) {
        let waited = async {
            while !is_so() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        assert!(timeout(SOON, waited).await.is_ok(), "{what}: {:?}", self.depth());
    }

    async fn until_empty(&self) {
        self.until("all is sent", || self.depth().events == 0).await;
    }

    async fn stop(self) {
        self.tasks.stop(Duration::from_secs(1)).await;
        self.outbox.shutdown();
    }
}

fn retry() -> DeliveryOutcome {
    DeliveryOutcome::Retry { reason: "500".to_owned(), after: None }
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_channel_come_in_order_and_in_batches() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = Arc::new(OutboxTestReceiver::default());
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 10", &Limits::default());
    for channel in ["a", "b", "#", "a.b"] {
        node.put(channel, 0..25).await;
    }
    let node = node.begin();
    node.until_empty().await;
    for channel in ["a", "b", "#", "a.b"] {
        let batches: Vec<_> = receiver.of(channel).into_iter().map(|(_, numbers)| numbers.len()).collect();
        assert_eq!(batches, [10, 10, 5], "{channel}");
        assert_eq!(receiver.numbers(channel), (0..25).collect::<Vec<_>>(), "{channel}");
    }
    node.put("a", 25..27).await;
    node.until_empty().await;
    assert_eq!(receiver.numbers("a"), (0..27).collect::<Vec<_>>());
    let one = receiver.received.lock()[0].clone();
    assert_eq!((one.account_id.as_str(), &*one.rule_id, one.source), ("acme", "orders", "channel.message"));
    assert!(node.outbox.engine.tables.event(0).expect("readable").is_none(), "it is forgotten");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_of_a_batch_has_its_bytes_and_id() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([retry(), retry()]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    node.put("a", 0..3).await;
    let node = node.begin();
    node.until("an attempt", || !receiver.received.lock().is_empty()).await;
    node.put("a", 3..5).await;
    node.until_empty().await;
    let received = receiver.received.lock().clone();
    assert_eq!(received.len(), 4);
    for attempt in &received[1..3] {
        assert_eq!((&attempt.event_id, &attempt.body), (&received[0].event_id, &received[0].body));
    }
    assert_ne!(received[3].event_id, received[0].event_id);
    assert_eq!(receiver.of("a")[3].1, [3, 4]);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_goes_on_with_the_batch_that_was_sent() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([retry()]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    node.put("a", 0..3).await;
    let node = node.begin();
    node.until("an attempt", || !receiver.received.lock().is_empty()).await;
    node.stop().await;

    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    assert_eq!(node.depth().events, 3);
    node.put("a", 3..5).await;
    let node = node.begin();
    node.until_empty().await;
    let received = receiver.received.lock().clone();
    assert_eq!(received.len(), 3);
    assert_eq!((&received[1].event_id, &received[1].body), (&received[0].event_id, &received[0].body));
    assert_eq!(receiver.of("a")[2].1, [3, 4]);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_events_become_dead_letters_and_others_go_on() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([DeliveryOutcome::Rejected { reason: "400".to_owned() }]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 2", &Limits::default());
    node.put("a", 0..4).await;
    let node = node.begin();
    node.until_empty().await;
    assert_eq!(receiver.numbers("a"), [0, 1, 2, 3]);
    assert_eq!((node.depth().events, node.depth().dead_events), (0, 2));
    node.stop().await;
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    assert_eq!(node.depth().dead_events, 2, "over a restart");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_retried_until_its_time_is_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering((0..100).map(|_| retry()));
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    node.put("a", 0..1).await;
    let node = node.begin();
    node.until("a second attempt", || receiver.received.lock().len() == 2).await;
    assert_eq!(node.depth().dead_events, 0);
    node.clock.pass_to(1_025 * HOUR_MS);
    node.until("a dead letter", || node.depth().dead_events == 1).await;
    assert!((2..=3).contains(&receiver.received.lock().len()));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gone_target_is_disabled_until_its_settings_change() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([DeliveryOutcome::Gone]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 1", &Limits::default());
    node.put("a", 0..3).await;
    let node = node.begin();
    node.until("dead letters", || node.depth().dead_events == 3).await;
    assert_eq!(receiver.received.lock().len(), 1);
    node.put("a", 3..4).await;
    assert_eq!(node.depth().events, 0, "nothing is owed to it");
    node.stop().await;

    let node =
        OutboxTestNode::start(folder.path(), &receiver, "batch_events = 1", &Limits::default()).begin();
    node.put("a", 4..5).await;
    assert_eq!(node.depth().events, 0, "over a restart");
    node.stop().await;

    let node =
        OutboxTestNode::start(folder.path(), &receiver, "batch_events = 2", &Limits::default()).begin();
    node.put("a", 5..6).await;
    node.until_empty().await;
    assert_eq!(receiver.numbers("a"), [0, 5]);
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_waits_for_its_linger() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = Arc::new(OutboxTestReceiver::default());
    let node = OutboxTestNode::start(
        folder.path(),
        &receiver,
        "linger_ms = 60000\nbatch_events = 3",
        &Limits::default(),
    );
    let node = node.begin();
    node.put("a", 0..3).await;
    node.until_empty().await;
    assert_eq!(receiver.of("a")[0].1, [0, 1, 2], "a full batch does not wait");
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn single_events_keep_their_order_and_ids_without_a_row() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([retry(), DeliveryOutcome::Delivered, retry()]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 1", &Limits::default());
    node.put("a", 0..600).await;
    let node = node.begin();
    node.put("a", 600..700).await;
    node.until_empty().await;
    let received = receiver.of("a");
    let mut once = received.clone();
    once.dedup();
    assert_eq!((received.len(), once.len()), (702, 700), "an attempt that failed has the same id");
    assert!(once.iter().map(|(_, numbers)| numbers[0]).eq(0..700));
    assert!(node.outbox.engine.tables.batches.keyspace().is_empty().expect("readable"));
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_under_way_outlives_other_settings() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([retry(), retry()]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 3", &Limits::default());
    node.put("a", 0..5).await;
    let node = node.begin();
    node.until("an attempt", || !receiver.received.lock().is_empty()).await;
    node.stop().await;
    for settings in ["batch_events = 1", "batch_events = 3"] {
        let node = OutboxTestNode::start(folder.path(), &receiver, settings, &Limits::default()).begin();
        node.until_empty().await;
        node.put("a", 5..7).await;
        node.until_empty().await;
        node.stop().await;
    }
    let received = receiver.of("a");
    assert_eq!((&received[0], &received[1]), (&received[1], &received[2]), "the same batch");
    let numbers: Vec<_> = received.iter().skip(2).flat_map(|(_, numbers)| numbers.clone()).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4, 5, 6, 5, 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn single_event_that_failed_stays_alone_under_other_settings() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = OutboxTestReceiver::answering([retry(), retry()]);
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 1", &Limits::default());
    node.put("a", 0..3).await;
    let node = node.begin();
    let batches = node.outbox.engine.tables.batches.clone();
    node.until("a failure", || !batches.keyspace().is_empty().expect("readable")).await;
    node.stop().await;
    drop(batches);
    let node =
        OutboxTestNode::start(folder.path(), &receiver, "batch_events = 3", &Limits::default()).begin();
    node.until_empty().await;
    node.stop().await;
    let mut received = receiver.of("a");
    received.dedup();
    let numbers: Vec<_> = received.into_iter().map(|(_, numbers)| numbers).collect();
    assert_eq!(numbers, [vec![0], vec![1, 2]]);
}

#[tokio::test(flavor = "multi_thread")]
async fn row_that_outlived_its_events_fixes_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = Arc::new(OutboxTestReceiver::default());
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 3", &Limits::default());
    node.put("a", 0..1).await;
    let (target, fixed) =
        (node.outbox.depths()[0].0.clone(), FixedBatch { event_id: "evt_x".into(), last: 0 });
    let row = keys::channel(&target, "a");
    node.outbox.engine.tables.batches.keyspace().insert(&row, fixed.encode()).expect("written");
    node.outbox.engine.tables.waiting.keyspace().remove(keys::waiting(&target, "a", 0)).expect("written");
    node.put("a", 1..3).await;
    node.stop().await;
    let node =
        OutboxTestNode::start(folder.path(), &receiver, "batch_events = 3", &Limits::default()).begin();
    node.until("what waits", || receiver.numbers("a") == [1, 2]).await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_channels_are_all_sent() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = Arc::new(OutboxTestReceiver::default());
    let node = OutboxTestNode::start(folder.path(), &receiver, "", &Limits::default());
    let account = Arc::clone(node.outbox.engine.accounts.current().accounts().next().expect("an account"));
    let targets: Vec<Addressee> = vec![TargetId::new(&account.id, "orders").into()];
    const CHANNELS: u64 = 3_000;
    for number in 0..CHANNELS {
        let name = ChannelName::new(&format!("c{number}"), &Limits::default()).expect("a name");
        let key = ChannelKey::new(account.id.clone(), name);
        let event = node.outbox.event(&key, EventSource::Message, targets.clone(), b"{\"n\":1}".to_vec());
        node.outbox.put(vec![event], Box::new(|_| {}));
    }
    let node = node.begin();
    node.until("all is written", || {
        node.depth().events > 0 || receiver.received.lock().len() as u64 == CHANNELS
    })
    .await;
    node.until("all is sent", || receiver.received.lock().len() as u64 == CHANNELS).await;
    node.until_empty().await;
    node.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_sends_all_and_does_not_wait_for_a_target_that_fails() {
    let folder = tempfile::tempdir().expect("a folder");
    let receiver = Arc::new(OutboxTestReceiver::default());
    let node = OutboxTestNode::start(folder.path(), &receiver, "batch_events = 1", &Limits::default());
    node.put("a", 0..20).await;
    let node = node.begin();
    assert_eq!(node.outbox.drain(SOON).await, 0);
    assert_eq!(receiver.numbers("a").len(), 20);
    receiver.answers.lock().extend((0..100).map(|_| retry()));
    node.put("a", 20..25).await;
    let begun = std::time::Instant::now();
    assert_eq!(node.outbox.drain(6 * SOON).await, 5);
    assert!(begun.elapsed() < 3 * SOON, "{:?}", begun.elapsed());
    node.stop().await;
}
