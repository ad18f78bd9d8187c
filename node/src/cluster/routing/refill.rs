//! What somebody missed, from a node where somebody was attached: asked of it, and given to who asks.

use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::serial::Serial;
use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::inbound::{Answer, Interest, Request};
use super::super::link::Item;
use super::hand_over::NOT_AGAIN;
use super::{Behind, JOIN_WAIT, Routing, hash_of};
use crate::hub::{Channel, Delivery};
use crate::model::{ChannelKey, Forwarded, Stamp};
use crate::tasks::OnStop;

/// Who asks for what was missed waits no longer than this.
const REFILL_WAIT: Duration = Duration::from_secs(3);
/// Requests of that kind that are answered at a time, so that the answers on their way leave room in the lanes.
pub(super) const REFILLS_MAX: usize = 8;
/// What such an answer may hold, in bytes of memory; with more there is none.
const REFILL_BYTES_MAX: usize = 1024 * 1024;
/// Requests that wait for their turn; further ones are answered with nothing.
pub(super) const REFILLS_WAITING_MAX: usize = 16_384;

/// Waits until each peer has said once more that it forwards the channel: what it forwarded before is here then.
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) waits: Vec<u64>,
    pub(super) done: oneshot::Sender<()>,
}

impl Routing {
    /// Asks the peers with subscribers of the channel for all that somebody at this position has not. None where no one has it
    /// all in time. Whoever answers has by then what this node and all others had forwarded before they were asked.
    pub async fn missed(&self, key: &ChannelKey, after: &Serial, back_ms: u64) -> Option<Vec<Forwarded>> {
        let to: Vec<u64> = self.wanting(key).into_iter().filter(|peer| self.is_up(*peer)).collect();
        let request = Request::Refill { key: key.clone(), after: after.clone(), back_ms };
        let mut answers = self.ask(to, hash_of(key), &request);
        let first = async {
            while let Some(answer) = answers.next().await {
                if let Answer::Refilled(Some(missed)) = answer {
                    return Some(missed);
                }
            }
            None
        };
        let missed = tokio::time::timeout(REFILL_WAIT, first).await.ok()??;
        // It may hold what is still on its way here, which would be delivered once more.
        let is_all = self.settled(key).await && self.has_heard(key, after, &missed);
        if is_all {
            self.know_gone(key, after, &missed);
        }
        is_all.then_some(missed)
    }

    /// What somebody has by then of runs that are gone stands in the positions that follow, so that it is given that nowhere again. Who
    /// answered has heard it all.
    fn know_gone(&self, key: &ChannelKey, after: &Serial, missed: &[Forwarded]) {
        let Some(channel) = self.hub.live(key) else { return };
        let mut has = after.clone();
        missed.iter().for_each(|one| has.advance(one.incarnation, one.last));
        has.retain(self.have_ended());
        channel.know(&Stamp::all_of(&has).collect::<Vec<_>>());
    }

    /// Nobody could bring on who has this. What others have of runs that have ended, and of which nothing was heard here, stands in the
    /// positions that follow, if one of them stands in this one: it begins here behind that, and is not to be given it where it goes
    /// next. Of a run that was heard here something may come yet, from where it is kept.
    pub async fn know_gone_of_others(&self, key: &ChannelKey, after: &Serial) {
        let Some(channel) = self.hub.live(key) else { return };
        let unheard = || {
            let (channel, have_ended) = (&channel, self.have_ended());
            move |run| !channel.names(run) && have_ended(run)
        };
        let is_lacking = || Stamp::all_of(after).map(|stamp| stamp.incarnation).any(unheard());
        if !is_lacking() {
            return;
        }
        let mut turn = self.leaving.learning.turn(key).await;
        let was_asked = turn.is_some_and(|(of, at)| of == channel.number() && at.elapsed() < NOT_AGAIN);
        if !was_asked && is_lacking() {
            // Those who can be reached tell it, if they know of the death by then.
            self.settled(key).await;
            let is_unheard = unheard();
            let unheard = Stamp::all_of(after).filter(|stamp| is_unheard(stamp.incarnation)).collect();
            self.know_stored(&channel, unheard).await;
            *turn = Some((channel.number(), Instant::now()));
        }
        drop(turn);
        let Some(mut gone) = self.own.lock().get(&channel.number()).map(|own| own.gone.clone()) else {
            return;
        };
        gone.retain(unheard());
        channel.know(&Stamp::all_of(&gone).collect::<Vec<_>>());
    }

    /// The same of what these runs have stored: perhaps nobody is attached elsewhere. A client may give any position, so its own number
    /// counts only where the store has that message.
    async fn know_stored(&self, channel: &Channel, unheard: Vec<Stamp>) {
        let Some(local) = self.store() else { return };
        let stored = unheard.into_iter().map(async |Stamp { incarnation, sequence }| {
            let since = self.deaths.lock().troubled_for(incarnation) + self.hub.keeps_for();
            let (key, sequence) = (channel.key().clone(), sequence.checked_sub(1)?);
            let stored = local.stored(Behind { key, incarnation, sequence, since }).await?;
            let is_there = stored.first()?.first == sequence + 1;
            is_there.then_some(Stamp { incarnation, sequence: stored.last()?.last })
        });
        let stored: Vec<Stamp> = join_all(stored).await.into_iter().flatten().collect();
        channel.know(&stored);
    }

    /// Whether nothing of that comes here any more. A peer that is out of reach, or held for dead, may still have for this node
    /// what others have had of it.
    fn has_heard(&self, key: &ChannelKey, after: &Serial, missed: &[Forwarded]) -> bool {
        let Some(channel) = self.hub.live(key) else { return false };
        let mut has = after.clone();
        missed.iter().for_each(|one| has.advance(one.incarnation, one.last));
        let has = channel.lowered(&has);
        let here = channel.mark().serial();
        let own = self.own.lock();
        let Some(wanted) = own.get(&channel.number()) else { return false };
        wanted.confirmed.iter().all(|peer| here.covers_one(*peer, has.sequence_of(*peer).unwrap_or(0)))
    }

    /// Resolves when all that the living peers have forwarded of the channel so far is here. False when one of them is out of
    /// reach, or the channel is not wanted here.
    pub(super) async fn settled(&self, key: &ChannelKey) -> bool {
        let Some(channel) = self.hub.live(key) else { return false };
        let number = self.next_number();
        let (done, is_done) = oneshot::channel();
        let mut peers = self.peers_alive();
        if !peers.iter().all(|peer| self.is_up(*peer)) {
            return false;
        }
        {
            let mut own = self.own.lock();
            // Who leaves does not wait for the rounds that come after.
            peers.retain(|peer| !self.leaving.has_left(*peer));
            if peers.is_empty() {
                return true;
            }
            let Some(wanted) = own.get_mut(&channel.number()) else { return false };
            wanted.rounds.push(Round { number, waits: peers.clone(), done });
        }
        let (of, sequence) = (channel.number(), channel.mark().own.sequence);
        for peer in peers {
            let wanted = Interest::Wanted { key: key.clone(), number: of, round: number, sequence };
            self.send(peer, hash_of(key), &wanted);
        }
        let settled = matches!(tokio::time::timeout(JOIN_WAIT, is_done).await, Ok(Ok(())));
        if let Some(wanted) = self.own.lock().get_mut(&channel.number()) {
            wanted.rounds.retain(|round| round.number != number);
        }
        settled
    }

    /// A peer that has no lane to this node any more answers no round.
    pub(super) fn end_rounds(&self, peer: u64) {
        for own in self.own.lock().values_mut() {
            own.rounds.retain(|round| !round.waits.contains(&peer));
        }
    }

    async fn refill(&self, to: u64, number: u64, key: ChannelKey, after: Serial, back_ms: u64) {
        // Who asks may have noticed a death earlier.
        self.until_known().await;
        let (Some(links), Ok(_turn)) = (self.links.get(), self.refills.acquire().await) else { return };
        let missed = match self.settled(&key).await {
            true => self.hub.missed(&key, &after, back_ms),
            false => None,
        };
        let bytes =
            |missed: &Vec<Arc<Delivery>>| missed.iter().map(|delivery| delivery.bytes()).sum::<usize>();
        let missed = missed.filter(|missed| bytes(missed) <= REFILL_BYTES_MAX);
        // Until it is there, it takes room in the lane.
        links.send(to, hash_of(&key), &Item::refilled(number, missed.as_deref())).await.ok();
    }

    pub(super) fn asked_to_refill(&self, to: u64, number: u64, key: ChannelKey, after: Serial, back_ms: u64) {
        let (Some(links), Some(routing)) = (self.links.get(), self.this.upgrade()) else { return };
        let Ok(permit) = Arc::clone(&self.refills_waiting).try_acquire_owned() else {
            return drop(links.send(to, 0, &Item::refilled(number, None)));
        };
        self.tasks.spawn("refill", OnStop::Cancel, async move {
            // By then nobody waits for it any more.
            let refill = routing.refill(to, number, key, after, back_ms);
            tokio::time::timeout(REFILL_WAIT, refill).await.ok();
            drop(permit);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::{EndedRun, Inbound as _};
    use super::super::Local;
    use super::super::fixture::{Node, row};
    use super::*;
    use crate::testing::SharedLocal;

    /// A run that was never heard here, and one that was.
    const ENDED: u64 = 99;
    const HEARD: u64 = 98;
    const DEADLINE: Duration = Duration::from_secs(10);

    fn stamp(incarnation: u64, sequence: u64) -> Stamp {
        Stamp { incarnation, sequence }
    }

    /// Where the channel stands after somebody with this position could not be brought on, and the peer was asked, if it was, and has
    /// told what it has; by the two runs.
    async fn stands(node: &Node, after: Serial) -> [Option<u64>; 2] {
        let knowing = node.routing.know_gone_of_others(&node.key, &after);
        let telling = async {
            loop {
                let round = node.routing.own.lock()[&node.number()].rounds.first().map(|round| round.number);
                if let Some(round) = round {
                    node.says_joined(0, round, vec![stamp(ENDED, 7), stamp(HEARD, 9)]);
                }
                tokio::task::yield_now().await;
            }
        };
        let known = async {
            tokio::select! {
                () = knowing => {}
                () = telling => {}
            }
        };
        tokio::time::timeout(DEADLINE, known).await.expect("the peer answers");
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        let serial = channel.mark().serial();
        [ENDED, HEARD].map(|run| serial.sequence_of(run))
    }

    #[tokio::test]
    async fn position_gains_ended_incarnation_after_client_names_it() {
        let node = Node::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, vec![stamp(HEARD, 3)]);
        node.says();
        let names = |run| Serial::single(run, 5);
        assert_eq!(stands(&node, names(ENDED)).await, [None, Some(3)], "this node may not have met it yet");
        let runs = [ENDED, HEARD].map(|incarnation| EndedRun { incarnation, ago_ms: 0, has_left: false });
        node.routing.interest(&node.peer, Interest::Ended { runs: runs.to_vec() });
        assert_eq!(stands(&node, names(HEARD)).await, [None, Some(3)], "what is heard is known");
        assert!(node.says().is_empty(), "nobody was asked");
        let known = [Some(7), Some(3)];
        assert_eq!(stands(&node, names(ENDED)).await, known, "as far as others have it, whatever was named");
        assert_eq!(node.says().len(), 1);
        assert_eq!(stands(&node, names(ENDED)).await, known);
        assert!(node.says().is_empty(), "it is known");
    }

    /// The store has seven messages of the run.
    #[tokio::test]
    async fn loss_is_told_behind_what_a_client_has_of_the_store() {
        for (has, known) in [(5, Some(7)), (7, Some(7)), (8, None), (0, None)] {
            let node = Node::new();
            let stored = |behind: &Behind| {
                Some(((behind.sequence + 1)..=7).map(|sequence| row(behind.incarnation, sequence)).collect())
            };
            node.routing.set_local(SharedLocal::new(0, stored) as Arc<dyn Local>);
            node.is_attached_to();
            let ended = EndedRun { incarnation: ENDED, ago_ms: 0, has_left: false };
            node.routing.interest(&node.peer, Interest::Ended { runs: vec![ended] });
            node.routing.know_gone_of_others(&node.key, &Serial::single(ENDED, has)).await;
            let serial = node.routing.hub.live(&node.key).expect("it is attached to").mark().serial();
            assert_eq!(serial.sequence_of(ENDED), known, "{has}");
        }
    }
}
