//! `/api/queues` and all paths under it.

use axum::http::request::Parts;
use axum::response::Response;
use fanfare_proto::queue::{
    CreatedRule, DeletedQueue, DeletedRule, EditedQueue, QueueEdit, QueueList, QueueRequest, RuleList,
    RuleRequest,
};

use super::Api;
use super::body::{self, BodyText, UnreadBody};
use super::query::QueryString;
use super::route::QueuePath;
use crate::auth::{Principal, PrincipalKind};
use crate::edge::errors::HttpRefusal;
use crate::model::Operation;
use crate::origin::queues::QueueError;
use crate::telemetry::RATE_LIMITED;

/// Limit of a body, as for token requests.
const BODY_BYTES_MAX: usize = 16 * 1024;

pub(super) async fn call(
    api: &Api,
    principal: &Principal,
    path: QueuePath,
    head: &Parts,
    body: UnreadBody,
) -> Result<Response, HttpRefusal> {
    let (account, capability) = (&principal.account, &principal.capability);
    if !capability.grants_anywhere(Operation::AmqpSubscribe) {
        return Err(HttpRefusal::forbidden(Operation::AmqpSubscribe.as_str()));
    }
    let queues = api.services.queues.as_ref().ok_or_else(HttpRefusal::not_wired)?;
    let nesting = api.services.limits.nesting;
    match (path, head.method.as_str()) {
        (QueuePath::All, "GET" | "HEAD") => {
            let all = QueryString::new(head.uri.query())
                .first("all")
                .is_some_and(|all| all == "1" || all == "true");
            Ok(body::json(&QueueList { queues: queues.list(&account.id, capability, all) }))
        }
        (QueuePath::All, "POST") => {
            let text = changed(api, principal, body).await?;
            let request = QueueRequest::parse(&text, nesting).map_err(body::refused)?;
            Ok(body::json(&queues.put(account, capability, request).await.map_err(refused)?))
        }
        (QueuePath::One { id }, "GET" | "HEAD") => {
            Ok(body::json(&queues.get(&account.id, capability, &id).await.map_err(refused)?))
        }
        (QueuePath::One { id }, "PATCH") => {
            let text = changed(api, principal, body).await?;
            let edit = QueueEdit::parse(&text, nesting).map_err(body::refused)?;
            let queue = queues.edit(&account.id, capability, &id, edit).await.map_err(refused)?;
            Ok(body::json(&EditedQueue { queue }))
        }
        (QueuePath::One { id }, "DELETE") => {
            needs_key(principal)?;
            let deleted = queues.delete(&account.id, capability, &id).await.map_err(refused)?;
            Ok(body::json(&DeletedQueue { deleted }))
        }
        (QueuePath::Rules { id }, "GET" | "HEAD") => {
            Ok(body::json(&RuleList { rules: queues.rules(&account.id, capability, &id).map_err(refused)? }))
        }
        (QueuePath::Rules { id }, "POST") => {
            let text = changed(api, principal, body).await?;
            let request = RuleRequest::parse(&text, nesting).map_err(body::refused)?;
            let rule = queues.add_rule(&account.id, capability, &id, request).await.map_err(refused)?;
            Ok(body::json(&CreatedRule { rule }))
        }
        (QueuePath::Rule { id, rule_id }, "DELETE") => {
            needs_key(principal)?;
            queues.remove_rule(&account.id, capability, &id, &rule_id).await.map_err(refused)?;
            Ok(body::json(&DeletedRule { ok: true }))
        }
        (QueuePath::All | QueuePath::Rules { .. }, _) => {
            Err(HttpRefusal::method_not_allowed("GET, HEAD, POST"))
        }
        (QueuePath::One { .. }, _) => Err(HttpRefusal::method_not_allowed("GET, HEAD, PATCH, DELETE")),
        (QueuePath::Rule { .. }, _) => Err(HttpRefusal::method_not_allowed("DELETE")),
        (QueuePath::Unknown, _) => Err(HttpRefusal::not_found()),
    }
}

/// Reads the body of a request that changes a queue.
async fn changed(api: &Api, principal: &Principal, body: UnreadBody) -> Result<BodyText, HttpRefusal> {
    needs_key(principal)?;
    body.read(api, &principal.account.id, BODY_BYTES_MAX).await
}

fn refused(error: QueueError) -> HttpRefusal {
    match &error {
        QueueError::Broker(reason) => tracing::warn!(target: RATE_LIMITED, %reason, "queue API call failed"),
        QueueError::Store(reason) => tracing::warn!(target: RATE_LIMITED, %reason, "queue API call failed"),
        QueueError::TooMany { .. } | QueueError::TooLarge => {
            metrics::counter!("fanfare_queue_limit_refusals_total").increment(1);
        }
        _ => {}
    }
    error.into()
}

fn needs_key(principal: &Principal) -> Result<(), HttpRefusal> {
    if principal.kind == PrincipalKind::Token { Err(HttpRefusal::key_required()) } else { Ok(()) }
}
