//! State that the client library keeps over lost connections, beside deliveries: publishes, client id and members.

use std::collections::VecDeque;
use std::time::Duration;

use fanfare_client::sign::{self, JwtParams};
use fanfare_client::{Client, Credential, Draft, Event, Key, Options, Reconnect, TokenSource};
use fanfare_cluster_tests::waits::pace;
use fanfare_cluster_tests::{Proxy, SOON, clock, history, http, wait_until};
use serde_json::value::RawValue;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::*;

fn options(node: &Node, proxy: &Proxy) -> Options {
    let reconnect = Reconnect { delay_min: Duration::from_millis(10), delay_max: Duration::from_millis(100) };
    Options { reconnect: Some(reconnect), ..Options::new(proxy.url(), Credential::Key(node.key())) }
}

async fn next(client: &mut Client) -> Event {
    timeout(SOON, client.next()).await.expect("an event comes").expect("it goes on")
}

#[tokio::test(flavor = "multi_thread")]
async fn client_publishes_over_cut_links_are_stored_once_in_order() {
    const UNDER_WAY: usize = 200;
    const CUTS: usize = 20;

    let node = node().await;
    let proxy = Proxy::to(node.addr()).await;
    let mut client = Client::connect(options(&node, &proxy)).await.expect("connected");
    let publisher = client.handle();
    let (stop, stopped) = watch::channel(false);
    let mut publishing = JoinSet::new();
    publishing.spawn(async move {
        let mut under_way = VecDeque::new();
        let mut sent: u64 = 0;
        while !*stopped.borrow() {
            let data = RawValue::from_string(sent.to_string()).expect("JSON");
            let draft = Draft { data: Some(data), ..Draft::default() };
            under_way.push_back(publisher.publish_start("a", vec![draft]).await.expect("sent"));
            sent += 1;
            if under_way.len() >= UNDER_WAY {
                under_way.pop_front().expect("not empty").await.expect("stored");
            }
        }
        for ticket in under_way {
            ticket.await.expect("stored");
        }
        sent
    });
    for _ in 0..CUTS {
        pace(Duration::from_millis(50)).await;
        proxy.cut();
        while !matches!(next(&mut client).await, Event::Connected(_)) {}
    }
    stop.send_replace(true);
    let published = timeout(SOON, publishing.join_next()).await.expect("it ends");
    let published = published.expect("a publisher").expect("it ends well");
    let query = "limit=1000&direction=forwards";
    let records = history::read_all(node.addr(), &node.key(), "a", query).await;
    for (record, number) in records.iter().zip(0..) {
        assert_eq!(record["data"], json!(number), "of {published}: {record}");
    }
    assert_eq!(records.len() as u64, published);
}

#[tokio::test(flavor = "multi_thread")]
async fn client_library_resumes_its_session_with_all_channels() {
    const CHANNELS: usize = 200;

    let node = Node::start(NodeOptions::default().limit("publishes_per_second", 0)).await;
    let proxy = Proxy::to(node.addr()).await;
    let mut watcher = Socket::open(&node, "").await;
    assert_eq!(watcher.attach("c0").await["presence"], false);
    let named = Options { client_id: Some("ann".into()), ..options(&node, &proxy) };
    let mut client = Client::connect(named).await.expect("connected");
    let id = client.connected().connection_id.clone();
    for channel in 0..CHANNELS {
        client.attach(&format!("c{channel}")).await.expect("attached");
    }
    client.enter("c0", None).await.expect("entered");
    assert_eq!(watcher.next().await["presence"][0]["action"], "enter");
    let mut publisher = Socket::open(&node, "").await;
    for turn in 0..3 {
        proxy.cut();
        for channel in 0..CHANNELS {
            publisher.publish(&format!("c{channel}"), json!({"data": turn})).await;
        }
        let (mut connected, mut attached, mut messages) = (0, 0, 0);
        while (connected, attached, messages) != (1, CHANNELS, CHANNELS) {
            match next(&mut client).await {
                Event::Connected(again) => {
                    assert_eq!((again.resumed, &again.connection_id), (true, &id));
                    connected += 1;
                }
                Event::Attached(again) => {
                    assert!(again.resumed, "{again:?}");
                    attached += 1;
                }
                Event::Messages(delivery) => messages += delivery.messages.len(),
                Event::Disconnected { .. } | Event::Members(_) | Event::Presence(_) => {}
                other => unreachable!("{other:?}"),
            }
        }
        assert_eq!(watcher.next().await["messages"][0]["data"], turn);
    }
    client.leave("c0", None).await.expect("left");
    let change = watcher.next().await;
    assert_eq!(change["presence"][0]["action"], "leave", "and nothing before it: {change}");
    client.close().await.expect("closed");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_renews_tokens_and_resumes_after_token_expiry() {
    let node = Node::start(NodeOptions::default()).await;
    let proxy = Proxy::to(node.addr()).await;
    let key: Key = node.key().parse().expect("a key");
    let source = TokenSource::new(move || {
        let capability = r#"{"*":["subscribe"]}"#.to_owned();
        let token = sign::jwt(&key, &JwtParams { capability, client_id: None, issued_s: None, ttl_s: 2 });
        async move { Ok(token?) }
    });
    let plain = options(&node, &proxy);
    let mut client = Client::connect(Options { credential: Credential::TokensFrom(source), ..plain })
        .await
        .expect("connected");
    client.attach("a").await.expect("attached");
    let id = client.connected().connection_id.clone();
    for _ in 0..3 {
        let Event::Connected(connected) = next(&mut client).await else { unreachable!("a fresh token") };
        assert_eq!((connected.resumed, &connected.connection_id), (true, &id));
    }
    let expires = client.connected().expires.expect("a token expires");
    proxy.turn_away();
    proxy.cut();
    let lost = next(&mut client).await;
    assert!(matches!(lost, Event::Disconnected { .. }), "{lost:?}");
    wait_until(SOON, "the token to expire", async || clock::now_ms() > expires + 1_000).await;
    proxy.turn_to(node.addr());
    loop {
        match next(&mut client).await {
            Event::Attached(attached) => break assert!(attached.resumed, "{attached:?}"),
            Event::Connected(connected) => assert!(connected.resumed, "{connected:?}"),
            other => unreachable!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_application_continues_without_missing_messages() {
    const MESSAGES: u64 = 10_000;

    // More than the replay buffer, the outbox, the kernel and the queue of events hold together.
    let filler = "x".repeat(4_000);
    let node = node().await;
    let proxy = Proxy::to(node.addr()).await;
    let small_queue = Options { events_max: 4, ..options(&node, &proxy) };
    let mut client = Client::connect(small_queue).await.expect("connected");
    client.attach("a").await.expect("attached");
    let mut publisher = Socket::open(&node, "").await;
    for first in (0..MESSAGES).step_by(50) {
        let messages: Vec<Value> =
            (first..first + 50).map(|number| json!({"data": [number, filler]})).collect();
        let ack = publisher.ask(json!({"op": 13, "channel": "a", "messages": messages})).await;
        assert_eq!(ack["op"], 1, "{ack}");
    }
    wait_until(SOON, "the client to be taken for slow", async || {
        let page = http::request(node.admin(), "GET", "/metrics", &[], "").await;
        String::from_utf8_lossy(&page.body).contains("fanfare_slow_consumers_total 1")
    })
    .await;
    let (mut expected, mut resumed) = (0, 0);
    while expected < MESSAGES {
        match next(&mut client).await {
            Event::Messages(delivery) => {
                for message in &delivery.messages {
                    let data: Value =
                        serde_json::from_str(message.data.as_ref().expect("data").get()).expect("JSON");
                    assert_eq!(data[0], json!(expected));
                    expected += 1;
                }
            }
            Event::Attached(attached) => {
                assert!(attached.resumed, "after {expected}: {attached:?}");
                resumed += 1;
            }
            Event::Disconnected { .. } | Event::Connected(_) => {}
            other => unreachable!("{other:?}"),
        }
    }
    assert!(resumed > 0, "its connection was ended");
}
