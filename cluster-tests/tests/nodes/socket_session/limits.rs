//! Refused requests, and connections that the node closes.

use fanfare_client::{Client, Credential, Draft, Event, Options};
use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::{Node, Raw, SOON, history, http};
use serde_json::json;

use super::{KEY, node, options, token, with_token};

#[tokio::test(flavor = "multi_thread")]
async fn invalid_request_is_refused_with_its_code() {
    let node = node().await;
    let narrow = r#"{"in:*":["subscribe"],"out":["publish"]}"#;
    let mut socket = with_token(&node, "", &token(narrow, None, 600)).await;
    let long_name = "x".repeat(513);
    let cases = [
        ("an unknown op", json!({"op": 99}), 40000),
        ("an op that is no number", json!({"op": "8", "channel": "in:a"}), 40000),
        ("an attach without a channel", json!({"op": 8}), 40000),
        ("an empty name", json!({"op": 8, "channel": ""}), 40003),
        ("a control character in a name", json!({"op": 8, "channel": "in:\u{1}"}), 40003),
        ("a reserved name", json!({"op": 8, "channel": "[in]"}), 40003),
        ("a long name", json!({"op": 8, "channel": long_name}), 40003),
        ("an attach beyond the capability", json!({"op": 8, "channel": "out:a"}), 40160),
        ("no mode left", json!({"op": 8, "channel": "in:a", "modes": ["publish"]}), 40160),
        ("a publish beyond the capability", json!({"op": 13, "channel": "in:a", "data": 1}), 40160),
        ("a publish on a bad name", json!({"op": 13, "channel": "[x", "data": 1}), 40003),
        ("no messages", json!({"op": 13, "channel": "out", "messages": []}), 40000),
        ("a name that is null", json!({"op": 13, "channel": "out", "messages": [{"name": null}]}), 40000),
        ("a name that is a number", json!({"op": 13, "channel": "out", "messages": [{"name": 1}]}), 40000),
        (
            "extras that are no object",
            json!({"op": 13, "channel": "out", "messages": [{"extras": 1}]}),
            40000,
        ),
        ("an empty message id", json!({"op": 13, "channel": "out", "messages": [{"id": ""}]}), 40000),
        (
            "a long message id",
            json!({"op": 13, "channel": "out", "messages": [{"id": "i".repeat(129)}]}),
            40000,
        ),
        ("a message too large", json!({"op": 13, "channel": "out", "data": "x".repeat(65_536)}), 40009),
        (
            "one too large in an array",
            json!({"op": 13, "channel": "out",
            "messages": [{"data": 1}, {"data": "x".repeat(65_536)}]}),
            40009,
        ),
        ("a token that is none", json!({"op": 15, "accessToken": "nonsense"}), 40140),
    ];
    for (what, request, code) in cases {
        let nack = socket.ask(request).await;
        assert_eq!((&nack["op"], &nack["code"]), (&json!(2), &json!(code)), "{what}: {nack}");
        assert!(nack["error"].as_str().is_some_and(|error| !error.is_empty()), "{what}: {nack}");
    }
    let exact = json!({"op": 13, "channel": "out", "data": "x".repeat(65_534)});
    assert_eq!(socket.ask(exact).await["op"], 1, "exactly the limit");
    let stored = history::read_all(node.addr(), &node.key(), "out", "").await;
    assert_eq!(stored.len(), 1, "all or none of an array is refused");
    socket.send(&json!({"op": 8, "channel": "[bad]"})).await;
    socket.send(&json!({"op": 13, "channel": "[bad]", "data": 1})).await;
    assert_eq!(
        socket.ask(json!({"op": 0})).await["op"],
        0,
        "without an id there is no nack, and the session goes on"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_is_limited_to_200_channels_and_its_publish_rate() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    for number in 0..200 {
        socket.attach(&format!("many:{number}")).await;
    }
    let nack = socket.ask(json!({"op": 8, "channel": "many:200"})).await;
    assert_eq!((&nack["op"], &nack["code"]), (&json!(2), &json!(42900)));
    assert_eq!(socket.ask(json!({"op": 8, "channel": "many:0"})).await["op"], 9, "already attached");
    socket.ask(json!({"op": 10, "channel": "many:0"})).await;
    socket.attach("many:200").await;

    let messages = |count: usize| json!({"op": 13, "channel": "burst", "messages": vec![json!({}); count]});
    let nack = socket.ask(messages(401)).await;
    assert_eq!((&nack["op"], &nack["code"]), (&json!(2), &json!(42900)), "more than a burst");
    let ack = socket.ask(messages(400)).await;
    assert_eq!(ack["serials"].as_array().map(Vec::len), Some(400), "{ack}");
    let mut refused = 0;
    for _ in 0..400 {
        socket.start(messages(10)).await;
    }
    for _ in 0..400 {
        let answer = socket.find("an answer", |frame| frame["op"] == 1 || frame["op"] == 2).await;
        refused += usize::from(answer["code"] == 42900);
    }
    assert!(refused > 0, "a publish rate beyond the limit is refused");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_consumer_is_ended_and_the_others_get_everything() {
    const MESSAGES: usize = 400;
    let node = Node::start(options().limit("publishes_per_second", 0)).await;
    let before = node.resident_bytes();
    let slow = Raw::connect_slow(node.addr(), 16 * 1024).await;
    let mut slow = Socket::over(slow, "", &http::basic(KEY)).await;
    slow.attach("flood").await;
    let mut reader =
        Client::connect(Options::new(node.url(), Credential::Key(KEY.into()))).await.expect("a reader");
    reader.attach("flood").await.expect("attached");
    let writer =
        Client::connect(Options::new(node.url(), Credential::Key(KEY.into()))).await.expect("a writer");

    let filler = "x".repeat(60_000);
    for number in 0..MESSAGES {
        let data = serde_json::value::to_raw_value(&json!([number, filler])).expect("JSON");
        let draft = Draft { data: Some(data), ..Draft::default() };
        writer.publish("flood", vec![draft]).await.expect("acknowledged");
        let Some(Event::Messages(delivery)) = reader.next().await else {
            unreachable!("the reader gets message {number}")
        };
        let data = delivery.messages[0].data.as_ref().expect("data").get();
        assert!(data.starts_with(&format!("[{number},")), "in order, none missing");
    }
    let (frames, ended) = slow.to_end(SOON).await;
    assert!(frames.len() < MESSAGES, "the slow one did not get all of it");
    // The close frame is behind the frames in the kernel's buffer, and may not arrive.
    assert!(matches!(ended, SocketEnd::Closed(4008) | SocketEnd::Gone), "{ended:?}");
    let grown = node.resident_bytes().saturating_sub(before);
    assert!(grown < 64 * 1024 * 1024, "a slow consumer cost {grown} bytes");
    node.assert_well().await;
}
