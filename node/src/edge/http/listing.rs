//! What the listings of live state have in common: one walk over all shards, a deadline, pages.

use std::time::Duration;

use axum::http::HeaderValue;
use axum::http::header::LINK;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde::Serialize;

use super::query::Query;
use super::{Api, body};
use crate::edge::errors::Refusal;

/// Walks at the same time; each holds a page of every shard.
pub(super) const WALKS_MAX: usize = 8;
/// For the turn and the walk together.
const WAIT: Duration = Duration::from_secs(2);
/// A page over this size is not filled up to its limit; the link leads on.
pub(super) const PAGE_BYTES_MAX: usize = 8 * 1024 * 1024;

/// The answer of a walk over all connections of this node; 503 when it takes too long or a shard is stopping.
pub(super) async fn walk<T>(api: &Api, walk: impl Future<Output = Option<T>>) -> Result<T, Refusal> {
    let in_turn = async {
        let _turn = api.walks.acquire().await.ok()?;
        walk.await
    };
    in_time(in_turn).await
}

/// What the shards answer; 503 when that takes too long or one of them is stopping.
pub(super) async fn in_time<T>(answer: impl Future<Output = Option<T>>) -> Result<T, Refusal> {
    tokio::time::timeout(WAIT, answer).await.ok().flatten().ok_or_else(Refusal::unanswered)
}

/// The position that `cursor` holds, if there is one; `read` gives `None` for what is no position.
pub(super) fn cursor<T>(
    query: &Query<'_>,
    read: impl FnOnce(&[u8]) -> Option<T>,
) -> Result<Option<T>, Refusal> {
    let Some(text) = query.first("cursor") else { return Ok(None) };
    let position = URL_SAFE_NO_PAD.decode(text.as_bytes()).ok().and_then(|bytes| read(&bytes));
    position.map(Some).ok_or_else(|| Refusal::malformed("cursor must be a cursor from a link"))
}

/// A page of this node's live state, with the way to the next one.
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

/// An answer that names the node that gives it.
pub(super) fn of_node<T: Serialize>(api: &Api, value: &T) -> Response {
    let mut response = body::json(value);
    if let Ok(node_id) = HeaderValue::from_bytes(api.services.node_id.as_bytes()) {
        response.headers_mut().insert("x-service-node-id", node_id);
    }
    response
}
