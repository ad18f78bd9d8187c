//! What the tests of several modules need of a directory, of a store of credentials and of a store of messages.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::future::ready;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::auth::{Claim, Kept, TokenStore};
use crate::cluster::routing::{Behind, KeptNodes, Later, Local};
use crate::model::{
    AccountId, AttachedCount, ChannelKey, ClientId, ForwardedParts, IdScope, KeptNonce, Nonce, NoncePage,
    PresenceEvent, Published, Revocation, Stamp, StampedIds,
};
use crate::origin::history::{
    BoxFuture, Done, FoundIds, HistoryPage, HistoryQuery, HistoryStore, KeptBy, StoreError, StoredQueues,
};
use crate::origin::metering::MetricRow;

/// Takes every nonce for new, and remembers nothing.
pub(crate) struct NoTokens;

impl TokenStore for NoTokens {
    fn claim_nonce(&self, _: Nonce) -> Claim {
        Box::pin(async { Ok(true) })
    }

    fn keep_revocation(&self, _: Revocation) -> Kept {
        Box::pin(async { Ok(()) })
    }
}

/// A [`HistoryStore`] that is well and answers `Off` to whatever a test does not give it.
pub(crate) trait FakeStore: Send + Sync + 'static {
    fn append(&self, _: Arc<Published>, _: Option<u32>, done: Done) {
        done(Err(StoreError::Off));
    }

    fn append_presence(&self, _: Arc<PresenceEvent>, _: Option<u32>, done: Done) {
        done(Err(StoreError::Off));
    }

    fn is_shared(&self) -> bool {
        false
    }

    fn is_full(&self) -> bool {
        false
    }

    fn find_ids(&self, _: IdScope, _: Vec<Box<str>>, found: FoundIds) {
        found(Err(StoreError::Off));
    }

    fn claim_nonce(&self, _: Nonce) -> Result<bool, StoreError> {
        Err(StoreError::Off)
    }

    fn read(&self, _: HistoryQuery) -> Result<HistoryPage, StoreError> {
        Err(StoreError::Off)
    }

    fn lately_kept(&self) -> Result<KeptBy, StoreError> {
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
    fn append(&self, published: Arc<Published>, retention_hours: Option<u32>, done: Done) {
        FakeStore::append(self, published, retention_hours, done);
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: Done) {
        FakeStore::append_presence(self, event, retention_hours, done);
    }

    fn is_shared(&self) -> bool {
        FakeStore::is_shared(self)
    }

    fn is_full(&self) -> bool {
        FakeStore::is_full(self)
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: FoundIds) {
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

    fn lately_kept(&self) -> BoxFuture<'static, Result<KeptBy, StoreError>> {
        Box::pin(ready(FakeStore::lately_kept(self)))
    }

    fn settled(&self) -> BoxFuture<'static, Result<(), StoreError>> {
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

/// What a node does for others, over a store that they share and that settles as often as it is let.
pub(crate) struct SharedLocal {
    pub(crate) settling: Arc<Semaphore>,
    /// How often it was to settle.
    pub(crate) asked: AtomicUsize,
    /// What a dead run has stored.
    pub(crate) stored: fn(&Behind) -> Option<Vec<ForwardedParts>>,
    pub(crate) nonces: Mutex<Vec<Nonce>>,
}

impl SharedLocal {
    pub(crate) fn new(settles: usize, stored: fn(&Behind) -> Option<Vec<ForwardedParts>>) -> Arc<Self> {
        let (settling, asked) = (Arc::new(Semaphore::new(settles)), AtomicUsize::new(0));
        Arc::new(Self { settling, asked, stored, nonces: Mutex::default() })
    }
}

impl Local for SharedLocal {
    fn close_client(&self, _: AccountId, _: ClientId) -> Later<Option<u64>> {
        Box::pin(ready(None))
    }

    fn connections(&self) -> Option<u64> {
        Some(0)
    }

    fn attached(&self, _: Vec<ChannelKey>) -> Later<Option<Vec<AttachedCount>>> {
        Box::pin(ready(None))
    }

    fn now_ms(&self) -> u64 {
        0
    }

    fn claim_nonce(&self, nonce: Nonce) -> Later<Option<bool>> {
        let mut nonces = self.nonces.lock();
        let is_first = !nonces.contains(&nonce);
        if is_first {
            nonces.push(nonce);
        }
        Box::pin(ready(Some(is_first)))
    }

    fn nonces(&self, _: Option<Box<[u8]>>) -> Later<Option<NoncePage>> {
        let kept = |nonce: &Nonce| KeptNonce { nonce: nonce.clone(), age_ms: 0 };
        let nonces = self.nonces.lock().iter().map(kept).collect();
        Box::pin(ready(Some(NoncePage { nonces, next: None })))
    }

    fn keep_nonces(&self, nonces: Vec<KeptNonce>) -> Later<Option<()>> {
        let mut known = self.nonces.lock();
        for KeptNonce { nonce, .. } in nonces {
            if !known.contains(&nonce) {
                known.push(nonce);
            }
        }
        Box::pin(ready(Some(())))
    }

    fn find_ids(&self, _: IdScope, _: Vec<Box<str>>) -> Later<Option<Vec<Option<Stamp>>>> {
        Box::pin(ready(None))
    }

    fn keep_ids(&self, _: IdScope, _: StampedIds) {}

    fn revoke(&self, _: Vec<Revocation>) -> Later<Option<()>> {
        Box::pin(ready(None))
    }

    fn revocations(&self) -> Vec<Revocation> {
        Vec::new()
    }

    fn queues_changed(&self) -> Later<Option<()>> {
        Box::pin(ready(Some(())))
    }

    fn is_store_shared(&self) -> bool {
        true
    }

    fn settled(&self) -> Later<Option<()>> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let settling = Arc::clone(&self.settling);
        Box::pin(async move { settling.acquire_owned().await.ok().map(OwnedSemaphorePermit::forget) })
    }

    fn stored(&self, behind: Behind) -> Later<Option<Vec<ForwardedParts>>> {
        Box::pin(ready((self.stored)(&behind)))
    }

    fn keep_nodes(&self, _: KeptNodes) -> Later<()> {
        Box::pin(ready(()))
    }
}

/// The text of a directory in the making. What is added belongs to the account named last.
#[derive(Default)]
pub(crate) struct DirectoryText(String);

impl DirectoryText {
    /// An account in a tenant of the same id.
    pub(crate) fn account(self, id: &str) -> Self {
        self.account_in(id, "")
    }

    /// The same; `tenant` is a line of the tenant's, such as `connection_limit = 1`.
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
