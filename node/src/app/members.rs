//! Members over a restart: whose connections were there when the former run ended is present, and lost from now on.

use std::collections::HashMap;
use std::sync::Arc;

use super::StartError;
use crate::auth::Authenticator;
use crate::hub::Hub;
use crate::model::{AccountId, ConnectionId, Owner};
use crate::origin::history::HistoryStore;
use crate::publish::{Departure, Publisher};
use crate::tasks::{OnStop, Tasks};

/// The connections of those who are present again, each with its account and its last epoch.
pub(super) type Connections = HashMap<ConnectionId, (AccountId, u64)>;

/// To be called before anybody can connect.
pub(super) async fn restore(store: &Arc<dyn HistoryStore>, hub: &Hub) -> Result<Connections, StartError> {
    let store = Arc::clone(store);
    let former = tokio::task::spawn_blocking(move || store.former_members()).await;
    let doing = "cannot read the presence members in the store";
    let former = former.map_err(StartError::at(doing))?.map_err(StartError::at(doing))?;
    let mut connections = Connections::new();
    for member in former {
        let account = member.key.account().clone();
        let (_, epoch) = connections.entry(member.member.connection_id).or_insert((account, 0));
        *epoch = member.epoch.max(*epoch);
        hub.restore(member);
    }
    if !connections.is_empty() {
        tracing::info!(connections = connections.len(), "members of the former run have their grace");
    }
    Ok(connections)
}

/// To be called when they can come back: their grace begins. Whom no key of the account lets be present any more leaves.
pub(super) fn begin(
    connections: Connections,
    publisher: &Publisher,
    auth: &Arc<Authenticator>,
    tasks: &Tasks,
) {
    tasks.spawn("presence", OnStop::Finish, publisher.clone().run_departures(tasks.stopping()));
    let of_account = Arc::clone(auth);
    let account = move |id: &AccountId| of_account.former(id).0;
    tasks.spawn("presence", OnStop::Finish, publisher.clone().run_orphans(account, tasks.stopping()));
    for (connection_id, (account, epoch)) in connections {
        let (account, granted) = auth.former(&account);
        let owner = Owner { epoch, incarnation: publisher.hub().incarnation() };
        let lost = Departure { connection_id, owner, account, keeps: None };
        publisher.leave(Departure { keeps: Some(granted), ..lost.clone() });
        publisher.lost(lost);
    }
}
