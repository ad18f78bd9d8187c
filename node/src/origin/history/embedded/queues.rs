//! The queues of accounts: a key of the account, a value of the revision and the definitions.

use std::collections::HashMap;

use fjall::OwnedWriteBatch;

use super::tables::Table;
use crate::model::AccountId;
use crate::origin::history::{StoreError, StoredQueues};

use super::failed;

#[derive(Clone)]
pub(super) struct QueueRows(pub(super) Table);

impl QueueRows {
    /// Replaces each row if the stored one has the previous revision; returns for each whether it did.
    pub(super) fn put(
        &self,
        batch: &mut OwnedWriteBatch,
        rows: Vec<StoredQueues>,
    ) -> fjall::Result<Vec<bool>> {
        // Rows of this batch are not yet visible in the table.
        let mut put: HashMap<AccountId, u64> = HashMap::new();
        let mut outcomes = Vec::new();
        for StoredQueues { account, revision, definitions } in rows {
            let key = account.as_str().as_bytes();
            let stored =
                self.0.keyspace().get(key)?.and_then(|value| read(&value).map(|(revision, _)| revision));
            let before = put.get(&account).copied().or(stored).unwrap_or(0);
            let is_next = before + 1 == revision;
            outcomes.push(is_next);
            if is_next {
                let value = [&revision.to_be_bytes()[..], definitions.as_bytes()].concat();
                batch.insert(self.0.keyspace(), key, value);
                put.insert(account, revision);
            }
        }
        Ok(outcomes)
    }

    /// Reads the rows whose revision differs from the known one, in no order.
    pub(super) fn changed(&self, known: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        let mut changed = Vec::new();
        for row in self.0.keyspace().iter() {
            let (key, value) = row.into_inner().map_err(failed)?;
            let account = std::str::from_utf8(&key).map_err(failed)?;
            let (revision, definitions) =
                read(&value).ok_or_else(|| failed("the stored queues of an account are damaged"))?;
            let account = AccountId::new(account);
            if known.get(&account) == Some(&revision) {
                continue;
            }
            changed.push(StoredQueues { account, revision, definitions: definitions.into() });
        }
        Ok(changed)
    }
}

fn read(value: &[u8]) -> Option<(u64, &str)> {
    let (revision, text) = value.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*revision), std::str::from_utf8(text).ok()?))
}
