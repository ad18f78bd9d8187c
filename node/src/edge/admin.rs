//! The operators' listener: `/metrics`, `/live` and `/ready` are open, all other paths need the admin token.

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
use crate::origin::backup::{BackupRefusal, BackupStream};
use crate::origin::outbox::EventOutbox;
use crate::origin::queues::Queues;
use crate::stall_detector;
use crate::telemetry::AdminRefusal;
pub use members::{MemberState, MemberView, MembersView, NodeView};
pub use serve::serve;
pub use token::{AdminToken, AdminTokenError};

pub type AdminFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

#[derive(Clone)]
pub struct AdminState {
    /// Called on each request of `/metrics`; must not block.
    pub metrics: Arc<dyn Fn() -> String + Send + Sync>,
    pub token: Arc<AdminToken>,
    /// Queues, for requests of the broker; none on a node without them.
    pub queues: Option<Queues>,
    /// Returns none while the node has no outbox.
    pub outbox: Arc<dyn Fn() -> Option<EventOutbox> + Send + Sync>,
    /// Called on each request of `/ready`; must not block.
    pub readiness: Arc<dyn Fn() -> Readiness + Send + Sync>,
    /// Asks the node to stop as SIGTERM does; once is enough.
    pub drain: Arc<dyn Fn() + Send + Sync>,
    /// Returns none while the node starts.
    pub members: Arc<dyn Fn() -> Option<MembersView> + Send + Sync>,
    /// Starts a backup, unless another one is under way.
    pub backup: Arc<dyn Fn() -> AdminFuture<Result<BackupStream, BackupRefusal>> + Send + Sync>,
    /// Asks connections to move to nodes that have fewer.
    pub rebalance: Arc<dyn Fn() -> AdminFuture<RebalanceReport> + Send + Sync>,
}

/// Outcome of a rebalancing request on a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RebalanceReport {
    /// Connections of this node.
    pub connections: u64,
    /// Mean number of connections of all nodes that serve clients, this node included.
    pub mean: u64,
    /// Number of connections that are asked to move.
    pub asked: u64,
}

/// Readiness: whether a load balancer should send clients here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Readiness {
    Starting,
    Ready,
    /// Serving, while some part of the node fails.
    Degraded(Vec<Degradation>),
    Draining,
}

/// A part of a node that fails while the node still serves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Degradation {
    /// Store not writing.
    Store,
    /// System clock stepped.
    Clock,
    /// No connections or file descriptors left for further clients.
    Files,
    /// Outbox not writing.
    Outbox,
    /// No memory for further clients.
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
    pub fn set_gauges(present: &[Self]) {
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

/// Check of the admin token. Runs before the routes, so that only authorized callers learn which paths exist.
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
    stall_detector::halt_if_stalled();
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

/// Starts a drain. The answer arrives before the node stops: the operators' listener ends last.
async fn drain(State(state): State<AdminState>) -> Response {
    (state.drain)();
    json(StatusCode::ACCEPTED, r#"{"status":"draining"}"#.to_owned())
}

async fn rebalance(State(state): State<AdminState>) -> Response {
    let RebalanceReport { connections, mean, asked } = (state.rebalance)().await;
    json(StatusCode::OK, format!(r#"{{"connections":{connections},"mean":{mean},"asked":{asked}}}"#))
}

/// True for a request from a page of another origin, which a browser names. Only pages of this listener may send requests.
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
