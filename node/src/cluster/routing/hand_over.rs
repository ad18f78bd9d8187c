//! The channels of a node that leaves: another one keeps what their clients may have missed, for whichever node they come to.

use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fanfare_proto::serial::Serial;
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use super::super::inbound::{Answer, Request};
use super::super::link::Item;
use super::{JOIN_WAIT, Routing, hash_of};
use crate::hub::{Channel, Waiter};
use crate::model::ChannelKey;
use crate::tasks::OnStop;

/// Channels that a node hands over at a time.
const HAND_OVERS_MAX: usize = 64;
/// Channels that a node takes over at a time; a further one is refused.
const TAKE_OVERS_MAX: usize = 512;
/// What is handed over of one channel, in bytes of text, roughly: the oldest messages are left.
const HANDED_BYTES_MAX: usize = 4 * 1024 * 1024;
/// What is on its way of all channels, so that it leaves room in the lanes, in units of 1 KiB.
const HANDED_KIB_MAX: usize = 12 * 1024;
/// A channel that has not been handed over by then is given up.
const HAND_OVER_WAIT: Duration = Duration::from_secs(5);
/// The same of one that is taken back: somebody waits for it. Half of that has each node that is asked.
const TAKE_BACK_WAIT: Duration = Duration::from_secs(6);
/// Channels that are taken back at a time: those with the same remainder wait for each other.
const TAKING_BACK: usize = 64;
/// Nodes that are asked for all their recent messages of a channel: each has much the same.
const TAKEN_BACK_OF: usize = 3;
/// Who is asked waits no longer for a death to be known than leaves room to answer.
const KNOWN_WAIT: Duration = Duration::from_secs(2);
/// A channel that was given and could not be taken is not asked for again within this.
pub(super) const NOT_AGAIN: Duration = Duration::from_secs(1);

/// For each channel that may be taken back at a time, which one could not be, and when.
pub(super) struct TakingBack([tokio::sync::Mutex<Option<(u64, Instant)>>; TAKING_BACK]);

impl Default for TakingBack {
    fn default() -> Self {
        Self(std::array::from_fn(|_| tokio::sync::Mutex::default()))
    }
}

impl TakingBack {
    pub(super) async fn turn(&self, key: &ChannelKey) -> tokio::sync::MutexGuard<'_, Option<(u64, Instant)>> {
        self.0[hash_of(key) as usize % TAKING_BACK].lock().await
    }
}

/// Of what this node gives, and of what it takes.
pub(super) fn bounds() -> (Semaphore, Arc<Semaphore>) {
    (Semaphore::new(HANDED_KIB_MAX), Arc::new(Semaphore::new(TAKE_OVERS_MAX)))
}

impl Routing {
    /// Has others take over every channel that somebody here may come back to, but for those that were taken over already.
    pub async fn hand_over(&self) {
        let channels = self.hub.channels_heard();
        stream::iter(channels)
            .for_each_concurrent(HAND_OVERS_MAX, |channel| self.hand_over_one(channel))
            .await;
    }

    /// Of each channel that somebody here may come back to another node has said whether it takes it over; one that does not knows that
    /// there was something.
    pub(super) fn has_handed_over(&self) -> bool {
        let mut channels = self.hub.channels_heard();
        channels
            .retain(|channel| channel.mark().serial().entries().iter().any(|(_, sequence)| *sequence > 0));
        let handed = self.leaving.handed.lock();
        channels.iter().all(|channel| handed.contains_key(&channel.number()))
    }

    async fn hand_over_one(&self, channel: Arc<Channel>) {
        let by = self.leaving.handed.lock().get(&channel.number()).copied().flatten();
        if by.is_some_and(|by| self.is_up(by)) {
            return;
        }
        let hash = |peer: &u64| {
            let mut hasher = std::hash::DefaultHasher::new();
            (peer, channel.key()).hash(&mut hasher);
            hasher.finish()
        };
        let mut survivors = self.leaving.survivors.lock().clone();
        survivors.retain(|peer| self.is_up(*peer));
        survivors.sort_unstable_by_key(hash);
        for peer in survivors {
            let request = Request::TakeOver { key: channel.key().clone() };
            let answer = self.ask_one(peer, hash_of(channel.key()), &request, HAND_OVER_WAIT).await;
            let Some(Answer::TakenOver(is_kept)) = answer else { continue };
            self.leaving.handed.lock().insert(channel.number(), is_kept.then_some(peer));
            if is_kept {
                return;
            }
        }
    }

    /// A node that leaves asks this one to keep a channel.
    pub(super) fn asked_to_take_over(&self, from: u64, number: u64, key: ChannelKey) {
        let is_leaving = self.leaving.has_begun.load(Ordering::Relaxed);
        let turn = Arc::clone(&self.leaving.taking).try_acquire_owned().ok().filter(|_| !is_leaving);
        let (Some(turn), Some(routing)) = (turn, self.this.upgrade()) else {
            // Nothing is known here of the channel.
            return self.answer(from, number, &Answer::Unknown);
        };
        self.tasks.spawn("take over", OnStop::Cancel, async move {
            let taken = tokio::time::timeout(HAND_OVER_WAIT, routing.take_over(from, &key)).await;
            let answer = taken.ok().flatten().map_or(Answer::Unknown, Answer::TakenOver);
            routing.answer(from, number, &answer);
            drop(turn);
        });
    }

    /// None where nothing is known here of the channel either.
    async fn take_over(&self, from: u64, key: &ChannelKey) -> Option<bool> {
        let channel = self.held(key).await?;
        let request = Request::HandOver { key: key.clone(), after: None };
        let answer = self.ask_one(from, hash_of(key), &request, HAND_OVER_WAIT).await;
        let Some(Answer::HandedOver(Some(handed))) = answer else { return Some(false) };
        Some(self.hub.take_over(&channel, *handed, self.have_gone()))
    }

    /// Of runs, whether nothing comes of one any more.
    fn have_gone(&self) -> impl Fn(u64) -> bool {
        let living = self.living();
        // One that is not heard of may have something for this node on its way.
        move |run| !living.contains(&run) && !self.deaths.lock().has_lanes(run)
    }

    /// The same of runs that are known to have ended: there may be one that this node has not met yet.
    pub(super) fn have_ended(&self) -> impl Fn(u64) -> bool {
        let have_gone = self.have_gone();
        move |run| have_gone(run) && self.runs.lock().has_ended(run)
    }

    /// The channel, once all others forward it.
    async fn held(&self, key: &ChannelKey) -> Option<Arc<Channel>> {
        let (done, is_done) = oneshot::channel();
        let waiter = || {
            Box::new(move || {
                done.send(()).ok();
            }) as Waiter
        };
        if let Some(channel) = self.hub.hold(key, waiter) {
            return Some(channel);
        }
        // Its other end is dropped where there is no room.
        tokio::time::timeout(2 * JOIN_WAIT, is_done).await.ok()?.ok()?;
        self.hub.live(key)
    }

    /// Puts what others have of a channel before the recent messages here, where it lives, as long as that `is_lacking` and there is
    /// room. This is done once, until the recent messages begin anew, since all that comes later comes here, too.
    pub async fn take_back_all(&self, channel: &Arc<Channel>, is_lacking: impl Fn() -> bool) {
        let key = channel.key();
        let turn = tokio::time::timeout(TAKE_BACK_WAIT / 2, self.leaving.rewinding.turn(key));
        let Ok(mut turn) = turn.await else { return };
        let was_refused = turn.is_some_and(|(of, at)| of == channel.number() && at.elapsed() < NOT_AGAIN);
        let is_lacking = || is_lacking() && self.hub.has_room_before(key);
        if was_refused || !is_lacking() {
            return;
        }
        let taking = async {
            let (up, down): (Vec<u64>, Vec<u64>) =
                self.wanting(key).into_iter().partition(|peer| self.is_up(*peer));
            // Who is dead has none.
            let alive = self.peers_alive();
            let mut is_all = !down.iter().any(|peer| alive.contains(peer));
            for peer in up.into_iter().take(TAKEN_BACK_OF) {
                let request = Request::HandOver { key: key.clone(), after: None };
                let answer = self.ask_one(peer, hash_of(key), &request, TAKE_BACK_WAIT / 2).await;
                is_all &= match answer {
                    Some(Answer::HandedOver(Some(handed))) => {
                        self.settled(key).await && self.hub.take_back(channel, *handed, self.have_ended())
                    }
                    _ => false,
                };
                if !is_lacking() {
                    return (false, true);
                }
            }
            (is_all, is_all)
        };
        self.hub.asks_all(channel);
        let taken = tokio::time::timeout(TAKE_BACK_WAIT, taking).await;
        let (is_all, is_enough) = taken.unwrap_or_default();
        self.hub.asked_all(channel, is_all);
        if !is_enough {
            *turn = Some((channel.number(), Instant::now()));
        }
    }

    /// Puts what others have of a channel before the recent messages here, where these do not reach what follows the position
    /// and those do. Whoever comes back to it meanwhile waits for the same, and takes no memory of its own.
    pub async fn take_back(&self, key: &ChannelKey, after: &Serial) {
        let mut turn = self.leaving.taking_back.turn(key).await;
        let taken = tokio::time::timeout(TAKE_BACK_WAIT, self.take_back_of_any(&mut turn, key, after));
        if taken.await.is_err() {
            *turn = self.hub.live(key).map(|channel| (channel.number(), Instant::now()));
        }
    }

    /// `turn` is the channel that could not be taken when this was last tried, and when that was.
    async fn take_back_of_any(&self, turn: &mut Option<(u64, Instant)>, key: &ChannelKey, after: &Serial) {
        let is_lacking = || self.hub.recent_after(key, after).is_none() && self.hub.has_room_before(key);
        let was_refused = turn.filter(|(_, at)| at.elapsed() < NOT_AGAIN).map(|(channel, _)| channel);
        for peer in self.wanting(key).into_iter().filter(|peer| self.is_up(*peer)) {
            let Some(channel) = self.hub.live(key).filter(|_| is_lacking()) else { return };
            if was_refused == Some(channel.number()) {
                return;
            }
            let request = Request::HandOver { key: key.clone(), after: Some(after.clone()) };
            let answer = self.ask_one(peer, hash_of(key), &request, TAKE_BACK_WAIT / 2).await;
            let is_refused = match answer {
                // Then all has come that it had, of every node that lives.
                Some(Answer::HandedOver(Some(handed))) => {
                    !self.settled(key).await
                        || !self.hub.take_back(&channel, *handed, self.have_ended())
                        || is_lacking()
                }
                // Who waits meanwhile is not to wait for it too.
                None => true,
                Some(_) => false,
            };
            if is_refused {
                *turn = Some((channel.number(), Instant::now()));
            }
        }
    }

    /// Who takes a channel over, or back, asks for what there is.
    pub(super) fn asked_to_hand_over(&self, to: u64, number: u64, key: ChannelKey, after: Option<Serial>) {
        let Some(routing) = self.this.upgrade() else { return };
        let Ok(permit) = Arc::clone(&self.local_waiting).try_acquire_owned() else {
            let Some(links) = self.links.get() else { return };
            return drop(links.send(to, 0, &Item::handed_over(number, None)));
        };
        self.tasks.spawn("hand over", OnStop::Cancel, async move {
            // By then nobody waits for it any more.
            tokio::time::timeout(HAND_OVER_WAIT, routing.give(to, number, &key, after)).await.ok();
            drop(permit);
        });
    }

    async fn give(&self, to: u64, number: u64, key: &ChannelKey, after: Option<Serial>) {
        let Some(links) = self.links.get() else { return };
        // Who asks may have noticed a death earlier.
        tokio::time::timeout(KNOWN_WAIT, self.until_known()).await.ok();
        // Then all is here that was numbered before the others began to forward to who asks.
        let is_settled = self.settled(key).await;
        let is_wanted = after.is_none_or(|after| self.hub.recent_after(key, &after).is_some());
        let handed = (is_settled && is_wanted).then(|| self.hub.hand_over(key, HANDED_BYTES_MAX)).flatten();
        let messages = handed.iter().flat_map(|handed| &handed.messages);
        let bytes: usize = messages.map(|(delivery, _)| delivery.bytes() / 3).sum();
        let room = u32::try_from(1 + bytes / 1024).unwrap_or(u32::MAX);
        let Ok(_turn) = self.leaving.handing.acquire_many(room.min(HANDED_KIB_MAX as u32)).await else {
            return;
        };
        // Until it is there, it takes room in the lane.
        links.send(to, hash_of(key), &Item::handed_over(number, handed.as_ref())).await.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::{Inbound as _, Interest};
    use super::super::fixture::{Node, PEER};
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(10);

    /// What a node that is attached to the channel gives a peer.
    async fn given(after: Option<Serial>) -> Item {
        let node = Node::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        node.routing.hub.hold(&node.key, || Box::new(|| {}));
        node.says_joined(0, 0, Vec::new());
        node.routing.asked(&node.peer, 1, Some(Request::HandOver { key: node.key.clone(), after }));
        let asking = async {
            loop {
                let round = node.routing.own.lock()[&node.number()].rounds.first().map(|round| round.number);
                let Some(round) = round else {
                    tokio::task::yield_now().await;
                    continue;
                };
                node.says();
                return node.says_joined(0, round, Vec::new());
            }
        };
        tokio::time::timeout(DEADLINE, asking).await.expect("it asks whether all has come");
        let giving = async {
            loop {
                if let Some(item) = node.says().pop() {
                    return item;
                }
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(DEADLINE, giving).await.expect("it answers")
    }

    /// With a second one, which wants the channel too, and somebody attached here.
    fn rewinding() -> (Node, Arc<Channel>) {
        let (node, other) = Node::of_three();
        for peer in [&node.peer, &other] {
            let wanted = Interest::Wanted { key: node.key.clone(), number: 1, round: 0, sequence: 0 };
            node.routing.interest(peer, wanted);
        }
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        (node, channel)
    }

    #[tokio::test]
    async fn unreachable_peer_is_not_asked_for_its_replay_buffer() {
        let (node, channel) = rewinding();
        node.loses_its_links();
        node.says();
        node.routing.take_back_all(&channel, || true).await;
        assert!(!channel.recent_back(1, 0).is_of_all && node.says().is_empty());
    }

    /// Each who is asked gives nothing.
    async fn is_refused(node: &Node, channel: &Arc<Channel>) -> usize {
        node.says();
        let refusing = async {
            loop {
                [PEER, 8].iter().for_each(|peer| node.routing.answers_no_more(*peer, None));
                tokio::task::yield_now().await;
            }
        };
        let asking = async {
            tokio::select! {
                () = node.routing.take_back_all(channel, || true) => {}
                () = refusing => {}
            }
        };
        tokio::time::timeout(DEADLINE, asking).await.expect("who is refused waits for nobody");
        node.says().len()
    }

    #[tokio::test]
    async fn peer_that_refuses_its_replay_buffer_is_asked_again_later() {
        let (node, channel) = rewinding();
        let since = Instant::now();
        assert_eq!(is_refused(&node, &channel).await, 2);
        assert!(!channel.recent_back(1, 0).is_of_all);
        while is_refused(&node, &channel).await == 0 {
            assert!(since.elapsed() < DEADLINE);
            tokio::time::sleep(NOT_AGAIN / 20).await;
        }
        assert!(since.elapsed() >= NOT_AGAIN);
        node.says();
        node.routing.take_back_all(&channel, || false).await;
        assert!(node.says().is_empty(), "nothing is lacking");
    }

    #[tokio::test]
    async fn messages_are_given_where_the_position_of_who_asks_is_reached() {
        let nothing = Item::handed_over(1, None);
        assert_ne!(given(None).await, nothing);
        assert_ne!(given(Some(Serial::single(1, 0))).await, nothing);
        assert_eq!(given(Some(Serial::single(99, 1))).await, nothing);
    }
}
