//! Nodes over one database: each message is stored once, by its origin, and every node reads the same history and
//! claims.

use std::collections::HashSet;

use fanfare_client::sign::{self, JwtParams, TokenParams};
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::presence::present;
use fanfare_cluster_tests::{
    Cassandra, Directory, Node, NodeOptions, SOON, Socket, clock, history, http, wait_until,
};
use scylla::client::session::Session;
use serde_json::{Value, json};

const KEY: &str = "secret.k1";

/// Wait for the store: several nodes of a database are slow on a busy machine.
const STORE_WAIT_MS: u64 = 8_000;

/// Starts a cluster over a keyspace of its own, and gives the name of that.
async fn cluster(cassandra: &Cassandra, count: usize) -> (Cluster, String) {
    let keyspace = cassandra.keyspace();
    let stored = |options| cassandra.store(options, &keyspace).limit("store_wait_ms", STORE_WAIT_MS);
    let cluster = Cluster::linked_with(count, stored).await;
    (cluster, keyspace)
}

/// Gives options of a node without peers.
fn alone(node_id: &str) -> NodeOptions {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    NodeOptions::default().directory(directory, KEY).environment("FANFARE_NODE_ID", node_id)
}

async fn publish(node: &Node, channel: &str, body: &Value) -> http::Response {
    let path = format!("/api/channels/{channel}/publish");
    http::request(node.addr(), "POST", &path, &[("authorization", &http::basic(KEY))], body.to_string()).await
}

async fn get(node: &Node, path: &str) -> http::Response {
    http::request(node.addr(), "GET", path, &[("authorization", &http::basic(KEY))], "").await
}

/// Gives the data of all messages of a channel from this node, newest first.
async fn read(node: &Node, channel: &str) -> Vec<Value> {
    let records = history::read_all(node.addr(), KEY, channel, "limit=7").await;
    records.into_iter().map(|mut record| record["data"].take()).collect()
}

const MESSAGES: i8 = 0;
const PRESENCE: i8 = 1;

/// Reads all rows of a kind in the keyspace: the node that wrote each, and its record.
async fn rows(session: &Session, keyspace: &str, of: i8) -> Vec<(String, Value)> {
    let asked = format!("SELECT node_id, kind, record FROM {keyspace}.history");
    let found = session.query_unpaged(asked, ()).await.expect("read").into_rows_result().expect("rows");
    let rows = found.rows::<(Option<String>, i8, Option<String>)>().expect("the columns are what they are");
    let rows = rows.map(|row| row.expect("a row")).filter(|(_, kind, _)| *kind == of);
    // A partition with nothing but a mark has no record.
    let rows = rows.filter_map(|(node, _, record)| node.zip(record));
    rows.map(|(node, record)| (node, serde_json::from_str(&record).expect("a record is JSON"))).collect()
}

async fn stored_once(cassandra: &Cassandra) {
    let (mut cluster, keyspace) = cluster(cassandra, 3).await;
    let nodes = cluster.nodes();
    let mut sockets = Vec::new();
    for node in &*nodes {
        let mut socket = Socket::open(node, "").await;
        socket.attach("room").await;
        sockets.push(socket);
    }
    for number in 0..10 {
        for (from, socket) in sockets.iter_mut().enumerate() {
            socket.publish("room", json!({"data": [from, number]})).await;
        }
    }
    for socket in &mut sockets {
        for _ in 0..30 {
            socket.message("room").await;
        }
    }
    // Messages of a rewind are not stored again, like live ones.
    let mut late = Socket::open(&nodes[2], "").await;
    let attached = late.ask(json!({"op": 8, "channel": "room", "rewind": "5"})).await;
    assert_eq!(attached["op"], 9, "{attached}");
    for _ in 0..5 {
        late.message("room").await;
    }
    let rows = rows(&cassandra.session().await, &keyspace, MESSAGES).await;
    let mut seen = HashSet::new();
    for (node, record) in &rows {
        let from = record["data"][0].as_u64().expect("a number");
        assert_eq!(*node, format!("n{from}"), "{record}");
        assert!(seen.insert(record["data"].to_string()), "twice: {record}");
        assert!(seen.insert(record["id"].to_string()), "twice: {record}");
    }
    assert_eq!(rows.len(), 30);
    let first_read = read(&nodes[0], "room").await;
    assert_eq!(first_read.len(), 30);
    for node in &nodes[1..] {
        assert_eq!(read(node, "room").await, first_read);
    }
}

async fn read_at_once(cassandra: &Cassandra) {
    let (mut cluster, _) = cluster(cassandra, 2).await;
    let [n0, n1] = cluster.nodes() else { unreachable!("two nodes were started") };
    for number in 0..20 {
        assert_eq!(publish(n0, "room", &json!({"data": number})).await.status, 200);
        let newest = get(n1, "/api/channels/room/history?limit=1").await.json();
        assert_eq!(newest["messages"][0]["data"], number);
    }
    n0.kill();
    assert_eq!(read(n1, "room").await, (0..20).rev().map(|number| json!(number)).collect::<Vec<_>>());
}

/// Publishes one id at all nodes at once. Over several nodes of the database the outcome of a claim may stay
/// unknown, and the publish is tried again.
async fn an_id_once(cassandra: &Cassandra, may_be_unknown: bool) {
    let (mut cluster, keyspace) = cluster(cassandra, 3).await;
    let nodes = cluster.nodes();
    let acknowledged = async |node: &Node, body: &Value| {
        wait_until(3 * SOON, "the publish to be acknowledged", async || {
            let answer = publish(node, "room", body).await;
            let may_fail = may_be_unknown && answer.status == 503;
            assert!(answer.status == 200 || may_fail, "{:?}", answer.body);
            answer.status == 200
        })
        .await;
    };
    for round in 0..5 {
        let body = json!({"id": format!("own-{round}"), "data": round});
        futures_util::future::join_all(nodes.iter().map(|node| acknowledged(node, &body))).await;
        for node in &*nodes {
            acknowledged(node, &body).await;
        }
    }
    assert_eq!(rows(&cassandra.session().await, &keyspace, MESSAGES).await.len(), 5);
    assert_eq!(read(&nodes[1], "room").await, [4, 3, 2, 1, 0].map(|number| json!(number)));
}

/// Claims one nonce at all nodes at once. Over several nodes of the database the outcome of a claim may stay
/// unknown, and the request is refused.
async fn a_nonce_once(cassandra: &Cassandra, may_be_unknown: bool) {
    let (mut cluster, _) = cluster(cassandra, 3).await;
    let nodes = cluster.nodes();
    for _ in 0..5 {
        let request = sign::token_request(&KEY.parse().expect("a key"), TokenParams::default());
        let body = serde_json::to_string(&request.expect("a request")).expect("it is JSON");
        let path = "/keys/k1/requestToken";
        let asked = nodes.iter().map(|node| http::request(node.addr(), "POST", path, &[], body.clone()));
        let mut statuses: Vec<u16> =
            futures_util::future::join_all(asked).await.iter().map(|answer| answer.status).collect();
        statuses.sort_unstable();
        let is_once = statuses.iter().all(|status| [200, 401, 503].contains(status)) && statuses[1] > 200;
        assert!(statuses == [200, 401, 401] || may_be_unknown && is_once, "{statuses:?}");
        for node in &*nodes {
            let again = http::request(node.addr(), "POST", path, &[], body.clone()).await.status;
            assert!(again == 401 || may_be_unknown && statuses[0] > 200, "{again} after {statuses:?}");
        }
    }
}

/// Reads the rows of counted publishes: node id, minute and count.
async fn counted(session: &Session, keyspace: &str) -> Vec<(String, i64, i64)> {
    let asked = format!("SELECT node_id, minute_ms, kind, counted FROM {keyspace}.metrics");
    let found = session.query_unpaged(asked, ()).await.expect("read").into_rows_result().expect("rows");
    let rows = found.rows::<(String, i64, String, i64)>().expect("the columns are what they are");
    let rows = rows.map(|row| row.expect("a row")).filter(|(_, _, kind, _)| kind == "publish");
    rows.map(|(node, minute, _, count)| (node, minute, count)).collect()
}

/// Sums the counts of one node, which has at most one row for a minute.
fn sum_of(rows: &[(String, i64, i64)], node_id: &str) -> i64 {
    let own: Vec<_> = rows.iter().filter(|(node, ..)| node == node_id).collect();
    let minutes: HashSet<_> = own.iter().map(|(_, minute, _)| minute).collect();
    assert_eq!(minutes.len(), own.len(), "{own:?}");
    own.iter().map(|(.., count)| count).sum()
}

async fn counts(cassandra: &Cassandra) {
    let (mut cluster, keyspace) = cluster(cassandra, 3).await;
    let nodes = cluster.nodes();
    let session = cassandra.session().await;
    let published = async |node: &Node, count: usize| {
        for number in 0..count {
            assert_eq!(publish(node, "room", &json!({"data": number})).await.status, 200);
        }
    };
    let stored = async |node_id: &str, count: i64| {
        wait_until(SOON, "the counts to be stored", async || {
            sum_of(&counted(&session, &keyspace).await, node_id) == count
        })
        .await;
    };
    for (place, node) in nodes.iter().enumerate() {
        published(node, 3 + place).await;
    }
    stored("n0", 3).await;
    // The counts continue, and replace the stored ones.
    published(&nodes[0], 4).await;
    stored("n0", 7).await;
    nodes[0].kill();
    let summed = async |node: &Node| {
        let series = get(node, "/api/metrics/series?aggregate=sum").await.json();
        let rows = series["series"].as_array().expect("a list").clone();
        let of_kind = rows.iter().filter(|row| row["kind"] == "publish");
        of_kind.map(|row| row["count"].as_u64().expect("a number")).sum::<u64>()
    };
    for node in &nodes[1..] {
        wait_until(SOON, "the counts of all, also of the dead", async || summed(node).await == 7 + 4 + 5)
            .await;
    }
    assert_eq!(sum_of(&counted(&session, &keyspace).await, "n0"), 7);
}

async fn presence_once(cassandra: &Cassandra) {
    let (mut cluster, keyspace) = cluster(cassandra, 3).await;
    let nodes = cluster.nodes();
    for (place, node) in nodes.iter().enumerate() {
        let mut socket = Socket::open(node, &format!("?clientId=c{place}")).await;
        socket.attach("room").await;
        present(&mut socket, "enter", "room", json!({"data": place})).await;
        present(&mut socket, "update", "room", json!({"data": place + 10})).await;
        present(&mut socket, "leave", "room", json!({})).await;
    }
    let path = "/api/channels/room/presence/history";
    let events = async |node: &Node| get(node, path).await.json()["events"].clone();
    let first_read = events(&nodes[0]).await;
    let members_and_actions = first_read.as_array().expect("a list").iter().rev();
    let members_and_actions: Vec<_> =
        members_and_actions.map(|event| (event["clientId"].clone(), event["action"].clone())).collect();
    let expected = [0, 1, 2].map(|place| ["enter", "update", "leave"].map(|action| (place, action)));
    let expected = expected.as_flattened().iter();
    let expected: Vec<_> =
        expected.map(|(place, action)| (json!(format!("c{place}")), json!(action))).collect();
    assert_eq!(members_and_actions, expected, "{first_read}");
    for node in &nodes[1..] {
        assert_eq!(events(node).await, first_read);
    }
    let rows = rows(&cassandra.session().await, &keyspace, PRESENCE).await;
    let mut writers: Vec<_> = rows.into_iter().map(|(node, _)| node).collect();
    writers.sort_unstable();
    let expected = ["n0", "n1", "n2"].map(|node| [node; 3]);
    assert_eq!(writers, expected.as_flattened());
}

#[tokio::test(flavor = "multi_thread")]
async fn each_message_is_stored_once_by_the_node_where_it_entered() {
    let Some(cassandra) = Cassandra::shared() else { return };
    stored_once(&cassandra).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn message_acknowledged_by_one_node_is_read_at_once_by_others() {
    let Some(cassandra) = Cassandra::shared() else { return };
    read_at_once(&cassandra).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn id_is_stored_once_whichever_nodes_receive_it() {
    let Some(cassandra) = Cassandra::shared() else { return };
    an_id_once(&cassandra, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nonce_is_taken_once_over_all_nodes() {
    let Some(cassandra) = Cassandra::shared() else { return };
    a_nonce_once(&cassandra, false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_of_nodes_add_up_and_those_of_a_down_node_stay() {
    let Some(cassandra) = Cassandra::shared() else { return };
    counts(&cassandra).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_event_is_stored_once_by_the_node_of_its_connection() {
    let Some(cassandra) = Cassandra::shared() else { return };
    presence_once(&cassandra).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn store_rules_hold_over_three_nodes_of_the_database() {
    let Some(cassandra) = Cassandra::of(3) else { return };
    stored_once(&cassandra).await;
    read_at_once(&cassandra).await;
    an_id_once(&cassandra, true).await;
    a_nonce_once(&cassandra, true).await;
    counts(&cassandra).await;
    presence_once(&cassandra).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_start_at_once_make_one_schema() {
    let Some(cassandra) = Cassandra::shared() else { return };
    let keyspace = cassandra.keyspace();
    let start = |name| Node::start(cassandra.store(alone(name), &keyspace));
    let nodes = futures_util::future::join_all(["a", "b", "c"].map(start)).await;
    for (number, node) in nodes.iter().enumerate() {
        assert_eq!(publish(node, "room", &json!({"data": number})).await.status, 200);
    }
    for node in &nodes {
        assert_eq!(read(node, "room").await, [2, 1, 0].map(|number| json!(number)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revoked_token_is_refused_by_a_node_without_a_link() {
    let Some(cassandra) = Cassandra::shared() else { return };
    let keyspace = cassandra.keyspace();
    let start = |name| Node::start(cassandra.store(alone(name), &keyspace));
    let (a, b) = (start("a").await, start("b").await);
    let params = JwtParams {
        capability: r#"{"*":["subscribe"]}"#.into(),
        client_id: Some("ann".into()),
        issued_s: Some(clock::now_s() - 10),
        ttl_s: 3600,
    };
    let bearer = http::bearer(&sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token"));
    let status = async |node: &Node| {
        http::request(node.addr(), "GET", "/time", &[("authorization", &bearer)], "").await.status
    };
    assert_eq!((status(&a).await, status(&b).await), (200, 200));
    wait_until(SOON, "a revocation to be recorded", async || {
        let headers = [("authorization", &*http::basic(KEY))];
        let body = json!({"clientId": "ann"}).to_string();
        http::request(a.addr(), "POST", "/keys/k1/revokeTokens", &headers, body).await.status == 200
    })
    .await;
    assert_eq!(status(&a).await, 401);
    wait_until(3 * SOON, "the other node to refuse it", async || status(&b).await == 401).await;
}
