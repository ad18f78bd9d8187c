//! Members over nodes: changes to all peers, what a peer is told when it cannot know, and comparing what is known.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Routing;
use crate::cluster::inbound::PresenceSaid;
use crate::cluster::link::{Item, Receipt};
use crate::hub::{PARTS, channel_number};
use crate::model::{ChannelKey, PresenceEvent, ToldMember, ToldMembers};
use crate::tasks::OnStop;

/// Peers are told what the members come to this often; one that finds a difference twice asks.
const COMPARE_EVERY: Duration = Duration::from_secs(2);
const ALL: u64 = u64::MAX;
/// Of the members in one item, roughly.
const PART_BYTES: usize = 128 * 1024;
/// What may be on its way to a peer that is told members; more waits until that has come.
const UNCONFIRMED_BYTES: usize = 1024 * 1024;

pub(super) struct Presence {
    /// What peers are yet to be told, of those that are being told something.
    telling: Mutex<HashMap<u64, u64>>,
    /// What peers are just telling.
    told: Mutex<HashMap<u64, Told>>,
    /// Parts in which what is known of a peer differed from what that said last.
    differ: Mutex<HashMap<u64, u64>>,
    /// Peers that have told all.
    known: Mutex<HashSet<u64>>,
    repairs: metrics::Counter,
}

#[derive(Debug)]
struct Told {
    number: u64,
    parts: u64,
    /// The last event by when it began.
    known: u64,
    /// Channels with members of the peer.
    channels: HashSet<ChannelKey>,
    lanes_ended: u32,
}

impl Presence {
    pub(super) fn new() -> Self {
        Self {
            telling: Mutex::default(),
            told: Mutex::default(),
            differ: Mutex::default(),
            known: Mutex::default(),
            repairs: metrics::counter!("fanfare_presence_repairs_total"),
        }
    }

    /// Who is no member any more is forgotten.
    pub(super) fn retain(&self, members: &HashSet<u64>) {
        self.told.lock().retain(|peer, _| members.contains(peer));
        self.differ.lock().retain(|peer, _| members.contains(peer));
        self.known.lock().retain(|peer| members.contains(peer));
    }

    pub(super) fn is_known(&self, peer: u64) -> bool {
        self.known.lock().contains(&peer)
    }

    /// It has not told all, and is not about to.
    fn is_lacking(&self, peer: u64) -> bool {
        !self.is_known(peer) && !self.told.lock().contains_key(&peer)
    }
}

impl Routing {
    /// Sends a change to all peers that can be reached, in the order of the calls; to be called under the lock of its channel.
    /// To the others what there is by then is told when they can be.
    pub fn forward_presence(&self, event: &PresenceEvent) -> Vec<Receipt> {
        let Some(links) = self.links.get() else { return Vec::new() };
        let peers = self.peers.read();
        let mut to = peers.keys().copied().filter(|peer| links.is_up(*peer)).peekable();
        if to.peek().is_none() {
            return Vec::new();
        }
        let (item, lane) = (Item::presence_changed(event), channel_number(&event.key));
        to.map(|peer| links.send(peer, lane, &item)).collect()
    }

    pub(super) async fn compare_presence(self: Arc<Self>) {
        loop {
            tokio::time::sleep(COMPARE_EVERY).await;
            self.compare_members();
        }
    }

    /// Tells the peers what the members here come to, and asks who has not told whom it has. To be called every 2 s.
    pub(in crate::cluster) fn compare_members(&self) {
        let Some(links) = self.links.get() else { return };
        let digests = self.hub.presence_digests(self.hub.incarnation());
        let peers: Vec<u64> = self.peers.read().keys().copied().collect();
        for lane in 0..links.lanes() {
            // Behind the changes of these parts, which are on the same lane where lanes divide the parts evenly.
            let of_lane = || (lane..PARTS).step_by(links.lanes());
            let parts = of_lane().fold(0, |parts, part| parts | 1 << part);
            let digests = of_lane().map(|part| digests[part]).collect();
            let item = Item::presence_said(PresenceSaid::Digests { parts, digests });
            for peer in peers.iter().filter(|peer| links.is_up(**peer)) {
                drop(links.send(*peer, lane as u64, &item));
            }
        }
        self.ask_for_members(&peers);
    }

    /// Asks those of the peers that have not told whom they have: what one told before it was known as a member may have been
    /// passed over.
    pub(super) fn ask_for_members(&self, peers: &[u64]) {
        let lacking = peers.iter().filter(|peer| self.is_up(**peer) && self.presence.is_lacking(**peer));
        lacking.for_each(|peer| self.ask_presence(*peer, ALL));
    }

    /// A run has ended that had not told whom it has: those who knew it may tell that.
    pub(super) fn ask_all_for_members(&self) {
        self.linked().into_iter().for_each(|peer| self.ask_presence(peer, ALL));
    }

    /// The peer is told whom this node has, in these parts of the channels.
    fn tell_presence(&self, to: u64, parts: u64) {
        let mut telling = self.presence.telling.lock();
        if let Some(left) = telling.get_mut(&to) {
            *left |= parts;
            return;
        }
        let Some(routing) = self.this.upgrade() else { return };
        telling.insert(to, parts);
        drop(telling);
        self.tasks.spawn("presence", OnStop::Cancel, async move {
            while let Some(parts) = routing.next_to_tell(to) {
                routing.tell_parts(to, parts).await;
            }
        });
    }

    fn next_to_tell(&self, to: u64) -> Option<u64> {
        let mut telling = self.presence.telling.lock();
        let left = telling.get_mut(&to)?;
        match std::mem::take(left) {
            0 => {
                telling.remove(&to);
                None
            }
            parts => Some(parts),
        }
    }

    async fn tell_parts(&self, to: u64, parts: u64) {
        let Some(links) = self.links.get() else { return };
        let (number, lanes) = (self.next_number(), links.lanes());
        let begun = Item::presence_said(PresenceSaid::Begun { number, parts });
        for lane in 0..lanes {
            drop(links.send(to, lane as u64, &begun));
        }
        // Those of runs that have ended nobody tells who has joined since, and that one has ended may not be known yet.
        let is_told = |run: u64| run == self.hub.incarnation() || !self.is_up(run);
        let (mut told, mut unconfirmed) = (HashSet::new(), 0);
        loop {
            // Somebody may have come meanwhile.
            let mut channels = self.hub.present_channels(is_told, parts);
            channels.retain(|key| !told.contains(key));
            if channels.is_empty() {
                break;
            }
            for key in channels {
                let mut after = None;
                loop {
                    let tell = |members: &[ToldMember], is_last: bool| {
                        let item = Item::presence_members(number, &key, after.as_ref(), members, is_last);
                        let end = members.last().filter(|_| !is_last).map(|last| last.member.clone());
                        (item.bytes(), links.send(to, channel_number(&key), &item), end)
                    };
                    let (bytes, receipt, end) =
                        self.hub.tell_members(&key, after.as_ref(), PART_BYTES, is_told, tell);
                    unconfirmed += bytes;
                    if unconfirmed > UNCONFIRMED_BYTES {
                        if receipt.await.is_err() {
                            // When the link is back it begins anew.
                            return;
                        }
                        unconfirmed = 0;
                    }
                    after = end;
                    if after.is_none() {
                        break;
                    }
                }
                told.insert(key);
            }
        }
        let lanes_said = u32::try_from(lanes).unwrap_or(u32::MAX);
        let ended = Item::presence_said(PresenceSaid::Ended { number, lanes: lanes_said });
        for lane in 0..lanes {
            drop(links.send(to, lane as u64, &ended));
        }
    }

    /// A link is up: neither side knows what it has missed of the other.
    pub(super) fn presence_linked(&self, to: u64) {
        self.tell_presence(to, ALL);
    }

    /// Something of what a peer has told is lost, the end of it perhaps.
    pub(super) fn presence_lost(&self, of: u64) {
        self.presence.told.lock().remove(&of);
        self.ask_presence(of, ALL);
    }

    fn ask_presence(&self, of: u64, parts: u64) {
        if let Some(links) = self.links.get() {
            drop(links.send(of, 0, &Item::presence_said(PresenceSaid::Asked { parts })));
        }
    }

    pub(super) fn take_members(&self, from: u64, number: u64, members: ToldMembers) {
        let known = {
            let mut told = self.presence.told.lock();
            let of_this = told.get_mut(&from).filter(|told| told.number == number);
            of_this.map(|told| {
                if members.is_last {
                    told.channels.insert(members.key.clone());
                }
                told.known
            })
        };
        self.hub.told_members(members, known, |run| self.is_up(run) || self.passes_over(run));
    }

    pub(super) fn take_presence_said(&self, from: u64, said: PresenceSaid) {
        match said {
            PresenceSaid::Begun { number, parts } => {
                let known = self.hub.presence_sequence();
                let mut told = self.presence.told.lock();
                // It comes on each lane.
                if told.get(&from).is_none_or(|told| told.number < number) {
                    let channels = HashSet::new();
                    told.insert(from, Told { number, parts, known, channels, lanes_ended: 0 });
                }
            }
            PresenceSaid::Ended { number, lanes } => self.presence_told(from, number, lanes),
            PresenceSaid::Digests { parts, digests } => self.compare_with(from, parts, &digests),
            PresenceSaid::Asked { parts } => self.tell_presence(from, parts),
        }
    }

    fn presence_told(&self, from: u64, number: u64, lanes: u32) {
        let mut telling = self.presence.told.lock();
        let Some(told) = telling.get_mut(&from).filter(|told| told.number == number) else { return };
        told.lanes_ended += 1;
        if told.lanes_ended < lanes {
            return;
        }
        let Some(Told { parts, known, channels, .. }) = telling.remove(&from) else { return };
        drop(telling);
        let Some(routing) = self.this.upgrade() else { return };
        self.tasks.spawn("presence", OnStop::Cancel, async move {
            let untold = routing.hub.present_channels(|run| run == from, parts);
            for key in untold.iter().filter(|key| !channels.contains(key)) {
                routing.hub.untold_members(key, from, known);
                tokio::task::yield_now().await;
            }
            if parts == ALL {
                routing.presence.known.lock().insert(from);
            }
        });
    }

    fn compare_with(&self, from: u64, parts: u64, theirs: &[u64]) {
        let known = self.hub.presence_digests(from);
        let in_parts = (0..PARTS).filter(|part| parts & (1 << part) != 0);
        let unlike = in_parts.zip(theirs).filter(|(part, theirs)| known[*part] != **theirs);
        let unlike = unlike.fold(0, |unlike, (part, _)| unlike | 1 << part);
        // What it is just telling may not be here yet.
        let is_told = self.presence.told.lock().contains_key(&from);
        let mut differ = self.presence.differ.lock();
        let differed = differ.entry(from).or_default();
        let twice = if is_told { 0 } else { *differed & unlike };
        *differed = (*differed & !parts) | (unlike & !twice);
        drop(differ);
        if twice != 0 {
            tracing::info!(
                parts = twice.count_ones(),
                "members of a peer are not as it says, and are asked for"
            );
            self.presence.repairs.increment(1);
            self.ask_presence(from, twice);
        }
    }
}
