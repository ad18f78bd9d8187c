//! `GET /api/connections/count`.

use axum::response::Response;
use fanfare_proto::http::ConnectionCount;

use super::{Api, body};
use crate::auth::Principal;

/// What the ceiling is held against: every connection of the caller's tenant, whatever its account.
pub(super) fn count(api: &Api, principal: &Principal) -> Response {
    let account = &principal.account;
    body::json(&ConnectionCount {
        connections: api.services.connections.count(&account.tenant),
        limit: account.tenant_connection_limit,
    })
}
