//! Calls to Lambda, SNS and STS, against receivers in this process.

use std::collections::HashMap;

use super::super::AwsClient;
use super::*;
use crate::accounts::{LambdaTarget, SnsTarget};
use crate::model::Clock;

const NOW_MS: u64 = 1_700_000_000_000;
const ROLE: &str = "role_arn = \"arn:aws:iam::123456789012:role/events\"\nexternal_id = \"hush\"\n";

const INTEGRATION: &str = "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n[[tenants.accounts.integrations]]\nid = \"i\"\n";
const KEYS: &str = "access_key_id = \"AKID\"\nsecret_access_key = \"hush\"\n";

fn target_of(text: &str) -> IntegrationTarget {
    let directory = Accounts::from_text(text).expect("a good directory").current();
    directory.account(&AccountId::new("a")).expect("the account").integrations[0].target.clone()
}

/// Returns an integration with keys, whose service is at the port.
fn integration(kind: &str, port: u16, fields: &str) -> IntegrationTarget {
    let endpoint = format!("endpoint = \"http://127.0.0.1:{port}\"");
    target_of(&format!("{INTEGRATION}kind = \"{kind}\"\n{KEYS}{endpoint}\n{fields}\n"))
}

fn arn(topic: &str) -> String {
    format!("arn:aws:sns:eu-west-1:123456789012:{topic}")
}

fn function(port: u16, fields: &str) -> Arc<LambdaTarget> {
    match integration("lambda", port, &format!("region = \"eu-west-1\"\n{fields}")) {
        IntegrationTarget::Lambda(target) => target,
        other => panic!("a function is expected: {other:?}"),
    }
}

fn topic(port: u16, name: &str, fields: &str) -> Arc<SnsTarget> {
    match integration("sns", port, &format!("topic_arn = \"{}\"\n{fields}", arn(name))) {
        IntegrationTarget::Sns(target) => target,
        other => panic!("a topic is expected: {other:?}"),
    }
}

fn aws() -> AwsClient {
    aws_at(&Clock::manual(NOW_MS))
}

fn aws_at(clock: &Clock) -> AwsClient {
    let clients =
        clients(&["127.0.0.0/8"], RootCertStore::empty(), TargetLookups::by(|_| Ok(vec![LOOPBACK])));
    AwsClient::with(clients, clock.clone())
}

fn form(body: &[u8]) -> HashMap<String, String> {
    form_urlencoded::parse(body).into_owned().collect()
}

fn session(key_id: &str, seconds: u64) -> ReceiverAnswer {
    let until = aws_smithy_types::DateTime::from_secs((NOW_MS / 1000 + seconds) as i64);
    let until = until.fmt(aws_smithy_types::date_time::Format::DateTime).expect("a time");
    let body = format!(
        "<AssumeRoleResponse><AssumeRoleResult><Credentials><AccessKeyId>{key_id}</AccessKeyId>\
         <SecretAccessKey>hush</SecretAccessKey><SessionToken>hush-token</SessionToken>\
         <Expiration>{until}</Expiration></Credentials></AssumeRoleResult></AssumeRoleResponse>"
    );
    ReceiverAnswer::Complete(format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
}

fn refusal(status: u16, code: &str) -> ReceiverAnswer {
    let body =
        format!("<ErrorResponse><Error><Code>{code}</Code><Message>hush</Message></Error></ErrorResponse>");
    ReceiverAnswer::Complete(format!("HTTP/1.1 {status} No\r\ncontent-length: {}\r\n\r\n{body}", body.len()))
}

#[tokio::test]
async fn a_function_is_invoked_with_the_envelope_and_a_signature() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(202));
    let arn = "arn:aws:lambda:eu-west-1:123456789012:function:on-orders";
    for (name, path) in [
        ("on_orders", "on_orders/invocations?Qualifier=%24LATEST"),
        (
            arn,
            "arn%3Aaws%3Alambda%3Aeu-west-1%3A123456789012%3Afunction%3Aon-orders/invocations?Qualifier=%24LATEST",
        ),
    ] {
        let target = function(receiver.port(), &format!("function = \"{name}\"\nqualifier = \"$LATEST\""));
        assert_eq!(aws().invoke(&target, &delivery()).await, DeliveryOutcome::Delivered);
        let request = receiver.request();
        assert_eq!(request.line, format!("POST /2015-03-31/functions/{path} HTTP/1.1"));
        assert_eq!(request.header("x-amz-invocation-type"), "Event");
        assert_eq!(request.header("content-type"), "application/json");
        assert_eq!(request.body, br#"{"items":[1]}"#);
        let authorization = request.header("authorization");
        assert!(authorization.starts_with("AWS4-HMAC-SHA256 Credential=AKID/"), "{authorization}");
        let scope = "/eu-west-1/lambda/aws4_request, \
                     SignedHeaders=content-type;host;x-amz-date;x-amz-invocation-type, Signature=";
        assert!(authorization.contains(scope), "{authorization}");
    }
}

#[tokio::test]
async fn a_message_has_the_envelope_and_attributes() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    let target = topic(receiver.port(), "orders", "");
    assert_eq!(aws().publish(&target, &delivery()).await, DeliveryOutcome::Delivered);
    let request = receiver.request();
    assert_eq!(request.line, "POST / HTTP/1.1");
    assert_eq!(request.header("content-type"), "application/x-www-form-urlencoded; charset=utf-8");
    let fields = form(&request.body);
    for (name, value) in [
        ("Action", "Publish"),
        ("Version", "2010-03-31"),
        ("TopicArn", "arn:aws:sns:eu-west-1:123456789012:orders"),
        ("Message", r#"{"items":[1]}"#),
    ] {
        assert_eq!(fields[name], value, "{name}");
    }
    for (number, (name, value)) in (1..).zip([
        (wire::ACCOUNT_ID, "acme"),
        (wire::CHANNEL, "orders%3A1%2F%C3%BC%20%23"),
        (wire::SOURCE, "channel.message"),
        (wire::EVENT_ID, "e1"),
        (wire::RULE_ID, "i"),
    ]) {
        let entry = format!("MessageAttributes.entry.{number}");
        assert_eq!(fields[&format!("{entry}.Name")], name);
        assert_eq!(fields[&format!("{entry}.Value.DataType")], "String");
        assert_eq!(fields[&format!("{entry}.Value.StringValue")], value);
    }
    assert_eq!(fields.len(), 4 + 5 * 3, "{fields:?}");
}

#[tokio::test]
async fn a_fifo_topic_has_a_group_for_each_channel() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    let (aws, target) = (aws(), topic(receiver.port(), "orders.fifo", ""));
    let mut groups = Vec::new();
    for channel in ["orders:1".to_owned(), "ü".repeat(100), format!("{}x", "ü".repeat(100))] {
        let delivery = TargetDelivery { channel: channel.into(), ..delivery() };
        assert_eq!(aws.publish(&target, &delivery).await, DeliveryOutcome::Delivered);
        let fields = form(&receiver.request().body);
        assert_eq!(fields["MessageDeduplicationId"], "e1");
        groups.push(fields["MessageGroupId"].clone());
    }
    assert_eq!(groups[0], "orders%3A1");
    assert!(groups[1].len() <= 128 && groups[2].len() <= 128 && groups[1] != groups[2], "{groups:?}");
}

#[tokio::test]
async fn payload_above_service_limit_is_rejected_without_sending() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    let (aws, topic) = (aws(), topic(receiver.port(), "orders", ""));
    let function = function(receiver.port(), "function = \"f\"");
    let sized = |bytes: usize| TargetDelivery { body: vec![b'1'; bytes].into(), ..delivery() };
    let attribute_bytes = 20 + 4 + 17 + 25 + 16 + 15 + 18 + 2 + 17 + 1 + 5 * 6;
    for (bytes, is_taken) in [(256 * 1024 - attribute_bytes, true), (256 * 1024 - attribute_bytes + 1, false)]
    {
        let outcome = aws.publish(&topic, &sized(bytes)).await;
        let reason = "too large: 262145 bytes, and SNS takes 262144".to_owned();
        assert_eq!(
            outcome,
            if is_taken { DeliveryOutcome::Delivered } else { DeliveryOutcome::Rejected { reason } }
        );
    }
    for (bytes, is_taken) in [(1024 * 1024, true), (1024 * 1024 + 1, false)] {
        let outcome = aws.invoke(&function, &sized(bytes)).await;
        let reason = "too large: 1048577 bytes, and Lambda takes 1048576".to_owned();
        assert_eq!(
            outcome,
            if is_taken { DeliveryOutcome::Delivered } else { DeliveryOutcome::Rejected { reason } }
        );
    }
    let sent = [receiver.request().body.len(), receiver.request().body.len()];
    assert!(sent[0] > 256 * 1024 && sent[1] == 1024 * 1024, "{sent:?}");
}

#[tokio::test]
async fn an_endpoint_inside_needs_a_rule() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    let closed =
        AwsClient::new(clients(&[], RootCertStore::empty(), TargetLookups::by(|_| Ok(vec![LOOPBACK]))));
    let refused = DeliveryOutcome::retry("address not allowed");
    assert_eq!(closed.publish(&topic(receiver.port(), "orders", ""), &delivery()).await, refused);
    let function = function(receiver.port(), "function = \"f\"");
    assert_eq!(closed.invoke(&function, &delivery()).await, refused);
    assert_eq!(receiver.connections(), 0);
    // The node has derived this address itself, which an operator's network may resolve to a private one.
    let regional = format!("{INTEGRATION}kind = \"sns\"\n{KEYS}topic_arn = \"{}\"\n", arn("orders"));
    let IntegrationTarget::Sns(regional) = target_of(&regional) else { panic!("a topic is expected") };
    let outcome = closed.publish(&regional, &delivery()).await;
    assert!(reason(&outcome).starts_with("cannot connect: "), "{outcome:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_without_an_end_and_silence_cost_no_more_than_time() {
    let flood = |head: &str| ReceiverAnswer::Flood { head: head.to_owned(), chunked: true };
    let endless = HttpTestReceiver::start(move |_| flood("200 OK\r\ntransfer-encoding: chunked"));
    let begun = Instant::now();
    assert_eq!(aws().publish(&topic(endless.port(), "t", ""), &delivery()).await, DeliveryOutcome::Delivered);
    assert!(endless.flooded() < 64 * 1024 * 1024 && begun.elapsed() < Duration::from_secs(5));
    let silent = HttpTestReceiver::start(|_| ReceiverAnswer::Partial(String::new()));
    let outcome = aws().publish(&topic(silent.port(), "t", "timeout_ms = 200"), &delivery()).await;
    assert_eq!(outcome, DeliveryOutcome::retry("no answer within 200 ms"));
    let moved =
        HttpTestReceiver::start(|_| ReceiverAnswer::head("302 Found\r\nlocation: http://127.0.0.1:1/"));
    let outcome = aws().publish(&topic(moved.port(), "t", ""), &delivery()).await;
    assert_eq!(outcome, DeliveryOutcome::retry("status 302"));
}

#[tokio::test]
async fn a_role_is_assumed_once_for_many_attempts() {
    let sts = HttpTestReceiver::start(|number| session(&format!("KEY{number}"), 3600));
    let sns = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    let aws = aws();
    let fields = format!("{ROLE}sts_endpoint = \"http://127.0.0.1:{}\"", sts.port());
    let target = topic(sns.port(), "orders", &fields);
    let other = topic(sns.port(), "others", &fields);
    let delivery = delivery();
    let attempts =
        (0..8).map(|number| aws.publish(if number % 2 == 0 { &target } else { &other }, &delivery));
    for outcome in futures_util::future::join_all(attempts).await {
        assert_eq!(outcome, DeliveryOutcome::Delivered);
    }
    for _ in 0..8 {
        let request = sns.request();
        assert!(request.header("authorization").contains("Credential=KEY0/"), "one call of STS");
        assert_eq!(request.header("x-amz-security-token"), "hush-token");
    }
    let assume_role = sts.request();
    assert!(assume_role.header("authorization").contains("Credential=AKID/"));
    assert!(assume_role.header("authorization").contains("/eu-west-1/sts/aws4_request"));
    let fields = form(&assume_role.body);
    for (name, value) in [
        ("Action", "AssumeRole"),
        ("RoleArn", "arn:aws:iam::123456789012:role/events"),
        ("RoleSessionName", "fanfare"),
        ("ExternalId", "hush"),
        ("DurationSeconds", "3600"),
    ] {
        assert_eq!(fields[name], value, "{name}");
    }
}

#[tokio::test]
async fn keys_of_a_role_are_replaced_before_they_expire() {
    let sts = HttpTestReceiver::start(|number| match number {
        1 | 3 => refusal(500, "InternalFailure"),
        _ => session(&format!("KEY{number}"), (number as u64 + 1) * 3600),
    });
    let sns = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    let clock = Clock::manual(NOW_MS);
    let fields = format!("{ROLE}sts_endpoint = \"http://127.0.0.1:{}\"", sts.port());
    let (aws, target) = (aws_at(&clock), topic(sns.port(), "t", &fields));
    // The keys of the first call are valid for an hour, those of the third for three.
    for (milliseconds, expected) in [
        (0, Some("KEY0")),
        (3_299_999, Some("KEY0")),
        // Five minutes are left, the second call fails, and for half a minute no further one is made.
        (3_300_000, Some("KEY0")),
        (3_329_999, Some("KEY0")),
        (3_330_000, Some("KEY2")),
        (10_499_999, Some("KEY2")),
        // The keys have expired, the fourth call fails, and for a second no further one is made.
        (10_800_000, None),
        (10_800_999, None),
        (10_801_000, Some("KEY4")),
    ] {
        clock.pass_to(NOW_MS + milliseconds);
        let outcome = aws.publish(&target, &delivery()).await;
        match expected {
            Some(key_id) => {
                assert_eq!(outcome, DeliveryOutcome::Delivered, "{milliseconds}");
                let authorization = sns.request().header("authorization").to_owned();
                assert!(
                    authorization.contains(&format!("Credential={key_id}/")),
                    "{milliseconds} {authorization}"
                );
            }
            None => {
                let refused = "cannot assume the role: status 500 InternalFailure";
                assert_eq!(outcome, DeliveryOutcome::retry(refused), "{milliseconds}");
            }
        }
    }
}

#[tokio::test]
async fn refused_keys_of_a_role_are_not_used_again() {
    let sts = HttpTestReceiver::start(|number| session(&format!("KEY{number}"), 3600));
    let sns = HttpTestReceiver::start(|number| match number {
        0 => refusal(403, "ExpiredToken"),
        _ => ReceiverAnswer::status(200),
    });
    let (aws, target) =
        (aws(), topic(sns.port(), "t", &format!("{ROLE}sts_endpoint = \"http://127.0.0.1:{}\"", sts.port())));
    assert_eq!(aws.publish(&target, &delivery()).await, DeliveryOutcome::retry("status 403 ExpiredToken"));
    assert_eq!(aws.publish(&target, &delivery()).await, DeliveryOutcome::Delivered);
    for key_id in ["KEY0", "KEY1"] {
        assert!(sns.request().header("authorization").contains(&format!("Credential={key_id}/")));
    }
}

#[tokio::test]
async fn a_role_that_cannot_be_assumed_is_tried_again() {
    let denied = HttpTestReceiver::start(|_| refusal(403, "AccessDenied"));
    let odd = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    let silent = HttpTestReceiver::start(|_| ReceiverAnswer::Partial(String::new()));
    let sns = HttpTestReceiver::start(|_| ReceiverAnswer::status(200));
    for (sts, expected) in [
        (&denied, "cannot assume the role: status 403 AccessDenied"),
        (&odd, "cannot assume the role: the answer of STS has no keys"),
        (&silent, "no answer within 300 ms"),
    ] {
        let fields = format!("{ROLE}timeout_ms = 300\nsts_endpoint = \"http://127.0.0.1:{}\"", sts.port());
        let outcome = aws().publish(&topic(sns.port(), "t", &fields), &delivery()).await;
        let reason =
            reason(&outcome).replace("cannot assume the role: no answer in time", "no answer within 300 ms");
        assert_eq!(reason, expected);
    }
    assert_eq!(sns.connections(), 0);
}
