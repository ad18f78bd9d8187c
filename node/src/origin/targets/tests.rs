//! Attempts against receivers in this process.

mod aws;
mod guarded;
mod receiver;
mod tls;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fanfare_proto::webhook as wire;
use rustls::RootCertStore;

use super::resolver::TargetLookups;
use super::{DeliveryOutcome, TargetClients, TargetDelivery, Webhooks};
use crate::accounts::{Accounts, IntegrationTarget, WebhookTarget};
use crate::model::{AccountId, AllowRule};
use receiver::{HttpTestReceiver, ReceiverAnswer};

const SECRET: &str = "hook-secret";
const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

fn target(url: &str, fields: &str) -> Arc<WebhookTarget> {
    let text = format!(
        "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n[[tenants.accounts.integrations]]\nid = \"i\"\n\
         kind = \"webhook\"\nsecret = \"{SECRET}\"\nurl = \"{url}\"\n{fields}\n"
    );
    let directory = Accounts::from_text(&text).expect("a good directory").current();
    match &directory.account(&AccountId::new("a")).expect("the account").integrations[0].target {
        IntegrationTarget::Webhook(target) => Arc::clone(target),
        _ => panic!("a webhook is expected"),
    }
}

fn delivery() -> TargetDelivery {
    TargetDelivery {
        account_id: AccountId::new("acme"),
        channel: "orders:1/ü #".into(),
        source: "channel.message",
        event_id: "e1".into(),
        rule_id: "i".into(),
        body: Bytes::from_static(br#"{"items":[1]}"#),
        trace: None,
    }
}

fn rules(rules: &[&str]) -> Vec<AllowRule> {
    rules.iter().map(|rule| rule.parse().expect("a rule")).collect()
}

/// Creates webhooks for which loopback is allowed and every name resolves to it.
fn webhooks() -> Webhooks {
    webhooks_with(&["127.0.0.0/8"], TargetLookups::by(|_| Ok(vec![LOOPBACK])))
}

fn webhooks_with(allow: &[&str], names: TargetLookups) -> Webhooks {
    Webhooks::new(clients(allow, RootCertStore::empty(), names))
}

fn clients(allow: &[&str], roots: RootCertStore, names: TargetLookups) -> Arc<TargetClients> {
    Arc::new(TargetClients::with(&rules(allow), roots, names).expect("a client"))
}

async fn sent(url: &str, fields: &str) -> DeliveryOutcome {
    webhooks().send(&target(url, fields), &delivery()).await
}

fn reason(outcome: &DeliveryOutcome) -> &str {
    match outcome {
        DeliveryOutcome::Retry { reason, .. } => reason,
        other => panic!("a retry is expected: {other:?}"),
    }
}

#[tokio::test]
async fn an_attempt_carries_headers_signature_and_body() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(204));
    let fields = "headers = { X-Team = \"blue\" }";
    let url = format!("http://user:p%40ss@127.0.0.1:{}/hook?token=t", receiver.port());
    let (webhooks, target) = (webhooks(), target(&url, fields));
    for _ in 0..2 {
        assert_eq!(webhooks.send(&target, &delivery()).await, DeliveryOutcome::Delivered);
    }
    let [first, second] = [receiver.request(), receiver.request()];
    for request in [&first, &second] {
        assert_eq!(request.line, "POST /hook?token=t HTTP/1.1");
        for (name, value) in [
            ("host", format!("127.0.0.1:{}", receiver.port())),
            ("content-type", "application/json".to_owned()),
            ("content-length", "13".to_owned()),
            ("user-agent", format!("fanfare/{}", env!("CARGO_PKG_VERSION"))),
            ("authorization", "Basic dXNlcjpwQHNz".to_owned()),
            ("x-team", "blue".to_owned()),
            (wire::ACCOUNT_ID, "acme".to_owned()),
            (wire::CHANNEL, "orders%3A1%2F%C3%BC%20%23".to_owned()),
            (wire::SOURCE, "channel.message".to_owned()),
            (wire::EVENT_ID, "e1".to_owned()),
            (wire::RULE_ID, "i".to_owned()),
        ] {
            assert_eq!(request.header(name), value, "{name}");
        }
        for absent in ["accept-encoding", "cookie", "referer"] {
            assert!(!request.headers.contains_key(absent), "{absent}");
        }
        assert_eq!(request.body, br#"{"items":[1]}"#);
        let (timestamp, signature) = (request.header(wire::TIMESTAMP), request.header(wire::SIGNATURE));
        assert!(wire::is_signed(SECRET.as_bytes(), timestamp, &request.body, signature), "{signature}");
        let age_ms = crate::model::Clock::system().now_ms() - timestamp.parse::<u64>().expect("a number");
        assert!(age_ms < 60_000, "{age_ms}");
    }
    assert_eq!(receiver.connections(), 1, "the second attempt uses the connection again");
}

#[tokio::test]
async fn each_status_has_its_outcome() {
    for (head, expected) in [
        ("200 OK", DeliveryOutcome::Delivered),
        ("410 Gone", DeliveryOutcome::Gone),
        ("404 Not Found", DeliveryOutcome::Rejected { reason: "status 404".into() }),
        ("304 Not Modified", DeliveryOutcome::Rejected { reason: "status 304".into() }),
        (
            "503 Busy\r\nretry-after: 7",
            DeliveryOutcome::Retry { reason: "status 503".into(), after: Some(Duration::from_secs(7)) },
        ),
        (
            "429 Slow\r\nretry-after: soon",
            DeliveryOutcome::Retry { reason: "status 429".into(), after: None },
        ),
    ] {
        let receiver = HttpTestReceiver::start(move |_| ReceiverAnswer::head(head));
        let outcome = sent(&format!("http://127.0.0.1:{}", receiver.port()), "").await;
        assert_eq!(outcome, expected, "{head}");
    }
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let second = HttpTestReceiver::start(|_| ReceiverAnswer::status(204));
    for status in [301, 302, 303, 307, 308] {
        let location = format!("{status} Moved\r\nlocation: http://127.0.0.1:{}/", second.port());
        let first = HttpTestReceiver::start(move |_| ReceiverAnswer::head(&location));
        let outcome = sent(&format!("http://127.0.0.1:{}", first.port()), "").await;
        assert_eq!(outcome, DeliveryOutcome::Rejected { reason: format!("status {status}") });
    }
    assert_eq!(second.connections(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gigabyte_answer_is_not_read() {
    let giga = "200 OK\r\ncontent-length: 1073741824";
    for (head, chunked) in [(giga, false), ("200 OK\r\ntransfer-encoding: chunked", true)] {
        let receiver =
            HttpTestReceiver::start(move |_| ReceiverAnswer::Flood { head: head.to_owned(), chunked });
        let begun = Instant::now();
        assert_eq!(
            sent(&format!("http://127.0.0.1:{}", receiver.port()), "").await,
            DeliveryOutcome::Delivered
        );
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        let taken = receiver.flooded();
        assert!(taken < 64 * 1024 * 1024, "{taken} bytes were taken");
    }
}

#[tokio::test]
async fn an_answer_that_stalls_after_its_status_is_delivered() {
    let receiver = HttpTestReceiver::start(|_| {
        ReceiverAnswer::Partial("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nab".into())
    });
    let begun = Instant::now();
    assert_eq!(sent(&format!("http://127.0.0.1:{}", receiver.port()), "").await, DeliveryOutcome::Delivered);
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn silence_ends_at_the_deadline() {
    for part in ["", "HTTP/1.1 200 OK\r\nx: "] {
        let receiver = HttpTestReceiver::start(move |_| ReceiverAnswer::Partial(part.into()));
        let outcome = sent(&format!("http://127.0.0.1:{}", receiver.port()), "timeout_ms = 200").await;
        assert_eq!(outcome, DeliveryOutcome::retry("no answer within 200 ms"));
    }
}

#[tokio::test]
async fn a_fault_of_the_network_is_tried_again_without_secrets() {
    // Bound and not listening, so no other test gets the port.
    let closed = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
    closed.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).expect("a free port");
    let closed_port = closed.local_addr().ok().and_then(|addr| addr.as_socket()).expect("an address").port();
    let closing = HttpTestReceiver::start(|_| ReceiverAnswer::Close);
    let garbage = HttpTestReceiver::start(|_| ReceiverAnswer::Partial("hush hush hush\r\n\r\n".into()));
    let redirecting = HttpTestReceiver::start(|_| ReceiverAnswer::status(503));
    for (port, expected) in [
        (closed_port, "cannot connect: Connection refused"),
        (closing.port(), "no answer: "),
        (garbage.port(), "no answer: invalid HTTP"),
        (redirecting.port(), "status 503"),
    ] {
        let outcome = sent(&format!("http://hush:hush@127.0.0.1:{port}/hush?hush=hush"), "").await;
        let reason = reason(&outcome);
        assert!(reason.starts_with(expected) && !reason.contains("hush"), "{reason}");
    }
}

#[tokio::test]
async fn an_id_that_no_header_takes_is_rejected() {
    let receiver = HttpTestReceiver::start(|_| ReceiverAnswer::status(204));
    let target = target(&format!("http://127.0.0.1:{}", receiver.port()), "");
    let delivery = TargetDelivery { event_id: "a\nb".into(), ..delivery() };
    let outcome = webhooks().send(&target, &delivery).await;
    assert!(matches!(outcome, DeliveryOutcome::Rejected { .. }), "{outcome:?}");
    assert_eq!(receiver.connections(), 0);
}
