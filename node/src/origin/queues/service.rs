//! Calls that list and change queues, and their upkeep.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fanfare_proto::queue::{CreatedQueue, Queue, QueueEdit, QueueRequest, QueueState, Rule, RuleRequest};
use reqwest::Client;
use tokio::sync::Mutex;
use tokio::time::timeout;
use url::Url;

use super::broker::{QueueBroker, QueueCounts};
use super::consumers::{BrokerDenial, BrokerDenials, BrokerRequest, SeenKeys, check};
use super::definitions::{Definitions, new_id};
use super::management::ManagementApi;
use super::{BrokerError, BrokerQueue, QueueCatalog, QueueError, QueueLookup, upkeep};
use crate::accounts::{Account, Accounts};
use crate::model::{AccountId, AmqpUrl, Capability};
use crate::origin::history::{BoxFuture, HistoryStore, StoreError, StoredQueues};
use crate::origin::targets::{AmqpBrokers, DeliveryOutcome, TargetDelivery};
use crate::telemetry::RATE_LIMITED;

/// Interval at which the store is read for changes of which other nodes could not notify this one.
const REFRESH: Duration = Duration::from_secs(5);
/// Interval at which connections with revoked or narrowed keys are searched.
const CONNECTIONS: Duration = Duration::from_secs(15);
/// Time that events for queues wait on a node without a broker.
const NO_BROKER: Duration = Duration::from_secs(10);
/// Attempts to store a change while other nodes store theirs.
const ATTEMPTS: usize = 8;

/// Notifies all other nodes that the queues in the store have changed; resolves once they have read them.
pub type PeerNotifier = Box<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// The queues of all accounts. Cheap to clone.
#[derive(Clone)]
pub struct Queues {
    pub(super) inner: Arc<QueuesInner>,
}

pub(super) struct QueuesInner {
    pub(super) catalog: QueueCatalog,
    pub(super) accounts: Arc<Accounts>,
    /// Broker of the queues; `None` if events for queues wait in the outbox.
    pub(super) broker: Option<QueueBroker>,
    store: Arc<dyn HistoryStore>,
    store_wait: Duration,
    /// Lock: one change at a time on this node.
    changes: Mutex<()>,
    peers: OnceLock<PeerNotifier>,
    denials: BrokerDenials,
    /// Queues recreated on the broker, by their name there, with how often. A queue stays listed until the store is known to still have
    /// it.
    pub(super) unsettled: parking_lot::Mutex<HashMap<Box<str>, u64>>,
    /// Queues that looked like strays in the last round of upkeep.
    pub(super) strays: parking_lot::Mutex<HashSet<Box<str>>>,
    /// Total of queues that all earlier rounds of upkeep have checked.
    pub(super) looked_at: AtomicUsize,
}

/// The addresses of the broker of the queues.
#[derive(Debug, Clone)]
pub struct BrokerAddresses {
    pub amqp: AmqpUrl,
    /// `http(s)://user:password@host:port`; the user must be an administrator of the broker.
    pub management: Url,
}

impl Queues {
    /// Reads the queues in the store, without a request to the broker. With no broker the queues are only listed.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn open(
        broker: Option<(&BrokerAddresses, &AmqpBrokers, Client)>,
        store: &Arc<dyn HistoryStore>,
        accounts: &Arc<Accounts>,
        store_wait: Duration,
    ) -> Result<Self, StoreError> {
        let broker = broker.map(|(addresses, brokers, client)| {
            let management = ManagementApi::new(client, &addresses.management, addresses.amqp.vhost());
            QueueBroker { brokers: brokers.clone(), url: addresses.amqp.clone(), management }
        });
        let inner = QueuesInner {
            catalog: QueueCatalog::default(),
            accounts: Arc::clone(accounts),
            broker,
            store: Arc::clone(store),
            store_wait,
            changes: Mutex::default(),
            peers: OnceLock::new(),
            denials: BrokerDenials::new(),
            unsettled: parking_lot::Mutex::default(),
            strays: parking_lot::Mutex::default(),
            looked_at: AtomicUsize::new(0),
        };
        inner.refresh().await?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Connections to the broker of the queues, and to other brokers.
    pub fn brokers(&self) -> Option<&AmqpBrokers> {
        self.inner.broker.as_ref().map(|broker| &broker.brokers)
    }

    /// Returns whether the node has a broker for queues.
    pub fn has_broker(&self) -> bool {
        self.inner.broker.is_some()
    }

    /// Sets the notifier of other nodes; to be called once, if there may be any.
    pub fn set_peer_notifier(&self, peers: PeerNotifier) {
        self.inner.peers.set(peers).ok();
    }

    pub fn catalog(&self) -> &QueueCatalog {
        &self.inner.catalog
    }

    /// Reads the store for changes.
    pub async fn refresh(&self) -> Result<(), StoreError> {
        self.inner.refresh().await
    }

    /// Reads the store for changes periodically; returns at once if no other node shares it.
    pub async fn follow_store(self) {
        while self.inner.store.is_shared() {
            tokio::time::sleep(REFRESH).await;
            if let Err(error) = self.refresh().await {
                tracing::warn!(target: RATE_LIMITED, %error, "queue definitions not read from the store");
            }
        }
    }

    /// Closes connections of keys that have lost their permission to the broker, periodically; never returns.
    pub async fn watch_connections(self) {
        let mut seen = SeenKeys::default();
        loop {
            // Runs also before any queue exists, so that an unusable broker is logged at the start.
            if let Err(error) = self.inner.close_forbidden(&mut seen).await {
                tracing::warn!(target: RATE_LIMITED, %error, "broker connection check failed");
            }
            tokio::time::sleep(CONNECTIONS).await;
        }
    }

    /// Lists the queues that the capability covers; with `all` also the disabled ones.
    pub fn list(&self, account: &AccountId, capability: &Capability, all: bool) -> Vec<Queue> {
        let of_account = self.inner.catalog.of(account);
        let covered = of_account.definitions.queues.iter().filter(|found| found.is_covered_by(capability));
        covered.map(|found| found.queue.clone()).filter(|queue| all || queue.enabled).collect()
    }

    /// Creates the queue, also on the broker, or edits the one of that name.
    pub async fn put(
        &self,
        account: &Account,
        capability: &Capability,
        request: QueueRequest,
    ) -> Result<CreatedQueue, QueueError> {
        let put = |definitions: &mut Definitions| {
            definitions.put(&account.id, &request, account.queue_limit, capability)
        };
        let planned = self.inner.plan(&account.id, put)?;
        // The queue may exist already, so a call that fails from here on deletes nothing.
        self.inner.broker()?.declare(&BrokerQueue::of(&planned)).await?;
        let queue = self.inner.change(&account.id, put).await?;
        self.inner.apply_bound(&queue).await?;
        Ok(CreatedQueue { physical: BrokerQueue::of(&queue).physical.into(), queue })
    }

    pub async fn get(
        &self,
        account: &AccountId,
        capability: &Capability,
        id: &str,
    ) -> Result<QueueState, QueueError> {
        let queue = self.inner.catalog.of(account).definitions.covered(id, capability)?.queue.clone();
        let QueueCounts { ready, consumers, unacknowledged, dead_letters } =
            self.inner.broker()?.count(&BrokerQueue::of(&queue)).await?;
        Ok(QueueState { queue, ready, consumers, unacknowledged, dead_letters })
    }

    pub async fn edit(
        &self,
        account: &AccountId,
        capability: &Capability,
        id: &str,
        edit: QueueEdit,
    ) -> Result<Queue, QueueError> {
        let change = |definitions: &mut Definitions| definitions.edit(id, edit, capability);
        let queue = self.inner.change(account, change).await?;
        if edit.max_length.is_some() {
            self.inner.apply_bound(&queue).await?;
        }
        Ok(queue)
    }

    /// Deletes the queue and its dead letters, also on the broker; returns its name.
    pub async fn delete(
        &self,
        account: &AccountId,
        capability: &Capability,
        id: &str,
    ) -> Result<String, QueueError> {
        let remove = |definitions: &mut Definitions| definitions.remove(id, capability);
        let queue = self.inner.plan(account, remove)?;
        let on_broker = BrokerQueue::of(&queue);
        let broker = self.inner.broker()?;
        // First, so that an unreachable broker leaves everything unchanged.
        broker.delete(&on_broker).await?;
        self.inner.change(account, remove).await?;
        // An event on its way may have recreated the queue, which is deleted again. Another call may also have created it since; then it
        // stays.
        if self.inner.catalog.by_physical(&on_broker.physical).is_none()
            && let Err(error) = broker.delete(&on_broker).await
        {
            tracing::warn!(%error, "deleted queue may remain on the broker");
        }
        Ok(queue.name)
    }

    pub fn rules(
        &self,
        account: &AccountId,
        capability: &Capability,
        id: &str,
    ) -> Result<Vec<Rule>, QueueError> {
        Ok(self.inner.catalog.of(account).definitions.covered(id, capability)?.rules.clone())
    }

    pub async fn add_rule(
        &self,
        account: &AccountId,
        capability: &Capability,
        id: &str,
        request: RuleRequest,
    ) -> Result<Rule, QueueError> {
        self.inner.change(account, |definitions| definitions.add_rule(id, &request, capability)).await
    }

    pub async fn remove_rule(
        &self,
        account: &AccountId,
        capability: &Capability,
        id: &str,
        rule_id: &str,
    ) -> Result<(), QueueError> {
        self.inner.change(account, |definitions| definitions.remove_rule(id, rule_id, capability)).await
    }

    /// Makes one attempt to send a batch to a queue.
    pub async fn send(&self, queue: &BrokerQueue, delivery: &TargetDelivery) -> DeliveryOutcome {
        self.inner.send(queue, delivery).await
    }

    /// Answers a request of the broker; a refusal is logged with its reason.
    pub fn allows(&self, request: BrokerRequest<'_>) -> bool {
        let QueuesInner { accounts, catalog, broker, denials, .. } = &*self.inner;
        let vhost = broker.as_ref().map(|broker| broker.url.vhost()).ok_or(BrokerDenial::NoBroker);
        let checked = vhost.and_then(|vhost| check(accounts, catalog, vhost, request));
        checked.inspect_err(|denial| denials.record(*denial, request, accounts)).is_ok()
    }
}

impl QueuesInner {
    pub(super) fn broker(&self) -> Result<&QueueBroker, QueueError> {
        self.broker.as_ref().ok_or_else(|| BrokerError("there is none".to_owned()).into())
    }

    /// Reads the rows that have changed. A row that cannot be read is logged and changes nothing.
    pub(super) async fn refresh(&self) -> Result<(), StoreError> {
        let (store, known) = (Arc::clone(&self.store), self.catalog.revisions());
        let read = tokio::task::spawn_blocking(move || store.queues(&known));
        let rows: BoxFuture<'static, _> =
            Box::pin(async { read.await.unwrap_or_else(|error| Err(StoreError::failed(error))) });
        self.catalog.apply_rows(self.in_time(rows).await?);
        Ok(())
    }

    /// Makes one attempt. A queue that is missing on the broker is recreated, unless it was deleted meanwhile.
    async fn send(&self, queue: &BrokerQueue, delivery: &TargetDelivery) -> DeliveryOutcome {
        let Some(broker) = &self.broker else {
            let reason = "account has queues and this node has no broker (--amqp-url)".to_owned();
            return DeliveryOutcome::Unavailable { reason, after: NO_BROKER };
        };
        if let Some(outcome) = broker.send(queue, delivery).await {
            return outcome;
        }
        match self.recreate(queue).await {
            Ok(true) => {
                upkeep::report_repaired("queue", queue);
                DeliveryOutcome::retry("the queue was missing on the broker")
            }
            Ok(false) => DeliveryOutcome::retry("the queue was deleted"),
            Err(error) => DeliveryOutcome::retry(error.to_string()),
        }
    }

    /// Sets the queue's present bound on the broker.
    async fn apply_bound(&self, queue: &Queue) -> Result<(), QueueError> {
        let account = AccountId::new(&queue.account_id);
        match self.catalog.find(&account, &queue.id) {
            QueueLookup::Queue(queue) => Ok(self.broker()?.set_max_length(&queue).await?),
            QueueLookup::Deleted | QueueLookup::Unknown => Err(QueueError::UnknownQueue),
        }
    }

    /// Returns the result of the change without making it.
    fn plan<T>(
        &self,
        account: &AccountId,
        change: impl FnOnce(&mut Definitions) -> Result<T, QueueError>,
    ) -> Result<T, QueueError> {
        change(&mut self.catalog.of(account).definitions.clone())
    }

    /// Makes the change, in the store and on every node, based on the stored definitions.
    async fn change<T>(
        &self,
        account: &AccountId,
        mut change: impl FnMut(&mut Definitions) -> Result<T, QueueError>,
    ) -> Result<T, QueueError> {
        let _alone = self.changes.lock().await;
        for _ in 0..ATTEMPTS {
            let known = self.catalog.of(account);
            let mut definitions = known.definitions.clone();
            let changed = change(&mut definitions)?;
            if definitions.queues != known.definitions.queues {
                definitions.change = new_id();
                if !self.try_store(account, known.revision + 1, definitions).await? {
                    continue;
                }
            }
            // Also for a change that an earlier call stored before it failed.
            if let Some(peers) = self.peers.get() {
                peers().await;
            }
            return Ok(changed);
        }
        Err(QueueError::Busy)
    }

    /// Stores the definitions if the stored revision is the one before. Returns false if another change came first, which is then loaded.
    async fn try_store(
        &self,
        account: &AccountId,
        revision: u64,
        definitions: Definitions,
    ) -> Result<bool, QueueError> {
        let text = definitions.to_text()?.into();
        let row = StoredQueues { account: account.clone(), revision, definitions: text };
        let stored = self.in_time(self.store.put_queues(row)).await;
        if stored == Ok(true) {
            self.catalog.set(account, revision, definitions);
            return Ok(true);
        }
        // The lost answer may be that of this change.
        let read = self.refresh().await;
        if self.catalog.of(account).definitions.change == definitions.change {
            return Ok(true);
        }
        stored?;
        read?;
        Ok(false)
    }

    async fn in_time<T>(&self, request: BoxFuture<'static, Result<T, StoreError>>) -> Result<T, StoreError> {
        let answer = timeout(self.store_wait, request).await;
        answer.unwrap_or_else(|_| Err(StoreError::Failed("no answer in time".to_owned())))
    }
}
