//! `GET /api/channels/{channel}/presence` and `GET /api/presence`.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes, HttpBody};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use fanfare_proto::http::{PresenceChannel, PresenceList, PresenceMember, write_presence_member};
use hyper::body::Frame;

use super::query::Query;
use super::{Api, listing};
use crate::auth::Principal;
use crate::edge::errors::Refusal;
use crate::hub::Member;
use crate::model::{ChannelName, MemberId, Operation};

/// Of one piece of the answer, but for a last member that goes beyond it.
const PIECE_BYTES: usize = 64 * 1024;

/// Who is present on the channel, as this node knows it.
pub(super) fn members(api: &Api, principal: &Principal, channel: &str) -> Result<Response, Refusal> {
    let key = api.allowed_channel(principal, channel, Operation::Presence)?;
    let members = api.services.hub.members(&key).into_iter();
    let mut response = Response::new(Body::new(MembersBody { members, begun: false, ended: false }));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// Written as the client takes it, so that a long list is never in memory as text.
struct MembersBody {
    members: std::vec::IntoIter<(MemberId, Member)>,
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
                out.extend_from_slice(b"],\"source\":\"memory\"}");
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

/// The account's channels with members on this node, those with most first.
pub(super) fn channels(api: &Api, principal: &Principal, query: Option<&str>) -> Result<Response, Refusal> {
    let query = Query::new(query);
    let limit = query.limit();
    let after = listing::cursor(&query, Place::read)?;
    let channels = api.services.hub.crowded(&principal.account.id).into_iter();
    let mut places: Vec<Place> = channels
        .map(|(channel, members)| Place { members: members as u64, channel })
        .filter(|place| after.as_ref().is_none_or(|after| place.order() > after.order()))
        .collect();
    places.sort_unstable_by(|a, b| a.order().cmp(&b.order()));
    let more = places.len() > limit;
    places.truncate(limit);
    let next = places.last().filter(|_| more).map(Place::write);
    let entry = |Place { members, channel }| PresenceChannel { channel: channel.as_str().into(), members };
    let list = PresenceList { channels: places.into_iter().map(entry).collect() };
    Ok(listing::answer(api, "/api/presence", &list, limit, next.as_deref()))
}

/// Where a channel stands in the listing, which changes as members come and go.
struct Place {
    members: u64,
    channel: ChannelName,
}

impl Place {
    fn order(&self) -> (std::cmp::Reverse<u64>, &ChannelName) {
        (std::cmp::Reverse(self.members), &self.channel)
    }

    fn write(&self) -> Vec<u8> {
        [&self.members.to_be_bytes(), self.channel.as_str().as_bytes()].concat()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (members, channel) = bytes.split_first_chunk()?;
        let channel = ChannelName::new(std::str::from_utf8(channel).ok()?).ok()?;
        Some(Self { members: u64::from_be_bytes(*members), channel })
    }
}
