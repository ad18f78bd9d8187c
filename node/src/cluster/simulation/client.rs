//! A simulated client: the work of a shard for one connection, and the state that the client keeps.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fanfare_proto::serial::Serial;
use parking_lot::Mutex;

use super::watch::SimPresenceWatch;
use crate::cluster::routing::Routing;
use crate::hub::{
    AttachWaiter, Channel, ChannelBackfill, ChannelPosition, DeliveryContent, DeliveryTarget, Hub,
    LocalOffset, MessageDelivery, PresenceDelivery, ResumeStart,
};
use crate::model::{ChannelKey, ForwardedMessages};
use crate::tasks::{OnStop, Tasks};

/// Far longer than one simulation takes.
const BACK_MS: u64 = 600_000;
const PULL_BYTES: usize = 2_000;

/// Mailbox of a client in one slot of a node.
#[derive(Default)]
pub(super) struct SimMailbox(Mutex<Vec<SimMailboxEvent>>);

enum SimMailboxEvent {
    Delivery(Arc<MessageDelivery>),
    Presence(Arc<PresenceDelivery>),
    Lost(u64, ChannelPosition),
}

impl DeliveryTarget for SimMailbox {
    fn deliver(&self, delivery: Arc<MessageDelivery>) {
        self.0.lock().push(SimMailboxEvent::Delivery(delivery));
    }

    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>) {
        self.0.lock().push(SimMailboxEvent::Presence(delivery));
    }

    fn lose_continuity(&self, channel: u64, position: &ChannelPosition) {
        self.0.lock().push(SimMailboxEvent::Lost(channel, position.clone()));
    }

    fn congested(&self) -> bool {
        false
    }
}

impl SimMailbox {
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    fn take(&self) -> Vec<SimMailboxEvent> {
        std::mem::take(&mut self.0.lock())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

/// Connection of a client to a node.
#[derive(Clone)]
pub(super) struct SimConnection {
    pub(super) node: usize,
    pub(super) slot: usize,
    pub(super) hub: Arc<Hub>,
    pub(super) routing: Arc<Routing>,
    pub(super) tasks: Arc<Tasks>,
    pub(super) mailbox: Arc<SimMailbox>,
}

/// A period of continuity, in which the client relies on receiving every message.
#[derive(Debug, Default)]
pub(super) struct ContinuityEpoch {
    /// Position from which the epoch begins.
    pub(super) after: Serial,
    pub(super) at: Duration,
    /// Incarnations and sequences in the order of arrival.
    pub(super) seen: Vec<(u64, u64)>,
}

#[derive(Default)]
pub(super) struct SimClient {
    pub(super) at: Option<SimConnection>,
    subscriptions: BTreeMap<ChannelKey, SimSubscription>,
    pub(super) epochs: BTreeMap<ChannelKey, Vec<ContinuityEpoch>>,
    pub(super) counts: SimClientCounts,
}

#[derive(Default)]
pub(super) struct SimClientCounts {
    /// Attaches that resumed from a position.
    pub(super) resumed: usize,
    /// Number of continuity losses that the client was told.
    pub(super) losses: usize,
    /// Number of presence changes that the client was told.
    pub(super) changes: usize,
    now: Duration,
}

struct SimSubscription {
    position: Option<Serial>,
    stage: SimAttachStage,
    watch: SimPresenceWatch,
}

enum SimAttachStage {
    Off,
    /// Waits for the flag, which is set when the peers forward the channel.
    Joining(Arc<AtomicBool>),
    /// Waits for the peers' messages that were missed up to this offset.
    Asking {
        channel: Arc<Channel>,
        local_offset: u64,
        answer: Arc<Mutex<Option<Option<Vec<ForwardedMessages>>>>>,
    },
    Replaying {
        channel: Arc<Channel>,
        local_offset: LocalOffset,
        received: Option<Serial>,
    },
    Live {
        channel: Arc<Channel>,
        after: u64,
    },
}

impl SimAttachStage {
    fn channel(&self) -> Option<&Arc<Channel>> {
        match self {
            Self::Off | Self::Joining(_) => None,
            Self::Asking { channel, .. } | Self::Replaying { channel, .. } | Self::Live { channel, .. } => {
                Some(channel)
            }
        }
    }
}

impl fmt::Debug for SimClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages = self.subscriptions.iter().map(|(key, subscription)| {
            let stage = match &subscription.stage {
                SimAttachStage::Off => "off",
                SimAttachStage::Joining(_) => "joining",
                SimAttachStage::Asking { .. } => "asking",
                SimAttachStage::Replaying { .. } => "replaying",
                SimAttachStage::Live { .. } => "live",
            };
            (key.channel(), stage)
        });
        f.debug_map().entries(stages).finish()
    }
}

impl SimClient {
    pub(super) fn connect(&mut self, at: SimConnection, now: Duration) {
        self.counts.now = now;
        at.mailbox.clear();
        for (key, subscription) in &mut self.subscriptions {
            let epochs = self.epochs.entry(key.clone()).or_default();
            subscription.attach(key, &at, epochs, &mut self.counts);
        }
        self.at = Some(at);
    }

    pub(super) fn attach(&mut self, key: &ChannelKey, now: Duration) {
        self.counts.now = now;
        if self.subscriptions.contains_key(key) {
            return;
        }
        let mut subscription = SimSubscription {
            position: None,
            stage: SimAttachStage::Off,
            watch: SimPresenceWatch::default(),
        };
        if let Some(at) = &self.at {
            let epochs = self.epochs.entry(key.clone()).or_default();
            subscription.attach(key, at, epochs, &mut self.counts);
        }
        self.subscriptions.insert(key.clone(), subscription);
    }

    /// Drops the socket, with everything that the client has not read.
    pub(super) fn disconnect(&mut self, is_node_alive: bool) -> Option<SimConnection> {
        let at = self.at.take()?;
        for (key, subscription) in &mut self.subscriptions {
            subscription.watch = SimPresenceWatch::default();
            let channel = match std::mem::replace(&mut subscription.stage, SimAttachStage::Off) {
                SimAttachStage::Joining(_) => at.hub.live(key),
                stage => stage.channel().map(Arc::clone),
            };
            if is_node_alive && let Some(channel) = channel {
                at.hub.detach(&channel, at.slot);
            }
        }
        at.mailbox.clear();
        Some(at)
    }

    /// Reads the mailbox, and continues attaches that wait.
    pub(super) fn turn(&mut self, now: Duration) {
        self.counts.now = now;
        let Some(at) = &self.at else { return };
        for event in at.mailbox.take() {
            let number = match &event {
                SimMailboxEvent::Delivery(delivery) => delivery.channel,
                SimMailboxEvent::Presence(delivery) => delivery.channel,
                SimMailboxEvent::Lost(channel, _) => *channel,
            };
            let found = self.subscriptions.iter_mut().find(|(_, subscription)| {
                subscription.stage.channel().is_some_and(|channel| channel.number() == number)
            });
            let Some((key, subscription)) = found else { continue };
            let epochs = self.epochs.entry(key.clone()).or_default();
            match event {
                SimMailboxEvent::Delivery(delivery) => subscription.delivered(&delivery, epochs),
                SimMailboxEvent::Presence(delivery) => {
                    self.counts.changes += 1;
                    subscription.watch.take_event(&delivery);
                }
                SimMailboxEvent::Lost(_, position) => {
                    subscription.lose_before(&position, epochs, &mut self.counts);
                    subscription.begin_watch(at);
                }
            }
        }
        for (key, subscription) in &mut self.subscriptions {
            let epochs = self.epochs.entry(key.clone()).or_default();
            subscription.go_on(key, at, epochs, &mut self.counts);
            if let Some(channel) = subscription.stage.channel() {
                subscription.watch.pull(&at.hub, channel);
            }
        }
    }

    /// Presence as the client knows it on the channel; none while it is not attached.
    pub(super) fn watch(&self, key: &ChannelKey) -> Option<&SimPresenceWatch> {
        let subscription = self.subscriptions.get(key)?;
        subscription.stage.channel().map(|_| &subscription.watch)
    }

    pub(super) fn forget_events(&mut self) {
        self.subscriptions.values_mut().for_each(|subscription| subscription.watch.events.clear());
    }

    /// True if the mailbox is empty.
    pub(super) fn is_settled(&self) -> bool {
        self.at.as_ref().is_some_and(|at| at.mailbox.is_empty())
            && self.subscriptions.values().all(|subscription| {
                matches!(subscription.stage, SimAttachStage::Live { .. }) && subscription.watch.has_list()
            })
    }
}

impl SimSubscription {
    fn attach(
        &mut self,
        key: &ChannelKey,
        at: &SimConnection,
        epochs: &mut Vec<ContinuityEpoch>,
        counts: &mut SimClientCounts,
    ) {
        self.attach_messages(key, at, epochs, counts);
        self.begin_watch(at);
    }

    fn begin_watch(&mut self, at: &SimConnection) {
        if let Some(channel) = self.stage.channel() {
            self.watch.begin(&at.hub, channel);
        }
    }

    fn attach_messages(
        &mut self,
        key: &ChannelKey,
        at: &SimConnection,
        epochs: &mut Vec<ContinuityEpoch>,
        counts: &mut SimClientCounts,
    ) {
        let is_joined = Arc::new(AtomicBool::new(false));
        let waiter = || {
            let is_joined = Arc::clone(&is_joined);
            Box::new(move || is_joined.store(true, Ordering::SeqCst)) as AttachWaiter
        };
        if at.hub.join(key, at.slot, waiter).is_none() {
            self.stage = SimAttachStage::Joining(is_joined);
            return;
        }
        let Some(position) = self.position.clone() else {
            let (channel, position) = at.hub.attach(key, at.slot);
            self.begin(position.serial(), epochs, counts.now);
            self.stage = SimAttachStage::Live { channel, after: position.offset };
            return;
        };
        let joined = at.hub.attach_resuming(key, at.slot, &position);
        let (channel, ChannelPosition { offset, .. }) = (joined.channel, joined.position);
        match joined.start {
            ResumeStart::Live => {
                counts.resumed += 1;
                self.stage = SimAttachStage::Live { channel, after: offset };
            }
            ResumeStart::Replay { after, is_exact } => {
                counts.resumed += 1;
                let received = (!is_exact).then_some(position);
                self.stage = SimAttachStage::Replaying { channel, local_offset: after, received };
            }
            ResumeStart::Unknown => {
                let answer = Arc::new(Mutex::new(None));
                let (routing, key, given) = (Arc::clone(&at.routing), key.clone(), Arc::clone(&answer));
                at.tasks.spawn("missed messages", OnStop::Cancel, async move {
                    let missed = routing.backfill_from_peers(&key, &position, BACK_MS).await;
                    *given.lock() = Some(missed);
                });
                self.stage = SimAttachStage::Asking { channel, local_offset: offset, answer };
            }
        }
    }

    fn go_on(
        &mut self,
        key: &ChannelKey,
        at: &SimConnection,
        epochs: &mut Vec<ContinuityEpoch>,
        counts: &mut SimClientCounts,
    ) {
        match std::mem::replace(&mut self.stage, SimAttachStage::Off) {
            SimAttachStage::Joining(is_joined) if is_joined.load(Ordering::SeqCst) => {
                self.attach(key, at, epochs, counts);
            }
            SimAttachStage::Asking { channel, local_offset: offset, answer } => {
                let missed = answer.lock().take();
                match missed {
                    None => self.stage = SimAttachStage::Asking { channel, local_offset: offset, answer },
                    Some(None) => {
                        self.stage = SimAttachStage::Live { channel, after: offset };
                        self.lose(epochs, counts);
                    }
                    Some(Some(missed)) => self.backfilled(channel, offset, missed, epochs, counts),
                }
            }
            SimAttachStage::Replaying { channel, local_offset: offset, received } => {
                self.replay(channel, offset, received, epochs, counts)
            }
            stage => self.stage = stage,
        }
    }

    fn backfilled(
        &mut self,
        channel: Arc<Channel>,
        offset: u64,
        missed: Vec<ForwardedMessages>,
        epochs: &mut Vec<ContinuityEpoch>,
        counts: &mut SimClientCounts,
    ) {
        let position = self.position.clone().unwrap_or_default();
        let Some(ChannelBackfill { deliveries, received }) =
            channel.backfill(&position, LocalOffset::end(offset), missed)
        else {
            self.stage = SimAttachStage::Live { channel, after: offset };
            return self.lose(epochs, counts);
        };
        for (delivery, received) in deliveries {
            see(epochs, &delivery, 0);
            self.position = Some(received);
        }
        counts.resumed += 1;
        self.stage = SimAttachStage::Replaying {
            channel,
            local_offset: LocalOffset::end(offset),
            received: Some(received),
        };
    }

    fn replay(
        &mut self,
        channel: Arc<Channel>,
        mut local_offset: LocalOffset,
        received: Option<Serial>,
        epochs: &mut Vec<ContinuityEpoch>,
        counts: &mut SimClientCounts,
    ) {
        let Some(pulled) = channel.pull(local_offset, PULL_BYTES) else {
            self.stage = SimAttachStage::Live { channel, after: local_offset.offset };
            return self.lose(epochs, counts);
        };
        for delivery in &pulled.deliveries {
            let after = local_offset.offset;
            local_offset.offset = delivery.offset();
            match &received {
                Some(received) if delivery.is_included_in(received) => {}
                Some(received) => {
                    see(epochs, delivery, 0);
                    self.position = Some(delivery.position().serial().join(received));
                }
                None => {
                    see(epochs, delivery, after);
                    self.position = Some(delivery.position().serial());
                }
            }
        }
        self.stage = match pulled.is_end {
            true => SimAttachStage::Live { channel, after: local_offset.offset },
            false => SimAttachStage::Replaying { channel, local_offset, received },
        };
    }

    fn delivered(&mut self, delivery: &MessageDelivery, epochs: &mut [ContinuityEpoch]) {
        let SimAttachStage::Live { after, .. } = &mut self.stage else { return };
        if delivery.offset() > *after {
            see(epochs, delivery, *after);
            self.position = Some(delivery.position().serial());
        }
    }

    /// Continuity loss: the client is told, and begins a new epoch at the channel's present position.
    fn lose(&mut self, epochs: &mut Vec<ContinuityEpoch>, counts: &mut SimClientCounts) {
        let Some(channel) = self.stage.channel().map(Arc::clone) else { return };
        let position = channel.position();
        counts.losses += 1;
        self.begin(position.serial(), epochs, counts.now);
        self.stage = SimAttachStage::Live { channel, after: position.offset };
    }

    /// Continuity loss before a position, from which delivery goes on.
    fn lose_before(
        &mut self,
        position: &ChannelPosition,
        epochs: &mut Vec<ContinuityEpoch>,
        counts: &mut SimClientCounts,
    ) {
        let SimAttachStage::Live { channel, after } = &self.stage else { return self.lose(epochs, counts) };
        let (channel, offset) = (Arc::clone(channel), position.offset.max(*after));
        let position = if offset == position.offset {
            position.serial()
        } else {
            channel.position_at(LocalOffset::end(offset))
        };
        counts.losses += 1;
        self.begin(position, epochs, counts.now);
        self.stage = SimAttachStage::Live { channel, after: offset };
    }

    fn begin(&mut self, after: Serial, epochs: &mut Vec<ContinuityEpoch>, at: Duration) {
        self.position = Some(after.clone());
        epochs.push(ContinuityEpoch { after, at, seen: Vec::new() });
    }
}

/// Records the messages of a delivery after a local offset.
fn see(epochs: &mut [ContinuityEpoch], delivery: &MessageDelivery, after: u64) {
    let (incarnation, first) = match delivery.content() {
        DeliveryContent::Own(published) => {
            (published.incarnation, published.last().sequence + 1 - delivery.count())
        }
        DeliveryContent::Forwarded(forwarded) => (forwarded.incarnation, forwarded.first),
    };
    let skip = after.saturating_sub(delivery.offset() - delivery.count().min(delivery.offset()));
    if let Some(epoch) = epochs.last_mut() {
        epoch.seen.extend((first + skip..first + delivery.count()).map(|sequence| (incarnation, sequence)));
    }
}
