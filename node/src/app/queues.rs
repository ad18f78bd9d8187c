//! The queues of the node, if it has a broker for them.

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
use crate::origin::targets::{AmqpBrokers, client_tls};
use crate::tasks::{OnStop, Tasks};

const CONNECT: Duration = Duration::from_secs(5);

/// Reads the queues from the store before clients are served; none if the store keeps none. Without a broker their messages wait.
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
    let brokers = AmqpBrokers::new(node_id);
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
        tracing::warn!("queues defined, but this node has no broker (--amqp-url): their events wait");
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

/// Announces changes of queues to the peers.
pub(super) fn connect(queues: Option<&Queues>, routing: Option<&Arc<Routing>>) {
    if let (Some(queues), Some(routing)) = (queues, routing) {
        let routing = Arc::clone(routing);
        queues.set_peer_notifier(Box::new(move || {
            let routing = Arc::clone(&routing);
            Box::pin(async move { routing.announce_queues_changed().await })
        }));
    }
}
