//! Common parts of the listings of live state: a connection scan over all shards, its deadline, and pages.

use std::time::Duration;

use axum::http::HeaderValue;
use axum::http::header::LINK;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;

use super::query::QueryString;
use super::{Api, body};
use crate::edge::errors::HttpRefusal;

/// Number of concurrent connection scans; each holds a page of every shard.
pub(super) const WALKS_MAX: usize = 8;
/// Time limit of a scan, including the wait for its turn.
const WAIT: Duration = Duration::from_secs(2);
/// Size above which a page is closed before its limit; its link leads on.
pub(super) const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// Runs a connection scan over all connections of this node; 503 if it takes too long or a shard is stopping.
pub(super) async fn walk<T>(api: &Api, walk: impl Future<Output = Option<T>>) -> Result<T, HttpRefusal> {
    let in_turn = async {
        let _turn = api.walks.acquire().await.ok()?;
        walk.await
    };
    in_time(in_turn).await
}

/// Answer of the shards; 503 if it takes too long or one of them is stopping.
pub(super) async fn in_time<T>(answer: impl Future<Output = Option<T>>) -> Result<T, HttpRefusal> {
    tokio::time::timeout(WAIT, answer).await.ok().flatten().ok_or_else(HttpRefusal::unanswered)
}

/// Parses the parameter `cursor`, if there is one; `read` returns `None` for an invalid one.
pub(super) fn cursor<T>(
    query: &QueryString<'_>,
    read: impl FnOnce(&[u8]) -> Option<T>,
) -> Result<Option<T>, HttpRefusal> {
    let Some(text) = query.first("cursor") else { return Ok(None) };
    let position = URL_SAFE_NO_PAD.decode(text.as_bytes()).ok().and_then(|bytes| read(&bytes));
    position.map(Some).ok_or_else(|| HttpRefusal::malformed("cursor must be a cursor from a link"))
}

/// Response with a page of this node's live state and a link to the next page.
pub(super) fn answer<T: Serialize>(
    api: &Api,
    path: &str,
    list: &T,
    limit: usize,
    next: Option<&[u8]>,
) -> Response {
    let mut response = of_node(api, list);
    if let Some(next) = next {
        let cursor = URL_SAFE_NO_PAD.encode(next);
        if let Ok(link) =
            HeaderValue::try_from(format!("<{path}?limit={limit}&cursor={cursor}>; rel=\"next\""))
        {
            response.headers_mut().insert(LINK, link);
        }
    }
    response
}

/// Response that names the answering node.
pub(super) fn of_node<T: Serialize>(api: &Api, value: &T) -> Response {
    let mut response = body::json(value);
    if let Ok(node_id) = HeaderValue::from_bytes(api.services.node_id.as_bytes()) {
        response.headers_mut().insert("x-service-node-id", node_id);
    }
    response
}
