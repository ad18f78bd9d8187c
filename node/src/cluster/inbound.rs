//! What comes from other nodes: read, checked, and handed on. The only maker of `Forwarded`.

pub(super) mod connections;
pub(super) mod once;
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

use connections::{attached_count, connection_id, taken_up, tenant_connections};

use crate::hub::HandedOver;
use crate::model::{
    AccountId, AttachedCount, ChannelKey, ChannelName, ClientId, Forwarded, ForwardedParts,
    ForwardedPresence, GivenIds, IdScope, NotOpen, Over, Owner, Revocation, Stamp, StampedIds, TakenUp,
    ToldMembers, check_name,
};
pub use once::{ClaimId, Claimed, NoncesKnown, Taken, TakenIds, ToldNonce};
pub use presence::PresenceSaid;

/// Far above what any node may allow its clients.
const NAME_BYTES_MAX: usize = 64 * 1024;
/// Far above what any node can have, and far below where a sum of all nodes ends.
const CONNECTIONS_MAX: u64 = u32::MAX as u64;

/// A run of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    pub node_id: Arc<str>,
    pub incarnation: u64,
}

/// Who takes what other nodes send. No call may block: it holds up its lane.
///
/// What concerns one channel comes in the order in which the peer sent it, each item once.
pub trait Inbound: Send + Sync + 'static {
    fn forwarded(&self, from: &Peer, forwarded: Forwarded);

    /// What is handed on next came together, so many bytes, and had gathered on its way if its lane was busy.
    fn batch_came(&self, bytes: usize);

    /// What the peer wants of this node, or has begun to give.
    fn interest(&self, from: &Peer, interest: Interest);

    /// None is what a later minor may ask.
    fn asked(&self, from: &Peer, number: u64, request: Option<Request>);

    fn answered(&self, from: &Peer, number: u64, answer: Answer);

    fn connection_said(&self, from: &Peer, said: ConnectionSaid);

    fn tenants(&self, from: &Peer, tenants: Tenants);

    /// A change of a member that the peer has made.
    fn presence_changed(&self, from: &Peer, forwarded: ForwardedPresence);

    /// A part of the members that the peer has, of the telling of that number.
    fn presence_told(&self, from: &Peer, number: u64, members: ToldMembers);

    fn presence_said(&self, from: &Peer, said: PresenceSaid);

    /// Published by the peer under ids that are to be remembered.
    fn ids_settled(&self, _from: &Peer, _scope: IdScope, _ids: StampedIds) {}

    /// Items that the peer had for this node are lost: its channels are to be refilled.
    fn continuity_lost(&self, from: &Peer);

    /// The peer has opened a lane to this node.
    fn lane_opened(&self, _from: &Peer, _lane: u32) {}

    /// Nothing more comes over it. Unless it is `whole`, the peer may have acknowledged what should have come over it.
    fn lane_ended(&self, _from: &Peer, _lane: u32, _whole: bool) {}

    /// All lanes to the peer are open, or not any more. What was reported last is the state.
    fn link(&self, to: &Peer, up: bool);
}

/// Who is to get which channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Interest {
    /// The peer wants the channel, and is to be told where it stands. It has forwarded all that it has numbered there up to `sequence`.
    Wanted {
        key: ChannelKey,
        number: u64,
        round: u64,
        sequence: u64,
    },
    NotWanted {
        key: ChannelKey,
    },
    /// One of so many lanes has told all that the peer wants.
    Said {
        epoch: u64,
        lanes: u32,
    },
    /// All that is wanted here is to be told the peer anew.
    Asked,
    /// The peer forwards the channel from here on, and had numbered so much of it before; what it has of runs that are gone.
    Joined {
        key: ChannelKey,
        number: u64,
        sequence: u64,
        round: u64,
        gone: Vec<Stamp>,
    },
    /// One of so many lanes has told all that there was for this node, and the peer ends.
    Left {
        lanes: u32,
        /// All that its clients may come back to was taken over.
        is_all: bool,
    },
    /// Of these runs of nodes the peer knows that they have ended.
    Ended {
        runs: Vec<EndedRun>,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct EndedRun {
    pub incarnation: u64,
    /// Since that was noticed.
    pub ago_ms: u64,
    /// It has said goodbye, and all that its clients may come back to was taken over.
    pub has_left: bool,
}

/// What a peer says of a connection of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConnectionSaid {
    /// It is served there from now on.
    TakenUp(TakenUp),
    /// It was taken up here, and had no open socket there.
    NotOpen(NotOpen),
    /// It has ended for good there.
    Over(Over),
}

/// What nodes say of the connections of tenants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Tenants {
    /// So many connections of each at the peer. What begins and what ends says all of them, in parts; else it is what has changed.
    Connections { counts: Vec<(Arc<str>, u64)>, begins: bool, ends: bool },
    /// All tenants with connections here are to be told the peer anew.
    Asked,
}

/// What one node asks another, under a number that the answer has too.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// All messages that whoever has this position has not, none older than `back_ms`.
    Refill { key: ChannelKey, after: Serial, back_ms: u64 },
    /// Every connection of the account under this client id is to be closed.
    CloseClient { account: AccountId, client_id: ClientId },
    /// The channel is to be kept for the clients of the peer, which leaves.
    TakeOver { key: ChannelKey },
    /// All recent messages of a channel, if what follows this position is among them.
    HandOver { key: ChannelKey, after: Option<Serial> },
    /// How many connections there are.
    Load,
    /// Whether the nonce is used for the first time; it is remembered.
    Claim(ToldNonce),
    /// The nonces that are remembered, from that place on.
    NoncesAsked { after: Option<Box<[u8]>> },
    /// These are to be remembered; with the last of them the asking node says that it goes.
    NoncesGiven { nonces: Vec<ToldNonce>, last: bool },
    /// These tokens are not to be taken any more.
    Revoke(Vec<Revocation>),
    /// The queues in the store have changed.
    QueuesChanged,
    /// Whether messages may be published under these ids.
    ClaimIds(Vec<GivenIds>),
    /// What is on its way to the store that nodes share is to be there.
    Settle,
    /// All who are attached to the channel are to have this message of the store, or to be told of a loss.
    Deliver { key: ChannelKey, stamp: Stamp },
    /// How many connections are attached to each of these channels.
    Attached(Vec<ChannelKey>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// None where they are not all there.
    Refilled(Option<Vec<Forwarded>>),
    /// So many connections.
    Closed(u64),
    /// Whether it is kept.
    TakenOver(bool),
    /// None where something is missing.
    HandedOver(Option<Box<HandedOver<Forwarded>>>),
    /// So many connections.
    Loaded(u64),
    Claimed(Claimed),
    Nonces(NoncesKnown),
    ClaimedIds(TakenIds),
    /// One for each channel, in their order.
    Attached(Vec<AttachedCount>),
    /// What was asked for is done.
    Done,
    /// The request is not known there.
    Unknown,
}

/// The item holds what no node sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(&'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a peer's item has {}", self.0)
    }
}

impl std::error::Error for Malformed {}

/// Hands one item on. A kind that came with a later minor is passed over.
///
/// # Errors
/// Nothing was handed on.
pub(super) fn take(item: v1::Item, from: &Peer, inbound: &dyn Inbound) -> Result<(), Malformed> {
    let key = |channel: Option<v1::Channel>| channel_key(channel.ok_or(Malformed("no channel"))?);
    let interest = match item.kind {
        Some(v1::item::Kind::Forward(forward)) => {
            if forward.incarnation != from.incarnation {
                return Err(Malformed("messages of another run"));
            }
            let _span = traced::span_of(&forward, from);
            inbound.forwarded(from, forwarded(forward)?);
            return Ok(());
        }
        Some(v1::item::Kind::Interest(v1::Interest { channel, number, wanted, round, sequence })) => {
            match wanted {
                true => Interest::Wanted { key: key(channel)?, number, round, sequence },
                false => Interest::NotWanted { key: key(channel)? },
            }
        }
        Some(v1::item::Kind::InterestSaid(v1::InterestSaid { epoch, lanes })) => {
            Interest::Said { epoch, lanes }
        }
        Some(v1::item::Kind::InterestAsked(_)) => Interest::Asked,
        Some(v1::item::Kind::Joined(v1::Joined { channel, number, sequence, round, gone })) => {
            let gone = gone.into_iter().map(stamp).collect();
            Interest::Joined { key: key(channel)?, number, sequence, round, gone }
        }
        Some(v1::item::Kind::Goodbye(v1::Goodbye { lanes, not_all })) => {
            Interest::Left { lanes, is_all: !not_all }
        }
        Some(v1::item::Kind::RunsEnded(v1::RunsEnded { runs })) => {
            Interest::Ended { runs: runs.into_iter().map(ended_run).collect() }
        }
        Some(v1::item::Kind::TakenUp(taken)) => {
            inbound.connection_said(from, ConnectionSaid::TakenUp(taken_up(taken, from)?));
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
            inbound.presence_told(from, number, members);
            return Ok(());
        }
        Some(v1::item::Kind::PresenceSaid(said)) => {
            if let Some(said) = presence::said(said)? {
                inbound.presence_said(from, said);
            }
            return Ok(());
        }
        Some(v1::item::Kind::IdsSettled(settled)) => {
            let (scope, ids) = once::settled(settled, from.incarnation)?;
            inbound.ids_settled(from, scope, ids);
            return Ok(());
        }
        Some(v1::item::Kind::Request(v1::Request { number, kind })) => {
            inbound.asked(from, number, kind.map(request).transpose()?);
            return Ok(());
        }
        Some(v1::item::Kind::Answer(v1::Answer { number, kind })) => {
            inbound.answered(from, number, kind.map_or(Ok(Answer::Unknown), answer)?);
            return Ok(());
        }
        Some(v1::item::Kind::NotOpen(v1::NotOpen { connection_id, epoch })) => {
            let connection_id = self::connection_id(&connection_id)?;
            inbound.connection_said(from, ConnectionSaid::NotOpen(NotOpen { connection_id, epoch }));
            return Ok(());
        }
        Some(v1::item::Kind::ConnectionOver(v1::ConnectionOver { connection_id, epoch })) => {
            let connection_id = self::connection_id(&connection_id)?;
            let owner = Owner { epoch, incarnation: from.incarnation };
            inbound.connection_said(from, ConnectionSaid::Over(Over { connection_id, owner }));
            return Ok(());
        }
        Some(v1::item::Kind::TenantConnections(connections)) => {
            inbound.tenants(from, tenant_connections(connections)?);
            return Ok(());
        }
        Some(v1::item::Kind::TenantConnectionsAsked(_)) => {
            inbound.tenants(from, Tenants::Asked);
            return Ok(());
        }
        _ => {
            tracing::debug!(peer = &*from.node_id, "item of an unknown kind passed over");
            return Ok(());
        }
    };
    inbound.interest(from, interest);
    Ok(())
}

fn request(kind: v1::request::Kind) -> Result<Request, Malformed> {
    match kind {
        v1::request::Kind::Refill(v1::Refill { channel, after, back_ms }) => {
            let key = channel_key(channel.ok_or(Malformed("no channel"))?)?;
            let after = Serial::of_whole(&after).map_err(|_| Malformed("a bad serial"))?;
            Ok(Request::Refill { key, after, back_ms })
        }
        v1::request::Kind::CloseClient(v1::CloseClient { account, client_id }) => {
            let (account, client_id) = (account_id(&account)?, self::client_id(&client_id)?);
            Ok(Request::CloseClient { account, client_id })
        }
        v1::request::Kind::TakeOver(v1::TakeOver { channel }) => {
            Ok(Request::TakeOver { key: channel_key(channel.ok_or(Malformed("no channel"))?)? })
        }
        v1::request::Kind::Load(_) => Ok(Request::Load),
        v1::request::Kind::HandOver(v1::HandOver { channel, after }) => {
            let key = channel_key(channel.ok_or(Malformed("no channel"))?)?;
            let after = (!after.is_empty()).then(|| Serial::of_whole(&after)).transpose();
            Ok(Request::HandOver { key, after: after.map_err(|_| Malformed("a bad serial"))? })
        }
        v1::request::Kind::Claim(v1::Claim { nonce }) => {
            Ok(Request::Claim(once::nonce(nonce.ok_or(Malformed("no nonce"))?)?))
        }
        v1::request::Kind::NoncesAsked(v1::NoncesAsked { after }) => {
            Ok(Request::NoncesAsked { after: (!after.is_empty()).then(|| after.as_ref().into()) })
        }
        v1::request::Kind::NoncesGiven(v1::NoncesGiven { nonces, last }) => {
            Ok(Request::NoncesGiven { nonces: once::nonces(nonces)?, last })
        }
        v1::request::Kind::QueuesChanged(v1::QueuesChanged {}) => Ok(Request::QueuesChanged),
        v1::request::Kind::Revoke(v1::Revoke { revocations }) => {
            Ok(Request::Revoke(once::revocations(revocations)?))
        }
        v1::request::Kind::ClaimIds(v1::ClaimIds { ids }) => {
            Ok(Request::ClaimIds(ids.into_iter().map(once::ids).collect::<Result<_, _>>()?))
        }
        v1::request::Kind::Settle(v1::Settle {}) => Ok(Request::Settle),
        v1::request::Kind::Deliver(deliver) => {
            let key = channel_key(deliver.channel.ok_or(Malformed("no channel"))?)?;
            Ok(Request::Deliver { key, stamp: stamp(deliver.stamp.ok_or(Malformed("no stamp"))?) })
        }
        v1::request::Kind::AttachedAsked(v1::AttachedAsked { channels }) => {
            Ok(Request::Attached(channels.into_iter().map(channel_key).collect::<Result<_, _>>()?))
        }
    }
}

fn answer(kind: v1::answer::Kind) -> Result<Answer, Malformed> {
    match kind {
        v1::answer::Kind::Refilled(v1::Refilled { forwards, complete }) => {
            let forwarded = forwards.into_iter().map(forwarded).collect::<Result<Vec<_>, _>>()?;
            Ok(Answer::Refilled(complete.then_some(forwarded)))
        }
        v1::answer::Kind::Closed(v1::Closed { connections }) => {
            Ok(Answer::Closed(connections.min(CONNECTIONS_MAX)))
        }
        v1::answer::Kind::Loaded(v1::Loaded { connections }) => {
            Ok(Answer::Loaded(connections.min(CONNECTIONS_MAX)))
        }
        v1::answer::Kind::TakenOver(v1::TakenOver { done }) => Ok(Answer::TakenOver(done)),
        v1::answer::Kind::HandedOver(handed) => handed_over(handed).map(Answer::HandedOver),
        v1::answer::Kind::Claimed(v1::Claimed { first, counts, now_ms }) => {
            Ok(Answer::Claimed(Claimed { first, counts, now_ms }))
        }
        v1::answer::Kind::Nonces(nonces) => Ok(Answer::Nonces(once::known(nonces)?)),
        v1::answer::Kind::ClaimedIds(claimed) => Ok(Answer::ClaimedIds(once::taken(claimed)?)),
        v1::answer::Kind::AttachedCounts(v1::AttachedCounts { counts }) => {
            Ok(Answer::Attached(counts.into_iter().map(attached_count).collect()))
        }
        v1::answer::Kind::Done(v1::Done {}) => Ok(Answer::Done),
        _ => Ok(Answer::Unknown),
    }
}

fn handed_over(handed: v1::HandedOver) -> Result<Option<Box<HandedOver<Forwarded>>>, Malformed> {
    let v1::HandedOver { begin, end, forwards, ages_ms, complete } = handed;
    if forwards.len() != ages_ms.len() {
        return Err(Malformed("not an age for each message"));
    }
    let forwards = forwards.into_iter().map(forwarded).collect::<Result<Vec<_>, _>>()?;
    // More than a node tells of a channel.
    if begin.len().max(end.len()) > Serial::RUNS_MAX {
        return Ok(None);
    }
    let [begin, end] = [begin, end].map(|stamps| {
        let mut serial = Serial::default();
        stamps.iter().for_each(|stamp| serial.advance(stamp.incarnation, stamp.sequence));
        serial
    });
    let messages = forwards.into_iter().zip(ages_ms).collect();
    Ok(complete.then(|| Box::new(HandedOver { begin, end, messages })))
}

fn ended_run(v1::EndedRun { incarnation, ago_ms, left: has_left }: v1::EndedRun) -> EndedRun {
    EndedRun { incarnation, ago_ms, has_left }
}

fn stamp(stamp: v1::Stamp) -> Stamp {
    Stamp { incarnation: stamp.incarnation, sequence: stamp.sequence }
}

fn forwarded(forward: v1::Forward) -> Result<Forwarded, Malformed> {
    let key = channel_key(forward.channel.ok_or(Malformed("no channel"))?)?;
    let connection_id = connection_id(&forward.connection_id)?;
    let client_id = forward.client_id.as_deref().map(client_id).transpose()?;
    if forward.first == 0 || forward.last < forward.first {
        return Err(Malformed("no sequences"));
    }
    if forward.last - forward.first != (forward.messages.len() as u64).wrapping_sub(1) {
        return Err(Malformed("not a message for each sequence"));
    }
    // Subscribers get it as it stands.
    let is_object =
        |text: &Bytes| text.first() == Some(&b'{') && serde_json::from_slice::<&RawValue>(text).is_ok();
    if !forward.messages.iter().all(is_object) {
        return Err(Malformed("a message that is no JSON object"));
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
        // A part of the text is what counts.
        bytes: forward.bytes.min(text_bytes),
    };
    Ok(Forwarded::new(key, parts))
}

/// Each is kept for as long as somebody may come back, and with a slice the whole batch would be that it came in.
fn copied(messages: &[Bytes]) -> Vec<Bytes> {
    let mut all = BytesMut::with_capacity(messages.iter().map(Bytes::len).sum());
    messages.iter().for_each(|text| all.extend_from_slice(text));
    let mut all = all.freeze();
    messages.iter().map(|text| all.split_to(text.len())).collect()
}

/// What another node has stored and not forwarded: it was on its way when that node died.
pub(super) fn stored(key: &ChannelKey, stored: Vec<ForwardedParts>) -> Vec<Forwarded> {
    stored.into_iter().map(|parts| Forwarded::new(key.clone(), parts)).collect()
}

/// What a peer allows its clients holds here too, so only the form is checked.
fn channel_key(channel: v1::Channel) -> Result<ChannelKey, Malformed> {
    let v1::Channel { account, name } = channel;
    let account = account_id(&account)?;
    if check_name(&name, NAME_BYTES_MAX).is_err() || name.starts_with('[') {
        return Err(Malformed("a bad channel"));
    }
    Ok(ChannelKey::new(account, ChannelName::stored(&name)))
}

fn account_id(account: &str) -> Result<AccountId, Malformed> {
    if !is_id(account) {
        return Err(Malformed("a bad account"));
    }
    Ok(AccountId::new(account))
}

/// Of an account or a tenant.
fn is_id(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !id.is_empty() && id.len() <= 64 && id.bytes().all(plain)
}

fn client_id(id: &str) -> Result<ClientId, Malformed> {
    check_name(id, NAME_BYTES_MAX).map_err(|_| Malformed("a bad clientId"))?;
    Ok(ClientId::stored(id))
}
