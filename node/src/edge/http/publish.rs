//! `POST /api/channels/{channel}/publish`.

use axum::response::Response;
use fanfare_proto::http::{Published, parse_publish};

use super::Api;
use super::body::{self, UnreadBody};
use crate::auth::Principal;
use crate::edge::errors::HttpRefusal;
use crate::model::{ChannelKey, ConnectionId, Draft, Operation};
use crate::publish::PublishRequest;
use crate::telemetry::TraceSpan;
use crate::telemetry::traces::TraceSpanKind;

/// Publishes one message or an array of them; answers when the origin has stored them.
pub(super) async fn publish(
    api: &Api,
    principal: &Principal,
    channel: &str,
    body: UnreadBody,
    span: &TraceSpan,
) -> Result<Response, HttpRefusal> {
    let key = api.allowed_channel(principal, channel, Operation::Publish)?;
    let text = body.read(api, &principal.account.id, api.services.limits.http_body_bytes).await?;
    let limits = &api.services.limits;
    let messages = parse_publish(&text, limits.nesting, limits.publish_messages).map_err(body::refused)?;
    let _share = text.into_permit();
    api.take_rate(principal, messages.len())?;
    publish_and_store(api, principal, key, messages, span).await?;
    Ok(body::json(&Published { channel: channel.to_owned(), published: true }))
}

/// Publishes under a fresh connection id, so that nothing marks the messages as sent over HTTP.
pub(super) async fn publish_and_store(
    api: &Api,
    principal: &Principal,
    key: ChannelKey,
    messages: Vec<Draft>,
    span: &TraceSpan,
) -> Result<(), HttpRefusal> {
    let mut span = TraceSpan::within(span.context().as_deref(), "publish", TraceSpanKind::Producer);
    span.concerns(key.channel(), messages.len());
    let request = PublishRequest {
        key,
        account: principal.account.clone(),
        key_name: principal.key_name.clone(),
        connection_id: ConnectionId::random(),
        client_id: principal.client_id.clone(),
        messages,
        span,
    };
    api.services.publisher.publish_and_wait(request).await?;
    Ok(())
}
