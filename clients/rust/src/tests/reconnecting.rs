//! A client that resumes its connection, against a server that loses it where the test wants.

mod attempts;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::value::RawValue;
use tokio::time::timeout;

use super::*;
use crate::{Attach, Reconnect, TokenSource};

fn reconnecting(addr: SocketAddr) -> Options {
    let reconnect = Reconnect { delay_min: Duration::from_millis(5), delay_max: Duration::from_millis(20) };
    Options { reconnect: Some(reconnect), ..options(addr) }
}

/// Accepts the connection after a lost one. Its upgrade request must contain `expected`.
async fn again(listener: &TcpListener, expected: &str, key: &str) -> Server {
    let (mut server, request) = Server::accept_with_request(listener).await;
    assert!(request.contains(expected), "{expected}: {request}");
    server.say(&connected(key, true)).await;
    server
}

async fn refuse(listener: &TcpListener, status: &str) {
    let (mut stream, _) = request(listener).await;
    let body = r#"{"error":"no"}"#;
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    stream.write_all(head.as_bytes()).await.expect("written");
}

fn attached(request: &Value, serial: &str, resumed: bool) -> Value {
    json!({"op": 9, "id": request["id"], "channel": request["channel"], "serial": serial, "resumed": resumed,
        "presence": false, "modes": ["subscribe"]})
}

fn message(serial: &str, id: &str) -> Value {
    json!({"op": 13, "channel": "c", "serial": serial,
        "messages": [{"id": id, "data": 1, "connectionId": "c_2", "timestamp": 5}]})
}

/// Waits with a deadline. A client whose server has failed would try to connect for ever.
async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future).await.expect("it is there soon")
}

/// Gives a short text of the next event.
async fn next(client: &mut Client) -> String {
    match soon(client.next()).await.expect("an event") {
        Event::Messages(delivery) => {
            format!("message {} at {}", delivery.messages[0].id, delivery.serial)
        }
        Event::Presence(presence) => format!("presence at {}", presence.serial),
        Event::Connected(connected) => format!("connected {}", connected.connection_key),
        Event::Attached(attached) => format!("attached {} {}", attached.channel, attached.resumed),
        Event::Detached { channel, code, .. } => format!("detached {channel} {code:?}"),
        Event::Disconnected { ending, .. } => match ending {
            Ending::Disconnected { code, .. } => format!("disconnected {code}"),
            _ => "disconnected".into(),
        },
        Event::Error { code, channel, .. } => format!("error {code} {channel:?}"),
        Event::Ended(ending) => format!("{ending:?}"),
        other => format!("{other:?}"),
    }
}

#[tokio::test]
async fn reconnect_repeats_attach_enter_and_publishes_in_order() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let attach = server.hear().await;
        server.say(&attached(&attach, "s1", false)).await;
        let enter = server.hear().await;
        server.say(&json!({"op": 1, "id": enter["id"]})).await;
        server.say(&message("s2", "m1")).await;
        let (first, second) = (server.hear().await, server.hear().await);
        drop(server);

        let mut server = again(&listener, "&resume=k", "k3").await;
        let attach = server.hear().await;
        assert_eq!((&attach["serial"], &attach["modes"]), (&json!("s2"), &json!(["subscribe"])));
        assert_eq!(attach.get("rewind"), None);
        let enter = server.hear().await;
        let expected = (json!("enter"), json!("ann"), json!({"at": 1}));
        assert_eq!(
            (&enter["action"], &enter["clientId"], &enter["data"]),
            (&expected.0, &expected.1, &expected.2)
        );
        assert_eq!((server.hear().await, server.hear().await), (first.clone(), second.clone()));
        assert!(first["messages"][0]["id"].as_str().is_some_and(|id| id.len() > 16), "{first}");
        assert_eq!(second["messages"][0]["id"], "mine");
        server.say(&attached(&attach, "s2", true)).await;
        server.say(&json!({"op": 1, "id": enter["id"]})).await;
        server.say(&json!({"op": 1, "id": first["id"], "serials": ["s3"]})).await;
        server.say(&json!({"op": 1, "id": second["id"], "serials": ["s4"]})).await;
        assert_eq!(server.hear().await, json!({"op": 5}));
        server.say(&json!({"op": 6})).await;
    });
    let mut client = Client::connect(reconnecting(addr)).await.expect("connected");
    let attach = Attach {
        channel: "c".into(),
        rewind: Some("10".into()),
        modes: Some(vec!["subscribe".into()]),
        ..Attach::default()
    };
    soon(client.attach_with(attach)).await.expect("attached");
    let data = RawValue::from_string(r#"{"at":1}"#.into()).expect("JSON");
    let request = PresenceRequest {
        channel: "c".into(),
        action: "enter".into(),
        client_id: Some("ann".into()),
        data: Some(data),
    };
    soon(client.present(request)).await.expect("entered");
    assert_eq!(next(&mut client).await, "message m1 at s2");
    let first = client.publish_start("c", vec![Draft::default()]).await.expect("sent");
    let mine = Draft { id: Some("mine".into()), ..Draft::default() };
    let second = client.publish_start("c", vec![mine]).await.expect("sent");
    assert_eq!(
        (soon(first).await.expect("stored"), soon(second).await.expect("stored")),
        (vec!["s3".into()], vec!["s4".into()])
    );
    for expected in ["disconnected", "connected k3", "attached c true"] {
        assert_eq!(next(&mut client).await, expected);
    }
    assert_eq!(client.connected().connection_key, "k3");
    client.close().await.expect("closed");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn reattach_serial_follows_messages_and_attached_not_presence() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let attach = server.hear().await;
        server.say(&attached(&attach, "s1", false)).await;
        server.say(&message("s2", "m1")).await;
        // The serial of a presence event is ahead of the missed messages, which follow.
        server.say(&json!({"op": 12, "channel": "c", "serial": "s9", "presence": []})).await;
        drop(server);
        let mut server = again(&listener, "&resume=k", "k").await;
        let attach = server.hear().await;
        assert_eq!(attach["serial"], "s2");
        server.say(&attached(&attach, "s2", true)).await;
        server.say(&message("s3", "m1")).await;
        server.say(&message("s4", "m2")).await;
        drop(server);
        let mut server = again(&listener, "&resume=k", "k").await;
        assert_eq!(server.hear().await["serial"], "s4");
        server.say(&json!({"op": 9, "channel": "c", "serial": "s7", "resumed": false, "presence": false, "modes": []})).await;
        drop(server);
        let mut server = again(&listener, "&resume=k", "k").await;
        assert_eq!(server.hear().await["serial"], "s7");
    });
    let mut client = Client::connect(reconnecting(addr)).await.expect("connected");
    soon(client.attach("c")).await.expect("attached");
    for expected in [
        "message m1 at s2",
        "presence at s9",
        "disconnected",
        "connected k",
        "attached c true",
        "message m2 at s4",
        "disconnected",
        "connected k",
        "attached c false",
        "disconnected",
    ] {
        assert_eq!(next(&mut client).await, expected);
    }
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn the_last_word_of_the_node_decides_whether_and_when() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        server.say(&json!({"op": 4, "code": 50003, "reconnectAfterMs": 300})).await;
        let notified = Instant::now();
        let frame = server.0.read_frame().await.expect("a frame");
        assert_eq!(frame.opcode, OpCode::Close, "the client closes");
        drop(server);
        refuse(&listener, "503 Service Unavailable").await;
        assert!(notified.elapsed() >= Duration::from_millis(300), "{:?}", notified.elapsed());
        refuse(&listener, "429 Too Many Requests").await;
        let mut server = again(&listener, "&resume=k", "k").await;
        server.say(&json!({"op": 7, "code": 40800, "error": "taken up"})).await;
        drop(server);
        listener
    });
    let mut client = Client::connect(reconnecting(addr)).await.expect("connected");
    let Some(Event::Disconnected { ending, retry_in }) = client.next().await else {
        unreachable!("the connection is over")
    };
    assert!(matches!(ending, Ending::Disconnected { code: 50003, reconnect_after_ms: 300, .. }));
    assert!(retry_in <= Duration::from_millis(300), "nothing is added: {retry_in:?}");
    assert_eq!(next(&mut client).await, "connected k");
    let handle = client.handle();
    assert_eq!(next(&mut client).await, r#"Refused { code: 40800, error: "taken up" }"#);
    assert!(client.next().await.is_none());
    assert!(matches!(handle.attach("c").await, Err(Error::Closed)));
    let listener = soon(tasks.join_next()).await.expect("a server").expect("it ends well");
    tokio::select! {
        biased;
        _ = listener.accept() => unreachable!("it must not come back"),
        () = std::future::ready(()) => {}
    }
}

#[tokio::test]
async fn rate_limit_of_a_repeated_publish_leaves_its_result_unknown() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let first = server.hear().await;
        server.say(&json!({"op": 2, "id": first["id"], "code": 42900, "error": "slow down"})).await;
        server.hear().await;
        server.hear().await;
        drop(server);
        let mut server = again(&listener, "&resume=k", "k").await;
        for code in [42900, 40009] {
            let repeated = server.hear().await;
            server.say(&json!({"op": 2, "id": repeated["id"], "code": code, "error": "no"})).await;
        }
    });
    let client = Client::connect(reconnecting(addr)).await.expect("connected");
    let refused = soon(client.publish("c", vec![Draft::default()])).await;
    assert!(matches!(refused, Err(Error::Refused { code: 42900, .. })), "{refused:?}");
    let in_doubt = client.publish_start("c", vec![Draft::default()]).await.expect("sent");
    let large = client.publish_start("c", vec![Draft::default()]).await.expect("sent");
    let in_doubt = soon(in_doubt).await;
    assert!(matches!(&in_doubt, Err(Error::Unknown(reason)) if reason.contains("42900")), "{in_doubt:?}");
    let large = soon(large).await;
    assert!(matches!(large, Err(Error::Refused { code: 40009, .. })), "{large:?}");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn reattach_is_retried_after_rate_limit_and_dropped_when_denied() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        for _ in 0..2 {
            let attach = server.hear().await;
            server.say(&attached(&attach, "s1", false)).await;
        }
        let enter = server.hear().await;
        server.say(&json!({"op": 1, "id": enter["id"]})).await;
        drop(server);
        let mut server = again(&listener, "&resume=k", "k").await;
        let (busy, denied, enter) = (server.hear().await, server.hear().await, server.hear().await);
        server.say(&json!({"op": 2, "id": busy["id"], "code": 42900, "error": "rate"})).await;
        server.say(&json!({"op": 2, "id": denied["id"], "code": 40160, "error": "no"})).await;
        server.say(&json!({"op": 2, "id": enter["id"], "code": 40160, "error": "no"})).await;
        let later = server.hear().await;
        assert_eq!((&later["channel"], &later["serial"]), (&busy["channel"], &json!("s1")));
        assert_ne!(later["id"], busy["id"]);
        server.say(&attached(&later, "s1", true)).await;
        drop(server);
        let mut server = again(&listener, "&resume=k", "k").await;
        assert_eq!(server.hear().await["channel"], "a");
        assert_eq!(server.hear().await, json!({"op": 5}), "what was given up is not asked for again");
    });
    let mut client = Client::connect(reconnecting(addr)).await.expect("connected");
    soon(client.attach("a")).await.expect("attached");
    soon(client.attach("b")).await.expect("attached");
    soon(client.enter("b", None)).await.expect("entered");
    for expected in [
        "disconnected",
        "connected k",
        "detached b Some(40160)",
        r#"error 40160 Some("b")"#,
        "attached a true",
        "disconnected",
        "connected k",
    ] {
        assert_eq!(next(&mut client).await, expected);
    }
    assert!(matches!(client.close().await, Err(Error::Closed)), "nobody answers the close");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn tokens_come_from_the_application_when_the_node_wants_one() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut server, request) = Server::accept_with_request(&listener).await;
        assert!(request.contains("authorization: Bearer t1\r\n"), "{request}");
        server.say(&connected("k", false)).await;
        server.say(&json!({"op": 15, "code": 40142, "expires": 60_000})).await;
        let auth = server.hear().await;
        assert_eq!((&auth["op"], &auth["accessToken"]), (&json!(15), &json!("t2")));
        server.say(&json!({"op": 1, "id": auth["id"]})).await;
        server.say(&connected("k2", true)).await;
        drop(server);
        let mut server = again(&listener, "authorization: Bearer t3\r\n", "k").await;
        server.say(&json!({"op": 4, "code": 40142, "reconnectAfterMs": 0})).await;
        drop(server);
        let server = again(&listener, "authorization: Bearer t4\r\n", "k").await;
        drop(server);
        refuse(&listener, "401 Unauthorized").await;
        let server = again(&listener, "authorization: Bearer t6\r\n", "k").await;
        drop(server);
        refuse(&listener, "401 Unauthorized").await;
        refuse(&listener, "401 Unauthorized").await;
    });
    let count = Arc::new(AtomicU32::new(0));
    let source = TokenSource::new(move || {
        let number = count.fetch_add(1, Ordering::Relaxed) + 1;
        async move { Ok(format!("t{number}")) }
    });
    let options = Options { credential: Credential::TokensFrom(source), ..reconnecting(addr) };
    let mut client = Client::connect(options).await.expect("connected");
    for expected in [
        "connected k2",
        "disconnected",
        "connected k",
        "disconnected 40142",
        "connected k",
        "disconnected",
        "connected k",
        "disconnected",
        r#"Refused { code: 40100, error: "no" }"#,
    ] {
        assert_eq!(next(&mut client).await, expected);
    }
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn requests_without_an_answer_are_bounded_in_bytes() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let first = server.hear().await;
        drop(server);
        let mut server = again(&listener, "&resume=k", "k").await;
        assert_eq!(server.hear().await, first);
        server.say(&json!({"op": 1, "id": first["id"], "serials": ["s"]})).await;
        let second = server.hear().await;
        server.say(&json!({"op": 1, "id": second["id"], "serials": ["s"]})).await;
    });
    let options = Options { unanswered_bytes_max: 400, ..reconnecting(addr) };
    let client = Client::connect(options).await.expect("connected");
    let first = client.publish_start("c", vec![Draft::default()]).await.expect("sent");
    let handle = client.handle();
    let second = handle.publish_start("c", vec![Draft::default()]);
    tokio::pin!(second);
    tokio::select! {
        biased;
        _ = &mut second => unreachable!("there is no room"),
        () = std::future::ready(()) => {}
    }
    soon(first).await.expect("stored");
    soon(soon(second).await.expect("sent")).await.expect("stored");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn dropped_client_fails_pending_requests_as_closed() {
    let (listener, addr) = listen().await;
    let client = {
        let (client, server) =
            tokio::join!(Client::connect(reconnecting(addr)), Server::connected(&listener));
        drop(server);
        client.expect("connected")
    };
    let handle = client.handle();
    let ticket = handle.publish_start("c", vec![Draft::default()]).await.expect("taken");
    drop(client);
    assert!(matches!(soon(ticket).await, Err(Error::Closed)));
    assert!(matches!(handle.attach("c").await, Err(Error::Closed)));
}

/// Case: a node may be silent for ten seconds beyond its heartbeat.
#[tokio::test]
async fn a_silent_node_is_left_and_one_that_speaks_is_answered() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::accept(&listener).await;
        let mut hasty = connected("k", false);
        hasty["heartbeatMs"] = json!(0);
        server.say(&hasty).await;
        for _ in 0..3 {
            server.say(&json!({"op": 0})).await;
            assert_eq!(server.hear().await, json!({"op": 0}));
        }
        let silent = Instant::now();
        let _back = again(&listener, "&resume=k", "k2").await;
        assert!(silent.elapsed() >= Duration::from_secs(9), "{:?}", silent.elapsed());
    });
    let mut client = Client::connect(reconnecting(addr)).await.expect("connected");
    let lost = soon(client.next()).await;
    assert!(matches!(lost, Some(Event::Disconnected { ending: Ending::Silent, .. })), "{lost:?}");
    assert_eq!(next(&mut client).await, "connected k2");
    soon(tasks.join_all()).await;
}

#[tokio::test]
async fn a_node_that_calls_back_at_once_again_and_again_is_given_time() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let first = Instant::now();
        for _ in 0..3 {
            server.say(&json!({"op": 4, "code": 42900, "reconnectAfterMs": 0})).await;
            drop(server);
            server = again(&listener, "&resume=k", "k").await;
        }
        // At least half of 100, of 200 and of 400 ms.
        assert!(first.elapsed() >= Duration::from_millis(350), "{:?}", first.elapsed());
    });
    let reconnect = Reconnect { delay_min: Duration::from_millis(100), delay_max: Duration::from_secs(1) };
    let options = Options { reconnect: Some(reconnect), ..options(addr) };
    let client = Client::connect(options).await.expect("connected");
    soon(tasks.join_all()).await;
    drop(client);
}

#[tokio::test]
async fn token_with_short_expiry_is_not_renewed_in_a_busy_loop() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let first = Instant::now();
        for number in 2..5 {
            // The node's clock says 1 ms, so the token has 400 ms left.
            server.say(&json!({"op": 15, "code": 40142, "expires": 401})).await;
            let auth = server.hear().await;
            assert_eq!(auth["accessToken"], format!("t{number}"));
            server.say(&json!({"op": 1, "id": auth["id"]})).await;
            server.say(&connected("k", true)).await;
        }
        assert!(first.elapsed() >= Duration::from_millis(500), "{:?}", first.elapsed());
    });
    let count = Arc::new(AtomicU32::new(0));
    let source = TokenSource::new(move || {
        let number = count.fetch_add(1, Ordering::Relaxed) + 1;
        async move { Ok(format!("t{number}")) }
    });
    let options = Options { credential: Credential::TokensFrom(source), ..reconnecting(addr) };
    let client = Client::connect(options).await.expect("connected");
    soon(tasks.join_all()).await;
    drop(client);
}
