//! Numbering and interest under threads, and the frame that a publish becomes.

mod deaths;
mod elsewhere;
mod forwarded;
mod frames;
mod from_store;
mod hand_over;
mod numbering;
mod presence;
mod race;
mod resume;
mod take_back;

use super::*;
use parking_lot::Mutex;
use std::sync::Arc;

use crate::model::{
    AccountId, ChannelKey, ChannelName, Clock, ConnectionId, Limits, Message, Published, Stamp,
};

const NOW_MS: u64 = 1_767_225_600_500;

/// Keeps what it is given.
#[derive(Default)]
struct Target {
    deliveries: Mutex<Vec<Arc<Delivery>>>,
    presence: Mutex<Vec<Arc<PresenceDelivery>>>,
    lost: Mutex<Vec<u64>>,
}

impl DeliveryTarget for Target {
    fn deliver(&self, delivery: Arc<Delivery>) {
        self.deliveries.lock().push(delivery);
    }

    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>) {
        self.presence.lock().push(delivery);
    }

    fn lose(&self, channel: u64, _mark: &Mark) {
        self.lost.lock().push(channel);
    }

    fn congested(&self) -> bool {
        self.deliveries.lock().len() > 1_000_000
    }
}

impl Target {
    fn sequences(&self) -> Vec<u64> {
        let deliveries = self.deliveries.lock();
        let messages = deliveries.iter().flat_map(|delivery| &delivery.published().messages);
        messages.map(|message| message.sequence).collect()
    }
}

fn hub_of(targets: usize, clock: Clock) -> (Hub, Vec<Arc<Target>>) {
    hub_within(targets, clock, Limits::default())
}

fn hub_within(targets: usize, clock: Clock, limits: Limits) -> (Hub, Vec<Arc<Target>>) {
    let targets: Vec<_> = (0..targets).map(|_| Arc::new(Target::default())).collect();
    let known = targets.iter().map(|target| Arc::clone(target) as Arc<dyn DeliveryTarget>).collect();
    (Hub::new(known, clock, &limits), targets)
}

fn key(channel: &str) -> ChannelKey {
    ChannelKey::new(AccountId::new("acme"), ChannelName::of(channel))
}

/// A hub that keeps no rings, and so forgets a channel with its last subscriber.
fn hub_without_rings(targets: usize, clock: Clock) -> (Hub, Vec<Arc<Target>>) {
    hub_within(targets, clock, Limits { rings_bytes: 0, ..Limits::default() })
}

/// Of the channel 3, numbered so in the incarnation 9.
pub(in crate::hub) fn delivery_of(sequences: std::ops::RangeInclusive<u64>) -> Arc<Delivery> {
    let messages = sequences.map(bare_message).collect();
    let connection_id = ConnectionId::from_bytes([1; 16]);
    let published = Published::new(key("a"), 9, NOW_MS, connection_id, None, "k".into(), messages);
    Arc::new(Delivery::own(3, Mark::own(published.last()), published))
}

/// A place while none has been used again.
fn spot(place: u64) -> Spot {
    Spot { place, generation: Some(0) }
}

fn bare_message(sequence: u64) -> Message {
    Message {
        id: sequence.to_string().into(),
        id_given: false,
        sequence,
        name: None,
        data: None,
        extras: None,
    }
}

fn publish(hub: &Hub, key: &ChannelKey, count: u64) -> Arc<Published> {
    hub.publish(key, count, |numbering| {
        let first = numbering.first_sequence;
        let messages = (first..first + count).map(bare_message).collect();
        let (incarnation, timestamp_ms) = (numbering.incarnation, numbering.timestamp_ms);
        let connection_id = ConnectionId::from_bytes([1; 16]);
        Published::new(key.clone(), incarnation, timestamp_ms, connection_id, None, "k".into(), messages)
    })
}
