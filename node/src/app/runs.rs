//! One run of the node after the other, over the same store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};

use super::StartError;
use crate::accounts::Accounts;
use crate::config::StoreKind;
use crate::hub::Hub;
use crate::origin::history::{FormerRun, HistoryStore, Kept};
use crate::publish::Publisher;
use crate::tasks::{OnStop, Tasks};

/// How often it is looked for a change that could not be told while another one was written down.
const LOOK: Duration = Duration::from_secs(1);
/// When it is tried again to write down what a store did not take.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a change of the directory waits for a disk that does not answer.
const CHANGE_WAIT: Duration = Duration::from_secs(2);

/// The latest first, and what is noted of the present one. A disk that takes no write leaves what can still be served; but a run without history acknowledges what
/// leaves no trace, so it must be known to the next one.
pub(super) async fn former_runs(
    store: &dyn HistoryStore,
    hub: &Hub,
    accounts: &Accounts,
    kind: StoreKind,
) -> Result<(Vec<FormerRun>, Option<Kept>), StartError> {
    let policies = accounts.current().history_policies();
    let kept = Kept { policies, has_changed: false, is_all: true, outlasts: false };
    let begun = store.begin(hub.incarnation(), kept).await;
    begun.map(|former| (former, Some(kept))).or_else(|error| {
        if kind == StoreKind::None {
            return Err(StartError::at("cannot note in the data folder that this run keeps no history")(
                error,
            ));
        }
        tracing::error!(%error, "nobody can be resumed from the runs before");
        Ok((Vec::new(), None))
    })
}

/// Who comes back after a restart is told when the channels that keep history were not the same all the time, when
/// something that was delivered was not stored, or when a run since was longer than the time to come back.
pub(super) fn note_what_is_kept(
    tasks: &Tasks,
    store: &Arc<dyn HistoryStore>,
    publisher: &Publisher,
    accounts: &Arc<Accounts>,
    noted: Option<Kept>,
    resume_window_ms: u64,
) {
    let (store, accounts) = (Arc::clone(store), Arc::clone(accounts));
    let outlasts_after = Duration::from_millis(2 * resume_window_ms);
    // One change of the directory at a time asks.
    let (ask, asked) = mpsc::channel(1);
    let runtime = Handle::current();
    accounts.before_policy_change(move |policies| runtime.block_on(written_down(&ask, policies)));
    let noting = note_changes(store, publisher.clone(), accounts, noted, outlasts_after, asked);
    tasks.spawn("kept", OnStop::Cancel, noting);
}

/// Policies that are about to take effect, and who waits for them to be written down.
type Change = (u64, oneshot::Sender<()>);

async fn written_down(ask: &mpsc::Sender<Change>, policies: u64) {
    let (done, is_done) = oneshot::channel();
    let written = async {
        ask.send((policies, done)).await.ok()?;
        // Its other end is dropped when it is done.
        let _dropped = is_done.await;
        Some(())
    };
    if !matches!(tokio::time::timeout(CHANGE_WAIT, written).await, Ok(Some(()))) {
        tracing::error!("a change of what is kept takes effect before it is written down");
    }
}

async fn note_changes(
    store: Arc<dyn HistoryStore>,
    publisher: Publisher,
    accounts: Arc<Accounts>,
    mut noted: Option<Kept>,
    outlasts_after: Duration,
    mut asked: mpsc::Receiver<Change>,
) {
    let incarnation = publisher.hub().incarnation();
    let began = Instant::now();
    let (mut generation, changes) = (accounts.generation(), accounts.policy_changes());
    let mut policies = accounts.current().history_policies();
    // Whoever waits is told, by dropping its end, when it is written down.
    let mut waits = None;
    let mut is_failing = noted.is_none();
    let mut pause = if is_failing { AGAIN } else { LOOK };
    loop {
        let left = outlasts_after.saturating_sub(began.elapsed());
        let change = tokio::select! {
            Some(change) = asked.recv() => Some(change),
            () = publisher.has_missed() => None,
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
        let kept = Kept { policies, has_changed, is_all: publisher.stores_all(), outlasts };
        pause = LOOK;
        if noted != Some(kept) {
            match store.begin(incarnation, kept).await {
                // It may have taken long, and somebody not have waited for it.
                Ok(_) => (noted, is_failing, pause) = (Some(kept), false, Duration::ZERO),
                Err(error) => {
                    if !std::mem::replace(&mut is_failing, true) {
                        tracing::error!(%error, "what is kept of this run is not written down");
                    }
                    pause = AGAIN;
                    continue;
                }
            }
        }
        drop(waits.take());
    }
}
