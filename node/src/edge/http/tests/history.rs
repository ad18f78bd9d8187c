//! Reading: order, pages, parameters, retention, and stores that do not answer.

use serde_json::Value;

use super::fixture::{HttpFixture, HttpTestRequest, HttpTestResponse};
use super::refusing_store::RefusingStore;
use crate::model::Limits;
use crate::origin::history::StoreError;

const HISTORY: &str = "/api/channels/news/history";

/// Publishes the numbers 0..count, a millisecond apart.
async fn publish_numbers(node: &HttpFixture, channel: &str, count: u64) -> u64 {
    let first_ms = node.services.clock.now_ms() + 1;
    for number in 0..count {
        node.services.clock.pass_to(first_ms + number);
        let path = format!("/api/channels/{channel}/publish");
        let sent = HttpTestRequest::new("POST", &path).key("full").body(&format!(r#"{{"data":{number}}}"#));
        assert_eq!(node.send(sent).await.status, 200);
    }
    first_ms
}

async fn get(node: &HttpFixture, path: &str) -> HttpTestResponse {
    node.send(HttpTestRequest::new("GET", path).key("full")).await
}

fn numbers(answer: &HttpTestResponse) -> Vec<u64> {
    let json = answer.json();
    let messages = json["messages"].as_array().unwrap_or_else(|| panic!("{}", answer.text));
    messages.iter().map(|message: &Value| message["data"].as_u64().unwrap()).collect()
}

/// The address in `link: <…>; rel="next"`.
fn next(answer: &HttpTestResponse) -> Option<String> {
    let link = answer.header("link")?;
    Some(link.strip_prefix('<').unwrap().strip_suffix(">; rel=\"next\"").unwrap().to_owned())
}

#[tokio::test]
async fn newest_first_in_pages_that_link_to_each_other() {
    let node = HttpFixture::new();
    publish_numbers(&node, "a%2Fb%20c", 7).await;
    for (direction, expected) in [("", [6, 5, 4, 3, 2, 1, 0]), ("&direction=forwards", [0, 1, 2, 3, 4, 5, 6])]
    {
        let mut path = format!("/api/channels/a%2Fb%20c/history?limit=3{direction}");
        let mut seen = Vec::new();
        for _ in 0..4 {
            let page = get(&node, &path).await;
            assert_eq!(page.status, 200, "{}", page.text);
            let found = numbers(&page);
            assert!(found.len() <= 3);
            seen.extend(found);
            let Some(following) = next(&page) else { break };
            assert!(following.contains("limit=3"), "all parameters are kept: {following}");
            assert!(following.starts_with("/api/channels/a%2Fb%20c/history?"), "{following}");
            path = following;
        }
        assert_eq!(seen, expected, "{direction}");
    }
}

#[tokio::test]
async fn a_page_ends_early_where_its_records_are_large_and_links_on() {
    let node = HttpFixture::with(Limits { history_page_bytes: 1, ..Limits::default() });
    publish_numbers(&node, "news", 3).await;
    for (direction, expected) in [("backwards", [2, 1, 0]), ("forwards", [0, 1, 2])] {
        let mut path = Some(format!("{HISTORY}?limit=3&direction={direction}"));
        for number in expected {
            let page = get(&node, &path.expect("a page for each record")).await;
            assert_eq!(numbers(&page), [number], "{direction}");
            path = next(&page);
        }
        assert_eq!(path, None, "{direction}: nothing follows the last");
    }
}

#[tokio::test]
async fn start_is_inclusive_and_end_exclusive() {
    let node = HttpFixture::new();
    let first_ms = publish_numbers(&node, "news", 5).await;
    let (start, end) = (first_ms + 1, first_ms + 3);
    assert_eq!(numbers(&get(&node, &format!("{HISTORY}?start={start}&end={end}")).await), [2, 1]);
    assert_eq!(numbers(&get(&node, &format!("{HISTORY}?start={end}")).await), [4, 3]);
    assert_eq!(numbers(&get(&node, &format!("{HISTORY}?end={start}")).await), [0]);
    assert_eq!(numbers(&get(&node, &format!("{HISTORY}?start={end}&end={start}")).await), [0; 0]);
    let page =
        get(&node, &format!("{HISTORY}?start={start}&end={}&limit=1&direction=forwards", end + 1)).await;
    let following = next(&page).unwrap();
    for kept in [format!("start={start}"), format!("end={}", end + 1), "direction=forwards".to_owned()] {
        assert!(following.contains(&kept), "{following}");
    }
    assert_eq!(numbers(&get(&node, &following).await), [2]);
}

#[tokio::test]
async fn a_bad_parameter_is_named() {
    let node = HttpFixture::new();
    for (query, name) in [
        ("start=yesterday", "start"),
        ("start=-1", "start"),
        ("start=%2B1", "start"),
        ("start=", "start"),
        ("end=1.5", "end"),
        ("cursor=x", "cursor"),
        ("cursor=", "cursor"),
        ("direction=up", "direction"),
        ("direction=", "direction"),
        ("until=%00", "until"),
    ] {
        for path in [HISTORY, "/api/channels/news/presence/history"] {
            let answer = get(&node, &format!("{path}?{query}")).await;
            assert_eq!(answer.status, 400, "{query}: {}", answer.text);
            assert!(answer.json()["error"].as_str().unwrap().starts_with(name), "{}", answer.text);
        }
    }
    assert_eq!(get(&node, &format!("{HISTORY}?limit=nonsense&unknown=1")).await.status, 200);
}

#[tokio::test]
async fn history_hides_messages_older_than_retention() {
    let node = HttpFixture::new();
    publish_numbers(&node, "short%3Aa", 2).await;
    assert_eq!(numbers(&get(&node, "/api/channels/short%3Aa/history").await), [1, 0]);
    node.services.clock.pass_to(node.services.clock.now_ms() + 3_600_001);
    assert_eq!(numbers(&get(&node, "/api/channels/short%3Aa/history").await), [0; 0]);
}

#[tokio::test]
async fn a_channel_without_history_is_empty() {
    let node = HttpFixture::new();
    publish_numbers(&node, "off%3Aa", 1).await;
    assert_eq!(get(&node, "/api/channels/off%3Aa/history").await.text, r#"{"messages":[]}"#);
}

#[tokio::test]
async fn another_account_sees_nothing() {
    let node = HttpFixture::new();
    publish_numbers(&node, "news", 1).await;
    let answer = node.send(HttpTestRequest::new("GET", HISTORY).key("other")).await;
    assert_eq!((answer.status, answer.text.as_str()), (200, r#"{"messages":[]}"#));
}

#[tokio::test]
async fn a_store_that_does_not_answer_is_never_an_empty_list() {
    for (error, retry_after) in [
        (StoreError::Off, None),
        (StoreError::Busy, Some("1")),
        (StoreError::Failed("disk full at /secret".into()), None),
    ] {
        let node = HttpFixture::over(RefusingStore::reading(Some(error.clone())));
        let answer = get(&node, HISTORY).await;
        assert_eq!((answer.status, answer.header("retry-after")), (503, retry_after), "{error:?}");
        assert!(!answer.text.contains("secret"), "{}", answer.text);
    }
}

#[tokio::test]
async fn a_panic_is_a_500_and_no_more() {
    let node = HttpFixture::over(RefusingStore::reading(None));
    let answer = get(&node, HISTORY).await;
    assert_eq!((answer.status, answer.text.as_str()), (500, r#"{"error":"internal error"}"#));
    assert_eq!(answer.header("access-control-allow-origin"), Some("*"));
    assert_eq!(get(&node, "/time").await.status, 200);
}
