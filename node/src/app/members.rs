//! Presence over a restart: members whose connections existed at the end of the previous incarnation are present, and
//! count as lost from now on.

use std::collections::HashMap;
use std::sync::Arc;

use super::StartError;
use crate::auth::Authenticator;
use crate::hub::Hub;
use crate::model::{AccountId, ConnectionId, SessionOwner};
use crate::origin::history::HistoryStore;
use crate::publish::{DelayedLeave, Publisher};
use crate::tasks::{OnStop, Tasks};

/// Connections of the restored members, each with its account and its last epoch.
pub(super) type RestoredConnections = HashMap<ConnectionId, (AccountId, u64)>;

/// Restores the members from the store; to be called before clients can connect.
pub(super) async fn restore(
    store: &Arc<dyn HistoryStore>,
    hub: &Hub,
) -> Result<RestoredConnections, StartError> {
    let store = Arc::clone(store);
    let stored = tokio::task::spawn_blocking(move || store.stored_members()).await;
    let doing = "cannot read the presence members in the store";
    let stored = stored.map_err(StartError::at(doing))?.map_err(StartError::at(doing))?;
    let mut connections = RestoredConnections::new();
    for member in stored {
        let account = member.key.account().clone();
        let (_, epoch) = connections.entry(member.member.connection_id).or_insert((account, 0));
        *epoch = member.epoch.max(*epoch);
        hub.restore(member);
    }
    if !connections.is_empty() {
        tracing::info!(
            connections = connections.len(),
            "presence members restored: presence timeout started"
        );
    }
    Ok(connections)
}

/// Begins the presence timeout of the restored connections; to be called when clients can resume. Members that no key
/// of the account permits any more leave.
pub(super) fn begin(
    connections: RestoredConnections,
    publisher: &Publisher,
    auth: &Arc<Authenticator>,
    tasks: &Tasks,
) {
    tasks.spawn("presence", OnStop::Finish, publisher.clone().run_delayed_leaves(tasks.stopping()));
    let of_account = Arc::clone(auth);
    let account = move |id: &AccountId| of_account.restored_grants(id).0;
    tasks.spawn("presence", OnStop::Finish, publisher.clone().run_orphaned_leaves(account, tasks.stopping()));
    for (connection_id, (account, epoch)) in connections {
        let (account, granted) = auth.restored_grants(&account);
        let owner = SessionOwner { epoch, incarnation: publisher.hub().incarnation() };
        let lost = DelayedLeave { connection_id, owner, account, keeps: None };
        publisher.leave(DelayedLeave { keeps: Some(granted), ..lost.clone() });
        publisher.leave_after_timeout(lost);
    }
}
