//! Metrics of `/metrics`: they follow the conventions of Prometheus and are true.

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::exposition::{self, Metric};
use fanfare_cluster_tests::receiver::Receiver;
use fanfare_cluster_tests::tls::Tls;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, SOON, Socket, http, wait_until};
use serde_json::json;

const KEY: &str = "secret.k1";
/// Name, kind and labels of each metric, against which alerts and panels are checked.
const CATALOGUE: &str = include_str!("../../../deploy/check/metrics.txt");
/// Units that a name may end with.
const UNITS: [&str; 2] = ["_seconds", "_bytes"];
/// Units that no name may have, since those above are the base units.
const NO_UNITS: [&str; 5] = ["_ms", "_milliseconds", "_kilobytes", "_kb", "_mb"];
/// Metrics that only a node with a broker or with a failed target has.
const SELDOM: [&str; 5] = [
    "fanfare_broker_checks_total",
    "fanfare_broker_refusals_total",
    "fanfare_integration_retries_total",
    "fanfare_queue_repairs_total",
    "fanfare_queue_strays",
];

fn directory() -> Directory {
    Directory::default().account("acme").key("k1", "secret", ALL)
}

fn as_line(name: &str, metric: &Metric) -> String {
    let labels: Vec<&str> = metric.labels.iter().map(String::as_str).collect();
    format!("{name} {} {}", metric.kind, labels.join(",")).trim_end().to_owned()
}

/// The series of open connections of one kind.
async fn connections(node: &Node, transport: &str, format: &str) -> f64 {
    let series = format!("fanfare_connections{{transport=\"{transport}\",format=\"{format}\"}}");
    node.metric(&series).await
}

async fn until_metric(node: &Node, name: &str, is_good: impl Fn(f64) -> bool) {
    wait_until(SOON, name, async || is_good(node.metric(name).await)).await;
}

/// Starts two nodes with everything that has metrics except a broker, and uses all of it.
async fn busy_cluster(tls: &Tls, receiver: &Receiver) -> Cluster {
    let hook = format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"hush\"", receiver.url());
    let with_hook = Directory::default().account("acme").integration("hook", &hook).key("k1", "secret", ALL);
    let (certificate, key) = (tls.certificate(), tls.key());
    let mut cluster = Cluster::linked_with(2, |options| {
        let options = options.directory(with_hook.clone(), KEY);
        let options = options.environment("FANFARE_TLS_CERT", &certificate.display().to_string());
        let options = options.environment("FANFARE_TLS_KEY", &key.display().to_string());
        options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")
    })
    .await;
    let node = &cluster.nodes()[0];
    let mut socket = Socket::over(tls.raw(node.addr()).await, "", &http::basic(KEY)).await;
    socket.attach("room").await;
    socket.publish("room", json!({"id": "one", "data": 1})).await;
    socket.message("room").await;
    let health = tls.http(node.addr()).await.request("GET", "/health", &[], "").await;
    assert_eq!(health.expect("an answer").status, 200);
    until_metric(node, "fanfare_integration_events_total", |events| events >= 1.0).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_keep_to_conventions_and_are_in_the_catalogue() {
    let (tls, receiver) = (Tls::default(), Receiver::start().await);
    let mut cluster = busy_cluster(&tls, &receiver).await;
    let metrics = exposition::scrape(&cluster.nodes()[0]).await;
    let mut findings = Vec::new();
    for (name, metric) in &metrics {
        let is_counter = metric.kind == "counter";
        let has_unit = UNITS.iter().any(|unit| name.trim_end_matches("_total").ends_with(unit));
        let names_unit = UNITS.iter().any(|unit| name.contains(unit));
        for (is_wrong, finding) in [
            (metric.help.is_empty(), "no help"),
            (metric.kind.is_empty(), "no type"),
            (metric.series == 0, "no series"),
            (is_counter != name.ends_with("_total"), "_total is for counters, and all of them"),
            (metric.kind == "histogram" && !has_unit, "a histogram without a unit"),
            (names_unit && !has_unit && !name.starts_with("process_"), "the unit is not last"),
            (NO_UNITS.iter().any(|unit| name.contains(unit)), "not in a base unit"),
        ] {
            findings.extend(is_wrong.then(|| format!("{name}: {finding}")));
        }
    }
    let exposed: Vec<String> = metrics.iter().map(|(name, metric)| as_line(name, metric)).collect();
    let lines: Vec<&str> = CATALOGUE.lines().filter(|line| !line.starts_with('#')).collect();
    let own = exposed.iter().filter(|line| line.starts_with("fanfare_"));
    let missing = own.filter(|line| !lines.contains(&line.as_str()));
    findings.extend(missing.map(|line| format!("not in deploy/check/metrics.txt: {line}")));
    for line in lines {
        let name = line.split(' ').next().unwrap_or_default();
        let is_exposed = exposed.iter().any(|exposed| exposed == line);
        if !is_exposed && !SELDOM.contains(&name) {
            findings.push(format!("deploy/check/metrics.txt has what no node tells: {line}"));
        }
    }
    assert!(findings.is_empty(), "{}", findings.join("\n"));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_count_by_transport_and_format() {
    let node = Node::start(NodeOptions::default().directory(directory(), KEY)).await;
    let kinds = [("websocket", "json"), ("websocket", "msgpack"), ("sse", "json")];
    let all = async || {
        let mut counts = Vec::new();
        for (transport, format) in kinds {
            counts.push(connections(&node, transport, format).await);
        }
        counts
    };
    assert_eq!(all().await, [0.0; 3]);
    let json = [Socket::open(&node, "").await, Socket::open(&node, "?format=json").await];
    let packed = Socket::open(&node, "?format=msgpack").await;
    let mut stream = Raw::connect(node.addr()).await;
    stream
        .write(format!("GET /realtime/sse?key={KEY}&channel=a HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes())
        .await;
    assert_eq!(stream.head(SOON).await.expect("an answer").0, 200);
    wait_until(SOON, "all to be counted", async || all().await == [2.0, 1.0, 1.0]).await;
    assert_eq!(node.metric("fanfare_socket_connections").await, 4.0);
    drop(packed);
    wait_until(SOON, "one to go", async || all().await == [2.0, 0.0, 1.0]).await;
    drop((json, stream));
    wait_until(SOON, "all to go", async || all().await == [0.0; 3]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_time_of_the_store_is_a_histogram_of_its_calls() {
    let node = Node::start(NodeOptions::default().directory(directory(), KEY)).await;
    let mut socket = Socket::open(&node, "").await;
    let count = async |operation: &str| {
        let labels = format!("{{store=\"embedded\",operation=\"{operation}\"}}");
        node.metric(&format!("fanfare_store_duration_seconds_count{labels}")).await
    };
    let (appended, read) = (count("append").await, count("read").await);
    assert_eq!(count("find_ids").await, 0.0);
    socket.publish("room", json!({"id": "one", "data": 1})).await;
    assert!(count("append").await > appended, "the ack came after the write");
    assert_eq!(count("find_ids").await, 1.0);
    let authorization = http::basic(KEY);
    let headers = [("authorization", authorization.as_str())];
    let page = http::request(node.addr(), "GET", "/api/channels/room/history", &headers, "").await;
    assert_eq!(page.status, 200);
    wait_until(SOON, "the read", async || count("read").await > read).await;
    let all = "fanfare_store_duration_seconds_bucket{store=\"embedded\",operation=\"append\",le=\"+Inf\"}";
    assert_eq!(node.metric(all).await, count("append").await);
    let queued =
        [node.metric("fanfare_store_queue_rows").await, node.metric("fanfare_store_queue_bytes").await];
    assert_eq!(queued, [0.0; 2], "nothing waits");
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_node_reports_its_remaining_connections() {
    let mut cluster =
        Cluster::linked_with(2, |options| options.environment("FANFARE_DRAIN_TIMEOUT", "10s")).await;
    let node = &cluster.nodes()[0];
    assert_eq!(node.metric("fanfare_draining").await, 0.0);
    let mut sockets = Vec::new();
    for _ in 0..100 {
        sockets.push(Socket::open(node, "").await);
    }
    assert_eq!(node.metric("fanfare_drain_connections").await, 0.0, "it does not drain");
    assert_eq!(node.operate("POST", "/drain").await.status, 202);
    // Clients that do not disconnect are closed a second after the request, so some may be gone.
    until_metric(node, "fanfare_drain_connections", |left| (1.0..=100.0).contains(&left)).await;
    assert_eq!(node.metric("fanfare_draining").await, 1.0);
    drop(sockets);
    assert!(cluster.nodes()[0].ended().await.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_directory_is_stale_until_a_good_one_is_there() {
    let node = Node::start(NodeOptions::default().directory(directory(), KEY)).await;
    const STALE: &str = "fanfare_directory_stale";
    assert_eq!(node.metric(STALE).await, 0.0);
    node.replace_directory(&Directory::default().account("not a name"));
    until_metric(&node, STALE, |is_stale| is_stale == 1.0).await;
    let generation = node.metric("fanfare_directory_generation").await;
    node.replace_directory(&directory());
    until_metric(&node, STALE, |is_stale| is_stale == 0.0).await;
    assert!(node.metric("fanfare_directory_generation").await >= generation);
    let mut socket = Socket::open(&node, "").await;
    socket.attach("room").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_certificate_is_stale_until_it_is_as_before() {
    let tls = Tls::default();
    let node = Node::start(tls.node()).await;
    const STALE: &str = "fanfare_certificate_stale";
    assert_eq!(node.metric(STALE).await, 0.0);
    let before = std::fs::read(tls.certificate()).expect("a certificate");
    std::fs::write(tls.certificate(), "broken").expect("written");
    until_metric(&node, STALE, |is_stale| is_stale == 1.0).await;
    std::fs::write(tls.certificate(), before).expect("written");
    until_metric(&node, STALE, |is_stale| is_stale == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_peer_shows_peer_stream_lag() {
    let mut cluster = Cluster::linked(2).await;
    let [node, peer] = cluster.nodes() else { panic!("two nodes") };
    let mut there = Socket::open(peer, "").await;
    there.attach("room").await;
    let mut here = Socket::open(node, "").await;
    let bytes = "fanfare_peer_stream_waiting_bytes{peer=\"n1\"}";
    let items = "fanfare_peer_stream_waiting_items{peer=\"n1\"}";
    let lag = "fanfare_peer_stream_lag_seconds{peer=\"n1\"}";
    assert!(node.metric(lag).await < 1.0);
    peer.pause();
    here.start(json!({"op": 13, "channel": "room", "data": "x".repeat(1_000)})).await;
    // A peer that is silent for longer is declared down, so one page must have all values.
    wait_until(SOON, "a message that waits and lags", async || {
        let [bytes, items, lag] = node.metrics([bytes, items, lag]).await;
        bytes >= 1_000.0 && items >= 1.0 && lag > 0.1
    })
    .await;
    peer.resume();
    until_metric(node, bytes, |bytes| bytes == 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_show_outbox_bytes_of_a_client_that_reads_nothing() {
    let node = Node::start(NodeOptions::default().directory(directory(), KEY)).await;
    let raw = Raw::connect_slow(node.addr(), 4 * 1024).await;
    let mut silent = Socket::over(raw, "", &http::basic(KEY)).await;
    silent.attach("room").await;
    let mut publisher = Socket::open(&node, "").await;
    let waits = "fanfare_shard_outbox_bytes";
    assert_eq!((node.metric(waits).await, node.metric("fanfare_blocked_connections").await), (0.0, 0.0));
    let mut published = 0;
    while node.metric(waits).await == 0.0 {
        assert!(published < 400, "nothing waits after {published} messages");
        publisher.publish("room", json!({"data": "x".repeat(20_000)})).await;
        published += 1;
    }
    assert_eq!(node.metric("fanfare_blocked_connections").await, 1.0);
    for _ in 0..published {
        silent.message("room").await;
    }
    until_metric(&node, waits, |bytes| bytes == 0.0).await;
    until_metric(&node, "fanfare_blocked_connections", |blocked| blocked == 0.0).await;
}
