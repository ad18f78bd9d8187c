//! `/broker/<token>/{user,vhost,resource,topic}`: requests of RabbitMQ's HTTP auth backend for keys that consume queues.
//!
//! The token is the operators' token. Neither the path nor a body is logged: both hold secrets.

use axum::Router;
use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Path, RawQuery, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use fanfare_proto::path::decode;

use super::{AdminState, AdminToken};
use crate::origin::queues::BrokerRequest;

/// Path before the token.
const PREFIX: &str = "/broker/";
const FORM_BYTES_MAX: usize = 16 * 1024;

pub(super) fn routes() -> Router<AdminState> {
    let limit = DefaultBodyLimit::max(FORM_BYTES_MAX);
    Router::new().route("/broker/{token}/{check}", get(by_query).post(by_form)).layer(limit)
}

/// True if the path has the right token. None: the path is not one of the broker.
pub(super) fn is_authorized(raw_path: &str, token: &AdminToken) -> Option<bool> {
    let rest = raw_path.strip_prefix(PREFIX)?;
    let given = rest.split('/').next().unwrap_or_default();
    Some(decode(given).is_ok_and(|given| token.is(given.as_bytes())))
}

async fn by_query(
    State(state): State<AdminState>,
    Path((_, check)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Response {
    answer(&state, &check, query.unwrap_or_default().as_bytes())
}

async fn by_form(
    State(state): State<AdminState>,
    Path((_, check)): Path<(String, String)>,
    body: Bytes,
) -> Response {
    answer(&state, &check, &body)
}

fn answer(state: &AdminState, check: &str, form: &[u8]) -> Response {
    let fields: Vec<_> = form_urlencoded::parse(form).collect();
    let field = |name: &str| {
        let found = fields.iter().find(|(key, _)| key == name);
        found.map_or("", |(_, value)| &**value)
    };
    let username = field("username");
    let request = match check {
        "user" => BrokerRequest::User { username, password: field("password") },
        "vhost" => BrokerRequest::Vhost { username, vhost: field("vhost") },
        "resource" => {
            let (vhost, kind) = (field("vhost"), field("resource"));
            let (name, permission) = (field("name"), field("permission"));
            BrokerRequest::Resource { username, vhost, kind, name, permission }
        }
        "topic" => BrokerRequest::Topic { username },
        _ => return super::refusal(StatusCode::NOT_FOUND, "not found"),
    };
    let is_allowed = state.queues.as_ref().is_some_and(|queues| queues.allows(request));
    let outcome = if is_allowed { "allow" } else { "deny" };
    metrics::counter!("fanfare_broker_checks_total", "check" => request.check(), "outcome" => outcome)
        .increment(1);
    ([(CONTENT_TYPE, "text/plain; charset=utf-8")], outcome).into_response()
}
