//! `GET /api/connections` and `…/count`, and `POST /api/clients/{clientId}/connections/close`.

use std::cmp::Reverse;

use axum::response::Response;
use fanfare_proto::http::{Closed, ConnectionCount, ConnectionEntry, ConnectionList};

use super::query::QueryString;
use super::{Api, body, listing};
use crate::auth::{Principal, PrincipalKind};
use crate::edge::errors::HttpRefusal;
use crate::edge::socket::{ConnectionSortKey, ConnectionsPage};
use crate::model::{ClientId, ConnectionId, Operation};
use crate::telemetry::Limit;

/// Connection count of the caller's tenant, over all of its accounts: the number to which the limit applies.
pub(super) fn count(api: &Api, principal: &Principal) -> Response {
    let account = &principal.account;
    body::json(&ConnectionCount {
        connections: api.services.connections.count(&account.tenant),
        limit: account.tenant_connection_limit,
    })
}

/// Lists the account's connections on this node, newest first.
pub(super) async fn list(
    api: &Api,
    principal: &Principal,
    query: Option<&str>,
) -> Result<Response, HttpRefusal> {
    let query = QueryString::new(query);
    let limit = query.limit(&api.services.limits);
    let page = ConnectionsPage::new(limit, listing::cursor(&query, parse_cursor)?);
    let page = listing::walk(api, api.services.shards.connections(&principal.account.id, page)).await?;
    let (rows, mut more) = page.finish();
    let mut connections = Vec::with_capacity(rows.len());
    let mut last = None;
    let mut bytes = 0;
    for (sort_key, row) in rows {
        bytes += row.channels.iter().map(|channel| channel.as_str().len()).sum::<usize>();
        if bytes > listing::PAGE_BYTES_MAX && last.is_some() {
            more = true;
            break;
        }
        last = Some(sort_key);
        connections.push(ConnectionEntry {
            connection_id: sort_key.connection_id.to_string(),
            client_id: row.client_id.map(|client_id| client_id.as_str().to_owned()),
            channel_count: row.channels.len(),
            channels: row.channels.iter().map(|channel| channel.as_str().to_owned()).collect(),
            transport: row.transport.to_owned(),
            authenticated: row.authenticated,
            connected_at: sort_key.connected_ms.0,
        });
    }
    let next = last.filter(|_| more).map(cursor_bytes);
    let next = next.as_ref().map(<[u8; 24]>::as_slice);
    Ok(listing::answer(api, "/api/connections", &ConnectionList { connections }, limit, next))
}

/// Closes every connection of one client of the account, on every node. Callers with a token may not close connections.
pub(super) async fn close(
    api: &Api,
    principal: &Principal,
    client_id: &str,
) -> Result<Response, HttpRefusal> {
    let client_id = ClientId::new(client_id, &api.services.limits)
        .inspect_err(|error| Limit::ClientIdBytes.hit_if(error.is_too_long()))
        .map_err(|error| HttpRefusal::malformed(format!("clientId {error}")))?;
    if principal.kind == PrincipalKind::Token {
        return Err(HttpRefusal::key_required());
    }
    for operation in [Operation::Subscribe, Operation::Presence] {
        if !principal.capability.grants_on_all_channels(operation) {
            return Err(HttpRefusal::forbidden(operation.as_str()));
        }
    }
    let here = api.services.shards.close_client(&principal.account.id, &client_id);
    let remote = async {
        match api.services.publisher.routing() {
            Some(routing) => routing.close_client(&principal.account.id, &client_id).await,
            None => Some(0),
        }
    };
    let close = async {
        let (here, remote) = tokio::join!(here, remote);
        Some(here? + remote?)
    };
    let closed = listing::walk(api, close).await.map_err(|_| HttpRefusal::peers_unavailable())?;
    Ok(body::json(&Closed { closed }))
}

fn cursor_bytes(sort_key: ConnectionSortKey) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[..8].copy_from_slice(&sort_key.connected_ms.0.to_be_bytes());
    bytes[8..].copy_from_slice(sort_key.connection_id.as_bytes());
    bytes
}

fn parse_cursor(bytes: &[u8]) -> Option<ConnectionSortKey> {
    let (connected_ms, connection_id) = bytes.split_first_chunk::<8>()?;
    Some(ConnectionSortKey {
        connected_ms: Reverse(u64::from_be_bytes(*connected_ms)),
        connection_id: ConnectionId::from_bytes(connection_id.try_into().ok()?),
    })
}
