//! Token exchange over HTTP: the answer for each outcome. The rules themselves are tested in `auth`.

use fanfare_proto::token::mac;
use serde_json::{Value, json};

use super::fixture::{HttpFixture, HttpTestRequest, NOW_MS, secret};
use super::refusing_store::RefusingStore;

const PATH: &str = "/keys/full/requestToken";

/// All seven fields, signed with the key's secret.
fn signed(key: &str, capability: &str, client_id: &str, nonce: &str, timestamp_ms: u64) -> Value {
    let text = format!("{key}\n60000\n{capability}\n{client_id}\n{timestamp_ms}\n{nonce}\n");
    json!({
        "keyName": key,
        "ttl": 60_000,
        "capability": capability,
        "clientId": client_id,
        "timestamp": timestamp_ms,
        "nonce": nonce,
        "mac": mac(secret(key).as_bytes(), &text),
    })
}

fn unsigned(nonce: &str) -> Value {
    json!({ "keyName": "full", "timestamp": NOW_MS, "nonce": nonce })
}

#[tokio::test]
async fn a_signed_request_becomes_a_token_that_works() {
    let node = HttpFixture::new();
    let request = signed("full", r#"{"chat:*":["publish","history"]}"#, "ada", "nonce-0123456789", NOW_MS);
    let answer = node.send(HttpTestRequest::new("POST", PATH).body(&request.to_string())).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.header("cache-control"), Some("no-store"));
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    let details = answer.json();
    assert_eq!(details["keyName"], "full");
    assert_eq!(details["clientId"], "ada");
    assert_eq!(details["capability"], r#"{"chat:*":["history","publish"]}"#);
    assert_eq!(details["expires"].as_u64().unwrap() - details["issued"].as_u64().unwrap(), 60_000);

    let bearer = format!("Bearer {}", details["token"].as_str().unwrap());
    let with_token = |method, path| HttpTestRequest::new(method, path).header("authorization", &bearer);
    assert_eq!(node.send(with_token("POST", "/api/channels/chat%3Aa/publish").body("{}")).await.status, 200);
    assert_eq!(node.send(with_token("POST", "/api/channels/news/publish").body("{}")).await.status, 403);
    let history = node.send(with_token("GET", "/api/channels/chat%3Aa/history")).await;
    assert_eq!(history.json()["messages"][0]["clientId"], "ada", "{}", history.text);
}

#[tokio::test]
async fn refusals_have_their_status_and_sentence() {
    let node = HttpFixture::new();
    let good = signed("full", "", "", "nonce-0123456789", NOW_MS);
    assert_eq!(node.send(HttpTestRequest::new("POST", PATH).body(&good.to_string())).await.status, 200);
    let mut wrong_mac = signed("full", "", "", "nonce-1123456789", NOW_MS);
    wrong_mac["ttl"] = json!(60);
    let too_much = signed("narrow", r#"{"*":["publish"]}"#, "", "nonce-2123456789", NOW_MS);
    let early = signed("full", "", "", "nonce-3123456789", NOW_MS - 120_001);
    let object = json!({ "keyName": "full", "timestamp": NOW_MS, "nonce": "nonce-4123456789", "capability": {}, "mac": "x" });
    for (path, body, status, sentence) in [
        (PATH, "{".to_owned(), 400, ""),
        (PATH, good.to_string(), 401, "nonce"),
        (PATH, early.to_string(), 401, "timestamp"),
        (PATH, wrong_mac.to_string(), 401, "invalid token request mac"),
        (PATH, object.to_string(), 401, "invalid token request mac"),
        (
            "/keys/nobody/requestToken",
            signed("nobody", "", "", "nonce-5123456789", NOW_MS).to_string(),
            401,
            "invalid token request mac",
        ),
        (
            "/keys/revoked/requestToken",
            signed("revoked", "", "", "nonce-6123456789", NOW_MS).to_string(),
            401,
            "invalid token request mac",
        ),
        ("/keys/narrow/requestToken", good.to_string(), 400, "keyName"),
        ("/keys/narrow/requestToken", too_much.to_string(), 403, "narrow"),
        (PATH, format!("{{\"pad\":\"{}\"}}", "x".repeat(16 * 1024)), 413, "16384"),
    ] {
        let answer = node.send(HttpTestRequest::new("POST", path).body(&body)).await;
        assert_eq!(answer.status, status, "{body}: {}", answer.text);
        assert!(answer.json()["error"].as_str().unwrap().contains(sentence), "{body}: {}", answer.text);
    }
}

#[tokio::test]
async fn an_unsigned_request_needs_basic_with_its_key() {
    let node = HttpFixture::new();
    let send = |nonce| HttpTestRequest::new("POST", PATH).body(&unsigned(nonce).to_string());
    assert_eq!(node.send(send("nonce-0123456789").key("full")).await.status, 200);
    assert_eq!(node.send(send("nonce-1123456789")).await.status, 401);
    assert_eq!(node.send(send("nonce-2123456789").key("narrow")).await.status, 401);
}

#[tokio::test]
async fn no_token_without_a_store_that_remembers_the_nonce() {
    let node = HttpFixture::over(RefusingStore::reading(None));
    let answer = node
        .send(HttpTestRequest::new("POST", PATH).body(&unsigned("nonce-0123456789").to_string()).key("full"))
        .await;
    assert_eq!(answer.status, 503, "{}", answer.text);
    assert!(!answer.text.contains("disk"), "{}", answer.text);
}
