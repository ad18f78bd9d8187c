//! Nonces of token requests, remembered for a time.

use std::sync::Arc;

use fjall::OwnedWriteBatch;

use super::partitions::{Kind, Partition, Partitions};

pub(super) struct Nonces {
    pub(super) partitions: Arc<Partitions>,
    pub(super) memory_ms: u64,
}

impl Nonces {
    pub(super) fn is_claimed(&self, key: &[u8], now_ms: u64) -> fjall::Result<bool> {
        let oldest_ms = now_ms.saturating_sub(self.memory_ms);
        for (_, keyspace) in self.partitions.overlapping(Kind::Nonces, oldest_ms, u64::MAX).iter().rev() {
            let claimed_ms = keyspace.get(key)?.and_then(|value| value.first_chunk().copied());
            if claimed_ms.is_some_and(|bytes| u64::from_be_bytes(bytes) >= oldest_ms) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn claim(&self, batch: &mut OwnedWriteBatch, key: &[u8], now_ms: u64) -> fjall::Result<()> {
        let partition = Partition::containing(Kind::Nonces, now_ms, self.memory_ms, self.memory_ms);
        batch.insert(self.partitions.get_or_create(partition)?.keyspace(), key, now_ms.to_be_bytes());
        Ok(())
    }
}
