//! Members over a restart: whose connections were there when the former run ended is present, and lost from now on.

use std::collections::HashMap;
use std::sync::Arc;

use super::StartError;
use crate::auth::Authenticator;
use crate::hub::Hub;
use crate::model::{AccountId, ConnectionId, Hold};
use crate::origin::history::HistoryStore;
use crate::publish::{Departure, Publisher};
use crate::tasks::{OnStop, Tasks};

/// The connections of those who are present again.
pub(super) type Connections = HashMap<ConnectionId, Last>;

/// As a connection was when it was last heard of.
#[derive(Clone)]
pub(super) struct Last {
    account: AccountId,
    hold: Hold,
    timestamp_ms: u64,
}

/// To be called before anybody can connect.
pub(super) async fn restore(store: &Arc<dyn HistoryStore>, hub: &Hub) -> Result<Connections, StartError> {
    let store = Arc::clone(store);
    let former = tokio::task::spawn_blocking(move || store.former_members()).await;
    let doing = "cannot read the presence members in the store";
    let former = former.map_err(StartError::at(doing))?.map_err(StartError::at(doing))?;
    let mut connections = Connections::new();
    for member in former {
        let last = Last {
            account: member.key.account().clone(),
            hold: member.hold.clone(),
            timestamp_ms: member.timestamp_ms,
        };
        let known = connections.entry(member.member.connection_id).or_insert_with(|| last.clone());
        if (known.hold.epoch, known.timestamp_ms) < (last.hold.epoch, last.timestamp_ms) {
            *known = last;
        }
        hub.restore(member);
    }
    if !connections.is_empty() {
        tracing::info!(connections = connections.len(), "members of the former run have their grace");
    }
    Ok(connections)
}

/// To be called when they can come back: their grace begins. Whom the directory does not let be present any more leaves.
pub(super) fn begin(connections: Connections, publisher: &Publisher, auth: &Authenticator, tasks: &Tasks) {
    tasks.spawn("presence", OnStop::Finish, publisher.clone().run_departures(tasks.stopping()));
    for (connection_id, Last { account, hold, .. }) in connections {
        let (account, granted) = auth.former(&account, &hold.key_name);
        let departure = Departure { connection_id, hold, account, keeps: None };
        match granted {
            Some(capability) => {
                publisher.leave(Departure { keeps: Some(capability), ..departure.clone() });
                publisher.lost(departure);
            }
            None => publisher.leave(departure),
        }
    }
}
