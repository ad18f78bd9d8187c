//! The operators' listener: `/metrics`, `/live` and `/ready` are open, all else needs the admin token.

mod backup;
mod broker;
mod members;
mod outbox;
mod serve;
mod token;

use std::pin::Pin;
use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, ORIGIN, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use super::errors::CHALLENGE;
use crate::origin::backup::{BackupRefused, BackupStream};
use crate::origin::outbox::Outbox;
use crate::origin::queues::Queues;
use crate::pulse;
use crate::telemetry::AdminRefusal;
pub use members::{MemberState, MemberView, MembersView, NodeView};
pub use serve::serve;
pub use token::{AdminToken, AdminTokenError};

pub type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

#[derive(Clone)]
pub struct AdminState {
    /// Asked on each request of `/metrics`; must not block.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
    pub token: Arc<AdminToken>,
    /// For the questions of the broker that has them.
    pub queues: Option<Queues>,
    /// None while the node has nothing to send to.
    pub outbox: Arc<dyn Fn() -> Option<Outbox> + Send + Sync>,
    /// Asked on each request of `/ready`; must not block.
    pub readiness: Arc<dyn Fn() -> Readiness + Send + Sync>,
    /// Asks the node to stop as SIGTERM does; once is enough.
    pub drain: Arc<dyn Fn() + Send + Sync>,
    /// None while the node starts.
    pub members: Arc<dyn Fn() -> Option<MembersView> + Send + Sync>,
    /// Begins a backup, unless another one is under way.
    pub backup: Arc<dyn Fn() -> Later<Result<BackupStream, BackupRefused>> + Send + Sync>,
    /// Asks connections to go to nodes that have fewer.
    pub rebalance: Arc<dyn Fn() -> Later<Rebalanced> + Send + Sync>,
}

/// What a node has, and what it has done about it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rebalanced {
    /// Of this node.
    pub connections: u64,
    /// Of all nodes that clients could go to, this one included.
    pub mean: u64,
    /// How many are asked to go.
    pub asked: u64,
}

/// Whether a load balancer should send clients here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    Starting,
    Ready,
    /// Serving, while a part of it fails.
    Degraded(Vec<Degradation>),
    Draining,
}

/// A part of a node that fails while the node serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Degradation {
    /// The store does not write.
    Store,
    /// The system clock has stepped.
    Clock,
    /// There is no room for further clients.
    Files,
    /// The outbox does not write.
    Outbox,
    /// There is no memory for further clients.
    Memory,
}

impl Degradation {
    pub const ALL: [Self; 5] = [Self::Store, Self::Clock, Self::Files, Self::Outbox, Self::Memory];

    const fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Clock => "clock",
            Self::Files => "files",
            Self::Outbox => "outbox",
            Self::Memory => "memory",
        }
    }

    /// Sets the gauges; to be called every few seconds.
    pub fn tell(present: &[Self]) {
        for reason in Self::ALL {
            let is_present = u8::from(present.contains(&reason));
            metrics::gauge!("fanfare_degraded", "reason" => reason.name()).set(is_present);
        }
    }
}

pub fn router(state: AdminState) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/live", get(|| async { "ok" }))
        .route("/ready", get(ready))
        .route("/drain", post(drain))
        .route("/rebalance", post(rebalance))
        .route("/debug/members", get(members::members))
        .merge(broker::routes())
        .merge(backup::routes())
        .merge(outbox::routes())
        .method_not_allowed_fallback(|| async {
            refusal(StatusCode::METHOD_NOT_ALLOWED, "method not allowed")
        })
        .fallback(|| async { refusal(StatusCode::NOT_FOUND, "not found") })
        .layer(middleware::from_fn_with_state(state.clone(), guard))
        .with_state(state)
}

/// Before the routes, so that the paths that exist show only to who may use them.
async fn guard(State(state): State<AdminState>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    if is_foreign(headers) {
        AdminRefusal::Origin.count();
        return refusal(StatusCode::FORBIDDEN, "foreign origin");
    }
    let path = request.uri().path();
    let open = matches!(path, "/metrics" | "/live" | "/ready");
    let may = broker::is_authorized(path, &state.token);
    if !open && !may.unwrap_or_else(|| is_operator(headers, &state.token)) {
        AdminRefusal::Token.count();
        return refusal(StatusCode::UNAUTHORIZED, "unauthorized");
    }
    let response = next.run(request).await;
    pulse::pass();
    response
}

async fn metrics(State(state): State<AdminState>) -> Response {
    ([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], (state.metrics)()).into_response()
}

async fn ready(State(state): State<AdminState>) -> Response {
    let (status, text) = match (state.readiness)() {
        Readiness::Starting => (StatusCode::SERVICE_UNAVAILABLE, "starting"),
        Readiness::Ready => (StatusCode::OK, "ready"),
        Readiness::Degraded(reasons) => {
            let reasons = reasons.into_iter().map(Degradation::name).collect::<Vec<_>>().join(r#"",""#);
            return json(StatusCode::OK, format!(r#"{{"status":"degraded","reasons":["{reasons}"]}}"#));
        }
        Readiness::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
    };
    json(status, format!(r#"{{"status":"{text}"}}"#))
}

/// Answered before the node is gone: the listener of operators ends last.
async fn drain(State(state): State<AdminState>) -> Response {
    (state.drain)();
    json(StatusCode::ACCEPTED, r#"{"status":"draining"}"#.to_owned())
}

async fn rebalance(State(state): State<AdminState>) -> Response {
    let Rebalanced { connections, mean, asked } = (state.rebalance)().await;
    json(StatusCode::OK, format!(r#"{{"connections":{connections},"mean":{mean},"asked":{asked}}}"#))
}

/// A browser says where its page comes from; only a page of this listener may ask.
fn is_foreign(headers: &HeaderMap) -> bool {
    let host = headers.get(HOST).map(|host| host.as_bytes());
    headers.get_all(ORIGIN).iter().any(|origin| {
        let origin = origin.as_bytes();
        let authority = origin.strip_prefix(b"http://").or_else(|| origin.strip_prefix(b"https://"));
        authority.is_none() || authority != host
    })
}

fn is_operator(headers: &HeaderMap, token: &AdminToken) -> bool {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(value), None) = (given.next(), given.next()) else { return false };
    match value.as_bytes().split_at_checked("bearer ".len()) {
        Some((scheme, rest)) => scheme.eq_ignore_ascii_case(b"bearer ") && token.is(rest),
        None => false,
    }
}

fn refusal(status: StatusCode, error: &str) -> Response {
    let mut response = json(status, serde_json::json!({ "error": error }).to_string());
    if status == StatusCode::UNAUTHORIZED {
        response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(CHALLENGE));
    }
    response
}

fn json(status: StatusCode, body: String) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], body).into_response()
}

#[cfg(test)]
mod tests;
