//! All that is wanted here, told to a peer in parts, so that a lane never holds more of it than one part.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::super::inbound::Interest;
use super::super::link::{Item, Lost, Receipt};
use super::{JOIN_WAIT, Own, Routing, hash_of};
use crate::model::ChannelKey;
use crate::tasks::OnStop;

/// A part ends at either. A channel that begins to be wanted meanwhile waits behind one part at most.
const PART_ITEMS: usize = 4096;
const PART_BYTES: usize = 512 * 1024;

/// What goes on with a peer that is being told.
#[derive(Default)]
pub(super) struct Telling {
    /// All of it is to be told once more.
    again: Notify,
    part: Mutex<Part>,
    answered: Notify,
}

/// The last one that was told.
#[derive(Default)]
struct Part {
    round: u64,
    /// What the peer has not answered. Below 0 there are answers to what is just being sent.
    open: i64,
}

impl Telling {
    fn begin_part(&self, round: u64) {
        *self.part.lock() = Part { round, open: 0 };
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
    /// Tells a peer all that is wanted here, from the beginning if it is just being told.
    pub(super) fn say_all(&self, to: u64) {
        let Some(routing) = self.this.upgrade() else { return };
        let mut tellings = self.tellings.lock();
        if let Some(telling) = tellings.get(&to) {
            return telling.again.notify_one();
        }
        let telling = Arc::new(Telling::default());
        tellings.insert(to, Arc::clone(&telling));
        drop(tellings);
        self.tasks.spawn("interest", OnStop::Cancel, async move {
            let mut unconfirmed = Vec::new();
            loop {
                tokio::select! {
                    biased;
                    () = telling.again.notified() => {}
                    // When it is lost, the link comes up anew.
                    _ = routing.tell_wanted(to, &telling, &mut unconfirmed) => {
                        if routing.has_told(to, &telling) {
                            return;
                        }
                    }
                }
            }
        });
    }

    fn has_told(&self, to: u64, telling: &Telling) -> bool {
        let mut tellings = self.tellings.lock();
        let is_over = telling.again.notified().now_or_never().is_none();
        if is_over {
            tellings.remove(&to);
        }
        is_over
    }

    /// A peer has answered that it forwards a channel.
    pub(super) fn told_one(&self, of: u64, round: u64) {
        if let Some(telling) = self.tellings.lock().get(&of) {
            telling.take_answer(round);
        }
    }

    async fn tell_wanted(
        &self,
        to: u64,
        telling: &Telling,
        unconfirmed: &mut Vec<Receipt>,
    ) -> Result<(), Lost> {
        // Of a telling that this one is in the place of: it does not matter what has come.
        while let Some(receipt) = unconfirmed.last_mut() {
            receipt.await.ok();
            unconfirmed.pop();
        }
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed) + 1;
        // What begins to be wanted from now on is told as it begins.
        let end = self.own.lock().last_key_value().map_or(0, |(last, _)| last + 1);
        let mut begin = 0;
        loop {
            begin = self.tell_part(to, begin..end, telling, unconfirmed);
            if begin == end {
                self.say_told(to, epoch);
            }
            while let Some(receipt) = unconfirmed.last_mut() {
                let come = receipt.await;
                unconfirmed.pop();
                come?;
            }
            if begin == end {
                return Ok(());
            }
            // The answers take room in the lanes of the peer. One that does not know this node as a member gives none.
            timeout(JOIN_WAIT, telling.is_answered()).await.ok();
        }
    }

    /// Gives the number with which the next part begins, with receipts of the last items on each lane.
    fn tell_part(
        &self,
        to: u64,
        numbers: Range<u64>,
        telling: &Telling,
        unconfirmed: &mut Vec<Receipt>,
    ) -> u64 {
        let Some(links) = self.links.get() else { return numbers.end };
        let round = self.next_number();
        telling.begin_part(round);
        let (mut items, mut bytes, mut next) = (0, 0, numbers.end);
        let mut of_lanes = BTreeMap::new();
        let sequences = self.numbered(numbers.clone());
        // Under the lock, so that what is wanted no more is not told behind that.
        let own = self.own.lock();
        for (number, Own { key, .. }) in own.range(numbers) {
            let is_read = sequences.contains_key(number);
            if items == PART_ITEMS || bytes >= PART_BYTES || !is_read && items > 0 {
                next = *number;
                break;
            }
            let (hash, key) = (hash_of(key), key.clone());
            let (number, sequence) = (*number, sequences.get(number).copied().unwrap_or(0));
            let item = Item::interest(&Interest::Wanted { key, number, round, sequence });
            of_lanes.insert(hash % links.lanes() as u64, links.send(to, hash, &item));
            items += 1;
            bytes += item.bytes();
        }
        drop(own);
        telling.sent(items);
        unconfirmed.extend(of_lanes.into_values());
        next
    }

    /// Where the first of these channels stand by the numbers that were given here; by now it may be more. The lock of a channel comes
    /// before that of what is wanted.
    fn numbered(&self, numbers: Range<u64>) -> HashMap<u64, u64> {
        let keys: Vec<(u64, ChannelKey)> = {
            let own = self.own.lock();
            own.range(numbers).take(PART_ITEMS).map(|(number, own)| (*number, own.key.clone())).collect()
        };
        keys.into_iter().map(|(number, key)| (number, self.hub.numbered(&key))).collect()
    }

    /// Tells everybody, where numbers without a message were given that nobody was told of. To be called several times a second.
    pub(super) fn tell_what_is_numbered(&self) {
        let linked = self.linked();
        let free: Vec<u64> = {
            let (tellings, mut untold) = (self.tellings.lock(), self.untold.lock());
            if self.hub.has_skipped() {
                untold.extend(&linked);
            }
            // Who is linked anew is told all.
            untold.retain(|peer| linked.contains(peer));
            untold.extract_if(|peer| !tellings.contains_key(peer)).collect()
        };
        free.into_iter().for_each(|peer| self.say_all(peer));
    }

    /// That was all, on each lane.
    fn say_told(&self, to: u64, epoch: u64) {
        let Some(links) = self.links.get() else { return };
        let lanes = u32::try_from(links.lanes()).unwrap_or(u32::MAX);
        for lane in 0..links.lanes() {
            self.send(to, lane as u64, &Interest::Said { epoch, lanes });
        }
    }
}

#[cfg(test)]
mod tests;
