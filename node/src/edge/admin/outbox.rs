//! `/outbox`: events that wait for this node's targets, dead letters, and their retry.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use fanfare_proto::outbox::{EventState, Retried, Retry, TargetList};
use serde::Serialize;

use super::{AdminState, json, refusal};
use crate::model::AccountId;
use crate::origin::history::StoreError;
use crate::origin::outbox::{EventOutbox, EventQuery, RetryError, TargetId};

const BODY_BYTES_MAX: usize = 64 * 1024;
const LIMIT: usize = 100;
const LIMIT_MAX: usize = 1_000;
const CURSOR_BYTES_MAX: usize = 4 * 1024;

pub(super) fn routes() -> Router<AdminState> {
    Router::new()
        .route("/outbox", get(targets))
        .route("/outbox/{account}/{target}", get(events))
        .route("/outbox/{account}/{target}/retry", post(retry))
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
}

async fn targets(State(state): State<AdminState>) -> Response {
    let targets = match (state.outbox)() {
        Some(outbox) => outbox.targets().await,
        None => Vec::new(),
    };
    answer(Ok(TargetList { targets }))
}

async fn events(
    State(state): State<AdminState>,
    Path((account, target)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    let query = match read_query(&query.unwrap_or_default()) {
        Ok(query) => query,
        Err(error) => return refusal(StatusCode::BAD_REQUEST, error),
    };
    let target = TargetId::new(&AccountId::new(&account), &target);
    let Some(outbox) = knowing(&state, &target) else { return unknown(&target) };
    answer(outbox.events(&target, query).await)
}

async fn retry(
    State(state): State<AdminState>,
    Path((account, target)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    let Some(Retry { events }) = read_retry(&body) else {
        return refusal(StatusCode::BAD_REQUEST, "the body is no object with a list of numbers as events");
    };
    let target = TargetId::new(&AccountId::new(&account), &target);
    let Some(outbox) = knowing(&state, &target) else { return unknown(&target) };
    match outbox.retry(&target, events).await {
        Ok(retried) => answer(Ok(retried)),
        Err(RetryError::Store(error)) => answer::<Retried>(Err(error)),
        Err(error @ RetryError::Deleted) => refusal(StatusCode::CONFLICT, &format!("{target}: {error}")),
    }
}

/// The outbox, if it or the directory has the target.
fn knowing(state: &AdminState, target: &TargetId) -> Option<EventOutbox> {
    (state.outbox)().filter(|outbox| outbox.knows(target))
}

fn unknown(target: &TargetId) -> Response {
    let text = format!("neither the outbox nor the directory or the store of queues has the target {target}");
    refusal(StatusCode::NOT_FOUND, &text)
}

/// Parses the body of a retry. None: the body is neither empty nor such an object.
fn read_retry(body: &[u8]) -> Option<Retry> {
    match body.trim_ascii() {
        [] => Some(Retry::default()),
        // From an array serde would take the fields in order.
        body @ [b'{', ..] => serde_json::from_slice(body).ok(),
        _ => None,
    }
}

/// Parses the query. The error names the bad parameter.
fn read_query(text: &str) -> Result<EventQuery, &'static str> {
    let mut query = EventQuery { state: EventState::Dead, after: None, limit: LIMIT };
    for (name, value) in form_urlencoded::parse(text.as_bytes()) {
        match &*name {
            "state" => {
                let states = [EventState::Waiting, EventState::Dead];
                let found = states.into_iter().find(|state| state.as_str() == value);
                query.state = found.ok_or("state is neither waiting nor dead")?;
            }
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                query.limit = limit.ok_or("limit is no number from 1 to 1000")?;
            }
            "after" => {
                let cursor = EventQuery::cursor(&value).filter(|cursor| cursor.len() <= CURSOR_BYTES_MAX);
                query.after = Some(cursor.ok_or("after is no next of a page")?);
            }
            _ => return Err("the parameters are state, limit and after"),
        }
    }
    Ok(query)
}

fn answer<T: Serialize>(result: Result<T, StoreError>) -> Response {
    match result.map(|value| serde_json::to_string(&value)) {
        Ok(Ok(text)) => json(StatusCode::OK, text),
        Ok(Err(_)) => refusal(StatusCode::INTERNAL_SERVER_ERROR, "internal"),
        Err(StoreError::Busy) => refusal(StatusCode::SERVICE_UNAVAILABLE, "the outbox is full"),
        Err(_) => refusal(StatusCode::SERVICE_UNAVAILABLE, "the outbox cannot be read or written"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_that_cannot_be_used_names_its_parameter() {
        let query = read_query("state=waiting&limit=7&after=AAE").expect("a query");
        assert_eq!((query.state, query.limit, query.after), (EventState::Waiting, 7, Some(vec![0, 1])));
        for (text, named) in [
            ("state=all", "state"),
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("after=%3d", "after"),
            ("until=3", "parameters"),
        ] {
            assert!(read_query(text).expect_err(text).contains(named), "{text}");
        }
    }
}
