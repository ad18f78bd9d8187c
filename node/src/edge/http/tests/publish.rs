//! Publishing: bodies, limits and batches, and that acknowledged messages can be read.

use super::fixture::{HttpFixture, HttpTestRequest};
use crate::model::Limits;

#[tokio::test]
async fn acknowledged_publish_is_in_history_unaltered() {
    let node = HttpFixture::new();
    let body = r#" { "name": "greeting", "data": [1.0, 1e400, null, "a  b"], "extras": {"tag": "x"}, "id": "m-1" } "#;
    let answer =
        node.send(HttpTestRequest::new("POST", "/api/channels/news/publish").key("full").body(body)).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, r#"{"channel":"news","published":true}"#));
    let history = node.send(HttpTestRequest::new("GET", "/api/channels/news/history").key("full")).await;
    assert!(history.text.contains(r#""data":[1.0,1e400,null,"a  b"]"#), "{}", history.text);
    assert!(history.text.contains(r#""name":"greeting""#), "{}", history.text);
    assert!(history.text.contains(r#""extras":{"tag":"x"}"#), "{}", history.text);
    assert!(history.text.contains(r#""id":"m-1""#), "{}", history.text);
    assert!(history.text.contains(r#""connectionId":"c_"#), "{}", history.text);
    assert!(!history.text.contains("clientId"), "a key has none: {}", history.text);
}

#[tokio::test]
async fn an_event_name_may_be_empty() {
    let node = HttpFixture::new();
    let publish =
        HttpTestRequest::new("POST", "/api/channels/news/publish").key("full").body(r#"{"name":""}"#);
    assert_eq!(node.send(publish).await.status, 200);
    let history = node.send(HttpTestRequest::new("GET", "/api/channels/news/history").key("full")).await;
    assert!(history.text.contains(r#""name":"","#), "{}", history.text);
}

#[tokio::test]
async fn a_channel_name_is_decoded_exactly_once() {
    let node = HttpFixture::new();
    for (path, channel) in [
        ("chat%3Alobby", "chat:lobby"),
        ("chat:lobby", "chat:lobby"),
        ("a%2Fb", "a/b"),
        ("a/b", "a/b"),
        ("50%25", "50%"),
        ("50%2541", "50%41"),
        ("two%20words", "two words"),
        ("one+two", "one+two"),
        ("gr%C3%BC%C3%9Fe", "grüße"),
        ("a/history", "a/history"),
        ("presence", "presence"),
    ] {
        let publish = format!("/api/channels/{path}/publish");
        let answer = node.send(HttpTestRequest::new("POST", &publish).key("full").body("{}")).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text);
        assert_eq!(answer.json()["channel"], channel, "{path}");
    }
}

#[tokio::test]
async fn bodies_that_are_refused() {
    let node = HttpFixture::new();
    let large = |bytes: usize| format!(r#"{{"data":"{}"}}"#, "x".repeat(bytes));
    let nested = format!(r#"{{"data":{}{}}}"#, "[".repeat(70), "]".repeat(70));
    for (body, status, names) in [
        (String::new(), 400, ""),
        ("[]".to_owned(), 400, ""),
        ("null".to_owned(), 400, ""),
        ("1".to_owned(), 400, ""),
        ("{".to_owned(), 400, ""),
        (r#"{"name":null}"#.to_owned(), 400, "name"),
        (r#"{"name":5}"#.to_owned(), 400, "name"),
        (r#"{"name":"a\nb"}"#.to_owned(), 400, "name"),
        (r#"{"id":""}"#.to_owned(), 400, "id"),
        (r#"{"extras":[]}"#.to_owned(), 400, "extras"),
        (r#"{"data":"\ud800"}"#.to_owned(), 400, ""),
        (nested, 400, ""),
        (r#"[{"data":1},{"name":null}]"#.to_owned(), 400, "name"),
        (large(65_536), 413, ""),
        (format!("[{},{}]", large(10), large(65_536)), 413, ""),
        (large(2 * 1024 * 1024), 413, ""),
    ] {
        let shown = body.get(..60).unwrap_or(&body).to_owned();
        let answer = node
            .send(HttpTestRequest::new("POST", "/api/channels/news/publish").key("full").body(&body))
            .await;
        assert_eq!(answer.status, status, "{shown}: {}", answer.text);
        assert!(answer.json()["error"].as_str().unwrap().contains(names), "{shown}: {}", answer.text);
    }
    let history = node.send(HttpTestRequest::new("GET", "/api/channels/news/history").key("full")).await;
    assert_eq!(history.text, r#"{"messages":[]}"#, "all or none is published");
}

#[tokio::test]
async fn the_largest_message_passes() {
    let node = HttpFixture::new();
    let body = format!(r#"{{"data":"{}"}}"#, "x".repeat(65_534));
    let answer =
        node.send(HttpTestRequest::new("POST", "/api/channels/news/publish").key("full").body(&body)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
}

#[tokio::test]
async fn a_repeated_id_is_stored_once() {
    let node = HttpFixture::new();
    for _ in 0..3 {
        let sent = HttpTestRequest::new("POST", "/api/channels/news/publish")
            .key("full")
            .body(r#"{"id":"once","data":1}"#);
        assert_eq!(node.send(sent).await.status, 200);
    }
    let history = node.send(HttpTestRequest::new("GET", "/api/channels/news/history").key("full")).await;
    assert_eq!(history.json()["messages"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_batch_answers_for_each_channel() {
    let node = HttpFixture::new();
    let body = r#"{"channels":["chat:a","news","[x","chat:b"],"messages":[{"data":1},{"data":2}]}"#;
    let answer = node.send(HttpTestRequest::new("POST", "/api/publish").key("narrow").body(body)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let results = answer.json()["results"].clone();
    let statuses: Vec<_> = (0..4).map(|index| results[index]["status"].as_u64()).collect();
    assert_eq!(statuses, [None, Some(403), Some(400), None], "{}", answer.text);
    assert_eq!(results[0], serde_json::json!({"channel": "chat:a", "published": true}));
    assert_eq!(results[1]["channel"], "news");
    let history = node.send(HttpTestRequest::new("GET", "/api/channels/chat%3Ab/history").key("full")).await;
    let messages = history.json()["messages"].clone();
    assert_eq!((&messages[0]["data"], &messages[1]["data"]), (&2.into(), &1.into()), "newest first");
}

#[tokio::test]
async fn a_batch_that_cannot_be_read_is_refused_whole() {
    let node = HttpFixture::new();
    for body in [
        "",
        "{}",
        "[]",
        r#"{"channels":["a"]}"#,
        r#"{"channels":["a"],"messages":[]}"#,
        r#"{"channels":[],"messages":[{}]}"#,
        r#"{"channels":"a","messages":[{}]}"#,
        r#"{"channels":["a"],"messages":[{"name":null}]}"#,
    ] {
        let answer = node.send(HttpTestRequest::new("POST", "/api/publish").key("full").body(body)).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.text);
    }
    let body = format!(r#"{{"channels":["a","b"],"messages":[{{"data":"{}"}}]}}"#, "x".repeat(70_000));
    let answer = node.send(HttpTestRequest::new("POST", "/api/publish").key("full").body(&body)).await;
    assert_eq!(answer.json()["results"][1]["status"], 413, "{}", answer.text);
}

#[tokio::test]
async fn key_over_its_rate_gets_retry_after() {
    let node = HttpFixture::with(Limits { http_publishes_per_second: 2, ..Limits::default() });
    let publish =
        |body: &'static str| HttpTestRequest::new("POST", "/api/channels/chat%3Aa/publish").body(body);
    assert_eq!(node.send(publish("[{},{}]").key("full")).await.status, 200);
    let refused = node.send(publish("{}").key("full")).await;
    assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")));
    assert_eq!(refused.json()["reason"], "rate_limit");
    assert_eq!(node.send(publish("{}").key("narrow")).await.status, 200, "each key has its own");
}
