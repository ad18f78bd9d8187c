//! The outbox of the node, opened when the directory has a target to send to.

use std::future::ready;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{StartError, queues};
use crate::accounts::{Account, Accounts, IntegrationTarget, development};
use crate::config::Config;
use crate::model::{AllowRule, Clock, Limits};
use crate::origin::history::{BoxFuture, StoreError};
use crate::origin::outbox::{EventOutbox, TargetTransport};
use crate::origin::queues::Queues;
use crate::origin::targets::{
    AmqpBrokers, AwsClient, DeliveryOutcome, TargetClients, TargetDelivery, TargetEndpoint, Webhooks,
};
use crate::publish::Publisher;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::RATE_LIMITED;

/// Interval of the check for a first integration.
const LOOK: Duration = Duration::from_millis(500);
/// Interval of the depth measurement.
const MEASURE: Duration = Duration::from_secs(5);

/// Senders for targets of all kinds.
struct TargetSenders {
    webhooks: Webhooks,
    aws: AwsClient,
    brokers: AmqpBrokers,
    queues: Option<Queues>,
}

impl TargetTransport for TargetSenders {
    fn send<'a>(
        &'a self,
        endpoint: &'a TargetEndpoint,
        delivery: &'a TargetDelivery,
    ) -> BoxFuture<'a, DeliveryOutcome> {
        match (endpoint, &self.queues) {
            (TargetEndpoint::Integration(IntegrationTarget::Webhook(webhook)), _) => {
                Box::pin(self.webhooks.send(webhook, delivery))
            }
            (TargetEndpoint::Integration(IntegrationTarget::Amqp(amqp)), _) => {
                Box::pin(self.brokers.send(amqp, delivery))
            }
            (TargetEndpoint::Integration(IntegrationTarget::Lambda(function)), _) => {
                Box::pin(self.aws.invoke(function, delivery))
            }
            (TargetEndpoint::Integration(IntegrationTarget::Sns(topic)), _) => {
                Box::pin(self.aws.publish(topic, delivery))
            }
            (TargetEndpoint::Queue(queue), Some(queues)) => Box::pin(queues.send(queue, delivery)),
            (TargetEndpoint::Queue(_), None) => {
                let reason = "this node has no broker for queues".to_owned();
                Box::pin(ready(DeliveryOutcome::Retry { reason, after: None }))
            }
        }
    }
}

/// The transport to targets of all kinds.
pub(super) fn transport(
    webhook_allow: &[AllowRule],
    node_id: &Arc<str>,
    queues: Option<&Queues>,
) -> Result<Arc<dyn TargetTransport>, StoreError> {
    let clients = TargetClients::new(webhook_allow).map_err(|error| StoreError::Failed(error.to_string()))?;
    let clients = Arc::new(clients);
    let (webhooks, aws) = (Webhooks::new(Arc::clone(&clients)), AwsClient::new(clients));
    let brokers = queues.and_then(Queues::brokers).cloned().unwrap_or_else(|| AmqpBrokers::new(node_id));
    Ok(Arc::new(TargetSenders { webhooks, aws, brokers, queues: queues.cloned() }))
}

/// The outbox folder in the data folder.
pub(super) fn folder(config: &Config) -> PathBuf {
    config.data_dir.join("outbox")
}

/// The outbox, once it is open.
pub(super) struct NodeOutbox {
    folder: PathBuf,
    limits: Limits,
    clock: Clock,
    node_id: Arc<str>,
    accounts: Arc<Accounts>,
    queues: Option<Queues>,
    publisher: Publisher,
    webhook_allow: Vec<AllowRule>,
    opened: OnceLock<EventOutbox>,
    tasks: Arc<Tasks>,
}

impl NodeOutbox {
    /// Opens the outbox if the node has queues, the directory has an enabled integration, or the folder exists.
    pub(super) async fn open(
        config: &Config,
        clock: &Clock,
        node_id: &Arc<str>,
        (accounts, queues): (&Arc<Accounts>, Option<&Queues>),
        publisher: &Publisher,
        tasks: &Arc<Tasks>,
    ) -> Result<Arc<Self>, StartError> {
        let own = Arc::new(Self {
            folder: folder(config),
            limits: config.limits.clone(),
            clock: clock.clone(),
            node_id: Arc::clone(node_id),
            accounts: Arc::clone(accounts),
            queues: queues.cloned(),
            publisher: publisher.clone(),
            webhook_allow: config.webhook_allow.clone(),
            opened: OnceLock::new(),
            tasks: Arc::clone(tasks),
        });
        if own.folder.exists() || own.is_needed() {
            own.open_now().await.map_err(StartError::at("cannot open the outbox (--data-dir)"))?;
        }
        queues::connect(queues, publisher.routing());
        let waiting = Arc::clone(&own);
        tasks.spawn("outbox upkeep", OnStop::Cancel, async move { waiting.keep_up().await });
        Ok(own)
    }

    fn is_needed(&self) -> bool {
        let has_target = |account: &Arc<Account>| !account.integrations.is_empty();
        let has_queues = |queues: &Queues| queues.has_broker() || !queues.catalog().is_empty();
        self.queues.as_ref().is_some_and(has_queues) || self.accounts.current().accounts().any(has_target)
    }

    async fn open_now(self: &Arc<Self>) -> Result<(), StoreError> {
        let own = Arc::clone(self);
        let opened = tokio::task::spawn_blocking(move || {
            development::make_private_folder(&own.folder)
                .map_err(|error| StoreError::Failed(format!("{}: {error}", own.folder.display())))?;
            let Self { folder, limits, clock, node_id, accounts, webhook_allow, queues, .. } = &*own;
            let transport = transport(webhook_allow, node_id, queues.as_ref())?;
            let catalog = queues.as_ref().map(|queues| queues.catalog().clone());
            EventOutbox::open(folder, limits, clock, node_id, (accounts, catalog), transport)
        });
        let outbox = opened.await.unwrap_or_else(|error| Err(StoreError::Failed(error.to_string())))?;
        outbox.begin(&self.tasks);
        self.publisher.open_outbox(outbox.clone());
        let _first = self.opened.set(outbox);
        Ok(())
    }

    /// Opens the outbox when the directory needs it, and measures it; never returns.
    async fn keep_up(self: Arc<Self>) {
        while self.opened.get().is_none() {
            tokio::time::sleep(LOOK).await;
            if self.is_needed()
                && let Err(error) = self.open_now().await
            {
                tracing::error!(target: RATE_LIMITED, %error, "outbox open failed");
            }
        }
        loop {
            if let Some(outbox) = self.opened.get() {
                outbox.measure().await;
            }
            tokio::time::sleep(MEASURE).await;
        }
    }

    /// The outbox; none while there is no target.
    pub(super) fn opened(&self) -> Option<EventOutbox> {
        self.opened.get().cloned()
    }

    /// The health of the outbox: `Failed` while the disk refuses writes.
    pub(super) fn health(&self) -> Result<(), StoreError> {
        self.opened.get().map_or(Ok(()), EventOutbox::health)
    }

    /// Sends waiting events as far as the time allows, and ends. The next start sends the rest.
    pub(super) async fn stop(&self, within: Duration) {
        let Some(outbox) = self.opened.get().cloned() else { return };
        let left = outbox.drain(within).await;
        if left > 0 {
            tracing::warn!(events = left, "undelivered events left in the outbox");
        }
        let ended = tokio::task::spawn_blocking(move || outbox.shutdown());
        if !matches!(tokio::time::timeout(within, ended).await, Ok(Ok(()))) {
            tracing::error!("outbox shutdown incomplete");
        }
    }
}
