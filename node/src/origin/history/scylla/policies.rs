//! Announcements of the history policies of incarnations. An announcement is written before its policies take effect, and stays for as
//! long as clients may resume from messages that were delivered under them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::continuations;
use super::values::{ordered, ttl_s, unordered};
use super::{ScyllaShared, failed};
use crate::origin::history::{BoxFuture, IncarnationPolicies, StoreError};
use crate::tasks::SingleFlight;

/// Time beyond `resume_kept_ms` that an announcement lasts. It is renewed well before, since a node that crashes cannot end its
/// announcement.
const LIFETIME: Duration = Duration::from_secs(3_600);
const RENEW_AFTER: Duration = Duration::from_secs(900);
/// Time beyond `resume_kept_ms` that an announcement lasts once other policies are announced, which take effect a moment later.
const ENDED_LIFETIME: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct PolicyAnnouncements {
    announced: Mutex<Option<AnnouncedPolicies>>,
    reads: SingleFlight<Result<IncarnationPolicies, StoreError>>,
}

/// Announcement of the present incarnation.
#[derive(Debug, Clone, Copy)]
struct AnnouncedPolicies {
    incarnation: u64,
    policies: u64,
    at: Instant,
}

impl PolicyAnnouncements {
    pub(super) fn announced(&self) -> Option<u64> {
        let announced = self.announced.lock();
        announced.filter(|announced| announced.at.elapsed() < LIFETIME).map(|announced| announced.policies)
    }

    /// Moves the announcement's time back by `before`.
    #[cfg(test)]
    pub(super) fn set_announced_before(&self, before: Duration) {
        if let Some(announced) = &mut *self.announced.lock() {
            announced.at = Instant::now().checked_sub(before).expect("the machine runs longer");
        }
    }
}

/// Announces the policies, and ends all other announcements of this node.
pub(super) async fn announce(
    shared: &ScyllaShared,
    incarnation: u64,
    policies: u64,
) -> Result<(), StoreError> {
    let at = Instant::now();
    write(shared, (incarnation, policies), LIFETIME).await?;
    *shared.policies.announced.lock() = Some(AnnouncedPolicies { incarnation, policies, at });
    let rows = rows(shared).await?;
    let own = |row: &&PolicyRow| row.node_id == *shared.options.node_id;
    for PolicyRow { incarnation_policies: kept, .. } in rows.iter().filter(own).filter(|row| !row.has_ended) {
        if *kept != (incarnation, policies) {
            write(shared, *kept, ENDED_LIFETIME).await?;
        }
    }
    agree_on_continuations(shared, &rows).await;
    Ok(())
}

/// Checks whether all incarnations write continuation marks. An error is logged; a later call tries again.
async fn agree_on_continuations(shared: &ScyllaShared, rows: &[PolicyRow]) {
    let mut others = rows.iter().filter(|row| row.node_id != *shared.options.node_id && !row.has_ended);
    let do_all_mark = others.all(|row| row.writes_continuations);
    let agreed = continuations::set_first_day(shared, do_all_mark).await;
    if let Err(error) = agreed {
        tracing::debug!(%error, "incarnations not read: single-request reads stay off");
    }
}

/// Renews the announcement if it is due. To be called often; a failed renewal is repeated by the next call.
pub(super) async fn renew_announcement(shared: &ScyllaShared) {
    let due = shared.policies.announced.lock().filter(|announced| announced.at.elapsed() >= RENEW_AFTER);
    let Some(AnnouncedPolicies { incarnation, policies, .. }) = due else { return };
    let at = Instant::now();
    if write(shared, (incarnation, policies), LIFETIME).await.is_ok() {
        *shared.policies.announced.lock() = Some(AnnouncedPolicies { incarnation, policies, at });
        if let Ok(rows) = rows(shared).await {
            agree_on_continuations(shared, &rows).await;
        }
    }
}

/// Ends the announcement, once the incarnation delivers nothing any more. If that write fails, the node's next incarnation ends it.
pub(super) async fn end_announcement(shared: &ScyllaShared) {
    let announced = shared.policies.announced.lock().take();
    if let Some(AnnouncedPolicies { incarnation, policies, .. }) = announced {
        write(shared, (incarnation, policies), ENDED_LIFETIME).await.ok();
    }
}

/// Reads the announced policies. Callers that come during a read share the next one.
pub(super) fn read_recent(
    shared: &Arc<ScyllaShared>,
) -> BoxFuture<'static, Result<IncarnationPolicies, StoreError>> {
    let (answered, is_first) = shared.policies.reads.ask();
    if is_first {
        let reading = Arc::clone(shared);
        shared.spawn("store policies", async move {
            let kept = |rows: Vec<PolicyRow>| rows.into_iter().map(|row| row.incarnation_policies).collect();
            reading.policies.reads.run(|| async { rows(&reading).await.map(kept) }).await;
        });
    }
    Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
}

struct PolicyRow {
    node_id: String,
    /// Incarnation and its policies.
    incarnation_policies: (u64, u64),
    has_ended: bool,
    /// Whether the incarnation's version writes continuation marks.
    writes_continuations: bool,
}

async fn rows(shared: &ScyllaShared) -> Result<Vec<PolicyRow>, StoreError> {
    let database = shared.database();
    let found = database.session.execute_unpaged(&database.statements.policies, ()).await.map_err(failed)?;
    let found = found.into_rows_result().map_err(failed)?;
    let mut rows = Vec::new();
    for row in found.rows::<(String, i64, i64, Option<bool>, Option<bool>)>().map_err(failed)? {
        let (node_id, incarnation, policies, has_ended, writes_continuations) = row.map_err(failed)?;
        let kept = (unordered(incarnation), unordered(policies));
        let (has_ended, writes_continuations) =
            (has_ended.unwrap_or(false), writes_continuations.unwrap_or(false));
        rows.push(PolicyRow { node_id, incarnation_policies: kept, has_ended, writes_continuations });
    }
    Ok(rows)
}

async fn write(
    shared: &ScyllaShared,
    (incarnation, policies): (u64, u64),
    beyond: Duration,
) -> Result<(), StoreError> {
    let beyond_ms = u64::try_from(beyond.as_millis()).unwrap_or(u64::MAX);
    let ttl = ttl_s(shared.options.resume_kept_ms.saturating_add(beyond_ms), 0).unwrap_or(i32::MAX);
    let (has_ended, at) = (beyond == ENDED_LIFETIME, shared.next_change(shared.clock.highest_ms()));
    let database = shared.database();
    let values = (&*shared.options.node_id, ordered(incarnation), ordered(policies), has_ended, ttl, at);
    let written = database.session.execute_unpaged(&database.statements.insert_policies, values).await;
    written.map(drop).map_err(failed)
}
