//! Items from peers: reads, checks and hands them on. Only this module creates `ForwardedMessages`.

pub(super) mod claims;
pub(super) mod connections;
mod ids;
mod presence;
#[cfg(test)]
mod tests;
mod traced;

use std::fmt;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use fanfare_proto::peer::v1;
use fanfare_proto::serial::Serial;
use serde_json::value::RawValue;

use connections::{attached_count, connection_id, takeover, tenant_connections};
use ids::{account_id, channel_key, client_id, is_id};

use crate::hub::ReplayHandoff;
use crate::model::{
    AccountId, AttachedCount, ChannelKey, ClientId, ClientMessageIds, ClosedSession, ForwardedMessages,
    ForwardedParts, ForwardedPresence, IdScope, RemoteMembersPage, Revocation, SessionOwner, SessionTakeover,
    SocketlessTakeover, Stamp, StampedIds,
};
pub use claims::{ClaimId, IdConflict, IdConflicts, NonceClaimAnswer, PeerNonce, PeerNoncePage};
pub use presence::PresenceSyncMessage;

/// Longest name that is accepted from a peer, in bytes: far above what any node allows its clients.
const NAME_BYTES_MAX: usize = 64 * 1024;
/// Largest connection count that is accepted from a peer, so that the sum over all nodes cannot overflow.
const CONNECTIONS_MAX: u64 = u32::MAX as u64;

/// One incarnation of another node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    pub node_id: Arc<str>,
    pub incarnation: u64,
}

/// Receiver of the items that peers send. No call may block, since it holds up its peer stream.
///
/// Items of one channel arrive in the order in which the peer sent them, each once.
pub trait Inbound: Send + Sync + 'static {
    fn forwarded(&self, from: &Peer, forwarded: ForwardedMessages);

    /// Announces the bytes of the batch whose items are handed on next. The peer coalesces items while its stream is busy.
    fn batch_received(&self, bytes: usize);

    /// Takes a change of the peer's interest, its answer to the interest of this node, or news of ended nodes.
    fn interest(&self, from: &Peer, interest: InterestMessage);

    /// Takes a request of the peer; None is a kind of a later minor version.
    fn request_received(&self, from: &Peer, number: u64, request: Option<PeerRequest>);

    fn answer_received(&self, from: &Peer, number: u64, answer: PeerAnswer);

    fn session_message_received(&self, from: &Peer, message: PeerSessionMessage);

    fn tenants(&self, from: &Peer, tenants: TenantCountMessage);

    /// Takes a presence change that was made at the peer.
    fn presence_changed(&self, from: &Peer, forwarded: ForwardedPresence);

    /// Takes a part of the peer's presence snapshot with this number.
    fn presence_members_received(&self, from: &Peer, number: u64, members: RemoteMembersPage);

    fn presence_sync_received(&self, from: &Peer, message: PresenceSyncMessage);

    /// Takes the message ids under which the peer has published, to remember them.
    fn ids_settled(&self, _from: &Peer, _scope: IdScope, _ids: StampedIds) {}

    /// Reports that items of the peer for this node are lost: the channels of the peer need a backfill.
    fn continuity_lost(&self, from: &Peer);

    /// Reports that the peer has opened a stream to this node.
    fn stream_opened(&self, _from: &Peer, _stream: u32) {}

    /// Reports the end of a peer stream. Unless it is `whole`, the peer may have acknowledged messages that did not arrive over this
    /// stream.
    fn stream_ended(&self, _from: &Peer, _stream: u32, _is_contiguous: bool) {}

    /// Reports that all streams to the peer are open, or no longer are. The last report is the current state.
    fn link(&self, to: &Peer, up: bool);
}

/// Interest of a peer, and the peer's answers to the interest of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InterestMessage {
    /// The peer has subscribers of the channel and expects a `Forwarding` answer. It has forwarded everything that it numbered there up
    /// to its `sequence`.
    Added {
        key: ChannelKey,
        number: u64,
        round: u64,
        sequence: u64,
    },
    Removed {
        key: ChannelKey,
    },
    /// End of the peer's interest snapshot on one of `streams` streams.
    SnapshotEnd {
        epoch: u64,
        streams: u32,
    },
    /// Request for a new interest snapshot of this node.
    SnapshotRequest,
    /// The peer forwards the channel from here on, after its own `sequence`. `retired` holds its last sequences of retired incarnations.
    Forwarding {
        key: ChannelKey,
        number: u64,
        sequence: u64,
        round: u64,
        retired: Vec<Stamp>,
    },
    /// Goodbye on one of `streams` streams: all items of the peer for this node were sent there, and the peer ends.
    Goodbye {
        streams: u32,
        /// True if other nodes have answered the handoff of every channel that the peer's clients may resume.
        is_all: bool,
    },
    /// Incarnations of which the peer knows that they have ended.
    IncarnationsEnded {
        incarnations: Vec<EndedIncarnation>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndedIncarnation {
    pub incarnation: u64,
    /// Time since the end was noticed, in milliseconds.
    pub ago_ms: u64,
    /// True after a goodbye with `is_all`.
    pub has_left: bool,
}

/// Message of a peer about the session of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerSessionMessage {
    /// The peer serves the session from now on.
    Takeover(SessionTakeover),
    /// The peer had no open socket of a session that this node has taken over.
    Socketless(SocketlessTakeover),
    /// The peer has closed the session for good.
    Closed(ClosedSession),
}

/// Connection counts of tenants at a peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TenantCountMessage {
    /// Connections of each tenant at the peer. A part that `begins`, the parts after it and one that `ends` form a snapshot; other parts
    /// are deltas.
    Connections { counts: Vec<(Arc<str>, u64)>, begins: bool, ends: bool },
    /// Request for a new snapshot of the counts of this node.
    Asked,
}

/// Request to another node; the answer carries the same number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerRequest {
    /// Messages after the channel position `after`, none older than `back_ms` milliseconds.
    Backfill { key: ChannelKey, after: Serial, back_ms: u64 },
    /// Close every connection of the account with this client id.
    CloseClient { account: AccountId, client_id: ClientId },
    /// Keep the replay buffer of the channel for the clients of the peer, which drains.
    AcceptHandoff { key: ChannelKey },
    /// Send the replay buffer of the channel, if it reaches back to the position `after`.
    FetchReplay { key: ChannelKey, after: Option<Serial> },
    /// Number of client connections of the node.
    Load,
    /// Claim a nonce: the node remembers the nonce and answers whether this is its first use.
    Claim(PeerNonce),
    /// One page of the remembered nonces, from the cursor `after` on.
    NoncesAsked { after: Option<Box<[u8]>> },
    /// Nonces to remember, from a node that leaves; `last` marks the last page.
    NoncesGiven { nonces: Vec<PeerNonce>, last: bool },
    /// Reject these tokens from now on.
    Revoke(Vec<Revocation>),
    /// The queues in the store have changed.
    QueuesChanged,
    /// Whether messages may be published under these ids.
    ClaimIds(Vec<ClientMessageIds>),
    /// Answer once all pending writes to the shared store can be read.
    Settle,
    /// Deliver this stored message to the subscribers of the channel, or tell them of a continuity loss.
    Deliver { key: ChannelKey, stamp: Stamp },
    /// Asks for the number of connections that are attached to each of these channels.
    Attached(Vec<ChannelKey>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerAnswer {
    /// The missed messages; None if the node does not have them all.
    Backfill(Option<Vec<ForwardedMessages>>),
    /// Number of connections that were closed.
    Closed(u64),
    /// True if the node keeps the channel.
    HandoffAccepted(bool),
    /// The replay buffer; None if messages are missing.
    ReplayHandoff(Option<Box<ReplayHandoff<ForwardedMessages>>>),
    /// Number of client connections.
    Loaded(u64),
    Claimed(NonceClaimAnswer),
    Nonces(PeerNoncePage),
    ClaimedIds(IdConflicts),
    /// One count for each requested channel, in their order.
    Attached(Vec<AttachedCount>),
    /// The request was carried out.
    Done,
    /// The node does not know the request, or cannot answer it.
    Unknown,
}

/// Fault of an item that no correct node sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MalformedItem(&'static str);

impl fmt::Display for MalformedItem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a peer's item has {}", self.0)
    }
}

impl std::error::Error for MalformedItem {}

/// Hands one item on. Skips a kind of a later minor version.
///
/// # Errors
/// The item is malformed, and nothing was handed on.
pub(super) fn take(item: v1::Item, from: &Peer, inbound: &dyn Inbound) -> Result<(), MalformedItem> {
    let key = |channel: Option<v1::Channel>| channel_key(channel.ok_or(MalformedItem("no channel"))?);
    let interest = match item.kind {
        Some(v1::item::Kind::Forward(forward)) => {
            if forward.incarnation != from.incarnation {
                return Err(MalformedItem("messages of another incarnation"));
            }
            let _span = traced::span_of(&forward, from);
            inbound.forwarded(from, forwarded(forward)?);
            return Ok(());
        }
        Some(v1::item::Kind::Interest(v1::Interest { channel, number, interested, round, sequence })) => {
            match interested {
                true => InterestMessage::Added { key: key(channel)?, number, round, sequence },
                false => InterestMessage::Removed { key: key(channel)? },
            }
        }
        Some(v1::item::Kind::InterestSnapshotEnd(v1::InterestSnapshotEnd { epoch, streams })) => {
            InterestMessage::SnapshotEnd { epoch, streams }
        }
        Some(v1::item::Kind::InterestSnapshotRequest(_)) => InterestMessage::SnapshotRequest,
        Some(v1::item::Kind::Joined(v1::Joined { channel, number, sequence, round, retired })) => {
            let retired = retired.into_iter().map(stamp).collect();
            InterestMessage::Forwarding { key: key(channel)?, number, sequence, round, retired }
        }
        Some(v1::item::Kind::Goodbye(v1::Goodbye { streams, not_all })) => {
            InterestMessage::Goodbye { streams, is_all: !not_all }
        }
        Some(v1::item::Kind::IncarnationsEnded(v1::IncarnationsEnded { incarnations })) => {
            InterestMessage::IncarnationsEnded {
                incarnations: incarnations.into_iter().map(ended_incarnation).collect(),
            }
        }
        Some(v1::item::Kind::SessionTakeover(taken)) => {
            inbound.session_message_received(from, PeerSessionMessage::Takeover(takeover(taken, from)?));
            return Ok(());
        }
        Some(v1::item::Kind::PresenceDelta(delta)) => {
            let change = presence::changed(delta, from)?;
            if let Some(change) = change.filter(|change| !presence::is_to_be_lost(change)) {
                inbound.presence_changed(from, change);
            }
            return Ok(());
        }
        Some(v1::item::Kind::PresenceSnapshot(part)) => {
            let (number, members) = presence::members(part, from)?;
            inbound.presence_members_received(from, number, members);
            return Ok(());
        }
        Some(v1::item::Kind::PresenceSync(message)) => {
            if let Some(message) = presence::sync_message(message)? {
                inbound.presence_sync_received(from, message);
            }
            return Ok(());
        }
        Some(v1::item::Kind::IdsSettled(settled)) => {
            let (scope, ids) = claims::settled(settled, from.incarnation)?;
            inbound.ids_settled(from, scope, ids);
            return Ok(());
        }
        Some(v1::item::Kind::Request(v1::Request { number, kind })) => {
            inbound.request_received(from, number, kind.map(request).transpose()?);
            return Ok(());
        }
        Some(v1::item::Kind::Answer(v1::Answer { number, kind })) => {
            inbound.answer_received(from, number, kind.map_or(Ok(PeerAnswer::Unknown), answer)?);
            return Ok(());
        }
        Some(v1::item::Kind::NotOpen(v1::NotOpen { connection_id, epoch })) => {
            let connection_id = self::connection_id(&connection_id)?;
            let socketless = SocketlessTakeover { connection_id, epoch };
            inbound.session_message_received(from, PeerSessionMessage::Socketless(socketless));
            return Ok(());
        }
        Some(v1::item::Kind::SessionClosed(v1::SessionClosed { connection_id, epoch })) => {
            let connection_id = self::connection_id(&connection_id)?;
            let owner = SessionOwner { epoch, incarnation: from.incarnation };
            let closed = ClosedSession { connection_id, owner };
            inbound.session_message_received(from, PeerSessionMessage::Closed(closed));
            return Ok(());
        }
        Some(v1::item::Kind::TenantConnections(connections)) => {
            inbound.tenants(from, tenant_connections(connections)?);
            return Ok(());
        }
        Some(v1::item::Kind::TenantConnectionsRequest(_)) => {
            inbound.tenants(from, TenantCountMessage::Asked);
            return Ok(());
        }
        _ => {
            tracing::debug!(peer = &*from.node_id, "unknown peer item skipped");
            return Ok(());
        }
    };
    inbound.interest(from, interest);
    Ok(())
}

fn request(kind: v1::request::Kind) -> Result<PeerRequest, MalformedItem> {
    match kind {
        v1::request::Kind::Backfill(v1::Backfill { channel, after, back_ms }) => {
            let key = channel_key(channel.ok_or(MalformedItem("no channel"))?)?;
            let after = Serial::of_whole(&after).map_err(|_| MalformedItem("a bad serial"))?;
            Ok(PeerRequest::Backfill { key, after, back_ms })
        }
        v1::request::Kind::CloseClient(v1::CloseClient { account, client_id }) => {
            let (account, client_id) = (account_id(&account)?, self::client_id(&client_id)?);
            Ok(PeerRequest::CloseClient { account, client_id })
        }
        v1::request::Kind::TakeOver(v1::TakeOver { channel }) => {
            Ok(PeerRequest::AcceptHandoff { key: channel_key(channel.ok_or(MalformedItem("no channel"))?)? })
        }
        v1::request::Kind::Load(_) => Ok(PeerRequest::Load),
        v1::request::Kind::FetchReplay(v1::FetchReplay { channel, after }) => {
            let key = channel_key(channel.ok_or(MalformedItem("no channel"))?)?;
            let after = (!after.is_empty()).then(|| Serial::of_whole(&after)).transpose();
            Ok(PeerRequest::FetchReplay { key, after: after.map_err(|_| MalformedItem("a bad serial"))? })
        }
        v1::request::Kind::Claim(v1::Claim { nonce }) => {
            Ok(PeerRequest::Claim(claims::nonce(nonce.ok_or(MalformedItem("no nonce"))?)?))
        }
        v1::request::Kind::NoncesRequest(v1::NoncesRequest { after }) => {
            Ok(PeerRequest::NoncesAsked { after: (!after.is_empty()).then(|| after.as_ref().into()) })
        }
        v1::request::Kind::NoncesHandoff(v1::NoncesHandoff { nonces, last }) => {
            Ok(PeerRequest::NoncesGiven { nonces: claims::nonces(nonces)?, last })
        }
        v1::request::Kind::QueuesChanged(v1::QueuesChanged {}) => Ok(PeerRequest::QueuesChanged),
        v1::request::Kind::Revoke(v1::Revoke { revocations }) => {
            Ok(PeerRequest::Revoke(claims::revocations(revocations)?))
        }
        v1::request::Kind::ClaimIds(v1::ClaimIds { ids }) => {
            Ok(PeerRequest::ClaimIds(ids.into_iter().map(claims::ids).collect::<Result<_, _>>()?))
        }
        v1::request::Kind::Settle(v1::Settle {}) => Ok(PeerRequest::Settle),
        v1::request::Kind::Deliver(deliver) => {
            let key = channel_key(deliver.channel.ok_or(MalformedItem("no channel"))?)?;
            Ok(PeerRequest::Deliver { key, stamp: stamp(deliver.stamp.ok_or(MalformedItem("no stamp"))?) })
        }
        v1::request::Kind::AttachedRequest(v1::AttachedRequest { channels }) => {
            Ok(PeerRequest::Attached(channels.into_iter().map(channel_key).collect::<Result<_, _>>()?))
        }
    }
}

fn answer(kind: v1::answer::Kind) -> Result<PeerAnswer, MalformedItem> {
    match kind {
        v1::answer::Kind::Backfilled(v1::Backfilled { forwards, complete }) => {
            let forwarded = forwards.into_iter().map(forwarded).collect::<Result<Vec<_>, _>>()?;
            Ok(PeerAnswer::Backfill(complete.then_some(forwarded)))
        }
        v1::answer::Kind::Closed(v1::Closed { connections }) => {
            Ok(PeerAnswer::Closed(connections.min(CONNECTIONS_MAX)))
        }
        v1::answer::Kind::Loaded(v1::Loaded { connections }) => {
            Ok(PeerAnswer::Loaded(connections.min(CONNECTIONS_MAX)))
        }
        v1::answer::Kind::TakenOver(v1::TakenOver { done }) => Ok(PeerAnswer::HandoffAccepted(done)),
        v1::answer::Kind::ReplayBuffer(handed) => replay_handoff(handed).map(PeerAnswer::ReplayHandoff),
        v1::answer::Kind::Claimed(v1::Claimed { first, counts, now_ms }) => {
            Ok(PeerAnswer::Claimed(NonceClaimAnswer { first, counts, now_ms }))
        }
        v1::answer::Kind::Nonces(nonces) => Ok(PeerAnswer::Nonces(claims::known(nonces)?)),
        v1::answer::Kind::ClaimedIds(claimed) => Ok(PeerAnswer::ClaimedIds(claims::taken(claimed)?)),
        v1::answer::Kind::AttachedCounts(v1::AttachedCounts { counts }) => {
            Ok(PeerAnswer::Attached(counts.into_iter().map(attached_count).collect()))
        }
        v1::answer::Kind::Done(v1::Done {}) => Ok(PeerAnswer::Done),
        _ => Ok(PeerAnswer::Unknown),
    }
}

fn replay_handoff(
    handed: v1::ReplayBuffer,
) -> Result<Option<Box<ReplayHandoff<ForwardedMessages>>>, MalformedItem> {
    let v1::ReplayBuffer { begin, end, forwards, ages_ms, complete } = handed;
    if forwards.len() != ages_ms.len() {
        return Err(MalformedItem("not an age for each message"));
    }
    let forwards = forwards.into_iter().map(forwarded).collect::<Result<Vec<_>, _>>()?;
    // More incarnations than a node ever sends for a channel.
    if begin.len().max(end.len()) > Serial::RUNS_MAX {
        return Ok(None);
    }
    let [begin, end] = [begin, end].map(|stamps| {
        let mut serial = Serial::default();
        stamps.iter().for_each(|stamp| serial.advance(stamp.incarnation, stamp.sequence));
        serial
    });
    let messages = forwards.into_iter().zip(ages_ms).collect();
    Ok(complete.then(|| Box::new(ReplayHandoff { begin, end, messages })))
}

fn ended_incarnation(
    v1::EndedIncarnation { incarnation, ago_ms, left: has_left }: v1::EndedIncarnation,
) -> EndedIncarnation {
    EndedIncarnation { incarnation, ago_ms, has_left }
}

fn stamp(stamp: v1::Stamp) -> Stamp {
    Stamp { incarnation: stamp.incarnation, sequence: stamp.sequence }
}

fn forwarded(forward: v1::Forward) -> Result<ForwardedMessages, MalformedItem> {
    let key = channel_key(forward.channel.ok_or(MalformedItem("no channel"))?)?;
    let connection_id = connection_id(&forward.connection_id)?;
    let client_id = forward.client_id.as_deref().map(client_id).transpose()?;
    if forward.first == 0 || forward.last < forward.first {
        return Err(MalformedItem("no sequences"));
    }
    if forward.last - forward.first != (forward.messages.len() as u64).wrapping_sub(1) {
        return Err(MalformedItem("not a message for each sequence"));
    }
    // Subscribers receive the text unchanged, so its form is checked here.
    let is_object =
        |text: &Bytes| text.first() == Some(&b'{') && serde_json::from_slice::<&RawValue>(text).is_ok();
    if !forward.messages.iter().all(is_object) {
        return Err(MalformedItem("a message that is no JSON object"));
    }
    let text_bytes = forward.messages.iter().map(|text| text.len() as u64).sum();
    let parts = ForwardedParts {
        incarnation: forward.incarnation,
        first: forward.first,
        last: forward.last,
        timestamp_ms: forward.timestamp_ms,
        connection_id,
        client_id,
        messages: copied(&forward.messages),
        // The counted bytes are a part of the text.
        bytes: forward.bytes.min(text_bytes),
    };
    Ok(ForwardedMessages::new(key, parts))
}

/// Copies the messages out of their batch: the replay buffer keeps them, and a slice would keep the whole batch in memory.
fn copied(messages: &[Bytes]) -> Vec<Bytes> {
    let mut all = BytesMut::with_capacity(messages.iter().map(Bytes::len).sum());
    messages.iter().for_each(|text| all.extend_from_slice(text));
    let mut all = all.freeze();
    messages.iter().map(|text| all.split_to(text.len())).collect()
}

/// Converts the messages that a failed node stored but did not forward.
pub(super) fn stored(key: &ChannelKey, stored: Vec<ForwardedParts>) -> Vec<ForwardedMessages> {
    stored.into_iter().map(|parts| ForwardedMessages::new(key.clone(), parts)).collect()
}
