//! Attaching: where a client stands in a channel, and what it is given of what it missed.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, Hub, State};
use super::delivery::Delivery;
use super::mark::{Mark, Spot};
use super::ring::{Begin, OfAll, Ring};
use crate::model::{ChannelKey, Forwarded};

/// An attach that has taken effect.
#[derive(Debug)]
pub struct Joined {
    pub channel: Arc<Channel>,
    /// All that was handed on before; what comes after it is delivered.
    pub mark: Mark,
    pub start: Start,
    /// How long ago the first message was published that [`Start::Replay`] gives; else 0.
    pub missed_ms: u64,
}

/// How a client that gave a position is brought to the mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// It is there.
    Live,
    /// [`Channel::pull`] gives what follows this place. Unless that is exact, it has some of it already.
    Replay { after: Spot, is_exact: bool },
    /// What is between is not in the ring, or the position is of runs that nothing is known of here.
    Unknown,
}

/// As [`Start::Replay`], with how long ago the first message was published that it gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RecentAfter {
    pub after: Spot,
    pub is_exact: bool,
    pub missed_ms: u64,
}

/// How much of a rewind the recent messages give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recent {
    /// The place before the first of them; the last one of the channel when there is none.
    pub after: Spot,
    pub found: usize,
    /// There are no others in what was asked for.
    pub is_whole: bool,
    /// Other nodes were asked for theirs, and there is nothing more to be had.
    pub is_of_all: bool,
}

/// A part of what somebody missed.
#[derive(Debug)]
pub struct Pulled {
    /// In order and without a gap; the first may hold messages that were asked to be left out.
    pub deliveries: Vec<Arc<Delivery>>,
    /// Nothing is left: whoever has these has all that the channel's deliveries do not bring.
    pub is_end: bool,
}

/// What another node had for somebody who came from there, and what this one has for it after that.
#[derive(Debug)]
pub struct Refill {
    /// Each with the position of who has it and all before it.
    pub deliveries: Vec<(Delivery, Serial)>,
    /// What a replay from the place is to leave out.
    pub has: Serial,
}

impl Hub {
    /// Of this run of the node.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Registers the target's interest. The mark covers all that was handed on before; all after it is delivered.
    pub fn attach(&self, key: &ChannelKey, target: usize) -> (Arc<Channel>, Mark) {
        self.with_channel(key, |channel, state| (Arc::clone(channel), self.register(state, target)))
    }

    /// The same for a client that has all up to `position`.
    pub fn attach_after(&self, key: &ChannelKey, target: usize, position: &Serial) -> Joined {
        self.with_channel(key, |channel, state| {
            let (start, missed_ms) = self.start_and_age(state, position);
            let mark = self.register(state, target);
            Joined { channel: Arc::clone(channel), mark, start, missed_ms }
        })
    }

    /// The same for a client that wants the last `count` messages first, none older than `since_ms`.
    pub fn attach_back(
        &self,
        key: &ChannelKey,
        target: usize,
        count: usize,
        since_ms: u64,
    ) -> (Arc<Channel>, Mark, Recent) {
        self.with_channel(key, |channel, state| {
            let recent = state.back(count, since_ms);
            (Arc::clone(channel), self.register(state, target), recent)
        })
    }

    /// Where a client with this position would stand; nothing is registered.
    pub fn look_after(&self, key: &ChannelKey, position: &Serial) -> Start {
        self.with_channel(key, |_, state| self.start(state, position))
    }

    /// Where a client with this position begins in the recent messages. None where they do not reach back to it.
    pub fn recent_after(&self, key: &ChannelKey, position: &Serial) -> Option<RecentAfter> {
        let channel = self.live(key)?;
        let state = channel.state.lock();
        let (start, missed_ms) = self.start_and_age(&state, position);
        match start {
            Start::Live => {
                Some(RecentAfter { after: Spot::end(state.mark.place), is_exact: true, missed_ms })
            }
            Start::Replay { after, is_exact } => Some(RecentAfter { after, is_exact, missed_ms }),
            Start::Unknown => None,
        }
    }

    fn start_and_age(&self, state: &State, position: &Serial) -> (Start, u64) {
        let start = self.start(state, position);
        let missed_ms = match (start, &state.ring) {
            (Start::Replay { after, .. }, Some(ring)) => ring.age_ms(after.place, self.now_ms()),
            _ => 0,
        };
        (start, missed_ms)
    }

    pub(super) fn register(&self, state: &mut State, target: usize) -> Mark {
        if let Some(ring) = &mut state.ring {
            ring.idle_ms = None;
        }
        state.attached = self.next_attach();
        state.targets |= 1 << target;
        state.mark.clone()
    }

    pub(super) fn start(&self, state: &State, position: &Serial) -> Start {
        let place = state.mark.place;
        // The empty one says nothing, not even that it has nothing.
        if !state.unsure.is_empty() || position.is_empty() {
            return Start::Unknown;
        }
        let position = state.lowered(position);
        let position = position.as_ref();
        if state.mark.others.is_some() {
            let here = state.former.and(&state.mark.serial());
            let position = &state.former.complete(position, self.incarnation);
            // It may be of runs that nothing is known of, or ahead.
            if !here.covers(position) {
                return Start::Unknown;
            }
            if position.covers(&here) {
                return Start::Live;
            }
            let replay = |ring: &Ring| {
                let Begin { after, is_exact } = ring.find(position)?;
                Some(Start::Replay { after: ring.spot(after), is_exact })
            };
            return state.ring.as_deref().and_then(replay).unwrap_or(Start::Unknown);
        }
        // Of other runs nothing was heard.
        let own = position.entries().iter().all(|(run, sequence)| *run == self.incarnation || *sequence == 0);
        // Who was attached elsewhere when nothing had been numbered here, by a run that was heard to its end.
        let heard = |(run, _): &(u64, u64)| state.whole.contains(*run);
        let is_of_others = !position.entries().is_empty() && position.entries().iter().all(heard);
        let sequence = position.sequence_of(self.incarnation).or(is_of_others.then_some(0)).filter(|_| own);
        match (sequence.map(|sequence| state.mark.place_of(sequence)), &state.ring) {
            (Some(after), _) if after == place => Start::Live,
            (Some(after), Some(ring)) if after < place && ring.reaches(after) => {
                Start::Replay { after: ring.spot(after), is_exact: true }
            }
            _ => Start::Unknown,
        }
    }
}

impl State {
    fn back(&self, count: usize, since_ms: u64) -> Recent {
        let ring = self.ring.as_deref();
        let back = ring.map(|ring| ring.back(count, since_ms));
        let after = ring.zip(back).and_then(|(ring, back)| Some(ring.spot(back.after?)));
        Recent {
            after: after.unwrap_or(Spot::end(self.mark.place)),
            found: back.map_or(0, |back| back.found),
            is_whole: back.is_some_and(|back| back.is_whole),
            is_of_all: ring.is_some_and(|ring| ring.of_all == OfAll::Yes),
        }
    }
}

impl Channel {
    /// The last `count` of the recent messages, none older than `since_ms`.
    pub fn recent_back(&self, count: usize, since_ms: u64) -> Recent {
        self.state.lock().back(count, since_ms)
    }

    /// What follows the place `after`, about `bytes_max` of it; none when the ring does not reach back to it, or other messages
    /// have been put there.
    pub fn pull(&self, after: Spot, bytes_max: usize) -> Option<Pulled> {
        let state = self.state.lock();
        if after.place == state.mark.place {
            return Some(Pulled { deliveries: Vec::new(), is_end: true });
        }
        let ring = state.ring.as_ref().filter(|ring| ring.has_kept(after) && ring.reaches(after.place))?;
        let deliveries = ring.after(after.place, bytes_max);
        let is_end = deliveries.last().is_some_and(|last| last.place() == state.mark.place);
        Some(Pulled { deliveries, is_end })
    }

    /// Brings whoever has `position` to a place by what it missed. None where something has come here by that place that the
    /// other node had not, of a run that it cannot hear any more.
    pub fn refill(&self, position: &Serial, place: Spot, missed: Vec<Forwarded>) -> Option<Refill> {
        let mut has = position.clone();
        let mut deliveries = Vec::with_capacity(missed.len());
        for delivery in missed.into_iter().map(Delivery::refilled) {
            has = has.join(&delivery.mark().serial());
            deliveries.push((delivery, has.clone()));
        }
        let here = self.position_at(place);
        // The other node has all that was numbered here, but for numbers without a message.
        let own = self.state.lock().mark.own.incarnation;
        has.advance(own, here.sequence_of(own).unwrap_or(0));
        has.keeps_up_with(&here).then(|| Refill { deliveries, has: has.join(&here) })
    }

    /// Whether [`Channel::pull`] can go on after this place.
    pub fn reaches(&self, place: u64) -> bool {
        let state = self.state.lock();
        place == state.mark.place || reaches(&state, place)
    }

    /// The place of a message of this run, as long as there are none of others.
    pub fn place_of(&self, sequence: u64) -> u64 {
        self.state.lock().mark.place_of(sequence)
    }

    /// Where it stands.
    pub fn mark(&self) -> Mark {
        self.state.lock().mark.clone()
    }

    /// Where it stood at a place between two deliveries. Where that is not known any more, a position from which nobody can
    /// be resumed.
    pub fn position_at(&self, spot: Spot) -> Serial {
        let state = self.state.lock();
        let State { mark, ring, .. } = &*state;
        if spot.place == mark.place {
            return mark.serial();
        }
        if mark.others.is_none() {
            return Serial::single(mark.own.incarnation, mark.sequence_at(spot.place));
        }
        let known = ring.as_ref().and_then(|ring| ring.mark_at(spot));
        known.map(Mark::serial).unwrap_or_default()
    }
}

fn reaches(state: &State, after: u64) -> bool {
    state.ring.as_ref().is_some_and(|ring| ring.reaches(after))
}
