//! What a dead run has stored and this node has not heard of it: read from the store that nodes share.
//!
//! What a run has acknowledged on a channel that keeps history stands there. So whoever is attached when it dies is given the rest,
//! and not told of a loss; and whoever comes back is brought on from there, once nothing is on its way to the store.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::serial::Serial;
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::Instant;

use super::super::inbound::{self, Answer, Request};
use super::{Later, Local, Routing};
use crate::hub::Channel;
use crate::model::{ChannelKey, Stamp};
use crate::tasks::OnStop;

/// What is on its way to the store of a node is there by then, or is not acknowledged.
const SETTLE_WAIT: Duration = Duration::from_secs(3);
/// A node that has died is held for dead by then.
const TORN_LATELY: Duration = Duration::from_secs(5);
const WHOLE_LOOK: Duration = Duration::from_millis(25);
/// Channels that are read at a time after a death.
const READS_MAX: usize = 16;
/// Channels that are read after a death; in further ones it is told.
const CHANNELS_MAX: usize = 10_000;

/// What is asked of the store: what a run has stored of a channel behind a sequence that is known to be all there.
#[derive(Debug, Clone)]
pub struct Behind {
    pub key: ChannelKey,
    pub incarnation: u64,
    pub sequence: u64,
    /// All that was numbered longer ago than that is not behind it.
    pub since: Duration,
}

/// What a death leaves where its rows cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Leaves {
    /// Whoever is attached is told.
    Doubt,
    /// Besides, no position of before is one to resume from.
    Nothing,
}

impl Routing {
    pub(super) fn store(&self) -> Option<&Arc<dyn Local>> {
        self.local.get().filter(|local| local.is_store_shared())
    }

    /// Those that are alive or can be reached, this node too. All of them can be reached while the node is whole.
    pub fn living(&self) -> Vec<u64> {
        let mut living = self.peers_alive();
        living.push(self.hub.incarnation());
        living
    }

    /// Who can be reached is asked also while gossip is silent: it may be taking publishes.
    pub(super) fn peers_alive(&self) -> Vec<u64> {
        let mut alive = self.expected.lock().clone();
        alive.extend(self.linked());
        alive.sort_unstable();
        alive.dedup();
        alive
    }

    /// Every node that is alive can be reached: who is not may just have died.
    fn is_whole(&self) -> bool {
        let expected = self.expected.lock().clone();
        expected.iter().all(|peer| self.is_up(*peer))
    }

    /// Not every node that is alive can be reached, since so lately that one may be about to be held for dead. To be called several
    /// times a second.
    pub fn is_torn_lately(&self) -> bool {
        let mut out_of_reach = self.expected.lock().clone();
        // A link and the lanes of a node that dies are not seen to end in the same moment.
        out_of_reach.retain(|peer| !self.is_up(*peer) || self.deaths.lock().has_ended(*peer));
        let mut torn = self.torn.lock();
        torn.retain(|peer, _| out_of_reach.contains(peer));
        for peer in out_of_reach {
            torn.entry(peer).or_insert_with(Instant::now);
        }
        torn.values().any(|since| since.elapsed() < TORN_LATELY)
    }

    /// Resolves when [`Routing::is_torn_lately`] no more: who has died is not taken for alive by then, 1.5 s after it was heard last.
    pub async fn until_known(&self) {
        loop {
            let mut changed = std::pin::pin!(self.reach_changed.notified());
            // From here on it is told.
            changed.as_mut().enable();
            if !self.is_torn_lately() {
                return;
            }
            // It ends by itself, too, which need not be known at once.
            tokio::time::timeout(TORN_LATELY / 10, changed).await.ok();
        }
    }

    /// The runs that have said how far they were when this node began to be forwarded a channel.
    pub fn owed(&self, channel: &Channel) -> Vec<u64> {
        self.own.lock().get(&channel.number()).map_or_else(Vec::new, |own| own.confirmed.clone())
    }

    /// Resolves when all that living nodes had numbered in the channel is here or in the store, or was refused. False where one of
    /// them does not say so.
    pub async fn settle(&self, key: &ChannelKey) -> bool {
        // By then they know of the same deaths, and say how far they have heard those that are dead.
        self.all_settled().await && self.settled(key).await
    }

    /// Those who ask while it is being asked for share the next asking.
    async fn all_settled(&self) -> bool {
        let (answered, is_first) = self.settling.ask();
        if is_first && let Some(routing) = self.this.upgrade() {
            self.tasks.spawn("settling", OnStop::Cancel, async move {
                routing.settling.run(|| routing.ask_all_to_settle()).await;
            });
        }
        answered.await.unwrap_or(false)
    }

    async fn ask_all_to_settle(&self) -> bool {
        let Some(local) = self.store() else { return false };
        let peers = self.peers_alive();
        let stored = async {
            let mut answers = self.ask(peers.clone(), 0, &Request::Settle);
            let mut settled = 0;
            while let Some(answer) = answers.next().await {
                settled += usize::from(answer == Answer::Done);
            }
            settled == peers.len()
        };
        let both = async { tokio::join!(local.settled(), stored) };
        matches!(tokio::time::timeout(SETTLE_WAIT, both).await, Ok((Some(()), true)))
    }

    /// What was on its way to the store of this node is there, and every death is known that the asking node knows of.
    pub(super) fn settled_for_peer(self: Arc<Self>, local: &dyn Local) -> Later<Option<Answer>> {
        let settled = local.settled();
        Box::pin(async move {
            while !self.is_whole() {
                tokio::time::sleep(WHOLE_LOOK).await;
            }
            settled.await.map(|()| Answer::Done)
        })
    }

    /// Hands on what dead runs have stored of the channel that this node was to hear. Those that were read for it, and None where
    /// it cannot be told of one.
    pub async fn complete(&self, key: &ChannelKey, position: &Serial) -> Option<Vec<u64>> {
        let channel = self.hub.live(key)?;
        let (living, mut read) = (self.living(), Vec::new());
        for run in self.owed(&channel).into_iter().filter(|run| !living.contains(run)) {
            let is_ahead = position.sequence_of(run).is_some_and(|sequence| sequence > channel.reached(run));
            // Of one that may take publishes what was read once is not all.
            let is_known = !self.may_go_on(run) && self.deaths.lock().is_complete(run, channel.number());
            let since = self.deaths.lock().troubled_for(run);
            if is_ahead || !is_known {
                if !self.complete_one(&channel, run, since).await {
                    return None;
                }
                read.push(run);
            }
        }
        // What others have heard, and is not stored, was not acknowledged.
        let gone = self.own.lock().get(&channel.number()).map(|own| own.gone.clone());
        let gone = gone.unwrap_or_default();
        let of_dead = Stamp::all_of(&gone).filter(|stamp| !living.contains(&stamp.incarnation));
        channel.know(&of_dead.collect::<Vec<_>>());
        Some(read)
    }

    async fn complete_one(&self, channel: &Arc<Channel>, incarnation: u64, since: Duration) -> bool {
        let may_go_on = || self.may_go_on(incarnation);
        let is_complete = self.hand_on_stored(channel, incarnation, since, may_go_on).await;
        if is_complete {
            self.deaths.lock().completed(incarnation, channel.number());
        }
        is_complete
    }

    /// Hands on what the run has stored behind what was heard of it. False where that cannot be told.
    pub(super) async fn hand_on_stored(
        &self,
        channel: &Arc<Channel>,
        incarnation: u64,
        since: Duration,
        may_go_on: impl FnOnce() -> bool,
    ) -> bool {
        let Some(local) = self.store() else { return false };
        let sequence = channel.reached(incarnation);
        let behind = Behind { key: channel.key().clone(), incarnation, sequence, since };
        let Some(stored) = local.stored(behind).await else { return false };
        self.hub.refilled(channel, incarnation, inbound::stored(channel.key(), stored), may_go_on());
        true
    }

    /// It is held for dead here, and may be taking publishes.
    fn may_go_on(&self, incarnation: u64) -> bool {
        self.deaths.lock().may_go_on(incarnation)
            || self.unreached.lock().runs().any(|unreached| unreached == incarnation)
    }

    /// The same, or what it has for this node is on its way already, also before gossip hears it again.
    pub fn may_come(&self, incarnation: u64) -> bool {
        self.may_go_on(incarnation) || self.deaths.lock().has_lanes(incarnation)
    }

    /// Nobody is resumed in these channels until it is known whether something of the run is missing.
    fn doubt_for_now(&self, incarnation: u64, numbers: &HashSet<u64>) {
        let own = self.own.lock();
        let key_of = |number: &u64| Some((*number, own.get(number)?.key.clone()));
        let doubted: Vec<_> = numbers.iter().filter_map(key_of).collect();
        drop(own);
        for (number, key) in doubted {
            self.hub.doubt_in(&key, number, incarnation, || true);
        }
    }

    /// Those of these channels, in which a dead run has never said how far it is, where it may have stored what is not here. A link
    /// and the lanes of a process that dies are not seen to end in the same moment, so in most of them it has not.
    async fn lacking(&self, incarnation: u64, since: Duration, mut numbers: HashSet<u64>) -> HashSet<u64> {
        let Some(local) = self.store() else { return numbers };
        let asked: Vec<_> = {
            let own = self.own.lock();
            let of = |number: &u64| own.get(number).map(|own| (*number, own.key.clone(), own.let_in));
            numbers.iter().filter_map(of).take(CHANNELS_MAX).collect()
        };
        let complete = stream::iter(asked)
            .map(async |(number, key, let_in)| {
                let channel = self.hub.live(&key).filter(|channel| channel.number() == number)?;
                // Whoever is resumed may come from so long ago.
                let let_in = let_in.map_or(Duration::ZERO, |let_in| let_in.elapsed());
                let since = since.max(let_in + self.hub.keeps_for());
                let sequence = channel.reached(incarnation);
                let stored = local.stored(Behind { key, incarnation, sequence, since }).await?;
                if stored.is_empty() {
                    let may_go_on = self.may_go_on(incarnation);
                    self.hub.refilled(&channel, incarnation, Vec::new(), may_go_on);
                }
                stored.is_empty().then_some(number)
            })
            .buffer_unordered(READS_MAX)
            .filter_map(std::future::ready)
            .collect::<HashSet<u64>>()
            .await;
        numbers.retain(|number| !complete.contains(number));
        numbers
    }

    /// A run has died: what it has stored is handed on, and where that cannot be told, or in the channels that it has never said
    /// anything of, its end is. Where it `is_doubtful` also in channels in which nothing was heard of it. False where nodes have no
    /// store together.
    pub(super) fn recover(
        &self,
        (incarnation, since): (u64, Duration),
        unheard: HashSet<u64>,
        is_doubtful: bool,
        leaves: Leaves,
    ) -> bool {
        let Some(routing) = self.store().and_then(|_| self.this.upgrade()) else { return false };
        if !is_doubtful {
            self.doubt_for_now(incarnation, &unheard);
        }
        self.tasks.spawn("recovery", OnStop::Cancel, async move {
            let mut channels = routing.hub.channels_with(incarnation);
            if is_doubtful {
                channels.extend(routing.hub.silent_with(incarnation));
            }
            channels.retain(|channel| !unheard.contains(&channel.number()));
            // There it is not known from where on something is missing.
            let mut lacking = unheard;
            if !is_doubtful {
                lacking = routing.lacking(incarnation, since, lacking).await;
            }
            routing.hub.gone_in(incarnation, &lacking);
            routing.doubt_again(incarnation);
            let mut lost = HashSet::new();
            lost.extend(channels.iter().skip(CHANNELS_MAX).map(|channel| channel.number()));
            channels.truncate(CHANNELS_MAX);
            let count = channels.len();
            let failed = stream::iter(channels)
                .map(async |channel| {
                    let is_complete = routing.complete_one(&channel, incarnation, since).await;
                    (!is_complete).then(|| channel.number())
                })
                .buffer_unordered(READS_MAX)
                .filter_map(std::future::ready)
                .collect::<Vec<u64>>()
                .await;
            lost.extend(failed);
            tracing::info!(channels = count, told = lost.len(), "what a dead node had stored was read");
            match leaves {
                Leaves::Doubt => routing.hub.died_in(&lost),
                Leaves::Nothing => routing.hub.gone_in(incarnation, &lost),
            }
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use bytes::Bytes;
    use futures_util::future::join_all;
    use futures_util::poll;

    use super::super::super::inbound::Inbound as _;
    use super::super::super::link::Item;
    use super::super::Standing;
    use super::super::fixture::{Node, PEER};
    use super::*;
    use crate::hub::Start;
    use crate::model::{ChannelName, ConnectionId, ForwardedParts};
    use crate::testing::SharedLocal;

    /// Whose store settles so often.
    fn node(settles: usize) -> (Node, Arc<SharedLocal>) {
        let (node, local) = (Node::new(), SharedLocal::new(settles, |_| None));
        node.routing.set_local(Arc::clone(&local) as Arc<dyn Local>);
        node.is_attached_to();
        (node, local)
    }

    #[tokio::test]
    async fn those_who_ask_while_all_settle_share_the_next_time() {
        let (node, local) = node(0);
        let settle = || node.routing.settle(&node.key);
        let mut first = Box::pin(settle());
        assert!(poll!(&mut first).is_pending());
        while local.asked.load(Ordering::SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        let mut later = Box::pin(join_all((0..20).map(|_| settle())));
        assert!(poll!(&mut later).is_pending());
        local.settling.add_permits(1);
        assert!(first.await);
        assert!(poll!(&mut later).is_pending(), "what they ask for begins after they asked");
        local.settling.add_permits(1);
        assert_eq!(later.await, [true; 20]);
        assert_eq!(local.asked.load(Ordering::SeqCst), 2);
    }

    #[tokio::test]
    async fn silent_peer_gets_one_settle_request_for_all_callers() {
        let (node, _) = node(9);
        node.finds_the_peer();
        node.has_a_link();
        let begun = Instant::now();
        let settled = join_all((0..20).map(|_| node.routing.settle(&node.key))).await;
        assert_eq!(settled, [false; 20]);
        assert!(begun.elapsed() < 2 * SETTLE_WAIT);
        let is_asking = |item: &Item| (0..99).any(|number| *item == Item::request(number, &Request::Settle));
        assert_eq!(node.says().iter().filter(|item| is_asking(item)).count(), 1);
    }

    #[tokio::test]
    async fn settle_fails_if_peer_or_local_store_does_not_settle() {
        for (answer, local_settles, is_settled) in [
            (Some(Answer::Done), 1, true),
            (Some(Answer::Done), 0, false),
            (Some(Answer::Unknown), 1, false),
            (None, 1, false),
        ] {
            let (node, _) = node(local_settles);
            node.finds_the_peer();
            node.has_a_link();
            let answers = async {
                // Whatever the number is under which it was asked.
                for number in (1..20).cycle().take(1_900) {
                    match answer.clone() {
                        Some(answer) => node.routing.answered(&node.peer, number, answer),
                        None => node.routing.link(&node.peer, false),
                    }
                    node.says_joined(0, number, Vec::new());
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            let (settled, ()) = tokio::join!(node.routing.settle(&node.key), answers);
            assert_eq!(settled, is_settled, "{answer:?} {local_settles}");
        }
    }

    /// A run that was heard up to 5 and is dead.
    fn with_a_dead_one(stored: fn(&Behind) -> Option<Vec<ForwardedParts>>) -> Node {
        let node = Node::new();
        node.routing.set_local(SharedLocal::new(9, stored));
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        let gone = Stamp { incarnation: 99, sequence: 4 };
        node.says_joined(5, 0, vec![gone]);
        node.says_joined(5, 1, vec![Stamp { sequence: 6, ..gone }]);
        node.loses_the_peer();
        node
    }

    /// It may take publishes behind a cut, so what is read once is not all.
    #[tokio::test]
    async fn of_a_run_that_may_go_on_it_is_read_each_time() {
        for (is_whole, read_again) in [(true, Vec::new()), (false, vec![PEER])] {
            let node = Node::new();
            node.routing.set_local(SharedLocal::new(9, |_| Some(Vec::new())));
            node.sees_the_peer_die(is_whole);
            let channel = node.routing.hub.live(&node.key).expect("it is attached to");
            let nothing = Serial::default();
            let complete = || node.routing.complete(&node.key, &nothing);
            complete().await.expect("it is read");
            assert_eq!(complete().await, Some(read_again.clone()));
            assert_eq!(channel.is_unsure_but_for(&[]), !is_whole);
            assert!(!channel.is_unsure_but_for(&[PEER]));
            node.routing.look_for_deaths(&[]);
            let is_sure = async {
                while channel.is_unsure_but_for(&[]) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(SETTLE_WAIT, is_sure).await.expect("it does not go on");
        }
    }

    fn one_row(behind: &Behind) -> Option<Vec<ForwardedParts>> {
        let connection_id = ConnectionId::from_bytes([7; 16]);
        let Behind { incarnation, sequence, .. } = *behind;
        let (first, last) = (sequence + 1, sequence + 1);
        let messages = vec![Bytes::from_static(b"{}")];
        Some(vec![ForwardedParts {
            incarnation,
            first,
            last,
            timestamp_ms: 1,
            connection_id,
            client_id: None,
            messages,
            bytes: 2,
        }])
    }

    /// Who attached was let in while there was no link to it, and it lived on for a moment.
    #[tokio::test]
    async fn down_peer_rows_decide_resume_if_its_position_was_unknown() {
        let standing =
            |is_dead| Standing { incarnation: PEER, is_dead, has_clients: true, ..Standing::default() };
        let nothing: fn(&Behind) -> _ = |_| Some(Vec::new());
        for (stored, resumes) in [(nothing, true), (one_row, false), (|_: &Behind| None, false)] {
            let node = Node::new();
            node.routing.set_local(SharedLocal::new(9, stored));
            node.finds_the_peer();
            node.has_a_link();
            node.routing.lane_opened(&node.peer, 0);
            node.routing.look_for_deaths(&[standing(false)]);
            node.loses_its_links();
            // What it says goes on coming.
            while node.routing.deaths.lock().is_ending(PEER) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            node.is_attached_to();
            let channel = node.routing.hub.live(&node.key).expect("it is attached to");
            let position = channel.mark().serial();
            node.routing.lane_ended(&node.peer, 0, true);
            node.routing.look_for_deaths(&[standing(true)]);
            assert!(channel.is_unsure_but_for(&[]), "until it is read");
            let is_sure = async {
                while channel.is_unsure_but_for(&[]) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            };
            tokio::time::timeout(SETTLE_WAIT, is_sure).await.expect("it is read");
            let start = node.routing.hub.look_after(&node.key, &position);
            assert_eq!(start == Start::Live, resumes, "{start:?}");
        }
    }

    #[tokio::test]
    async fn resume_fails_over_down_incarnation_that_store_cannot_read() {
        let node = with_a_dead_one(|_| None);
        assert_eq!(node.routing.complete(&node.key, &Serial::single(PEER, 5)).await, None);
        let node = with_a_dead_one(|behind| {
            assert_eq!((behind.incarnation, behind.sequence), (PEER, 5));
            Some(Vec::new())
        });
        assert_eq!(node.routing.complete(&node.key, &Serial::single(PEER, 5)).await, Some(vec![PEER]));
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        assert_eq!(channel.mark().serial().sequence_of(99), Some(6), "others have heard so much of it");
        let elsewhere = ChannelKey::new(node.key.account().clone(), ChannelName::of("other"));
        assert_eq!(node.routing.complete(&elsewhere, &Serial::default()).await, None);
    }
}
