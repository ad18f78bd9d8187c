//! Datagrams between nodes: sealed, each for one receiver, taken once, and from senders alone that have answered.
//!
//! A sender is believed after it has sealed an answer to a random number of ours. So nothing that was recorded, from this
//! run of a node or a former one, makes it look alive, and a fresh node needs no memory of what it saw.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};

use super::window::Window;
use crate::cluster::ClusterKey;
use crate::model::random_bytes;

/// The largest datagram that is sent or taken.
pub(super) const DATAGRAM_BYTES_MAX: usize = 60_000;
const VERSION: u8 = 1;
/// Version, kind, incarnation of the sender, of the receiver, number of the datagram.
const HEADER_BYTES: usize = 1 + 1 + 8 + 8 + 8;
const TAG_BYTES: usize = 16;
const CHALLENGE_BYTES: usize = 8;
/// A challenge goes to whoever has the address, since it asks who that is.
const ANYBODY: u64 = 0;
/// More than any cluster has nodes; above it, who was heard least recently is forgotten.
const PEERS_MAX: usize = 1024;
const CHALLENGES_MAX: usize = 1024;
/// Of these, such as strangers have caused: anybody may send again what a node had sealed.
const CHALLENGES_OF_STRANGERS_MAX: usize = 256;
const CHALLENGE_LASTS: Duration = Duration::from_secs(3);
const PEER_LASTS: Duration = Duration::from_secs(15 * 60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
enum Kind {
    Challenge = 1,
    Answer = 2,
    Gossip = 3,
}

impl Kind {
    fn of(byte: u8) -> Option<Self> {
        [Self::Challenge, Self::Answer, Self::Gossip].into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// Why a datagram was dropped; its name is a metric label.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dropped {
    Oversize,
    /// Too short, or not of a known form.
    Malformed,
    /// Of a version of this format that is not known here.
    Version,
    /// For another node, for a former run of this one, or our own.
    Misaddressed,
    /// Sealed with no key of this cluster.
    Forged,
    /// Seen before, or too old to tell.
    Stale,
    /// From a run of a node that has not answered us yet.
    Unproven,
}

impl Dropped {
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

/// What came of a datagram. Replies go to where it came from; those to a stranger are two at most and no larger than it.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) gossip: Option<Vec<u8>>,
    pub(super) replies: Vec<Vec<u8>>,
    pub(super) dropped: Option<Dropped>,
}

struct Peer {
    address: SocketAddr,
    key: LessSafeKey,
    window: Window,
    heard: Instant,
}

struct Challenge {
    number: [u8; CHALLENGE_BYTES],
    made: Instant,
    of_stranger: bool,
}

/// All that one node knows of who sends to it.
pub(super) struct Sealed {
    cluster_key: ClusterKey,
    key: LessSafeKey,
    incarnation: u64,
    counter: u64,
    peers: HashMap<u64, Peer>,
    by_address: HashMap<SocketAddr, u64>,
    challenges: HashMap<SocketAddr, Challenge>,
    fresh: Vec<SocketAddr>,
}

impl Sealed {
    pub(super) fn new(cluster_key: ClusterKey, incarnation: u64) -> Self {
        let key = keys_of(&cluster_key, incarnation).next().expect("a cluster key has a secret");
        Self {
            cluster_key,
            key,
            incarnation,
            // Of two runs that are the same by chance no nonce is: no run counts so far.
            counter: u64::from_be_bytes(random_bytes()) >> 1,
            peers: HashMap::new(),
            by_address: HashMap::new(),
            challenges: HashMap::new(),
            fresh: Vec::new(),
        }
    }

    /// For the node at `to`; none when it is too large, or nobody there has answered yet.
    pub(super) fn seal_gossip(&mut self, message: &[u8], to: SocketAddr) -> Option<Vec<u8>> {
        let receiver = *self.by_address.get(&to)?;
        if message.len() + HEADER_BYTES + TAG_BYTES > DATAGRAM_BYTES_MAX {
            return None;
        }
        Some(self.seal(Kind::Gossip, receiver, message))
    }

    /// Asks who is at an address. It is also the probe: only a node that runs can answer.
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
        let fresh = || Challenge { number: crate::model::random_bytes(), made: now, of_stranger };
        // An answer on its way to an earlier one is as good.
        let number = self.challenges.entry(to).or_insert_with(fresh).number;
        Some(self.seal(Kind::Challenge, ANYBODY, &number))
    }

    /// Takes one datagram. Nobody who cannot seal is answered.
    pub(super) fn receive(&mut self, datagram: &[u8], from: SocketAddr, now: Instant) -> Received {
        match self.open(datagram, from, now) {
            Ok(received) => received,
            Err(dropped) => Received { dropped: Some(dropped), ..Received::default() },
        }
    }

    fn open(&mut self, datagram: &[u8], from: SocketAddr, now: Instant) -> Result<Received, Dropped> {
        if datagram.len() > DATAGRAM_BYTES_MAX {
            return Err(Dropped::Oversize);
        }
        let (header, sealed) = datagram.split_first_chunk::<HEADER_BYTES>().ok_or(Dropped::Malformed)?;
        if header[0] != VERSION {
            return Err(Dropped::Version);
        }
        let kind = Kind::of(header[1]).ok_or(Dropped::Malformed)?;
        let [sender, receiver, counter] = [2, 10, 18].map(|at| number_at(header, at));
        if kind != Kind::Gossip && sealed.len() != CHALLENGE_BYTES + TAG_BYTES {
            return Err(Dropped::Malformed);
        }
        let for_us = receiver == self.incarnation || kind == Kind::Challenge && receiver == ANYBODY;
        if !for_us || sender == self.incarnation || sender == ANYBODY {
            return Err(Dropped::Misaddressed);
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
            let (key, plain) = opened.ok_or(Dropped::Forged)?;
            return self.take_from_stranger(kind, sender, counter, key, &plain, from, now);
        };
        let plain = open(&peer.key).ok_or(Dropped::Forged)?;
        if !peer.window.take(counter) {
            return Err(Dropped::Stale);
        }
        peer.heard = now;
        match kind {
            Kind::Gossip => Ok(Received { gossip: Some(plain), ..Received::default() }),
            Kind::Challenge => {
                let answer = self.seal(Kind::Answer, sender, &plain);
                Ok(Received { replies: vec![answer], ..Received::default() })
            }
            Kind::Answer => {
                if self.is_answered(from, &plain) {
                    self.place(sender, from);
                }
                Ok(Received::default())
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "they are the parts of one datagram")]
    fn take_from_stranger(
        &mut self,
        kind: Kind,
        sender: u64,
        counter: u64,
        key: LessSafeKey,
        plain: &[u8],
        from: SocketAddr,
        now: Instant,
    ) -> Result<Received, Dropped> {
        match kind {
            Kind::Answer if self.is_answered(from, plain) => {
                self.make_room(now);
                let peer = Peer { address: from, key, window: Window::above(counter), heard: now };
                self.peers.insert(sender, peer);
                self.place(sender, from);
                self.fresh.push(from);
                Ok(Received::default())
            }
            Kind::Answer => Err(Dropped::Stale),
            Kind::Challenge => {
                let answer = self.seal(Kind::Answer, sender, plain);
                let challenge = self.challenge_at(from, now, true);
                let replies = [answer].into_iter().chain(challenge).collect();
                Ok(Received { replies, ..Received::default() })
            }
            Kind::Gossip => {
                let replies = self.challenge_at(from, now, true).into_iter().collect();
                Ok(Received { replies, dropped: Some(Dropped::Unproven), ..Received::default() })
            }
        }
    }

    /// Each challenge is answered once.
    fn is_answered(&mut self, from: SocketAddr, answer: &[u8]) -> bool {
        let answered = self.challenges.get(&from).is_some_and(|challenge| challenge.number == answer);
        if answered {
            self.challenges.remove(&from);
        }
        answered
    }

    fn place(&mut self, sender: u64, address: SocketAddr) {
        if let Some(peer) = self.peers.get_mut(&sender) {
            peer.address = address;
            self.by_address.insert(address, sender);
            let peers = &self.peers;
            self.by_address
                .retain(|address, sender| peers.get(sender).is_some_and(|peer| peer.address == *address));
        }
    }

    fn make_room(&mut self, now: Instant) {
        self.peers.retain(|_, peer| now.saturating_duration_since(peer.heard) < PEER_LASTS);
        if self.peers.len() >= PEERS_MAX
            && let Some((&eldest, _)) = self.peers.iter().min_by_key(|(_, peer)| peer.heard)
        {
            self.peers.remove(&eldest);
        }
    }

    /// Every run of a node that has answered, and when it was heard last.
    pub(super) fn heard(&self) -> impl Iterator<Item = (u64, Instant)> {
        self.peers.iter().map(|(incarnation, peer)| (*incarnation, peer.heard))
    }

    pub(super) fn address_of(&self, incarnation: u64) -> Option<SocketAddr> {
        self.peers.get(&incarnation).map(|peer| peer.address)
    }

    /// When somebody at this address was heard.
    pub(super) fn heard_at(&self, address: SocketAddr) -> Option<Instant> {
        self.by_address
            .get(&address)
            .and_then(|incarnation| self.peers.get(incarnation))
            .map(|peer| peer.heard)
    }

    /// Who has answered for the first time since this was asked.
    pub(super) fn take_fresh(&mut self) -> Vec<SocketAddr> {
        std::mem::take(&mut self.fresh)
    }

    fn seal(&mut self, kind: Kind, receiver: u64, plain: &[u8]) -> Vec<u8> {
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

/// A key for each run of a node, in which its counter makes every nonce a new one.
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
