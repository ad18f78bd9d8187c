//! What HTTP may hold in memory, and for how long: pages, answers that are not read, bodies that are not finished.

use fanfare_cluster_tests::{Node, NodeOptions, history, http};
use serde_json::json;

const MESSAGE_BYTES: usize = 60_000;
/// Records of a page, the last of them beyond it, and what stands around them.
const PAGE_BYTES_MAX: usize = 1024 * 1024 + 64 * 1024;

/// Publishes large messages with the numbers 0..count as their names.
async fn publish_large(node: &Node, channel: &str, count: usize) {
    let authorization = http::basic(&node.key());
    let path = format!("/api/channels/{channel}/publish");
    let numbers: Vec<usize> = (0..count).collect();
    for numbers in numbers.chunks(30) {
        let message = |number: &usize| json!({"name": number.to_string(), "data": "x".repeat(MESSAGE_BYTES)});
        let body = json!(numbers.iter().map(message).collect::<Vec<_>>()).to_string();
        let headers = [("authorization", authorization.as_str())];
        let answer = http::request(node.addr(), "POST", &path, &headers, body).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_history_of_large_messages_comes_in_pages_of_bytes_with_each_message_once() {
    let node = Node::start(NodeOptions::default()).await;
    publish_large(&node, "large", 100).await;
    let authorization = http::basic(&node.key());
    for direction in ["backwards", "forwards"] {
        let mut next = Some(history::path("large", &format!("limit=1000&direction={direction}")));
        let (mut names, mut pages) = (Vec::new(), 0);
        while let Some(path) = next {
            let page =
                http::request(node.addr(), "GET", &path, &[("authorization", &authorization)], "").await;
            assert_eq!(page.status, 200, "{:?}", page.body);
            assert!(page.body.len() <= PAGE_BYTES_MAX, "{path}: {} bytes", page.body.len());
            for message in page.json()["messages"].as_array().expect("a list of messages") {
                names.push(message["name"].as_str().expect("a name").parse::<usize>().expect("a number"));
            }
            pages += 1;
            next = page.header("link").map(history::next_of);
        }
        if direction == "backwards" {
            names.reverse();
        }
        assert_eq!(names, (0..100).collect::<Vec<_>>(), "{direction}");
        assert!((6..=7).contains(&pages), "{direction}: full pages, not {pages}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_counts_what_is_copied_and_not_the_names_of_its_channels() {
    let node = Node::start(NodeOptions::default()).await;
    let authorization = http::basic(&node.key());
    let post = async |body: String| {
        http::request(node.addr(), "POST", "/api/publish", &[("authorization", &authorization)], body).await
    };
    let names = |count: usize| (0..count).map(|number| format!("{number:0512}")).collect::<Vec<_>>();
    let answer = post(json!({"channels": names(1000), "messages": [{"data": 1}]}).to_string()).await;
    assert_eq!(answer.status, 200, "{:?}", answer.error());
    let results = answer.json()["results"].take();
    let results = results.as_array().expect("a list of results");
    assert!(results.len() == 1000 && results.iter().all(|result| result["published"] == true));

    let large = vec![json!({"data": "x".repeat(MESSAGE_BYTES)}); 30];
    let answer = post(json!({"channels": names(38), "messages": large}).to_string()).await;
    assert_eq!(answer.status, 413, "over 64 MiB in all: {:?}", answer.body);
}
