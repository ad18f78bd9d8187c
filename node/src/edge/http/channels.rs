//! `GET /api/channels` and `GET /api/channels/{channel}`.

use axum::response::Response;
use fanfare_proto::http::{ChannelDetails, ChannelEntry, ChannelList};

use super::query::Query;
use super::{Api, listing};
use crate::auth::Principal;
use crate::edge::Services;
use crate::edge::errors::Refusal;
use crate::edge::socket::{ChannelPlace, ChannelsPage, Occupied, occupancy};
use crate::model::{ChannelName, Operation};

/// How many are at the channel, for whoever may listen there or see its members.
pub(super) async fn details(api: &Api, principal: &Principal, channel: &str) -> Result<Response, Refusal> {
    let sees_members = principal.allows(channel, Operation::Presence);
    let needed = if sees_members { Operation::Presence } else { Operation::Subscribe };
    let keys = [api.allowed_channel(principal, channel, needed)?].into();
    let Services { shards, hub, publisher, .. } = &*api.services;
    let counted = async { occupancy(shards, hub, publisher, keys).await?.pop() };
    let Occupied { occupancy, source } = listing::in_time(counted).await?;
    Ok(listing::of_node(api, &ChannelDetails { name: channel.to_owned(), occupancy, source }))
}

/// The account's channels that a connection of this node is attached to. The pages follow an order of the node's own, so
/// that the way from one to the next names no channel; each is sorted by name.
pub(super) async fn list(api: &Api, principal: &Principal, query: Option<&str>) -> Result<Response, Refusal> {
    let query = Query::new(query);
    let limit = query.limit(&api.services.limits);
    let after =
        listing::cursor(&query, |bytes| Some(ChannelPlace(u128::from_be_bytes(bytes.try_into().ok()?))))?;
    let page = ChannelsPage::new(limit, api.channel_order.clone(), after);
    let page = listing::walk(api, api.services.shards.channels(&principal.account.id, page)).await?;
    let (rows, last) = page.finish();
    let entry = |(name, connections, subscribers): (ChannelName, u64, u64)| ChannelEntry {
        name: name.as_str().to_owned(),
        connections,
        subscribers,
    };
    let channels = rows.into_iter().map(entry).collect();
    let next = last.map(|ChannelPlace(place)| place.to_be_bytes());
    let next = next.as_ref().map(<[u8; 16]>::as_slice);
    Ok(listing::answer(api, "/api/channels", &ChannelList { channels }, limit, next))
}
