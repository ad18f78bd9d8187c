//! Interest snapshot: sends the interest of this node to a peer in parts, so that a peer queue never holds more of it than one part.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::super::inbound::InterestMessage;
use super::super::link::{LostItem, PeerAck, PeerItem};
use super::{JOIN_WAIT, LocalInterest, Routing, hash_of};
use crate::model::ChannelKey;
use crate::tasks::OnStop;

/// Most items and bytes of one part. New interest waits behind one part at most.
const PART_ITEMS: usize = 4096;
const PART_BYTES: usize = 512 * 1024;

/// Progress of the interest snapshot to one peer.
#[derive(Default)]
pub(super) struct InterestSnapshot {
    /// Notified when the snapshot must start again.
    again: Notify,
    part: Mutex<InterestSnapshotPart>,
    answered: Notify,
}

/// Last part that was sent.
#[derive(Default)]
struct InterestSnapshotPart {
    round: u64,
    /// Items without an answer of the peer. Negative while answers come before the sent items are counted.
    open: i64,
}

impl InterestSnapshot {
    fn begin_part(&self, round: u64) {
        *self.part.lock() = InterestSnapshotPart { round, open: 0 };
    }

    fn sent(&self, items: usize) {
        self.part.lock().open += items as i64;
    }

    fn take_answer(&self, round: u64) {
        let mut part = self.part.lock();
        if part.round == round {
            part.open -= 1;
            if part.open == 0 {
                self.answered.notify_one();
            }
        }
    }

    async fn is_answered(&self) {
        while self.part.lock().open > 0 {
            self.answered.notified().await;
        }
    }
}

impl Routing {
    /// Sends a peer the interest snapshot. Starts it again if it is in progress.
    pub(super) fn send_interest_snapshot(&self, to: u64) {
        let Some(routing) = self.this.upgrade() else { return };
        let mut snapshots = self.interest_snapshots.lock();
        if let Some(snapshot) = snapshots.get(&to) {
            return snapshot.again.notify_one();
        }
        let snapshot = Arc::new(InterestSnapshot::default());
        snapshots.insert(to, Arc::clone(&snapshot));
        drop(snapshots);
        self.tasks.spawn("interest", OnStop::Cancel, async move {
            let mut unconfirmed = Vec::new();
            loop {
                tokio::select! {
                    biased;
                    () = snapshot.again.notified() => {}
                    // After a loss the link comes up anew, which starts another snapshot.
                    _ = routing.send_interest(to, &snapshot, &mut unconfirmed) => {
                        if routing.finish_interest_snapshot(to, &snapshot) {
                            return;
                        }
                    }
                }
            }
        });
    }

    fn finish_interest_snapshot(&self, to: u64, snapshot: &InterestSnapshot) -> bool {
        let mut snapshots = self.interest_snapshots.lock();
        let is_complete = snapshot.again.notified().now_or_never().is_none();
        if is_complete {
            snapshots.remove(&to);
        }
        is_complete
    }

    /// Counts a peer's answer that it forwards a channel.
    pub(super) fn snapshot_item_answered(&self, of: u64, round: u64) {
        if let Some(snapshot) = self.interest_snapshots.lock().get(&of) {
            snapshot.take_answer(round);
        }
    }

    async fn send_interest(
        &self,
        to: u64,
        snapshot: &InterestSnapshot,
        unconfirmed: &mut Vec<PeerAck>,
    ) -> Result<(), LostItem> {
        // Acks of an earlier snapshot that this one replaces; their results do not matter.
        while let Some(ack) = unconfirmed.last_mut() {
            ack.await.ok();
            unconfirmed.pop();
        }
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        // Interest that begins from now on is sent as it begins.
        let end = self.local_interest.lock().last_key_value().map_or(0, |(last, _)| last + 1);
        let mut begin = 0;
        loop {
            begin = self.send_interest_part(to, begin..end, snapshot, unconfirmed);
            if begin == end {
                self.send_snapshot_end(to, epoch);
            }
            while let Some(ack) = unconfirmed.last_mut() {
                let come = ack.await;
                unconfirmed.pop();
                come?;
            }
            if begin == end {
                return Ok(());
            }
            // The answers take space in the queues of the peer. A peer that does not know this node as a member sends none.
            timeout(JOIN_WAIT, snapshot.is_answered()).await.ok();
        }
    }

    /// Sends one part, with the ack of the last item on each stream to `unconfirmed`. Returns the channel number with which the next part
    /// begins.
    fn send_interest_part(
        &self,
        to: u64,
        numbers: Range<u64>,
        snapshot: &InterestSnapshot,
        unconfirmed: &mut Vec<PeerAck>,
    ) -> u64 {
        let Some(links) = self.links.get() else { return numbers.end };
        let round = self.next_number();
        snapshot.begin_part(round);
        let (mut items, mut bytes, mut next) = (0, 0, numbers.end);
        let mut of_streams = BTreeMap::new();
        let sequences = self.numbered(numbers.clone());
        // Sent under the lock, so that no interest is sent after its end.
        let own = self.local_interest.lock();
        for (number, LocalInterest { key, .. }) in own.range(numbers) {
            let is_read = sequences.contains_key(number);
            if items == PART_ITEMS || bytes >= PART_BYTES || !is_read && items > 0 {
                next = *number;
                break;
            }
            let (hash, key) = (hash_of(key), key.clone());
            let (number, sequence) = (*number, sequences.get(number).copied().unwrap_or(0));
            let item = PeerItem::interest(&InterestMessage::Added { key, number, round, sequence });
            of_streams.insert(hash % links.stream_count() as u64, links.send(to, hash, &item));
            items += 1;
            bytes += item.bytes();
        }
        drop(own);
        snapshot.sent(items);
        unconfirmed.extend(of_streams.into_values());
        next
    }

    /// This node's own sequences in the first of these channels; they may have grown since. They are read before the interest is locked,
    /// since the lock of a channel comes first.
    fn numbered(&self, numbers: Range<u64>) -> HashMap<u64, u64> {
        let keys: Vec<(u64, ChannelKey)> = {
            let own = self.local_interest.lock();
            own.range(numbers).take(PART_ITEMS).map(|(number, own)| (*number, own.key.clone())).collect()
        };
        keys.into_iter().map(|(number, key)| (number, self.hub.last_sequence(&key))).collect()
    }

    /// Sends an interest snapshot to all peers after sequence gaps by design that were not announced. Called several times a second.
    pub(super) fn announce_skipped_sequences(&self) {
        let linked = self.linked();
        let free: Vec<u64> = {
            let (snapshots, mut due) = (self.interest_snapshots.lock(), self.snapshots_due.lock());
            if self.hub.take_unannounced_gap() {
                due.extend(&linked);
            }
            // A peer with a new link gets a snapshot anyway.
            due.retain(|peer| linked.contains(peer));
            due.extract_if(|peer| !snapshots.contains_key(peer)).collect()
        };
        free.into_iter().for_each(|peer| self.send_interest_snapshot(peer));
    }

    /// Sends the end of the snapshot on each stream.
    fn send_snapshot_end(&self, to: u64, epoch: u64) {
        let Some(links) = self.links.get() else { return };
        let stream_count = u32::try_from(links.stream_count()).unwrap_or(u32::MAX);
        for stream in 0..links.stream_count() {
            self.send(to, stream as u64, &InterestMessage::SnapshotEnd { epoch, streams: stream_count });
        }
    }
}

#[cfg(test)]
mod tests;
