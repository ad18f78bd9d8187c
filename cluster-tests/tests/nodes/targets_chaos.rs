//! A queue, an AMQP target and a webhook, while the broker, the receiver and the node fail: each gets every
//! acknowledged message at least once, in the order of its channel, and a retry repeats the event id and the bytes of
//! its batch.

use std::collections::HashMap;
use std::time::Duration;

use fanfare_cluster_tests::attempts::assert_whole_batches;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::rabbitmq::QueueConsumer;
use fanfare_cluster_tests::receiver::{Answer, ReceivedRequest, Receiver};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, RabbitMq, http, wait_until};
use fanfare_proto::webhook::EVENT_ID;
use lapin::options::QueueDeclareOptions;
use lapin::types::FieldTable;
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const CHANNELS: [&str; 3] = ["a", "#", "b.c"];
/// Greatest time until a target has recovered, since the delay between attempts grows.
const RECOVERED: Duration = Duration::from_secs(180);

/// Next number of each channel, and the acknowledged numbers.
#[derive(Default)]
struct Publisher {
    next: u64,
    acknowledged: HashMap<&'static str, Vec<u64>>,
}

impl Publisher {
    async fn publish(&mut self, node: &Node, count: u64) {
        for number in self.next..self.next + count {
            for channel in CHANNELS {
                let path = format!("/api/channels/{}/publish", channel.replace('#', "%23"));
                let authorization = http::basic(KEY);
                let headers = [("authorization", authorization.as_str())];
                let body = json!({"data": number, "id": format!("m{number}")}).to_string();
                let answer = http::try_request(node.addr(), "POST", &path, &headers, body).await;
                if answer.is_ok_and(|answer| answer.status == 200) {
                    self.acknowledged.entry(channel).or_default().push(number);
                }
            }
        }
        self.next += count;
    }
}

/// Attempts at one target: event ids and bodies, in the order of arrival.
#[derive(Default)]
struct Attempts(Vec<(String, Vec<u8>)>);

impl Attempts {
    /// Gives the numbers of a channel, each at its first arrival.
    fn numbers(&self, channel: &str) -> Vec<u64> {
        let mut numbers = Vec::new();
        for (_, body) in &self.0 {
            let envelope: Value = serde_json::from_slice(body).expect("an envelope");
            let items = envelope["items"].as_array().expect("items");
            for item in items.iter().filter(|_| envelope["channel"] == channel) {
                let number = item["data"].as_u64().expect("a number");
                if !numbers.contains(&number) {
                    numbers.push(number);
                }
            }
        }
        numbers
    }

    fn has_all(&self, publisher: &Publisher) -> bool {
        publisher.acknowledged.iter().all(|(channel, acknowledged)| {
            let numbers = self.numbers(channel);
            acknowledged.iter().all(|number| numbers.contains(number))
        })
    }

    /// Asserts the order of the accepted attempts, and of all attempts.
    fn assert_in_order(&self, target: &str) {
        for channel in CHANNELS {
            let numbers = self.numbers(channel);
            assert!(numbers.is_sorted(), "{target} has {channel} out of order: {numbers:?}");
        }
        assert_whole_batches(target, self.0.iter().map(|(id, body)| (&**id, &**body)));
    }

    fn assert_good(&self, target: &str, publisher: &Publisher) {
        self.assert_in_order(target);
        assert!(self.has_all(publisher), "{target} lacks acknowledged messages");
    }
}

async fn take_all(mut consumer: QueueConsumer, target: &str, publisher: &Publisher) {
    let mut deliveries = Attempts::default();
    let taken = async {
        while !deliveries.has_all(publisher) {
            let message = consumer.try_next().await.expect("the consumer goes on");
            deliveries.0.push((message.message_id, message.body));
        }
    };
    let in_time = tokio::time::timeout(RECOVERED, taken).await;
    assert!(in_time.is_ok(), "{target} has {} messages only", deliveries.0.len());
    deliveries.assert_good(target, publisher);
}

async fn restart(broker: &RabbitMq) {
    let broker = broker.clone();
    tokio::task::spawn_blocking(move || broker.restart()).await.expect("restarted");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_target_gets_all_over_faults_of_each_part() {
    let Some(broker) = tokio::task::spawn_blocking(|| RabbitMq::start(None)).await.expect("started") else {
        return;
    };
    let (connection, durable) =
        (broker.connect().await, QueueDeclareOptions { durable: true, ..QueueDeclareOptions::default() });
    let channel = connection.create_channel().await.expect("a channel");
    channel.queue_declare("bus".into(), durable, FieldTable::default()).await.expect("declared");
    let receiver = Receiver::start().await;
    let bus = format!("kind = \"amqp\"\nurl = \"{}\"\nexchange = \"\"\nrouting_key = \"bus\"", broker.url());
    let hook = format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"s\"\ntimeout_ms = 1000", receiver.url());
    let directory = Directory::default()
        .account("acme")
        .integration("bus", &format!("{bus}\nbatch_events = 10"))
        .integration("hook", &hook)
        .key("k1", "secret", ALL);
    let options = broker.queues(NodeOptions::default().directory(directory, KEY));
    let mut node = Node::start(options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")).await;
    let authorization = http::basic(KEY);
    let headers = [("authorization", authorization.as_str())];
    let made = http::request(node.addr(), "POST", "/api/queues", &headers, r#"{"name":"q"}"#).await;
    assert_eq!(made.status, 200, "{}", made.error());
    broker.until_kept().await;

    let mut publisher = Publisher::default();
    publisher.publish(&node, 5).await;
    receiver.answer(Answer::Status(500));
    broker.signal("KILL");
    publisher.publish(&node, 10).await;
    restart(&broker).await;
    receiver.answer(Answer::Hang);
    publisher.publish(&node, 10).await;
    node.kill();
    publisher.publish(&node, 1).await;
    node.restart().await;
    publisher.publish(&node, 10).await;
    broker.signal("KILL");
    publisher.publish(&node, 10).await;
    receiver.answer(Answer::Slow(Duration::from_millis(300)));
    restart(&broker).await;
    publisher.publish(&node, 10).await;
    broker.signal("KILL");
    node.kill();
    node.restart().await;
    publisher.publish(&node, 10).await;
    restart(&broker).await;
    receiver.answer(Answer::Status(200));
    publisher.publish(&node, 5).await;

    let attempts = |is_counted: fn(&ReceivedRequest) -> bool| {
        let counted = receiver.received().into_iter().filter(is_counted);
        Attempts(counted.map(|request| (request.header(EVENT_ID).to_owned(), request.body)).collect())
    };
    let is_taken = |request: &ReceivedRequest| request.is_taken;
    wait_until(RECOVERED, "the webhook", async || attempts(is_taken).has_all(&publisher)).await;
    attempts(is_taken).assert_good("hook", &publisher);
    let failed = attempts(|request| !request.is_taken).0.len();
    assert!(failed >= 2, "{failed} attempts failed");
    attempts(|_| true).assert_in_order("hook, with failed attempts");
    take_all(broker.consume("acme:q").await, "queue", &publisher).await;
    take_all(broker.consume("bus").await, "bus", &publisher).await;
    let all: usize = publisher.acknowledged.values().map(Vec::len).sum();
    assert!(all >= CHANNELS.len() * 60, "{all} were acknowledged");
    node.assert_no_panic();
}
