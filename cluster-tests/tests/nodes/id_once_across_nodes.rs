//! A message that is published again under its id, at any node and at any time, is delivered once, and the repeat gets
//! the same ack. If that cannot be known, publishing goes on.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, cut_off, until_peers_down};
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::{Node, Socket, http};
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// Greatest time for a publish with an id while a node does not answer.
const GOES_ON: Duration = Duration::from_secs(2);
/// Greatest time until a frame comes: heartbeats come between messages.
const RECEIVED_WITHIN: Duration = Duration::from_secs(60);

async fn on_each(nodes: &[Node]) -> Vec<Socket> {
    let mut sockets = Vec::new();
    for node in nodes {
        sockets.push(Socket::open(node, "").await);
    }
    sockets
}

async fn subscribers(nodes: &[Node]) -> Vec<Socket> {
    let mut sockets = on_each(nodes).await;
    for socket in &mut sockets {
        socket.attach("room").await;
    }
    sockets
}

fn message(id: &str) -> Value {
    json!({"id": id, "data": id})
}

fn request(messages: &[Value]) -> Value {
    json!({"op": 13, "channel": "room", "messages": messages})
}

async fn publish(socket: &mut Socket, messages: &[Value]) -> Vec<String> {
    let ack = socket.ask(request(messages)).await;
    assert_eq!(ack["op"], 1, "{ack}");
    let serials = ack["serials"].as_array().expect("serials").iter();
    serials.map(|serial| serial.as_str().expect("a serial").to_owned()).collect()
}

/// Gives the ids of the messages that a subscriber gets before the last one.
async fn received_ids(socket: &mut Socket, last: &str) -> Vec<String> {
    let mut ids = Vec::new();
    loop {
        let frame = socket.next_within(RECEIVED_WITHIN).await.expect("a message, or a sign of life");
        for message in frame["messages"].as_array().into_iter().flatten() {
            let id = message["id"].as_str().expect("an id").to_owned();
            if id == last {
                return ids;
            }
            ids.push(id);
        }
    }
}

/// Receives ids in the background from now on: a client that does not answer for long is closed, and a busy machine may
/// take long.
fn receive_in_background(subscribers: Vec<Socket>) -> JoinSet<Vec<String>> {
    let hear = |mut socket| async move { received_ids(&mut socket, "end").await };
    subscribers.into_iter().map(hear).collect()
}

/// Counts the claims that a peer did not answer in time, which happens on a machine that is too busy.
async fn left_out(nodes: &[Node]) -> f64 {
    let mut sum = 0.0;
    for node in nodes {
        sum += node.metric("fanfare_id_claims_unanswered_total").await;
    }
    sum
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repeat_to_another_node_is_acknowledged_and_nothing_else() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = &*cluster.nodes();
    let subscribers = receive_in_background(subscribers(nodes).await);
    let mut publishers = on_each(nodes).await;
    let mut expected = Vec::new();
    for number in 0..30 {
        let (id, at) = (format!("m{number}"), number % 3);
        let first = publish(&mut publishers[at], &[message(&id)]).await;
        for publisher in &mut publishers {
            assert_eq!(publish(publisher, &[message(&id)]).await, first, "{id}");
        }
        expected.push(id);
    }
    // Known and new ids in one publish, and over HTTP to one channel and to several.
    let known = publish(&mut publishers[0], &[message("m4"), message("m5")]).await;
    let mixed = publish(&mut publishers[1], &[message("m5"), message("new"), message("m4")]).await;
    assert_eq!([&mixed[0], &mixed[2]], [&known[1], &known[0]]);
    expected.push("new".into());
    let authorization = http::basic(&nodes[2].key());
    let headers = [("authorization", &*authorization)];
    for (path, body) in [
        ("/api/channels/room/publish", message("new")),
        ("/api/publish", json!({"channels": ["room"], "messages": [message("m1"), message("new")]})),
    ] {
        let answer = http::request(nodes[2].addr(), "POST", path, &headers, body.to_string()).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        assert!(!String::from_utf8_lossy(&answer.body).contains("error"), "{:?}", answer.body);
    }
    publish(&mut publishers[0], &[message("end")]).await;
    for ids in subscribers.join_all().await {
        assert_eq!(ids, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn id_sent_to_all_nodes_at_once_is_published_once() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = &*cluster.nodes();
    let subscribers = receive_in_background(subscribers(nodes).await);
    let mut publishers = on_each(nodes).await;
    const ROUNDS: usize = 100;
    for number in 0..ROUNDS {
        let messages = [message(&format!("m{number}")), message(&format!("n{number}"))];
        let [a, b, c] = &mut *publishers else { panic!("three nodes were started") };
        let before = left_out(nodes).await;
        let (a, b, c) = tokio::join!(publish(a, &messages), publish(b, &messages), publish(c, &messages));
        assert!(a == b && b == c || left_out(nodes).await > before, "{number}: {a:?} {b:?} {c:?}");
    }
    publish(&mut publishers[0], &[message("end")]).await;
    let expected = (0..ROUNDS).flat_map(|number| [format!("m{number}"), format!("n{number}")]);
    let expected: Vec<String> = expected.collect();
    for ids in subscribers.join_all().await {
        assert!(ids == expected || left_out(nodes).await > 0.0, "{ids:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acked_ids_are_known_to_peers_after_their_node_is_killed() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let subscribers = receive_in_background(subscribers(&nodes[1..]).await);
    let mut publishers = on_each(nodes).await;
    // Many publishes, so that some have just been acknowledged when the node is killed.
    const MESSAGES: usize = 200;
    let mut started = Vec::new();
    for number in 0..MESSAGES {
        started.push(publishers[0].start(request(&[message(&format!("m{number}"))])).await);
    }
    let mut first = Vec::new();
    for started in started {
        let ack = publishers[0].find("the ack", |frame| frame["id"] == *started).await;
        assert_eq!(ack["op"], 1, "{ack}");
        first.push(ack["serials"][0].as_str().expect("a serial").to_owned());
    }
    nodes[0].kill();
    for (number, first) in first.iter().enumerate() {
        for publisher in &mut publishers[1..] {
            let again = publish(publisher, &[message(&format!("m{number}"))]).await;
            assert_eq!(again, std::slice::from_ref(first), "m{number}");
        }
    }
    publish(&mut publishers[1], &[message("end")]).await;
    let expected: Vec<String> = (0..MESSAGES).map(|number| format!("m{number}")).collect();
    for ids in subscribers.join_all().await {
        assert_eq!(ids, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_nodes_remember_the_ids_of_messages() {
    let mut cluster = Cluster::linked(2).await;
    let first = {
        let mut publisher = Socket::open(&cluster.nodes()[0], "").await;
        publish(&mut publisher, &[message("a"), message("b")]).await
    };
    // The first node is killed, so it hands nothing over.
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    n0.kill();
    assert_eq!(n1.stop().await.code(), Some(0));
    n1.set_environment("FANFARE_SEED", "127.0.0.1:1");
    n1.restart().await;
    let mut publisher = Socket::open(n1, "").await;
    assert_eq!(publish(&mut publisher, &[message("a"), message("b")]).await, first);
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_delays_publishes_with_ids_only_briefly() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = &*cluster.nodes();
    let subscribers = receive_in_background(subscribers(&nodes[..2]).await);
    let mut publishers = on_each(&nodes[..2]).await;
    nodes[2].pause();
    let paused = Instant::now();
    let mut expected = Vec::new();
    // Until the other nodes have declared the stalled one down, and after that.
    let mut number = 0;
    while paused.elapsed() < 2 * GOES_ON {
        let (id, at) = (format!("m{number}"), number % 2);
        let begun = Instant::now();
        let ack = publishers[at].ask(request(&[message(&id)])).await;
        let took = begun.elapsed();
        // The outcome may be unknown; then the message is published again.
        assert!(ack["op"] == 1 || ack["code"] == 50003, "{ack}");
        assert!(took < GOES_ON + GOES_ON / 4, "{id} took {took:?}");
        for publisher in &mut publishers {
            publish(publisher, &[message(&id)]).await;
        }
        expected.push(id);
        number += 1;
    }
    publish(&mut publishers[0], &[message("end")]).await;
    for ids in subscribers.join_all().await {
        assert_eq!(ids, expected);
    }
    assert!(left_out(&nodes[..2]).await > 0.0);
    nodes[2].resume_until_restarted(1).await;
    cluster.until_linked().await;
    let nodes = &*cluster.nodes();
    let mut back = Socket::open(&nodes[2], "").await;
    let first = publish(&mut publishers[0], &[message("back")]).await;
    assert_eq!(publish(&mut back, &[message("back")]).await, first);
}

#[test]
fn partition_sides_keep_publishing_and_publish_an_id_once_each() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = &*cluster.nodes();
        let mut publishers = on_each(nodes).await;
        let before = publish(&mut publishers[0], &[message("before")]).await;
        let cuts = cut_off(&network, nodes);
        until_peers_down(nodes).await;
        let mut subscribers = subscribers(nodes).await;
        let alone = publish(&mut publishers[0], &[message("m")]).await;
        let together = publish(&mut publishers[1], &[message("m")]).await;
        assert_ne!(alone, together);
        for (publisher, published) in publishers.iter_mut().zip([&alone, &together, &together]) {
            assert_eq!(publish(publisher, &[message("before")]).await, before);
            assert_eq!(publish(publisher, &[message("m")]).await, *published);
        }
        for (at, last) in [(0, "alone"), (1, "together")] {
            publish(&mut publishers[at], &[message(last)]).await;
        }
        for (subscriber, last) in subscribers.iter_mut().zip(["alone", "together", "together"]) {
            assert_eq!(received_ids(subscriber, last).await, ["m"]);
        }
        drop(cuts);
        cluster.until_linked().await;
        let mut fresh = on_each(cluster.nodes()).await;
        for subscriber in &mut fresh {
            subscriber.attach("room").await;
        }
        for publisher in &mut publishers {
            let again = publish(publisher, &[message("m")]).await;
            assert!(again == alone || again == together, "{again:?}");
        }
        publish(&mut publishers[0], &[message("healed")]).await;
        for subscriber in &mut fresh {
            assert_eq!(received_ids(subscriber, "healed").await, [""; 0]);
        }
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn publisher_order_holds_for_messages_with_and_without_ids() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = &*cluster.nodes();
    let mut subscribers = subscribers(nodes).await;
    let mut publisher = Socket::open(&nodes[0], "").await;
    let mut other = Socket::open(&nodes[1], "").await;
    const MESSAGES: u64 = 300;
    let (mut started, mut contesting) = (Vec::new(), Vec::new());
    for number in 0..MESSAGES {
        let mut message = json!({"data": number});
        if number % 3 != 1 {
            message["id"] = json!(format!("m{number}"));
        }
        started.push(publisher.start(request(std::slice::from_ref(&message))).await);
        // Another client publishes some of the ids, too; their messages may come from either.
        if number % 9 == 0 {
            contesting
                .push(other.start(request(&[json!({"id": format!("m{number}"), "data": "other"})])).await);
        }
    }
    for started in started {
        let ack = publisher.find("the ack", |frame| frame["id"] == *started).await;
        assert_eq!(ack["op"], 1, "{ack}");
    }
    for started in contesting {
        let ack = other.find("the ack", |frame| frame["id"] == *started).await;
        assert_eq!(ack["op"], 1, "{ack}");
    }
    publish(&mut publisher, &[message("end")]).await;
    for subscriber in &mut subscribers {
        let (mut numbers, mut others, mut ends) = (Vec::new(), 0, false);
        while !ends {
            let frame = subscriber.message("room").await;
            for message in frame["messages"].as_array().expect("messages") {
                ends |= message["id"] == "end";
                others += u64::from(message["data"] == "other");
                numbers.extend(message["data"].as_u64());
            }
        }
        assert!(numbers.is_sorted(), "{numbers:?}");
        assert!(
            numbers.len() as u64 + others == MESSAGES || left_out(nodes).await > 0.0,
            "{others} of another and {numbers:?}"
        );
    }
}

const SOCKETS: usize = 8;
const TURNS: usize = 20;
/// Number of unanswered publishes of a socket.
const TOGETHER: usize = 25;

/// Gives the number of publishes with ids that are acknowledged per second, over some sockets of one node.
async fn rate(node: &Node, channel: &str) -> f64 {
    let mut sockets = tokio::task::JoinSet::new();
    let begun = Instant::now();
    for from in 0..SOCKETS {
        let mut socket = Socket::open(node, "").await;
        let channel = channel.to_owned();
        sockets.spawn(async move {
            for turn in 0..TURNS {
                let mut last = String::new();
                for number in 0..TOGETHER {
                    let message = json!({"id": format!("{from}-{turn}-{number}"), "data": number});
                    last = socket.start(json!({"op": 13, "channel": channel, "messages": [message]})).await;
                }
                let ack = socket.find("the last ack", |frame| frame["id"] == *last).await;
                assert_eq!(ack["op"], 1, "{ack}");
            }
        });
    }
    while let Some(ended) = sockets.join_next().await {
        ended.expect("a publisher does not fail");
    }
    (SOCKETS * TURNS * TOGETHER) as f64 / begun.elapsed().as_secs_f64()
}

#[tokio::test(flavor = "multi_thread")]
async fn busy_publisher_shares_id_claims_among_messages() {
    let mut cluster = Cluster::linked(2).await;
    let mut alone = Cluster::linked(1).await;
    let (mut together, mut single) = (Vec::new(), Vec::new());
    for turn in 0..3 {
        let channel = format!("room:{turn}");
        single.push(rate(&alone.nodes()[0], &channel).await.round());
        together.push(rate(&cluster.nodes()[0], &channel).await.round());
    }
    let asked = cluster.nodes()[0].metric("fanfare_id_claims_sent_total").await;
    let count = (3 * SOCKETS * TURNS * TOGETHER) as f64;
    println!("acked publishes with ids in a second: {together:?} with two nodes, {single:?} with one");
    println!("{asked} claims for {count} publishes");
    assert!(asked > 0.0 && asked * 5.0 < count, "{asked} claims for {count} publishes");
    assert_eq!(alone.nodes()[0].metric("fanfare_id_claims_sent_total").await, 0.0);
}
