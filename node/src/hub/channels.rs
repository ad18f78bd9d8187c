//! The node's channels: numbering and interest under one small lock each.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dashmap::DashMap;
use fanfare_proto::serial::Serial;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::batches::Batches;
use super::budget::Budget;
use super::delivery::Delivery;
use super::few::Few;
use super::former::Former;
use super::interest::{Interest, Joining};
use super::mark::Mark;
use super::member_bytes::MemberBytes;
use super::members::Members;
use super::presence::PresenceDelivery;
use super::ring::Ring;
use super::roster::Roster;
use super::whole::Whole;
use crate::model::{ChannelKey, Clock, Forwarded, Limits, Published, Stamp};

/// What gets the frames of a channel: a shard of sockets. `deliver` must not block.
pub trait DeliveryTarget: Send + Sync {
    fn deliver(&self, delivery: Arc<Delivery>);
    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>);
    /// Something is missing that comes before what is delivered of this channel after `mark`.
    fn lose(&self, channel: u64, mark: &Mark);
    /// More waits than the target's bound.
    fn congested(&self) -> bool;
}

/// A channel that somebody on this node listens to, did so lately, or is just publishing on.
pub struct Channel {
    pub(super) number: u64,
    key: ChannelKey,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    /// Where it stands: the last number given in this incarnation, and what came from other nodes.
    pub(super) mark: Mark,
    /// Bit per target that has subscribers.
    pub(super) targets: u64,
    /// The number of the last attach, over all channels from 1.
    pub(super) attached: u64,
    /// From the first message while somebody is attached, or from the last detach, until nobody has been for twice the
    /// resume window, unless memory is scarce.
    pub(super) ring: Option<Box<Ring>>,
    /// None while nobody is present. With members the channel lives.
    pub(super) members: Option<Box<Members>>,
    /// Runs that stand in its position no more.
    pub(super) former: Former,
    /// Runs of which something is lost, and that have not told how far they are.
    pub(super) unsure: Few,
    /// Runs of which all is heard since they told where they stand.
    pub(super) whole: Whole,
    /// What other nodes know of the interest in it.
    pub(super) joining: Joining,
    /// Taken out of the map; whoever still holds it looks the key up again.
    pub(super) removed: bool,
}

impl State {
    /// Somebody is attached, or was lately.
    pub(super) fn is_heard(&self) -> bool {
        self.targets != 0 || self.ring.is_some()
    }

    /// Gives this run a number without a message, so that whoever had all that was here is not taken for having all.
    pub(super) fn end_positions(&mut self) {
        self.mark.own.sequence += 1;
        self.mark.place += 1;
        if let Some(ring) = &mut self.ring {
            ring.restart(&self.mark);
        }
    }

    fn is_unused(&self) -> bool {
        // Who waits for other nodes is not attached yet.
        let is_awaited = matches!(self.joining, Joining::Begun(_));
        self.targets == 0 && self.ring.is_none() && self.members.is_none() && !is_awaited
    }
}

impl Channel {
    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn key(&self) -> &ChannelKey {
        &self.key
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("number", &self.number).finish_non_exhaustive()
    }
}

/// What a publish is given under the channel's lock.
#[derive(Debug, Clone, Copy)]
pub struct Numbering {
    pub incarnation: u64,
    pub first_sequence: u64,
    pub timestamp_ms: u64,
}

/// Where the places of a channel begin above its sequences in a cluster: what another node hands over finds places before.
pub(super) const PLACES_BEFORE: u64 = 1 << 32;

/// Every channel of this node, for all accounts.
///
/// A channel that nobody is present on or attached to lately is forgotten after the publish; its numbers go on above the
/// highest ever given, so a number is never used twice in one incarnation, and while a channel lives its numbers rise
/// by one.
pub struct Hub {
    pub(super) channels: DashMap<ChannelKey, Arc<Channel>>,
    pub(super) targets: Vec<Arc<dyn DeliveryTarget>>,
    pub(super) rings: Arc<Budget>,
    started: Instant,
    batches: Batches,
    pub(super) incarnation: u64,
    next_number: AtomicU64,
    attaches: AtomicU64,
    sequence_floor: AtomicU64,
    /// Numbers without a message were given that nobody was told of.
    pub(super) skipped: AtomicBool,
    /// The last number given to a presence event, over all channels.
    pub(super) presence_sequence: AtomicU64,
    pub(super) roster: Roster,
    pub(super) member_bytes: MemberBytes,
    pub(super) clock: Clock,
    pub(super) interest: OnceLock<Arc<dyn Interest>>,
}

impl Hub {
    /// At most 64 targets.
    pub fn new(targets: Vec<Arc<dyn DeliveryTarget>>, clock: Clock, limits: &Limits) -> Self {
        assert!(targets.len() <= 64, "a channel keeps its targets in one word");
        let incarnation =
            u64::from_be_bytes(crate::model::random_bytes()) >> (u64::BITS - Serial::INCARNATION_BITS);
        Self {
            channels: DashMap::new(),
            targets,
            rings: Budget::new(limits),
            started: Instant::now(),
            batches: Batches::new(),
            incarnation,
            next_number: AtomicU64::new(0),
            attaches: AtomicU64::new(0),
            sequence_floor: AtomicU64::new(0),
            skipped: AtomicBool::new(false),
            presence_sequence: AtomicU64::new(0),
            roster: Roster::new(incarnation),
            member_bytes: MemberBytes::default(),
            clock,
            interest: OnceLock::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn of_run(self, incarnation: u64) -> Self {
        Self { incarnation, roster: Roster::new(incarnation), ..self }
    }

    /// Channels that are live: subscribed to now or lately, with members, or in the middle of a publish.
    pub fn channel_count(&self) -> usize {
        self.channels.len()
    }

    /// Some target is over its bound: readers wait before they bring in more.
    pub fn congested(&self) -> bool {
        self.targets.iter().any(|target| target.congested())
    }

    /// Numbers `count` messages and hands what `build` makes of it to every target with interest.
    ///
    /// `build` runs under the channel's lock, so whatever it queues stands in the order of the numbers.
    pub fn publish(
        &self,
        key: &ChannelKey,
        count: u64,
        build: impl FnOnce(Numbering) -> Arc<Published>,
    ) -> Arc<Published> {
        let published = self.with_channel(key, |channel, state| {
            self.begin_ring(state);
            let first_sequence = state.mark.own.sequence + 1;
            state.mark.own.sequence += count;
            state.mark.place += count;
            let timestamp_ms = self.clock.stamp_ms(key);
            let published = build(Numbering { incarnation: self.incarnation, first_sequence, timestamp_ms });
            if state.is_heard() {
                let delivery = Delivery::own(channel.number, state.mark.clone(), Arc::clone(&published));
                self.hand_on(channel, state, delivery);
            }
            published
        });
        self.give_way();
        published
    }

    /// A batch of a peer, of so many bytes, is about to be handed on.
    pub fn batch_came(&self, bytes: usize) {
        self.batches.came(bytes, Instant::now());
    }

    /// The time between two batches of late, of whichever peers.
    pub fn batches_apart(&self) -> Duration {
        self.batches.apart()
    }

    /// Hands messages that entered at another node to every target with interest. What was heard before is passed over.
    pub fn forwarded(&self, forwarded: Forwarded) {
        // Nobody listens here; what the other node had numbered by then it tells when somebody does.
        let Some(channel) = self.live(&forwarded.key) else { return };
        let mut state = channel.state.lock();
        // What a run had before it has told where it stands counts as missed, so that there is no gap in what is heard of it.
        let is_whole = matches!(state.joining, Joining::Not) || state.whole.contains(forwarded.incarnation);
        if state.removed || !is_whole || state.mark.covers(forwarded.last()) {
            return;
        }
        self.take(&channel, &mut state, forwarded);
        drop(state);
        self.give_way();
    }

    /// Hands on what is new here: the beginning of a publish may have come from the store.
    pub(super) fn take(&self, channel: &Arc<Channel>, state: &mut State, mut forwarded: Forwarded) {
        self.begin_ring(state);
        let heard = state.mark.others.as_ref().and_then(|others| others.sequence_of(forwarded.incarnation));
        forwarded.cut(heard.unwrap_or(0));
        state.mark.hear(forwarded.last(), forwarded.messages.len() as u64);
        if state.is_heard() {
            let delivery = Delivery::forwarded(channel.number, state.mark.clone(), forwarded);
            self.hand_on(channel, state, delivery);
        }
    }

    /// The recent messages of a channel begin with the first one since somebody has attached.
    pub(super) fn begin_ring(&self, state: &mut State) {
        if state.targets != 0 && state.ring.is_none() {
            state.ring = Ring::begin(state.mark.clone(), &self.rings);
        }
    }

    fn hand_on(&self, channel: &Arc<Channel>, state: &mut State, delivery: Delivery) {
        let delivery = Arc::new(delivery);
        if let Some(ring) = &mut state.ring {
            ring.push(Arc::clone(&delivery), self.now_ms());
            if ring.is_listed(0) {
                ring.list(channel, state.attached);
            }
        }
        for (bit, target) in self.targets.iter().enumerate() {
            if state.targets & (1 << bit) != 0 {
                target.deliver(Arc::clone(&delivery));
            }
        }
    }

    /// Where the channel stands, for an attach that asks for no delivery.
    pub fn position(&self, key: &ChannelKey) -> Mark {
        self.live(key).map_or_else(|| self.unheard(), |channel| channel.mark())
    }

    /// Of a channel that nothing is known of any more.
    fn unheard(&self) -> Mark {
        let sequence = self.sequence_floor.load(Ordering::SeqCst);
        Mark::own(Stamp { incarnation: self.incarnation, sequence })
    }

    /// The target has no subscriber of the channel any more.
    pub fn detach(&self, channel: &Arc<Channel>, target: usize) {
        let mut state = channel.state.lock();
        state.targets &= !(1 << target);
        if state.targets == 0 {
            let now_ms = self.now_ms();
            if state.ring.is_none() {
                state.ring = Ring::begin(state.mark.clone(), &self.rings);
            }
            if let Some(ring) = &mut state.ring {
                ring.idle_ms = Some(now_ms);
            }
        }
        self.remove_if_unused(channel, &mut state);
        drop(state);
        self.give_way();
    }

    /// So long what may be missed is kept, and positions are good.
    pub fn keeps_for(&self) -> Duration {
        Duration::from_millis(self.rings.keep_ms)
    }

    /// The number of one more attach.
    pub(super) fn next_attach(&self) -> u64 {
        self.attaches.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Since long enough before the hub began that all has a time that is not too old to be kept; unlike the clock it is not
    /// touched by who sets the time.
    pub(super) fn now_ms(&self) -> u64 {
        let since_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        since_ms.saturating_add(self.rings.keep_ms).saturating_add(1)
    }

    pub(super) fn with_channel<R>(
        &self,
        key: &ChannelKey,
        act: impl FnOnce(&Arc<Channel>, &mut State) -> R,
    ) -> R {
        loop {
            let channel = self.lookup(key);
            let mut state = channel.state.lock();
            if state.removed {
                continue;
            }
            let result = act(&channel, &mut state);
            self.remove_if_unused(&channel, &mut state);
            return result;
        }
    }

    /// The channels that live now, to be locked one by one: one that is being forgotten takes its own lock before that of the map.
    pub(super) fn all(&self) -> Vec<Arc<Channel>> {
        self.channels.iter().map(|entry| Arc::clone(&entry)).collect()
    }

    /// The channel if it lives.
    pub fn live(&self, key: &ChannelKey) -> Option<Arc<Channel>> {
        self.channels.get(key).map(|channel| Arc::clone(&channel))
    }

    /// Of a channel that begins.
    fn fresh(&self) -> Mark {
        let mark = self.unheard();
        let before = if self.is_clustered() { PLACES_BEFORE } else { 0 };
        Mark { place: mark.place + before, ..mark }
    }

    fn lookup(&self, key: &ChannelKey) -> Arc<Channel> {
        if let Some(channel) = self.channels.get(key) {
            return Arc::clone(&channel);
        }
        Arc::clone(&self.channels.entry(key.clone()).or_insert_with(|| {
            Arc::new(Channel {
                number: self.next_number.fetch_add(1, Ordering::Relaxed),
                key: key.clone(),
                state: Mutex::new(State {
                    mark: self.fresh(),
                    targets: 0,
                    attached: 0,
                    ring: None,
                    members: None,
                    former: Former::default(),
                    unsure: Few::default(),
                    whole: Whole::default(),
                    joining: Joining::default(),
                    removed: false,
                }),
            })
        }))
    }

    pub(super) fn remove_if_unused(&self, channel: &Arc<Channel>, state: &mut State) {
        if state.is_unused() && !state.removed {
            state.removed = true;
            if let (Joining::Done, Some(interest)) = (&state.joining, self.interest.get()) {
                interest.leave(&channel.key, channel.number);
                // From now on it is not known what others publish, so no position is taken for that of its next life.
                state.mark.own.sequence += 1;
            }
            self.sequence_floor.fetch_max(state.mark.own.sequence, Ordering::SeqCst);
            self.channels.remove(&channel.key);
        }
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("channels", &self.channels.len()).finish_non_exhaustive()
    }
}
