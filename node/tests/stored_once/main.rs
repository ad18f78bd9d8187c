//! A message is stored once, by the node at which it entered: not by the nodes that it is forwarded to, and
//! not when it is delivered again.
//!
//! Three nodes in one process store through one store, which notes the calls of each node.

mod nodes;
mod recording;
mod socket;
mod traffic;

use std::time::Duration;

use futures_util::future::join_all;
use nodes::{NODES, Nodes, forwards, forwards_since};
use serde_json::json;
use socket::Socket;
use traffic::{AckedItems, Publisher, Subscriber, assert_received_once};

/// Timeout for anything that should happen at once, on a machine that is busy with other tests.
const SOON: Duration = Duration::from_secs(30);
const KEPT: &str = "kept:room";
/// Name of a channel that keeps no history.
const PASSING: &str = "passing:room";
const CHANNELS: [&str; 2] = [KEPT, PASSING];
/// Number of nodes to which a node forwards a message that all have interest in.
const OTHERS: u64 = NODES as u64 - 1;

fn is_kept(channel: &str) -> bool {
    channel.starts_with("kept:")
}

/// Makes that many texts, unlike all others of the test.
fn texts(what: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{what} {number}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_is_stored_where_it_entered_and_nowhere_else() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &CHANNELS).await;
    let forwarded = forwards();
    let publish = async |mut publisher: Publisher| {
        let mut acknowledged = AckedItems::default();
        for round in 0..5 {
            let texts = |how, count| texts(&format!("{how} in {round} of {}", publisher.node), count);
            let (alone, batch, ahead) = (texts("alone", 1), texts("batch", 5), texts("ahead", 10));
            let (posted, array, both) = (texts("posted", 1), texts("array", 4), texts("both", 2));
            for channel in CHANNELS {
                publisher.publish(&mut acknowledged, channel, &alone).await;
                publisher.publish(&mut acknowledged, channel, &batch).await;
                publisher.publish_each(&mut acknowledged, channel, &ahead).await;
                publisher.post(&mut acknowledged, &[channel], &posted).await;
                publisher.post(&mut acknowledged, &[channel], &array).await;
            }
            publisher.post(&mut acknowledged, &CHANNELS, &both).await;
        }
        acknowledged.messages
    };
    let acked = join_all(Publisher::on_each(&nodes).await.into_iter().map(publish)).await;
    let mut acknowledged = AckedItems { messages: acked.concat(), ..AckedItems::default() };
    for channel in CHANNELS {
        assert_received_once(&nodes, &mut subscribers, &mut acknowledged, channel).await;
        acknowledged.assert_read_once(&nodes, channel).await;
    }
    let forwarded = forwards_since(forwarded);
    drop(subscribers);
    let log = nodes.stop().await;
    acknowledged.assert_stored_once(&log);
    assert_eq!(forwarded, [log.appends * OTHERS; 2], "sent and taken, once for each node that wants it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn given_id_is_stored_by_the_first_node_to_receive_it() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &CHANNELS).await;
    let mut publishers = Publisher::on_each(&nodes).await;
    let forwarded = forwards();
    let mut acknowledged = AckedItems::default();
    for round in 0..12 {
        let channel = CHANNELS[round % 2];
        let data = format!("round {round}");
        let message = json!({"id": format!("own-{round}"), "data": data});
        let first = round % 4;
        if first < NODES {
            publishers[first].post_one(channel, std::slice::from_ref(&message)).await;
        }
        let at_once = publishers.iter_mut().map(async |publisher| {
            let stamps = publisher.socket.publish(channel, std::slice::from_ref(&message)).await;
            stamps[0]
        });
        let stamps = join_all(at_once).await;
        assert_eq!(stamps, [stamps[0]; NODES]);
        let node = nodes.node_of(stamps[0].incarnation);
        assert!(first == NODES || node == first, "{node}, and it came to {first} first");
        acknowledged.message(node, channel, &data, Some(stamps[0]));
        for publisher in &mut publishers {
            publisher.post_one(channel, &[message.clone(), message.clone()]).await;
            let new = format!("beside it in round {round} at {}", publisher.node);
            let messages = [message.clone(), json!({"data": new}), message.clone()];
            let again = publisher.socket.publish(channel, &messages).await;
            assert_eq!([again[0], again[2]], [stamps[0]; 2]);
            acknowledged.message(publisher.node, channel, &new, Some(again[1]));
        }
    }
    for channel in CHANNELS {
        assert_received_once(&nodes, &mut subscribers, &mut acknowledged, channel).await;
        acknowledged.assert_read_once(&nodes, channel).await;
    }
    let forwarded = forwards_since(forwarded);
    drop((subscribers, publishers));
    let log = nodes.stop().await;
    acknowledged.assert_stored_once(&log);
    assert_eq!(forwarded, [log.appends * OTHERS; 2], "sent and taken, once for each node that wants it");
}

/// A member that enters the channel on node `from`, and whose connection is resumed on the next node and then on the
/// one after.
async fn roam(nodes: &Nodes, acknowledged: &mut AckedItems, channel: &str, from: usize) {
    let name = format!("rover{from}");
    let open = |node: usize, more: String| {
        let query = format!("?clientId={name}{more}");
        async move { Socket::open(nodes.addr(node), &query).await }
    };
    let mut socket = open(from, String::new()).await;
    for (step, action) in ["enter", "update", "leave"].into_iter().enumerate() {
        let node = (from + step) % NODES;
        if step > 0 {
            let key = socket.connected["connectionKey"].as_str().expect("a key");
            let resumed_socket = open(node, format!("&resume={key}")).await;
            assert_eq!(resumed_socket.connected["resumed"], true, "{}", resumed_socket.connected);
            socket = resumed_socket;
        }
        socket.present(action, channel, &json!(step)).await;
        acknowledged.change(node, channel, &format!("{action} {name} {step}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_presence_is_stored_by_the_node_of_its_connection() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &CHANNELS).await;
    let mut acknowledged = AckedItems::default();
    for channel in CHANNELS {
        for node in 0..NODES {
            for end in ["leave", "close", "lose"] {
                let name = format!("{end}{node}");
                let mut socket = Socket::open(nodes.addr(node), &format!("?clientId={name}")).await;
                for (action, data) in [("enter", 1), ("update", 2), ("update", 3)] {
                    socket.present(action, channel, &json!(data)).await;
                    acknowledged.change(node, channel, &format!("{action} {name} {data}"));
                }
                match end {
                    "leave" => socket.present("leave", channel, &json!(3)).await,
                    "close" => {
                        socket.send(&json!({"op": 5})).await;
                        while socket.next().await["op"] != 6 {}
                    }
                    _ => drop(socket),
                }
                acknowledged.change(node, channel, &format!("leave {name} 3"));
            }
            roam(&nodes, &mut acknowledged, channel, node).await;
        }
    }
    for channel in CHANNELS {
        assert_received_once(&nodes, &mut subscribers, &mut acknowledged, channel).await;
        acknowledged.assert_read_once(&nodes, channel).await;
    }
    drop(subscribers);
    acknowledged.assert_stored_once(&nodes.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_replayed_on_resume_are_stored_only_once() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &[KEPT]).await;
    let mut publishers = Publisher::on_each(&nodes).await;
    let mut acknowledged = AckedItems::default();
    let mut socket = Socket::open(nodes.addr(0), "").await;
    socket.attach(KEPT, &json!({})).await;
    let mut moving = Subscriber::new(socket);
    let filler = "x".repeat(1024);
    // A small backlog is in the other node's replay buffer, a large one is not.
    for (step, (node, much)) in [(1, false), (2, true), (0, false), (1, true)].into_iter().enumerate() {
        for publisher in &mut publishers {
            let data = texts(&format!("heard in {step} of {}", publisher.node), 2);
            publisher.publish_each(&mut acknowledged, KEPT, &data).await;
        }
        let position = moving.receive_all(acknowledged.expected_on(KEPT)).await;
        let key = moving.socket.connected["connectionKey"].as_str().expect("a key").to_owned();
        let received = moving.received;
        drop(moving.socket);
        for publisher in &mut publishers {
            let what = format!("missed in {step} of {}{}", publisher.node, if much { &filler } else { "" });
            publisher.publish_each(&mut acknowledged, KEPT, &texts(&what, if much { 40 } else { 3 })).await;
        }
        let reads = nodes.reads();
        let mut socket = Socket::open(nodes.addr(node), &format!("?resume={key}")).await;
        assert_eq!(socket.connected["resumed"], true, "{}", socket.connected);
        let attached = socket.attach(KEPT, &json!({"serial": position})).await;
        assert_eq!(attached["resumed"], true, "{attached}");
        moving = Subscriber { socket, received };
        moving.receive_all(acknowledged.expected_on(KEPT)).await;
        assert_eq!(nodes.reads() > reads, much, "in step {step}");
    }
    subscribers.push(moving);
    assert_received_once(&nodes, &mut subscribers, &mut acknowledged, KEPT).await;
    acknowledged.assert_read_once(&nodes, KEPT).await;
    drop((subscribers, publishers));
    acknowledged.assert_stored_once(&nodes.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_rewound_for_new_subscriber_are_stored_only_once() {
    let nodes = Nodes::start().await;
    let mut publishers = Publisher::on_each(&nodes).await;
    let mut acknowledged = AckedItems::default();
    for has_subscribers in [false, true] {
        let channel = if has_subscribers { KEPT } else { "kept:quiet" };
        let mut subscribers = Vec::new();
        if has_subscribers {
            subscribers = Subscriber::on_each(&nodes, &[channel]).await;
        }
        for publisher in &mut publishers {
            let data = texts(&format!("of {}", publisher.node), 5);
            publisher.publish_each(&mut acknowledged, channel, &data).await;
        }
        for subscriber in &mut subscribers {
            subscriber.receive_all(acknowledged.expected_on(channel)).await;
        }
        for node in 0..NODES {
            let reads = nodes.reads();
            let mut socket = Socket::open(nodes.addr(node), "").await;
            socket.attach(channel, &json!({"rewind": "15"})).await;
            let mut newcomer = Subscriber::new(socket);
            newcomer.receive_all(acknowledged.expected_on(channel)).await;
            // A node without subscribers has no replay buffer of the channel, so it reads the store.
            assert_eq!(nodes.reads() > reads, !has_subscribers, "on node {node} of {channel}");
            subscribers.push(newcomer);
        }
        assert_received_once(&nodes, &mut subscribers, &mut acknowledged, channel).await;
        acknowledged.assert_read_once(&nodes, channel).await;
    }
    drop(publishers);
    acknowledged.assert_stored_once(&nodes.stop().await);
}
