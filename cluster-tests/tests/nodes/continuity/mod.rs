//! A resuming client gets every missed message, once and in order, or a reported loss.

mod follower;
mod identity;
mod library;
mod reconnecting;
mod replay;
mod restarts;
mod rewind;
mod stored;
mod window;

use fanfare_cluster_tests::{Node, NodeOptions, Socket};
use serde_json::{Value, json};

use follower::Follower;

/// Starts a node on which one socket may publish at any rate.
async fn node() -> Node {
    Node::start(unlimited()).await
}

fn unlimited() -> NodeOptions {
    NodeOptions::default().limit("publishes_per_second", 0).limit("controls_per_second", 0)
}

/// Attaches with a position and gives the answer.
async fn attach_after(socket: &mut Socket, channel: &str, serial: &Value) -> Value {
    let attached = socket.ask(json!({"op": 8, "channel": channel, "serial": serial})).await;
    assert_eq!(attached["op"], 9, "{attached}");
    attached
}

/// Publishes `from..to` as the data of one message each, and waits until all are acknowledged.
async fn publish(socket: &mut Socket, channel: &str, numbers: std::ops::Range<u64>) -> Vec<Value> {
    let mut serials = Vec::new();
    for numbers in numbers.collect::<Vec<_>>().chunks(100) {
        let messages: Vec<Value> = numbers.iter().map(|number| json!({"data": number})).collect();
        let ack = socket.ask(json!({"op": 13, "channel": channel, "messages": messages})).await;
        serials.extend(ack["serials"].as_array().expect("an ack").clone());
    }
    serials
}

/// Drops a connection without a close.
fn cut(socket: Socket) {
    drop(socket);
}
