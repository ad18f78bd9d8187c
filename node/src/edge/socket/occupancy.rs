//! How many are at a channel: counted when that is asked, over the shards of this node and over the other nodes.

use std::sync::Arc;

use fanfare_proto::http::{Occupancy, OccupancySource};

use super::Shards;
use crate::hub::Hub;
use crate::model::{AttachedCount, ChannelKey};
use crate::publish::Publisher;

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
        let AttachedCount { connections, publishers, subscribers } = attached;
        let members = hub.member_count(key) as u64;
        Occupied { occupancy: Occupancy { connections, publishers, subscribers, members }, source }
    };
    Some(keys.iter().zip(all).map(occupied).collect())
}
