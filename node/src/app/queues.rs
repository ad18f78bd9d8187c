//! The queues of the node, where it has a broker for them.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use reqwest::redirect::Policy;

use super::StartError;
use crate::accounts::Accounts;
use crate::cluster::routing::Routing;
use crate::config::Config;
use crate::origin::history::HistoryStore;
use crate::origin::queues::{BrokerAddresses, Queues};
use crate::origin::targets::{Brokers, client_tls};
use crate::tasks::{OnStop, Tasks};

const CONNECT: Duration = Duration::from_secs(5);

/// Knows the queues in the store before a client is served.
pub(super) async fn open(
    config: &Config,
    node_id: &Arc<str>,
    store: &Arc<dyn HistoryStore>,
    accounts: &Arc<Accounts>,
    tasks: &Tasks,
) -> Result<Option<Queues>, StartError> {
    let (Some(amqp), Some(management)) = (config.amqp_url.clone(), &config.amqp_management_url) else {
        return Ok(None);
    };
    let at = "cannot use the broker of the queues (--amqp-management-url)";
    let tls = client_tls().map_err(StartError::at(at))?;
    let client = Client::builder()
        .use_preconfigured_tls(tls)
        .no_proxy()
        .redirect(Policy::none())
        .connect_timeout(CONNECT)
        .build()
        .map_err(StartError::at(at))?;
    let addresses = BrokerAddresses { amqp, management: management.expose().clone() };
    let store_wait = Duration::from_millis(config.limits.store_wait_ms);
    let queues =
        Queues::open(&addresses, (&Brokers::new(node_id), client), store, accounts, store_wait).await;
    let queues = queues.map_err(StartError::at("cannot read the queues in the store"))?;
    tasks.spawn("queues", OnStop::Cancel, queues.clone().follow_store());
    tasks.spawn("broker connections", OnStop::Cancel, queues.clone().watch_connections());
    Ok(Some(queues))
}

/// Each node tells the others of a change.
pub(super) fn connect(queues: Option<&Queues>, routing: Option<&Arc<Routing>>) {
    if let (Some(queues), Some(routing)) = (queues, routing) {
        let routing = Arc::clone(routing);
        queues.tell_peers_by(Box::new(move || {
            let routing = Arc::clone(&routing);
            Box::pin(async move { routing.tell_queues_changed().await })
        }));
    }
}
