//! Reads of history that are under way: how many there may be, and those that ask the same.

use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, oneshot};

use super::{Shared, failed, reader};
use crate::origin::history::{BoxFuture, HistoryPage, HistoryQuery, StoreError};
use crate::telemetry::StoreOperation;

/// Reads that the database has at a time.
const UNDER_WAY_MAX: usize = 64;
/// Who waits for a read; beyond it `Busy`.
const WAITING_MAX: usize = 4_096;

type Answer = oneshot::Sender<Result<HistoryPage, StoreError>>;

pub(super) struct Reads {
    asked: Mutex<Asked>,
    pub(super) permits: Semaphore,
}

#[derive(Default)]
struct Asked {
    /// For each read that is under way, who wants the same to be read after it: what is asked now must see what was acknowledged
    /// before, and the read that is under way may not.
    next: HashMap<HistoryQuery, Vec<Answer>>,
    waiting: usize,
}

impl Reads {
    pub(super) fn new() -> Self {
        Self { asked: Mutex::default(), permits: Semaphore::new(UNDER_WAY_MAX) }
    }

    /// How many reads are under way, and how many wait behind one that asks the same.
    #[cfg(test)]
    pub(super) fn under_way(&self) -> (usize, usize) {
        let asked = self.asked.lock();
        (asked.next.len(), asked.next.values().map(Vec::len).sum())
    }
}

pub(super) fn ask(
    shared: &Arc<Shared>,
    query: HistoryQuery,
) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
    let (answer, answered) = oneshot::channel();
    let mut asked = shared.reads.asked.lock();
    if asked.waiting >= WAITING_MAX {
        return Box::pin(std::future::ready(Err(StoreError::Busy)));
    }
    asked.waiting += 1;
    if let Some(next) = asked.next.get_mut(&query) {
        next.push(answer);
    } else {
        asked.next.insert(query.clone(), Vec::new());
        drop(asked);
        shared.spawn("store read", run(Arc::clone(shared), query, vec![answer]));
    }
    Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
}

/// Until nobody asks the same any more.
async fn run(shared: Arc<Shared>, query: HistoryQuery, mut answers: Vec<Answer>) {
    loop {
        let (wait, begun) = (shared.options.wait, Instant::now());
        let read = async {
            // Never closed.
            let _permit = shared.reads.permits.acquire().await;
            reader::page(&shared, &query).await
        };
        let result = AssertUnwindSafe(tokio::time::timeout(2 * wait, read)).catch_unwind().await;
        shared.times.ended(StoreOperation::Read, begun);
        let result = match result {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(failed("the database did not answer in time")),
            Err(_) => {
                tracing::error!("a read of the store panicked");
                Err(failed("the read panicked"))
            }
        };
        let next = {
            let mut asked = shared.reads.asked.lock();
            asked.waiting -= answers.len();
            match asked.next.get_mut(&query) {
                Some(next) if !next.is_empty() => std::mem::take(next),
                _ => asked.next.remove(&query).unwrap_or_default(),
            }
        };
        for answer in answers {
            // A caller that has gone needs no answer.
            let _ = answer.send(result.clone());
        }
        if next.is_empty() {
            return;
        }
        answers = next;
    }
}
