//! Limits of members, of their data, and of the rate of changes.

use std::time::Instant;

use super::*;

fn enter(channel: &str, client_id: &str, data: Value) -> Value {
    json!({"op": 12, "channel": channel, "action": "enter", "clientId": client_id, "data": data})
}

#[tokio::test(flavor = "multi_thread")]
async fn the_client_id_and_the_data_of_a_member_are_counted_in_bytes() {
    let node = node().await;
    let id = |bytes: usize| "é".repeat(bytes / 2) + &"x".repeat(bytes % 2);
    // Sizes with the quotes; é has two bytes.
    let data = |bytes: usize| json!(id(bytes - 2));
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?{format}")).await;
        for (what, request, expected) in [
            ("a clientId of 256", enter("c", &id(256), json!(1)), (1, None)),
            ("a clientId of 257", enter("c", &id(257), json!(1)), (2, Some(40000))),
            ("an empty clientId", enter("c", "", json!(1)), (2, Some(40000))),
            ("a clientId *", enter("c", "*", json!(1)), (2, Some(40000))),
            ("a control character", enter("c", "a\u{1f}", json!(1)), (2, Some(40000))),
            ("data of 16 KiB", enter("c", "ann", data(16_384)), (1, None)),
            ("data of one more", enter("c", "bob", data(16_385)), (2, Some(40009))),
            ("the same for a member", enter("c", "ann", data(16_385)), (2, Some(40009))),
            ("a channel of 512", enter(&id(512), "ann", json!(1)), (1, None)),
            ("a channel of 513", enter(&id(513), "ann", json!(1)), (2, Some(40003))),
        ] {
            assert_eq!(brief(&socket.ask(request).await), expected, "{format} {what}");
        }
    }
    let members = get(&node, "/api/channels/c/presence").await.json()["members"].clone();
    assert_eq!(members.as_array().map(Vec::len), Some(4), "two of each connection: {members}");
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_a_channel_and_of_a_connection() {
    let options = options().limit("presence_members", 3).limit("presence_connection_members", 5);
    let node = Node::start(options).await;
    let mut socket = Socket::open(&node, "").await;
    for client_id in ["a", "b", "c"] {
        assert_eq!(brief(&socket.ask(enter("full", client_id, json!(1))).await), (1, None));
    }
    assert_eq!(brief(&socket.ask(enter("full", "d", json!(1))).await), (2, Some(42900)));
    let mut other = Socket::open(&node, "").await;
    assert_eq!(brief(&other.ask(enter("full", "d", json!(1))).await), (2, Some(42900)));
    assert_eq!(brief(&socket.ask(enter("full", "c", json!(2))).await), (1, None), "who is there may change");
    let leave = json!({"op": 12, "channel": "full", "action": "leave", "clientId": "c"});
    assert_eq!(brief(&socket.ask(leave).await), (1, None));
    assert_eq!(brief(&other.ask(enter("full", "d", json!(1))).await), (1, None), "there is room again");

    for client_id in ["a", "b", "c"] {
        assert_eq!(brief(&socket.ask(enter("more", client_id, json!(1))).await), (1, None));
    }
    assert_eq!(brief(&socket.ask(enter("yet more", "a", json!(1))).await), (2, Some(42900)));
    assert_eq!(brief(&other.ask(enter("yet more", "a", json!(1))).await), (1, None));
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_the_node_and_of_an_account_in_bytes() {
    let accounts = Directory::default().account("acme").key("k1", "secret", ALL);
    let accounts = accounts.account("other").key("k2", "secret", ALL);
    let presence_bytes = 40 * (1024 + "c0".len() as u64 + "m".len() as u64 + 1000);
    let node =
        Node::start(NodeOptions::default().directory(accounts, KEY).limit("presence_bytes", presence_bytes))
            .await;
    let data = |bytes: usize| json!("x".repeat(bytes - 2));
    let enter = |n: usize, bytes| enter(&format!("c{}", n % 10), "m", data(bytes));

    let (mut of_account, mut of_other) = (Vec::new(), Vec::new());
    for n in 0..30 {
        let mut socket = Socket::open(&node, "").await;
        assert_eq!(brief(&socket.ask(enter(n, 1000)).await), (1, None), "{n}");
        of_account.push(socket);
    }
    let mut beyond = Socket::open(&node, "").await;
    assert_eq!(brief(&beyond.ask(enter(0, 1000)).await), (2, Some(42900)), "an account leaves a quarter");
    assert_eq!(
        brief(&of_account[0].ask(enter(0, 1001)).await),
        (2, Some(42900)),
        "who is there no byte more"
    );
    for n in 0..10 {
        let mut socket = Socket::open_as(&node, "", &http::basic("secret.k2")).await;
        assert_eq!(brief(&socket.ask(enter(n, 1000)).await), (1, None), "{n}");
        of_other.push(socket);
    }
    assert_eq!(brief(&of_other[0].ask(enter(0, 1001)).await), (2, Some(42900)), "the node has no byte more");
    assert_eq!(node.metric("fanfare_limit_hits_total{limit=\"presence_bytes\"}").await, 3.0);

    assert_eq!(brief(&of_account[0].ask(enter(0, 999)).await), (1, None), "less is always taken");
    assert_eq!(brief(&of_account[0].ask(enter(0, 1000)).await), (1, None), "and is room again");
    let leave = json!({"op": 12, "channel": "c1", "action": "leave", "clientId": "m"});
    assert_eq!(brief(&of_account[1].ask(leave).await), (1, None));
    assert_eq!(brief(&beyond.ask(enter(0, 1000)).await), (1, None), "a member that left gave its room back");
    of_account[2].send(&json!({"op": 5})).await;
    let mut after = Socket::open(&node, "").await;
    wait_until(SOON, "the members of a closed connection gave their room back", async || {
        brief(&after.ask(enter(0, 1000)).await) == (1, None)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn control_burst_of_400_passes_and_excess_is_rate_limited() {
    let node = node().await;
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?{format}")).await;
        let began = Instant::now();
        let mut ids = Vec::new();
        for number in 0..800 {
            let request = match number % 4 {
                0 => json!({"op": 8, "channel": "c"}),
                1 => enter("c", &format!("m{}", number % 8), json!(number)),
                2 => json!({"op": 10, "channel": "c"}),
                _ => json!({"op": 15, "accessToken": "none"}),
            };
            ids.push(socket.start(request).await);
        }
        let mut answers = std::collections::HashMap::new();
        while answers.len() < ids.len() {
            let frame = socket.next().await;
            if let Some(id) = frame["id"].as_str() {
                answers.insert(id.to_owned(), frame["reason"] == "rate_limit" && frame["code"] == 42900);
            }
        }
        let granted = 400 + 50 * (began.elapsed().as_secs() + 1);
        let refused: Vec<bool> = ids.iter().map(|id| answers[id]).collect();
        assert!(!refused[..400].contains(&true), "{format}");
        let passed = refused.iter().filter(|refused| !**refused).count() as u64;
        assert!(passed <= granted, "{format} {passed} of {granted}");
        let of_kind = |kind: usize| refused[400..].iter().skip(kind).step_by(4).any(|refused| *refused);
        assert!((0..4).all(of_kind) || granted > 500, "{format}: each kind is counted");
    }
}
