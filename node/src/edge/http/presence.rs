//! `GET /api/channels/{channel}/presence` and `GET /api/presence`.

use std::cmp::Reverse;
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use fanfare_proto::http::{PresenceChannel, PresenceList, PresenceMember, write_presence_member};
use hyper::body::Frame;

use super::query::QueryString;
use super::{Api, listing};
use crate::auth::Principal;
use crate::edge::errors::HttpRefusal;
use crate::edge::socket::ChannelSortKey;
use crate::hub::PresentMember;
use crate::model::{ChannelName, MemberId, Operation};
use crate::telemetry::Limit;

/// Size of one piece of the answer; only the last member of a piece may exceed it.
const PIECE_BYTES: usize = 64 * 1024;

/// Lists the members of the channel, on all nodes.
pub(super) fn members(api: &Api, principal: &Principal, channel: &str) -> Result<Response, HttpRefusal> {
    let key = api.allowed_channel(principal, channel, Operation::Presence)?;
    let members = api.services.hub.members(&key);
    // Data that is replaced while the client reads stays in memory through this list.
    let bytes = members.iter().map(|(id, member)| {
        let data = member.data.as_ref().map_or(0, |data| data.get().len());
        size_of::<(MemberId, PresentMember)>() + id.client_id.as_str().len() + data
    });
    let permit = api.answers.take_now(&principal.account.id, bytes.sum());
    let permit = permit.inspect_err(|_| Limit::HttpAnswersBytes.hit())?;
    let members = members.into_iter();
    // Every node has all members, as far as the nodes can reach each other.
    let source = if api.services.hub.is_clustered() { "store" } else { "memory" };
    let mut response = Response::new(Body::new(MembersBody { members, source, begun: false, ended: false }));
    response.extensions_mut().insert(permit);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// Body that is serialized as the client takes it, so that a long list is never in memory as text.
struct MembersBody {
    members: std::vec::IntoIter<(MemberId, PresentMember)>,
    source: &'static str,
    begun: bool,
    ended: bool,
}

impl MembersBody {
    fn piece(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.begun {
            out.extend_from_slice(b"{\"members\":[");
        }
        while out.len() < PIECE_BYTES {
            let Some((id, member)) = self.members.next() else {
                self.ended = true;
                out.extend_from_slice(format!("],\"source\":\"{}\"}}", self.source).as_bytes());
                break;
            };
            if std::mem::replace(&mut self.begun, true) {
                out.push(b',');
            }
            let fields = PresenceMember {
                client_id: id.client_id.as_str(),
                connection_id: &id.connection_id.to_string(),
                data: member.data.as_deref(),
                updated_at: member.timestamp_ms,
            };
            write_presence_member(&mut out, &fields);
        }
        self.begun = true;
        out
    }
}

impl HttpBody for MembersBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        Poll::Ready(Some(Ok(Frame::data(self.piece().into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}

/// Lists the account's channels with members on this node, those with most members first.
pub(super) fn channels(
    api: &Api,
    principal: &Principal,
    query: Option<&str>,
) -> Result<Response, HttpRefusal> {
    let query = QueryString::new(query);
    let limit = query.limit(&api.services.limits);
    let after = listing::cursor(&query, PresenceSortKey::read)?;
    let crowded = api.services.hub.channel_member_counts(&principal.account.id).into_iter();
    let mut rows: Vec<(PresenceSortKey, ChannelName)> = crowded
        .map(|(name, members)| {
            (PresenceSortKey(Reverse(members as u64), api.channel_order.sort_key(&name)), name)
        })
        .filter(|(sort_key, _)| after.is_none_or(|after| *sort_key > after))
        .collect();
    rows.sort_unstable_by_key(|(sort_key, _)| *sort_key);
    let more = rows.len() > limit;
    rows.truncate(limit);
    let next = rows.last().filter(|_| more).map(|(sort_key, _)| sort_key.write());
    // Channels with equally many members are sorted by name.
    rows.sort_unstable_by(|(a, a_name), (b, b_name)| (a.0, a_name).cmp(&(b.0, b_name)));
    let entry = |(PresenceSortKey(Reverse(members), _), name): (PresenceSortKey, ChannelName)| {
        PresenceChannel { channel: name.as_str().into(), members }
    };
    let list = PresenceList { channels: rows.into_iter().map(entry).collect() };
    let next = next.as_ref().map(<[u8; 24]>::as_slice);
    Ok(listing::answer(api, "/api/presence", &list, limit, next))
}

/// Order of channels in the presence listing: by the number of members, which changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PresenceSortKey(Reverse<u64>, ChannelSortKey);

impl PresenceSortKey {
    fn write(&self) -> [u8; 24] {
        let Self(Reverse(members), ChannelSortKey(sort_key)) = self;
        let mut bytes = [0; 24];
        bytes[..8].copy_from_slice(&members.to_be_bytes());
        bytes[8..].copy_from_slice(&sort_key.to_be_bytes());
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (members, sort_key) = bytes.split_first_chunk()?;
        let sort_key = ChannelSortKey(u128::from_be_bytes(sort_key.try_into().ok()?));
        Some(Self(Reverse(u64::from_be_bytes(*members)), sort_key))
    }
}
