//! Handoff: a peer keeps the replay buffers of a draining node's channels and gives them to the nodes at which the clients resume.

use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fanfare_proto::serial::Serial;
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use super::super::inbound::{PeerAnswer, PeerRequest};
use super::super::link::PeerItem;
use super::{JOIN_WAIT, Routing, hash_of};
use crate::hub::{AttachWaiter, Channel};
use crate::model::ChannelKey;
use crate::tasks::OnStop;

/// Channels that a node hands off at a time.
const HANDOFFS_MAX: usize = 64;
/// Channels whose handoff a node accepts at a time; a further one is refused.
const TAKE_OVERS_MAX: usize = 512;
/// Approximate bytes of text that are sent of one replay buffer; older messages are left out.
const HANDED_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Replay buffers in transit, in KiB, so that other items still have space in the peer queues.
const HANDED_KIB_MAX: usize = 12 * 1024;
/// Time after which the handoff of a channel is given up.
const HANDOFF_WAIT: Duration = Duration::from_secs(5);
/// Time after which a replay fetch, for which a client waits, is given up. Each asked peer has half of it.
const REPLAY_FETCH_WAIT: Duration = Duration::from_secs(6);
/// Replay fetches at a time: channels whose hashes have the same remainder wait for each other.
const REPLAY_FETCHES_MAX: usize = 64;
/// Peers that are asked for their replay buffer of a channel: all have nearly the same messages.
const REPLAY_FETCH_PEERS: usize = 3;
/// Longest time for which an asked node waits until recent failures are known, so that it still can answer in time.
const KNOWN_WAIT: Duration = Duration::from_secs(2);
/// Time for which a failed replay fetch of a channel is not tried again.
pub(super) const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Slots of the replay fetches at a time, each with the number of the channel whose fetch failed last, and when.
pub(super) struct ReplayFetchSlots([tokio::sync::Mutex<Option<(u64, Instant)>>; REPLAY_FETCHES_MAX]);

impl Default for ReplayFetchSlots {
    fn default() -> Self {
        Self(std::array::from_fn(|_| tokio::sync::Mutex::default()))
    }
}

impl ReplayFetchSlots {
    pub(super) async fn turn(&self, key: &ChannelKey) -> tokio::sync::MutexGuard<'_, Option<(u64, Instant)>> {
        self.0[hash_of(key) as usize % REPLAY_FETCHES_MAX].lock().await
    }
}

/// Semaphores for the replay buffers that this node sends, and for the handoffs that it accepts.
pub(super) fn bounds() -> (Semaphore, Arc<Semaphore>) {
    (Semaphore::new(HANDED_KIB_MAX), Arc::new(Semaphore::new(TAKE_OVERS_MAX)))
}

impl Routing {
    /// Hands off every channel that a client may resume here, except those that were handed off before.
    pub async fn hand_off_channels(&self) {
        let channels = self.hub.active_channels();
        stream::iter(channels)
            .for_each_concurrent(HANDOFFS_MAX, |channel| self.hand_off_channel(channel))
            .await;
    }

    /// True if a peer has answered the handoff of every channel that a client may resume here. A peer that did not take the messages
    /// still knows that there were some.
    pub(super) fn has_handed_off(&self) -> bool {
        let mut channels = self.hub.active_channels();
        channels.retain(|channel| {
            channel.position().serial().entries().iter().any(|(_, sequence)| *sequence > 0)
        });
        let handed = self.leaving.handed_off.lock();
        channels.iter().all(|channel| handed.contains_key(&channel.number()))
    }

    async fn hand_off_channel(&self, channel: Arc<Channel>) {
        let by = self.leaving.handed_off.lock().get(&channel.number()).copied().flatten();
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
            let request = PeerRequest::AcceptHandoff { key: channel.key().clone() };
            let answer = self.ask_one(peer, hash_of(channel.key()), &request, HANDOFF_WAIT).await;
            let Some(PeerAnswer::HandoffAccepted(is_kept)) = answer else { continue };
            self.leaving.handed_off.lock().insert(channel.number(), is_kept.then_some(peer));
            if is_kept {
                return;
            }
        }
    }

    /// Serves the request of a draining node to keep a channel.
    pub(super) fn serve_handoff(&self, from: u64, number: u64, key: ChannelKey) {
        let is_leaving = self.leaving.has_begun.load(Ordering::Relaxed);
        let turn = Arc::clone(&self.leaving.taking).try_acquire_owned().ok().filter(|_| !is_leaving);
        let (Some(turn), Some(routing)) = (turn, self.this.upgrade()) else {
            // The answer says that this node knows nothing of the channel.
            return self.answer(from, number, &PeerAnswer::Unknown);
        };
        self.tasks.spawn("take over", OnStop::Cancel, async move {
            let taken = tokio::time::timeout(HANDOFF_WAIT, routing.accept_handoff(from, &key)).await;
            let answer = taken.ok().flatten().map_or(PeerAnswer::Unknown, PeerAnswer::HandoffAccepted);
            routing.answer(from, number, &answer);
            drop(turn);
        });
    }

    /// Fetches the replay buffer of a channel. True if it is kept, None if this node does not even know the channel's sequences.
    async fn accept_handoff(&self, from: u64, key: &ChannelKey) -> Option<bool> {
        let channel = self.held(key).await?;
        let request = PeerRequest::FetchReplay { key: key.clone(), after: None };
        let answer = self.ask_one(from, hash_of(key), &request, HANDOFF_WAIT).await;
        let Some(PeerAnswer::ReplayHandoff(Some(handed))) = answer else { return Some(false) };
        Some(self.hub.accept_handoff(&channel, *handed, self.are_silent()))
    }

    /// Returns a test for incarnations from which nothing can come any more.
    fn are_silent(&self) -> impl Fn(u64) -> bool {
        let living = self.alive_incarnations();
        // An incarnation that gossip does not see may have items in transit to this node.
        move |incarnation| {
            !living.contains(&incarnation) && !self.node_failures.lock().has_open_streams(incarnation)
        }
    }

    /// Returns a test for incarnations that have ended and from which nothing can come. This node may not have met an unknown one yet.
    pub(super) fn have_ended(&self) -> impl Fn(u64) -> bool {
        let are_silent = self.are_silent();
        move |incarnation| are_silent(incarnation) && self.incarnations.lock().has_ended(incarnation)
    }

    /// Keeps the channel in memory, and returns it once all peers forward it.
    async fn held(&self, key: &ChannelKey) -> Option<Arc<Channel>> {
        let (done, is_done) = oneshot::channel();
        let waiter = || {
            Box::new(move || {
                done.send(()).ok();
            }) as AttachWaiter
        };
        if let Some(channel) = self.hub.retain_channel(key, waiter) {
            return Some(channel);
        }
        // The hub drops the sender if there is no memory for the channel.
        tokio::time::timeout(2 * JOIN_WAIT, is_done).await.ok()?.ok()?;
        self.hub.live(key)
    }

    /// Prepends the replay buffers of peers to that of a live channel, as long as `is_lacking` holds and there is memory. Done once for
    /// each replay buffer of this node, since all later messages come here anyway.
    pub async fn fetch_all_replay(&self, channel: &Arc<Channel>, is_lacking: impl Fn() -> bool) {
        let key = channel.key();
        let turn = tokio::time::timeout(REPLAY_FETCH_WAIT / 2, self.leaving.rewinding.turn(key));
        let Ok(mut turn) = turn.await else { return };
        let was_refused = turn.is_some_and(|(of, at)| of == channel.number() && at.elapsed() < RETRY_AFTER);
        let is_lacking = || is_lacking() && self.hub.can_prepend(key);
        if was_refused || !is_lacking() {
            return;
        }
        let taking = async {
            let (up, down): (Vec<u64>, Vec<u64>) =
                self.peers_interested_in(key).into_iter().partition(|peer| self.is_up(*peer));
            // A down peer has no replay buffer.
            let alive = self.peers_alive();
            let mut is_all = !down.iter().any(|peer| alive.contains(peer));
            for peer in up.into_iter().take(REPLAY_FETCH_PEERS) {
                let request = PeerRequest::FetchReplay { key: key.clone(), after: None };
                let answer = self.ask_one(peer, hash_of(key), &request, REPLAY_FETCH_WAIT / 2).await;
                is_all &= match answer {
                    Some(PeerAnswer::ReplayHandoff(Some(handed))) => {
                        self.settled(key).await
                            && self.hub.accept_peer_buffer(channel, *handed, self.have_ended())
                    }
                    _ => false,
                };
                if !is_lacking() {
                    return (false, true);
                }
            }
            (is_all, is_all)
        };
        self.hub.begin_cluster_backfill(channel);
        let taken = tokio::time::timeout(REPLAY_FETCH_WAIT, taking).await;
        let (is_all, is_enough) = taken.unwrap_or_default();
        self.hub.end_cluster_backfill(channel, is_all);
        if !is_enough {
            *turn = Some((channel.number(), Instant::now()));
        }
    }

    /// Prepends the replay buffer of a peer to that of this node, if only that of the peer reaches back to the position `after`. Other
    /// clients that resume the channel meanwhile share the fetch, and take no memory of their own.
    pub async fn fetch_replay_after(&self, key: &ChannelKey, after: &Serial) {
        let mut turn = self.leaving.replay_fetches.turn(key).await;
        let taken =
            tokio::time::timeout(REPLAY_FETCH_WAIT, self.fetch_replay_from_any(&mut turn, key, after));
        if taken.await.is_err() {
            *turn = self.hub.live(key).map(|channel| (channel.number(), Instant::now()));
        }
    }

    /// Asks one peer after the other. `turn` holds the number of the channel whose fetch failed last, and when.
    async fn fetch_replay_from_any(
        &self,
        turn: &mut Option<(u64, Instant)>,
        key: &ChannelKey,
        after: &Serial,
    ) {
        let is_lacking = || self.hub.replay_after(key, after).is_none() && self.hub.can_prepend(key);
        let was_refused = turn.filter(|(_, at)| at.elapsed() < RETRY_AFTER).map(|(channel, _)| channel);
        for peer in self.peers_interested_in(key).into_iter().filter(|peer| self.is_up(*peer)) {
            let Some(channel) = self.hub.live(key).filter(|_| is_lacking()) else { return };
            if was_refused == Some(channel.number()) {
                return;
            }
            let request = PeerRequest::FetchReplay { key: key.clone(), after: Some(after.clone()) };
            let answer = self.ask_one(peer, hash_of(key), &request, REPLAY_FETCH_WAIT / 2).await;
            let is_refused = match answer {
                // Once it has settled, this node has all messages of live nodes that the peer had.
                Some(PeerAnswer::ReplayHandoff(Some(handed))) => {
                    !self.settled(key).await
                        || !self.hub.accept_peer_buffer(&channel, *handed, self.have_ended())
                        || is_lacking()
                }
                // The clients that wait for this slot must not wait for the peer, too.
                None => true,
                Some(_) => false,
            };
            if is_refused {
                *turn = Some((channel.number(), Instant::now()));
            }
        }
    }

    /// Serves the request for a replay buffer, from a handoff or a replay fetch.
    pub(super) fn serve_replay_fetch(&self, to: u64, number: u64, key: ChannelKey, after: Option<Serial>) {
        let Some(routing) = self.this.upgrade() else { return };
        let Ok(permit) = Arc::clone(&self.local_waiting).try_acquire_owned() else {
            let Some(links) = self.links.get() else { return };
            return drop(links.send(to, 0, &PeerItem::replay_handoff(number, None)));
        };
        self.tasks.spawn("handoff", OnStop::Cancel, async move {
            // The peer waits no longer than this.
            tokio::time::timeout(HANDOFF_WAIT, routing.send_replay_buffer(to, number, &key, after))
                .await
                .ok();
            drop(permit);
        });
    }

    async fn send_replay_buffer(&self, to: u64, number: u64, key: &ChannelKey, after: Option<Serial>) {
        let Some(links) = self.links.get() else { return };
        // The asking peer may have noticed a failure earlier than this node.
        tokio::time::timeout(KNOWN_WAIT, self.until_failures_known()).await.ok();
        // Once it has settled, all messages from before the peers began to forward to the asking node are here.
        let is_settled = self.settled(key).await;
        let can_replay = after.is_none_or(|after| self.hub.replay_after(key, &after).is_some());
        let handed =
            (is_settled && can_replay).then(|| self.hub.make_handoff(key, HANDED_BYTES_MAX)).flatten();
        let messages = handed.iter().flat_map(|handed| &handed.messages);
        let bytes: usize = messages.map(|(delivery, _)| delivery.bytes() / 3).sum();
        let kib = u32::try_from(1 + bytes / 1024).unwrap_or(u32::MAX);
        let Ok(_turn) = self.leaving.handing.acquire_many(kib.min(HANDED_KIB_MAX as u32)).await else {
            return;
        };
        // The permits are held until the peer has confirmed the item, which takes space in the queue until then.
        links.send(to, hash_of(key), &PeerItem::replay_handoff(number, handed.as_ref())).await.ok();
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::{Inbound as _, InterestMessage};
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(10);

    /// Returns the answer of a node with a subscriber to a peer's request for the replay buffer.
    async fn given(after: Option<Serial>) -> PeerItem {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        node.routing.hub.retain_channel(&node.key, || Box::new(|| {}));
        node.says_joined(0, 0, Vec::new());
        node.routing.request_received(
            &node.peer,
            1,
            Some(PeerRequest::FetchReplay { key: node.key.clone(), after }),
        );
        let asking = async {
            loop {
                let round = node.routing.local_interest.lock()[&node.number()]
                    .rounds
                    .first()
                    .map(|round| round.number);
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

    /// A node with a subscriber and two peers, which both are interested in the channel.
    fn rewinding() -> (RoutingTestNode, Arc<Channel>) {
        let (node, other) = RoutingTestNode::of_three();
        for peer in [&node.peer, &other] {
            let added = InterestMessage::Added { key: node.key.clone(), number: 1, round: 0, sequence: 0 };
            node.routing.interest(peer, added);
        }
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        (node, channel)
    }

    #[tokio::test]
    async fn unreachable_peer_is_not_asked_for_its_replay_buffer() {
        let (node, channel) = rewinding();
        node.loses_its_links();
        node.says();
        node.routing.fetch_all_replay(&channel, || true).await;
        assert!(!channel.rewind(1, 0).is_cluster_wide && node.says().is_empty());
    }

    /// Asks peers that all give nothing, and returns the number of requests.
    async fn is_refused(node: &RoutingTestNode, channel: &Arc<Channel>) -> usize {
        node.says();
        let refusing = async {
            loop {
                [PEER, 8].iter().for_each(|peer| node.routing.drop_expected_answers(*peer, None));
                tokio::task::yield_now().await;
            }
        };
        let asking = async {
            tokio::select! {
                () = node.routing.fetch_all_replay(channel, || true) => {}
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
        assert!(!channel.rewind(1, 0).is_cluster_wide);
        while is_refused(&node, &channel).await == 0 {
            assert!(since.elapsed() < DEADLINE);
            tokio::time::sleep(RETRY_AFTER / 20).await;
        }
        assert!(since.elapsed() >= RETRY_AFTER);
        node.says();
        node.routing.fetch_all_replay(&channel, || false).await;
        assert!(node.says().is_empty(), "nothing is lacking");
    }

    #[tokio::test]
    async fn handoff_gives_messages_only_if_it_reached_the_given_position() {
        let nothing = PeerItem::replay_handoff(1, None);
        assert_ne!(given(None).await, nothing);
        assert_ne!(given(Some(Serial::single(1, 0))).await, nothing);
        assert_eq!(given(Some(Serial::single(99, 1))).await, nothing);
    }
}
