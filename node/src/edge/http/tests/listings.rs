use super::fixture::{HttpFixture, HttpTestRequest};

#[tokio::test]
async fn a_node_without_connections_lists_none() {
    let node = HttpFixture::new();
    for (path, body) in [
        ("/api/channels", r#"{"channels":[]}"#),
        ("/api/connections?limit=5", r#"{"connections":[]}"#),
        ("/api/connections/count", r#"{"connections":0,"limit":null}"#),
    ] {
        let answer = node.send(HttpTestRequest::new("GET", path).key("narrow")).await;
        assert_eq!((answer.status, answer.text.as_str()), (200, body), "{path}");
        let node_id = (!path.ends_with("count")).then_some("node-1");
        assert_eq!((answer.header("link"), answer.header("x-service-node-id")), (None, node_id), "{path}");
    }
}

#[tokio::test]
async fn a_cursor_that_is_none_is_refused() {
    let node = HttpFixture::new();
    // `YQ` is the encoded name of a channel, which is no cursor.
    for path in ["/api/channels", "/api/connections", "/api/presence"] {
        for cursor in ["", "%ff", "YQ"] {
            let path = format!("{path}?cursor={cursor}");
            let answer = node.send(HttpTestRequest::new("GET", &path).key("full")).await;
            assert_eq!(answer.status, 400, "{path}: {}", answer.text);
        }
    }
}

#[tokio::test]
async fn request_not_answered_in_time_is_refused_with_retry_after() {
    let node = HttpFixture::with_a_stuck_shard();
    let (listing, closing) = tokio::join!(
        node.send(HttpTestRequest::new("GET", "/api/connections").key("full")),
        node.send(HttpTestRequest::new("POST", "/api/clients/ann/connections/close").key("full")),
    );
    for answer in [listing, closing] {
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{}", answer.text);
    }
}
