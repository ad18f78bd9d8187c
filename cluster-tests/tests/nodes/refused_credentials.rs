//! Reasons of refused credentials: the operator gets them for every transport, the client never.

use std::collections::BTreeMap;

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{
    Directory, Node, NodeOptions, Raw, RunningCommand, SOON, Socket, clock, http, wait_until,
};
use serde_json::json;

const KEY: &str = "top-secret.k1";
const OTHER_KEY: &str = "secret-of-2.k2";

async fn node() -> Node {
    let directory =
        Directory::default().account("acme").key("k1", "top-secret", ALL).key("k2", "secret-of-2", ALL);
    Node::start(NodeOptions::default().directory(directory, KEY)).await
}

/// Makes a token of an hour that was signed `age_s` seconds ago.
fn token(key: &str, age_s: u64) -> String {
    let params = JwtParams {
        capability: r#"{"*":["subscribe"]}"#.to_owned(),
        client_id: None,
        issued_s: Some(clock::now_s() - age_s),
        ttl_s: 3600,
    };
    sign::jwt(&key.parse().expect("a key"), &params).expect("signed")
}

/// Gives the refusals by reason, without zeros.
async fn refusals(node: &Node) -> BTreeMap<String, u64> {
    let page = http::request(node.admin(), "GET", "/metrics", &[], "").await;
    let page = String::from_utf8(page.body.to_vec()).expect("text");
    let counts = page.lines().filter_map(|line| {
        let line = line.strip_prefix("fanfare_auth_failures_total{reason=\"")?;
        let (reason, count) = line.split_once("\"} ")?;
        Some((reason.to_owned(), count.parse().expect("a number")))
    });
    counts.filter(|(_, count)| *count > 0).collect()
}

async fn assert_counted(node: &Node, reason: &str, times: u64, what: &str) {
    let counts = refusals(node).await;
    assert_eq!(counts.get(reason), Some(&times), "{what}: {counts:?}");
    assert_eq!(counts.len(), 1, "{what}: {counts:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn every_way_in_counts_and_logs_why() {
    let node = node().await;
    let expired = token(KEY, 4000);
    let bearer = http::bearer(&expired);
    let header = [("authorization", bearer.as_str())];

    assert_eq!(http::request(node.addr(), "GET", "/time", &header, "").await.status, 401);
    assert_counted(&node, "expired", 1, "HTTP").await;
    let path = format!("/realtime?accessToken={expired}");
    assert_eq!(Raw::connect(node.addr()).await.upgrade(&path, &[]).await.0, 401);
    assert_counted(&node, "expired", 2, "an upgrade").await;
    assert_eq!(Raw::connect(node.addr()).await.upgrade(&format!("{path}&errors=socket"), &[]).await.0, 101);
    assert_counted(&node, "expired", 3, "an upgrade that is refused in the socket").await;
    let mut kept = Raw::connect(node.addr()).await;
    kept.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(kept.response(SOON).await.expect("an answer").0, 200);
    assert_eq!(kept.upgrade(&path, &[]).await.0, 401);
    assert_counted(&node, "expired", 4, "an upgrade behind another request").await;
    let stream = format!("/realtime/sse?channel=a&accessToken={expired}");
    assert_eq!(http::request(node.addr(), "GET", &stream, &[], "").await.status, 401);
    assert_counted(&node, "expired", 5, "an event stream").await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(socket.ask(json!({"op": 15, "accessToken": expired})).await["code"], 40140);
    assert_counted(&node, "expired", 6, "a new token").await;
    let body = json!({"keyName": "k1", "timestamp": clock::now_ms(), "nonce": "n".repeat(16)}).to_string();
    let exchange = http::request(node.addr(), "POST", "/keys/k1/requestToken", &header, body).await;
    assert_eq!((exchange.status, exchange.json()), (401, json!({"error": "invalid token request mac"})));
    assert_counted(&node, "expired", 7, "beside a token request").await;

    wait_until(SOON, "the log", async || node.log().contains("credential refused")).await;
    let log = node.log();
    let lines: Vec<_> = log.lines().filter(|line| line.contains("credential refused")).collect();
    // One line for each reason and key: further ones are suppressed for 10 s, unless this took longer.
    assert!(!lines.is_empty() && lines.len() < 7, "{log}");
    for part in ["expired", "k1", "127.0.0.1"] {
        assert!(lines[0].contains(part), "{part}: {}", lines[0]);
    }
    for secret in [expired.as_str(), "top-secret", &expired[expired.len() - 20..]] {
        assert!(!log.contains(secret), "{log}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_client_gets_the_same_answer_for_every_reason() {
    let node = node().await;
    let credentials = [
        ("missing", String::new()),
        ("expired", http::bearer(&token(KEY, 4000))),
        ("bad_signature", http::bearer(&token("other.k1", 0))),
        ("unknown_key", http::bearer(&token("other.k9", 0))),
        ("malformed", http::bearer("x")),
        ("bad_secret", http::basic("other.k1")),
        ("unknown_key", http::basic("other.k9")),
    ];
    let mut answers = Vec::new();
    for (_, credential) in &credentials {
        let header =
            if credential.is_empty() { String::new() } else { format!("authorization: {credential}\r\n") };
        let mut of_one = Vec::new();
        for upgrade in [
            "",
            "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n",
        ] {
            let path = if upgrade.is_empty() { "/time" } else { "/realtime" };
            let mut raw = Raw::connect(node.addr()).await;
            raw.write(format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{header}{upgrade}\r\n").as_bytes())
                .await;
            let (status, head, body) = raw.response(SOON).await.expect("an answer");
            assert_eq!((status, body.as_str()), (401, r#"{"error":"unauthorized"}"#));
            let dateless = head.lines().filter(|line| !line.to_ascii_lowercase().starts_with("date:"));
            of_one.push(dateless.map(str::to_owned).collect::<Vec<_>>());
        }
        answers.push(of_one);
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
    let mut expected = BTreeMap::new();
    for (reason, _) in credentials {
        *expected.entry(reason.to_owned()).or_default() += 2;
    }
    assert_eq!(refusals(&node).await, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn good_token_requests_pass_beside_a_flood_of_bad_ones() {
    let directory = Directory::default().account("acme").key("k1", "top-secret", ALL);
    let options = NodeOptions::default().limit("failed_token_requests_per_second", 1);
    let node = Node::start(options.directory(directory, KEY)).await;
    let request = async |mac: Option<&str>| {
        let mut request =
            sign::token_request(&KEY.parse().expect("a key"), Default::default()).expect("signed");
        request.mac = mac.map_or(request.mac, str::to_owned);
        let body = serde_json::to_string(&request).expect("JSON");
        http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], body).await.status
    };
    let mut limited = 0;
    for _ in 0..20 {
        for _ in 0..30 {
            limited += u32::from(request(Some("forged")).await == 429);
        }
        assert_eq!(request(None).await, 200);
    }
    let failed = refusals(&node).await;
    assert_eq!(failed, BTreeMap::from([("bad_mac".to_owned(), 600)]));
    assert!((1..600).contains(&limited), "{limited}: the first of a second are told why");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_inspected_without_a_node() {
    let node = node().await;
    let folder = node.data_dir().display().to_string();
    for (key, age_s, code, message) in [
        (KEY, 0, 0, " good"),
        (KEY, 4000, 1, "expired"),
        ("wrong.k1", 0, 1, "bad_signature"),
        (OTHER_KEY, 0, 0, " good"),
    ] {
        let directory = format!("{folder}/directory.toml");
        let token = token(key, age_s);
        let mut command = RunningCommand::start(&["token", "inspect", &token, "--directory", &directory]);
        assert_eq!(command.ended().await.code(), Some(code), "{message}");
        let all = || [command.stdout(), command.stderr()].concat().join("\n");
        wait_until(SOON, message, async || all().contains(message)).await;
        let all = all();
        assert!(
            !all.contains(&token) && !all.contains("secret-of-2") && !all.contains("top-secret"),
            "{all}"
        );
    }
    let mut piped = RunningCommand::start(&["token", "inspect", "-", "--key", KEY]);
    piped.write(&token(KEY, 0));
    piped.end_stdin();
    assert_eq!(piped.ended().await.code(), Some(0), "{:?}", piped.stderr());
}
