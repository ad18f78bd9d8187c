//! Test doubles and builders that several modules share: a directory, a token store and a message store.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::auth::{NonceClaim, RevocationWrite, TokenStore};
use crate::cluster::routing::{KeptNodes, LocalNode, NodeFuture, StoreBackfillQuery};
use crate::model::{
    AccountId, AttachedCount, ChannelKey, ClaimedNonce, ClientId, ForwardedParts, IdScope, Nonce, NoncePage,
    PresenceEvent, PublishedMessages, Revocation, Stamp, StampedIds,
};
use crate::origin::history::{
    BoxFuture, HistoryPage, HistoryQuery, HistoryStore, IdLookupCallback, IncarnationPolicies, StoreCallback,
    StoreError, StoredQueues,
};
use crate::origin::metering::MetricRow;

/// A token store that accepts every nonce and remembers nothing.
pub(crate) struct NoTokenStore;

impl TokenStore for NoTokenStore {
    fn claim_nonce(&self, _: Nonce) -> NonceClaim {
        Box::pin(async { Ok(true) })
    }

    fn keep_revocation(&self, _: Revocation) -> RevocationWrite {
        Box::pin(async { Ok(()) })
    }
}

/// A healthy [`HistoryStore`] that answers `Off` to everything that a test does not override.
pub(crate) trait FakeStore: Send + Sync + 'static {
    fn append(&self, _: Arc<PublishedMessages>, _: Option<u32>, done: StoreCallback) {
        done(Err(StoreError::Off));
    }

    fn append_presence(&self, _: Arc<PresenceEvent>, _: Option<u32>, done: StoreCallback) {
        done(Err(StoreError::Off));
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn is_full(&self) -> bool {
        false
    }

    fn find_ids(&self, _: IdScope, _: Vec<Box<str>>, found: IdLookupCallback) {
        found(Err(StoreError::Off));
    }

    fn claim_nonce(&self, _: Nonce) -> Result<bool, StoreError> {
        Err(StoreError::Off)
    }

    fn read(&self, _: HistoryQuery) -> Result<HistoryPage, StoreError> {
        Err(StoreError::Off)
    }

    fn recent_policies(&self) -> Result<IncarnationPolicies, StoreError> {
        Err(StoreError::Off)
    }

    fn put_metrics(&self, _: Vec<MetricRow>) -> Result<(), StoreError> {
        Err(StoreError::Off)
    }

    fn read_metrics(&self, _: AccountId, _: u64, _: usize) -> Result<Vec<MetricRow>, StoreError> {
        Err(StoreError::Off)
    }

    fn queues(&self, _: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        Err(StoreError::Off)
    }

    fn put_queues(&self, _: StoredQueues) -> Result<bool, StoreError> {
        Err(StoreError::Off)
    }
}

impl<S: FakeStore> HistoryStore for S {
    fn append(&self, published: Arc<PublishedMessages>, retention_hours: Option<u32>, done: StoreCallback) {
        FakeStore::append(self, published, retention_hours, done);
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: StoreCallback) {
        FakeStore::append_presence(self, event, retention_hours, done);
    }

    fn is_shared(&self) -> bool {
        FakeStore::is_shared(self)
    }

    fn is_full(&self) -> bool {
        FakeStore::is_full(self)
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: IdLookupCallback) {
        FakeStore::find_ids(self, scope, ids, found);
    }

    fn claim_nonce(&self, nonce: Nonce) -> BoxFuture<'static, Result<bool, StoreError>> {
        Box::pin(ready(FakeStore::claim_nonce(self, nonce)))
    }

    fn revoke_tokens(&self, _: Revocation) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(ready(Err(StoreError::Off)))
    }

    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError> {
        Err(StoreError::Off)
    }

    fn recent_policies(&self) -> BoxFuture<'static, Result<IncarnationPolicies, StoreError>> {
        Box::pin(ready(FakeStore::recent_policies(self)))
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(ready(Ok(())))
    }

    fn read(&self, query: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
        Box::pin(ready(FakeStore::read(self, query)))
    }

    fn put_metrics(&self, rows: Vec<MetricRow>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(ready(FakeStore::put_metrics(self, rows)))
    }

    fn read_metrics(
        &self,
        account: AccountId,
        from_ms: u64,
        rows_max: usize,
    ) -> BoxFuture<'static, Result<Vec<MetricRow>, StoreError>> {
        Box::pin(ready(FakeStore::read_metrics(self, account, from_ms, rows_max)))
    }

    fn queues(&self, known: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        FakeStore::queues(self, known)
    }

    fn put_queues(&self, row: StoredQueues) -> BoxFuture<'static, Result<bool, StoreError>> {
        Box::pin(ready(FakeStore::put_queues(self, row)))
    }

    fn sweep(&self, _: u64) -> Result<(), StoreError> {
        Ok(())
    }

    fn health(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn shutdown(&self) {}
}

/// A node's services for its peers, over a shared store that settles as often as permits are given.
pub(crate) struct SharedLocal {
    pub(crate) settling: Arc<Semaphore>,
    /// Number of settle calls.
    pub(crate) requests: AtomicUsize,
    /// Store backfill of a failed incarnation.
    pub(crate) stored: fn(&StoreBackfillQuery) -> Option<Vec<ForwardedParts>>,
    pub(crate) nonces: Mutex<Vec<Nonce>>,
}

impl SharedLocal {
    pub(crate) fn new(
        settles: usize,
        stored: fn(&StoreBackfillQuery) -> Option<Vec<ForwardedParts>>,
    ) -> Arc<Self> {
        let (settling, requests) = (Arc::new(Semaphore::new(settles)), AtomicUsize::new(0));
        Arc::new(Self { settling, requests, stored, nonces: Mutex::default() })
    }
}

impl LocalNode for SharedLocal {
    fn close_client(&self, _: AccountId, _: ClientId) -> NodeFuture<Option<u64>> {
        Box::pin(ready(None))
    }

    fn connections(&self) -> Option<u64> {
        Some(0)
    }

    fn attached(&self, _: Vec<ChannelKey>) -> NodeFuture<Option<Vec<AttachedCount>>> {
        Box::pin(ready(None))
    }

    fn now_ms(&self) -> u64 {
        0
    }

    fn claim_nonce(&self, nonce: Nonce) -> NodeFuture<Option<bool>> {
        let mut nonces = self.nonces.lock();
        let is_first = !nonces.contains(&nonce);
        if is_first {
            nonces.push(nonce);
        }
        Box::pin(ready(Some(is_first)))
    }

    fn nonces(&self, _: Option<Box<[u8]>>) -> NodeFuture<Option<NoncePage>> {
        let kept = |nonce: &Nonce| ClaimedNonce { nonce: nonce.clone(), age_ms: 0 };
        let nonces = self.nonces.lock().iter().map(kept).collect();
        Box::pin(ready(Some(NoncePage { nonces, next: None })))
    }

    fn keep_nonces(&self, nonces: Vec<ClaimedNonce>) -> NodeFuture<Option<()>> {
        let mut known = self.nonces.lock();
        for ClaimedNonce { nonce, .. } in nonces {
            if !known.contains(&nonce) {
                known.push(nonce);
            }
        }
        Box::pin(ready(Some(())))
    }

    fn find_ids(&self, _: IdScope, _: Vec<Box<str>>) -> NodeFuture<Option<Vec<Option<Stamp>>>> {
        Box::pin(ready(None))
    }

    fn keep_ids(&self, _: IdScope, _: StampedIds) {}

    fn revoke(&self, _: Vec<Revocation>) -> NodeFuture<Option<()>> {
        Box::pin(ready(None))
    }

    fn revocations(&self) -> Vec<Revocation> {
        Vec::new()
    }

    fn queues_changed(&self) -> NodeFuture<Option<()>> {
        Box::pin(ready(Some(())))
    }

    fn is_store_shared(&self) -> bool {
        true
    }

    fn settled(&self) -> NodeFuture<Option<()>> {
        self.requests.fetch_add(1, Ordering::SeqCst);
        let settling = Arc::clone(&self.settling);
        Box::pin(async move { settling.acquire_owned().await.ok().map(OwnedSemaphorePermit::forget) })
    }

    fn stored(&self, behind: StoreBackfillQuery) -> NodeFuture<Option<Vec<ForwardedParts>>> {
        Box::pin(ready((self.stored)(&behind)))
    }

    fn keep_nodes(&self, _: KeptNodes) -> NodeFuture<()> {
        Box::pin(ready(()))
    }
}

/// A builder of directory texts. Additions belong to the account named last.
#[derive(Default)]
pub(crate) struct DirectoryText(String);

impl DirectoryText {
    /// An account in a tenant of the same id.
    pub(crate) fn account(self, id: &str) -> Self {
        self.account_in(id, "")
    }

    /// An account in a tenant of the same id; `tenant` is a line of the tenant, such as `connection_limit = 1`.
    pub(crate) fn account_in(mut self, id: &str, tenant: &str) -> Self {
        write!(self.0, "[[tenants]]\nid = \"{id}\"\n{tenant}\n[[tenants.accounts]]\nid = \"{id}\"\n")
            .expect("a String takes all");
        self
    }

    /// A rule for channels; `rule` is a line such as `history = false`.
    pub(crate) fn channels(mut self, pattern: &str, rule: &str) -> Self {
        write!(self.0, "[[tenants.accounts.channels]]\npattern = \"{pattern}\"\n{rule}\n")
            .expect("a String takes all");
        self
    }

    /// A key with the secret `secret-of-<name>`; `capability` is an inline table.
    pub(crate) fn key(self, name: &str, capability: &str) -> Self {
        self.key_with(name, &format!("secret-of-{name}"), "active", capability)
    }

    pub(crate) fn revoked_key(self, name: &str) -> Self {
        self.key_with(name, &format!("secret-of-{name}"), "revoked", r#"{ "*" = ["publish"] }"#)
    }

    pub(crate) fn key_with(mut self, name: &str, secret: &str, status: &str, capability: &str) -> Self {
        write!(
            self.0,
            "[[tenants.accounts.keys]]\nname = \"{name}\"\nsecret = \"{secret}\"\nstatus = \"{status}\"\n\
             capability = {capability}\n"
        )
        .expect("a String takes all");
        self
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}
