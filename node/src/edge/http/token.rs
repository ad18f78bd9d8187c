//! `POST /keys/{keyName}/requestToken`, the one resource whose credential is its body, and `…/revokeTokens`.

use axum::http::HeaderValue;
use axum::http::header::CACHE_CONTROL;
use axum::http::request::Parts;
use axum::response::Response;

use super::body::{self, UnreadBody};
use super::{Api, address, authorization};
use crate::auth::Principal;
use crate::edge::errors::HttpRefusal;
use crate::model::AccountId;

pub(super) async fn exchange(
    api: &Api,
    key_name: &str,
    head: &Parts,
    body: UnreadBody,
) -> Result<Response, HttpRefusal> {
    // The account is not known yet.
    let text = body.read(api, &AccountId::new(""), api.services.limits.token_request_bytes).await?;
    let address = address(&head.extensions);
    let details = api.services.auth.exchange(address, key_name, &authorization(&head.headers), &text).await?;
    let mut response = body::json(&details);
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    Ok(response)
}

pub(super) async fn revoke(
    api: &Api,
    principal: &Principal,
    key_name: &str,
    body: UnreadBody,
) -> Result<Response, HttpRefusal> {
    let text = body.read(api, &principal.account.id, api.services.limits.token_request_bytes).await?;
    Ok(body::json(&api.services.auth.revoke_tokens(principal, key_name, &text).await?))
}
