//! `GET /api/channels`.

use axum::response::Response;
use fanfare_proto::http::{ChannelEntry, ChannelList};

use super::query::Query;
use super::{Api, listing};
use crate::auth::Principal;
use crate::edge::errors::Refusal;
use crate::edge::socket::{ChannelPlace, ChannelsPage};
use crate::model::ChannelName;

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
