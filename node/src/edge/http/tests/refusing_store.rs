//! A store that cannot be read, and cannot remember.

use crate::origin::history::{HistoryPage, HistoryQuery, Nonce, StoreError};
use crate::testing::FakeStore;

pub(super) struct RefusingStore {
    /// `None`: a read panics.
    read: Option<StoreError>,
}

impl RefusingStore {
    pub(super) fn reading(read: Option<StoreError>) -> Self {
        Self { read }
    }
}

impl FakeStore for RefusingStore {
    fn claim_nonce(&self, _: Nonce) -> Result<bool, StoreError> {
        Err(StoreError::Failed("no disk".into()))
    }

    fn read(&self, _: HistoryQuery) -> Result<HistoryPage, StoreError> {
        Err(self.read.clone().expect("this read panics"))
    }
}
