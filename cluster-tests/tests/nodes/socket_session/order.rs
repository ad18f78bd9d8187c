//! Arrays, ids, and the order of answers.

use fanfare_cluster_tests::history;
use fanfare_cluster_tests::socket::Socket;
use serde_json::{Value, json};

use super::node;

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_an_array_stay_together_and_in_order() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("array").await;
    let messages: Vec<Value> = (0..50).map(|n| json!({"name": format!("n{n}"), "data": n})).collect();
    let ack = socket.ask(json!({"op": 13, "channel": "array", "messages": messages})).await;
    assert_eq!(ack["serials"].as_array().map(Vec::len), Some(50));
    let delivered = socket.message("array").await;
    let data: Vec<_> =
        delivered["messages"].as_array().expect("messages").iter().map(|m| m["data"].as_u64()).collect();
    assert_eq!(data, (0..50).map(Some).collect::<Vec<_>>());
    let stored = history::read_all(node.addr(), &node.key(), "array", "direction=forwards").await;
    let ids = |list: &[Value]| list.iter().map(|message| message["id"].clone()).collect::<Vec<_>>();
    assert_eq!(ids(&stored), ids(delivered["messages"].as_array().expect("messages")));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_is_delivered_and_stored_once() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let mut reader = Socket::open(&node, "").await;
    reader.attach("once").await;
    let first = socket.publish("once", json!({"id": "same", "data": 1})).await;
    let second = socket.publish("once", json!({"id": "same", "data": 2})).await;
    assert_eq!(first, second, "the first one's ack");
    let third = socket.publish("once", json!({"id": "other", "data": 3})).await;
    assert_ne!(first, third);
    let delivered = [reader.message("once").await, reader.message("once").await];
    let data: Vec<_> = delivered.iter().map(|frame| &frame["messages"][0]["data"]).collect();
    assert_eq!(data, [&json!(1), &json!(3)]);
    assert_eq!(delivered[0]["messages"][0]["id"], "same");
    let mixed = socket
        .ask(json!({"op": 13, "channel": "once", "messages": [{"id": "other"}, {"data": 4}, {"id": "same"}]}))
        .await;
    assert_eq!((mixed["serials"][0].as_str(), mixed["serials"][2].as_str()), (Some(&*third), Some(&*first)));
    let stored = history::read_all(node.addr(), &node.key(), "once", "direction=forwards").await;
    assert_eq!(
        stored.iter().map(|record| record["data"].clone()).collect::<Vec<_>>(),
        [json!(1), json!(3), json!(4)]
    );
    let mut somebody_else = Socket::open(&node, "?clientId=else").await;
    let own = somebody_else.publish("once", json!({"id": "same", "data": 5})).await;
    assert_ne!(own, first, "the scope of an id is its clientId too");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_come_in_the_order_of_the_requests() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let mut expected = vec![socket.start(json!({"op": 8, "channel": "line"})).await];
    for number in 0..50 {
        let mut message = json!({"data": number});
        if number % 7 == 0 {
            message["id"] = json!(format!("given-{number}"));
        }
        expected.push(socket.start(json!({"op": 13, "channel": "line", "messages": [message]})).await);
        if number % 10 == 5 {
            expected.push(socket.start(json!({"op": 13, "channel": "line", "messages": []})).await);
        }
    }
    expected.push(socket.start(json!({"op": 10, "channel": "line"})).await);
    expected.push(socket.start(json!({"op": 8, "channel": "line"})).await);
    expected.push(socket.start(json!({"op": 13, "channel": "line", "messages": [{"data": "last"}]})).await);

    let (mut answers, mut before_detach, mut after) = (Vec::new(), Vec::new(), Vec::new());
    let mut detached = false;
    while answers.len() < expected.len() || after.is_empty() {
        let frame = socket.next().await;
        detached |= frame["op"] == 11;
        match frame["op"].as_u64() {
            Some(13) if detached => after.push(frame["messages"][0]["data"].clone()),
            Some(13) => before_detach.push(frame["messages"][0]["data"].clone()),
            _ => answers.push(frame["id"].as_str().expect("an id").to_owned()),
        }
    }
    assert_eq!(answers, expected);
    assert_eq!(before_detach, (0..50).map(|n| json!(n)).collect::<Vec<_>>());
    assert_eq!(after, [json!("last")]);
}
