//! How many are at a channel: counted when that is asked, over the shards of this node and over the other nodes, and once a second
//! where clients watch it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, ServerFrame};
use fanfare_proto::http::{Occupancy, OccupancySource};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::shard::payload_frame;
use super::{Input, Shards};
use crate::hub::Hub;
use crate::model::{AttachedCount, ChannelKey};
use crate::publish::Publisher;

/// A client is told of at most one change of a channel in this time.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Channels that clients begin to watch are counted together if they come within this time.
const GATHER: Duration = Duration::from_millis(50);
/// Beyond what other nodes are waited for.
const COUNT_WAIT: Duration = Duration::from_secs(3);
/// Channels that are asked for at once.
const CHANNELS_MAX: usize = 256;

/// How many are at a channel, and on which nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Occupied {
    pub occupancy: Occupancy,
    pub source: OccupancySource,
}

/// How many are at each of these channels, on all nodes if all others answer, and else on this one. `None` when a shard is stopping.
/// Members are those of all nodes in either case, as this one knows them.
pub async fn occupancy(
    shards: &Shards,
    hub: &Hub,
    publisher: &Publisher,
    keys: Arc<[ChannelKey]>,
) -> Option<Vec<Occupied>> {
    let elsewhere = async {
        match publisher.routing() {
            Some(routing) => routing.attached(&keys).await,
            None => Some(vec![AttachedCount::default(); keys.len()]),
        }
    };
    let (here, elsewhere) = tokio::join!(shards.attached(Arc::clone(&keys)), elsewhere);
    let mut all = here?;
    let source = match elsewhere {
        Some(elsewhere) => {
            all.iter_mut().zip(elsewhere).for_each(|(sum, count)| *sum += count);
            OccupancySource::Cluster
        }
        None => OccupancySource::Node,
    };
    let occupied = |(key, attached): (&ChannelKey, AttachedCount)| {
        let AttachedCount { connections, publishers, subscribers, .. } = attached;
        let members = hub.member_count(key) as u64;
        Occupied { occupancy: Occupancy { connections, publishers, subscribers, members }, source }
    };
    Some(keys.iter().zip(all).map(occupied).collect())
}

/// How many are at a channel, as clients are told it.
#[derive(Debug)]
pub struct Told {
    key: ChannelKey,
    occupied: Occupied,
    /// When the count began; later of what is told later.
    at: Instant,
    json: Bytes,
    msgpack: Bytes,
}

impl Told {
    fn new(key: &ChannelKey, occupied: Occupied, at: Instant) -> Self {
        let Occupied { occupancy, source } = occupied;
        let frame = ServerFrame::Occupancy { channel: key.channel(), occupancy, source };
        let [json, msgpack] = [Format::Json, Format::MsgPack]
            .map(|format| payload_frame(format, &frame::encode(&frame, format)));
        Self { key: key.clone(), occupied, at, json, msgpack }
    }

    pub(super) fn key(&self) -> &ChannelKey {
        &self.key
    }

    pub(super) fn is_after(&self, other: &Self) -> bool {
        self.at > other.at
    }

    pub(super) fn frame(&self, format: Format) -> Bytes {
        match format {
            Format::Json => self.json.clone(),
            Format::MsgPack => self.msgpack.clone(),
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.json.len() + self.msgpack.len()
    }
}

/// The channels that clients of this node watch. Bounded by what connections may attach.
#[derive(Debug, Default)]
pub(super) struct Watches {
    channels: Mutex<HashMap<ChannelKey, Watch>>,
    begun: Notify,
}

#[derive(Debug, Default)]
struct Watch {
    /// Bit per shard that has clients to tell.
    shards: u64,
    /// The count that they were told last.
    told: Option<Arc<Told>>,
}

impl Watches {
    /// Clients of the shard watch the channel from now on, and are told what follows. The count that others were told last, if there was one.
    pub(super) fn begin(&self, key: &ChannelKey, shard: usize) -> Option<Arc<Told>> {
        let told = {
            let mut channels = self.channels.lock();
            let watch = channels.entry(key.clone()).or_default();
            watch.shards |= 1 << shard;
            watch.told.clone()
        };
        if told.is_none() {
            self.begun.notify_one();
        }
        told
    }

    /// No client of the shard watches the channel any more.
    pub(super) fn end(&self, key: &ChannelKey, shard: usize) {
        let mut channels = self.channels.lock();
        let Some(watch) = channels.get_mut(key) else { return };
        watch.shards &= !(1 << shard);
        if watch.shards == 0 {
            channels.remove(key);
        }
    }

    /// Counts once a second while clients watch, and at once what they begin to watch.
    pub(super) async fn run(self: Arc<Self>, shards: Arc<Shards>, hub: Arc<Hub>, publisher: Publisher) {
        loop {
            if self.is_idle() {
                self.begun.notified().await;
            }
            let round = Instant::now() + TELL_EVERY;
            self.count(&shards, &hub, &publisher).await;
            while tokio::time::timeout_at(round, self.begun.notified()).await.is_ok() {
                tokio::time::sleep(GATHER).await;
                self.count(&shards, &hub, &publisher).await;
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.channels.lock().is_empty()
    }

    /// One request after the other: however many channels are watched, another node has one of them to answer at a time.
    async fn count(&self, shards: &Shards, hub: &Hub, publisher: &Publisher) {
        let now = Instant::now();
        for keys in self.due(now).chunks(CHANNELS_MAX) {
            let keys: Arc<[ChannelKey]> = keys.into();
            let counted = occupancy(shards, hub, publisher, Arc::clone(&keys));
            // A shard that does not come to it is asked again in the next round.
            if let Ok(Some(counted)) = tokio::time::timeout(COUNT_WAIT, counted).await {
                self.take(now, keys.iter().zip(counted), |shard, told| {
                    shards.handle(shard).push(Input::TellOccupancy(told));
                });
            }
        }
    }

    /// A channel of which clients were told within the last second waits for the next round.
    fn due(&self, now: Instant) -> Vec<ChannelKey> {
        let is_due = |told: &Arc<Told>| now.saturating_duration_since(told.at) >= TELL_EVERY;
        let channels = self.channels.lock();
        let due = channels.iter().filter(|(_, watch)| watch.told.as_ref().is_none_or(is_due));
        due.map(|(key, _)| key.clone()).collect()
    }

    /// Tells the shards what has changed. Under the lock, so that a shard that begins meanwhile is told either of the two.
    fn take<'a>(
        &self,
        now: Instant,
        counted: impl Iterator<Item = (&'a ChannelKey, Occupied)>,
        tell: impl Fn(usize, Arc<Told>),
    ) {
        let mut channels = self.channels.lock();
        for (key, occupied) in counted {
            let Some(watch) = channels.get_mut(key) else { continue };
            if watch.told.as_ref().is_some_and(|told| told.occupied == occupied) {
                continue;
            }
            let told = watch.told.insert(Arc::new(Told::new(key, occupied, now)));
            let watching = (0..64).filter(|shard| watch.shards & (1 << shard) != 0);
            watching.for_each(|shard| tell(shard, Arc::clone(told)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{AccountId, ChannelName};

    fn key(name: &str) -> ChannelKey {
        ChannelKey::new(AccountId::new("a"), ChannelName::of(name))
    }

    fn occupied(connections: u64) -> Occupied {
        let occupancy = Occupancy { connections, ..Occupancy::default() };
        Occupied { occupancy, source: OccupancySource::Cluster }
    }

    /// The shards that are told of the channel.
    fn tells(watches: &Watches, now: Instant, name: &str, connections: u64) -> Vec<usize> {
        let told = Mutex::new(Vec::new());
        watches
            .take(now, [(&key(name), occupied(connections))].into_iter(), |shard, _| told.lock().push(shard));
        told.into_inner()
    }

    #[test]
    fn a_change_is_told_to_the_shards_that_watch() {
        let (watches, now) = (Watches::default(), Instant::now());
        assert!(watches.begin(&key("a"), 3).is_none());
        assert!(watches.begin(&key("a"), 63).is_none());
        assert_eq!(tells(&watches, now, "a", 2), [3, 63]);
        assert_eq!(tells(&watches, now, "a", 2), [0; 0], "it is the same");
        assert_eq!(tells(&watches, now, "b", 2), [0; 0], "no client watches it");
        let told = watches.begin(&key("a"), 0).expect("it was counted");
        assert_eq!((told.occupied, told.key()), (occupied(2), &key("a")));
        watches.end(&key("a"), 3);
        assert_eq!(tells(&watches, now, "a", 1), [0, 63]);
        [0, 63, 63].iter().for_each(|shard| watches.end(&key("a"), *shard));
        assert!(watches.is_idle());
        assert_eq!(tells(&watches, now, "a", 5), [0; 0]);
        assert!(watches.begin(&key("a"), 0).is_none(), "it is counted anew");
    }

    #[test]
    fn a_change_is_told_at_most_once_a_second() {
        let (watches, now) = (Watches::default(), Instant::now());
        watches.begin(&key("a"), 0);
        assert_eq!(watches.due(now), [key("a")]);
        tells(&watches, now, "a", 1);
        assert_eq!(watches.due(now + TELL_EVERY - Duration::from_millis(1)), []);
        let then = now + TELL_EVERY;
        assert_eq!(watches.due(then), [key("a")]);
        assert_eq!(tells(&watches, then, "a", 1), [0; 0]);
        assert_eq!(watches.due(then), [key("a")], "nothing was told");
        watches.begin(&key("b"), 0);
        tells(&watches, then, "a", 2);
        assert_eq!(watches.due(then), [key("b")]);
    }
}
