use super::fixture::{Fixture, Sent};

#[tokio::test]
async fn a_node_without_connections_lists_none() {
    let node = Fixture::new();
    for (path, body) in [
        ("/api/channels", r#"{"channels":[]}"#),
        ("/api/connections?limit=5", r#"{"connections":[]}"#),
        ("/api/connections/count", r#"{"connections":0,"limit":null}"#),
    ] {
        let answer = node.send(Sent::new("GET", path).key("narrow")).await;
        assert_eq!((answer.status, answer.text.as_str()), (200, body), "{path}");
        let node_id = (!path.ends_with("count")).then_some("node-1");
        assert_eq!((answer.header("link"), answer.header("x-service-node-id")), (None, node_id), "{path}");
    }
}

#[tokio::test]
async fn a_cursor_that_is_none_is_refused() {
    let node = Fixture::new();
    // `YQ` is a channel's name, which is no place of one.
    for path in ["/api/channels", "/api/connections", "/api/presence"] {
        for cursor in ["", "%ff", "YQ"] {
            let path = format!("{path}?cursor={cursor}");
            let answer = node.send(Sent::new("GET", &path).key("full")).await;
            assert_eq!(answer.status, 400, "{path}: {}", answer.text);
        }
    }
}

#[tokio::test]
async fn request_not_answered_in_time_is_refused_with_retry_after() {
    let node = Fixture::with_a_stuck_shard();
    let (listing, closing) = tokio::join!(
        node.send(Sent::new("GET", "/api/connections").key("full")),
        node.send(Sent::new("POST", "/api/clients/ann/connections/close").key("full")),
    );
    for answer in [listing, closing] {
        assert_eq!((answer.status, answer.header("retry-after")), (503, Some("1")), "{}", answer.text);
    }
}
