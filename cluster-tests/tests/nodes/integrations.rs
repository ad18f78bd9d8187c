//! Integrations as accounts can read them, and queues of a node without a broker.

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, http};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const OTHER_KEY: &str = "other.k2";
const NARROW_KEY: &str = "narrow.k3";

const WEBHOOK: &str = r#"
kind = "webhook"
channels = ["orders:*"]
events = ["message"]
url = "https://user:hush@example.com/hook?token=hush"
secret = "hush"
"#;
const AMQP: &str = r#"
kind = "amqp"
url = "amqps://user:hush@broker.example:5671/prod"
exchange = "events"
"#;

async fn node() -> Node {
    let directory = Directory::default()
        .account("acme")
        .integration("orders", WEBHOOK)
        .integration("bus", AMQP)
        .integration("all", WEBHOOK)
        .key("k1", "secret", ALL)
        .key("k3", "narrow", r#"{ "chat" = ["subscribe"] }"#)
        .account("other")
        .key("k2", "other", ALL);
    Node::start(NodeOptions::default().directory(directory, KEY)).await
}

async fn get(node: &Node, key: &str, path: &str) -> Value {
    let answer = http::request(node.addr(), "GET", path, &[("authorization", &http::basic(key))], "").await;
    assert_eq!(answer.status, 200, "{path}: {:?}", answer.body);
    answer.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_account_reads_its_own_integrations_without_secrets() {
    let node = node().await;
    let hook = |id: &str| {
        json!({
            "id": id, "kind": "webhook", "channels": ["orders:*"], "events": ["message"],
            "url": "https://[redacted]@example.com/hook?token=[redacted]", "secret": "[redacted]",
        })
    };
    let bus = json!({
        "id": "bus", "kind": "amqp", "channels": ["*"], "events": ["message", "presence"],
        "url": "amqps://[redacted]@broker.example:5671/prod", "exchange": "events",
    });
    for key in [KEY, NARROW_KEY] {
        let webhooks = get(&node, key, "/api/webhooks").await;
        assert_eq!(webhooks, json!({"targets": [hook("orders"), hook("all")]}), "{key}");
        assert_eq!(get(&node, key, "/api/amqp").await, json!({"targets": [bus]}), "{key}");
    }
    for path in ["/api/lambda", "/api/sns"] {
        assert_eq!(get(&node, KEY, path).await, json!({"targets": []}), "{path}");
    }
    for path in ["/api/webhooks", "/api/amqp", "/api/lambda", "/api/sns"] {
        assert_eq!(get(&node, OTHER_KEY, path).await, json!({"targets": []}), "another account: {path}");
        let own = http::basic(KEY);
        for (method, headers, status) in [
            ("GET", &[][..], 401),
            ("POST", &[][..], 401),
            ("POST", &[("authorization", own.as_str())][..], 405),
            ("PUT", &[("authorization", own.as_str())][..], 405),
            ("DELETE", &[("authorization", own.as_str())][..], 405),
        ] {
            let answer = http::request(node.addr(), method, path, headers, "{}").await;
            assert_eq!(answer.status, status, "{method} {path}");
        }
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_without_a_broker_are_refused_in_one_order() {
    let node = node().await;
    for (method, path) in [
        ("GET", "/api/queues"),
        ("GET", "/api/queues?all=1"),
        ("POST", "/api/queues"),
        ("PATCH", "/api/queues/7"),
        ("DELETE", "/api/queues/7/rules/8"),
        ("GET", "/api/queues/anything/else"),
    ] {
        for (key, status) in [(None, 401), (Some(NARROW_KEY), 403), (Some(KEY), 503)] {
            let authorization = key.map(http::basic);
            let headers: Vec<_> =
                authorization.as_deref().map(|value| ("authorization", value)).into_iter().collect();
            let answer = http::request(node.addr(), method, path, &headers, "{}").await;
            assert_eq!(answer.status, status, "{method} {path} as {key:?}: {:?}", answer.body);
        }
    }
    node.assert_well().await;
}
