//! AMQP targets of real nodes, on a real RabbitMQ.

use std::time::Duration;

use fanfare_cluster_tests::attempts::{assert_whole_batches, until_sent};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::rabbitmq::ConsumedMessage;
use fanfare_cluster_tests::{
    Directory, Node, NodeOptions, RabbitMq, SOON, Socket, hostile, http, wait_until,
};
use fanfare_proto::path::encode_channel;
use lapin::ExchangeKind;
use lapin::options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
/// Greatest time until the next attempts of a channel.
const RETRIED: Duration = Duration::from_secs(60);

async fn node(integrations: &[(&str, String)]) -> Node {
    let account = Directory::default().account("acme");
    let with_targets =
        integrations.iter().fold(account, |directory, (id, fields)| directory.integration(id, fields));
    Node::start(NodeOptions::default().directory(with_targets.key("k1", "secret", ALL), KEY)).await
}

fn target(broker: &RabbitMq, more: &str) -> String {
    format!("kind = \"amqp\"\nurl = \"{}\"\n{more}", broker.url())
}

/// Declares a topic exchange, and a queue that is bound to it by the key.
async fn bind(broker: &RabbitMq, exchange: &str, queue: &str, key: &str) {
    let channel = broker.connect().await.create_channel().await.expect("a channel");
    let (options, none) = (ExchangeDeclareOptions::default(), FieldTable::default);
    channel.exchange_declare(exchange.into(), ExchangeKind::Topic, options, none()).await.expect("declared");
    channel.queue_declare(queue.into(), QueueDeclareOptions::default(), none()).await.expect("declared");
    let bound =
        channel.queue_bind(queue.into(), exchange.into(), key.into(), QueueBindOptions::default(), none());
    bound.await.expect("bound");
}

/// Counts the messages in a queue without a consumer.
async fn waiting(broker: &RabbitMq, queue: &str) -> u32 {
    let channel = broker.connect().await.create_channel().await.expect("a channel");
    let passive = QueueDeclareOptions { passive: true, ..QueueDeclareOptions::default() };
    let declared = channel.queue_declare(queue.into(), passive, FieldTable::default()).await;
    declared.expect("the queue is there").message_count()
}

async fn publish(node: &Node, channel: &str, data: Value) {
    let mut socket = Socket::open(node, "").await;
    let answer = socket.ask(json!({"op": 13, "channel": channel, "data": data})).await;
    assert_eq!(answer["op"], 1, "{channel}: {answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_reach_their_queue_alone() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let names = hostile::channels();
    let escaped = |name: &str| encode_channel(name).replace('.', "%2E").replace('*', "%2A");
    // A routing key has 255 bytes at most, so a long name ends in a digest.
    let short: Vec<_> = names.iter().filter(|name| escaped(name).len() < 200).collect();
    bind(&broker, "events", "all", "acme.#").await;
    for (index, name) in short.iter().enumerate() {
        bind(&broker, "events", &format!("q{index}"), &format!("acme.channel.message.{}", escaped(name)))
            .await;
    }
    let fields =
        "exchange = \"events\"\nrouting_key = \"{account}.{source}.{channel}\"\nevents = [\"message\"]";
    let only = format!("exchange = \"\"\nrouting_key = \"only\"\nchannels = [{}]", hostile::toml(&names[0]));
    bind(&broker, "events", "only", "none").await;
    let node = node(&[("bus", target(&broker, fields)), ("only", target(&broker, &only))]).await;
    let mut socket = Socket::open(&node, "").await;
    for name in hostile::refused_channels() {
        let answer = socket.ask(json!({"op": 13, "channel": name, "data": "refused"})).await;
        assert_eq!((&answer["op"], &answer["code"]), (&json!(2), &json!(40003)), "{name:?}: {answer}");
    }
    let mut all = broker.consume("all").await;
    for name in &names {
        publish(&node, name, json!(name)).await;
        let message = all.next().await;
        assert_eq!(message.envelope["channel"], **name);
        assert_eq!(message.envelope["items"][0]["data"], **name);
        assert_eq!(message.header("x-service-rule-id"), "bus");
        assert_eq!(message.header("x-service-channel"), encode_channel(name));
        assert_eq!(message.header("x-service-event-id"), message.message_id);
        assert!(message.routing_key.len() <= 255, "{}", message.routing_key);
    }
    until_sent(&node).await;
    let queues = short.iter().enumerate().map(|(index, name)| (format!("q{index}"), &***name));
    for (queue, name) in queues.chain([("only".to_owned(), &*names[0])]) {
        assert_eq!(waiting(&broker, &queue).await, 1, "{name:?} alone is in {queue}");
        assert_eq!(broker.consume(&queue).await.next().await.envelope["channel"], *name);
    }
    let listed = {
        let authorization = http::basic(KEY);
        let headers = [("authorization", authorization.as_str())];
        http::request(node.addr(), "GET", "/api/amqp", &headers, "").await.json()
    };
    let shown = &listed["targets"][0];
    assert_eq!((&shown["id"], &shown["exchange"]), (&json!("bus"), &json!("events")));
    assert!(!listed.to_string().contains("guest"), "{listed}");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn unroutable_event_waits_and_holds_up_no_other_target() {
    let Some(broker) = RabbitMq::shared().await else { return };
    bind(&broker, "events", "bound", "a").await;
    let node = node(&[
        ("early", target(&broker, "exchange = \"events\"\nrouting_key = \"b\"")),
        ("missing", target(&broker, "exchange = \"missing\"")),
        ("bound", target(&broker, "exchange = \"events\"\nrouting_key = \"a\"\nevents = [\"message\"]")),
    ])
    .await;
    let mut bound = broker.consume("bound").await;
    for number in 0..3 {
        publish(&node, "c", json!(number)).await;
        assert_eq!(bound.next().await.envelope["items"][0]["data"], number);
    }
    // Counts attempts of both targets, since those of one alone would take longer.
    let retries = async || node.metric("fanfare_integration_retries_total").await >= 6.0;
    wait_until(RETRIED, "attempts that fail", retries).await;
    bind(&broker, "events", "late", "b").await;
    bind(&broker, "missing", "made", "#").await;
    for queue in ["late", "made"] {
        let mut consumer = broker.consume(queue).await;
        for number in 0..3 {
            let next = tokio::time::timeout(RETRIED, consumer.try_next()).await.expect("in time");
            assert_eq!(next.expect("a message").envelope["items"][0]["data"], number, "{queue}");
        }
    }
    assert!(!node.log().contains("guest"), "no credential is logged");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_an_outage_arrive_in_order_with_their_ids() {
    let Some(broker) = tokio::task::spawn_blocking(|| RabbitMq::start(None)).await.expect("started") else {
        return;
    };
    let (one, options) =
        (broker.connect().await, QueueDeclareOptions { durable: true, ..Default::default() });
    let channel = one.create_channel().await.expect("a channel");
    channel.queue_declare("jobs".into(), options, FieldTable::default()).await.expect("declared");
    broker.until_kept().await;
    let fields = "exchange = \"\"\nrouting_key = \"jobs\"\nevents = [\"message\"]\nbatch_events = 10";
    let node = node(&[("bus", target(&broker, fields))]).await;
    broker.signal("STOP");
    for number in 0..10 {
        publish(&node, "a", json!(number)).await;
    }
    broker.signal("KILL");
    for number in 10..20 {
        publish(&node, "a", json!(number)).await;
    }
    wait_until(SOON, "a refusal in the log", async || node.log().contains("target is unavailable")).await;
    let again = broker.clone();
    tokio::task::spawn_blocking(move || again.restart()).await.expect("restarted");
    let mut consumer = broker.consume("jobs").await;
    let (mut next, mut attempts) = (0, Vec::new());
    while next < 20 {
        let message =
            tokio::time::timeout(RETRIED, consumer.try_next()).await.expect("in time").expect("one");
        for item in message.envelope["items"].as_array().expect("items") {
            let number = item["data"].as_u64().expect("a number");
            assert!(number <= next, "{number} came before {next}");
            next = next.max(number + 1);
        }
        attempts.push(message);
    }
    let batches = attempts.iter().map(|message| (&*message.message_id, &*message.body));
    assert_whole_batches("jobs", batches);
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn example_of_the_guide_fills_its_queue() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let text = include_str!("../../../docs/guides/amqp.toml")
        .replace("amqp://guest:guest@localhost/%2f", &broker.url());
    let (_, fields) = text.split_once("id = \"orders\"\n").expect("an integration");
    // The setup is the first command of the guide.
    let url = broker.url();
    let vhost = url.rsplit('/').next().expect("a vhost");
    let made = broker.call("PUT", &format!("/api/queues/{vhost}/orders"), &json!({"durable": true})).await;
    assert_eq!(made.status, 201);
    let node = node(&[("orders", fields.to_owned())]).await;
    publish(&node, "bills:1", json!("another channel")).await;
    publish(&node, "orders:1", json!({"total": 7})).await;
    let message = broker.consume("orders").await.next().await;
    let envelope = &message.envelope;
    assert_eq!(
        (&envelope["channel"], &envelope["items"][0]["data"]),
        (&json!("orders:1"), &json!({"total": 7}))
    );
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn events_wait_while_the_broker_blocks_publishers() {
    let Some(other) = RabbitMq::shared().await else { return };
    let Some(broker) = tokio::task::spawn_blocking(|| RabbitMq::start(None)).await.expect("started") else {
        return;
    };
    for broker in [&broker, &other] {
        bind(broker, "events", "jobs", "#").await;
    }
    let fields = "exchange = \"events\"\nevents = [\"message\"]\ntimeout_ms = 1000";
    let node = node(&[("bus", target(&broker, fields)), ("other", target(&other, fields))]).await;
    let [mut blocked, mut free] = [broker.consume("jobs").await, other.consume("jobs").await];
    let number = |message: &ConsumedMessage| message.envelope["items"][0]["data"].as_u64().expect("a number");
    publish(&node, "a", json!(0)).await;
    assert_eq!((number(&blocked.next().await), number(&free.next().await)), (0, 0));
    let alarm = async |is_on| {
        let broker = broker.clone();
        tokio::task::spawn_blocking(move || broker.alarm(is_on)).await.expect("rung");
    };
    alarm(true).await;
    for expected in 1..=20 {
        publish(&node, "a", json!(expected)).await;
        assert_eq!(number(&free.next().await), expected, "the other target goes on");
    }
    wait_until(RETRIED, "the line", async || node.log().contains("connection.blocked")).await;
    // While the alarm lasts the broker takes no more messages.
    let waiting = async || node.metric("fanfare_outbox_events{kind=\"amqp\"}").await >= 19.0;
    wait_until(RETRIED, "the events in the outbox", waiting).await;
    alarm(false).await;
    let mut next = 1;
    while next <= 20 {
        let message = tokio::time::timeout(RETRIED, blocked.try_next()).await.expect("in time").expect("one");
        let number = number(&message);
        assert!(number <= next, "{number} came before {next}");
        next = next.max(number + 1);
    }
    let sent = async || node.metric("fanfare_outbox_events{kind=\"amqp\"}").await == 0.0;
    wait_until(RETRIED, "an empty outbox", sent).await;
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_broker_costs_no_thread_for_each_attempt() {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("amqp://u:p@{}/", silent.local_addr().expect("an address"));
    let node = node(&[("bus", format!("kind = \"amqp\"\nurl = \"{url}\"\nexchange = \"\""))]).await;
    let threads = || {
        let status = std::fs::read_to_string(format!("/proc/{}/status", node.pid())).expect("the node runs");
        let count = status.lines().find_map(|line| line.strip_prefix("Threads:")).expect("a count");
        count.trim().parse::<usize>().expect("a number")
    };
    publish(&node, "a", json!(1)).await;
    let mut sockets = Vec::new();
    let mut after_first = 0;
    for attempt in 0..4 {
        let accepted = tokio::time::timeout(RETRIED, silent.accept()).await.expect("an attempt in time");
        sockets.push(accepted.expect("a connection"));
        if attempt == 1 {
            after_first = threads();
        }
    }
    // The runtime's threads for blocking calls end by themselves. A thread per connection would stay.
    wait_until(SOON, "as many threads as after the first attempts", async || threads() <= after_first + 1)
        .await;
    wait_until(SOON, "the reason in the log", async || node.log().contains("no answer in time")).await;
    node.assert_no_panic();
}
