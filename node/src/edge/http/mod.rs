//! The HTTP side: CORS outermost, `/health` apart, then one order for every request: credential, path,
//! method, capability, body.

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

use self::body::Unread;
use self::rate::KeyRates;
use self::room::Room;
use self::route::{Action, Route};
use super::errors::Refusal;
use super::socket::ChannelOrder;
use super::{PeerAddress, Services};
use crate::auth::{Credentials, Principal};
use crate::model::{ChannelKey, ChannelName, Operation, UsageKind};
use crate::telemetry::{Limit, OFTEN, Span};

mod batch;
mod body;
mod channels;
mod coding;
mod connections;
pub mod cors;
mod history;
mod integrations;
mod listing;
mod metrics;
mod presence;
mod publish;
mod query;
mod queues;
mod rate;
mod room;
mod route;
mod sse;
#[cfg(test)]
mod tests;
mod token;

/// Everything under the client listener that is not an upgrade of `/realtime`.
pub fn router(services: Arc<Services>) -> Router {
    let publishes = KeyRates::new(services.limits.http_publishes_per_second);
    let api = Arc::new(Api {
        publishes,
        bodies: Room::new(services.limits.http_bodies_bytes, services.limits.http_body_bytes),
        answers: Room::new(services.limits.http_answers_bytes, history::page_bytes_max(&services.limits)),
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

/// What every resource is answered with.
struct Api {
    services: Arc<Services>,
    publishes: KeyRates,
    /// For bodies until their request is answered, and for answers until they are written.
    bodies: Room,
    answers: Room,
    /// Walks over all connections that are under way; further ones wait for theirs, and not for long.
    walks: Semaphore,
    /// Event streams that are open.
    streams: Arc<AtomicUsize>,
    /// In which the listings tell of channels.
    channel_order: ChannelOrder,
}

/// Outside the JSON router, so that it answers even if that cannot.
async fn health(method: Method) -> Response {
    let response = if method == Method::GET || method == Method::HEAD {
        "ok".into_response()
    } else {
        Refusal::method_not_allowed("GET, HEAD").into_response()
    };
    count("/health", response.status().as_u16());
    response
}

async fn serve(api: Arc<Api>, request: Request) -> Response {
    let route = Route::of(request.uri().path());
    let template = route.template;
    let mut span = Span::of_request(request.method(), template, request.headers());
    let response = match without_panic(answer(&api, route, request, &span)).await {
        Ok(answered) => answered.unwrap_or_else(Refusal::into_response),
        Err(_) => {
            tracing::error!(target: OFTEN, route = template, "a request handler panicked");
            Refusal::internal().into_response()
        }
    };
    span.answered(response.status().as_u16());
    count(template, response.status().as_u16());
    response
}

async fn answer(api: &Api, route: Route, request: Request, span: &Span) -> Result<Response, Refusal> {
    let (head, body) = request.into_parts();
    let body = Unread::new(&head.headers, body);
    match &route.action {
        Action::UpgradeRequired => return Err(Refusal::upgrade_required()),
        // It belongs to the socket: its credential may stand in the query.
        Action::EventStream => return sse::open(api, &route, &head),
        Action::ExchangeToken { key_name } => {
            let key_name = key_name.as_ref().map_err(|error| Refusal::malformed(error.clone()))?;
            route.takes(head.method.as_str())?;
            return token::exchange(api, key_name, &head, body).await;
        }
        _ => {}
    }
    let principal = api.authenticate(&head)?;
    let usage = &principal.account.usage;
    usage.count(UsageKind::Api, 1, 0);
    if !matches!(route.action, Action::NotFound | Action::Malformed(_)) {
        route.takes(head.method.as_str())?;
    }
    let query = head.uri.query();
    let answered = match route.action {
        Action::Time => Ok(time(api)),
        Action::Integrations { kind } => Ok(integrations::targets(&principal, kind)),
        Action::ConnectionCount => Ok(connections::count(api, &principal)),
        Action::Connections => connections::list(api, &principal, query).await,
        Action::Channels => channels::list(api, &principal, query).await,
        Action::Channel { channel } => channels::details(api, &principal, &channel).await,
        Action::CloseClient { client_id } => connections::close(api, &principal, &client_id).await,
        Action::Publish { channel } => publish::publish(api, &principal, &channel, body, span).await,
        Action::RevokeTokens { key_name } => token::revoke(api, &principal, &key_name, body).await,
        Action::PublishBatch => batch::publish(api, &principal, body, span).await,
        Action::History { channel } => {
            let page = history::messages(api, &principal, &channel, query).await?;
            Ok(history::counted(usage, page))
        }
        Action::PresenceHistory { channel } => {
            let page = history::presence(api, &principal, &channel, query).await?;
            Ok(history::counted(usage, page))
        }
        Action::Presence { channel } => presence::members(api, &principal, &channel),
        Action::PresenceChannels => presence::channels(api, &principal, query),
        Action::Metrics => metrics::series(api, &principal, query).await,
        Action::Queues(path) => queues::call(api, &principal, path, &head, body).await,
        Action::Malformed(error) => Err(Refusal::malformed(error)),
        Action::NotFound | Action::UpgradeRequired | Action::EventStream | Action::ExchangeToken { .. } => {
            Err(Refusal::not_found())
        }
    };
    Ok(api.answers.hold(&principal.account.id, answered?))
}

/// For signers whose clock is off.
fn time(api: &Api) -> Response {
    body::json(&Time { now: api.services.clock.now_ms() })
}

impl Api {
    fn authenticate(&self, head: &Parts) -> Result<Principal, Refusal> {
        let credentials = Credentials {
            authorization: authorization(&head.headers),
            query: "",
            socket: false,
            address: address(&head.extensions),
        };
        Ok(self.services.auth.authenticate(&credentials)?)
    }

    /// The channel within the caller's account, if its name is one and the capability covers it.
    fn allowed_channel(
        &self,
        principal: &Principal,
        channel: &str,
        operation: Operation,
    ) -> Result<ChannelKey, Refusal> {
        let name = ChannelName::new(channel, &self.services.limits)
            .inspect_err(|error| Limit::ChannelNameBytes.hit_if(error.is_too_long()))?;
        if !principal.allows(channel, operation) {
            return Err(Refusal::forbidden(operation.as_str()));
        }
        Ok(principal.channel(name))
    }

    fn take_rate(&self, principal: &Principal, messages: usize) -> Result<(), Refusal> {
        let taken = self.publishes.take(&principal.key_name, messages, Instant::now());
        taken.map_err(|seconds| {
            Limit::HttpPublishesPerSecond.hit();
            Refusal::rate_limit(seconds)
        })
    }
}

/// The client's, or that of whoever passes its requests on.
fn address(extensions: &Extensions) -> Option<IpAddr> {
    extensions.get::<PeerAddress>().map(|peer| peer.0)
}

fn authorization(headers: &HeaderMap) -> Vec<&[u8]> {
    headers.get_all(AUTHORIZATION).iter().map(|value| value.as_bytes()).collect()
}

/// A panic in one request takes down neither its connection nor the task that serves it.
async fn without_panic<F: Future>(future: F) -> Result<F::Output, Box<dyn Any + Send>> {
    let mut future = Box::pin(future);
    poll_fn(|context| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(context))) {
        Ok(polled) => polled.map(Ok),
        Err(panic) => Poll::Ready(Err(panic)),
    })
    .await
}

/// Of a request that is refused before its path is looked at.
pub const NO_ROUTE: &str = "none";

/// Counts a refusal by the listener itself, and logs its sentence, which holds nothing of the request.
pub fn refused(route: &'static str, refusal: &Refusal) {
    tracing::debug!(route, error = &*refusal.error, "request refused");
    count(route, refusal.kind.status());
}

/// Neither the path nor the query stands in a metric or a log line: they hold names and perhaps credentials.
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
