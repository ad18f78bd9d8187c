//! Datagrams between nodes: sealed for one receiver, accepted once, and only from senders that have answered.
//!
//! A sender is believed after it has sealed an answer to a random number of this node. So no recorded datagram, of this or an earlier
//! incarnation, makes a node look alive, and a fresh node needs no memory of earlier datagrams.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use super::window::AntiReplayWindow;
use crate::cluster::ClusterKey;
use crate::model::random_bytes;

/// The largest datagram that is sent or accepted.
pub(super) const DATAGRAM_BYTES_MAX: usize = 60_000;
const VERSION: u8 = 1;
/// Version, kind, incarnation of the sender and of the receiver, number of the datagram.
const HEADER_BYTES: usize = 1 + 1 + 8 + 8 + 8;
const TAG_BYTES: usize = 16;
const CHALLENGE_BYTES: usize = 8;
/// Receiver of a challenge: any node at the address, since the challenge asks for its identity.
const ANYBODY: u64 = 0;
/// More peers than any cluster has. Above this, the peer that was seen least recently is forgotten.
const PEERS_MAX: usize = 1024;
const CHALLENGES_MAX: usize = 1024;
/// Bound of challenges that strangers have caused: any stranger may replay a datagram that a node had sealed.
const CHALLENGES_OF_STRANGERS_MAX: usize = 256;
const CHALLENGE_LASTS: Duration = Duration::from_secs(3);
const PEER_LASTS: Duration = Duration::from_secs(15 * 60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum DatagramKind {
    Challenge = 1,
    Answer = 2,
    Gossip = 3,
}

impl DatagramKind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Challenge, Self::Answer, Self::Gossip].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// The reason why a datagram was dropped; its name is a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DatagramDropReason {
    Oversize,
    /// Too short, or not of a known kind.
    Malformed,
    /// Unknown version of this format.
    Version,
    /// Meant for another node or an earlier incarnation of this one, or sent by this node itself.
    Misaddressed,
    /// Sealed with no key of this cluster.
    Forged,
    /// Received before, or too old to decide.
    Stale,
    /// Sent by an incarnation that has not answered this node yet.
    Unproven,
}

impl DatagramDropReason {
    pub(super) const ALL: [Self; 7] = [
        Self::Oversize,
        Self::Malformed,
        Self::Version,
        Self::Misaddressed,
        Self::Forged,
        Self::Stale,
        Self::Unproven,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Oversize => "oversize",
            Self::Malformed => "malformed",
            Self::Version => "version",
            Self::Misaddressed => "misaddressed",
            Self::Forged => "forged",
            Self::Stale => "stale",
            Self::Unproven => "unproven",
        }
    }
}

/// Result of a datagram. Replies go to its source address; to a stranger there are at most two, no larger than the datagram.
#[derive(Debug, Default)]
pub(super) struct ReceivedDatagram {
    pub(super) gossip: Option<Vec<u8>>,
    pub(super) replies: Vec<Vec<u8>>,
    pub(super) dropped: Option<DatagramDropReason>,
}

struct GossipPeer {
    address: SocketAddr,
    key: LessSafeKey,
    window: AntiReplayWindow,
    last_seen: Instant,
}

struct GossipChallenge {
    number: [u8; CHALLENGE_BYTES],
    made: Instant,
    of_stranger: bool,
}

/// Sealing state of one node: its keys, the peers that have answered, and open challenges.
pub(super) struct DatagramSealer {
    cluster_key: ClusterKey,
    key: LessSafeKey,
    incarnation: u64,
    counter: u64,
    peers: HashMap<u64, GossipPeer>,
    by_address: HashMap<SocketAddr, u64>,
    challenges: HashMap<SocketAddr, GossipChallenge>,
    fresh: Vec<SocketAddr>,
}

impl DatagramSealer {
    pub(super) fn new(cluster_key: ClusterKey, incarnation: u64) -> Self {
        let key = keys_of(&cluster_key, incarnation).next().expect("a cluster key has a secret");
        Self {
            cluster_key,
            key,
            incarnation,
            // Random, so that even two incarnations that are equal by chance reuse no nonce: no incarnation counts this far.
            counter: u64::from_be_bytes(random_bytes()) >> 1,
            peers: HashMap::new(),
            by_address: HashMap::new(),
            challenges: HashMap::new(),
            fresh: Vec::new(),
        }
    }

    /// Seals gossip for the node at `to`. None if the message is too large, or if no node at that address has answered yet.
    pub(super) fn seal_gossip(&mut self, message: &[u8], to: SocketAddr) -> Option<Vec<u8>> {
        let receiver = *self.by_address.get(&to)?;
        if message.len() + HEADER_BYTES + TAG_BYTES > DATAGRAM_BYTES_MAX {
            return None;
        }
        Some(self.seal(DatagramKind::Gossip, receiver, message))
    }

    /// Asks for the identity of the node at an address. Also serves as probe: only a running node can answer.
    pub(super) fn challenge(&mut self, to: SocketAddr, now: Instant) -> Option<Vec<u8>> {
        self.challenge_at(to, now, false)
    }

    fn challenge_at(&mut self, to: SocketAddr, now: Instant, of_stranger: bool) -> Option<Vec<u8>> {
        self.challenges
            .retain(|_, challenge| now.saturating_duration_since(challenge.made) < CHALLENGE_LASTS);
        if !self.challenges.contains_key(&to) {
            let strangers = || self.challenges.values().filter(|challenge| challenge.of_stranger).count();
            if self.challenges.len() >= CHALLENGES_MAX
                || of_stranger && strangers() >= CHALLENGES_OF_STRANGERS_MAX
            {
                return None;
            }
        }
        let fresh = || GossipChallenge { number: crate::model::random_bytes(), made: now, of_stranger };
        // An answer to an earlier challenge may be on its way, so the number stays.
        let number = self.challenges.entry(to).or_insert_with(fresh).number;
        Some(self.seal(DatagramKind::Challenge, ANYBODY, &number))
    }

    /// Takes one datagram. Senders without a key of the cluster get no reply.
    pub(super) fn receive(&mut self, datagram: &[u8], from: SocketAddr, now: Instant) -> ReceivedDatagram {
        match self.open(datagram, from, now) {
            Ok(received) => received,
            Err(dropped) => ReceivedDatagram { dropped: Some(dropped), ..ReceivedDatagram::default() },
        }
    }

    fn open(
        &mut self,
        datagram: &[u8],
        from: SocketAddr,
        now: Instant,
    ) -> Result<ReceivedDatagram, DatagramDropReason> {
        if datagram.len() > DATAGRAM_BYTES_MAX {
            return Err(DatagramDropReason::Oversize);
        }
        let (header, sealed) =
            datagram.split_first_chunk::<HEADER_BYTES>().ok_or(DatagramDropReason::Malformed)?;
        if header[0] != VERSION {
            return Err(DatagramDropReason::Version);
        }
        let kind = DatagramKind::of(header[1]).ok_or(DatagramDropReason::Malformed)?;
        let [sender, receiver, counter] = [2, 10, 18].map(|at| number_at(header, at));
        if kind != DatagramKind::Gossip && sealed.len() != CHALLENGE_BYTES + TAG_BYTES {
            return Err(DatagramDropReason::Malformed);
        }
        let for_us = receiver == self.incarnation || kind == DatagramKind::Challenge && receiver == ANYBODY;
        if !for_us || sender == self.incarnation || sender == ANYBODY {
            return Err(DatagramDropReason::Misaddressed);
        }
        let open = |key: &LessSafeKey| {
            let mut sealed = sealed.to_vec();
            let plain = key.open_in_place(nonce(counter), Aad::from(header), &mut sealed).ok()?.len();
            sealed.truncate(plain);
            Some(sealed)
        };
        let Some(peer) = self.peers.get_mut(&sender) else {
            let mut keys = keys_of(&self.cluster_key, sender);
            let opened = keys.find_map(|key| open(&key).map(|plain| (key, plain)));
            drop(keys);
            let (key, plain) = opened.ok_or(DatagramDropReason::Forged)?;
            return self.take_from_stranger(kind, sender, counter, key, &plain, from, now);
        };
        let plain = open(&peer.key).ok_or(DatagramDropReason::Forged)?;
        if !peer.window.take(counter) {
            return Err(DatagramDropReason::Stale);
        }
        peer.last_seen = now;
        match kind {
            DatagramKind::Gossip => {
                Ok(ReceivedDatagram { gossip: Some(plain), ..ReceivedDatagram::default() })
            }
            DatagramKind::Challenge => {
                let answer = self.seal(DatagramKind::Answer, sender, &plain);
                Ok(ReceivedDatagram { replies: vec![answer], ..ReceivedDatagram::default() })
            }
            DatagramKind::Answer => {
                if self.is_answered(from, &plain) {
                    self.set_address(sender, from);
                }
                Ok(ReceivedDatagram::default())
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "they are the parts of one datagram")]
    fn take_from_stranger(
        &mut self,
        kind: DatagramKind,
        sender: u64,
        counter: u64,
        key: LessSafeKey,
        plain: &[u8],
        from: SocketAddr,
        now: Instant,
    ) -> Result<ReceivedDatagram, DatagramDropReason> {
        match kind {
            DatagramKind::Answer if self.is_answered(from, plain) => {
                self.evict_peer(now);
                let peer = GossipPeer {
                    address: from,
                    key,
                    window: AntiReplayWindow::above(counter),
                    last_seen: now,
                };
                self.peers.insert(sender, peer);
                self.set_address(sender, from);
                self.fresh.push(from);
                Ok(ReceivedDatagram::default())
            }
            DatagramKind::Answer => Err(DatagramDropReason::Stale),
            DatagramKind::Challenge => {
                let answer = self.seal(DatagramKind::Answer, sender, plain);
                let challenge = self.challenge_at(from, now, true);
                let replies = [answer].into_iter().chain(challenge).collect();
                Ok(ReceivedDatagram { replies, ..ReceivedDatagram::default() })
            }
            DatagramKind::Gossip => {
                let replies = self.challenge_at(from, now, true).into_iter().collect();
                Ok(ReceivedDatagram {
                    replies,
                    dropped: Some(DatagramDropReason::Unproven),
                    ..ReceivedDatagram::default()
                })
            }
        }
    }

    /// True if the answer fits the open challenge. Each challenge is answered once.
    fn is_answered(&mut self, from: SocketAddr, answer: &[u8]) -> bool {
        let answered = self.challenges.get(&from).is_some_and(|challenge| challenge.number == answer);
        if answered {
            self.challenges.remove(&from);
        }
        answered
    }

    fn set_address(&mut self, sender: u64, address: SocketAddr) {
        if let Some(peer) = self.peers.get_mut(&sender) {
            peer.address = address;
            self.by_address.insert(address, sender);
            let peers = &self.peers;
            self.by_address
                .retain(|address, sender| peers.get(sender).is_some_and(|peer| peer.address == *address));
        }
    }

    fn evict_peer(&mut self, now: Instant) {
        self.peers.retain(|_, peer| now.saturating_duration_since(peer.last_seen) < PEER_LASTS);
        if self.peers.len() >= PEERS_MAX
            && let Some((&eldest, _)) = self.peers.iter().min_by_key(|(_, peer)| peer.last_seen)
        {
            self.peers.remove(&eldest);
        }
    }

    /// Incarnations that have answered, and when each was last seen.
    pub(super) fn peers_seen(&self) -> impl Iterator<Item = (u64, Instant)> {
        self.peers.iter().map(|(incarnation, peer)| (*incarnation, peer.last_seen))
    }

    pub(super) fn address_of(&self, incarnation: u64) -> Option<SocketAddr> {
        self.peers.get(&incarnation).map(|peer| peer.address)
    }

    /// Gives the time at which a node at this address was last seen.
    pub(super) fn last_seen_at(&self, address: SocketAddr) -> Option<Instant> {
        self.by_address
            .get(&address)
            .and_then(|incarnation| self.peers.get(incarnation))
            .map(|peer| peer.last_seen)
    }

    /// Addresses of nodes that have answered for the first time since the last call.
    pub(super) fn take_fresh(&mut self) -> Vec<SocketAddr> {
        std::mem::take(&mut self.fresh)
    }

    fn seal(&mut self, kind: DatagramKind, receiver: u64, plain: &[u8]) -> Vec<u8> {
        self.counter += 1;
        let mut datagram = Vec::with_capacity(HEADER_BYTES + plain.len() + TAG_BYTES);
        datagram.extend([VERSION, kind as u8]);
        for number in [self.incarnation, receiver, self.counter] {
            datagram.extend(number.to_be_bytes());
        }
        let mut sealed = plain.to_vec();
        self.key
            .seal_in_place_append_tag(nonce(self.counter), Aad::from(&datagram[..]), &mut sealed)
            .expect("so few bytes can be sealed");
        datagram.extend(sealed);
        datagram
    }
}

/// The keys of one incarnation. Its counter makes every nonce a new one.
fn keys_of(cluster_key: &ClusterKey, incarnation: u64) -> impl Iterator<Item = LessSafeKey> {
    cluster_key.derive::<32>("gossip", &incarnation.to_be_bytes()).map(|secret| {
        let key = UnboundKey::new(&AES_256_GCM, &secret).expect("the secret has the length of the algorithm");
        LessSafeKey::new(key)
    })
}

fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[NONCE_LEN - 8..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

fn number_at(header: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_be_bytes(std::array::from_fn(|i| header[at + i]))
}

#[cfg(test)]
mod tests;
