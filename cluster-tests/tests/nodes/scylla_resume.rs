//! Nodes over one database: a client that resumes on another node, or is attached while a node fails, gets the
//! acknowledged messages from the database.

use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, PEER_DOWN, peer_log_events};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::presence::{Watcher, present};
use fanfare_cluster_tests::traffic::{LOAD, Publishers, Subscriber};
use fanfare_cluster_tests::waits::pace;
use fanfare_cluster_tests::{Cassandra, Directory, Node, NodeOptions, SOON, Socket, http, wait_until};
use serde_json::{Value, json};
use tokio::task::JoinSet;

const STORE_WAIT_MS: u64 = 6_000;

/// Starts a cluster over a keyspace of its own; `None` without a database.
async fn cluster(count: usize) -> Option<Cluster> {
    Some(cluster_over(&Cassandra::shared()?, count).await)
}

async fn cluster_over(cassandra: &Cassandra, count: usize) -> Cluster {
    let keyspace = cassandra.keyspace();
    Cluster::linked_with(count, |options| stored(cassandra, options, &keyspace)).await
}

/// Sets the node to use the database, with a longer wait, since the database has other work, too.
fn stored(cassandra: &Cassandra, options: NodeOptions, keyspace: &str) -> NodeOptions {
    cassandra.store(options, keyspace).limit("store_wait_ms", STORE_WAIT_MS)
}

/// Starts a publisher on each node, which accepts the answer that the database did not answer in time.
async fn publishers(nodes: &[Node]) -> Publishers {
    let mut publishers = Publishers::none().patient();
    for node in nodes {
        publishers.add(node).await;
    }
    publishers
}

async fn until_down(node: &Node, other: &str) {
    let is_down = || peer_log_events(node).iter().any(|(of, message)| of == other && message == PEER_DOWN);
    wait_until(SOON, "the death to be known", async || is_down()).await;
}

async fn attach(node: &Node, channel: &str, how: &Value) -> (Socket, Value) {
    let mut socket = Socket::open(node, "").await;
    let mut request = json!({"op": 8, "channel": channel});
    for (name, value) in how.as_object().expect("fields of the request") {
        request[name] = value.clone();
    }
    let attached = socket.ask(request).await;
    assert_eq!(attached["op"], 9, "{attached}");
    (socket, attached)
}

/// Reads the data of the next `count` messages.
async fn read(socket: &mut Socket, channel: &str, count: usize) -> Vec<Value> {
    let mut data = Vec::new();
    while data.len() < count {
        let frame = socket.message(channel).await;
        let messages = frame["messages"].as_array().expect("a message frame");
        data.extend(messages.iter().map(|message| message["data"].clone()));
    }
    data
}

async fn acknowledged_last(mut cluster: Cluster) {
    let nodes = cluster.nodes();
    let (mut socket, attached) = attach(&nodes[0], "room", &json!({})).await;
    let first = attached["serial"].clone();
    let mut publishers = Vec::new();
    for node in &*nodes {
        publishers.push(Socket::open(node, "").await);
    }
    for number in 0..10 {
        for publisher in &mut publishers {
            publisher.publish("room", json!({"data": number})).await;
        }
    }
    read(&mut socket, "room", 15).await;
    let half = socket.message("room").await["serial"].clone();
    drop(socket);
    for number in 10..20 {
        for publisher in &mut publishers {
            publisher.publish("room", json!({"data": number})).await;
        }
    }
    nodes[0].kill();
    for number in 20..25 {
        for publisher in &mut publishers[1..] {
            publisher.publish("room", json!({"data": number})).await;
        }
    }
    let mut ends = 0;
    for (serial, missed) in [(&first, 70), (&half, 54)] {
        for node in &nodes[1..] {
            let missed = missed + ends;
            let (mut socket, attached) = attach(node, "room", &json!({"serial": serial})).await;
            assert_eq!((&attached["resumed"], &attached["serial"]), (&json!(true), serial), "{attached}");
            let data = read(&mut socket, "room", missed).await;
            for number in 17..25 {
                let count = if number < 20 { 3 } else { 2 };
                assert_eq!(data.iter().filter(|one| **one == number).count(), count, "{number} of {data:?}");
            }
            // Later messages follow, and none comes twice.
            publishers[1].publish("room", json!({"data": ["end", ends]})).await;
            assert_eq!(read(&mut socket, "room", 1).await, [json!(["end", ends])]);
            ends += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn last_acknowledged_messages_are_read_on_another_node() {
    let Some(cluster) = cluster(3).await else { return };
    acknowledged_last(cluster).await;
}

async fn assert_nothing_missed_after_kill(mut cluster: Cluster) {
    let nodes = cluster.nodes();
    let subscriber = Subscriber::on(&nodes[0], "on the node that dies").await;
    let publishers = publishers(nodes).await;
    publishers.until_acked(LOAD).await;
    nodes[0].kill();
    let received = subscriber.leave().await;
    let moved = Subscriber::after(&nodes[1], "moved", received).await;
    publishers.until_acked(LOAD).await;
    let acknowledged = publishers.end().await;
    let received = moved.settle(&acknowledged).await;
    assert_eq!(received.losses(), 0, "it is resumed");
    for node in &mut nodes[1..] {
        node.assert_well().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_subscriber_of_killed_node_misses_nothing_under_load() {
    let Some(cluster) = cluster(3).await else { return };
    assert_nothing_missed_after_kill(cluster).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_misses_nothing_over_three_nodes_of_the_database() {
    let Some(cassandra) = Cassandra::of(3) else { return };
    acknowledged_last(cluster_over(&cassandra, 3).await).await;
    assert_nothing_missed_after_kill(cluster_over(&cassandra, 3).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attached_subscriber_sees_no_loss_when_a_node_goes_down() {
    let Some(mut cluster) = cluster(3).await else { return };
    let nodes = cluster.nodes();
    let stayed = Subscriber::on_each(&nodes[1..], "there from the beginning").await;
    let publishers = publishers(nodes).await;
    publishers.until_acked(LOAD).await;
    nodes[0].kill();
    for node in &nodes[1..] {
        until_down(node, "n0").await;
    }
    publishers.until_acked(LOAD).await;
    let acknowledged = publishers.end().await;
    for subscriber in stayed {
        assert_eq!(subscriber.settle(&acknowledged).await.losses(), 0);
    }
}

/// Messages that a node acknowledged while the subscriber's node was unreachable were never sent there.
#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_gets_messages_of_a_node_that_is_down_since() {
    let Some(mut cluster) = cluster(3).await else { return };
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let (mut there, _) = attach(n1, "room", &json!({})).await;
    let mut publisher = Socket::open(n0, "").await;
    let mut other = Socket::open(n2, "").await;
    publisher.publish("room", json!({"data": 0})).await;
    let serial = there.message("room").await["serial"].clone();
    n1.pause();
    wait_until(SOON, "its links to be cut", async || n0.metric("fanfare_peers_known").await == 1.0).await;
    for number in 1..=20 {
        publisher.publish("room", json!({"data": number})).await;
    }
    n0.kill();
    until_down(n2, "n0").await;
    n1.resume_until_restarted(1).await;
    let (mut there, attached) = attach(n1, "room", &json!({"serial": serial})).await;
    assert_eq!(attached["resumed"], true, "{attached}");
    assert_eq!(read(&mut there, "room", 20).await, (1..=20).map(|at| json!(at)).collect::<Vec<_>>());
    other.publish("room", json!({"data": 21})).await;
    assert_eq!(read(&mut there, "room", 1).await, [21]);
    for node in [n1, n2] {
        let (mut back, attached) = attach(node, "room", &json!({"serial": serial})).await;
        assert_eq!(attached["resumed"], true, "{attached}");
        assert_eq!(read(&mut back, "room", 21).await, (1..=21).map(|at| json!(at)).collect::<Vec<_>>());
    }
}

/// The client gets a reported loss if the store cannot be read or the channel keeps no history.
#[tokio::test(flavor = "multi_thread")]
async fn resume_that_cannot_read_the_store_reports_continuity_loss() {
    let Some(cassandra) = Cassandra::start(1) else { return };
    let keyspace = cassandra.keyspace();
    let directory = || {
        let rule = "pattern = \"cursor:*\"\nhistory = false";
        Directory::default().account("acme").channels(rule).key("k1", "secret", ALL)
    };
    let options =
        |options: NodeOptions| cassandra.store(options, &keyspace).directory(directory(), "secret.k1");
    let mut cluster = Cluster::linked_with(2, options).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut serials = Vec::new();
    for channel in ["cursor:1", "room"] {
        let (mut socket, _) = attach(n0, channel, &json!({})).await;
        publisher.publish(channel, json!({"data": 1})).await;
        serials.push(socket.message(channel).await["serial"].clone());
        drop(socket);
        publisher.publish(channel, json!({"data": 2})).await;
    }
    n0.kill();
    until_down(n1, "n0").await;
    let (_, attached) = attach(n1, "cursor:1", &json!({"serial": serials[0]})).await;
    assert_eq!(attached["resumed"], false);
    cassandra.signal("STOP", None);
    let mut other = Socket::open(n1, "").await;
    wait_until(SOON, "a refused publish", async || {
        other.ask(json!({"op": 13, "channel": "probe", "data": 1})).await["code"] == 50003
    })
    .await;
    let (_, attached) = attach(n1, "room", &json!({"serial": serials[1]})).await;
    assert_eq!(attached["resumed"], false);
    cassandra.signal("CONT", None);
    wait_until(SOON, "the store to be read again", async || {
        let (mut socket, attached) = attach(n1, "room", &json!({"serial": serials[1]})).await;
        attached["resumed"] == true && read(&mut socket, "room", 1).await == [2]
    })
    .await;
}

/// Makes the directory of [`cluster`], without history for these channels.
fn directory(unkept: Option<&str>) -> Directory {
    let rule = unkept.map(|pattern| format!("pattern = \"{pattern}\"\nhistory = false"));
    let account = Directory::default().account("acme");
    rule.iter().fold(account, |account, rule| account.channels(rule)).key("k1", "secret", ALL)
}

/// Restarts a node with this directory, while the other one keeps its own.
async fn restart(cluster: &mut Cluster, index: usize, directory: &Directory) {
    cluster.nodes()[index].kill();
    cluster.nodes()[index].replace_directory(directory);
    cluster.restart(index).await;
    cluster.until_linked().await;
}

/// Messages without a row were delivered nevertheless.
#[tokio::test(flavor = "multi_thread")]
async fn incarnation_without_history_causes_continuity_loss() {
    let Some(mut cluster) = cluster(2).await else { return };
    let mut serials = Vec::new();
    for channel in ["before", "beside", "after"] {
        let (mut socket, _) = attach(&cluster.nodes()[0], channel, &json!({})).await;
        Socket::open(&cluster.nodes()[1], "").await.publish(channel, json!({"data": 1})).await;
        serials.push((channel, socket.message(channel).await["serial"].clone()));
    }
    for ((channel, serial), unkept) in serials.iter().zip([None, Some("*"), None]) {
        restart(&mut cluster, 0, &directory(unkept)).await;
        for (channel, _) in &serials {
            Socket::open(&cluster.nodes()[0], "").await.publish(channel, json!({"data": 2})).await;
        }
        let (mut back, attached) = attach(&cluster.nodes()[1], channel, &json!({"serial": serial})).await;
        assert_eq!(attached["resumed"], *channel == "before", "{channel}: {attached}");
        if *channel == "before" {
            assert_eq!(read(&mut back, channel, 1).await, [2]);
        }
    }
}

/// Clients that are attached when the node fails rely on its rows, too.
#[tokio::test(flavor = "multi_thread")]
async fn failure_of_a_node_with_other_rules_gets_resumed_false() {
    let Some(mut cluster) = cluster(3).await else { return };
    restart(&mut cluster, 0, &directory(Some("room"))).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let (mut there, _) = attach(n1, "room", &json!({})).await;
    let mut publisher = Socket::open(n0, "").await;
    publisher.publish("room", json!({"data": 0})).await;
    let serial = there.message("room").await["serial"].clone();
    n1.pause();
    wait_until(SOON, "its links to be cut", async || n0.metric("fanfare_peers_known").await == 1.0).await;
    publisher.publish("room", json!({"data": 1})).await;
    n0.kill();
    until_down(n2, "n0").await;
    n1.resume_until_restarted(1).await;
    let (_there, attached) = attach(n1, "room", &json!({"serial": serial})).await;
    assert_eq!(attached["resumed"], false, "{attached}");
}

/// Each of the other nodes may make the leave.
#[tokio::test(flavor = "multi_thread")]
async fn leave_of_a_down_nodes_member_is_stored_once() {
    let Some(cassandra) = Cassandra::shared() else { return };
    let keyspace = cassandra.keyspace();
    let short =
        |options: NodeOptions| stored(&cassandra, options, &keyspace).limit("presence_grace_ms", 2_000);
    let mut cluster = Cluster::linked_with(3, short).await;
    let nodes = cluster.nodes();
    let mut member = Socket::open(&nodes[0], "?clientId=ann").await;
    present(&mut member, "enter", "room", json!({"data": 1})).await;
    let mut watchers = [Watcher::on(&nodes[1], "room").await, Watcher::on(&nodes[2], "room").await];
    nodes[0].kill();
    for watcher in &mut watchers {
        let end = tokio::time::Instant::now() + SOON;
        assert!(watcher.has_by(&[].into(), end).await, "{:?}", watcher.events);
    }
    let session = cassandra.session().await;
    let rows = async || {
        let asked = format!("SELECT kind, record FROM {keyspace}.history");
        let found = session.query_unpaged(asked, ()).await.expect("read").into_rows_result().expect("rows");
        let rows = found.rows::<(i8, Option<String>)>().expect("the columns are what they are");
        let rows = rows.map(|row| row.expect("a row")).filter(|(kind, _)| *kind == 1);
        // A partition with nothing but a mark has no record.
        let records = rows.filter_map(|(_, record)| record);
        records.map(|record| serde_json::from_str::<Value>(&record).expect("JSON")).collect::<Vec<_>>()
    };
    let leaves = async || rows().await.iter().filter(|record| record["action"] == "leave").count();
    wait_until(SOON, "the leave to be stored", async || leaves().await == 1).await;
    for node in &nodes[1..] {
        let path = "/api/channels/room/presence/history";
        let basic = http::basic("secret.k1");
        let answer = http::request(node.addr(), "GET", path, &[("authorization", &basic)], "").await;
        let events = answer.json()["events"].as_array().expect("a list").clone();
        let actions: Vec<&Value> = events.iter().map(|event| &event["action"]).collect();
        assert_eq!(actions, ["leave", "enter"]);
    }
    assert_eq!((rows().await.len(), leaves().await), (2, 1));
}

/// Clients move between nodes, some of which are killed and restarted.
#[tokio::test(flavor = "multi_thread")]
async fn clients_moving_among_failing_nodes_miss_nothing() {
    let Some(mut cluster) = cluster(3).await else { return };
    let mut clients = Subscriber::on_each(cluster.nodes(), "moves").await;
    let mut publishers = publishers(cluster.nodes()).await;
    let mut attaches = 0;
    for round in 0..6_usize {
        publishers.until_acked(LOAD).await;
        let victim = round % 3;
        if round % 2 == 0 {
            cluster.nodes()[victim].kill();
        }
        for (at, client) in std::mem::take(&mut clients).into_iter().enumerate() {
            let to = if round % 2 == 0 { (victim + 1 + at % 2) % 3 } else { (round + at) % 3 };
            let received = client.leave().await;
            clients.push(Subscriber::after(&cluster.nodes()[to], "moves", received).await);
            attaches += 3;
        }
        if round % 2 == 0 {
            cluster.restart(victim).await;
            cluster.until_linked().await;
            publishers.add(&cluster.nodes()[victim]).await;
        }
    }
    let acknowledged = publishers.end().await;
    let mut losses = Vec::new();
    for client in clients {
        // A client with a reported loss does not get the missing messages of failed nodes.
        let mut expected = acknowledged.clone();
        if client.received().losses() > 0 {
            expected.retain(|(from, _), _| *from > 2);
        }
        let received = client.settle(&expected).await;
        losses.push(received.losses());
    }
    println!("of {attaches} attaches, told {losses:?} times");
    assert!(4 * losses.iter().sum::<u64>() < attaches, "it is of little use when many are told: {losses:?}");
    for node in cluster.nodes() {
        node.assert_well().await;
    }
}

/// The stored history of several nodes and the live messages join without a gap.
#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_joins_what_all_nodes_stored_and_what_comes() {
    let Some(mut cluster) = cluster(3).await else { return };
    let nodes = cluster.nodes();
    let mut publishers = Vec::new();
    for node in &*nodes {
        publishers.push(Socket::open(node, "").await);
    }
    for number in 0..20_u64 {
        for (from, publisher) in publishers.iter_mut().enumerate() {
            publisher.publish("room", json!({"data": [from, number]})).await;
        }
    }
    let mut more = JoinSet::new();
    more.spawn(async move {
        for number in 20..120_u64 {
            for (from, publisher) in publishers.iter_mut().enumerate() {
                publisher.publish("room", json!({"data": [from, number]})).await;
            }
        }
    });
    let mut readers = JoinSet::new();
    for (at, node) in nodes.iter().enumerate() {
        pace(Duration::from_millis(100 * at as u64)).await;
        let (mut socket, attached) = attach(node, "room", &json!({"rewind": "50"})).await;
        assert_eq!(attached["warning"], Value::Null, "{attached}");
        // Reads from now on: a client that does not answer for long is closed, and the database may take long.
        readers.spawn(async move {
            let mut next: [Option<u64>; 3] = [None; 3];
            let mut count = 0;
            while next != [Some(120); 3] {
                for data in read(&mut socket, "room", 1).await {
                    let part = |at: usize| data[at].as_u64().expect("a number");
                    let next = &mut next[part(0) as usize];
                    assert!(next.is_none_or(|next| next == part(1)), "{data} and {next:?}");
                    *next = Some(part(1) + 1);
                    count += 1;
                }
            }
            assert!(count >= 50, "only {count}");
        });
    }
    more.join_next().await.expect("a publisher").expect("all is published");
    while let Some(read) = readers.join_next().await {
        read.expect("a reader has all");
    }
}
