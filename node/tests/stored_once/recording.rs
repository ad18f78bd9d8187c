//! A store that records what each node hands to it, in front of one store that all nodes share.

use std::collections::HashMap;
use std::sync::Arc;

use fanfare::model::{
    AccountId, ClaimedNonce, IdScope, Nonce, NoncePage, PresenceEvent, PublishedMessages, Revocation, Stamp,
    StampedIds,
};
use fanfare::origin::history::{
    BoxFuture, EmbeddedStore, HistoryCoverage, HistoryPage, HistoryQuery, HistoryStore, IdLookupCallback,
    IncarnationPolicies, PreviousIncarnation, StoreCallback, StoreError,
};
use fanfare::origin::metering::MetricRow;
use parking_lot::Mutex;

/// A message or a change of presence that a node was to store.
#[derive(Debug, Clone)]
pub(crate) struct StoredItem {
    pub(crate) node: usize,
    pub(crate) channel: String,
    /// Data of a message; of a presence change, the action and the client id.
    pub(crate) text: String,
    pub(crate) stamp: Stamp,
    /// Incarnation of the member's connection; of a message, its origin.
    pub(crate) owner: u64,
    /// Whether the channel keeps history.
    pub(crate) is_kept: bool,
}

/// All that the nodes were to store, each kind in the order of the calls.
#[derive(Debug, Default)]
pub(crate) struct Log {
    pub(crate) messages: Vec<StoredItem>,
    pub(crate) changes: Vec<StoredItem>,
    /// Calls that append messages; one call stores all messages of a publish.
    pub(crate) appends: u64,
    /// Ids of messages that another node published.
    pub(crate) ids: Vec<StampedIds>,
    /// Index of the node, by incarnation.
    pub(crate) incarnations: HashMap<u64, usize>,
    /// Latest number for the channels that keep history, by incarnation. Equal numbers are equal policies.
    pub(crate) policies: HashMap<u64, u64>,
    pub(crate) reads: u64,
}

/// Store of one node. The end of the node does not close the store behind it, which the others use.
pub(crate) struct RecordingStore {
    pub(crate) node: usize,
    pub(crate) log: Arc<Mutex<Log>>,
    pub(crate) store: Arc<EmbeddedStore>,
}

impl HistoryStore for RecordingStore {
    fn is_shared(&self) -> bool {
        true
    }

    fn append(&self, published: Arc<PublishedMessages>, retention_hours: Option<u32>, done: StoreCallback) {
        let mut log = self.log.lock();
        log.appends += 1;
        let owner = published.incarnation;
        log.messages.extend(published.messages.iter().map(|message| StoredItem {
            node: self.node,
            channel: published.key.channel().to_owned(),
            text: message.data.as_ref().map_or("", |data| data.get()).to_owned(),
            stamp: Stamp { incarnation: owner, sequence: message.sequence },
            owner,
            is_kept: retention_hours.is_some(),
        }));
        drop(log);
        self.store.append(published, retention_hours, done);
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: StoreCallback) {
        let PresenceEvent { action, incarnation, sequence, .. } = *event;
        let data = event.data.as_ref().map_or("null", |data| data.get());
        self.log.lock().changes.push(StoredItem {
            node: self.node,
            channel: event.key.channel().to_owned(),
            text: format!("{action} {} {data}", event.member.client_id.as_str()),
            stamp: Stamp { incarnation, sequence },
            owner: event.owner.incarnation,
            is_kept: retention_hours.is_some(),
        });
        self.store.append_presence(event, retention_hours, done);
    }

    fn is_full(&self) -> bool {
        self.store.is_full()
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: IdLookupCallback) {
        self.store.find_ids(scope, ids, found);
    }

    fn keep_ids(&self, scope: IdScope, ids: StampedIds, done: StoreCallback) {
        self.log.lock().ids.push(ids.clone());
        self.store.keep_ids(scope, ids, done);
    }

    fn claim_nonce(&self, nonce: Nonce) -> BoxFuture<'static, Result<bool, StoreError>> {
        self.store.claim_nonce(nonce)
    }

    fn nonces(&self, after: Option<Box<[u8]>>) -> BoxFuture<'static, Result<NoncePage, StoreError>> {
        self.store.nonces(after)
    }

    fn keep_nonces(&self, nonces: Vec<ClaimedNonce>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.store.keep_nonces(nonces)
    }

    fn revoke_tokens(&self, revocation: Revocation) -> BoxFuture<'static, Result<(), StoreError>> {
        self.store.revoke_tokens(revocation)
    }

    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError> {
        self.store.revoked_tokens()
    }

    /// Records the incarnation alone: the embedded store behind it serves a single node.
    fn begin_incarnation(
        &self,
        incarnation: u64,
        kept: HistoryCoverage,
    ) -> BoxFuture<'static, Result<Vec<PreviousIncarnation>, StoreError>> {
        let mut log = self.log.lock();
        log.incarnations.insert(incarnation, self.node);
        log.policies.insert(incarnation, kept.policies);
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn recent_policies(&self) -> BoxFuture<'static, Result<IncarnationPolicies, StoreError>> {
        let kept = self
            .log
            .lock()
            .policies
            .iter()
            .map(|(incarnation, policies)| (*incarnation, *policies))
            .collect();
        Box::pin(std::future::ready(Ok(kept)))
    }

    fn announced_policies(&self) -> Option<u64> {
        let log = self.log.lock();
        let (incarnation, _) = log.incarnations.iter().find(|(_, node)| **node == self.node)?;
        log.policies.get(incarnation).copied()
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        self.store.flush()
    }

    fn read(&self, query: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
        self.log.lock().reads += 1;
        self.store.read(query)
    }

    fn put_metrics(&self, rows: Vec<MetricRow>) -> BoxFuture<'static, Result<(), StoreError>> {
        self.store.put_metrics(rows)
    }

    fn read_metrics(
        &self,
        account: AccountId,
        from_ms: u64,
        rows_max: usize,
    ) -> BoxFuture<'static, Result<Vec<MetricRow>, StoreError>> {
        self.store.read_metrics(account, from_ms, rows_max)
    }

    fn sweep(&self, now_ms: u64) -> Result<(), StoreError> {
        self.store.sweep(now_ms)
    }

    fn health(&self) -> Result<(), StoreError> {
        self.store.health()
    }

    fn shutdown(&self) {}
}
