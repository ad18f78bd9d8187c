//! Every limit of the service, at it and one past it, over the real binary and both formats.
//!
//! | limit | held by |
//! |---|---|
//! | message: name, data, extras, clientId | here; `http_api`, `socket_session::limits` |
//! | socket message, fragments, time | here; `raw_socket`, `edge::socket::reader::tests` |
//! | HTTP body, body of a token request | here |
//! | HTTP bodies, answers, pages in bytes and their times | `http_bounds` |
//! | nesting | here; `proto/tests/hostile` |
//! | channel name, message id, event name, clientId | here; in a JWT `token_rules::signed` |
//! | channels of a connection | here with its reason; `socket_session::limits` with the default |
//! | publishes of a socket | `session::tests::limits`, `socket_session::limits` |
//! | publishes over HTTP | here; `edge::http::rate` |
//! | messages of a publish, event streams of a node | here |
//! | attach, detach, presence, auth | here; `session::tests::limits` |
//! | presence: data, clientId, members of a channel, of a connection, of the node | here; `presence` with the default |
//! | presence: from a loss to the leave | `presence` |
//! | resume window, of a channel | here; `hub::tests::resume` |
//! | resume window, of a connection; lost connections | `continuity::identity`; `edge::socket::identities` |
//! | serial | here; `proto::serial`, `continuity::replay` |
//! | recent messages of a channel, of all, and how long | `hub::ring`, `hub::tests::resume` |
//! | pings | here |
//! | failed token requests | here; `auth::tests::exchange` |
//! | history `limit` | here; `edge::http::query` |
//! | ttl, nonce, timestamp of a token request | `token_rules::requests`, `auth::tests::exchange` |
//! | times of a JWT | `token_rules::signed`, `auth::tests::jwt` |
//! | length of a token | here; at issue `auth::tests::exchange` |
//! | messages of a rewind | `session::tests::rewind`; `continuity::rewind` |
//! | heartbeat, silence | `raw_socket`, `socket_session::basics` |
//! | headers: bytes, number, time | `headers`; `raw_socket` |
//! | outbox: bytes, time without progress | `outbox`; `socket_session::limits`, `whole_node`, `tls` |
//! | idempotency window | here; the store's contract |
//! | history retention | the store's contract, `edge::http::tests::history` |
//! | names, tokens, pages, batches, streams, silence and the store, set otherwise | `settings` |
//! | nonces, revocations and history, kept as is set | `embedded::tests`, `accounts::tests` |
//! | what is counted of all these | `counted` |
//! | connections of a tenant, of a node | `connections::ceiling`; `open_files` |
//! | memory of a node | `memory` |

mod counted;
mod headers;
mod outbox;
mod presence;
mod resume;
mod settings;

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::raw::{self, FIN};
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{
    Directory, Node, NodeOptions, Raw, Response, SOON, Socket, clock, forge, history, http, wait_until,
};
use fanfare_proto::msgpack;
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const FORMATS: [&str; 2] = ["", "format=msgpack"];

fn options() -> NodeOptions {
    NodeOptions::default().directory(Directory::default().account("acme").key("k1", "secret", ALL), KEY)
}

async fn node() -> Node {
    Node::start(options()).await
}

async fn post(node: &Node, path: &str, authorization: &str, body: impl Into<bytes::Bytes>) -> Response {
    http::request(node.addr(), "POST", path, &[("authorization", authorization)], body).await
}

async fn publish(node: &Node, body: impl Into<bytes::Bytes>) -> Response {
    post(node, "/api/channels/c/publish", &http::basic(KEY), body).await
}

async fn get(node: &Node, path: &str) -> Response {
    http::request(node.addr(), "GET", path, &[("authorization", &http::basic(KEY))], "").await
}

/// Gives op and code of an answer.
fn brief(answer: &Value) -> (i64, Option<u64>) {
    (answer["op"].as_i64().expect("an op"), answer["code"].as_u64())
}

#[tokio::test(flavor = "multi_thread")]
async fn message_size_counts_name_data_extras_and_client_id_as_json() {
    let node = node().await;
    // "nam" and "ann" with their quotes, and {"t":1}.
    let message =
        |bytes: usize| json!({"name": "nam", "extras": {"t": 1}, "data": "x".repeat(bytes - 5 - 5 - 7 - 2)});
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?clientId=ann&{format}")).await;
        let mut ask = async |bytes| {
            let request = json!({"op": 13, "channel": "c", "messages": [message(bytes)]});
            brief(&socket.ask(request).await)
        };
        assert_eq!(ask(65_536).await, (1, None), "{format}");
        assert_eq!(ask(65_537).await, (2, Some(40009)), "{format}");
    }
    let params = JwtParams {
        capability: r#"{"c":["publish"]}"#.into(),
        client_id: Some("ann".into()),
        issued_s: None,
        ttl_s: 600,
    };
    let token = http::bearer(&sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token"));
    for (bytes, status) in [(65_536, 200), (65_537, 413)] {
        let answer = post(&node, "/api/channels/c/publish", &token, message(bytes).to_string()).await;
        assert_eq!(answer.status, status, "{bytes}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_message_of_exactly_its_limit_passes() {
    let node = node().await;
    let padded = |bytes: usize| {
        let empty = json!({"op": 0, "id": "h", "pad": ""}).to_string().len();
        json!({"op": 0, "id": "h", "pad": "x".repeat(bytes - empty)}).to_string()
    };
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?{format}")).await;
        let frame = |bytes| {
            let text = padded(bytes);
            if format.is_empty() {
                raw::frame(FIN | raw::TEXT, text.as_bytes())
            } else {
                raw::frame(FIN | raw::BINARY, &msgpack::from_json(&text))
            }
        };
        socket.raw().write(&frame(524_288)).await;
        assert_eq!(socket.next().await["id"], "h", "{format}");
        socket.raw().write(&frame(524_289)).await;
        let (frames, ended) = socket.to_end(SOON).await;
        assert_eq!(frames.iter().map(brief).collect::<Vec<_>>(), [(7, Some(40000))], "{format}");
        assert_eq!(ended, SocketEnd::Closed(1009), "{format}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_exactly_their_limit_pass() {
    let node = node().await;
    let padded = |text: &str, bytes: usize| text.to_owned() + &" ".repeat(bytes - text.len());
    for (bytes, status) in [(2 * 1024 * 1024, 200), (2 * 1024 * 1024 + 1, 413)] {
        assert_eq!(publish(&node, padded("{}", bytes)).await.status, status);
        let batch = padded(r#"{"channels":["c"],"messages":[{}]}"#, bytes);
        assert_eq!(post(&node, "/api/publish", &http::basic(KEY), batch).await.status, status);
    }
    for (bytes, status) in [(16 * 1024, 401), (16 * 1024 + 1, 413)] {
        let request =
            json!({"keyName": "k1", "timestamp": clock::now_ms(), "nonce": "n".repeat(16), "mac": "x"});
        let body = padded(&request.to_string(), bytes);
        let answer = http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], body).await;
        assert_eq!(answer.status, status, "{:?}", answer.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sixty_four_levels_of_nesting_pass_and_one_more_does_not() {
    let node = node().await;
    // The message itself is the first level.
    let nested = |levels: usize| format!("{}{}", "[".repeat(levels - 1), "]".repeat(levels - 1));
    for (levels, status) in [(64, 200), (65, 400)] {
        assert_eq!(publish(&node, format!(r#"{{"data":{}}}"#, nested(levels))).await.status, status);
    }
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?{format}")).await;
        let frame = |levels| {
            let text = format!(r#"{{"op":13,"id":"p","channel":"c","data":{}}}"#, nested(levels));
            serde_json::from_str::<Value>(&text).expect("JSON")
        };
        socket.send(&frame(64)).await;
        assert_eq!(brief(&socket.next().await), (1, None), "{format}");
        socket.send(&frame(65)).await;
        let (frames, ended) = socket.to_end(SOON).await;
        assert_eq!(frames.iter().map(brief).collect::<Vec<_>>(), [(7, Some(40000))], "{format}");
        assert_eq!(ended, SocketEnd::Closed(1002), "{format}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_ids_are_counted_in_bytes() {
    let node = node().await;
    // Characters of two bytes, so that a count of characters would be noticed.
    let name = |bytes: usize| "é".repeat(bytes / 2) + &"x".repeat(bytes % 2);
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?{format}")).await;
        let message = |message: Value| json!({"op": 13, "channel": "c", "messages": [message]});
        for (what, request, expected) in [
            ("a channel of 512", json!({"op": 8, "channel": name(512)}), (9, None)),
            ("a channel of 513", json!({"op": 8, "channel": name(513)}), (2, Some(40003))),
            ("a channel of none", json!({"op": 8, "channel": ""}), (2, Some(40003))),
            ("a control character", json!({"op": 8, "channel": "a\u{1f}"}), (2, Some(40003))),
            ("a reserved channel", json!({"op": 8, "channel": "[a"}), (2, Some(40003))),
            ("a publish to 512", json!({"op": 13, "channel": name(512), "data": 1}), (1, None)),
            ("a publish to 513", json!({"op": 13, "channel": name(513), "data": 1}), (2, Some(40003))),
            ("a name of 256", message(json!({"name": name(256)})), (1, None)),
            ("a name of 257", message(json!({"name": name(257)})), (2, Some(40000))),
            ("an id of 128", message(json!({"id": name(128)})), (1, None)),
            ("an id of 129", message(json!({"id": name(129)})), (2, Some(40000))),
            ("an id of none", message(json!({"id": ""})), (2, Some(40000))),
            ("a control character in an id", message(json!({"id": "a\u{1f}"})), (2, Some(40000))),
            ("a control character in a name", message(json!({"name": "a\u{1f}"})), (2, Some(40000))),
        ] {
            assert_eq!(brief(&socket.ask(request).await), expected, "{format} {what}");
        }
    }
    for (message, status) in [
        (json!({"name": name(256)}), 200),
        (json!({"name": name(257)}), 400),
        (json!({"id": name(128)}), 200),
        (json!({"id": name(129)}), 400),
        (json!({"id": ""}), 400),
        (json!({"id": "a\u{1f}"}), 400),
    ] {
        assert_eq!(publish(&node, message.to_string()).await.status, status, "{message}");
    }
    for (channel, status) in [(name(512), 200), (name(513), 400), ("[a".into(), 400), ("a\u{1f}".into(), 400)]
    {
        let path = format!("/api/channels/{}/publish", fanfare_proto::path::encode_channel(&channel));
        assert_eq!(post(&node, &path, &http::basic(KEY), "{}").await.status, status, "{channel:?}");
    }
    for (client_id, status) in [
        (name(256), 101),
        (name(257), 400),
        (String::new(), 400),
        ("*".to_owned(), 400),
        ("a\u{1f}".to_owned(), 400),
    ] {
        let path = format!("/realtime?clientId={}", fanfare_proto::path::encode_channel(&client_id));
        let mut raw = Raw::connect(node.addr()).await;
        let authorization = http::basic(KEY);
        let (answered, _) = raw.upgrade(&path, &[("authorization", &authorization)]).await;
        assert_eq!(answered, status, "{client_id:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refusal_by_a_limit_carries_its_reason() {
    let options = options()
        .limit("attached_channels", 2)
        .limit("controls_per_second", 1)
        .limit("control_burst", 10)
        .limit("publishes_per_second", 1)
        .limit("publish_burst", 3)
        .limit("http_publishes_per_second", 5);
    let node = Node::start(options).await;
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?{format}")).await;
        for channel in ["a", "b"] {
            socket.attach(channel).await;
        }
        let nack = socket.ask(json!({"op": 8, "channel": "c"})).await;
        assert_eq!((brief(&nack), &nack["reason"]), ((2, Some(42900)), &json!("channel_limit")));
        for _ in 0..30 {
            socket.start(json!({"op": 10, "channel": "none"})).await;
        }
        let nack = socket.find("a refused detach", |frame| frame["op"] == 2).await;
        assert_eq!((brief(&nack), &nack["reason"]), ((2, Some(42900)), &json!("rate_limit")));
        let messages = |count| json!({"op": 13, "channel": "a", "messages": vec![json!({}); count]});
        let nack = socket.ask(messages(4)).await;
        assert_eq!((brief(&nack), &nack["reason"]), ((2, Some(42900)), &json!("rate_limit")));
        assert_eq!(brief(&socket.ask(messages(3)).await), (1, None), "what was refused took nothing");
    }
    let many = json!(vec![json!({}); 100]).to_string();
    assert_eq!(publish(&node, many).await.status, 200, "owed from here on");
    let refused = publish(&node, "{}").await;
    assert_eq!((refused.status, &refused.json()["reason"]), (429, &json!("rate_limit")));
    let seconds = refused.header("retry-after").and_then(|text| text.parse::<u64>().ok());
    assert!(seconds.is_some_and(|seconds| (1..=20).contains(&seconds)), "{seconds:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_of_a_publish_and_streams_of_a_node() {
    let node = Node::start(options().limit("publish_messages", 4).limit("sse_streams", 1)).await;
    let messages = |count| vec![json!({}); count];
    for format in FORMATS {
        let mut socket = Socket::open(&node, &format!("?{format}")).await;
        for (count, expected) in [(4, (1, None)), (5, (2, Some(40009)))] {
            let request = json!({"op": 13, "channel": "c", "messages": messages(count)});
            assert_eq!(brief(&socket.ask(request).await), expected, "{format}");
        }
    }
    for (count, status) in [(4, 200), (5, 413)] {
        assert_eq!(publish(&node, json!(messages(count)).to_string()).await.status, status);
    }
    for (channels, status) in [(["a", "b"].as_slice(), 200), (&["a", "b", "c"], 413)] {
        let batch = json!({"channels": channels, "messages": messages(2)}).to_string();
        assert_eq!(post(&node, "/api/publish", &http::basic(KEY), batch).await.status, status);
    }
    let mut open = Vec::new();
    for status in [200, 503] {
        let mut raw = Raw::connect(node.addr()).await;
        let head = format!("GET /realtime/sse?channel=c&key={KEY} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        raw.write(head.as_bytes()).await;
        assert_eq!(raw.head(SOON).await.expect("an answer").0, status);
        open.push(raw);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_pings_in_a_second_pass_and_an_eleventh_does_not() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let pings = |count| raw::frame(FIN | raw::PING, b"p").repeat(count);
    socket.raw().write(&pings(10)).await;
    for _ in 0..10 {
        assert_eq!(socket.raw().frame(SOON).await.expect("a pong").opcode, raw::PONG);
    }
    assert_eq!(socket.ask(json!({"op": 0})).await["op"], 0);
    let mut socket = Socket::open(&node, "").await;
    socket.raw().write(&pings(11)).await;
    let (frames, ended) = socket.to_end(SOON).await;
    assert_eq!(frames.iter().map(brief).collect::<Vec<_>>(), [(7, Some(40000))]);
    assert_eq!(ended, SocketEnd::Closed(1008));
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_token_requests_are_limited_by_key() {
    let node = Node::start(options().limit("failed_token_requests_per_second", 2)).await;
    let fail = async |key_name: &str| {
        let request =
            json!({"keyName": key_name, "timestamp": clock::now_ms(), "nonce": "n".repeat(16), "mac": "x"});
        let path = format!("/keys/{key_name}/requestToken");
        http::request(node.addr(), "POST", &path, &[], request.to_string()).await
    };
    // The third publish within a second is refused. A busy machine may need several attempts to send three within one.
    wait_until(SOON, "a refusal", async || {
        let mut limited = None;
        for _ in 0..3 {
            let answer = fail("k1").await;
            assert!([401, 429].contains(&answer.status));
            limited = Some(answer).filter(|answer| answer.status == 429).or(limited);
        }
        let Some(limited) = limited else { return false };
        assert_eq!(limited.json()["reason"], "rate_limit");
        assert!(limited.header("retry-after").is_some());
        assert_eq!(fail("k2").await.status, 401, "another key has a count of its own");
        true
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_page_of_history_holds_a_thousand() {
    let node = node().await;
    let many = json!((0..1001).map(|number| json!({"data": number})).collect::<Vec<_>>());
    assert_eq!(publish(&node, many.to_string()).await.status, 200);
    for (limit, expected) in [("999", 999), ("1000", 1000), ("1001", 1000)] {
        let page = get(&node, &format!("/api/channels/c/history?limit={limit}")).await;
        assert_eq!(page.json()["messages"].as_array().map(Vec::len), Some(expected), "{limit}");
        assert!(page.header("link").is_some());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_of_eight_kibibytes_is_taken_and_a_longer_one_is_not() {
    let node = node().await;
    let now_s = clock::now_ms() / 1000;
    let token = |pad: usize| {
        let claims = json!({
            "iat": now_s, "exp": now_s + 600, "x-service-capability": r#"{"*":["subscribe"]}"#, "pad": "x".repeat(pad),
        });
        forge::jwt(&json!({"alg": "HS256", "kid": "k1"}), &claims, "secret", forge::Signature::Hs256)
    };
    let fitting = (0..).take_while(|pad| token(*pad).len() <= 8192).last().expect("some fit");
    for (pad, expected) in [(fitting, [200, 101]), (fitting + 1, [401, 401])] {
        let token = token(pad);
        let bearer = http::bearer(&token);
        let time = http::request(node.addr(), "GET", "/time", &[("authorization", &bearer)], "").await.status;
        let mut raw = Raw::connect(node.addr()).await;
        let (upgrade, _) = raw.upgrade(&format!("/realtime?accessToken={token}"), &[]).await;
        assert_eq!([time, upgrade], expected, "{} bytes", token.len());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_is_remembered_for_its_window_and_no_longer() {
    let node = Node::start(options().limit("idempotency_window_ms", 3_000)).await;
    let message = json!({"id": "once", "data": 1}).to_string();
    let stored = async || history::read_all(node.addr(), KEY, "c", "").await.len();
    let began = std::time::Instant::now();
    for _ in 0..3 {
        assert_eq!(publish(&node, message.clone()).await.status, 200);
    }
    let count = stored().await;
    assert!(count == 1 || began.elapsed().as_millis() >= 3_000, "{count} within the window");
    wait_until(SOON, "the id to be forgotten", async || {
        assert_eq!(publish(&node, message.clone()).await.status, 200);
        stored().await > count
    })
    .await;
}
