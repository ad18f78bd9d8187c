//! Presence over nodes: sends changes to all peers, sends snapshots to peers that may lack members, and compares digests.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::Routing;
use crate::cluster::inbound::PresenceSyncMessage;
use crate::cluster::link::{PeerAck, PeerItem};
use crate::hub::{PARTS, channel_number};
use crate::model::{ChannelKey, PresenceEvent, RemoteMember, RemoteMembersPage};
use crate::tasks::OnStop;

/// Interval at which digests are sent to peers. A peer that finds the same difference twice requests a snapshot.
const COMPARE_EVERY: Duration = Duration::from_secs(2);
const ALL: u64 = u64::MAX;
/// Approximate bytes of members in one item.
const PART_BYTES: usize = 128 * 1024;
/// Most unconfirmed bytes of a snapshot to one peer; more waits until the peer has confirmed.
const UNCONFIRMED_BYTES: usize = 1024 * 1024;

pub(super) struct PeerPresenceSync {
    /// Parts that are still to be sent, for each peer with an outgoing snapshot.
    outgoing: Mutex<HashMap<u64, u64>>,
    /// Incoming snapshots in progress, by peer.
    incoming: Mutex<HashMap<u64, IncomingPresenceSnapshot>>,
    /// Parts in which the members known of a peer differed from its last digests, by peer.
    differ: Mutex<HashMap<u64, u64>>,
    /// Peers whose full snapshot has come.
    known: Mutex<HashSet<u64>>,
    repairs: metrics::Counter,
}

#[derive(Debug)]
struct IncomingPresenceSnapshot {
    number: u64,
    parts: u64,
    /// Sequence of the last presence event before the snapshot began.
    known: u64,
    /// Channels that the snapshot has completed so far.
    channels: HashSet<ChannelKey>,
    streams_ended: u32,
}

impl PeerPresenceSync {
    pub(super) fn new() -> Self {
        Self {
            outgoing: Mutex::default(),
            incoming: Mutex::default(),
            differ: Mutex::default(),
            known: Mutex::default(),
            repairs: metrics::counter!("fanfare_presence_repairs_total"),
        }
    }

    /// Forgets peers that are no members any more.
    pub(super) fn retain(&self, members: &HashSet<u64>) {
        self.incoming.lock().retain(|peer, _| members.contains(peer));
        self.differ.lock().retain(|peer, _| members.contains(peer));
        self.known.lock().retain(|peer| members.contains(peer));
    }

    pub(super) fn is_known(&self, peer: u64) -> bool {
        self.known.lock().contains(&peer)
    }

    /// True if no full snapshot of the peer has come or is coming.
    fn is_lacking(&self, peer: u64) -> bool {
        !self.is_known(peer) && !self.incoming.lock().contains_key(&peer)
    }
}

impl Routing {
    /// Sends a change to all reachable peers, in the order of the calls. The caller holds the lock of the channel. Unreachable peers get
    /// a snapshot once they are reachable.
    pub fn forward_presence(&self, event: &PresenceEvent) -> Vec<PeerAck> {
        let Some(links) = self.links.get() else { return Vec::new() };
        let peers = self.peers.read();
        let mut to = peers.keys().copied().filter(|peer| links.is_up(*peer)).peekable();
        if to.peek().is_none() {
            return Vec::new();
        }
        let (item, hash) = (PeerItem::presence_changed(event), channel_number(&event.key));
        to.map(|peer| links.send(peer, hash, &item)).collect()
    }

    pub(super) async fn compare_presence(self: Arc<Self>) {
        loop {
            tokio::time::sleep(COMPARE_EVERY).await;
            self.compare_members();
        }
    }

    /// Sends the digests of this node's members to the peers, and requests snapshots from peers that have sent none. Called every 2 s.
    pub(in crate::cluster) fn compare_members(&self) {
        let Some(links) = self.links.get() else { return };
        let digests = self.hub.presence_digests(self.hub.incarnation());
        let peers: Vec<u64> = self.peers.read().keys().copied().collect();
        for stream in 0..links.stream_count() {
            // Sent after the changes of these parts, which use the same stream if the streams divide the parts evenly.
            let of_stream = || (stream..PARTS).step_by(links.stream_count());
            let parts = of_stream().fold(0, |parts, part| parts | 1 << part);
            let digests = of_stream().map(|part| digests[part]).collect();
            let item = PeerItem::presence_sync(PresenceSyncMessage::Digests { parts, digests });
            for peer in peers.iter().filter(|peer| links.is_up(**peer)) {
                drop(links.send(*peer, stream as u64, &item));
            }
        }
        self.ask_for_members(&peers);
    }

    /// Requests snapshots from those of the peers that have sent none. Items of a peer from before it was known as a member may have been
    /// skipped.
    pub(super) fn ask_for_members(&self, peers: &[u64]) {
        let lacking = peers.iter().filter(|peer| self.is_up(**peer) && self.presence.is_lacking(**peer));
        lacking.for_each(|peer| self.ask_presence(*peer, ALL));
    }

    /// Requests snapshots from all peers, which may know members of an ended incarnation that this node lacks.
    pub(super) fn ask_all_for_members(&self) {
        self.linked().into_iter().for_each(|peer| self.ask_presence(peer, ALL));
    }

    /// Sends the peer a snapshot of the members known here, in these parts of the channels.
    fn send_presence_snapshot(&self, to: u64, parts: u64) {
        let mut outgoing = self.presence.outgoing.lock();
        if let Some(left) = outgoing.get_mut(&to) {
            *left |= parts;
            return;
        }
        let Some(routing) = self.this.upgrade() else { return };
        outgoing.insert(to, parts);
        drop(outgoing);
        self.tasks.spawn("presence", OnStop::Cancel, async move {
            while let Some(parts) = routing.next_snapshot_parts(to) {
                routing.send_snapshot_parts(to, parts).await;
            }
        });
    }

    fn next_snapshot_parts(&self, to: u64) -> Option<u64> {
        let mut outgoing = self.presence.outgoing.lock();
        let left = outgoing.get_mut(&to)?;
        match std::mem::take(left) {
            0 => {
                outgoing.remove(&to);
                None
            }
            parts => Some(parts),
        }
    }

    async fn send_snapshot_parts(&self, to: u64, parts: u64) {
        let Some(links) = self.links.get() else { return };
        let (number, streams) = (self.next_number(), links.stream_count());
        let begun = PeerItem::presence_sync(PresenceSyncMessage::SnapshotBegin { number, parts });
        for stream in 0..streams {
            drop(links.send(to, stream as u64, &begun));
        }
        // Members of ended incarnations are included, since no other node may send them to a peer that joined later.
        let is_included =
            |incarnation: u64| incarnation == self.hub.incarnation() || !self.is_up(incarnation);
        let (mut sent, mut unconfirmed) = (HashSet::new(), 0);
        loop {
            // A member may have entered meanwhile.
            let mut channels = self.hub.present_channels(is_included, parts);
            channels.retain(|key| !sent.contains(key));
            if channels.is_empty() {
                break;
            }
            for key in channels {
                let mut after = None;
                loop {
                    let send_page = |members: &[RemoteMember], is_last: bool| {
                        let item = PeerItem::presence_members(number, &key, after.as_ref(), members, is_last);
                        let end = members.last().filter(|_| !is_last).map(|last| last.member.clone());
                        (item.bytes(), links.send(to, channel_number(&key), &item), end)
                    };
                    let (bytes, ack, end) =
                        self.hub.with_members_page(&key, after.as_ref(), PART_BYTES, is_included, send_page);
                    unconfirmed += bytes;
                    if unconfirmed > UNCONFIRMED_BYTES {
                        if ack.await.is_err() {
                            // A new snapshot begins when the link is back.
                            return;
                        }
                        unconfirmed = 0;
                    }
                    after = end;
                    if after.is_none() {
                        break;
                    }
                }
                sent.insert(key);
            }
        }
        let stream_count = u32::try_from(streams).unwrap_or(u32::MAX);
        let ended =
            PeerItem::presence_sync(PresenceSyncMessage::SnapshotEnd { number, streams: stream_count });
        for stream in 0..streams {
            drop(links.send(to, stream as u64, &ended));
        }
    }

    /// Sends a full snapshot over a new link: neither side knows what it has missed of the other.
    pub(super) fn presence_linked(&self, to: u64) {
        self.send_presence_snapshot(to, ALL);
    }

    /// Discards the incoming snapshot of a peer after lost items, and requests a new one.
    pub(super) fn presence_lost(&self, of: u64) {
        self.presence.incoming.lock().remove(&of);
        self.ask_presence(of, ALL);
    }

    fn ask_presence(&self, of: u64, parts: u64) {
        if let Some(links) = self.links.get() {
            drop(links.send(of, 0, &PeerItem::presence_sync(PresenceSyncMessage::SnapshotRequest { parts })));
        }
    }

    pub(super) fn take_members(&self, from: u64, number: u64, members: RemoteMembersPage) {
        let known = {
            let mut incoming = self.presence.incoming.lock();
            let of_this = incoming.get_mut(&from).filter(|incoming| incoming.number == number);
            of_this.map(|incoming| {
                if members.is_last {
                    incoming.channels.insert(members.key.clone());
                }
                incoming.known
            })
        };
        self.hub.apply_remote_members(members, known, |incarnation| {
            self.is_up(incarnation) || self.passes_over(incarnation)
        });
    }

    pub(super) fn take_presence_sync(&self, from: u64, message: PresenceSyncMessage) {
        match message {
            PresenceSyncMessage::SnapshotBegin { number, parts } => {
                let known = self.hub.presence_sequence();
                let mut incoming = self.presence.incoming.lock();
                // The begin comes on each stream.
                if incoming.get(&from).is_none_or(|incoming| incoming.number < number) {
                    let channels = HashSet::new();
                    incoming.insert(
                        from,
                        IncomingPresenceSnapshot { number, parts, known, channels, streams_ended: 0 },
                    );
                }
            }
            PresenceSyncMessage::SnapshotEnd { number, streams } => {
                self.finish_presence_snapshot(from, number, streams)
            }
            PresenceSyncMessage::Digests { parts, digests } => self.compare_with(from, parts, &digests),
            PresenceSyncMessage::SnapshotRequest { parts } => self.send_presence_snapshot(from, parts),
        }
    }

    fn finish_presence_snapshot(&self, from: u64, number: u64, streams: u32) {
        let mut incoming = self.presence.incoming.lock();
        let Some(snapshot) = incoming.get_mut(&from).filter(|snapshot| snapshot.number == number) else {
            return;
        };
        snapshot.streams_ended += 1;
        if snapshot.streams_ended < streams {
            return;
        }
        let Some(IncomingPresenceSnapshot { parts, known, channels, .. }) = incoming.remove(&from) else {
            return;
        };
        drop(incoming);
        let Some(routing) = self.this.upgrade() else { return };
        self.tasks.spawn("presence", OnStop::Cancel, async move {
            let present = routing.hub.present_channels(|incarnation| incarnation == from, parts);
            for key in present.iter().filter(|key| !channels.contains(key)) {
                routing.hub.remove_unlisted_members(key, from, known);
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
        // Members of an incoming snapshot may not be here yet.
        let is_incoming = self.presence.incoming.lock().contains_key(&from);
        let mut differ = self.presence.differ.lock();
        let differed = differ.entry(from).or_default();
        let twice = if is_incoming { 0 } else { *differed & unlike };
        *differed = (*differed & !parts) | (unlike & !twice);
        drop(differ);
        if twice != 0 {
            tracing::info!(parts = twice.count_ones(), "presence resync requested");
            self.presence.repairs.increment(1);
            self.ask_presence(from, twice);
        }
    }
}
