//! What enters at a node is stored once, by that node: not by those that it is forwarded to, and not when it is given again.
//!
//! Three nodes in one process store through one store, which notes who hands it what.

mod nodes;
mod recording;
mod socket;
mod traffic;

use std::time::Duration;

use futures_util::future::join_all;
use nodes::{NODES, Nodes, forwards, forwards_since};
use serde_json::json;
use socket::Socket;
use traffic::{Owed, Publisher, Subscriber, assert_heard_once};

/// How long anything may take that should happen at once, on a machine that is busy with other tests.
const SOON: Duration = Duration::from_secs(30);
const KEPT: &str = "kept:room";
/// Its channel keeps no history.
const PASSING: &str = "passing:room";
const CHANNELS: [&str; 2] = [KEPT, PASSING];
/// To whom a node forwards what all want.
const OTHERS: u64 = NODES as u64 - 1;

fn is_kept(channel: &str) -> bool {
    channel.starts_with("kept:")
}

/// So many texts, unlike all others of the test.
fn texts(what: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{what} {number}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_is_stored_where_it_entered_and_nowhere_else() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &CHANNELS).await;
    let forwarded = forwards();
    let publish = async |mut publisher: Publisher| {
        let mut owed = Owed::default();
        for round in 0..5 {
            let texts = |how, count| texts(&format!("{how} in {round} of {}", publisher.node), count);
            let (alone, batch, ahead) = (texts("alone", 1), texts("batch", 5), texts("ahead", 10));
            let (posted, array, both) = (texts("posted", 1), texts("array", 4), texts("both", 2));
            for channel in CHANNELS {
                publisher.publish(&mut owed, channel, &alone).await;
                publisher.publish(&mut owed, channel, &batch).await;
                publisher.publish_each(&mut owed, channel, &ahead).await;
                publisher.post(&mut owed, &[channel], &posted).await;
                publisher.post(&mut owed, &[channel], &array).await;
            }
            publisher.post(&mut owed, &CHANNELS, &both).await;
        }
        owed.messages
    };
    let acked = join_all(Publisher::on_each(&nodes).await.into_iter().map(publish)).await;
    let mut owed = Owed { messages: acked.concat(), ..Owed::default() };
    for channel in CHANNELS {
        assert_heard_once(&nodes, &mut subscribers, &mut owed, channel).await;
        owed.assert_read_once(&nodes, channel).await;
    }
    let forwarded = forwards_since(forwarded);
    drop(subscribers);
    let log = nodes.stop().await;
    owed.assert_stored_once(&log);
    assert_eq!(forwarded, [log.appends * OTHERS; 2], "sent and taken, once for each node that wants it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_given_id_is_stored_by_the_first_node_that_it_comes_to() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &CHANNELS).await;
    let mut publishers = Publisher::on_each(&nodes).await;
    let forwarded = forwards();
    let mut owed = Owed::default();
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
        owed.message(node, channel, &data, Some(stamps[0]));
        for publisher in &mut publishers {
            publisher.post_one(channel, &[message.clone(), message.clone()]).await;
            let new = format!("beside it in round {round} at {}", publisher.node);
            let messages = [message.clone(), json!({"data": new}), message.clone()];
            let again = publisher.socket.publish(channel, &messages).await;
            assert_eq!([again[0], again[2]], [stamps[0]; 2]);
            owed.message(publisher.node, channel, &new, Some(again[1]));
        }
    }
    for channel in CHANNELS {
        assert_heard_once(&nodes, &mut subscribers, &mut owed, channel).await;
        owed.assert_read_once(&nodes, channel).await;
    }
    let forwarded = forwards_since(forwarded);
    drop((subscribers, publishers));
    let log = nodes.stop().await;
    owed.assert_stored_once(&log);
    assert_eq!(forwarded, [log.appends * OTHERS; 2], "sent and taken, once for each node that wants it");
}

/// A member of the channel who enters on this node, and whose connection goes on from there to the next one, and then to the one after.
async fn roam(nodes: &Nodes, owed: &mut Owed, channel: &str, from: usize) {
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
            let taken_up = open(node, format!("&resume={key}")).await;
            assert_eq!(taken_up.connected["resumed"], true, "{}", taken_up.connected);
            socket = taken_up;
        }
        socket.present(action, channel, &json!(step)).await;
        owed.change(node, channel, &format!("{action} {name} {step}"));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_of_presence_is_stored_by_the_node_of_its_connection() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &CHANNELS).await;
    let mut owed = Owed::default();
    for channel in CHANNELS {
        for node in 0..NODES {
            for end in ["leave", "close", "lose"] {
                let name = format!("{end}{node}");
                let mut socket = Socket::open(nodes.addr(node), &format!("?clientId={name}")).await;
                for (action, data) in [("enter", 1), ("update", 2), ("update", 3)] {
                    socket.present(action, channel, &json!(data)).await;
                    owed.change(node, channel, &format!("{action} {name} {data}"));
                }
                match end {
                    "leave" => socket.present("leave", channel, &json!(3)).await,
                    "close" => {
                        socket.send(&json!({"op": 5})).await;
                        while socket.next().await["op"] != 6 {}
                    }
                    _ => drop(socket),
                }
                owed.change(node, channel, &format!("leave {name} 3"));
            }
            roam(&nodes, &mut owed, channel, node).await;
        }
    }
    for channel in CHANNELS {
        assert_heard_once(&nodes, &mut subscribers, &mut owed, channel).await;
        owed.assert_read_once(&nodes, channel).await;
    }
    drop(subscribers);
    owed.assert_stored_once(&nodes.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_replayed_on_resume_are_stored_only_once() {
    let nodes = Nodes::start().await;
    let mut subscribers = Subscriber::on_each(&nodes, &[KEPT]).await;
    let mut publishers = Publisher::on_each(&nodes).await;
    let mut owed = Owed::default();
    let mut socket = Socket::open(nodes.addr(0), "").await;
    socket.attach(KEPT, &json!({})).await;
    let mut moving = Subscriber::new(socket);
    let filler = "x".repeat(1024);
    // What is little is among the recent messages of the other node, and much is not.
    for (step, (node, much)) in [(1, false), (2, true), (0, false), (1, true)].into_iter().enumerate() {
        for publisher in &mut publishers {
            let data = texts(&format!("heard in {step} of {}", publisher.node), 2);
            publisher.publish_each(&mut owed, KEPT, &data).await;
        }
        let position = moving.hear(owed.heard_on(KEPT)).await;
        let key = moving.socket.connected["connectionKey"].as_str().expect("a key").to_owned();
        let heard = moving.heard;
        drop(moving.socket);
        for publisher in &mut publishers {
            let what = format!("missed in {step} of {}{}", publisher.node, if much { &filler } else { "" });
            publisher.publish_each(&mut owed, KEPT, &texts(&what, if much { 40 } else { 3 })).await;
        }
        let reads = nodes.reads();
        let mut socket = Socket::open(nodes.addr(node), &format!("?resume={key}")).await;
        assert_eq!(socket.connected["resumed"], true, "{}", socket.connected);
        let attached = socket.attach(KEPT, &json!({"serial": position})).await;
        assert_eq!(attached["resumed"], true, "{attached}");
        moving = Subscriber { socket, heard };
        moving.hear(owed.heard_on(KEPT)).await;
        assert_eq!(nodes.reads() > reads, much, "in step {step}");
    }
    subscribers.push(moving);
    assert_heard_once(&nodes, &mut subscribers, &mut owed, KEPT).await;
    owed.assert_read_once(&nodes, KEPT).await;
    drop((subscribers, publishers));
    owed.assert_stored_once(&nodes.stop().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_rewound_for_new_subscriber_are_stored_only_once() {
    let nodes = Nodes::start().await;
    let mut publishers = Publisher::on_each(&nodes).await;
    let mut owed = Owed::default();
    for wanted in [false, true] {
        let channel = if wanted { KEPT } else { "kept:quiet" };
        let mut subscribers = Vec::new();
        if wanted {
            subscribers = Subscriber::on_each(&nodes, &[channel]).await;
        }
        for publisher in &mut publishers {
            let data = texts(&format!("of {}", publisher.node), 5);
            publisher.publish_each(&mut owed, channel, &data).await;
        }
        for subscriber in &mut subscribers {
            subscriber.hear(owed.heard_on(channel)).await;
        }
        for node in 0..NODES {
            let reads = nodes.reads();
            let mut socket = Socket::open(nodes.addr(node), "").await;
            socket.attach(channel, &json!({"rewind": "15"})).await;
            let mut newcomer = Subscriber::new(socket);
            newcomer.hear(owed.heard_on(channel)).await;
            // Where nobody was attached there are no recent messages, and the store has all.
            assert_eq!(nodes.reads() > reads, !wanted, "on node {node} of {channel}");
            subscribers.push(newcomer);
        }
        assert_heard_once(&nodes, &mut subscribers, &mut owed, channel).await;
        owed.assert_read_once(&nodes, channel).await;
    }
    drop(publishers);
    owed.assert_stored_once(&nodes.stop().await);
}
