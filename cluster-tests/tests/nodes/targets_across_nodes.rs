//! Three nodes on one store: each event is sent once, by the origin of its message.

use std::collections::HashSet;

use fanfare_cluster_tests::attempts::{assert_whole_batches, until_sent};
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::receiver::Receiver;
use fanfare_cluster_tests::{Cassandra, Directory, Node, NodeOptions, RabbitMq, Socket, http};
use fanfare_proto::webhook::EVENT_ID;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const MESSAGES: usize = 60;
const NODES: usize = 3;
/// Wait for the store: several nodes of a database are slow on a busy machine.
const STORE_WAIT_MS: u64 = 8_000;

/// Publishes messages that name their node in the data; half of them over sockets.
async fn publish(nodes: &[Node], sockets: &mut [Socket]) {
    let authorization = http::basic(KEY);
    let headers = [("authorization", authorization.as_str())];
    for number in 0..MESSAGES {
        let at = number % NODES;
        let message = json!({"id": format!("m{number}"), "data": format!("n{at}")});
        if number % 2 == 0 {
            sockets[at].publish("fed", message).await;
        } else {
            let path = "/api/channels/fed/publish";
            let answer = http::request(nodes[at].addr(), "POST", path, &headers, message.to_string()).await;
            assert_eq!(answer.status, 200, "{}", answer.error());
        }
    }
}

/// Reads until the node has delivered all messages, and so has received all forwards.
async fn until_forwarded(socket: &mut Socket) {
    let mut count = 0;
    while count < MESSAGES {
        let frame = socket.message("fed").await;
        count += frame["messages"].as_array().map_or(1, Vec::len);
    }
}

/// Asserts that every message and every member is there once, from its own node.
fn assert_once_from_its_node(target: &str, envelopes: &[Value]) {
    let mut seen = HashSet::new();
    for envelope in envelopes {
        for item in envelope["items"].as_array().expect("items") {
            let (name, accepted_by) = match envelope["source"].as_str() {
                Some("channel.message") => (&item["id"], &item["data"]),
                _ => (&item["clientId"], &item["clientId"]),
            };
            assert_eq!(&envelope["nodeId"], accepted_by, "{target}: {envelope}");
            assert!(seen.insert(name.to_string()), "{target} has {name} twice");
        }
    }
    assert_eq!(seen.len(), MESSAGES + NODES, "{target}: {seen:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn scylla_three_nodes_send_each_event_once() {
    let (Some(broker), Some(cassandra)) = (RabbitMq::shared().await, Cassandra::shared()) else { return };
    let channel = broker.connect().await.create_channel().await.expect("a channel");
    let (any, none) = (QueueDeclareOptions::default(), FieldTable::default());
    channel.queue_declare("bus".into(), any, none).await.expect("declared");
    let receiver = Receiver::start().await;
    let bus = format!("kind = \"amqp\"\nurl = \"{}\"\nexchange = \"\"\nrouting_key = \"bus\"", broker.url());
    let hook = format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"s\"", receiver.url());
    let directory = Directory::default()
        .account("acme")
        .integration("hook", &hook)
        .integration("bus", &bus)
        .key("k1", "secret", ALL);
    let keyspace = cassandra.keyspace();
    let stored = |options: NodeOptions| {
        let options = cassandra.store(options.directory(directory.clone(), KEY), &keyspace);
        options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1").limit("store_wait_ms", STORE_WAIT_MS)
    };
    let mut cluster = Cluster::linked_with(NODES, stored).await;
    let nodes = cluster.nodes();
    // Attached on every node, so that each event is forwarded to both others.
    let mut sockets = Vec::new();
    for (index, node) in nodes.iter().enumerate() {
        let mut socket = Socket::open(node, &format!("?clientId=n{index}")).await;
        socket.attach("fed").await;
        sockets.push(socket);
    }
    for socket in &mut sockets {
        let entered = socket.ask(json!({"op": 12, "channel": "fed", "action": "enter"})).await;
        assert_eq!(entered["op"], 1, "{entered}");
    }
    publish(nodes, &mut sockets).await;
    for socket in &mut sockets {
        until_forwarded(socket).await;
    }
    for node in &*nodes {
        until_sent(node).await;
    }

    let requests = receiver.received();
    assert_whole_batches("hook", requests.iter().map(|request| (request.header(EVENT_ID), &*request.body)));
    let event_ids: HashSet<_> = requests.iter().map(|request| request.header(EVENT_ID)).collect();
    assert_eq!(event_ids.len(), requests.len(), "no batch was sent twice");
    let envelopes: Vec<_> = requests.iter().map(|request| request.envelope()).collect();
    assert_once_from_its_node("hook", &envelopes);

    let passive = QueueDeclareOptions { passive: true, ..any };
    let declared = channel.queue_declare("bus".into(), passive, FieldTable::default()).await;
    let waiting = declared.expect("the queue is there").message_count();
    let mut consumer = broker.consume("bus").await;
    let mut messages = Vec::new();
    for _ in 0..waiting {
        messages.push(consumer.next().await);
    }
    assert_whole_batches("bus", messages.iter().map(|message| (&*message.message_id, &*message.body)));
    let envelopes: Vec<_> = messages.into_iter().map(|message| message.envelope).collect();
    assert_once_from_its_node("bus", &envelopes);
    for node in nodes {
        node.assert_no_panic();
    }
}
