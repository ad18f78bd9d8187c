//! Lookups of ids, several of a channel and client at a time, answered in their order.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use futures_util::stream::{self, FuturesOrdered};
use futures_util::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::ids::{GivenIds, Name};
use super::{Shared, failed};
use crate::model::{ChannelKey, ClientId, Stamp};
use crate::origin::history::{FoundIds, IdScope, StoreError};
use crate::telemetry::StoreOperation;

/// Lookups that are not answered, over all lanes; beyond it `Busy`.
const LOOKUPS_MAX: usize = 65_536;
/// Those of one lane.
const LANE_MAX: usize = 4_096;
/// Lookups of one lane, ids of them, and ids of one lookup, that are asked for at a time. Each may wait for what another node has
/// claimed, so there are more than requests at the database.
const TOGETHER: usize = 1_024;
/// Ids that are asked for at a time, over all lanes: each takes some 10 KiB.
const ASKED_MAX: usize = 16_384;

/// Within which lookups are answered in order: wider than a scope, since a connection may change its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Lane {
    key: ChannelKey,
    client_id: Option<ClientId>,
}

struct Lookup {
    scope: IdScope,
    ids: Vec<Box<str>>,
    found: FoundIds,
    begun: Instant,
}

pub(super) struct Lookups {
    lanes: Mutex<Lanes>,
    permits: Semaphore,
}

#[derive(Default)]
struct Lanes {
    lanes: HashMap<Lane, Waiting>,
    /// That are not answered.
    count: usize,
}

#[derive(Default)]
struct Waiting {
    lookups: VecDeque<Lookup>,
    has_more: Arc<Notify>,
}

pub(super) fn look_up(shared: &Arc<Shared>, scope: IdScope, ids: Vec<Box<str>>, found: FoundIds) {
    let lane = Lane { key: scope.key.clone(), client_id: scope.client_id.clone() };
    let lookup = Lookup { scope, ids, found, begun: Instant::now() };
    let mut lanes = shared.lookups.lanes.lock();
    let waiting = lanes.lanes.get(&lane).map_or(0, |waiting| waiting.lookups.len());
    if lanes.count >= LOOKUPS_MAX || waiting >= LANE_MAX {
        drop(lanes);
        return (lookup.found)(Err(StoreError::Busy));
    }
    lanes.count += 1;
    let is_new = !lanes.lanes.contains_key(&lane);
    let waiting = lanes.lanes.entry(lane.clone()).or_default();
    waiting.lookups.push_back(lookup);
    waiting.has_more.notify_one();
    let has_more = Arc::clone(&waiting.has_more);
    drop(lanes);
    if is_new {
        shared.spawn("store ids", run(Arc::clone(shared), lane, has_more));
    }
}

impl Lookup {
    fn names(&self) -> impl Iterator<Item = Name> {
        self.ids.iter().map(|id| (self.scope.clone(), id.clone()))
    }
}

impl Lookups {
    pub(super) fn new() -> Self {
        Self { lanes: Mutex::default(), permits: Semaphore::new(ASKED_MAX) }
    }

    /// The next lookup of the lane, unless it has to wait for another one of the same id to be answered.
    fn next(&self, lane: &Lane, under_way: &HashSet<Name>) -> Option<Lookup> {
        let mut lanes = self.lanes.lock();
        let waiting = &mut lanes.lanes.get_mut(lane)?.lookups;
        let goes = !waiting.front()?.names().any(|name| under_way.contains(&name));
        if goes { waiting.pop_front() } else { None }
    }

    /// Whether no lookup of the lane waits; then it is no more.
    fn ends(&self, lane: &Lane) -> bool {
        let mut lanes = self.lanes.lock();
        let ends = lanes.lanes.get(lane).is_none_or(|waiting| waiting.lookups.is_empty());
        if ends {
            lanes.lanes.remove(lane);
        }
        ends
    }
}

/// Until no lookup of the lane waits. Several are asked for at a time, and answered in their order.
async fn run(shared: Arc<Shared>, lane: Lane, has_more: Arc<Notify>) {
    let mut under_way = FuturesOrdered::new();
    let mut names = HashSet::new();
    loop {
        while under_way.len().max(names.len()) < TOGETHER
            && let Some(lookup) = shared.lookups.next(&lane, &names)
        {
            names.extend(lookup.names());
            under_way.push_back(ask(&shared, lookup));
        }
        if under_way.is_empty() && shared.lookups.ends(&lane) {
            return;
        }
        tokio::select! {
            Some((own, found, answer)) = under_way.next() => {
                if catch_unwind(AssertUnwindSafe(|| found(answer))).is_err() {
                    tracing::error!("a callback of the store panicked");
                }
                // Only now: whoever is told that its id is new has begun to write it.
                for name in &own {
                    names.remove(name);
                }
                shared.lookups.lanes.lock().count -= 1;
            }
            () = has_more.notified() => {}
        }
    }
}

/// Of which ids, whom to tell, and what: known by when nobody waits for it any more.
async fn ask(
    shared: &Arc<Shared>,
    lookup: Lookup,
) -> (Vec<Name>, FoundIds, Result<Vec<Option<Stamp>>, StoreError>) {
    let names: Vec<Name> = lookup.names().collect();
    let Lookup { scope, ids, found, begun } = lookup;
    let wait = shared.options.wait;
    let asked = async {
        let (scope, ids) = (&scope, &ids);
        let each = stream::iter(0..ids.len()).map(|at| async move {
            // Never closed.
            let _permit = shared.lookups.permits.acquire().await;
            Box::pin(shared.ids.find(shared, scope, &ids[at])).await
        });
        each.buffered(TOGETHER).try_collect().await
    };
    let asked = AssertUnwindSafe(asked).catch_unwind();
    let asked = asked.map(|asked| asked.unwrap_or_else(|_| Err(failed("the question for ids panicked"))));
    let unknown = || Err(failed(format_args!("the database did not answer for {wait:?}")));
    // Who comes when the database is back is not to wait for all of those for whom nobody waits any more.
    let answer = if begun.elapsed() < wait {
        tokio::time::timeout_at(begun + wait, asked).await.unwrap_or_else(|_| {
            GivenIds::wait_on(shared, &names);
            unknown()
        })
    } else {
        unknown()
    };
    shared.times.ended(StoreOperation::FindIds, begun.into_std());
    (names, found, answer)
}
