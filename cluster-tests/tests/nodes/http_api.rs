//! The HTTP interface: publish, history, names in paths, and headers of all answers.

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::socket::Socket;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, Response, SOON, clock, history, http};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const OTHER_KEY: &str = "secret.k2";

async fn node() -> Node {
    let directory = Directory::default()
        .account("acme")
        .key("k1", "secret", ALL)
        .account("other")
        .key("k2", "secret", ALL);
    Node::start(NodeOptions::default().directory(directory, KEY)).await
}

async fn call(node: &Node, key: &str, method: &str, path: &str, body: impl Into<bytes::Bytes>) -> Response {
    let authorization = http::basic(key);
    let headers = [("authorization", authorization.as_str()), ("content-type", "application/json")];
    http::request(node.addr(), method, path, &headers, body).await
}

async fn publish(node: &Node, channel: &str, body: impl Into<bytes::Bytes>) -> Response {
    call(node, KEY, "POST", &format!("/api/channels/{channel}/publish"), body).await
}

async fn get(node: &Node, path: &str) -> Response {
    call(node, KEY, "GET", path, "").await
}

fn data_of(records: &[Value]) -> Vec<Value> {
    records.iter().map(|record| record["data"].clone()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_is_delivered_and_kept_and_nothing_marks_it_as_http() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("chat:room").await;
    let body = r#"{"name":"hi","data":{"a":1.0, "b":[null]},"extras":{"tag":"t"},"id":"own"}"#;
    let answer = publish(&node, "chat%3Aroom", body).await;
    assert_eq!((answer.status, answer.json()), (200, json!({"channel": "chat:room", "published": true})));
    assert_eq!(answer.header("content-type"), Some("application/json"));

    let delivered = socket.message("chat:room").await["messages"][0].clone();
    let page = get(&node, "/api/channels/chat%3Aroom/history").await;
    assert!(
        String::from_utf8_lossy(&page.body).contains(r#""data":{"a":1.0,"b":[null]}"#),
        "{:?}",
        page.body
    );
    let record = page.json()["messages"][0].clone();
    assert_eq!(
        (&record["channel"], &record["name"], &record["id"]),
        (&json!("chat:room"), &json!("hi"), &json!("own"))
    );
    assert!(record["connectionId"].as_str().is_some_and(|id| id.starts_with("c_") && id.len() == 24));
    assert!(record["timestamp"].as_u64().is_some_and(|time| time.abs_diff(clock::now_ms()) < 60_000));
    for field in ["id", "name", "data", "extras", "connectionId", "timestamp"] {
        assert_eq!(delivered[field], record[field], "{field}");
    }
    assert!(record.get("clientId").is_none());

    let params = JwtParams {
        capability: r#"{"chat:*":["publish"]}"#.into(),
        client_id: Some("ann".into()),
        issued_s: None,
        ttl_s: 60,
    };
    let token = http::bearer(&sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token"));
    let path = "/api/channels/chat%3Aroom/publish";
    let answer = http::request(node.addr(), "POST", path, &[("authorization", &token)], "{}").await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    assert_eq!(socket.message("chat:room").await["messages"][0]["clientId"], "ann");
    let path = "/api/channels/chat%3Aroom/history";
    let denied = http::request(node.addr(), "GET", path, &[("authorization", &token)], "").await;
    assert_eq!(denied.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_of_a_publish() {
    let node = node().await;
    let message = |bytes: usize| format!(r#"{{"data":"{}"}}"#, "x".repeat(bytes - 2));
    let nested = |levels: usize| format!(r#"{{"data":{}{}}}"#, "[".repeat(levels), "]".repeat(levels));
    let cases: Vec<(&str, Vec<u8>, u16)> = vec![
        ("the smallest", b"{}".into(), 200),
        ("data null", br#"{"data":null}"#.into(), 200),
        ("white space around", b" \n{ \"data\" : 1 }\t".into(), 200),
        ("unknown fields", br#"{"data":1,"more":2}"#.into(), 200),
        ("a number beyond every float", br#"{"data":1e400}"#.into(), 200),
        ("an array", br#"[{"data":1},{"data":2}]"#.into(), 200),
        ("exactly the limit", message(65_536).into(), 200),
        ("one byte more", message(65_537).into(), 413),
        ("one too large in an array", format!("[{{}},{}]", message(65_537)).into(), 413),
        ("a body over 2 MiB", vec![b' '; 2 * 1024 * 1024 + 1], 413),
        ("an empty body", b"".into(), 400),
        ("an empty array", b"[]".into(), 400),
        ("not JSON", b"data".into(), 400),
        ("cut short", br#"{"data":1"#.into(), 400),
        ("two values", b"{}{}".into(), 400),
        ("a string", br#""data""#.into(), 400),
        ("name null", br#"{"name":null}"#.into(), 400),
        ("id null", br#"{"id":null}"#.into(), 400),
        ("a name that is a number", br#"{"name":1}"#.into(), 400),
        ("a control character in the name", br#"{"name":"a\u0001"}"#.into(), 400),
        ("a name of 257 bytes", format!(r#"{{"name":"{}"}}"#, "n".repeat(257)).into(), 400),
        ("an id of 129 bytes", format!(r#"{{"id":"{}"}}"#, "n".repeat(129)).into(), 400),
        ("extras that are a list", br#"{"extras":[]}"#.into(), 400),
        ("a lone surrogate", br#"{"data":"\ud800"}"#.into(), 400),
        ("bad UTF-8", b"{\"data\":\"\xFF\"}".into(), 400),
        ("deep nesting", nested(64).into(), 400),
        ("nesting without end", nested(100_000).into(), 400),
    ];
    for (what, body, status) in cases {
        let answer = publish(&node, "bodies", body).await;
        assert_eq!(answer.status, status, "{what}: {:?}", answer.body);
        if status != 200 {
            assert!(!answer.error().is_empty(), "{what}: {:?}", answer.body);
        }
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_array_is_published_in_order_and_an_id_once() {
    let node = node().await;
    let body = json!([{"data": 1, "id": "a"}, {"data": 2}, {"data": 3, "id": "b"}]).to_string();
    assert_eq!(publish(&node, "list", body).await.status, 200);
    let body = json!([{"data": 4, "id": "b"}, {"data": 5}]).to_string();
    assert_eq!(publish(&node, "list", body).await.status, 200);
    let records = history::read_all(node.addr(), KEY, "list", "direction=forwards").await;
    assert_eq!(data_of(&records), [json!(1), json!(2), json!(3), json!(5)]);
    assert_eq!(publish(&node, "list", r#"[{"data":6},{"name":1}]"#).await.status, 400);
    let after = history::read_all(node.addr(), KEY, "list", "direction=forwards").await;
    assert_eq!(after, records, "all or none");
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_publish_answers_for_each_channel() {
    let node = node().await;
    let body = json!({"channels": ["one", "[bad", "two"], "messages": [{"data": 1}, {"data": 2}]});
    let answer = call(&node, KEY, "POST", "/api/publish", body.to_string()).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let results = answer.json()["results"].clone();
    assert_eq!(results[0], json!({"channel": "one", "published": true}));
    assert_eq!((&results[1]["channel"], &results[1]["status"]), (&json!("[bad"), &json!(400)));
    assert_eq!(results[2], json!({"channel": "two", "published": true}));
    for channel in ["one", "two"] {
        let records = history::read_all(node.addr(), KEY, channel, "").await;
        assert_eq!(data_of(&records), [json!(2), json!(1)]);
    }
    let params =
        JwtParams { capability: r#"{"one":["publish"]}"#.into(), client_id: None, issued_s: None, ttl_s: 60 };
    let token = http::bearer(&sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token"));
    let body = json!({"channels": ["one", "two"], "messages": [{"data": 3}]}).to_string();
    let answer = http::request(node.addr(), "POST", "/api/publish", &[("authorization", &token)], body).await;
    let results = answer.json()["results"].clone();
    assert_eq!((&results[0]["published"], &results[1]["status"]), (&json!(true), &json!(403)));
}

#[tokio::test(flavor = "multi_thread")]
async fn history_is_paged_bounded_and_without_side_effects() {
    let node = node().await;
    for chunk in 0..25 {
        let body: Value = (0..10).map(|n| json!({"data": chunk * 10 + n})).collect();
        assert_eq!(publish(&node, "pages", body.to_string()).await.status, 200);
    }
    let count = async |query: &str| {
        let page = get(&node, &history::path("pages", query)).await;
        assert_eq!(page.status, 200, "{query}: {:?}", page.body);
        page.json()["messages"].as_array().map(Vec::len)
    };
    for (query, expected) in [
        ("", 100),
        ("limit=7", 7),
        ("limit=0", 1),
        ("limit=-5", 1),
        ("limit=%2B5", 5),
        ("limit=99999999999999999999999999", 250),
        ("limit=ten", 100),
        ("limit=", 100),
        ("limit=7&limit=9", 7),
        ("start=0&limit=3", 3),
        ("end=1", 0),
        ("start=99999999999999", 0),
    ] {
        assert_eq!(count(query).await, Some(expected), "{query}");
    }
    for query in ["start=x", "end=x", "start=-1", "direction=up", "cursor=nonsense", "cursor=%00"] {
        let page = get(&node, &history::path("pages", query)).await;
        assert_eq!(page.status, 400, "{query}: {:?}", page.body);
    }

    let newest_first = history::read_all(node.addr(), KEY, "pages", "limit=33").await;
    let expected: Vec<_> = (0..250).rev().map(|n| json!(n)).collect();
    assert_eq!(data_of(&newest_first), expected);
    let mut forwards = history::read_all(node.addr(), KEY, "pages", "limit=41&direction=forwards").await;
    forwards.reverse();
    assert_eq!(forwards, newest_first, "both ways, at any page size, again and again");

    let middle = newest_first[120]["timestamp"].as_u64().expect("a time");
    let time = |record: &Value| record["timestamp"].as_u64().expect("a time");
    let from = history::read_all(node.addr(), KEY, "pages", &format!("limit=10&start={middle}")).await;
    assert_eq!(
        from,
        newest_first.iter().filter(|r| time(r) >= middle).cloned().collect::<Vec<_>>(),
        "start is inclusive"
    );
    let until = history::read_all(node.addr(), KEY, "pages", &format!("limit=10&end={middle}")).await;
    assert_eq!(
        until,
        newest_first.iter().filter(|r| time(r) < middle).cloned().collect::<Vec<_>>(),
        "end is exclusive"
    );

    let last = get(&node, &history::path("pages", "limit=1000")).await;
    assert_eq!(last.header("link"), None, "nothing follows the last page");
    let page = get(&node, &history::path("pages", "limit=5&direction=forwards&start=1")).await;
    let next = history::next_of(page.header("link").expect("more"));
    for parameter in ["limit=5", "direction=forwards", "start=1", "cursor="] {
        assert!(next.contains(parameter), "{next}");
    }
    let other_channel = next.replace("/channels/pages/", "/channels/empty/");
    assert_eq!(get(&node, &other_channel).await.json(), json!({"messages": []}), "a cursor holds no channel");
    let other_account = call(&node, OTHER_KEY, "GET", &next, "").await;
    assert_eq!(other_account.json(), json!({"messages": []}), "and no account");
    assert_eq!(get(&node, &history::path("never", "")).await.json(), json!({"messages": []}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_in_a_path_is_decoded_once() {
    let node = node().await;
    for (path, channel) in [
        ("a%3Ab", "a:b"),
        ("a:b2", "a:b2"),
        ("a%2Fb", "a/b"),
        ("a/b2", "a/b2"),
        ("a%252Fb", "a%2Fb"),
        ("a%25b", "a%b"),
        ("a%20b", "a b"),
        ("a+b", "a+b"),
        ("%C3%A4", "ä"),
        ("publish", "publish"),
        ("x/publish", "x/publish"),
        ("presence", "presence"),
        ("a/../b", "a/../b"),
        ("a//b", "a//b"),
        (".", "."),
        ("..", ".."),
        ("%2E%2E", ".."),
        ("%3F%23", "?#"),
    ] {
        let answer = publish(&node, path, json!({"data": path}).to_string()).await;
        assert_eq!((answer.status, &answer.json()["channel"]), (200, &json!(channel)), "{path}");
        let records = get(&node, &format!("/api/channels/{path}/history")).await.json();
        assert_eq!(records["messages"][0]["data"], path, "{path}");
    }
    for path in ["a%FF", "a%C3", "%ED%A0%80", "a%", "a%2", "a%zz", "%00", "a%0Ab", "%5Bx", "[x"] {
        assert_eq!(publish(&node, path, "{}").await.status, 400, "{path}");
        assert_eq!(get(&node, &format!("/api/channels/{path}/history")).await.status, 400, "{path}");
    }
    assert_eq!(publish(&node, &"x".repeat(512), "{}").await.status, 200);
    assert_eq!(publish(&node, &"x".repeat(513), "{}").await.status, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn accounts_do_not_see_each_other() {
    let node = node().await;
    assert_eq!(publish(&node, "shared", r#"{"data":"acme"}"#).await.status, 200);
    assert_eq!(
        call(&node, OTHER_KEY, "GET", "/api/channels/shared/history", "").await.json(),
        json!({"messages": []})
    );
    let mut socket = Socket::open_as(&node, "", &http::basic(OTHER_KEY)).await;
    socket.attach("shared").await;
    assert_eq!(publish(&node, "shared", r#"{"data":"acme again"}"#).await.status, 200);
    socket.publish("shared", json!({"data": "other"})).await;
    assert_eq!(socket.message("shared").await["messages"][0]["data"], "other");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_carries_cors_and_errors_are_json() {
    let node = node().await;
    let cases = [
        ("POST", "/keys/%zz/requestToken", false, 400),
        ("POST", "/keys/%FF/revokeTokens", true, 400),
        ("POST", "/keys/%zz/revokeTokens", false, 401),
        ("GET", "/health", false, 200),
        ("GET", "/time", true, 200),
        ("GET", "/time", false, 401),
        ("POST", "/time", true, 405),
        ("GET", "/", true, 404),
        ("GET", "/api/status", true, 404),
        ("GET", "/api/channels/x/publish", true, 405),
        ("POST", "/api/channels/x/history", true, 405),
        ("DELETE", "/api/channels/x/publish", false, 401),
        ("GET", "/api/nothing", false, 401),
        ("GET", "/api/channels/x/history", false, 401),
        ("GET", "/api/channels/%FF/history", true, 400),
        ("GET", "/keys/k1/requestToken", true, 405),
        ("POST", "/keys/k1/requestToken", false, 400),
        ("GET", "/realtime", false, 426),
        ("GET", "/realtime", true, 426),
        ("OPTIONS", "/api/channels/x/publish", false, 204),
        ("OPTIONS", "/nowhere/%FF", false, 204),
        ("OPTIONS", "/realtime", false, 204),
    ];
    let authorization = http::basic(KEY);
    for (method, path, with_key, status) in cases {
        let headers: &[_] = if with_key { &[("authorization", &*authorization)] } else { &[] };
        let answer = http::request(node.addr(), method, path, headers, "").await;
        assert_eq!(answer.status, status, "{method} {path}: {:?}", answer.body);
        check_cors(&answer, &format!("{method} {path}"));
        match status {
            401 => assert_eq!(answer.json(), json!({"error": "unauthorized"}), "{method} {path}"),
            405 => assert!(answer.header("allow").is_some(), "{method} {path}"),
            _ => {}
        }
        if status >= 400 {
            assert!(!answer.error().is_empty(), "{method} {path}: {:?}", answer.body);
        }
    }
    check_cors(&publish(&node, "x", vec![b' '; 3 * 1024 * 1024]).await, "413");
    for first in ["", "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"] {
        let mut raw = Raw::connect(node.addr()).await;
        if !first.is_empty() {
            raw.write(first.as_bytes()).await;
            assert_eq!(raw.response(SOON).await.expect("an answer").0, 200);
        }
        let (status, head) = raw.upgrade("/realtime", &[("authorization", &authorization)]).await;
        assert_eq!(status, 101, "{head}");
        let exposed = "access-control-expose-headers: link, retry-after, x-service-node-id\r\n";
        for line in ["access-control-allow-origin: *\r\n", exposed] {
            assert_eq!(head.matches(line).count(), 1, "after {first:?}: {head}");
        }
    }

    let options = http::request(node.addr(), "OPTIONS", "/api/channels/x/publish", &[], "").await;
    assert!(options.body.is_empty());
    let allowed = options.header("access-control-allow-headers").unwrap_or_default().to_lowercase();
    for name in ["authorization", "cache-control", "content-type", "last-event-id"] {
        assert!(allowed.contains(name), "{allowed}");
    }
    let methods = options.header("access-control-allow-methods").unwrap_or_default();
    assert!(["GET", "POST", "DELETE"].iter().all(|method| methods.contains(method)), "{methods}");
}

fn check_cors(answer: &Response, what: &str) {
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"), "{what}");
    let exposed = answer.header("access-control-expose-headers").unwrap_or_default().to_lowercase();
    for name in ["link", "retry-after", "x-service-node-id"] {
        assert!(exposed.contains(name), "{what}: {exposed}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_time() {
    let node = node().await;
    let health = http::request(node.addr(), "GET", "/health", &[("authorization", "nonsense")], "").await;
    assert_eq!((health.status, &health.body[..]), (200, &b"ok"[..]));
    assert!(health.header("content-type").is_some_and(|kind| kind.starts_with("text/plain")));
    let time = get(&node, "/time").await.json();
    assert!(time["now"].as_u64().is_some_and(|now| now.abs_diff(clock::now_ms()) < 60_000), "{time}");
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_in_a_header() {
    let node = node().await;
    let colon = http::basic("k1:secret");
    let cases = [
        ("Basic c2VjcmV0Lmsx", 200),
        ("basic c2VjcmV0Lmsx", 200),
        ("Basic c2VjcmV0Lmsy", 200),
        (colon.as_str(), 401),
        ("Basic c2VjcmV0Lms", 401),
        ("Basic c2VjcmV0Lmsx=", 401),
        ("Basic !!!", 401),
        ("Basic", 401),
        ("Basic ", 401),
        ("Digest c2VjcmV0Lmsx", 401),
        ("c2VjcmV0Lmsx", 401),
        ("secret.k1", 401),
        ("Bearer secret.k1", 401),
        ("Bearer ", 401),
        ("", 401),
    ];
    for (authorization, status) in cases {
        let answer =
            http::request(node.addr(), "GET", "/time", &[("authorization", authorization)], "").await;
        assert_eq!(answer.status, status, "{authorization:?}");
    }
    let two = [("authorization", "Basic c2VjcmV0Lmsx"), ("authorization", "Basic c2VjcmV0Lmsy")];
    assert_eq!(http::request(node.addr(), "GET", "/time", &two, "").await.status, 401, "two different ones");
    for query in ["key=secret.k1", "accessToken=x"] {
        let answer = http::request(node.addr(), "GET", &format!("/time?{query}"), &[], "").await;
        assert_eq!(answer.status, 401, "{query}: only the socket takes a credential from the query");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_keeps_history_and_time_does_not_go_back() {
    let mut node = node().await;
    for number in 0..30 {
        assert_eq!(publish(&node, "kept", json!({"data": number}).to_string()).await.status, 200);
    }
    let before = history::read_all(node.addr(), KEY, "kept", "limit=7").await;
    let status = node.stop().await;
    assert_eq!(status.code(), Some(0), "a stopped node exits cleanly:\n{}", node.log());
    node.restart().await;
    let after = history::read_all(node.addr(), KEY, "kept", "limit=7").await;
    assert_eq!(after, before);
    assert_eq!(publish(&node, "kept", r#"{"data":"new"}"#).await.status, 200);
    let records = history::read_all(node.addr(), KEY, "kept", "limit=7").await;
    assert_eq!((records.len(), &records[0]["data"]), (31, &json!("new")));
    assert!(records[0]["timestamp"].as_u64() >= records[1]["timestamp"].as_u64());
    node.assert_no_panic();
}

/// The rule holds for all sources of answers: the router, the handshake before it, and the admin listener.
#[tokio::test(flavor = "multi_thread")]
async fn every_401_says_what_it_asks_for_and_when() {
    let node = Node::start(NodeOptions::default()).await;
    let challenge = r#"Bearer realm="fanfare""#;
    let unsigned = r#"{"keyName":"none","timestamp":1,"nonce":"0123456789abcdef"}"#;
    for (method, path, body) in [
        ("GET", "/api/channels", ""),
        ("GET", "/no/such/path", ""),
        ("GET", "/realtime/sse?channel=a", ""),
        ("POST", "/keys/none/requestToken", unsigned),
    ] {
        let headers = [("content-type", "application/json")];
        let answer = http::request(node.addr(), method, path, &headers, body).await;
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some(challenge)), "{path}");
        assert!(answer.header("date").is_some(), "{path}");
    }
    let mut raw = Raw::connect(node.addr()).await;
    let (status, head) = raw.upgrade("/realtime", &[("authorization", "Basic bm8=")]).await;
    assert_eq!(status, 401, "{head}");
    for (name, value) in [("www-authenticate", challenge), ("date", "")] {
        assert_eq!(head.matches(&format!("\r\n{name}: {value}")).count(), 1, "{head}");
    }
    let operators = http::request(node.admin(), "POST", "/drain", &[], "").await;
    assert_eq!((operators.status, operators.header("www-authenticate")), (401, Some(challenge)));
}
