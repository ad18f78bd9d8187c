//! Who listens to a channel within one shard.

use std::collections::HashMap;
use std::sync::Arc;

use super::channels::Channel;
use crate::model::AttachedCount;

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
    /// Its credential may publish on the channel.
    pub publishes: bool,
    pub presence: PresenceMode,
    /// The place up to which it already has everything; only what stands behind it is delivered.
    pub after_place: u64,
}

impl Subscriber {
    /// For who is given what it missed, apart from what is delivered meanwhile.
    pub const IN_REPLAY: u64 = u64::MAX;

    /// Of messages alone, until it is told otherwise.
    pub fn new(slot: u32, after_place: u64) -> Self {
        Self { slot, messages: true, publishes: false, presence: PresenceMode::Off, after_place }
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
    /// Of the subscribers, so that nobody who asks has them counted.
    taking_messages: u32,
    publishing: u32,
    /// Up to here every delivery has been handed to the subscribers.
    delivered: u64,
}

impl Local {
    fn count(&mut self, subscriber: &Subscriber) {
        self.taking_messages += u32::from(subscriber.messages);
        self.publishing += u32::from(subscriber.publishes);
    }

    fn count_off(&mut self, subscriber: &Subscriber) {
        self.taking_messages -= u32::from(subscriber.messages);
        self.publishing -= u32::from(subscriber.publishes);
    }
}

impl Subscribers {
    pub fn add(&mut self, channel: &Arc<Channel>, subscriber: Subscriber) {
        let local = self.channels.entry(channel.number()).or_insert_with(|| Local {
            channel: Arc::clone(channel),
            subscribers: Vec::with_capacity(1),
            taking_messages: 0,
            publishing: 0,
            delivered: 0,
        });
        local.count(&subscriber);
        local.subscribers.push(subscriber);
    }

    /// All of a channel, whatever they get of it.
    pub fn count(&self, channel: u64) -> AttachedCount {
        let count = |local: &Local| AttachedCount {
            connections: local.subscribers.len() as u64,
            publishers: local.publishing.into(),
            subscribers: local.taking_messages.into(),
            is_told: false,
        };
        self.channels.get(&channel).map(count).unwrap_or_default()
    }

    /// The slot has all up to `place` and takes part in deliveries from there on.
    pub fn go_live(&mut self, channel: u64, slot: u32, place: u64) {
        self.set(channel, slot, |own| own.after_place = place);
    }

    /// Changes what the slot gets.
    pub fn set(&mut self, channel: u64, slot: u32, set: impl FnOnce(&mut Subscriber)) {
        let Some(local) = self.channels.get_mut(&channel) else { return };
        if let Some(own) = local.subscribers.iter_mut().find(|own| own.slot == slot) {
            let before = *own;
            set(own);
            let after = *own;
            local.count_off(&before);
            local.count(&after);
        }
    }

    pub fn channel(&self, channel: u64) -> Option<&Arc<Channel>> {
        self.channels.get(&channel).map(|local| &local.channel)
    }

    /// All of a channel, whatever they get of it, and the place of the last message that was handed to them. Only what they get of its
    /// presence may be changed: the rest is counted by [`Self::set`].
    pub fn all_mut(&mut self, channel: u64) -> Option<(&Channel, &mut [Subscriber], u64)> {
        let Local { channel, subscribers, delivered, .. } = self.channels.get_mut(&channel)?;
        Some((channel, subscribers, *delivered))
    }

    /// Removes the slot; the channel comes back when it was the last one here.
    pub fn remove(&mut self, channel: u64, slot: u32) -> Option<Arc<Channel>> {
        let local = self.channels.get_mut(&channel)?;
        let place = local.subscribers.iter().position(|subscriber| subscriber.slot == slot)?;
        let removed = local.subscribers.swap_remove(place);
        local.count_off(&removed);
        if !local.subscribers.is_empty() {
            return None;
        }
        self.channels.remove(&channel).map(|local| local.channel)
    }

    /// Those who may get a delivery that ends at `place`.
    pub fn deliver(&mut self, channel: u64, place: u64) -> &[Subscriber] {
        match self.channels.get_mut(&channel) {
            Some(local) => {
                local.delivered = local.delivered.max(place);
                &local.subscribers
            }
            None => &[],
        }
    }

    /// What a subscriber has been handed: the place before the first frame that follows.
    pub fn position(&self, channel: u64, slot: u32) -> Option<u64> {
        let local = self.channels.get(&channel)?;
        let own = local.subscribers.iter().find(|subscriber| subscriber.slot == slot)?;
        Some(own.after_place.max(local.delivered))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::Hub;
    use crate::model::{AccountId, ChannelKey, ChannelName, Clock, Limits};

    #[test]
    fn subscribers_are_counted_by_what_they_take() {
        let hub = Hub::new(Vec::new(), Clock::system(), &Limits::default());
        let key = ChannelKey::new(AccountId::new("a"), ChannelName::of("room"));
        let (channel, _) = hub.attach(&key, 0);
        let (mut all, number) = (Subscribers::default(), channel.number());
        let count = |connections, publishers, subscribers| AttachedCount {
            connections,
            publishers,
            subscribers,
            is_told: false,
        };
        assert_eq!(all.count(number), count(0, 0, 0));
        (0..3).for_each(|slot| all.add(&channel, Subscriber::new(slot, 0)));
        assert_eq!(all.count(number), count(3, 0, 3));
        all.set(number, 1, |own| (own.messages, own.publishes) = (false, true));
        all.set(number, 2, |own| own.publishes = true);
        all.set(number, 2, |own| own.publishes = true);
        all.set(number, 9, |own| own.publishes = true);
        assert_eq!(all.count(number), count(3, 2, 2));
        assert!(all.remove(number, 2).is_none());
        assert!(all.remove(number, 2).is_none());
        assert_eq!(all.count(number), count(2, 1, 1));
        assert!(all.remove(number, 0).is_none());
        assert!(all.remove(number, 1).is_some());
        assert_eq!(all.count(number), count(0, 0, 0));
    }
}
