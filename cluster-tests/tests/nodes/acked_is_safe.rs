//! Acknowledged messages are in history exactly once and in order, whatever ends the node.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use fanfare_client::{Client, Credential, Draft, Options, Ticket};
use fanfare_cluster_tests::{Node, NodeOptions, history, http, wait_until};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

const ROUNDS: usize = 20;
const CHANNELS: usize = 3;
const SOCKET_PUBLISHERS: usize = 3;
const HTTP_PUBLISHERS: usize = 2;
/// Number of unanswered publishes of a socket publisher.
const WINDOW: usize = 64;
const ARRAY: u64 = 3;

/// A message: its publisher, and its number in the channel.
type MessageNumber = (usize, u64);

/// Publishes of one publisher, by channel name.
#[derive(Default)]
struct PublisherRecord {
    sent: HashMap<String, Vec<MessageNumber>>,
    acked: HashMap<String, Vec<MessageNumber>>,
    /// Unanswered publish over HTTP, to be repeated: its channel and body.
    open: Option<(String, Value)>,
}

impl PublisherRecord {
    fn unanswered(&self) -> usize {
        let count =
            |messages: &HashMap<String, Vec<MessageNumber>>| messages.values().map(Vec::len).sum::<usize>();
        count(&self.sent) - count(&self.acked)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acked_messages_survive_a_kill_in_a_publish_storm() {
    let mut node = Node::start(NodeOptions::default().limit("publishes_per_second", 0)).await;
    let (mut kept, mut unanswered) = (HashMap::new(), 0);
    for round in 0..ROUNDS {
        let accounts = storm(&mut node, round).await;
        node.restart().await;
        for account in &accounts {
            unanswered += account.unanswered();
            repeat_open(&node, account).await;
        }
        for channel in channels(round) {
            kept.insert(channel.clone(), check(&node, &channel, &accounts).await);
        }
        node.assert_no_panic();
    }
    assert!(unanswered > ROUNDS, "the kills came in the middle of publishes: {unanswered}");
    for (channel, records) in kept {
        let again =
            history::read_all(node.addr(), &node.key(), &channel, "limit=1000&direction=forwards").await;
        assert_eq!(again, records, "{channel} is what it was, rounds later");
    }
}

fn channels(round: usize) -> Vec<String> {
    (0..CHANNELS).map(|channel| format!("storm:{round}/{channel}")).collect()
}

/// Publishes over sockets and HTTP until the node is killed.
async fn storm(node: &mut Node, round: usize) -> Vec<PublisherRecord> {
    let key = node.key();
    let (progress, mut acks) = mpsc::unbounded_channel();
    // All clients connect before the first publish, so that each has published before the kill.
    let (mut clients, mut connections) = (Vec::new(), Vec::new());
    for _ in 0..SOCKET_PUBLISHERS {
        let options = Options::new(node.url(), Credential::Key(key.clone()));
        clients.push(Client::connect(options).await.expect("the node is up"));
    }
    for _ in 0..HTTP_PUBLISHERS {
        connections.push(http::Connection::open(node.addr()).await.expect("the node is up"));
    }
    let mut publishers = JoinSet::new();
    for (publisher, client) in clients.into_iter().enumerate() {
        publishers.spawn(over_socket(client, publisher, round, progress.clone()));
    }
    for (publisher, connection) in (SOCKET_PUBLISHERS..).zip(connections) {
        publishers.spawn(over_http(connection, http::basic(&key), publisher, round, progress.clone()));
    }
    let kill_after = random_below(2_000) + 50;
    let mut acked = 0;
    wait_until(Duration::from_secs(60), "acks before the kill", async || {
        while acks.try_recv().is_ok() {
            acked += 1;
        }
        acked >= kill_after
    })
    .await;
    node.kill();
    publishers.join_all().await
}

async fn over_socket(
    client: Client,
    publisher: usize,
    round: usize,
    progress: mpsc::UnboundedSender<()>,
) -> PublisherRecord {
    let channels = channels(round);
    let mut account = PublisherRecord::default();
    let mut window: VecDeque<(String, MessageNumber, Ticket)> = VecDeque::new();
    for number in 0.. {
        let message = (publisher, number);
        let channel = &channels[usize::try_from(number).expect("small") % CHANNELS];
        account.sent.entry(channel.clone()).or_default().push(message);
        let draft = Draft { data: Some(raw(&data(message))), ..Draft::default() };
        let Ok(ticket) = client.publish_start(channel, vec![draft]).await else {
            break;
        };
        window.push_back((channel.clone(), message, ticket));
        if window.len() == WINDOW && !settle(&mut window, &mut account, &progress).await {
            break;
        }
    }
    while !window.is_empty() {
        settle(&mut window, &mut account, &progress).await;
    }
    account
}

/// Waits for the oldest answer; false if it is an error.
async fn settle(
    window: &mut VecDeque<(String, MessageNumber, Ticket)>,
    account: &mut PublisherRecord,
    progress: &mpsc::UnboundedSender<()>,
) -> bool {
    let Some((channel, message, ticket)) = window.pop_front() else {
        return true;
    };
    let answer = ticket.await;
    if let Err(fanfare_client::Error::Refused { code, error }) = &answer {
        assert_eq!(*code, 50003, "a publish may only be refused as unavailable: {error}");
    }
    if answer.is_ok() {
        account.acked.entry(channel).or_default().push(message);
        let _ = progress.send(());
    }
    answer.is_ok()
}

async fn over_http(
    mut connection: http::Connection,
    authorization: String,
    publisher: usize,
    round: usize,
    progress: mpsc::UnboundedSender<()>,
) -> PublisherRecord {
    let channels = channels(round);
    let mut account = PublisherRecord::default();
    for turn in 0_u64.. {
        let channel = &channels[usize::try_from(turn).expect("small") % CHANNELS];
        let messages: Vec<MessageNumber> = (0..ARRAY).map(|n| (publisher, turn * ARRAY + n)).collect();
        let body: Value = messages
            .iter()
            .map(|message| json!({"id": id(round, *message), "data": data(*message)}))
            .collect();
        account.sent.entry(channel.clone()).or_default().extend(&messages);
        let answer = publish(&mut connection, &authorization, channel, &body).await;
        if answer.is_err() {
            account.open = Some((channel.clone(), body));
            break;
        }
        account.acked.entry(channel.clone()).or_default().extend(messages);
        let _ = progress.send(());
    }
    account
}

async fn publish(
    connection: &mut http::Connection,
    authorization: &str,
    channel: &str,
    body: &Value,
) -> Result<(), http::Error> {
    let path = format!("/api/channels/{}/publish", fanfare_proto::path::encode_channel(channel));
    let headers = [("authorization", authorization), ("content-type", "application/json")];
    let answer = connection.request("POST", &path, &headers, body.to_string()).await?;
    if answer.status == 503 {
        return Err("unavailable, so the outcome is not known".into());
    }
    assert_eq!((answer.status, answer.json()), (200, json!({"channel": channel, "published": true})));
    Ok(())
}

/// Repeats the unanswered publish with the same ids, as a client does.
async fn repeat_open(node: &Node, account: &PublisherRecord) {
    if let Some((channel, body)) = &account.open {
        let mut connection = http::Connection::open(node.addr()).await.expect("the node is up again");
        let authorization = http::basic(&node.key());
        publish(&mut connection, &authorization, channel, body)
            .await
            .expect("the repeated publish is acknowledged");
    }
}

/// Checks the whole history of a channel against the acks of the publishers, and returns it.
async fn check(node: &Node, channel: &str, accounts: &[PublisherRecord]) -> Vec<Value> {
    let records = history::read_all(node.addr(), &node.key(), channel, "limit=1000&direction=forwards").await;
    let messages: Vec<MessageNumber> = records.iter().map(number_of).collect();
    let stored: HashSet<MessageNumber> = messages.iter().copied().collect();
    assert_eq!(stored.len(), messages.len(), "{channel}: a message is stored once");
    let ids: HashSet<&str> = records.iter().filter_map(|record| record["id"].as_str()).collect();
    assert_eq!(ids.len(), records.len(), "{channel}: every message has an id of its own");

    let mut sent = HashSet::new();
    for account in accounts {
        sent.extend(account.sent.get(channel).into_iter().flatten().copied());
        let acked = account.acked.get(channel).into_iter().flatten();
        let lost: Vec<_> = acked.filter(|message| !stored.contains(message)).collect();
        assert!(lost.is_empty(), "{channel}: acknowledged and lost: {lost:?}");
        if let Some((_, body)) = account.open.as_ref().filter(|(open, _)| open == channel) {
            let repeated = body.as_array().expect("an array").iter().map(number_of);
            assert!(
                repeated.into_iter().all(|message| stored.contains(&message)),
                "{channel}: repeated and lost"
            );
        }
    }
    assert!(stored.is_subset(&sent), "{channel}: something is stored that was never sent");
    for publisher in 0..SOCKET_PUBLISHERS + HTTP_PUBLISHERS {
        let numbers: Vec<u64> =
            messages.iter().filter(|message| message.0 == publisher).map(|message| message.1).collect();
        assert!(numbers.is_sorted(), "{channel}: publisher {publisher} out of order");
    }
    let times: Vec<u64> = records.iter().filter_map(|record| record["timestamp"].as_u64()).collect();
    assert!(times.len() == records.len() && times.is_sorted(), "{channel}: timestamps go back");

    let mut newest_first = history::read_all(node.addr(), &node.key(), channel, "limit=777").await;
    newest_first.reverse();
    assert!(newest_first == records, "{channel}: both directions tell the same");
    records
}

fn data(message: MessageNumber) -> Value {
    json!([message.0, message.1])
}

fn number_of(record: &Value) -> MessageNumber {
    let part = |index: usize| record["data"][index].as_u64().expect("a number");
    (usize::try_from(part(0)).expect("small"), part(1))
}

fn id(round: usize, message: MessageNumber) -> String {
    format!("{round}-{}-{}", message.0, message.1)
}

fn raw(value: &Value) -> Box<serde_json::value::RawValue> {
    serde_json::value::to_raw_value(value).expect("JSON")
}

fn random_below(bound: u64) -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    u64::from_ne_bytes(bytes) % bound
}
