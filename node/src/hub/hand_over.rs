//! What a node that leaves has of a channel, and another one takes over for those who come back.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, Hub, State};
use super::delivery::Delivery;
use super::interest::Waiter;
use super::mark::Mark;
use super::ring::{OfAll, Ring};
use crate::model::{ChannelKey, Forwarded, Stamp};

/// The recent messages of a channel, in the order in which a node has handed them on, without a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HandedOver<M> {
    /// Where the channel stood before them.
    pub begin: Serial,
    /// Where it stands.
    pub end: Serial,
    /// Each with how long ago it was handed on, in milliseconds.
    pub messages: Vec<(M, u64)>,
}

impl<M> HandedOver<M> {
    /// Without numbers behind which there is no message, as far as that is known here.
    fn known_to(self, state: &State) -> Self {
        let known = |position: &Serial| state.lowered(position).into_owned();
        Self { begin: known(&self.begin), end: known(&self.end), ..self }
    }
}

impl Hub {
    /// The channels that somebody is attached to, or was lately.
    pub fn channels_heard(&self) -> Vec<Arc<Channel>> {
        let mut channels = self.all();
        channels.retain(|channel| channel.state.lock().is_heard());
        channels
    }

    /// The latest messages of a channel, about `bytes_max` of them. None where something is missing.
    pub fn hand_over(&self, key: &ChannelKey, bytes_max: usize) -> Option<HandedOver<Arc<Delivery>>> {
        let channel = self.live(key)?;
        let state = channel.state.lock();
        if !state.unsure.is_empty() || !state.is_heard() {
            return None;
        }
        let here = state.mark.serial();
        let end = state.whole.and(here.clone());
        let latest = state.ring.as_ref().map(|ring| ring.latest(bytes_max, self.now_ms()));
        let (begin, messages) = latest.unwrap_or_else(|| (here, Vec::new()));
        Some(HandedOver { begin, end, messages })
    }

    /// Keeps a channel as if somebody had been attached to it until now. It is given back if all other nodes forward it by now;
    /// otherwise what `waiter` makes runs when they do, unless there is no room for it.
    pub fn hold(&self, key: &ChannelKey, waiter: impl FnOnce() -> Waiter) -> Option<Arc<Channel>> {
        self.with_channel(key, |channel, state| {
            let now_ms = self.now_ms();
            if state.ring.is_none() {
                state.ring = Ring::begin(state.mark.clone(), &self.rings);
                state.attached = self.next_attach();
            }
            let is_attached = state.targets != 0;
            state.ring.as_mut()?.idle_ms = (!is_attached).then_some(now_ms);
            self.join_others(channel, state, waiter)
        })
    }

    /// Puts what another node has handed over before what the channel has by itself: from where that begins the channel has
    /// everything by itself. `has_left` are the runs of which nothing comes any more. False where the two do not meet, or something that
    /// was handed over neither came here nor will: nobody can be brought on over that.
    pub fn take_over(
        &self,
        channel: &Arc<Channel>,
        handed: HandedOver<Forwarded>,
        has_left: impl Fn(u64) -> bool,
    ) -> bool {
        let mut state = channel.state.lock();
        if !state.unsure.is_empty() || state.ring.is_none() {
            return false;
        }
        let is_lacking = |one: &Forwarded| {
            let stamp = Stamp { incarnation: one.incarnation, sequence: one.last };
            // What is not forwarded to here is not on its way either.
            let comes = !has_left(one.incarnation) && state.whole.contains(one.incarnation);
            !comes && !state.knows(stamp)
        };
        let is_lacking = handed.messages.iter().any(|(one, _)| is_lacking(one));
        let handed = handed.known_to(&state);
        for stamp in Stamp::all_of(&handed.end) {
            let Stamp { incarnation, .. } = stamp;
            if !has_left(incarnation) || state.mark.covers(stamp) {
                continue;
            }
            let before =
                handed.begin.sequence_of(incarnation).map(|sequence| Stamp { incarnation, sequence });
            let before = before.filter(|stamp| !state.mark.covers(*stamp));
            // Who comes from there has it in its position, and who lacks what lies before is not brought on.
            state.mark.hear(stamp, 0);
            if let (Some(before), Some(ring)) = (before, &mut state.ring) {
                ring.know_all(&[before]);
            }
        }
        if is_lacking {
            self.break_off(channel, &mut state);
            return false;
        }
        let is_taken = self.put_before(channel, &mut state, handed, &Serial::default());
        drop(state);
        self.give_way();
        is_taken
    }

    /// Others are asked for what they have had lately; [`Hub::asked_all`] follows.
    pub fn asks_all(&self, channel: &Channel) {
        let mut state = channel.state.lock();
        self.begin_ring(&mut state);
        if let Some(ring) = &mut state.ring {
            ring.of_all = OfAll::Asking;
        }
    }

    /// Whether what they had lies before the recent messages here; it does not where these have begun anew meanwhile.
    pub fn asked_all(&self, channel: &Channel, is_here: bool) {
        if let Some(ring) = &mut channel.state.lock().ring
            && ring.of_all == OfAll::Asking
        {
            ring.of_all = if is_here { OfAll::Yes } else { OfAll::No };
        }
    }

    /// The same from a node that stays; to be called when all that it had when it gave this has come here. False also where it
    /// had not all that was here before its messages, or one of the two has what the other one has not. That does not count where it is
    /// of runs that `have_gone` and of which nothing ever came here: they stand in positions from now on.
    pub fn take_back(
        &self,
        channel: &Arc<Channel>,
        handed: HandedOver<Forwarded>,
        have_gone: impl Fn(u64) -> bool,
    ) -> bool {
        let mut state = channel.state.lock();
        self.begin_ring(&mut state);
        let handed = handed.known_to(&state);
        let begins = state.ring.as_ref().map(|ring| ring.begins().serial());
        let meets = begins.is_some_and(|begins| handed.end.covers(&begins));
        let mut unheard = handed.end.clone();
        unheard.retain(|run| !state.is_named(run) && have_gone(run));
        let known = state.mark.serial().join(&unheard);
        let is_whole = state.unsure.is_empty() && known.covers(&handed.end);
        let is_taken = is_whole && meets && self.put_before(channel, &mut state, handed, &unheard);
        drop(state);
        self.give_way();
        is_taken
    }

    fn put_before(
        &self,
        channel: &Arc<Channel>,
        state: &mut State,
        handed: HandedOver<Forwarded>,
        unheard: &Serial,
    ) -> bool {
        let now_ms = self.now_ms();
        let State { ring, attached, mark, .. } = state;
        let Some(ring) = ring else { return false };
        let mut from = ring.begins().clone();
        // Then it has no more than is here, but for what it has of those.
        let is_behind = handed.begin.covers(&from.serial());
        if is_behind && unheard.is_empty() {
            return true;
        }
        let mut begin = handed.begin;
        if is_behind {
            begin.retain(|run| unheard.sequence_of(run).is_some());
            begin = begin.join(&from.serial());
        }
        let unheard: Vec<Stamp> = Stamp::all_of(unheard).collect();
        unheard.iter().for_each(|stamp| from.hear(*stamp, 0));
        let reached = from.serial();
        let mut earlier = handed.messages;
        earlier.retain(|(one, _)| reached.covers_one(one.incarnation, one.last));
        let count: u64 = earlier.iter().map(|(one, _)| one.messages.len() as u64).sum();
        let Some(place) = from.place.checked_sub(count).filter(|_| reached.covers(&begin)) else {
            return false;
        };
        if earlier.is_empty() && !unheard.is_empty() {
            return true;
        }
        let mut before = Place { own: from.own.incarnation, place, has: begin };
        let begin = before.mark();
        let mut deliveries = Vec::with_capacity(earlier.len());
        for (one, age_ms) in earlier {
            before.has.advance(one.incarnation, one.last);
            before.place += one.messages.len() as u64;
            let mark = if before.place == from.place { from.clone() } else { before.mark() };
            let delivery = Delivery::forwarded(channel.number(), mark, one);
            deliveries.push((Arc::new(delivery), now_ms.saturating_sub(age_ms)));
        }
        ring.stand(&unheard);
        ring.prepend(begin, deliveries, now_ms);
        unheard.iter().for_each(|stamp| mark.hear(*stamp, 0));
        // A number without a message may lie between, so that places do not follow from numbers any more.
        if mark.own.sequence > 0 {
            mark.others.get_or_insert_default();
        }
        if ring.is_listed(0) {
            ring.list(channel, *attached);
        }
        true
    }

    /// Whether messages from before would stay among the recent ones.
    pub fn has_room_before(&self, key: &ChannelKey) -> bool {
        let has_room = |channel: Arc<Channel>| {
            channel.state.lock().ring.as_ref().is_none_or(|ring| ring.is_half_empty())
        };
        self.live(key).is_some_and(has_room)
    }
}

/// On the way through what was handed over.
struct Place {
    own: u64,
    place: u64,
    has: Serial,
}

impl Place {
    fn mark(&self) -> Mark {
        let sequence = self.has.sequence_of(self.own).unwrap_or(0);
        let own = Stamp { incarnation: self.own, sequence };
        Mark { place: self.place, own, others: Some(Arc::new(self.has.clone())) }
    }
}
