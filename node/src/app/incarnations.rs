//! Successive incarnations of the node over the same store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use super::StartError;
use crate::accounts::Accounts;
use crate::config::StoreKind;
use crate::edge::socket::ShardServices;
use crate::hub::Hub;
use crate::origin::history::{HistoryCoverage, HistoryStore, PreviousIncarnation};
use crate::publish::Publisher;
use crate::tasks::{OnStop, Tasks};

/// Interval of the check for changes that came while another was written.
const LOOK: Duration = Duration::from_secs(1);
/// Delay of the retry after a failed write.
const AGAIN: Duration = Duration::from_millis(100);
/// Time for which a change of the directory waits for a disk that does not answer.
const CHANGE_WAIT: Duration = Duration::from_secs(2);

/// Records the present incarnation and returns the previous ones, latest first. If the disk refuses the write, a node with history still
/// serves. Without history it does not start, since acknowledged messages leave no trace and the next incarnation must know of this one.
pub(super) async fn begin_incarnation(
    store: &dyn HistoryStore,
    hub: &Hub,
    accounts: &Accounts,
    kind: StoreKind,
) -> Result<(Vec<PreviousIncarnation>, Option<HistoryCoverage>), StartError> {
    let policies = accounts.current().history_policies();
    let kept =
        HistoryCoverage { policies, has_changed: false, is_complete: true, outlasts_resume_window: false };
    let begun = store.begin_incarnation(hub.incarnation(), kept).await;
    begun.map(|previous| (previous, Some(kept))).or_else(|error| {
        if kind == StoreKind::None {
            return Err(StartError::at("cannot note in the data folder that this run keeps no history")(
                error,
            ));
        }
        tracing::error!(%error, "previous incarnations not read: their clients cannot resume");
        Ok((Vec::new(), None))
    })
}

/// Records the history coverage of this incarnation. Clients that resume after a restart get a continuity loss if the channels with history
/// changed, a delivered message was not stored, or an incarnation since outlasted the time to resume.
pub(super) fn record_policies(
    tasks: &Tasks,
    store: &Arc<dyn HistoryStore>,
    services: &ShardServices,
    accounts: &Arc<Accounts>,
    recorded: Option<HistoryCoverage>,
) {
    let (store, accounts) = (Arc::clone(store), Arc::clone(accounts));
    let outlasts_after = Duration::from_millis(2 * services.limits.resume_window_ms);
    // Only one change of the directory at a time asks.
    let (sender, requests) = mpsc::channel(1);
    let runtime = Handle::current();
    accounts.before_policy_change(move |policies| runtime.block_on(written_down(&sender, policies)));
    let noting =
        record_changes(store, services.publisher.clone(), accounts, recorded, outlasts_after, requests);
    tasks.spawn("history policies", OnStop::Cancel, noting);
}

/// Policies that are about to take effect, and the waiter for their write.
type PolicyChange = (u64, oneshot::Sender<()>);

async fn written_down(sender: &mpsc::Sender<PolicyChange>, policies: u64) {
    let (done, is_done) = oneshot::channel();
    let written = async {
        sender.send((policies, done)).await.ok()?;
        // The recorder drops the other end after the write.
        let _dropped = is_done.await;
        Some(())
    };
    if !matches!(tokio::time::timeout(CHANGE_WAIT, written).await, Ok(Some(()))) {
        tracing::error!("history policy change applied before it was stored");
    }
}

async fn record_changes(
    store: Arc<dyn HistoryStore>,
    publisher: Publisher,
    accounts: Arc<Accounts>,
    mut recorded: Option<HistoryCoverage>,
    outlasts_after: Duration,
    mut requests: mpsc::Receiver<PolicyChange>,
) {
    let incarnation = publisher.hub().incarnation();
    let began = Instant::now();
    let (mut generation, changes) = (accounts.generation(), accounts.policy_changes());
    let mut policies = accounts.current().history_policies();
    // Dropping this end after the write wakes the waiter.
    let mut waits = None;
    let mut is_failing = recorded.is_none();
    let mut pause = if is_failing { AGAIN } else { LOOK };
    loop {
        let left = outlasts_after.saturating_sub(began.elapsed());
        let change = tokio::select! {
            Some(change) = requests.recv() => Some(change),
            () = publisher.wait_unstored() => None,
            () = tokio::time::sleep(left), if !left.is_zero() => None,
            () = tokio::time::sleep(pause) => None,
        };
        if accounts.generation() != generation {
            generation = accounts.generation();
            policies = accounts.current().history_policies();
        }
        if let Some((next, done)) = change {
            (policies, waits) = (next, Some(done));
        }
        let has_changed = accounts.policy_changes() != changes;
        let outlasts = began.elapsed() >= outlasts_after;
        let kept = HistoryCoverage {
            policies,
            has_changed,
            is_complete: publisher.stores_all(),
            outlasts_resume_window: outlasts,
        };
        pause = LOOK;
        if recorded != Some(kept) {
            match store.begin_incarnation(incarnation, kept).await {
                // The write may have taken long, and its waiter have given up.
                Ok(_) => (recorded, is_failing, pause) = (Some(kept), false, Duration::ZERO),
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::error!(%error, "history policies of this incarnation not stored");
                    }
                    pause = AGAIN;
                    continue;
                }
            }
        }
        drop(waits.take());
    }
}
