//! From when on a peer forwards a channel that is wanted here, and what it had numbered before.

use std::collections::HashMap;

use super::{JOIN_WAIT, Own, Routing};
use crate::hub::Mark;
use crate::model::{ChannelKey, Stamp};

/// Runs that are taken from one peer; whoever has something of a further one in its position is told that something may be missing.
const GONE_MAX: usize = 1024;

impl Routing {
    /// All that a channel has of runs of other nodes that are not there any more.
    pub(super) fn gone(&self, mark: &Mark, unsure: &[u64]) -> Vec<Stamp> {
        let others = mark.others.iter().flat_map(|others| others.entries());
        let stamp = |&(incarnation, sequence): &(u64, u64)| Stamp { incarnation, sequence };
        let mut gone: Vec<Stamp> = others.filter(|(run, _)| !unsure.contains(run)).map(stamp).collect();
        self.keep_gone(&mut gone);
        gone
    }

    fn keep_gone(&self, stamps: &mut Vec<Stamp>) {
        if !stamps.is_empty() {
            let (own, expected) = (self.hub.incarnation(), self.expected.lock());
            stamps.retain(|stamp| stamp.incarnation != own && !expected.contains(&stamp.incarnation));
        }
    }

    pub(super) fn joined(
        &self,
        from: u64,
        key: &ChannelKey,
        number: u64,
        (sequence, round): (u64, u64),
        mut gone: Vec<Stamp>,
    ) {
        gone.truncate(GONE_MAX);
        let mut own = self.own.lock();
        let Some(channel) = own.get_mut(&number).filter(|channel| channel.key == *key) else { return };
        let is_first = !channel.confirmed.contains(&from);
        if is_first {
            channel.confirmed.push(from);
        }
        let waited = channel.waits.len();
        self.keep_gone(&mut gone);
        gone.iter().for_each(|stamp| channel.gone.advance(stamp.incarnation, stamp.sequence));
        drop(own);
        let stamp = Stamp { incarnation: from, sequence };
        if is_first {
            self.hub.heard_of(key, number, &gone);
            self.hub.heard(key, number, stamp);
        } else {
            self.hub.caught_up(key, number, stamp);
        }
        if let Some(channel) = self.own.lock().get_mut(&number) {
            for one in channel.rounds.iter_mut().filter(|one| one.number == round) {
                one.waits.retain(|peer| *peer != from);
            }
            for done in channel.rounds.extract_if(.., |one| one.waits.is_empty()) {
                done.done.send(()).ok();
            }
        }
        if waited > 0 {
            self.wait_no_more(number, from);
        }
    }

    /// The channel does not wait for the peer any more.
    pub(super) fn wait_no_more(&self, number: u64, peer: u64) {
        let mut own = self.own.lock();
        let Some(channel) = own.get_mut(&number).filter(|channel| !channel.waits.is_empty()) else { return };
        channel.waits.retain(|waited| *waited != peer);
        let key = channel.waits.is_empty().then(|| channel.key.clone());
        drop(own);
        if let Some(key) = key {
            self.hub.joined(&key, number);
        }
    }

    pub(super) fn give_up_waiting(&self) {
        self.deaths.lock().looked(tokio::time::Instant::now());
        let late = |own: &HashMap<u64, Own>| {
            let late = own.iter().filter(|(_, own)| !own.waits.is_empty() && own.since.elapsed() > JOIN_WAIT);
            late.map(|(number, own)| (*number, own.waits.clone())).collect::<Vec<_>>()
        };
        let late = late(&self.own.lock());
        for (number, peers) in late {
            peers.into_iter().for_each(|peer| self.wait_no_more(number, peer));
        }
    }
}
