//! The HTTP side. CORS is outermost and `/health` apart; every other request passes the same checks in order: credential, path, method,
//! capability, body.

use std::any::Any;
use std::future::poll_fn;
use std::net::IpAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::task::Poll;
use std::time::Instant;

use axum::Router;
use axum::extract::Request;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, Method};
use axum::middleware::from_fn;
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use fanfare_proto::http::Time;
use tokio::sync::Semaphore;

use self::body::UnreadBody;
use self::memory_budget::MemoryBudget;
use self::rate::KeyRates;
use self::route::{Route, RouteAction};
use super::errors::HttpRefusal;
use super::socket::ChannelOrder;
use super::{ApiServices, PeerAddress};
use crate::auth::{Credentials, Principal};
use crate::model::{ChannelKey, ChannelName, Operation, UsageKind};
use crate::telemetry::{Limit, RATE_LIMITED, TraceSpan};

mod batch;
mod body;
mod channels;
mod coding;
mod connections;
pub mod cors;
mod history;
mod integrations;
mod listing;
mod memory_budget;
mod metrics;
mod presence;
mod publish;
mod query;
mod queues;
mod rate;
mod route;
mod sse;
#[cfg(test)]
mod tests;
mod token;

/// All routes of the client listener except upgrades of `/realtime`.
pub fn router(services: Arc<ApiServices>) -> Router {
    let publishes = KeyRates::new(services.limits.http_publishes_per_second);
    let api = Arc::new(Api {
        publishes,
        bodies: MemoryBudget::new(services.limits.http_bodies_bytes, services.limits.http_body_bytes),
        answers: MemoryBudget::new(
            services.limits.http_answers_bytes,
            history::page_bytes_max(&services.limits),
        ),
        walks: Semaphore::new(listing::WALKS_MAX),
        streams: Arc::default(),
        channel_order: ChannelOrder::default(),
        services,
    });
    Router::new()
        .route("/health", any(health))
        .fallback(move |request| serve(Arc::clone(&api), request))
        .layer(from_fn(cors::outermost))
}

/// Context with which every resource is answered.
struct Api {
    services: Arc<ApiServices>,
    publishes: KeyRates,
    /// Memory budgets: for bodies until their request is answered, and for answers until they are written.
    bodies: MemoryBudget,
    answers: MemoryBudget,
    /// Permits for connection scans; further ones wait for a short time.
    walks: Semaphore,
    /// Number of open event streams.
    streams: Arc<AtomicUsize>,
    /// Order of channels in the listings.
    channel_order: ChannelOrder,
}

/// Answers `/health`, outside the JSON router, so that it works even if the router does not.
async fn health(method: Method) -> Response {
    let response = if method == Method::GET || method == Method::HEAD {
        "ok".into_response()
    } else {
        HttpRefusal::method_not_allowed("GET, HEAD").into_response()
    };
    count("/health", response.status().as_u16());
    response
}

async fn serve(api: Arc<Api>, request: Request) -> Response {
    let route = Route::of(request.uri().path());
    let template = route.template;
    let mut span = TraceSpan::of_request(request.method(), template, request.headers());
    let response = match without_panic(answer(&api, route, request, &span)).await {
        Ok(answered) => answered.unwrap_or_else(HttpRefusal::into_response),
        Err(_) => {
            tracing::error!(target: RATE_LIMITED, route = template, "request handler panicked");
            HttpRefusal::internal().into_response()
        }
    };
    span.answered(response.status().as_u16());
    count(template, response.status().as_u16());
    response
}

async fn answer(
    api: &Api,
    route: Route,
    request: Request,
    span: &TraceSpan,
) -> Result<Response, HttpRefusal> {
    let (head, body) = request.into_parts();
    let body = UnreadBody::new(&head.headers, body);
    match &route.action {
        RouteAction::UpgradeRequired => return Err(HttpRefusal::upgrade_required()),
        // Authenticated as a socket: its credential may be in the query.
        RouteAction::EventStream => return sse::open(api, &route, &head),
        RouteAction::ExchangeToken { key_name } => {
            let key_name = key_name.as_ref().map_err(|error| HttpRefusal::malformed(error.clone()))?;
            route.takes(head.method.as_str())?;
            return token::exchange(api, key_name, &head, body).await;
        }
        _ => {}
    }
    let principal = api.authenticate(&head)?;
    let usage = &principal.account.usage;
    usage.count(UsageKind::Api, 1, 0);
    if !matches!(route.action, RouteAction::NotFound | RouteAction::Malformed(_)) {
        route.takes(head.method.as_str())?;
    }
    let query = head.uri.query();
    let answered = match route.action {
        RouteAction::Time => Ok(time(api)),
        RouteAction::Integrations { kind } => Ok(integrations::targets(&principal, kind)),
        RouteAction::ConnectionCount => Ok(connections::count(api, &principal)),
        RouteAction::Connections => connections::list(api, &principal, query).await,
        RouteAction::Channels => channels::list(api, &principal, query).await,
        RouteAction::Channel { channel } => channels::details(api, &principal, &channel).await,
        RouteAction::CloseClient { client_id } => connections::close(api, &principal, &client_id).await,
        RouteAction::Publish { channel } => publish::publish(api, &principal, &channel, body, span).await,
        RouteAction::RevokeTokens { key_name } => token::revoke(api, &principal, &key_name, body).await,
        RouteAction::PublishBatch => batch::publish(api, &principal, body, span).await,
        RouteAction::History { channel } => {
            let page = history::messages(api, &principal, &channel, query).await?;
            Ok(history::counted(usage, page))
        }
        RouteAction::PresenceHistory { channel } => {
            let page = history::presence(api, &principal, &channel, query).await?;
            Ok(history::counted(usage, page))
        }
        RouteAction::Presence { channel } => presence::members(api, &principal, &channel),
        RouteAction::PresenceChannels => presence::channels(api, &principal, query),
        RouteAction::Metrics => metrics::series(api, &principal, query).await,
        RouteAction::Queues(path) => queues::call(api, &principal, path, &head, body).await,
        RouteAction::Malformed(error) => Err(HttpRefusal::malformed(error)),
        RouteAction::NotFound
        | RouteAction::UpgradeRequired
        | RouteAction::EventStream
        | RouteAction::ExchangeToken { .. } => Err(HttpRefusal::not_found()),
    };
    Ok(api.answers.hold(&principal.account.id, answered?))
}

/// Current time, for signers whose clock is off.
fn time(api: &Api) -> Response {
    body::json(&Time { now: api.services.clock.now_ms() })
}

impl Api {
    fn authenticate(&self, head: &Parts) -> Result<Principal, HttpRefusal> {
        let credentials = Credentials {
            authorization: authorization(&head.headers),
            query: "",
            socket: false,
            address: address(&head.extensions),
        };
        Ok(self.services.auth.authenticate(&credentials)?)
    }

    /// The channel in the caller's account, if its name is valid and the capability covers it.
    fn allowed_channel(
        &self,
        principal: &Principal,
        channel: &str,
        operation: Operation,
    ) -> Result<ChannelKey, HttpRefusal> {
        let name = ChannelName::new(channel, &self.services.limits)
            .inspect_err(|error| Limit::ChannelNameBytes.hit_if(error.is_too_long()))?;
        if !principal.allows(channel, operation) {
            return Err(HttpRefusal::forbidden(operation.as_str()));
        }
        Ok(principal.channel(name))
    }

    fn take_rate(&self, principal: &Principal, messages: usize) -> Result<(), HttpRefusal> {
        let taken = self.publishes.take(&principal.key_name, messages, Instant::now());
        taken.map_err(|seconds| {
            Limit::HttpPublishesPerSecond.hit();
            HttpRefusal::rate_limit(seconds)
        })
    }
}

/// Address of the client, or of the proxy that passes its requests on.
fn address(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<PeerAddress>().map(|peer| peer.0)
}

fn authorization(headers: &HeaderMap) -> Vec<&[u8]> {
    headers.get_all(AUTHORIZATION).iter().map(|value| value.as_bytes()).collect()
}

/// Catches a panic, so that it ends neither the connection nor the task that serves it.
async fn without_panic<F: Future>(future: F) -> Result<F::Output, Box<dyn Any + Send>> {
    let mut future = Box::pin(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// Route label of a request that is refused before its path is known.
pub const NO_ROUTE: &str = "none";

/// Counts a refusal of the listener itself, and logs its sentence, which holds nothing of the request.
pub fn count_refusal(route: &'static str, refusal: &HttpRefusal) {
    tracing::debug!(route, error = &*refusal.error, "request refused");
    count(route, refusal.kind.status());
}

/// Counts an answer. Neither path nor query goes into a metric or a log line: they hold names and perhaps credentials.
fn count(template: &'static str, status: u16) {
    let class = match status {
        0..300 => "2xx",
        300..400 => "3xx",
        400..500 => "4xx",
        _ => "5xx",
    };
    tracing::debug!(route = template, status, "request answered");
    ::metrics::counter!("fanfare_http_requests_total", "route" => template, "status" => class).increment(1);
}
