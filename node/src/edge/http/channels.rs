//! `GET /api/channels`.

use axum::response::Response;
use fanfare_proto::http::{ChannelEntry, ChannelList};

use super::query::Query;
use super::{Api, listing};
use crate::auth::Principal;
use crate::edge::errors::Refusal;
use crate::edge::socket::ChannelsPage;
use crate::model::ChannelName;

/// The account's channels that a connection of this node is attached to, by name.
pub(super) async fn list(api: &Api, principal: &Principal, query: Option<&str>) -> Result<Response, Refusal> {
    let query = Query::new(query);
    let limit = query.limit();
    let after = listing::cursor(&query, |bytes| ChannelName::new(std::str::from_utf8(bytes).ok()?).ok())?;
    let page = ChannelsPage::new(limit, after);
    let page = listing::walk(api, api.services.shards.channels(&principal.account.id, page)).await?;
    let (rows, more) = page.finish();
    let entry = |(name, connections, subscribers): (ChannelName, u64, u64)| ChannelEntry {
        name: name.as_str().to_owned(),
        connections,
        subscribers,
    };
    let channels: Vec<_> = rows.into_iter().map(entry).collect();
    let last = channels.last().filter(|_| more).map(|entry| entry.name.clone());
    let next = last.as_deref().map(str::as_bytes);
    Ok(listing::answer(api, "/api/channels", &ChannelList { channels }, limit, next))
}
