//! Reads a whole history, page by page, as a client does.

use std::net::SocketAddr;

use serde_json::Value;

use crate::http;

const PAGES_MAX: usize = 10_000;

/// Gives the path of a channel's history, with the name percent-encoded.
pub fn path(channel: &str, query: &str) -> String {
    format!("/api/channels/{}/history?{query}", fanfare_proto::path::encode_channel(channel))
}

/// Reads all records of a channel, following the `Link` header to its end.
pub async fn read_all(addr: SocketAddr, key: &str, channel: &str, query: &str) -> Vec<Value> {
    let authorization = http::basic(key);
    let mut next = Some(path(channel, query));
    let mut records = Vec::new();
    for _ in 0..PAGES_MAX {
        let Some(path) = next.take() else {
            return records;
        };
        let page = http::request(addr, "GET", &path, &[("authorization", &authorization)], "").await;
        assert_eq!(page.status, 200, "{path}: {:?}", page.body);
        let Some(Value::Array(messages)) = page.json().get_mut("messages").map(Value::take) else {
            unreachable!("{path}: no messages in {:?}", page.body)
        };
        records.extend(messages);
        next = page.header("link").map(next_of);
    }
    unreachable!("the history of {channel} does not end")
}

/// Gives the address in `<…>; rel="next"`.
pub fn next_of(link: &str) -> String {
    let (path, relation) =
        link.strip_prefix('<').and_then(|link| link.split_once('>')).expect("<path>; rel=\"next\"");
    assert_eq!(relation, "; rel=\"next\"", "{link}");
    assert!(path.starts_with("/api/"), "{link}");
    path.into()
}
