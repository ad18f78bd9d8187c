//! A store that cannot be read.

use std::sync::Arc;

use crate::model::{PresenceEvent, Published, Revocation};
use crate::origin::history::{
    BoxFuture, Done, FoundIds, HistoryPage, HistoryQuery, HistoryStore, IdScope, Nonce, StoreError,
};

pub(super) struct RefusingStore {
    /// `None`: a read panics.
    read: Option<StoreError>,
}

impl RefusingStore {
    pub(super) fn reading(read: Option<StoreError>) -> Self {
        Self { read }
    }
}

impl HistoryStore for RefusingStore {
    fn append(&self, _: Arc<Published>, _: Option<u32>, done: Done) {
        done(Err(StoreError::Busy));
    }

    fn append_presence(&self, _: Arc<PresenceEvent>, _: u32, done: Done) {
        done(Err(StoreError::Busy));
    }

    fn find_ids(&self, _: IdScope, _: Vec<Box<str>>, found: FoundIds) {
        found(Err(StoreError::Busy));
    }

    fn claim_nonce(&self, _: Nonce) -> BoxFuture<'static, Result<bool, StoreError>> {
        Box::pin(async { Err(StoreError::Failed("no disk".into())) })
    }

    fn revoke_tokens(&self, _: Revocation) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async { Err(StoreError::Failed("no disk".into())) })
    }

    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError> {
        Err(StoreError::Failed("no disk".into()))
    }

    fn settled(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(async { Ok(()) })
    }

    fn read(&self, _: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
        let error = self.read.clone().expect("this read panics");
        Box::pin(async { Err(error) })
    }

    fn sweep(&self, _: u64) -> Result<(), StoreError> {
        Ok(())
    }

    fn health(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn shutdown(&self) {}
}
