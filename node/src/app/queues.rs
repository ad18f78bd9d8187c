//! The queues of the node, where it has a broker for them.

use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use reqwest::redirect::Policy;

use super::StartError;
use crate::accounts::Accounts;
use crate::cluster::routing::Routing;
use crate::config::{Config, StoreKind};
use crate::origin::history::{HistoryStore, StoreError};
use crate::origin::queues::{BrokerAddresses, Queues};
use crate::origin::targets::{Brokers, client_tls};
use crate::tasks::{OnStop, Tasks};

const CONNECT: Duration = Duration::from_secs(5);

/// Knows the queues in the store before a client is served; none where the store keeps none. Without a broker what is owed to them waits.
pub(super) async fn open(
    config: &Config,
    node_id: &Arc<str>,
    store: &Arc<dyn HistoryStore>,
    accounts: &Arc<Accounts>,
    tasks: &Tasks,
) -> Result<Option<Queues>, StartError> {
    if config.store == StoreKind::None {
        return Ok(None);
    }
    let addresses = config.amqp_url.clone().zip(config.amqp_management_url.as_ref());
    let addresses =
        addresses.map(|(amqp, management)| BrokerAddresses { amqp, management: management.expose().clone() });
    let client = addresses.as_ref().map(|_| client()).transpose()?;
    let brokers = Brokers::new(node_id);
    let broker = addresses.as_ref().zip(client).map(|(addresses, client)| (addresses, &brokers, client));
    let store_wait = Duration::from_millis(config.limits.store_wait_ms);
    let queues = Queues::open(broker, store, accounts, store_wait).await;
    let queues = match queues {
        Err(StoreError::Off) => return Ok(None),
        queues => queues.map_err(StartError::at("cannot read the queues in the store"))?,
    };
    tasks.spawn("queues", OnStop::Cancel, queues.clone().follow_store());
    if queues.has_broker() {
        tasks.spawn("broker connections", OnStop::Cancel, queues.clone().watch_connections());
        tasks.spawn("queues on the broker", OnStop::Cancel, queues.clone().keep_up());
    } else if !queues.catalog().is_empty() {
        tracing::warn!(
            "account has queues and this node has no broker (--amqp-url): what they are owed waits"
        );
    }
    Ok(Some(queues))
}

fn client() -> Result<Client, StartError> {
    let at = "cannot use the broker of the queues (--amqp-management-url)";
    let client = Client::builder()
        .use_preconfigured_tls(client_tls().map_err(StartError::at(at))?)
        .no_proxy()
        .redirect(Policy::none())
        .connect_timeout(CONNECT)
        .build();
    client.map_err(StartError::at(at))
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
