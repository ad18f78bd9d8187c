//! History reads in progress: their bound, and the sharing of equal reads.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

use super::{ScyllaShared, failed, reader};
use crate::origin::history::{BoxFuture, HistoryPage, HistoryQuery, StoreError};
use crate::telemetry::StoreOperation;

/// Concurrent reads at the database.
const UNDER_WAY_MAX: usize = 64;
/// Callers that may wait for a read; beyond it `Busy`.
const WAITING_MAX: usize = 4_096;

type PageReply = oneshot::Sender<Result<HistoryPage, StoreError>>;

pub(super) struct HistoryReads {
    pending: Mutex<PendingReads>,
    pub(super) permits: Semaphore,
}

#[derive(Default)]
struct PendingReads {
    /// Callers that want each running read to be repeated after it. A new caller must see everything acknowledged before, and the running
    /// read may not.
    next: HashMap<HistoryQuery, Vec<PageReply>>,
    waiting: usize,
}

impl HistoryReads {
    pub(super) fn new() -> Self {
        Self { pending: Mutex::default(), permits: Semaphore::new(UNDER_WAY_MAX) }
    }

    /// Number of running reads, and of callers that wait behind an equal read.
    #[cfg(test)]
    pub(super) fn under_way(&self) -> (usize, usize) {
        let pending = self.pending.lock();
        (pending.next.len(), pending.next.values().map(Vec::len).sum())
    }
}

pub(super) fn ask(
    shared: &Arc<ScyllaShared>,
    query: HistoryQuery,
) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
    let (answer, answered) = oneshot::channel();
    let mut pending = shared.reads.pending.lock();
    if pending.waiting >= WAITING_MAX {
        return Box::pin(std::future::ready(Err(StoreError::Busy)));
    }
    pending.waiting += 1;
    if let Some(next) = pending.next.get_mut(&query) {
        next.push(answer);
    } else {
        pending.next.insert(query.clone(), Vec::new());
        drop(pending);
        shared.spawn("store read", run(Arc::clone(shared), query, vec![answer]));
    }
    Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
}

/// Runs a read, and repeats it until no caller waits for an equal one.
async fn run(shared: Arc<ScyllaShared>, query: HistoryQuery, mut answers: Vec<PageReply>) {
    loop {
        let (wait, begun) = (shared.options.wait, Instant::now());
        let read = async {
            // The semaphore is never closed.
            let _permit = shared.reads.permits.acquire().await;
            reader::page(&shared, &query).await
        };
        let result = AssertUnwindSafe(tokio::time::timeout(2 * wait, read)).catch_unwind().await;
        shared.times.ended(StoreOperation::Read, begun);
        let result = match result {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(failed("the database did not answer in time")),
            Err(_) => {
                tracing::error!("store read panicked");
                Err(failed("the read panicked"))
            }
        };
        let next = {
            let mut pending = shared.reads.pending.lock();
            pending.waiting -= answers.len();
            match pending.next.get_mut(&query) {
                Some(next) if !next.is_empty() => std::mem::take(next),
                _ => pending.next.remove(&query).unwrap_or_default(),
            }
        };
        for answer in answers {
            // The caller may have dropped its receiver.
            let _ = answer.send(result.clone());
        }
        if next.is_empty() {
            return;
        }
        answers = next;
    }
}
