//! `GET /api/channels` and `GET /api/channels/{channel}`.

use axum::response::Response;
use fanfare_proto::http::{ChannelDetails, ChannelEntry, ChannelList};

use super::query::QueryString;
use super::{Api, listing};
use crate::auth::Principal;
use crate::edge::ApiServices;
use crate::edge::errors::HttpRefusal;
use crate::edge::socket::{ChannelSortKey, ChannelsPage, CountedOccupancy, occupancy};
use crate::model::{ChannelName, Operation};

/// Occupancy of the channel, for callers that may subscribe there or see its members.
pub(super) async fn details(
    api: &Api,
    principal: &Principal,
    channel: &str,
) -> Result<Response, HttpRefusal> {
    let sees_members = principal.allows(channel, Operation::Presence);
    let needed = if sees_members { Operation::Presence } else { Operation::Subscribe };
    let keys = [api.allowed_channel(principal, channel, needed)?].into();
    let ApiServices { shards, hub, publisher, .. } = &*api.services;
    let counted = async { occupancy(shards, hub, publisher, keys).await?.pop() };
    let CountedOccupancy { occupancy, source } = listing::in_time(counted).await?;
    Ok(listing::of_node(api, &ChannelDetails { name: channel.to_owned(), occupancy, source }))
}

/// Lists the account's channels with a connection on this node. Pages follow an order of the node's own, so that cursors name no channel;
/// each page is sorted by name.
pub(super) async fn list(
    api: &Api,
    principal: &Principal,
    query: Option<&str>,
) -> Result<Response, HttpRefusal> {
    let query = QueryString::new(query);
    let limit = query.limit(&api.services.limits);
    let after =
        listing::cursor(&query, |bytes| Some(ChannelSortKey(u128::from_be_bytes(bytes.try_into().ok()?))))?;
    let page = ChannelsPage::new(limit, api.channel_order.clone(), after);
    let page = listing::walk(api, api.services.shards.channels(&principal.account.id, page)).await?;
    let (rows, last) = page.finish();
    let entry = |(name, connections, subscribers): (ChannelName, u64, u64)| ChannelEntry {
        name: name.as_str().to_owned(),
        connections,
        subscribers,
    };
    let channels = rows.into_iter().map(entry).collect();
    let next = last.map(|ChannelSortKey(hash)| hash.to_be_bytes());
    let next = next.as_ref().map(<[u8; 16]>::as_slice);
    Ok(listing::answer(api, "/api/channels", &ChannelList { channels }, limit, next))
}
