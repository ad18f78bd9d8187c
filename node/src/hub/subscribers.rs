//! Who listens to a channel within one shard.

use std::collections::HashMap;
use std::sync::Arc;

use super::channels::Channel;

/// What an attached connection gets of a channel's presence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PresenceMode {
    #[default]
    Off,
    /// Each event with a number above this one.
    After(u64),
    /// The member list is on its way, and the connection's [`Sync`](super::Sync) judges each event.
    Syncing,
}

/// One attached connection of the shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subscriber {
    /// The connection's place in the shard.
    pub slot: u32,
    pub messages: bool,
    pub presence: PresenceMode,
    /// What it already has; only what is numbered above it is delivered.
    pub after_sequence: u64,
}

impl Subscriber {
    /// For who is given what it missed, apart from what is delivered meanwhile.
    pub const IN_REPLAY: u64 = u64::MAX;

    /// Of messages alone, until it is told otherwise.
    pub fn new(slot: u32, after_sequence: u64) -> Self {
        Self { slot, messages: true, presence: PresenceMode::Off, after_sequence }
    }
}

/// Channel number → subscribers, for the shard that owns it.
#[derive(Debug, Default)]
pub struct Subscribers {
    channels: HashMap<u64, Local>,
}

#[derive(Debug)]
struct Local {
    channel: Arc<Channel>,
    subscribers: Vec<Subscriber>,
    /// Up to here every delivery has been handed to the subscribers.
    delivered: u64,
}

impl Subscribers {
    pub fn add(&mut self, channel: &Arc<Channel>, subscriber: Subscriber) {
        self.channels
            .entry(channel.number())
            .or_insert_with(|| Local {
                channel: Arc::clone(channel),
                subscribers: Vec::with_capacity(1),
                delivered: 0,
            })
            .subscribers
            .push(subscriber);
    }

    /// The slot has all up to `sequence` and takes part in deliveries from there on.
    pub fn go_live(&mut self, channel: u64, slot: u32, sequence: u64) {
        self.set(channel, slot, |own| own.after_sequence = sequence);
    }

    /// Changes what the slot gets.
    pub fn set(&mut self, channel: u64, slot: u32, set: impl FnOnce(&mut Subscriber)) {
        let local = self.channels.get_mut(&channel);
        if let Some(own) = local.and_then(|local| local.subscribers.iter_mut().find(|own| own.slot == slot)) {
            set(own);
        }
    }

    pub fn channel(&self, channel: u64) -> Option<&Arc<Channel>> {
        self.channels.get(&channel).map(|local| &local.channel)
    }

    /// All of a channel, whatever they get of it, and the last message that was handed to them.
    pub fn all_mut(&mut self, channel: u64) -> (&mut [Subscriber], u64) {
        self.channels
            .get_mut(&channel)
            .map_or((&mut [], 0), |local| (&mut local.subscribers, local.delivered))
    }

    /// Removes the slot; the channel comes back when it was the last one here.
    pub fn remove(&mut self, channel: u64, slot: u32) -> Option<Arc<Channel>> {
        let local = self.channels.get_mut(&channel)?;
        let place = local.subscribers.iter().position(|subscriber| subscriber.slot == slot)?;
        local.subscribers.swap_remove(place);
        if !local.subscribers.is_empty() {
            return None;
        }
        self.channels.remove(&channel).map(|local| local.channel)
    }

    /// Those who may get a delivery that ends at `sequence`.
    pub fn deliver(&mut self, channel: u64, sequence: u64) -> &[Subscriber] {
        match self.channels.get_mut(&channel) {
            Some(local) => {
                local.delivered = local.delivered.max(sequence);
                &local.subscribers
            }
            None => &[],
        }
    }

    /// What a subscriber has been handed: the sequence before the first frame that follows.
    pub fn position(&self, channel: u64, slot: u32) -> Option<u64> {
        let local = self.channels.get(&channel)?;
        let own = local.subscribers.iter().find(|subscriber| subscriber.slot == slot)?;
        Some(own.after_sequence.max(local.delivered))
    }
}
