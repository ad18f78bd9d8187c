//! Upkeep over a fake management API that holds only queues and policies.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::*;
use crate::origin::history::HistoryStore;
use crate::origin::targets::{AmqpBrokers, client_tls};
use crate::testing::FakeStore;

const STORE_WAIT: Duration = Duration::from_secs(5);

/// All objects, by path.
#[derive(Clone, Default)]
struct FakeManagement(Arc<Mutex<BTreeMap<String, Value>>>);

impl FakeManagement {
    fn names(&self, kind: &str) -> Vec<String> {
        let things = self.0.lock();
        let of_kind = things.iter().filter(|(path, _)| path.starts_with(&format!("/api/{kind}/")));
        of_kind.map(|(_, thing)| thing["name"].as_str().expect("a name").to_owned()).collect()
    }

    fn add(&self, path: &str, thing: Value) {
        self.0.lock().insert(path.to_owned(), thing);
    }

    fn remove(&self, kind: &str, name: &str) {
        let mut things = self.0.lock();
        things.retain(|path, thing| !(path.starts_with(&format!("/api/{kind}/")) && thing["name"] == name));
    }

    fn max_length(&self) -> Option<u64> {
        let things = self.0.lock();
        things.values().find_map(|thing| thing["definition"]["max-length"].as_u64())
    }
}

async fn answer(
    State(things): State<FakeManagement>,
    method: Method,
    uri: Uri,
    body: Bytes,
) -> (StatusCode, String) {
    let path = uri.path().to_owned();
    let mut things = things.0.lock();
    if things.contains_key(&format!("/fails{path}")) {
        return (StatusCode::INTERNAL_SERVER_ERROR, String::new());
    }
    match method {
        Method::PUT => {
            let mut thing: Value = serde_json::from_slice(&body).expect("JSON");
            let (_, name) = path.rsplit_once('/').expect("a name");
            thing["name"] = fanfare_proto::path::decode(name).expect("a name").into();
            things.insert(path, thing);
            (StatusCode::NO_CONTENT, String::new())
        }
        Method::DELETE => {
            things.remove(&path);
            (StatusCode::NO_CONTENT, String::new())
        }
        _ => {
            let listed: Vec<_> = things
                .iter()
                .filter(|(of, _)| of.starts_with(&format!("{path}/")))
                .map(|(_, thing)| thing)
                .collect();
            (StatusCode::OK, json!(listed).to_string())
        }
    }
}

/// One row, which a test can make unavailable for reads and writes.
#[derive(Default)]
struct FakeQueueRows {
    row: Mutex<Option<StoredQueues>>,
    fails: AtomicBool,
}

impl FakeStore for Arc<FakeQueueRows> {
    fn queues(&self, known: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(StoreError::Busy);
        }
        let row = self.row.lock().clone();
        Ok(row.into_iter().filter(|row| known.get(&row.account) != Some(&row.revision)).collect())
    }

    fn put_queues(&self, row: StoredQueues) -> Result<bool, StoreError> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(StoreError::Busy);
        }
        let mut stored = self.row.lock();
        let is_next = stored.as_ref().map_or(0, |stored| stored.revision) + 1 == row.revision;
        if is_next {
            *stored = Some(row);
        }
        Ok(is_next)
    }
}

/// A broker and a store that nodes share; no node notifies another.
struct SharedTestBroker {
    things: FakeManagement,
    rows: Arc<FakeQueueRows>,
    management: url::Url,
    _serving: JoinSet<()>,
}

impl SharedTestBroker {
    async fn start() -> Self {
        let things = FakeManagement::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let management = format!("http://u:p@{}", listener.local_addr().expect("bound"));
        let router = Router::new().fallback(answer).with_state(things.clone());
        let mut serving = JoinSet::new();
        serving.spawn(async move { drop(axum::serve(listener, router).await) });
        Self {
            things,
            rows: Arc::default(),
            management: management.parse().expect("a URL"),
            _serving: serving,
        }
    }

    async fn node(&self) -> Queues {
        let accounts = Arc::new(Accounts::from_text(DIRECTORY).expect("a directory"));
        let amqp = crate::model::AmqpUrl::parse("amqp://u:p@127.0.0.1:1/%2f").expect("an address");
        let addresses = BrokerAddresses { amqp, management: self.management.clone() };
        let brokers = AmqpBrokers::new(&"n".into());
        let tls = client_tls().expect("TLS");
        let client =
            reqwest::Client::builder().use_preconfigured_tls(tls).no_proxy().build().expect("a client");
        let broker = Some((&addresses, &brokers, client));
        let store: Arc<dyn HistoryStore> = Arc::new(Arc::clone(&self.rows));
        Queues::open(broker, &store, &accounts, STORE_WAIT).await.expect("opened")
    }
}

async fn put(node: &Queues, name: &str, max_length: Option<u64>) -> String {
    try_put(node, name, max_length).await.expect("made")
}

async fn try_put(node: &Queues, name: &str, max_length: Option<u64>) -> Result<String, QueueError> {
    let edit = QueueEdit { max_length: Some(max_length), enabled: None };
    let request = QueueRequest { edit, ..request(name) };
    let accounts = Accounts::from_text(DIRECTORY).expect("a directory").current();
    let acme = accounts.account(&account()).expect("an account");
    Ok(node.put(acme, &everything(), request).await?.queue.id)
}

#[tokio::test]
async fn missing_and_changed_things_are_put_back() {
    let shared = SharedTestBroker::start().await;
    let node = shared.node().await;
    node.inner.keep_up().await.expect("without a queue there is nothing to do");
    put(&node, "q.1", Some(7)).await;
    put(&node, "free", None).await;
    let whole = shared.things.0.lock().clone();
    assert_eq!(whole.len(), 6, "two queues with those of their dead letters, and two policies: {whole:?}");
    for (kind, name) in [
        ("queues", "acme:q.1"),
        ("queues", "acme:q.1:dead"),
        ("queues", "acme:free"),
        ("policies", "fanfare acme:q.1"),
        ("policies", "fanfare-dead-letters"),
    ] {
        shared.things.remove(kind, name);
        node.inner.keep_up().await.expect("kept up");
        assert_eq!(*shared.things.0.lock(), whole, "{kind} {name}");
    }
    let set = |field: &str, value: Value| {
        let mut things = shared.things.0.lock();
        let policy = things.values_mut().find(|thing| thing["name"] == "fanfare acme:q.1");
        policy.expect("a policy")[field] = value;
    };
    for (field, value) in [
        ("definition", json!({"max-length": 8, "overflow": "drop-head"})),
        ("pattern", json!("x")),
        ("priority", json!(1)),
    ] {
        set(field, value);
        node.inner.keep_up().await.expect("kept up");
        assert_eq!(*shared.things.0.lock(), whole, "{field}");
    }
    let left_over = json!({"name": "fanfare acme:free", "pattern": "x", "definition": {}, "apply-to": "queues", "priority": 10});
    shared.things.0.lock().insert("/api/policies/%2F/fanfare%20acme%3Afree".to_owned(), left_over);
    shared.things.0.lock().insert("/api/queues/%2F/other".to_owned(), json!({"name": "other"}));
    node.inner.keep_up().await.expect("kept up");
    assert_eq!(shared.things.names("policies"), ["fanfare acme:q.1", "fanfare-dead-letters"]);
    assert!(shared.things.names("queues").contains(&"other".to_owned()), "it is no queue of an account");
}

#[tokio::test]
async fn bound_that_another_node_has_set_is_not_undone() {
    let shared = SharedTestBroker::start().await;
    let [one, other] = [shared.node().await, shared.node().await];
    let id = put(&one, "q", Some(7)).await;
    other.refresh().await.expect("read");
    let edit = QueueEdit { max_length: Some(Some(8)), enabled: None };
    one.edit(&account(), &everything(), &id, edit).await.expect("edited");
    other.refresh().await.expect("read");
    other.inner.keep_up().await.expect("kept up");
    assert_eq!(shared.things.max_length(), Some(8));
}

#[tokio::test]
async fn queue_deleted_by_another_node_is_not_recreated_on_broker() {
    let shared = SharedTestBroker::start().await;
    let [one, other] = [shared.node().await, shared.node().await];
    let id = put(&one, "q", Some(7)).await;
    other.refresh().await.expect("read");
    one.delete(&account(), &everything(), &id).await.expect("deleted");
    assert_eq!(shared.things.names("queues"), [""; 0]);
    // The other node does not know of the deletion yet.
    let queue = BrokerQueue::unbound("acme:q".into());
    assert_eq!(other.inner.recreate(&queue).await, Ok(false));
    assert_eq!(shared.things.names("queues"), [""; 0]);
    assert_eq!(shared.things.names("policies"), ["fanfare-dead-letters"]);
    assert_eq!(other.inner.recreate(&queue).await, Ok(false), "it knows now");
    assert_eq!(shared.things.names("queues"), [""; 0]);
}

#[tokio::test]
async fn recreated_queue_is_checked_until_the_store_answers() {
    let shared = SharedTestBroker::start().await;
    let [one, other] = [shared.node().await, shared.node().await];
    let id = put(&one, "q", None).await;
    other.refresh().await.expect("read");
    one.delete(&account(), &everything(), &id).await.expect("deleted");
    shared.rows.fails.store(true, Ordering::SeqCst);
    let queue = BrokerQueue::unbound("acme:q".into());
    other.inner.recreate(&queue).await.expect_err("the store does not answer");
    other.inner.keep_up().await.expect_err("the store does not answer");
    assert_eq!(shared.things.names("queues"), ["acme:q", "acme:q:dead"], "it may be there rightly");
    shared.rows.fails.store(false, Ordering::SeqCst);
    other.inner.keep_up().await.expect("kept up");
    assert_eq!(shared.things.names("queues"), [""; 0]);
    let again = put(&one, "q", None).await;
    assert_ne!(again, id);
    other.inner.keep_up().await.expect("kept up");
    assert_eq!(shared.things.names("queues"), ["acme:q", "acme:q:dead"]);
}

#[tokio::test]
async fn queue_that_was_there_outlasts_a_call_that_fails() {
    let shared = SharedTestBroker::start().await;
    let node = shared.node().await;
    for (path, name) in [("acme%3Aq", "acme:q"), ("acme%3Aq%3Adead", "acme:q:dead")] {
        shared.things.add(&format!("/api/queues/%2F/{path}"), json!({"name": name}));
    }
    shared.rows.fails.store(true, Ordering::SeqCst);
    try_put(&node, "q", Some(7)).await.expect_err("the store does not answer");
    shared.rows.fails.store(false, Ordering::SeqCst);
    for _ in 0..2 {
        node.inner.keep_up().await.expect("kept up");
    }
    assert_eq!(shared.things.names("queues"), ["acme:q", "acme:q:dead"]);
    try_put(&node, "q", Some(7)).await.expect("it is a queue of the account now");
}

#[tokio::test]
async fn round_begins_behind_queues_that_failed() {
    let shared = SharedTestBroker::start().await;
    let node = shared.node().await;
    for number in 0..10 {
        put(&node, &format!("q{number}"), None).await;
    }
    for number in 0..8 {
        shared.things.add(&format!("/fails/api/queues/%2F/acme%3Aq{number}"), json!({}));
    }
    for number in 0..10 {
        shared.things.remove("queues", &format!("acme:q{number}"));
    }
    let has_last = || shared.things.names("queues").contains(&"acme:q9".to_owned());
    node.inner.keep_up().await.expect_err("eight queues fail");
    assert!(!has_last());
    node.inner.keep_up().await.expect_err("eight queues fail");
    assert!(has_last());
}

#[tokio::test]
async fn stray_queue_named_like_one_of_an_account_stays() {
    let shared = SharedTestBroker::start().await;
    let node = shared.node().await;
    put(&node, "q", None).await;
    for name in ["acme:own", "acme:own:dead", "acme:lone", "none:q", "none:q:dead"] {
        shared.things.add(&format!("/api/queues/%2F/{name}"), json!({"name": name}));
    }
    let before = shared.things.names("queues");
    let recorder = metrics_exporter_prometheus::PrometheusBuilder::new().build_recorder();
    for strays in [0, 1] {
        let _recorded = metrics::set_default_local_recorder(&recorder);
        node.inner.keep_up().await.expect("kept up");
        let text = recorder.handle().render();
        assert!(text.contains(&format!("fanfare_queue_strays {strays}\n")), "{text}");
    }
    assert_eq!(shared.things.names("queues"), before);
}

#[tokio::test]
async fn consumers_with_a_removed_key_lose_their_connection() {
    let shared = SharedTestBroker::start().await;
    let node = shared.node().await;
    put(&node, "q", None).await;
    shared.things.add("/api/users/guest", json!({"name": "guest"}));
    for (user, queue) in [
        ("all", "acme:q"),
        ("revoked", "acme:q"),
        ("gone", "acme:q"),
        ("gone-too", "acme:q:dead"),
        ("guest", "acme:q"),
        ("of.another.backend", "acme:q"),
        ("reader", "mine"),
    ] {
        let details = json!({"connection_name": user, "user": user});
        let consumer = json!({"queue": {"name": queue}, "channel_details": details});
        shared.things.add(&format!("/api/consumers/%2F/{user}"), consumer);
        shared.things.add(&format!("/api/connections/{user}"), json!({"name": user}));
    }
    node.inner.close_forbidden(&mut SeenKeys::default()).await.expect("looked at");
    assert_eq!(shared.things.names("connections"), ["all", "guest", "of.another.backend", "reader"]);
}

#[tokio::test]
async fn amqp_port_as_management_address_is_reported() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://u:p@{}", listener.local_addr().expect("bound"));
    let mut serving = JoinSet::new();
    serving.spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
            let _ = socket.read(&mut [0; 8]).await;
            // RabbitMQ's response to a protocol other than AMQP.
            let _ = socket.write_all(b"AMQP\0\0\x09\x01").await;
        }
    });
    let shared =
        SharedTestBroker { management: url.parse().expect("a URL"), ..SharedTestBroker::start().await };
    let error = try_put(&shared.node().await, "q", None).await.expect_err("it is no management API");
    let text = error.to_string();
    assert!(text.contains("--amqp-management-url must name the management API"), "{text}");
    assert!(!text.contains("u:p"), "{text}");
}
