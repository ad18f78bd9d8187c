//! Tests of numbering and subscribers under threads, and of the frame that a publish becomes.

mod forwarded;
mod frames;
mod handoff;
mod node_failures;
mod numbering;
mod peer_buffer;
mod presence;
mod race;
mod remote_members;
mod resume;
mod store_backfill;

use super::*;
use parking_lot::Mutex;
use std::sync::Arc;

use crate::model::{
    AccountId, ChannelKey, ChannelName, Clock, ConnectionId, Limits, Message, PublishedMessages, Stamp,
};

const NOW_MS: u64 = 1_767_225_600_500;

/// A target that records its deliveries.
#[derive(Default)]
struct HubTestTarget {
    deliveries: Mutex<Vec<Arc<MessageDelivery>>>,
    presence: Mutex<Vec<Arc<PresenceDelivery>>>,
    lost: Mutex<Vec<u64>>,
}

impl DeliveryTarget for HubTestTarget {
    fn deliver(&self, delivery: Arc<MessageDelivery>) {
        self.deliveries.lock().push(delivery);
    }

    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>) {
        self.presence.lock().push(delivery);
    }

    fn lose_continuity(&self, channel: u64, _mark: &ChannelPosition) {
        self.lost.lock().push(channel);
    }

    fn congested(&self) -> bool {
        self.deliveries.lock().len() > 1_000_000
    }
}

impl HubTestTarget {
    fn sequences(&self) -> Vec<u64> {
        let deliveries = self.deliveries.lock();
        let messages = deliveries.iter().flat_map(|delivery| &delivery.published().messages);
        messages.map(|message| message.sequence).collect()
    }
}

fn hub_of(targets: usize, clock: Clock) -> (Hub, Vec<Arc<HubTestTarget>>) {
    hub_within(targets, clock, Limits::default())
}

fn hub_within(targets: usize, clock: Clock, limits: Limits) -> (Hub, Vec<Arc<HubTestTarget>>) {
    let targets: Vec<_> = (0..targets).map(|_| Arc::new(HubTestTarget::default())).collect();
    let known = targets.iter().map(|target| Arc::clone(target) as Arc<dyn DeliveryTarget>).collect();
    (Hub::new(known, clock, &limits), targets)
}

fn key(channel: &str) -> ChannelKey {
    ChannelKey::new(AccountId::new("acme"), ChannelName::of(channel))
}

/// A hub without replay buffers, which forgets a channel with its last subscriber.
fn hub_without_buffers(targets: usize, clock: Clock) -> (Hub, Vec<Arc<HubTestTarget>>) {
    hub_within(targets, clock, Limits { rings_bytes: 0, ..Limits::default() })
}

/// A delivery on channel 3 with these sequences of incarnation 9.
pub(in crate::hub) fn delivery_of(sequences: std::ops::RangeInclusive<u64>) -> Arc<MessageDelivery> {
    let messages = sequences.map(bare_message).collect();
    let connection_id = ConnectionId::from_bytes([1; 16]);
    let published = PublishedMessages::new(key("a"), 9, NOW_MS, connection_id, None, "k".into(), messages);
    Arc::new(MessageDelivery::own(3, ChannelPosition::own(published.last()), published))
}

/// An offset of a buffer that has reused none.
fn local_offset(offset: u64) -> LocalOffset {
    LocalOffset { offset, generation: Some(0) }
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

fn publish(hub: &Hub, key: &ChannelKey, count: u64) -> Arc<PublishedMessages> {
    hub.publish(key, count, |numbering| {
        let first = numbering.first_sequence;
        let messages = (first..first + count).map(bare_message).collect();
        let (incarnation, timestamp_ms) = (numbering.incarnation, numbering.timestamp_ms);
        let connection_id = ConnectionId::from_bytes([1; 16]);
        PublishedMessages::new(
            key.clone(),
            incarnation,
            timestamp_ms,
            connection_id,
            None,
            "k".into(),
            messages,
        )
    })
}
