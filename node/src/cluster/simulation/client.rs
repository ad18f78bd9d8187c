//! A simulated client: what a shard does for a connection, and what the client keeps of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fanfare_proto::serial::Serial;
use parking_lot::Mutex;

use super::watch::Watch;
use crate::cluster::routing::Routing;
use crate::hub::{
    Channel, Content, Delivery, DeliveryTarget, Hub, Mark, PresenceDelivery, Refill, Spot, Start, Waiter,
};
use crate::model::{ChannelKey, Forwarded};
use crate::tasks::{OnStop, Tasks};

/// Far more than a run of the simulation takes.
const BACK_MS: u64 = 600_000;
const PULL_BYTES: usize = 2_000;

/// Keeps what a node has for the client in one of its places.
#[derive(Default)]
pub(super) struct Mailbox(Mutex<Vec<Event>>);

enum Event {
    Delivery(Arc<Delivery>),
    Presence(Arc<PresenceDelivery>),
    Lost(u64, Mark),
}

impl DeliveryTarget for Mailbox {
    fn deliver(&self, delivery: Arc<Delivery>) {
        self.0.lock().push(Event::Delivery(delivery));
    }

    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>) {
        self.0.lock().push(Event::Presence(delivery));
    }

    fn lose(&self, channel: u64, mark: &Mark) {
        self.0.lock().push(Event::Lost(channel, mark.clone()));
    }

    fn congested(&self) -> bool {
        false
    }
}

impl Mailbox {
    pub(super) fn clear(&self) {
        self.0.lock().clear();
    }

    fn take(&self) -> Vec<Event> {
        std::mem::take(&mut self.0.lock())
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }
}

/// Where a client is connected.
#[derive(Clone)]
pub(super) struct At {
    pub(super) node: usize,
    pub(super) slot: usize,
    pub(super) hub: Arc<Hub>,
    pub(super) routing: Arc<Routing>,
    pub(super) tasks: Arc<Tasks>,
    pub(super) mailbox: Arc<Mailbox>,
}

/// A time in which a client relies on getting everything.
#[derive(Debug, Default)]
pub(super) struct Epoch {
    /// From where on.
    pub(super) after: Serial,
    pub(super) at: Duration,
    /// Runs and sequences, as they came.
    pub(super) seen: Vec<(u64, u64)>,
}

#[derive(Default)]
pub(super) struct Client {
    pub(super) at: Option<At>,
    subscriptions: BTreeMap<ChannelKey, Subscription>,
    pub(super) epochs: BTreeMap<ChannelKey, Vec<Epoch>>,
    pub(super) counts: Counts,
}

#[derive(Default)]
pub(super) struct Counts {
    /// Attaches that went on from a position.
    pub(super) resumed: usize,
    /// How often the client was told that something may be missing.
    pub(super) told: usize,
    /// Of members, that it was told.
    pub(super) changes: usize,
    now: Duration,
}

struct Subscription {
    position: Option<Serial>,
    stage: Stage,
    watch: Watch,
}

enum Stage {
    Off,
    /// Set when the others forward the channel.
    Joining(Arc<AtomicBool>),
    /// Others are asked for what was missed up to this place.
    Asking {
        channel: Arc<Channel>,
        place: u64,
        answer: Arc<Mutex<Option<Option<Vec<Forwarded>>>>>,
    },
    Replaying {
        channel: Arc<Channel>,
        place: Spot,
        has: Option<Serial>,
    },
    Live {
        channel: Arc<Channel>,
        after: u64,
    },
}

impl Stage {
    fn channel(&self) -> Option<&Arc<Channel>> {
        match self {
            Self::Off | Self::Joining(_) => None,
            Self::Asking { channel, .. } | Self::Replaying { channel, .. } | Self::Live { channel, .. } => {
                Some(channel)
            }
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stages = self.subscriptions.iter().map(|(key, subscription)| {
            let stage = match &subscription.stage {
                Stage::Off => "off",
                Stage::Joining(_) => "joining",
                Stage::Asking { .. } => "asking",
                Stage::Replaying { .. } => "replaying",
                Stage::Live { .. } => "live",
            };
            (key.channel(), stage)
        });
        f.debug_map().entries(stages).finish()
    }
}

impl Client {
    pub(super) fn connect(&mut self, at: At, now: Duration) {
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
        let mut subscription = Subscription { position: None, stage: Stage::Off, watch: Watch::default() };
        if let Some(at) = &self.at {
            let epochs = self.epochs.entry(key.clone()).or_default();
            subscription.attach(key, at, epochs, &mut self.counts);
        }
        self.subscriptions.insert(key.clone(), subscription);
    }

    /// The socket is gone, with what the client had not read.
    pub(super) fn disconnect(&mut self, is_node_alive: bool) -> Option<At> {
        let at = self.at.take()?;
        for (key, subscription) in &mut self.subscriptions {
            subscription.watch = Watch::default();
            let channel = match std::mem::replace(&mut subscription.stage, Stage::Off) {
                Stage::Joining(_) => at.hub.live(key),
                stage => stage.channel().map(Arc::clone),
            };
            if is_node_alive && let Some(channel) = channel {
                at.hub.detach(&channel, at.slot);
            }
        }
        at.mailbox.clear();
        Some(at)
    }

    /// Reads what has come, and goes on with what waited.
    pub(super) fn turn(&mut self, now: Duration) {
        self.counts.now = now;
        let Some(at) = &self.at else { return };
        for event in at.mailbox.take() {
            let number = match &event {
                Event::Delivery(delivery) => delivery.channel,
                Event::Presence(delivery) => delivery.channel,
                Event::Lost(channel, _) => *channel,
            };
            let found = self.subscriptions.iter_mut().find(|(_, subscription)| {
                subscription.stage.channel().is_some_and(|channel| channel.number() == number)
            });
            let Some((key, subscription)) = found else { continue };
            let epochs = self.epochs.entry(key.clone()).or_default();
            match event {
                Event::Delivery(delivery) => subscription.delivered(&delivery, epochs),
                Event::Presence(delivery) => {
                    self.counts.changes += 1;
                    subscription.watch.hear(&delivery);
                }
                Event::Lost(_, mark) => {
                    subscription.lose_before(&mark, epochs, &mut self.counts);
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

    /// Who is present on the channel, as far as the client can tell; none while it is not attached.
    pub(super) fn watch(&self, key: &ChannelKey) -> Option<&Watch> {
        let subscription = self.subscriptions.get(key)?;
        subscription.stage.channel().map(|_| &subscription.watch)
    }

    pub(super) fn forget_events(&mut self) {
        self.subscriptions.values_mut().for_each(|subscription| subscription.watch.events.clear());
    }

    /// Everything that has come is read, and nothing is waited for.
    pub(super) fn is_settled(&self) -> bool {
        self.at.as_ref().is_some_and(|at| at.mailbox.is_empty())
            && self.subscriptions.values().all(|subscription| {
                matches!(subscription.stage, Stage::Live { .. }) && subscription.watch.has_list()
            })
    }
}

impl Subscription {
    fn attach(&mut self, key: &ChannelKey, at: &At, epochs: &mut Vec<Epoch>, counts: &mut Counts) {
        self.attach_messages(key, at, epochs, counts);
        self.begin_watch(at);
    }

    fn begin_watch(&mut self, at: &At) {
        if let Some(channel) = self.stage.channel() {
            self.watch.begin(&at.hub, channel);
        }
    }

    fn attach_messages(&mut self, key: &ChannelKey, at: &At, epochs: &mut Vec<Epoch>, counts: &mut Counts) {
        let is_joined = Arc::new(AtomicBool::new(false));
        let waiter = || {
            let is_joined = Arc::clone(&is_joined);
            Box::new(move || is_joined.store(true, Ordering::SeqCst)) as Waiter
        };
        if at.hub.join(key, at.slot, waiter).is_none() {
            self.stage = Stage::Joining(is_joined);
            return;
        }
        let Some(position) = self.position.clone() else {
            let (channel, mark) = at.hub.attach(key, at.slot);
            self.begin(mark.serial(), epochs, counts.now);
            self.stage = Stage::Live { channel, after: mark.place };
            return;
        };
        let joined = at.hub.attach_after(key, at.slot, &position);
        let (channel, Mark { place, .. }) = (joined.channel, joined.mark);
        match joined.start {
            Start::Live => {
                counts.resumed += 1;
                self.stage = Stage::Live { channel, after: place };
            }
            Start::Replay { after, is_exact } => {
                counts.resumed += 1;
                let has = (!is_exact).then_some(position);
                self.stage = Stage::Replaying { channel, place: after, has };
            }
            Start::Unknown => {
                let answer = Arc::new(Mutex::new(None));
                let (routing, key, given) = (Arc::clone(&at.routing), key.clone(), Arc::clone(&answer));
                at.tasks.spawn("missed", OnStop::Cancel, async move {
                    let missed = routing.missed(&key, &position, BACK_MS).await;
                    *given.lock() = Some(missed);
                });
                self.stage = Stage::Asking { channel, place, answer };
            }
        }
    }

    fn go_on(&mut self, key: &ChannelKey, at: &At, epochs: &mut Vec<Epoch>, counts: &mut Counts) {
        match std::mem::replace(&mut self.stage, Stage::Off) {
            Stage::Joining(is_joined) if is_joined.load(Ordering::SeqCst) => {
                self.attach(key, at, epochs, counts);
            }
            Stage::Asking { channel, place, answer } => {
                let missed = answer.lock().take();
                match missed {
                    None => self.stage = Stage::Asking { channel, place, answer },
                    Some(None) => {
                        self.stage = Stage::Live { channel, after: place };
                        self.lose(epochs, counts);
                    }
                    Some(Some(missed)) => self.refilled(channel, place, missed, epochs, counts),
                }
            }
            Stage::Replaying { channel, place, has } => self.replay(channel, place, has, epochs, counts),
            stage => self.stage = stage,
        }
    }

    fn refilled(
        &mut self,
        channel: Arc<Channel>,
        place: u64,
        missed: Vec<Forwarded>,
        epochs: &mut Vec<Epoch>,
        counts: &mut Counts,
    ) {
        let position = self.position.clone().unwrap_or_default();
        let Some(Refill { deliveries, has }) = channel.refill(&position, Spot::end(place), missed) else {
            self.stage = Stage::Live { channel, after: place };
            return self.lose(epochs, counts);
        };
        for (delivery, has) in deliveries {
            see(epochs, &delivery, 0);
            self.position = Some(has);
        }
        counts.resumed += 1;
        self.stage = Stage::Replaying { channel, place: Spot::end(place), has: Some(has) };
    }

    fn replay(
        &mut self,
        channel: Arc<Channel>,
        mut spot: Spot,
        has: Option<Serial>,
        epochs: &mut Vec<Epoch>,
        counts: &mut Counts,
    ) {
        let Some(pulled) = channel.pull(spot, PULL_BYTES) else {
            self.stage = Stage::Live { channel, after: spot.place };
            return self.lose(epochs, counts);
        };
        for delivery in &pulled.deliveries {
            let after = spot.place;
            spot.place = delivery.place();
            match &has {
                Some(has) if delivery.is_covered(has) => {}
                Some(has) => {
                    see(epochs, delivery, 0);
                    self.position = Some(delivery.mark().serial().join(has));
                }
                None => {
                    see(epochs, delivery, after);
                    self.position = Some(delivery.mark().serial());
                }
            }
        }
        self.stage = match pulled.is_end {
            true => Stage::Live { channel, after: spot.place },
            false => Stage::Replaying { channel, place: spot, has },
        };
    }

    fn delivered(&mut self, delivery: &Delivery, epochs: &mut [Epoch]) {
        let Stage::Live { after, .. } = &mut self.stage else { return };
        if delivery.place() > *after {
            see(epochs, delivery, *after);
            self.position = Some(delivery.mark().serial());
        }
    }

    /// What follows is not there: the client is told, and goes on from where the channel stands.
    fn lose(&mut self, epochs: &mut Vec<Epoch>, counts: &mut Counts) {
        let Some(channel) = self.stage.channel().map(Arc::clone) else { return };
        let mark = channel.mark();
        counts.told += 1;
        self.begin(mark.serial(), epochs, counts.now);
        self.stage = Stage::Live { channel, after: mark.place };
    }

    /// The same, of what comes before the mark.
    fn lose_before(&mut self, mark: &Mark, epochs: &mut Vec<Epoch>, counts: &mut Counts) {
        let Stage::Live { channel, after } = &self.stage else { return self.lose(epochs, counts) };
        let (channel, place) = (Arc::clone(channel), mark.place.max(*after));
        let position =
            if place == mark.place { mark.serial() } else { channel.position_at(Spot::end(place)) };
        counts.told += 1;
        self.begin(position, epochs, counts.now);
        self.stage = Stage::Live { channel, after: place };
    }

    fn begin(&mut self, after: Serial, epochs: &mut Vec<Epoch>, at: Duration) {
        self.position = Some(after.clone());
        epochs.push(Epoch { after, at, seen: Vec::new() });
    }
}

/// The messages of a delivery behind a place.
fn see(epochs: &mut [Epoch], delivery: &Delivery, after: u64) {
    let (run, first) = match delivery.content() {
        Content::Own(published) => (published.incarnation, published.last().sequence + 1 - delivery.count()),
        Content::Forwarded(forwarded) => (forwarded.incarnation, forwarded.first),
    };
    let skip = after.saturating_sub(delivery.place() - delivery.count().min(delivery.place()));
    if let Some(epoch) = epochs.last_mut() {
        epoch.seen.extend((first + skip..first + delivery.count()).map(|sequence| (run, sequence)));
    }
}
