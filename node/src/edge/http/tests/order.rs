//! Order of the checks: CORS, then the credential, then path and method, then the capability.

use super::fixture::{HttpFixture, HttpTestRequest};

/// Method, path, status with the full key, status without a credential.
const ORDER: &[(&str, &str, u16, u16)] = &[
    ("GET", "/health", 200, 200),
    ("POST", "/health", 405, 405),
    ("GET", "/realtime", 426, 426),
    ("POST", "/realtime", 426, 426),
    ("GET", "/realtime?accessToken=x", 426, 426),
    ("GET", "/keys/full/requestToken", 405, 405),
    ("POST", "/keys/%zz/requestToken", 400, 400),
    ("POST", "/keys/%FF/requestToken", 400, 400),
    ("GET", "/keys/full%2/requestToken", 400, 400),
    ("POST", "/keys/%zz/revokeTokens", 400, 401),
    ("POST", "/keys/%FF/revokeTokens", 400, 401),
    ("POST", "/keys/%zz/other", 400, 401),
    ("POST", "/api/clients/%zz/connections/close", 400, 401),
    ("POST", "/api/clients/%FF/connections/close", 400, 401),
    ("GET", "/time", 200, 401),
    ("HEAD", "/time", 200, 401),
    ("POST", "/time", 405, 401),
    ("GET", "/", 404, 401),
    ("GET", "/nowhere", 404, 401),
    ("DELETE", "/nowhere", 404, 401),
    ("GET", "/nowhere%zz", 400, 401),
    ("GET", "/api/status", 404, 401),
    ("GET", "/api/channels/a/publish", 405, 401),
    ("PUT", "/api/channels/a/history", 405, 401),
    ("GET", "/api/channels/%FF/history", 400, 401),
    ("GET", "/api/channels/%5Ba/history", 400, 401),
    ("GET", "/api/channels/a%0Ab/history", 400, 401),
    ("GET", "/api/channels/a%2/history", 400, 401),
    ("GET", "/api/channels/a/presence/history?limit=x", 200, 401),
    ("GET", "/api/channels/a/presence", 200, 401),
    ("GET", "/api/publish", 405, 401),
    ("GET", "/api/channels", 200, 401),
    ("GET", "/api/connections", 200, 401),
    ("GET", "/api/connections/count", 200, 401),
    ("POST", "/api/connections/count", 405, 401),
    ("GET", "/api/presence", 200, 401),
    ("GET", "/api/metrics/series?window=x", 200, 401),
    ("GET", "/api/metrics/series?aggregate=avg", 400, 401),
    ("GET", "/api/webhooks", 200, 401),
    ("POST", "/api/webhooks", 405, 401),
    ("GET", "/api/amqp", 200, 401),
    ("POST", "/api/amqp", 405, 401),
    ("GET", "/api/lambda", 200, 401),
    ("POST", "/api/lambda", 405, 401),
    ("GET", "/api/sns", 200, 401),
    ("POST", "/api/sns", 405, 401),
    ("GET", "/api/queues", 503, 401),
    ("PATCH", "/api/queues/any/thing", 503, 401),
];

#[tokio::test]
async fn a_credential_comes_before_path_and_method() {
    let node = HttpFixture::new();
    for &(method, path, with, without) in ORDER {
        assert_eq!(
            node.send(HttpTestRequest::new(method, path).key("full")).await.status,
            with,
            "{method} {path} with a key"
        );
        let bare = node.send(HttpTestRequest::new(method, path)).await;
        assert_eq!(bare.status, without, "{method} {path} without a credential");
        if without == 401 && method != "HEAD" {
            assert_eq!(bare.text, r#"{"error":"unauthorized"}"#, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn every_response_carries_the_cors_headers() {
    let node = HttpFixture::new();
    for &(method, path, ..) in ORDER {
        for sent in [HttpTestRequest::new(method, path), HttpTestRequest::new(method, path).key("full")] {
            let answer = node.send(sent).await;
            assert_eq!(answer.header("access-control-allow-origin"), Some("*"), "{method} {path}");
            assert_eq!(
                answer.header("access-control-expose-headers"),
                Some("link, retry-after, x-service-node-id"),
                "{method} {path}"
            );
        }
    }
}

#[tokio::test]
async fn refusals_are_json_with_a_sentence() {
    let node = HttpFixture::new();
    for &(method, path, ..) in ORDER.iter().filter(|case| case.2 >= 400) {
        let answer = node.send(HttpTestRequest::new(method, path).key("full")).await;
        assert_eq!(answer.header("content-type"), Some("application/json"), "{method} {path}");
        assert!(answer.json()["error"].as_str().is_some_and(|error| !error.is_empty()), "{method} {path}");
    }
}

#[tokio::test]
async fn options_is_answered_before_any_credential() {
    let node = HttpFixture::new();
    for path in
        ["/", "/health", "/realtime", "/api/channels/a/publish", "/nowhere", "/keys/x/requestToken", "/%zz"]
    {
        let answer = node.send(HttpTestRequest::new("OPTIONS", path)).await;
        assert_eq!((answer.status, answer.text.as_str()), (204, ""), "{path}");
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
        let methods = answer.header("access-control-allow-methods").unwrap();
        assert!(methods.contains("POST") && methods.contains("DELETE"), "{methods}");
        assert_eq!(
            answer.header("access-control-allow-headers"),
            Some("authorization, cache-control, content-encoding, content-type, last-event-id")
        );
    }
}

#[tokio::test]
async fn a_known_path_says_which_methods_it_takes() {
    let node = HttpFixture::new();
    for (method, path, allow) in [
        ("DELETE", "/time", "GET, HEAD"),
        ("GET", "/api/channels/a/publish", "POST"),
        ("POST", "/api/channels/a/history", "GET, HEAD"),
        ("PUT", "/keys/full/requestToken", "POST"),
        ("POST", "/health", "GET, HEAD"),
    ] {
        let answer = node.send(HttpTestRequest::new(method, path).key("full")).await;
        assert_eq!((answer.status, answer.header("allow")), (405, Some(allow)), "{method} {path}");
    }
}

#[tokio::test]
async fn the_capability_decides_by_channel_and_operation() {
    let node = HttpFixture::new();
    for (key, method, path, status) in [
        ("narrow", "POST", "/api/channels/chat%3Aa/publish", 200),
        ("narrow", "POST", "/api/channels/news/publish", 403),
        ("narrow", "GET", "/api/channels/chat%3Aa/history", 403),
        ("narrow", "GET", "/api/channels/chat%3Aa/presence/history", 403),
        ("narrow", "GET", "/api/channels/chat%3Aa/presence", 403),
        ("narrow", "GET", "/api/queues/x", 403),
        ("narrow", "GET", "/api/channels", 200),
        ("narrow", "GET", "/time", 200),
    ] {
        let answer = node.send(HttpTestRequest::new(method, path).key(key).body("{}")).await;
        assert_eq!(answer.status, status, "{key} {method} {path}: {}", answer.text);
    }
}

#[tokio::test]
async fn health_is_plain_and_time_is_the_clock() {
    let node = HttpFixture::new();
    let health = node.send(HttpTestRequest::new("GET", "/health")).await;
    assert_eq!((health.status, health.text.as_str()), (200, "ok"));
    assert!(health.header("content-type").unwrap().starts_with("text/plain"));
    let time = node.send(HttpTestRequest::new("GET", "/time").key("full")).await;
    assert_eq!(time.text, format!("{{\"now\":{}}}", node.services.clock.now_ms()));
    let upgrade = node.send(HttpTestRequest::new("GET", "/realtime")).await;
    assert_eq!(upgrade.header("upgrade"), Some("websocket"));
}
