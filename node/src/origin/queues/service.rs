//! The calls that list and change queues, and the upkeep of them.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use fanfare_proto::queue::{CreatedQueue, Queue, QueueEdit, QueueRequest, QueueState, Rule, RuleRequest};
use reqwest::Client;
use tokio::sync::Mutex;
use tokio::time::timeout;
use url::Url;

use super::broker::{Broker, Counts};
use super::consumers::{BrokerRequest, Denial, Denials, SeenKeys, check};
use super::definitions::{Definitions, new_id};
use super::management::Management;
use super::{BrokerError, BrokerQueue, Catalog, Found, QueueError, upkeep};
use crate::accounts::{Account, Accounts};
use crate::model::{AccountId, AmqpUrl, Capability};
use crate::origin::history::{BoxFuture, HistoryStore, StoreError, StoredQueues};
use crate::origin::targets::{Brokers, Delivery, Outcome};
use crate::telemetry::OFTEN;

/// A change that another node has made and could not tell is known by then.
const REFRESH: Duration = Duration::from_secs(5);
/// Connections whose key was revoked or narrowed are found by then.
const CONNECTIONS: Duration = Duration::from_secs(15);
/// Events for queues wait for so long on a node without a broker.
const NO_BROKER: Duration = Duration::from_secs(10);
/// Attempts to store a change while other nodes store theirs.
const ATTEMPTS: usize = 8;

/// Tells all other nodes that the queues in the store have changed; resolves when they have read them.
pub type PeersTold = Box<dyn Fn() -> BoxFuture<'static, ()> + Send + Sync>;

/// The queues of all accounts. Cheap to clone.
#[derive(Clone)]
pub struct Queues {
    pub(super) inner: Arc<Inner>,
}

pub(super) struct Inner {
    pub(super) catalog: Catalog,
    pub(super) accounts: Arc<Accounts>,
    /// None: what is owed to queues waits in the outbox.
    pub(super) broker: Option<Broker>,
    store: Arc<dyn HistoryStore>,
    store_wait: Duration,
    /// One change at a time on this node.
    changes: Mutex<()>,
    peers: OnceLock<PeersTold>,
    denials: Denials,
    /// Names on the broker of queues that were made anew there, how often, until the store is known to have them still.
    pub(super) unsettled: parking_lot::Mutex<HashMap<Box<str>, u64>>,
    /// Queues that looked like strays in the last round of the upkeep.
    pub(super) strays: parking_lot::Mutex<HashSet<Box<str>>>,
    /// Queues that all earlier rounds of the upkeep have looked at.
    pub(super) looked_at: AtomicUsize,
}

/// The addresses of the broker of the queues.
#[derive(Debug, Clone)]
pub struct BrokerAddresses {
    pub amqp: AmqpUrl,
    /// `http(s)://user:password@host:port`, of a user that is an administrator there.
    pub management: Url,
}

impl Queues {
    /// Reads the queues in the store; the broker is not asked for anything yet. Without one the queues are known, and nothing else.
    ///
    /// # Errors
    /// The store cannot be read.
    pub async fn open(
        broker: Option<(&BrokerAddresses, &Brokers, Client)>,
        store: &Arc<dyn HistoryStore>,
        accounts: &Arc<Accounts>,
        store_wait: Duration,
    ) -> Result<Self, StoreError> {
        let broker = broker.map(|(addresses, brokers, client)| {
            let management = Management::new(client, &addresses.management, addresses.amqp.vhost());
            Broker { brokers: brokers.clone(), url: addresses.amqp.clone(), management }
        });
        let inner = Inner {
            catalog: Catalog::default(),
            accounts: Arc::clone(accounts),
            broker,
            store: Arc::clone(store),
            store_wait,
            changes: Mutex::default(),
            peers: OnceLock::new(),
            denials: Denials::new(),
            unsettled: parking_lot::Mutex::default(),
            strays: parking_lot::Mutex::default(),
            looked_at: AtomicUsize::new(0),
        };
        inner.refresh().await?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// The connections to its broker and others.
    pub fn brokers(&self) -> Option<&Brokers> {
        self.inner.broker.as_ref().map(|broker| &broker.brokers)
    }

    /// The node has a broker for them.
    pub fn has_broker(&self) -> bool {
        self.inner.broker.is_some()
    }

    /// To be called once, where there may be other nodes.
    pub fn tell_peers_by(&self, peers: PeersTold) {
        self.inner.peers.set(peers).ok();
    }

    pub fn catalog(&self) -> &Catalog {
        &self.inner.catalog
    }

    /// Reads the store again.
    pub async fn refresh(&self) -> Result<(), StoreError> {
        self.inner.refresh().await
    }

    /// Looks for changes in the store again and again; returns at once where no other node has it.
    pub async fn follow_store(self) {
        while self.inner.store.is_shared() {
            tokio::time::sleep(REFRESH).await;
            if let Err(error) = self.refresh().await {
                tracing::warn!(target: OFTEN, %error, "the queues in the store were not read");
            }
        }
    }

    /// Never returns: closes connections of keys to the broker that may not be there any more.
    pub async fn watch_connections(self) {
        let mut seen = SeenKeys::default();
        loop {
            // Also before there is a queue, so that a broker that cannot be used is told at the start.
            if let Err(error) = self.inner.close_forbidden(&mut seen).await {
                tracing::warn!(target: OFTEN, %error, "connections to the broker were not looked at");
            }
            tokio::time::sleep(CONNECTIONS).await;
        }
    }

    /// The queues that the capability covers; with `all` those too that are not fed.
    pub fn list(&self, account: &AccountId, capability: &Capability, all: bool) -> Vec<Queue> {
        let of_account = self.inner.catalog.of(account);
        let covered = of_account.definitions.queues.iter().filter(|found| found.is_covered_by(capability));
        covered.map(|found| found.queue.clone()).filter(|queue| all || queue.enabled).collect()
    }

    /// Makes the queue, also on the broker, or edits the one of that name.
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
        // It may be there already: what a call that fails from here on leaves is nobody's to delete.
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
        let Counts { ready, consumers, unacknowledged, dead_letters } =
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
        // First, so that a broker that cannot be reached leaves all as it was.
        broker.delete(&on_broker).await?;
        self.inner.change(account, remove).await?;
        // An event that was on its way may have made it anew, as may another call since, which is to stay.
        if self.inner.catalog.by_physical(&on_broker.physical).is_none()
            && let Err(error) = broker.delete(&on_broker).await
        {
            tracing::warn!(%error, "a deleted queue may be left on the broker");
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
    pub async fn send(&self, queue: &BrokerQueue, delivery: &Delivery) -> Outcome {
        self.inner.send(queue, delivery).await
    }

    /// The answer to a question of the broker; a refusal is logged with its reason.
    pub fn allows(&self, request: BrokerRequest<'_>) -> bool {
        let Inner { accounts, catalog, broker, denials, .. } = &*self.inner;
        let vhost = broker.as_ref().map(|broker| broker.url.vhost()).ok_or(Denial::NoBroker);
        let checked = vhost.and_then(|vhost| check(accounts, catalog, vhost, request));
        checked.inspect_err(|denial| denials.note(*denial, request, accounts)).is_ok()
    }
}

impl Inner {
    pub(super) fn broker(&self) -> Result<&Broker, QueueError> {
        self.broker.as_ref().ok_or_else(|| BrokerError("there is none".to_owned()).into())
    }

    /// Reads the rows that have changed. One that cannot be read is told, and changes nothing.
    pub(super) async fn refresh(&self) -> Result<(), StoreError> {
        let (store, known) = (Arc::clone(&self.store), self.catalog.revisions());
        let read = tokio::task::spawn_blocking(move || store.queues(&known));
        let rows: BoxFuture<'static, _> =
            Box::pin(async { read.await.unwrap_or_else(|error| Err(StoreError::failed(error))) });
        self.catalog.take(self.in_time(rows).await?);
        Ok(())
    }

    /// Makes one attempt. A queue that the broker does not have is made anew, unless it was deleted meanwhile.
    async fn send(&self, queue: &BrokerQueue, delivery: &Delivery) -> Outcome {
        let Some(broker) = &self.broker else {
            let reason = "account has queues and this node has no broker (--amqp-url)".to_owned();
            return Outcome::Unavailable { reason, after: NO_BROKER };
        };
        if let Some(outcome) = broker.send(queue, delivery).await {
            return outcome;
        }
        match self.make_anew(queue).await {
            Ok(true) => {
                upkeep::tell_repaired("queue", queue);
                Outcome::retry("the queue was missing on the broker")
            }
            Ok(false) => Outcome::retry("the queue was deleted"),
            Err(error) => Outcome::retry(error.to_string()),
        }
    }

    /// Gives the queue on the broker the bound that it has by now.
    async fn apply_bound(&self, queue: &Queue) -> Result<(), QueueError> {
        let account = AccountId::new(&queue.account_id);
        match self.catalog.find(&account, &queue.id) {
            Found::Queue(queue) => Ok(self.broker()?.set_max_length(&queue).await?),
            Found::Deleted | Found::Unknown => Err(QueueError::UnknownQueue),
        }
    }

    /// The result of the change, without making it.
    fn plan<T>(
        &self,
        account: &AccountId,
        change: impl FnOnce(&mut Definitions) -> Result<T, QueueError>,
    ) -> Result<T, QueueError> {
        change(&mut self.catalog.of(account).definitions.clone())
    }

    /// Makes the change, in the store and on every node, upon what the store has.
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
                if !self.is_stored(account, known.revision + 1, definitions).await? {
                    continue;
                }
            }
            // Also what was stored by a call that failed afterwards.
            if let Some(peers) = self.peers.get() {
                peers().await;
            }
            return Ok(changed);
        }
        Err(QueueError::Busy)
    }

    /// Stores the definitions if they follow what the store has; false: it has others, which are known now.
    async fn is_stored(
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
        // An answer that was lost may be that of this change.
        let read = self.refresh().await;
        if self.catalog.of(account).definitions.change == definitions.change {
            return Ok(true);
        }
        stored?;
        read?;
        Ok(false)
    }

    async fn in_time<T>(&self, asked: BoxFuture<'static, Result<T, StoreError>>) -> Result<T, StoreError> {
        let answer = timeout(self.store_wait, asked).await;
        answer.unwrap_or_else(|_| Err(StoreError::Failed("no answer in time".to_owned())))
    }
}
