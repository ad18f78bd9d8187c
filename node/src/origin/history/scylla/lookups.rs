//! Lookups of ids: several of a channel and client at a time, answered in their order.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use futures_util::stream::{self, FuturesOrdered};
use futures_util::{FutureExt as _, StreamExt as _, TryStreamExt as _};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};
use tokio::time::Instant;

use super::ids::{ScopedId, ScyllaIdClaims};
use super::{ScyllaShared, failed};
use crate::model::{ChannelKey, ClientId, Stamp};
use crate::origin::history::{IdLookupCallback, IdScope, StoreError};
use crate::telemetry::StoreOperation;

/// Unanswered lookups over all queues; beyond it `Busy`.
const LOOKUPS_MAX: usize = 65_536;
/// Unanswered lookups of one queue.
const QUEUE_MAX: usize = 4_096;
/// Concurrent lookups of one queue, their ids, and ids of one lookup. Each may wait for another node's claim, so there are more of them
/// than requests at the database.
const PARALLEL_MAX: usize = 1_024;
/// Concurrent ids over all queues; each takes about 10 KiB.
const UNDER_WAY_MAX: usize = 16_384;

/// Key of a queue, within which lookups are answered in order. It is wider than a scope, since a connection may change its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct ScyllaLookupKey {
    key: ChannelKey,
    client_id: Option<ClientId>,
}

struct ScyllaIdLookup {
    scope: IdScope,
    ids: Vec<Box<str>>,
    callback: IdLookupCallback,
    started: Instant,
}

pub(super) struct IdLookups {
    queues: Mutex<LookupQueues>,
    permits: Semaphore,
}

#[derive(Default)]
struct LookupQueues {
    by_key: HashMap<ScyllaLookupKey, LookupQueue>,
    /// Unanswered lookups.
    count: usize,
}

#[derive(Default)]
struct LookupQueue {
    lookups: VecDeque<ScyllaIdLookup>,
    has_more: Arc<Notify>,
}

pub(super) fn look_up(
    shared: &Arc<ScyllaShared>,
    scope: IdScope,
    ids: Vec<Box<str>>,
    found: IdLookupCallback,
) {
    let key = ScyllaLookupKey { key: scope.key.clone(), client_id: scope.client_id.clone() };
    let lookup = ScyllaIdLookup { scope, ids, callback: found, started: Instant::now() };
    let mut queues = shared.lookups.queues.lock();
    let waiting = queues.by_key.get(&key).map_or(0, |waiting| waiting.lookups.len());
    if queues.count >= LOOKUPS_MAX || waiting >= QUEUE_MAX {
        drop(queues);
        return (lookup.callback)(Err(StoreError::Busy));
    }
    queues.count += 1;
    let is_new = !queues.by_key.contains_key(&key);
    let waiting = queues.by_key.entry(key.clone()).or_default();
    waiting.lookups.push_back(lookup);
    waiting.has_more.notify_one();
    let has_more = Arc::clone(&waiting.has_more);
    drop(queues);
    if is_new {
        shared.spawn("store ids", run(Arc::clone(shared), key, has_more));
    }
}

impl ScyllaIdLookup {
    fn names(&self) -> impl Iterator<Item = ScopedId> {
        self.ids.iter().map(|id| (self.scope.clone(), id.clone()))
    }
}

impl IdLookups {
    pub(super) fn new() -> Self {
        Self { queues: Mutex::default(), permits: Semaphore::new(UNDER_WAY_MAX) }
    }

    /// Returns the next lookup of the queue, unless it must wait until another one of the same id is answered.
    fn next(&self, key: &ScyllaLookupKey, under_way: &HashSet<ScopedId>) -> Option<ScyllaIdLookup> {
        let mut queues = self.queues.lock();
        let waiting = &mut queues.by_key.get_mut(key)?.lookups;
        let goes = !waiting.front()?.names().any(|name| under_way.contains(&name));
        if goes { waiting.pop_front() } else { None }
    }

    /// Removes the queue if no lookup waits in it; returns whether it did.
    fn remove_if_empty(&self, key: &ScyllaLookupKey) -> bool {
        let mut queues = self.queues.lock();
        let ends = queues.by_key.get(key).is_none_or(|waiting| waiting.lookups.is_empty());
        if ends {
            queues.by_key.remove(key);
        }
        ends
    }
}

/// Runs a queue until no lookup waits. Several run concurrently and are answered in their order.
async fn run(shared: Arc<ScyllaShared>, key: ScyllaLookupKey, has_more: Arc<Notify>) {
    let mut under_way = FuturesOrdered::new();
    let mut names = HashSet::new();
    loop {
        while under_way.len().max(names.len()) < PARALLEL_MAX
            && let Some(lookup) = shared.lookups.next(&key, &names)
        {
            names.extend(lookup.names());
            under_way.push_back(ask(&shared, lookup));
        }
        if under_way.is_empty() && shared.lookups.remove_if_empty(&key) {
            return;
        }
        tokio::select! {
            Some((own, found, answer)) = under_way.next() => {
                if catch_unwind(AssertUnwindSafe(|| found(answer))).is_err() {
                    tracing::error!("store callback panicked");
                }
                // Released only now: during the callback, a publisher whose id is new has begun to write it.
                for name in &own {
                    names.remove(name);
                }
                shared.lookups.queues.lock().count -= 1;
            }
            () = has_more.notified() => {}
        }
    }
}

/// Runs one lookup within the store's time limit. Returns its ids, its callback and the result.
async fn ask(
    shared: &Arc<ScyllaShared>,
    lookup: ScyllaIdLookup,
) -> (Vec<ScopedId>, IdLookupCallback, Result<Vec<Option<Stamp>>, StoreError>) {
    let names: Vec<ScopedId> = lookup.names().collect();
    let ScyllaIdLookup { scope, ids, callback: found, started: begun } = lookup;
    let wait = shared.options.wait;
    let search = async {
        let (scope, ids) = (&scope, &ids);
        let each = stream::iter(0..ids.len()).map(|at| async move {
            // The semaphore is never closed.
            let _permit = shared.lookups.permits.acquire().await;
            Box::pin(shared.ids.find(shared, scope, &ids[at])).await
        });
        each.buffered(PARALLEL_MAX).try_collect().await
    };
    let search = AssertUnwindSafe(search).catch_unwind();
    let search = search.map(|result| result.unwrap_or_else(|_| Err(failed("the question for ids panicked"))));
    let unknown = || Err(failed(format_args!("the database did not answer for {wait:?}")));
    // Skips lookups that have already timed out, so that later ones need not wait for them once the database answers again.
    let answer = if begun.elapsed() < wait {
        tokio::time::timeout_at(begun + wait, search).await.unwrap_or_else(|_| {
            ScyllaIdClaims::keep_waiting(shared, &names);
            unknown()
        })
    } else {
        unknown()
    };
    shared.times.ended(StoreOperation::FindIds, begun.into_std());
    (names, found, answer)
}
