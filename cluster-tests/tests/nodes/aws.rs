//! AWS Lambda and SNS of moto, which checks signatures and permissions: each acknowledged message reaches them.

use std::time::Duration;

use fanfare_cluster_tests::attempts::until_sent;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::receiver::{ReceivedRequest, Receiver};
use fanfare_cluster_tests::{Directory, Moto, Node, NodeOptions, SOON, hostile, http, wait_until};
use fanfare_proto::path::{decode, encode_channel};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const STATIC_KEYS: &str = "access_key_id = \"AKIDEXAMPLE\"\nsecret_access_key = \"hush\"\n";
/// Greatest delay until a further attempt, after a few failures.
const AGAIN: Duration = Duration::from_secs(60);

fn sns(moto: &Moto, topic: &str, more: &str) -> String {
    let (endpoint, arn) = (moto.url(), Moto::arn("sns", topic));
    format!("kind = \"sns\"\ntopic_arn = \"{arn}\"\nendpoint = \"{endpoint}\"\n{more}")
}

fn lambda(moto: &Moto, function: &str, more: &str) -> String {
    let endpoint = moto.url();
    format!(
        "kind = \"lambda\"\nfunction = \"{function}\"\nregion = \"eu-west-1\"\nendpoint = \"{endpoint}\"\n{more}"
    )
}

/// Options of a node with one account and these integrations, which may connect to loopback.
fn options(integrations: &[(&str, String)]) -> NodeOptions {
    let account = Directory::default().account("acme");
    let with_targets =
        integrations.iter().fold(account, |directory, (id, fields)| directory.integration(id, fields));
    let options = NodeOptions::default().directory(with_targets.key("k1", "secret", ALL), KEY);
    options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")
}

async fn request(node: &Node, method: &str, path: &str, body: String) -> Value {
    let authorization = http::basic(KEY);
    let answer =
        http::request(node.addr(), method, path, &[("authorization", authorization.as_str())], body).await;
    assert_eq!(answer.status, 200, "{method} {path}: {:?}", answer.body);
    answer.json()
}

async fn publish(node: &Node, channel: &str, data: Value) {
    let path = format!("/api/channels/{channel}/publish");
    request(node, "POST", &path, json!({"data": data}).to_string()).await;
}

/// Receives messages of the queue until there are `count`.
async fn received(moto: &Moto, queue: &str, count: usize) -> Vec<Value> {
    let mut messages = Vec::new();
    wait_until(AGAIN, &format!("{count} messages"), async || {
        messages.extend(moto.receive(queue).await);
        messages.len() >= count
    })
    .await;
    messages
}

fn envelope(message: &Value) -> Value {
    serde_json::from_str(message["Body"].as_str().expect("a text")).expect("an envelope")
}

fn attribute<'a>(message: &'a Value, name: &str) -> &'a str {
    message["MessageAttributes"][name]["StringValue"].as_str().unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_topic_hands_envelope_and_attributes_to_its_queue() {
    let Some(moto) = Moto::start() else { return };
    let queue = moto.topic_with_queue("orders", "inbox").await;
    let of_environment = options(&[("bus", sns(&moto, "orders", "channels = [\"orders:*\"]\n"))])
        .environment("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
        .environment("AWS_SECRET_ACCESS_KEY", "hush")
        .environment("AWS_SESSION_TOKEN", "hush-token")
        .environment("FANFARE_LOG", "debug,aws_sigv4=trace,reqwest=trace,hyper=trace,hyper_util=trace");
    let node = Node::start(of_environment).await;
    publish(&node, "other", json!(0)).await;
    publish(&node, "orders%3A%C3%BC%20%23", json!({"text": "\u{1f600} & <ü> + %"})).await;
    let message = received(&moto, &queue, 1).await.remove(0);
    let envelope = envelope(&message);
    let history = request(&node, "GET", "/api/channels/orders%3A%C3%BC%20%23/history", String::new()).await;
    assert_eq!(envelope["items"], history["messages"], "the record of the history");
    assert_eq!((&envelope["accountId"], &envelope["ruleId"]), (&json!("acme"), &json!("bus")));
    for (name, value) in [
        ("x-service-account-id", "acme"),
        ("x-service-channel", "orders%3A%C3%BC%20%23"),
        ("x-service-source", "channel.message"),
        ("x-service-rule-id", "bus"),
    ] {
        assert_eq!(attribute(&message, name), value, "{name}");
    }
    assert!(attribute(&message, "x-service-event-id").starts_with("evt_"), "{message}");
    let delivered = r#"fanfare_integration_events_total{kind="sns",outcome="delivered"}"#;
    wait_until(SOON, "a delivered event", async || node.metric(delivered).await == 1.0).await;
    assert!(node.log().contains("signing request"), "all that the signature logs is there");
    assert!(!node.log().contains("hush"));
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_too_large_for_a_topic_is_a_dead_letter() {
    let Some(moto) = Moto::start() else { return };
    let queue = moto.topic_with_queue("orders", "inbox").await;
    let node = Node::start(
        options(&[("bus", sns(&moto, "orders", STATIC_KEYS))]).limit("message_bytes", 512 * 1024),
    )
    .await;
    publish(&node, "a", json!("x".repeat(300 * 1024))).await;
    publish(&node, "a", json!("small")).await;
    let message = received(&moto, &queue, 1).await.remove(0);
    assert_eq!(envelope(&message)["items"][0]["data"], "small");
    let dead = "fanfare_outbox_dead_letters_total";
    wait_until(SOON, "a dead letter", async || node.metric(dead).await == 1.0).await;
    assert!(node.log().contains("bytes, and SNS takes 262144"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fifo_topic_has_the_messages_of_a_channel_in_order() {
    let Some(moto) = Moto::start() else { return };
    let queue = moto.topic_with_queue("orders.fifo", "inbox.fifo").await;
    let fields = format!("{STATIC_KEYS}batch_events = 1\n");
    let node = Node::start(options(&[("bus", sns(&moto, "orders.fifo", &fields))])).await;
    for number in 0..5 {
        for channel in ["a", "b%3Ac"] {
            publish(&node, channel, json!(number)).await;
        }
    }
    let messages = received(&moto, &queue, 10).await;
    for (channel, group) in [("a", "a"), ("b:c", "b%3Ac")] {
        let of_group = messages.iter().filter(|message| message["Attributes"]["MessageGroupId"] == group);
        let envelopes: Vec<Value> = of_group.map(envelope).collect();
        let data: Vec<&Value> = envelopes.iter().map(|envelope| &envelope["items"][0]["data"]).collect();
        assert_eq!(data, [&json!(0), &json!(1), &json!(2), &json!(3), &json!(4)], "{channel}");
        assert!(envelopes.iter().all(|envelope| envelope["channel"] == channel));
    }
    let is_named = |message: &Value| {
        message["Attributes"]["MessageDeduplicationId"] == attribute(message, "x-service-event-id")
    };
    assert!(messages.iter().all(is_named), "{messages:?}");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_permission_that_is_given_later_costs_no_event() {
    let Some(moto) = Moto::start() else { return };
    let queues =
        [moto.topic_with_queue("direct", "one").await, moto.topic_with_queue("assumed", "two").await];
    let user = moto.user("node").await;
    moto.allow_user("node", &["sts:AssumeRole"]).await;
    moto.role("events").await;
    moto.allow_role("events", &["sns:Publish", "lambda:Invoke", "lambda:InvokeFunction"]).await;
    moto.function("on-orders").await;
    let keys = format!("access_key_id = \"{}\"\nsecret_access_key = \"{}\"\n", user.id, user.secret);
    let role = format!(
        "{keys}role_arn = \"{}\"\nsts_endpoint = \"{}\"\n",
        Moto::arn("iam", "role/events"),
        moto.url()
    );
    let function = Moto::arn("lambda", "function:on-orders");
    let node = Node::start(options(&[
        ("direct", sns(&moto, "direct", &keys)),
        ("assumed", sns(&moto, "assumed", &role)),
        ("named", lambda(&moto, "on-orders", &role)),
        ("by-arn", lambda(&moto, &function, &role)),
    ]))
    .await;
    moto.ask_for_permission(true).await;
    publish(&node, "a", json!(1)).await;
    wait_until(SOON, "both invocations", async || moto.invocations().len() == 2).await;
    wait_until(SOON, "the refusal in the log", async || node.log().contains("status 403 AccessDenied")).await;
    moto.ask_for_permission(false).await;
    assert_eq!(envelope(&received(&moto, &queues[1], 1).await[0])["items"][0]["data"], 1);
    moto.allow_user("node", &["sts:AssumeRole", "sns:Publish"]).await;
    moto.ask_for_permission(true).await;
    let delivered = r#"fanfare_integration_events_total{kind="sns",outcome="delivered"}"#;
    wait_until(AGAIN, "the event that was refused", async || node.metric(delivered).await == 2.0).await;
    moto.ask_for_permission(false).await;
    assert_eq!(envelope(&received(&moto, &queues[0], 1).await[0])["items"][0]["data"], 1);
    for secret in [&user.secret, "hush"] {
        assert!(!node.log().contains(secret));
    }
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_secret_is_refused_by_its_signature() {
    let Some(moto) = Moto::start() else { return };
    moto.function("on-orders").await;
    let user = moto.user("node").await;
    moto.allow_user("node", &["lambda:Invoke", "lambda:InvokeFunction"]).await;
    moto.ask_for_permission(true).await;
    let keys = |secret: &str| format!("access_key_id = \"{}\"\nsecret_access_key = \"{secret}\"\n", user.id);
    let node = Node::start(options(&[
        ("good", lambda(&moto, "on-orders", &keys(&user.secret))),
        ("bad", lambda(&moto, "on-orders", &keys("hush"))),
    ]))
    .await;
    publish(&node, "a", json!(1)).await;
    wait_until(SOON, "the invocation", async || moto.invocations().len() == 1).await;
    let refused = "status 403 SignatureDoesNotMatch";
    wait_until(SOON, "the refusal in the log", async || node.log().contains(refused)).await;
    assert_eq!(moto.invocations().len(), 1);
    assert!(!node.log().contains("hush"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_function_that_comes_later_gets_its_events() {
    let Some(moto) = Moto::start() else { return };
    let node = Node::start(options(&[("late", lambda(&moto, "late", STATIC_KEYS))])).await;
    publish(&node, "orders:1", json!({"n": 1})).await;
    let missing = "status 404 ResourceNotFoundException";
    wait_until(SOON, "the refusal in the log", async || node.log().contains(missing)).await;
    assert!(moto.invocations().is_empty());
    moto.function("late").await;
    wait_until(AGAIN, "an invocation", async || !moto.invocations().is_empty()).await;
    let invocation = moto.invocations().remove(0);
    assert_eq!((&invocation["function"], &invocation["type"]), (&json!("late"), &json!("Event")));
    let envelope: Value = serde_json::from_str(invocation["body"].as_str().expect("a text")).expect("JSON");
    let history = request(&node, "GET", "/api/channels/orders:1/history", String::new()).await;
    assert_eq!(envelope["items"], history["messages"]);
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_listing_shows_where_events_go_and_no_secret() {
    let Some(moto) = Moto::start() else { return };
    let role = "role_arn = \"arn:aws:iam::123456789012:role/events\"\nexternal_id = \"hush\"\n";
    let node = Node::start(options(&[
        ("bus", sns(&moto, "orders", &format!("{STATIC_KEYS}session_token = \"hush\"\n{role}"))),
        ("run", lambda(&moto, "on-orders", STATIC_KEYS)),
    ]))
    .await;
    let redacted = json!("[redacted]");
    let topics = request(&node, "GET", "/api/sns", String::new()).await;
    assert_eq!(
        topics["targets"][0],
        json!({
            "id": "bus", "kind": "sns", "channels": ["*"], "events": ["message", "presence"],
            "topic_arn": Moto::arn("sns", "orders"), "endpoint": moto.url(), "access_key_id": redacted,
            "secret_access_key": redacted, "session_token": redacted,
            "role_arn": "arn:aws:iam::123456789012:role/events", "external_id": redacted,
        })
    );
    let functions = request(&node, "GET", "/api/lambda", String::new()).await;
    assert_eq!(
        functions["targets"][0],
        json!({
            "id": "run", "kind": "lambda", "channels": ["*"], "events": ["message", "presence"],
            "function": "on-orders", "region": "eu-west-1", "endpoint": moto.url(), "access_key_id": redacted,
            "secret_access_key": redacted,
        })
    );
}

/// Gives a field of the form in a call of SNS.
fn form_field(request: &ReceivedRequest, name: &str) -> String {
    let form = String::from_utf8(request.body.clone()).expect("a form");
    let value = form.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    decode(&value.expect(name).replace('+', " ")).expect("percent-encoded")
}

/// Gives the envelope and the channel attribute of one call.
fn call(kind: &str, request: &ReceivedRequest) -> (Value, String) {
    if kind == "lambda" {
        let envelope = request.envelope();
        let channel = envelope["channel"].as_str().expect("a channel");
        let encoded = encode_channel(channel);
        return (envelope, encoded);
    }
    let envelope = serde_json::from_str(&form_field(request, "Message")).expect("an envelope");
    assert_eq!(form_field(request, "MessageAttributes.entry.2.Name"), "x-service-channel");
    (envelope, form_field(request, "MessageAttributes.entry.2.Value.StringValue"))
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_reach_their_function_and_topic_alone() {
    let names = hostile::channels();
    let (mut integrations, mut targets) = (Vec::new(), Vec::new());
    for (index, name) in names.iter().enumerate() {
        for (kind, address) in [
            ("lambda", "function = \"on-orders\"\nregion = \"eu-west-1\"".to_owned()),
            ("sns", format!("topic_arn = \"{}\"", Moto::arn("sns", "orders"))),
            ("sns", format!("topic_arn = \"{}\"", Moto::arn("sns", "orders.fifo"))),
        ] {
            let receiver = Receiver::start().await;
            // A single star matches every channel, and two stars match names that begin with a star.
            let pattern = if name == "*" { "**" } else { name };
            let endpoint = format!("endpoint = \"http://{}\"", receiver.addr());
            let channels = format!("channels = [{}]", hostile::toml(pattern));
            let fields = format!("kind = \"{kind}\"\n{address}\n{endpoint}\n{channels}\n{STATIC_KEYS}");
            integrations.push((format!("t{index}-{}", integrations.len()), fields));
            targets.push((kind, name, receiver));
        }
    }
    let integrations: Vec<_> = integrations.iter().map(|(id, fields)| (&**id, fields.clone())).collect();
    let node = Node::start(options(&integrations)).await;
    for name in hostile::refused_channels().iter().filter(|name| !name.is_empty()) {
        let path = format!("/api/channels/{}/publish", encode_channel(name));
        let authorization = http::basic(KEY);
        let headers = [("authorization", authorization.as_str())];
        let refused = http::request(node.addr(), "POST", &path, &headers, r#"{"data":1}"#).await;
        assert_eq!(refused.status, 400, "{name:?}");
    }
    for name in &names {
        publish(&node, &encode_channel(name), json!(name)).await;
    }
    until_sent(&node).await;
    let mut groups = std::collections::HashSet::new();
    for (kind, name, receiver) in &targets {
        let received = receiver.received();
        let [request] = &received[..] else { unreachable!("{kind} {name:?} has {} calls", received.len()) };
        let (envelope, channel) = call(kind, request);
        assert_eq!(envelope["channel"], **name, "{kind}");
        assert_eq!(envelope["items"][0]["data"], **name, "{kind}");
        assert_eq!(channel, encode_channel(name), "{kind}");
        let is_fifo = *kind == "sns" && form_field(request, "TopicArn").ends_with(".fifo");
        if is_fifo {
            let group = form_field(request, "MessageGroupId");
            assert!(group.len() <= 128 && groups.insert(group.clone()), "{group} of {name:?}");
        }
    }
    assert_eq!(groups.len(), names.len());
    node.assert_no_panic();
}
