//! One run of the node after the other, over the same store.

use std::sync::Arc;
use std::time::Duration;

use crate::accounts::Accounts;
use crate::hub::Hub;
use crate::origin::history::{FormerRun, HistoryStore};
use crate::tasks::{OnStop, Tasks};

/// A node that is killed within this time after a change, and started again as if there had been none, has not told.
const POLICIES_LOOK: Duration = Duration::from_millis(100);

/// A disk that takes no write leaves what can still be served.
pub(super) async fn former_run(
    store: &dyn HistoryStore,
    hub: &Hub,
    accounts: &Accounts,
) -> Option<FormerRun> {
    let policies = accounts.current().history_policies();
    store.begin(hub.incarnation(), policies).await.unwrap_or_else(|error| {
        tracing::error!(%error, "nobody can be resumed from the run before");
        None
    })
}

/// Who comes back after a restart is told when the channels that keep history were not the same all the time.
pub(super) fn note_policies(
    tasks: &Tasks,
    store: &Arc<dyn HistoryStore>,
    hub: &Hub,
    accounts: &Arc<Accounts>,
) {
    let (store, accounts) = (Arc::clone(store), Arc::clone(accounts));
    tasks.spawn("policies", OnStop::Cancel, note_a_change(store, hub.incarnation(), accounts));
}

async fn note_a_change(store: Arc<dyn HistoryStore>, incarnation: u64, accounts: Arc<Accounts>) {
    const MIXED: u64 = 0;
    let (policies, mut generation) = (accounts.current().history_policies(), accounts.generation());
    loop {
        tokio::time::sleep(POLICIES_LOOK).await;
        if accounts.generation() == generation {
            continue;
        }
        generation = accounts.generation();
        if accounts.current().history_policies() == policies {
            continue;
        }
        match store.begin(incarnation, MIXED).await {
            Ok(_) => return,
            Err(error) => {
                tracing::error!(%error, "a change of the channels that keep history is not written down");
                generation = 0;
            }
        }
    }
}
