//! The outbox of the node, opened when the directory has something to send to.

use std::future::ready;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{StartError, queues};
use crate::accounts::{Account, Accounts, Target, development};
use crate::config::Config;
use crate::model::{AllowRule, Clock, Limits};
use crate::origin::history::{BoxFuture, StoreError};
use crate::origin::outbox::{Outbox, Transport};
use crate::origin::queues::Queues;
use crate::origin::targets::{Aws, Brokers, Clients, Delivery, Endpoint, Outcome, Webhooks};
use crate::publish::Publisher;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::OFTEN;

/// How often the directory is looked at for a first integration.
const LOOK: Duration = Duration::from_millis(500);
/// How often the depths are measured.
const MEASURE: Duration = Duration::from_secs(5);

/// Sends to targets of all kinds.
struct Senders {
    webhooks: Webhooks,
    aws: Aws,
    brokers: Brokers,
    queues: Option<Queues>,
}

impl Transport for Senders {
    fn send<'a>(&'a self, endpoint: &'a Endpoint, delivery: &'a Delivery) -> BoxFuture<'a, Outcome> {
        match (endpoint, &self.queues) {
            (Endpoint::Integration(Target::Webhook(webhook)), _) => {
                Box::pin(self.webhooks.send(webhook, delivery))
            }
            (Endpoint::Integration(Target::Amqp(amqp)), _) => Box::pin(self.brokers.send(amqp, delivery)),
            (Endpoint::Integration(Target::Lambda(function)), _) => {
                Box::pin(self.aws.invoke(function, delivery))
            }
            (Endpoint::Integration(Target::Sns(topic)), _) => Box::pin(self.aws.publish(topic, delivery)),
            (Endpoint::Queue(queue), Some(queues)) => Box::pin(queues.send(queue, delivery)),
            (Endpoint::Queue(_), None) => {
                let reason = "this node has no broker for queues".to_owned();
                Box::pin(ready(Outcome::Retry { reason, after: None }))
            }
        }
    }
}

/// To targets of all kinds.
pub(super) fn transport(
    webhook_allow: &[AllowRule],
    node_id: &Arc<str>,
    queues: Option<&Queues>,
) -> Result<Arc<dyn Transport>, StoreError> {
    let clients = Clients::new(webhook_allow).map_err(|error| StoreError::Failed(error.to_string()))?;
    let clients = Arc::new(clients);
    let (webhooks, aws) = (Webhooks::new(Arc::clone(&clients)), Aws::new(clients));
    let brokers = queues.and_then(Queues::brokers).cloned().unwrap_or_else(|| Brokers::new(node_id));
    Ok(Arc::new(Senders { webhooks, aws, brokers, queues: queues.cloned() }))
}

/// In the data folder.
pub(super) fn folder(config: &Config) -> PathBuf {
    config.data_dir.join("outbox")
}

/// The outbox, from when it is open on.
pub(super) struct OwnOutbox {
    folder: PathBuf,
    limits: Limits,
    clock: Clock,
    node_id: Arc<str>,
    accounts: Arc<Accounts>,
    queues: Option<Queues>,
    publisher: Publisher,
    webhook_allow: Vec<AllowRule>,
    opened: OnceLock<Outbox>,
    tasks: Arc<Tasks>,
}

impl OwnOutbox {
    /// Opens the outbox if the node has queues, the directory has an integration that is sent to, or the folder is there.
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
            Outbox::open(folder, limits, clock, node_id, (accounts, catalog), transport)
        });
        let outbox = opened.await.unwrap_or_else(|error| Err(StoreError::Failed(error.to_string())))?;
        outbox.begin(&self.tasks);
        self.publisher.open_outbox(outbox.clone());
        let _first = self.opened.set(outbox);
        Ok(())
    }

    /// Never returns: opens the outbox when the directory needs it, and measures it.
    async fn keep_up(self: Arc<Self>) {
        while self.opened.get().is_none() {
            tokio::time::sleep(LOOK).await;
            if self.is_needed()
                && let Err(error) = self.open_now().await
            {
                tracing::error!(target: OFTEN, %error, "the outbox cannot be opened");
            }
        }
        loop {
            if let Some(outbox) = self.opened.get() {
                outbox.measure().await;
            }
            tokio::time::sleep(MEASURE).await;
        }
    }

    /// None while there is nothing to send to.
    pub(super) fn opened(&self) -> Option<Outbox> {
        self.opened.get().cloned()
    }

    /// `Failed` while the disk does not take what is written.
    pub(super) fn health(&self) -> Result<(), StoreError> {
        self.opened.get().map_or(Ok(()), Outbox::health)
    }

    /// Sends waiting events as far as the time reaches, and ends. The next start sends the rest.
    pub(super) async fn stop(&self, within: Duration) {
        let Some(outbox) = self.opened.get().cloned() else { return };
        let left = outbox.drain(within).await;
        if left > 0 {
            tracing::warn!(events = left, "events are left in the outbox, and are sent after the next start");
        }
        let ended = tokio::task::spawn_blocking(move || outbox.shutdown());
        if !matches!(tokio::time::timeout(within, ended).await, Ok(Ok(()))) {
            tracing::error!("the outbox did not shut down");
        }
    }
}
