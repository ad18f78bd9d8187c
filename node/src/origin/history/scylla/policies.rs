//! What runs say of which channels keep history: written before it takes effect, and there for as long as somebody may come back to what
//! was delivered under it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::marks;
use super::values::{ordered, ttl_s, unordered};
use super::{Shared, failed};
use crate::origin::history::{BoxFuture, KeptBy, StoreError};
use crate::tasks::Merged;

/// What a run says is there for so long beyond that time, and is said again well before: a run that is killed says no end of it.
const LASTS: Duration = Duration::from_secs(3_600);
const AGAIN: Duration = Duration::from_secs(900);
/// The same once it says something else, which takes effect a moment later.
const ENDS: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Policies {
    said: Mutex<Option<Said>>,
    reads: Merged<Result<KeptBy, StoreError>>,
}

/// Of the present run.
#[derive(Debug, Clone, Copy)]
struct Said {
    incarnation: u64,
    policies: u64,
    at: Instant,
}

impl Policies {
    pub(super) fn told(&self) -> Option<u64> {
        let said = self.said.lock();
        said.filter(|said| said.at.elapsed() < LASTS).map(|said| said.policies)
    }

    /// As if it had been so long ago.
    #[cfg(test)]
    pub(super) fn was_said(&self, before: Duration) {
        if let Some(said) = &mut *self.said.lock() {
            said.at = Instant::now().checked_sub(before).expect("the machine runs longer");
        }
    }
}

/// Whatever else this node has said is over.
pub(super) async fn say(shared: &Shared, incarnation: u64, policies: u64) -> Result<(), StoreError> {
    let at = Instant::now();
    write(shared, (incarnation, policies), LASTS).await?;
    *shared.policies.said.lock() = Some(Said { incarnation, policies, at });
    let rows = rows(shared).await?;
    let own = |row: &&Row| row.node_id == *shared.options.node_id;
    for Row { kept, .. } in rows.iter().filter(own).filter(|row| !row.is_over) {
        if *kept != (incarnation, policies) {
            write(shared, *kept, ENDS).await?;
        }
    }
    agree(shared, &rows).await;
    Ok(())
}

/// Whether all runs mark what they write. What fails is tried again.
async fn agree(shared: &Shared, rows: &[Row]) {
    let mut others = rows.iter().filter(|row| row.node_id != *shared.options.node_id && !row.is_over);
    let do_all_mark = others.all(|row| row.marks);
    let agreed = marks::agree(shared, do_all_mark).await;
    if let Err(error) = agreed {
        tracing::debug!(%error, "whether all runs mark what they write was not asked");
    }
}

/// To be called often; what fails is tried again then.
pub(super) async fn say_again(shared: &Shared) {
    let due = shared.policies.said.lock().filter(|said| said.at.elapsed() >= AGAIN);
    let Some(Said { incarnation, policies, .. }) = due else { return };
    let at = Instant::now();
    if write(shared, (incarnation, policies), LASTS).await.is_ok() {
        *shared.policies.said.lock() = Some(Said { incarnation, policies, at });
        if let Ok(rows) = rows(shared).await {
            agree(shared, &rows).await;
        }
    }
}

/// The run delivers nothing any more. Where that cannot be written, the next one of this node does.
pub(super) async fn end(shared: &Shared) {
    let said = shared.policies.said.lock().take();
    if let Some(Said { incarnation, policies, .. }) = said {
        write(shared, (incarnation, policies), ENDS).await.ok();
    }
}

/// Who asks while it is being read shares the next reading.
pub(super) fn ask(shared: &Arc<Shared>) -> BoxFuture<'static, Result<KeptBy, StoreError>> {
    let (answered, is_first) = shared.policies.reads.ask();
    if is_first {
        let reading = Arc::clone(shared);
        shared.spawn("store policies", async move {
            let kept = |rows: Vec<Row>| rows.into_iter().map(|row| row.kept).collect();
            reading.policies.reads.run(|| async { rows(&reading).await.map(kept) }).await;
        });
    }
    Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
}

struct Row {
    node_id: String,
    /// Run and policies.
    kept: (u64, u64),
    is_over: bool,
    /// Of a version that does.
    marks: bool,
}

async fn rows(shared: &Shared) -> Result<Vec<Row>, StoreError> {
    let database = shared.database();
    let found = database.session.execute_unpaged(&database.statements.policies, ()).await.map_err(failed)?;
    let found = found.into_rows_result().map_err(failed)?;
    let mut rows = Vec::new();
    for row in found.rows::<(String, i64, i64, Option<bool>, Option<bool>)>().map_err(failed)? {
        let (node_id, incarnation, policies, is_over, marks) = row.map_err(failed)?;
        let kept = (unordered(incarnation), unordered(policies));
        let (is_over, marks) = (is_over.unwrap_or(false), marks.unwrap_or(false));
        rows.push(Row { node_id, kept, is_over, marks });
    }
    Ok(rows)
}

async fn write(shared: &Shared, (run, policies): (u64, u64), beyond: Duration) -> Result<(), StoreError> {
    let beyond_ms = u64::try_from(beyond.as_millis()).unwrap_or(u64::MAX);
    let ttl = ttl_s(shared.options.resume_kept_ms.saturating_add(beyond_ms), 0).unwrap_or(i32::MAX);
    let (is_over, at) = (beyond == ENDS, shared.next_change(shared.clock.highest_ms()));
    let database = shared.database();
    let values = (&*shared.options.node_id, ordered(run), ordered(policies), is_over, ttl, at);
    let written = database.session.execute_unpaged(&database.statements.insert_policies, values).await;
    written.map(drop).map_err(failed)
}
