//! Secrets of the directory, the settings and the credentials reach no answer, no line of the log and no metric.

use std::time::Duration;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::receiver::{Answer, Receiver};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, RabbitMq, Socket, http, wait_until};
use serde_json::json;

/// Each stands somewhere where it is secret.
const CANARIES: [&str; 13] = [
    "canary-of-key",
    "canary-of-hook-user",
    "canary-of-hook-query",
    "canary-of-hook-header",
    "canary-of-hook-secret",
    "canary-of-bus-password",
    "canary-of-broker-password",
    "canary-of-management-password",
    "canary-of-admin-token",
    "canary-of-wrong-key",
    "canary-of-wrong-token",
    "canary-of-message",
    "canary-of-consumer",
];
const KEY: &str = "canary-of-key.k1";

async fn node(receiver: &Receiver, broker: &RabbitMq, token_file: &str) -> Node {
    let hook = format!(
        "kind = \"webhook\"\nurl = \"http://canary-of-hook-user:canary-of-hook-user@{}/hook?q=canary-of-hook-query\"\n\
         secret = \"canary-of-hook-secret\"\nheaders = {{ x-team = \"canary-of-hook-header\" }}",
        receiver.addr()
    );
    let down = hook.replace(&receiver.addr().to_string(), "127.0.0.1:1");
    let inside = hook.replace(&receiver.addr().to_string(), "10.0.0.1");
    let bus =
        format!("kind = \"amqp\"\nurl = \"{}\"\nexchange = \"e\"", broker.url_as("k:canary-of-bus-password"));
    let directory = Directory::default()
        .account("acme")
        .integration("hook", &hook)
        .integration("down", &down)
        .integration("inside", &inside)
        .integration("bus", &bus)
        .key("k1", "canary-of-key", ALL);
    let options = broker
        .queues(NodeOptions::default().directory(directory, KEY))
        .environment("FANFARE_AMQP_URL", &broker.url_as("q:canary-of-broker-password"))
        .environment("FANFARE_AMQP_MANAGEMENT_URL", "http://q:canary-of-management-password@127.0.0.1:1")
        .environment("FANFARE_ADMIN_TOKEN_FILE", token_file)
        .environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")
        .environment("FANFARE_LOG", "debug");
    Node::start(options).await
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_log_or_metric_has_a_secret() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, "canary-of-admin-token\n").expect("a writable folder");
    let receiver = Receiver::start().await;
    let node = node(&receiver, &broker, &token_file.to_string_lossy()).await;
    let mut answers = String::new();
    let mut ask = async |addr, method, path: &str, headers: &[(&str, &str)], body: &str| {
        let answer = http::request(addr, method, path, headers, body.to_owned()).await;
        answers.push_str(&format!(
            "{method} {:?} {}\n",
            answer.headers,
            String::from_utf8_lossy(&answer.body)
        ));
        answer.status
    };
    let basic = http::basic(KEY);
    let good: &[(&str, &str)] = &[("authorization", &basic)];

    // All goes to targets that fail in every way.
    receiver.answer(Answer::Status(500));
    let mut socket = Socket::open(&node, "").await;
    let sent = socket.ask(json!({"op": 13, "channel": "a", "data": "canary-of-message"})).await;
    assert_eq!(sent["op"], 1, "{sent}");
    let failed = async || node.metric("fanfare_integration_events_total").await >= 12.0;
    wait_until(Duration::from_secs(60), "attempts at each target", failed).await;
    for path in [
        "/api/webhooks",
        "/api/amqp",
        "/api/lambda",
        "/api/sns",
        "/api/queues",
        "/api/channels",
        "/api/connections",
        "/api/metrics/series",
    ] {
        assert_eq!(ask(node.addr(), "GET", path, good, "").await, 200, "{path}");
    }
    let made = ask(node.addr(), "POST", "/api/queues", good, r#"{"name":"q"}"#).await;
    assert_eq!(made, 503, "its broker cannot be reached");
    let [wrong_key, wrong_token] =
        [http::basic("canary-of-wrong-key.k1"), http::bearer("canary-of-wrong-token")];
    for headers in [&wrong_key, &wrong_token] {
        assert_eq!(ask(node.addr(), "GET", "/api/webhooks", &[("authorization", headers)], "").await, 401);
    }
    let in_query = "/realtime/sse?channel=a&accessToken=canary-of-wrong-token";
    assert_eq!(ask(node.addr(), "GET", in_query, &[], "").await, 401);
    let in_body = r#"{"keyName":"k1","secret":"canary-of-wrong-key","nonce":"canary-of-wrong-key"}"#;
    assert!(ask(node.addr(), "POST", "/keys/k1/requestToken", &[], in_body).await >= 400);

    let admin = node.admin();
    let check = "/broker/canary-of-admin-token/user?username=k1&password=canary-of-consumer";
    assert_eq!(ask(admin, "GET", check, &[], "").await, 200);
    assert_eq!(ask(admin, "GET", &check.replace("admin", "other"), &[], "").await, 401);
    let as_name = "/broker/canary-of-admin-token/user?username=canary-of-key&password=k1";
    assert_eq!(ask(admin, "GET", as_name, &[], "").await, 200, "the secret in the place of the name");
    let form = "username=k1&password=canary-of-consumer";
    assert_eq!(ask(admin, "POST", "/broker/canary-of-admin-token/vhost", &[], form).await, 200);
    assert_eq!(
        ask(admin, "GET", "/debug/members", &[("authorization", "Bearer canary-of-wrong-token")], "").await,
        401
    );
    let operator = [("authorization", "Bearer canary-of-admin-token")];
    assert_eq!(ask(admin, "GET", "/debug/members", &operator, "").await, 200);
    for path in ["/metrics", "/ready", "/live"] {
        assert_eq!(ask(admin, "GET", path, &[], "").await, 200, "{path}");
    }
    wait_until(Duration::from_secs(60), "further attempts", async || receiver.received().len() >= 3).await;

    let log = node.log();
    for canary in CANARIES {
        let line = log.lines().chain(answers.lines()).find(|line| line.contains(canary));
        assert_eq!(line, None, "{canary} is told");
    }
    node.assert_no_panic();
}
