//! Occupancy of channels: counted on request over the shards of this node and over the peers, and once a second for channels that clients
//! watch.

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

/// Interval of notices: a client is told of at most one change of a channel in this time.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Coalescing time: channels that clients begin to watch within it are counted together.
const COALESCING_TIME: Duration = Duration::from_millis(50);
/// Time limit of a count, longer than the wait for peers.
const COUNT_WAIT: Duration = Duration::from_secs(3);
/// Channels that are counted with one request.
const CHANNELS_MAX: usize = 256;

/// Occupancy of a channel, and the nodes that were counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CountedOccupancy {
    pub occupancy: Occupancy,
    pub source: OccupancySource,
}

/// Occupancy of each channel: over all nodes if all peers answer, or else on this node alone. `None` when a shard is stopping. Members are
/// always those of all nodes, as this node knows them.
pub async fn occupancy(
    shards: &Shards,
    hub: &Hub,
    publisher: &Publisher,
    keys: Arc<[ChannelKey]>,
) -> Option<Vec<CountedOccupancy>> {
    let remote = async {
        match publisher.routing() {
            Some(routing) => routing.attached(&keys).await,
            None => Some(vec![AttachedCount::default(); keys.len()]),
        }
    };
    let (here, remote) = tokio::join!(shards.attached(Arc::clone(&keys)), remote);
    let mut all = here?;
    let source = match remote {
        Some(remote) => {
            all.iter_mut().zip(remote).for_each(|(sum, count)| *sum += count);
            OccupancySource::Cluster
        }
        None => OccupancySource::Node,
    };
    let occupied = |(key, attached): (&ChannelKey, AttachedCount)| {
        let AttachedCount { connections, publishers, subscribers, .. } = attached;
        let members = hub.member_count(key) as u64;
        CountedOccupancy { occupancy: Occupancy { connections, publishers, subscribers, members }, source }
    };
    Some(keys.iter().zip(all).map(occupied).collect())
}

/// Occupancy of a channel, encoded for clients.
#[derive(Debug)]
pub struct OccupancyNotice {
    key: ChannelKey,
    occupied: CountedOccupancy,
    /// Time at which the count began; of two notices the later one is newer.
    at: Instant,
    json: Bytes,
    msgpack: Bytes,
}

impl OccupancyNotice {
    fn new(key: &ChannelKey, occupied: CountedOccupancy, at: Instant) -> Self {
        let CountedOccupancy { occupancy, source } = occupied;
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

/// Channels that clients of this node watch. Bounded by the attach limits of connections.
#[derive(Debug, Default)]
pub(super) struct WatchedChannels {
    channels: Mutex<HashMap<ChannelKey, WatchedChannel>>,
    begun: Notify,
}

#[derive(Debug, Default)]
struct WatchedChannel {
    /// Bit set of shards with watching clients.
    shards: u64,
    /// The last notice sent to the shards.
    last_notice: Option<Arc<OccupancyNotice>>,
}

impl WatchedChannels {
    /// Adds a watching shard. Returns the last notice for other shards, if there was one.
    pub(super) fn begin(&self, key: &ChannelKey, shard: usize) -> Option<Arc<OccupancyNotice>> {
        let notice = {
            let mut channels = self.channels.lock();
            let watch = channels.entry(key.clone()).or_default();
            watch.shards |= 1 << shard;
            watch.last_notice.clone()
        };
        if notice.is_none() {
            self.begun.notify_one();
        }
        notice
    }

    /// Removes a shard without watching clients.
    pub(super) fn end(&self, key: &ChannelKey, shard: usize) {
        let mut channels = self.channels.lock();
        let Some(watch) = channels.get_mut(key) else { return };
        watch.shards &= !(1 << shard);
        if watch.shards == 0 {
            channels.remove(key);
        }
    }

    /// Counts watched channels once a second, and newly watched ones at once.
    pub(super) async fn run(self: Arc<Self>, shards: Arc<Shards>, hub: Arc<Hub>, publisher: Publisher) {
        loop {
            if self.is_idle() {
                self.begun.notified().await;
            }
            let round = Instant::now() + TELL_EVERY;
            self.count(&shards, &hub, &publisher).await;
            while tokio::time::timeout_at(round, self.begun.notified()).await.is_ok() {
                tokio::time::sleep(COALESCING_TIME).await;
                self.count(&shards, &hub, &publisher).await;
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.channels.lock().is_empty()
    }

    /// Counts all due channels. Requests go one after another, so that a peer has at most one of them to answer at a time.
    async fn count(&self, shards: &Shards, hub: &Hub, publisher: &Publisher) {
        let now = Instant::now();
        for keys in self.due(now).chunks(CHANNELS_MAX) {
            let keys: Arc<[ChannelKey]> = keys.into();
            let counted = occupancy(shards, hub, publisher, Arc::clone(&keys));
            // A shard that does not answer in time is asked again in the next round.
            if let Ok(Some(counted)) = tokio::time::timeout(COUNT_WAIT, counted).await {
                self.take(now, keys.iter().zip(counted), |shard, notice| {
                    shards.handle(shard).push(Input::SendOccupancy(notice));
                });
            }
        }
    }

    /// Channels to count now. A channel whose clients were told within the last second waits for the next round.
    fn due(&self, now: Instant) -> Vec<ChannelKey> {
        let is_due = |notice: &Arc<OccupancyNotice>| now.saturating_duration_since(notice.at) >= TELL_EVERY;
        let channels = self.channels.lock();
        let due = channels.iter().filter(|(_, watch)| watch.last_notice.as_ref().is_none_or(is_due));
        due.map(|(key, _)| key.clone()).collect()
    }

    /// Sends changes to the shards. Under the lock, so that a shard that begins to watch meanwhile gets either the old or the new notice.
    fn take<'a>(
        &self,
        now: Instant,
        counted: impl Iterator<Item = (&'a ChannelKey, CountedOccupancy)>,
        notify: impl Fn(usize, Arc<OccupancyNotice>),
    ) {
        let mut channels = self.channels.lock();
        for (key, occupied) in counted {
            let Some(watch) = channels.get_mut(key) else { continue };
            if watch.last_notice.as_ref().is_some_and(|notice| notice.occupied == occupied) {
                continue;
            }
            let notice = watch.last_notice.insert(Arc::new(OccupancyNotice::new(key, occupied, now)));
            let watching = (0..64).filter(|shard| watch.shards & (1 << shard) != 0);
            watching.for_each(|shard| notify(shard, Arc::clone(notice)));
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

    fn occupied(connections: u64) -> CountedOccupancy {
        let occupancy = Occupancy { connections, ..Occupancy::default() };
        CountedOccupancy { occupancy, source: OccupancySource::Cluster }
    }

    /// Shards that are notified of the channel.
    fn notified_shards(watches: &WatchedChannels, now: Instant, name: &str, connections: u64) -> Vec<usize> {
        let notified = Mutex::new(Vec::new());
        watches.take(now, [(&key(name), occupied(connections))].into_iter(), |shard, _| {
            notified.lock().push(shard)
        });
        notified.into_inner()
    }

    #[test]
    fn occupancy_change_is_sent_to_watching_shards() {
        let (watches, now) = (WatchedChannels::default(), Instant::now());
        assert!(watches.begin(&key("a"), 3).is_none());
        assert!(watches.begin(&key("a"), 63).is_none());
        assert_eq!(notified_shards(&watches, now, "a", 2), [3, 63]);
        assert_eq!(notified_shards(&watches, now, "a", 2), [0; 0], "it is the same");
        assert_eq!(notified_shards(&watches, now, "b", 2), [0; 0], "no client watches it");
        let notice = watches.begin(&key("a"), 0).expect("it was counted");
        assert_eq!((notice.occupied, notice.key()), (occupied(2), &key("a")));
        watches.end(&key("a"), 3);
        assert_eq!(notified_shards(&watches, now, "a", 1), [0, 63]);
        [0, 63, 63].iter().for_each(|shard| watches.end(&key("a"), *shard));
        assert!(watches.is_idle());
        assert_eq!(notified_shards(&watches, now, "a", 5), [0; 0]);
        assert!(watches.begin(&key("a"), 0).is_none(), "it is counted anew");
    }

    #[test]
    fn occupancy_change_is_sent_at_most_once_a_second() {
        let (watches, now) = (WatchedChannels::default(), Instant::now());
        watches.begin(&key("a"), 0);
        assert_eq!(watches.due(now), [key("a")]);
        notified_shards(&watches, now, "a", 1);
        assert_eq!(watches.due(now + TELL_EVERY - Duration::from_millis(1)), []);
        let then = now + TELL_EVERY;
        assert_eq!(watches.due(then), [key("a")]);
        assert_eq!(notified_shards(&watches, then, "a", 1), [0; 0]);
        assert_eq!(watches.due(then), [key("a")], "nothing was told");
        watches.begin(&key("b"), 0);
        notified_shards(&watches, then, "a", 2);
        assert_eq!(watches.due(then), [key("b")]);
    }
}
