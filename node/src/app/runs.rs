//! One run of the node after the other, over the same store.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::accounts::Accounts;
use crate::hub::Hub;
use crate::origin::history::{FormerRun, HistoryStore, Kept};
use crate::publish::Publisher;
use crate::tasks::{OnStop, Tasks};

/// A node that is killed within this time after a change, and started again as if there had been none, has not told.
const LOOK: Duration = Duration::from_millis(100);

/// The latest first. A disk that takes no write leaves what can still be served.
pub(super) async fn former_runs(store: &dyn HistoryStore, hub: &Hub, accounts: &Accounts) -> Vec<FormerRun> {
    let kept = Kept { policies: accounts.current().history_policies(), is_all: true, outlasts: false };
    store.begin(hub.incarnation(), kept).await.unwrap_or_else(|error| {
        tracing::error!(%error, "nobody can be resumed from the runs before");
        Vec::new()
    })
}

/// Who comes back after a restart is told when the channels that keep history were not the same all the time, when
/// something that was delivered was not stored, or when a run since was longer than the time to come back.
pub(super) fn note_what_is_kept(
    tasks: &Tasks,
    store: &Arc<dyn HistoryStore>,
    publisher: &Publisher,
    accounts: &Arc<Accounts>,
    resume_window_ms: u64,
) {
    let (store, accounts) = (Arc::clone(store), Arc::clone(accounts));
    let outlasts_after = Duration::from_millis(2 * resume_window_ms);
    let noting = note_changes(store, publisher.clone(), accounts, outlasts_after);
    tasks.spawn("kept", OnStop::Cancel, noting);
}

async fn note_changes(
    store: Arc<dyn HistoryStore>,
    publisher: Publisher,
    accounts: Arc<Accounts>,
    outlasts_after: Duration,
) {
    const MIXED: u64 = 0;
    let incarnation = publisher.hub().incarnation();
    let began = Instant::now();
    let mut noted = Kept { policies: accounts.current().history_policies(), is_all: true, outlasts: false };
    let (mut generation, changes) = (accounts.generation(), accounts.policy_changes());
    let mut policies = noted.policies;
    loop {
        tokio::time::sleep(LOOK).await;
        if accounts.generation() != generation {
            generation = accounts.generation();
            policies = accounts.current().history_policies();
        }
        if accounts.policy_changes() != changes {
            policies = MIXED;
        }
        let outlasts = began.elapsed() > outlasts_after;
        let kept = Kept { policies, is_all: publisher.stores_all(), outlasts };
        if kept == noted {
            continue;
        }
        match store.begin(incarnation, kept).await {
            Ok(_) => noted = kept,
            Err(error) => tracing::error!(%error, "what is kept of this run is not written down"),
        }
    }
}
