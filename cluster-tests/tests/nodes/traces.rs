//! Traces of real nodes, as a collector receives them.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::collector::{Collector, Span};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::receiver::{Answer, Receiver};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
/// Greatest time of a node's stop, with a second for its spans, on a busy machine.
const STOP_MAX: Duration = Duration::from_secs(10);
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const CALLER: &str = "00f067aa0ba902b7";
/// Names of all attributes that a span may have. None of them holds a credential or the data of a message.
const KNOWN: [&str; 14] = [
    "error.type",
    "fanfare.peer",
    "fanfare.peers",
    "fanfare.retries",
    "fanfare.target",
    "fanfare.target.kind",
    "http.request.method",
    "http.response.status_code",
    "http.route",
    "messaging.batch.message_count",
    "messaging.destination.name",
    "messaging.system",
    "otel.scope.name",
    "otel.scope.version",
];

fn directory(receiver: Option<&Receiver>, more: &str) -> Directory {
    let account = Directory::default().account("acme");
    let with_target = match receiver {
        Some(receiver) => account.integration(
            "hook",
            &format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"hush\"\n{more}", receiver.url()),
        ),
        None => account,
    };
    with_target.key("k1", "secret", ALL)
}

async fn publish(node: &Node, path: &str, headers: &[(&str, &str)], body: Value) -> u16 {
    let authorization = http::basic(KEY);
    let mut all = vec![("authorization", authorization.as_str())];
    all.extend_from_slice(headers);
    http::request(node.addr(), "POST", path, &all, body.to_string()).await.status
}

fn parent(flags: &str) -> String {
    format!("00-{TRACE}-{CALLER}-{flags}")
}

#[track_caller]
fn one<'a>(spans: &'a [Span], node: &str, name: &str) -> &'a Span {
    spans.iter().find(|span| span.node == node && span.name == name).expect("it was waited for")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_is_one_trace_over_nodes_and_a_webhook() {
    let (collector, receiver) = (Collector::start().await, Receiver::start().await);
    let mut cluster = Cluster::linked_with(2, |options| {
        let options = collector.traced(options.directory(directory(Some(&receiver), ""), KEY), "0");
        options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")
    })
    .await;
    let nodes = cluster.nodes();
    let mut subscriber = Socket::open(&nodes[1], "").await;
    subscriber.attach("room").await;
    let sent = [("traceparent", parent("01")), ("tracestate", "vendor=1".to_owned())];
    let headers = sent.each_ref().map(|(name, value)| (*name, value.as_str()));
    let path = "/api/channels/room/publish?token=unknown";
    assert_eq!(publish(&nodes[0], path, &headers, json!({"data": "private"})).await, 200);
    subscriber.message("room").await;

    const REQUEST: &str = "POST /api/channels/{channel}/publish";
    let expected = [
        ("n0", REQUEST),
        ("n0", "publish"),
        ("n0", "store"),
        ("n0", "forward"),
        ("n1", "receive"),
        ("n0", "deliver"),
    ];
    let spans = collector.trace(TRACE, &expected).await;
    let [request, publish, store, forward, deliver] =
        [REQUEST, "publish", "store", "forward", "deliver"].map(|name| one(&spans, "n0", name));
    let receive = one(&spans, "n1", "receive");
    for (span, within) in [
        (request, CALLER),
        (publish, &*request.id),
        (store, &*publish.id),
        (forward, &*publish.id),
        (receive, &*forward.id),
        (deliver, &*publish.id),
    ] {
        assert_eq!(span.parent, within, "{span:?}");
        assert!(span.is_ended, "{span:?}");
    }
    let of_http = ["http.request.method", "http.route", "http.response.status_code"]
        .map(|name| &*request.attributes[name]);
    assert_eq!(of_http, ["POST", "/api/channels/{channel}/publish", "200"]);
    for span in [publish, forward, receive, deliver] {
        assert_eq!(span.attributes["messaging.destination.name"], "room", "{span:?}");
    }
    assert_eq!(deliver.attributes["fanfare.target"], "acme/hook");
    let hook = receiver.received().remove(0);
    assert_eq!(hook.header("traceparent"), format!("00-{TRACE}-{}-01", deliver.id));
    assert_eq!(hook.header("tracestate"), "vendor=1");
    for span in &spans {
        assert!(span.attributes.keys().all(|name| KNOWN.contains(&&**name)), "{span:?}");
    }
    for body in collector.requests().iter().map(|request| String::from_utf8_lossy(&request.body).into_owned())
    {
        for secret in ["secret", "hush", "private", "unknown", "/hook"] {
            let body = body.replace("acme/hook", "");
            assert!(!body.contains(secret), "{secret} in {body:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unsampled_and_malformed_parents_export_nothing() {
    let collector = Collector::start().await;
    let receiver = Receiver::start().await;
    let options = NodeOptions::default().directory(directory(Some(&receiver), ""), KEY);
    let options = options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1");
    let node = Node::start(collector.traced(options, "0")).await;
    let path = "/api/channels/room/publish";
    for parent in [parent("00"), parent("01").to_uppercase(), format!("{}-", parent("01")), "hush".to_owned()]
    {
        assert_eq!(publish(&node, path, &[("traceparent", &parent)], json!({})).await, 200);
    }
    let mut socket = Socket::open(&node, "").await;
    socket.attach("room").await;
    socket.publish("room", json!({})).await;
    // Spans are exported in the order of their ends.
    assert_eq!(publish(&node, path, &[("traceparent", &parent("01"))], json!({})).await, 200);
    let names = ["POST /api/channels/{channel}/publish", "publish", "store", "deliver"];
    let node_id = one_node(&collector).await;
    collector.trace(TRACE, &names.map(|name| (&*node_id, name))).await;
    assert_eq!(collector.spans().len(), names.len());
    let parents = receiver.received().iter().filter(|hook| !hook.header("traceparent").is_empty()).count();
    assert_eq!(parents, 1);
}

/// Gives the id of the node that has exported spans.
async fn one_node(collector: &Collector) -> String {
    wait_until(SOON, "a span", async || !collector.spans().is_empty()).await;
    collector.spans().remove(0).node
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_and_batches_begin_traces_by_the_ratio() {
    let collector = Collector::start().await;
    let node =
        Node::start(collector.traced(NodeOptions::default().directory(directory(None, ""), KEY), "1")).await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("room").await;
    let messages = json!([{"data": 1}, {"data": 2}]);
    let ack = socket.ask(json!({"op": 13, "channel": "room", "messages": messages})).await;
    assert_eq!(ack["op"], 1, "{ack}");
    let body = json!({"channels": ["a", "b"], "messages": [{"data": 3}]});
    assert_eq!(publish(&node, "/api/publish", &[], body).await, 200);
    wait_until(SOON, "the spans of both", async || collector.spans().len() >= 7).await;
    let spans = collector.spans();
    let roots: Vec<_> = spans.iter().filter(|span| span.parent.is_empty()).collect();
    let names: Vec<_> = roots.iter().map(|span| &*span.name).collect();
    assert_eq!(names.len(), 2, "{spans:?}");
    let [of_socket, of_batch] = ["publish", "POST /api/publish"].map(|name| {
        *roots.iter().find(|span| span.name == name).unwrap_or_else(|| panic!("{name} in {names:?}"))
    });
    assert_eq!(of_socket.attributes["messaging.batch.message_count"], "2");
    let within: Vec<_> =
        spans.iter().filter(|span| span.parent == of_batch.id).map(|span| &*span.name).collect();
    assert_eq!(within, ["publish", "publish"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_of_a_webhook_has_links_to_its_publishes() {
    let (collector, receiver) = (Collector::start().await, Receiver::start().await);
    receiver.answer(Answer::Status(503));
    let directory = directory(Some(&receiver), "batch_events = 10");
    let options = NodeOptions::default().directory(directory, KEY);
    let options = options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1");
    let node = Node::start(collector.traced(options, "0")).await;
    let path = "/api/channels/room/publish";
    // The first event is alone in its batch; the later ones share one.
    assert_eq!(publish(&node, path, &[], json!({"data": 0})).await, 200);
    wait_until(SOON, "an attempt", async || !receiver.received().is_empty()).await;
    let other = TRACE.replace('4', "5");
    let parents = [parent("01"), parent("01").replace(TRACE, &other), parent("00")];
    for parent in &parents {
        assert_eq!(publish(&node, path, &[("traceparent", parent)], json!({"data": 1})).await, 200);
    }
    receiver.answer(Answer::Status(200));
    wait_until(SOON, "both batches", async || {
        receiver.received().iter().filter(|hook| hook.is_taken).count() == 2
    })
    .await;
    wait_until(SOON, "the delivery", async || collector.spans().iter().any(|span| span.name == "deliver"))
        .await;
    let spans = collector.spans();
    let deliver = spans.iter().find(|span| span.name == "deliver").expect("it was waited for");
    let published = |trace: &str| {
        let own = spans.iter().find(|span| span.name == "publish" && span.trace == trace);
        own.map(|span| (trace.to_owned(), span.id.clone())).expect("it has ended before")
    };
    assert_eq!(deliver.links, [published(TRACE), published(&other)]);
    let last = receiver.received().pop().expect("two batches");
    assert_eq!(last.header("traceparent"), format!("00-{}-{}-01", deliver.trace, deliver.id));
    assert_eq!(last.envelope()["items"].as_array().map(Vec::len), Some(3));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_collector_that_is_down_costs_spans_and_no_publish() {
    /// Number of publishes, with two spans each. At most 4 096 spans wait.
    const PUBLISHES: usize = 4_000;
    let collector = Collector::start().await;
    collector.answer(Answer::Hang);
    let options = NodeOptions::default().directory(directory(None, ""), KEY);
    let mut node = Node::start(collector.traced(options, "1").limit("publishes_per_second", 0)).await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("room").await;
    for _ in 0..PUBLISHES {
        socket.start(json!({"op": 13, "channel": "room", "messages": [{"data": 1}]})).await;
    }
    for _ in 0..PUBLISHES {
        socket.find("an ack", |frame| frame["op"] == 1).await;
    }
    let dropped = "fanfare_spans_dropped_total{reason=\"queue_full\"}";
    wait_until(SOON, "spans to be dropped", async || node.metric(dropped).await > 0.0).await;
    drop(socket);
    let begun = Instant::now();
    assert_eq!(node.stop().await.code(), Some(0));
    assert!(begun.elapsed() < STOP_MAX, "{:?}", begun.elapsed());
}
