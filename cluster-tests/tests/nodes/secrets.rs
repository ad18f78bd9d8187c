//! Secrets of the directory, the settings and the credentials appear in no answer, no line of the log and no metric.

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::receiver::{Answer, Receiver};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, RabbitMq, Socket, http, wait_until};
use serde_json::json;

/// Secrets, each in another place.
const CANARIES: [&str; 17] = [
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
    "canary-of-aws-id",
    "canary-of-aws-secret",
    "canary-of-aws-token",
    "canary-of-external-id",
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
    let aws = format!(
        "endpoint = \"http://{0}\"\naccess_key_id = \"canary-of-aws-id\"\nsecret_access_key = \"canary-of-aws-secret\"\n\
         session_token = \"canary-of-aws-token\"\n",
        receiver.addr()
    );
    let topic = format!("kind = \"sns\"\ntopic_arn = \"arn:aws:sns:eu-west-1:123456789012:t\"\n{aws}");
    // The role of this function cannot be assumed.
    let function = format!(
        "kind = \"lambda\"\nfunction = \"f\"\nregion = \"eu-west-1\"\n{aws}\
         role_arn = \"arn:aws:iam::123456789012:role/r\"\nexternal_id = \"canary-of-external-id\"\n\
         sts_endpoint = \"http://{}\"",
        receiver.addr()
    );
    let directory = Directory::default()
        .account("acme")
        .integration("hook", &hook)
        .integration("down", &down)
        .integration("inside", &inside)
        .integration("bus", &bus)
        .integration("topic", &topic)
        .integration("function", &function)
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

/// Text of all answers so far.
#[derive(Default)]
struct Answers(String);

impl Answers {
    async fn ask(
        &mut self,
        addr: SocketAddr,
        (method, path): (&str, &str),
        headers: &[(&str, &str)],
        body: &str,
    ) -> u16 {
        let answer = http::request(addr, method, path, headers, body.to_owned()).await;
        let text = String::from_utf8_lossy(&answer.body);
        self.0.push_str(&format!("{method} {:?} {text}\n", answer.headers));
        answer.status
    }
}

/// Gives method and path of all documented calls of the API. Another test compares the page with the routes.
fn documented_calls() -> Vec<(String, &'static str)> {
    let page = include_str!("../../../docs/openapi.yaml");
    let mut calls = Vec::new();
    let mut path = None;
    for line in page.lines() {
        let name = line.trim_start().strip_suffix(':').unwrap_or_default();
        match line.len() - line.trim_start().len() {
            2 => path = name.starts_with('/').then_some(name),
            4 if ["get", "post", "put", "patch", "delete"].contains(&name) => {
                calls.extend(path.map(|path| (name.to_uppercase(), path)));
            }
            _ => {}
        }
    }
    assert!(calls.len() > 25, "the page was read: {calls:?}");
    calls
}

/// Gives method and path of all routes of the admin listener.
fn admin_calls() -> Vec<(String, String)> {
    let edge = Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/src/edge");
    let parts =
        std::fs::read_dir(edge.join("admin")).expect("a folder").map(|file| file.expect("a file").path());
    let mut calls = Vec::new();
    for file in parts.chain([edge.join("admin.rs")]).filter(|file| !file.ends_with("tests.rs")) {
        let text = std::fs::read_to_string(&file).expect("a source file");
        for route in text.split(".route(").skip(1) {
            let (path, handlers) = route.trim_start()[1..].split_once('"').expect("a path");
            let (handlers, _) = handlers.split_once('\n').expect("further lines");
            let methods = ["get", "post", "put", "patch", "delete"];
            let served = methods.iter().filter(|method| handlers.contains(&format!("{method}(")));
            let before = calls.len();
            calls.extend(served.map(|method| (method.to_uppercase(), path.to_owned())));
            assert!(calls.len() > before, "{path} of {} has a method on its line", file.display());
        }
    }
    assert!(calls.len() >= 11, "the routes were read: {calls:?}");
    calls
}

/// Gives a body with which the call succeeds.
fn body(method: &str, path: &str) -> String {
    let text = match (method, path) {
        ("GET" | "DELETE", _) | (_, "/api/clients/{clientId}/connections/close") => "",
        (_, "/keys/{keyName}/requestToken") => {
            let now_ms = UNIX_EPOCH.elapsed().expect("a clock after 1970").as_millis();
            return format!(r#"{{"keyName":"k1","timestamp":{now_ms},"nonce":"6f1d0c5be6a84d0f"}}"#);
        }
        (_, "/keys/{keyName}/revokeTokens") => r#"{"clientId":"bob"}"#,
        (_, "/api/channels/{channel}/publish") => r#"{"data":1}"#,
        (_, "/api/publish") => r#"{"channels":["b","[bad]"],"messages":[{"data":1}]}"#,
        (_, "/api/queues") => r#"{"name":"q"}"#,
        (_, "/api/queues/{id}") => r#"{"enabled":false}"#,
        (_, "/api/queues/{id}/rules") => r#"{"sourcePattern":"b"}"#,
        _ => unreachable!("{method} {path} is new: say here with which body it is asked"),
    };
    text.to_owned()
}

/// Calls the whole API; the channel has no secret message.
async fn ask_api(answers: &mut Answers, node: &Node) {
    let basic = http::basic(KEY);
    let good: &[(&str, &str)] = &[("authorization", &basic)];
    for (method, path) in documented_calls() {
        // The stream has no end; it is requested with a wrong token below.
        if path == "/realtime/sse" {
            continue;
        }
        let sent = path
            .replace("{channel}", "b")
            .replace("{keyName}", "k1")
            .replace("{clientId}", "bob")
            .replace("{id}", "7")
            .replace("{ruleId}", "8");
        assert!(!sent.contains('{'), "{path} has a parameter that is new");
        let status = answers.ask(node.addr(), (&method, &sent), good, &body(&method, path)).await;
        let expected: &[u16] = match path {
            "/realtime" => &[426],
            // The broker cannot be reached.
            "/api/queues" if method == "POST" => &[503],
            _ if path.starts_with("/api/queues/") => &[404, 503],
            _ => &[200],
        };
        assert!(expected.contains(&status), "{method} {path}: {status}");
    }
    let [wrong_key, wrong_token] =
        [http::basic("canary-of-wrong-key.k1"), http::bearer("canary-of-wrong-token")];
    for headers in [&wrong_key, &wrong_token] {
        let asked = ("GET", "/api/webhooks");
        assert_eq!(answers.ask(node.addr(), asked, &[("authorization", headers)], "").await, 401);
    }
    let in_query = ("GET", "/realtime/sse?channel=a&accessToken=canary-of-wrong-token");
    assert_eq!(answers.ask(node.addr(), in_query, &[], "").await, 401);
    let in_body = r#"{"keyName":"k1","secret":"canary-of-wrong-key","nonce":"canary-of-wrong-key"}"#;
    assert!(answers.ask(node.addr(), ("POST", "/keys/k1/requestToken"), &[], in_body).await >= 400);
    let of_client = "/api/clients/canary-of-wrong-token%zz/connections/close";
    assert_eq!(answers.ask(node.addr(), ("POST", of_client), good, "").await, 400);
}

/// Gives the requests to an admin route: paths with their bodies.
fn admin_paths(path: &str) -> Vec<(String, &'static str)> {
    let broker = "/broker/canary-of-admin-token";
    let user = "username=k1&password=canary-of-consumer";
    match path {
        "/metrics" | "/live" | "/ready" | "/rebalance" | "/debug/members" => vec![(path.to_owned(), "")],
        "/broker/{token}/{check}" => {
            // The secret is also given in the place of the name.
            let queries = [user, "username=canary-of-key&password=k1"];
            let checks = ["user", "vhost", "resource", "topic", "other"];
            let all = checks.iter().flat_map(|check| {
                queries.iter().map(move |query| (format!("{broker}/{check}?{query}"), *query))
            });
            all.collect()
        }
        "/outbox" => vec![(path.to_owned(), "")],
        "/outbox/{account}/{target}" => {
            let targets = ["hook", "down", "inside", "bus", "topic", "function", "nobody"];
            let dead = targets.iter().map(|target| (format!("/outbox/acme/{target}?state=dead"), ""));
            dead.collect()
        }
        // The backup is for the operator, and has the messages.
        "/backup" => Vec::new(),
        "/outbox/{account}/{target}/retry" => vec![("/outbox/acme/hook/retry".to_owned(), "{}")],
        // Called at the end, since it ends the node.
        "/drain" => Vec::new(),
        _ => unreachable!("{path} is new: say here how it is asked"),
    }
}

/// Calls the whole admin listener: as the operator, and with a wrong token.
async fn ask_admin(answers: &mut Answers, node: &Node) {
    let admin = node.admin();
    let operator = [("authorization", "Bearer canary-of-admin-token")];
    let wrong = [("authorization", "Bearer canary-of-wrong-token")];
    for (method, path) in admin_calls() {
        for (sent, body) in admin_paths(&path) {
            let asked = (&*method, &*sent);
            let status = answers.ask(admin, asked, &operator, body).await;
            let is_bad = sent.contains("/other?") || sent.contains("/nobody?");
            assert!(status == 200 || is_bad, "{method} {path}: {status}");
            let other = sent.replace("canary-of-admin-token", "canary-of-wrong-token");
            let status = answers.ask(admin, (&method, &other), &wrong, body).await;
            let is_public = ["/metrics", "/live", "/ready"].contains(&&*path);
            assert_eq!(status, if is_public { 200 } else { 401 }, "{method} {path} with a wrong token");
        }
    }
    // The item itself is for the operator, so the answer has the message.
    let waiting = http::request(admin, "GET", "/outbox/acme/hook?state=waiting", &operator, "").await;
    let waiting = String::from_utf8_lossy(&waiting.body).into_owned();
    assert!(waiting.contains("canary-of-message"), "{waiting}");
    answers.0.push_str(&waiting.replace("canary-of-message", ""));
}

/// Counts the targets for which the operator sees the reason of a failed attempt.
async fn targets_that_failed(node: &Node) -> usize {
    let operator = [("authorization", "Bearer canary-of-admin-token")];
    let states = http::request(node.admin(), "GET", "/outbox", &operator, "").await.json();
    let targets = states["targets"].as_array().expect("targets").iter();
    targets.filter(|target| target["lastFailure"].is_string()).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_log_or_metric_has_a_secret() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let token_file = folder.path().join("token");
    std::fs::write(&token_file, "canary-of-admin-token\n").expect("a writable folder");
    let receiver = Receiver::start().await;
    let mut node = node(&receiver, &broker, &token_file.to_string_lossy()).await;

    // All events go to targets that fail in every way.
    receiver.answer(Answer::Status(500));
    let mut socket = Socket::open(&node, "").await;
    let sent = socket.ask(json!({"op": 13, "channel": "a", "data": "canary-of-message"})).await;
    assert_eq!(sent["op"], 1, "{sent}");
    let failed = async || targets_that_failed(&node).await == 6;
    wait_until(Duration::from_secs(60), "a failed attempt at each target", failed).await;
    let mut answers = Answers::default();
    let refused = socket.ask(json!({"op": 15, "accessToken": "canary-of-wrong-token"})).await;
    assert_eq!(refused["op"], 2, "{refused}");
    answers.0.push_str(&refused.to_string());
    ask_api(&mut answers, &node).await;
    ask_admin(&mut answers, &node).await;
    wait_until(Duration::from_secs(60), "further attempts", async || receiver.received().len() >= 3).await;
    let operator = [("authorization", "Bearer canary-of-admin-token")];
    assert_eq!(answers.ask(node.admin(), ("POST", "/drain"), &operator, "").await, 202);
    node.ended().await;

    let log = node.log();
    assert!(log.contains("stopped"), "the log has the end too: {log}");
    for canary in CANARIES {
        let line = log.lines().chain(answers.0.lines()).find(|line| line.contains(canary));
        assert_eq!(line, None, "{canary} is told");
    }
    node.assert_no_panic();
}
