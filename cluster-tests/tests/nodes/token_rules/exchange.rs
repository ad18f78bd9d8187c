//! Result and repetition of an exchange.

use fanfare_client::sign::{self, TokenParams};
use fanfare_cluster_tests::{clock, http};
use serde_json::json;

use super::request::{Request, exchange, nonce};
use super::{KEY, MAC_ERROR, node};

#[tokio::test(flavor = "multi_thread")]
async fn a_token_request_is_granted_with_details() {
    let node = node().await;
    let before_s = clock::now_s();
    let answer = exchange(&node, "k1", &[], Request::new().signed().to_string()).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let details = answer.json();
    let (issued, expires) =
        (details["issued"].as_u64().expect("a time"), details["expires"].as_u64().expect("a time"));
    assert!(issued % 1000 == 0 && issued / 1000 >= before_s - 1 && issued / 1000 <= clock::now_s());
    assert_eq!(expires - issued, 60_000);
    assert_eq!((&details["keyName"], &details["clientId"]), (&json!("k1"), &json!("ann")));
    assert_eq!(details["capability"], r#"{"*":["subscribe"]}"#);
    let token = http::bearer(details["token"].as_str().expect("a token"));
    let time = http::request(node.addr(), "GET", "/time", &[("authorization", &token)], "").await;
    assert_eq!(time.status, 200, "the token is good");
    let history =
        http::request(node.addr(), "GET", "/api/channels/x/history", &[("authorization", &token)], "").await;
    assert_eq!(history.status, 403, "for what it was given for");

    let plain = sign::token_request(&KEY.parse().expect("a key"), TokenParams::default()).expect("a request");
    let answer = exchange(&node, "k1", &[], serde_json::to_string(&plain).expect("JSON")).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let details = answer.json();
    assert_eq!(
        details["expires"].as_u64().zip(details["issued"].as_u64()).map(|(e, i)| e - i),
        Some(3_600_000)
    );
    assert_eq!(
        details["capability"],
        r#"{"*":["amqp-subscribe","history","presence","publish","subscribe"]}"#
    );
    assert!(details.get("clientId").is_none());

    let odd = Request {
        ttl: json!(1_001),
        capability: json!(r#" {"b":["publish","history","publish"],"a":["subscribe"]} "#),
        ..Request::new()
    };
    let details = exchange(&node, "k1", &[], odd.signed().to_string()).await.json();
    assert_eq!(details["expires"].as_u64().zip(details["issued"].as_u64()).map(|(e, i)| e - i), Some(2_000));
    assert_eq!(details["capability"], r#"{"a":["subscribe"],"b":["history","publish"]}"#, "canonical");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_nonce_is_good_once_and_a_restart_does_not_change_that() {
    let mut node = node().await;
    let used = Request::new().signed().to_string();
    assert_eq!(exchange(&node, "k1", &[], used.clone()).await.status, 200);
    let killed_after = Request::new().signed().to_string();
    for _ in 0..2 {
        let answer = exchange(&node, "k1", &[], used.clone()).await;
        assert_eq!(answer.status, 401, "a replay: {:?}", answer.body);
        assert_ne!(answer.error(), MAC_ERROR);
    }
    assert_eq!(exchange(&node, "k1", &[], killed_after.clone()).await.status, 200);
    node.kill();
    node.restart().await;
    for body in [&used, &killed_after] {
        assert_eq!(exchange(&node, "k1", &[], body.clone()).await.status, 401, "a replay after SIGKILL");
    }
    assert_eq!(node.stop().await.code(), Some(0));
    node.restart().await;
    assert_eq!(exchange(&node, "k1", &[], used).await.status, 401, "a replay after a clean restart");

    let (kept, timestamp) = (nonce(), json!(clock::now_ms()));
    let request = |capability: &str| {
        let nonce = kept.clone();
        let request = Request { nonce, timestamp: timestamp.clone(), ..Request::new() };
        let request =
            Request { key_name: "narrow", secret: "narrow", capability: json!(capability), ..request };
        request.signed().to_string()
    };
    assert_eq!(exchange(&node, "narrow", &[], request(r#"{"*":["publish"]}"#)).await.status, 403);
    assert_eq!(
        exchange(&node, "narrow", &[], request("")).await.status,
        200,
        "a 403 leaves the nonce unused"
    );
    let other_time = Request { timestamp: json!(clock::now_ms() + 1), nonce: kept, ..Request::new() };
    assert_eq!(
        exchange(&node, "k1", &[], other_time.signed().to_string()).await.status,
        200,
        "by key and timestamp"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unsigned_exchange_needs_the_same_key() {
    let node = node().await;
    let unsigned = || {
        let mut request = Request::new().signed();
        request.as_object_mut().expect("an object").remove("mac");
        request.to_string()
    };
    let (own, others) = (http::basic(KEY), http::basic("k2.k2"));
    let token = exchange(&node, "k1", &[], Request::new().signed().to_string()).await.json();
    let bearer = http::bearer(token["token"].as_str().expect("a token"));
    let cases: [(&str, Option<&str>, String, u16); 7] = [
        ("unsigned with its key", Some(&own), unsigned(), 200),
        ("unsigned without a key", None, unsigned(), 401),
        ("unsigned with another key", Some(&others), unsigned(), 401),
        ("unsigned with a token", Some(&bearer), unsigned(), 401),
        ("signed and with its key", Some(&own), Request::new().signed().to_string(), 200),
        ("signed and with another key", Some(&others), Request::new().signed().to_string(), 401),
        ("signed and with nonsense", Some("nonsense"), Request::new().signed().to_string(), 401),
    ];
    for (what, authorization, body, status) in cases {
        let headers: Vec<_> = authorization.map(|value| ("authorization", value)).into_iter().collect();
        let answer = exchange(&node, "k1", &headers, body).await;
        assert_eq!(answer.status, status, "{what}: {:?}", answer.body);
    }
}
