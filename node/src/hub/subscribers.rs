//! The subscribers of channels within one shard.

use std::collections::HashMap;
use std::sync::Arc;

use super::channels::Channel;
use crate::model::AttachedCount;

/// The presence events that an attached connection gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PresenceMode {
    #[default]
    Off,
    /// Events with a number above this one.
    After(u64),
    /// The member list is being sent, and the connection's [`MemberSync`](super::MemberSync) judges each event.
    Syncing,
}

/// One attached connection of the shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Subscriber {
    /// Slot of the connection in the shard.
    pub slot: u32,
    pub messages: bool,
    /// The credential may publish on the channel.
    pub publishes: bool,
    pub presence: PresenceMode,
    /// Offset up to which the connection has everything; only later messages are delivered.
    pub after_offset: u64,
}

impl Subscriber {
    /// Offset of a connection that replays missed messages and takes no deliveries meanwhile.
    pub const IN_REPLAY: u64 = u64::MAX;

    /// A subscriber of messages, without presence.
    pub fn new(slot: u32, after_offset: u64) -> Self {
        Self { slot, messages: true, publishes: false, presence: PresenceMode::Off, after_offset }
    }
}

/// Subscribers of a shard by channel number.
#[derive(Debug, Default)]
pub struct Subscribers {
    channels: HashMap<u64, LocalSubscribers>,
}

#[derive(Debug)]
struct LocalSubscribers {
    channel: Arc<Channel>,
    subscribers: Vec<Subscriber>,
    /// Counts of the subscribers, kept so that a query need not visit them.
    taking_messages: u32,
    publishing: u32,
    /// Offset up to which every delivery has been handed to the subscribers.
    delivered: u64,
}

impl LocalSubscribers {
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
        let local = self.channels.entry(channel.number()).or_insert_with(|| LocalSubscribers {
            channel: Arc::clone(channel),
            subscribers: Vec::with_capacity(1),
            taking_messages: 0,
            publishing: 0,
            delivered: 0,
        });
        local.count(&subscriber);
        local.subscribers.push(subscriber);
    }

    /// The counts of a channel's subscribers, of messages or not.
    pub fn count(&self, channel: u64) -> AttachedCount {
        let count = |local: &LocalSubscribers| AttachedCount {
            connections: local.subscribers.len() as u64,
            publishers: local.publishing.into(),
            subscribers: local.taking_messages.into(),
            is_announced: false,
        };
        self.channels.get(&channel).map(count).unwrap_or_default()
    }

    /// Starts live delivery to a slot that has everything up to the offset.
    pub fn go_live(&mut self, channel: u64, slot: u32, offset: u64) {
        self.set(channel, slot, |own| own.after_offset = offset);
    }

    /// Changes a slot's subscription.
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

    /// All subscribers of a channel, and the offset of the last message handed to them. Callers may change only the presence mode:
    /// [`Self::set`] keeps the counts of the rest.
    pub fn all_mut(&mut self, channel: u64) -> Option<(&Channel, &mut [Subscriber], u64)> {
        let LocalSubscribers { channel, subscribers, delivered, .. } = self.channels.get_mut(&channel)?;
        Some((channel, subscribers, *delivered))
    }

    /// Removes the slot; returns the channel when it was the last one here.
    pub fn remove(&mut self, channel: u64, slot: u32) -> Option<Arc<Channel>> {
        let local = self.channels.get_mut(&channel)?;
        let index = local.subscribers.iter().position(|subscriber| subscriber.slot == slot)?;
        let removed = local.subscribers.swap_remove(index);
        local.count_off(&removed);
        if !local.subscribers.is_empty() {
            return None;
        }
        self.channels.remove(&channel).map(|local| local.channel)
    }

    /// The subscribers to check for a delivery that ends at the offset.
    pub fn deliver(&mut self, channel: u64, offset: u64) -> &[Subscriber] {
        match self.channels.get_mut(&channel) {
            Some(local) => {
                local.delivered = local.delivered.max(offset);
                &local.subscribers
            }
            None => &[],
        }
    }

    /// The offset before the first frame that a subscriber gets next.
    pub fn delivered_offset(&self, channel: u64, slot: u32) -> Option<u64> {
        let local = self.channels.get(&channel)?;
        let own = local.subscribers.iter().find(|subscriber| subscriber.slot == slot)?;
        Some(own.after_offset.max(local.delivered))
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
            is_announced: false,
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
