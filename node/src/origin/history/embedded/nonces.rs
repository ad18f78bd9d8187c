//! Nonces of token requests, remembered for a time.

use std::collections::HashSet;
use std::ops::Bound;
use std::sync::Arc;

use fjall::OwnedWriteBatch;

use crate::model::{ClaimedNonce, NoncePage};
use crate::origin::history::StoreError;

use super::keys;
use super::partitions::{Partition, PartitionKind, Partitions};

/// Nonces on one page.
const PAGE_ROWS: usize = 2_000;

pub(super) struct Nonces {
    pub(super) partitions: Arc<Partitions>,
    pub(super) memory_ms: u64,
    /// Nonces in each interval of `memory_ms`; beyond it a claim is answered `Busy`.
    pub(super) rows_max: usize,
    /// Partition that is written to, and its number of rows.
    pub(super) rows: Option<(Partition, usize)>,
}

/// A nonce that was claimed on another node.
pub(super) struct ImportedNonceRow {
    pub(super) key: Vec<u8>,
    pub(super) age_ms: u64,
}

/// Times of a claim, in epoch milliseconds. A token request is checked against the system clock, so its claim is remembered by that clock.
/// A claim expires by the earlier time, so a clock that is wrong for a moment forgets none.
#[derive(Debug, Clone, Copy)]
pub(super) struct ClaimTimes {
    pub(super) claims_ms: u64,
    pub(super) expiry_ms: u64,
}

impl Nonces {
    /// Adds imported nonces first, so that a claim of the same nonce is refused. Returns the outcome of each claim.
    pub(super) fn add(
        &mut self,
        batch: &mut OwnedWriteBatch,
        kept: Vec<ImportedNonceRow>,
        claims: Vec<Vec<u8>>,
        now: ClaimTimes,
    ) -> fjall::Result<Vec<Result<bool, StoreError>>> {
        let ClaimTimes { claims_ms: now_ms, expiry_ms } = now;
        let mut in_group = HashSet::new();
        for ImportedNonceRow { key, age_ms } in kept {
            if age_ms < self.memory_ms && !in_group.contains(&key) && !self.is_claimed(&key, expiry_ms)? {
                self.insert(batch, &key, now_ms.saturating_sub(age_ms))?;
                in_group.insert(key);
            }
        }
        let mut outcomes = Vec::with_capacity(claims.len());
        for key in claims {
            let is_used = in_group.contains(&key) || self.is_claimed(&key, expiry_ms)?;
            outcomes.push(match is_used {
                true => Ok(false),
                false if self.is_full(now_ms)? => Err(StoreError::Busy),
                false => {
                    self.insert(batch, &key, now_ms)?;
                    in_group.insert(key);
                    Ok(true)
                }
            });
        }
        Ok(outcomes)
    }

    fn is_claimed(&self, key: &[u8], expiry_ms: u64) -> fjall::Result<bool> {
        let oldest_ms = expiry_ms.saturating_sub(self.memory_ms);
        for (_, keyspace) in
            self.partitions.overlapping(PartitionKind::Nonces, oldest_ms, u64::MAX).iter().rev()
        {
            if keyspace.get(key)?.is_some_and(|value| claimed_ms(&value) >= oldest_ms) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn partition(&self, now_ms: u64) -> Partition {
        Partition::containing(PartitionKind::Nonces, now_ms, self.memory_ms, self.memory_ms)
    }

    fn is_full(&mut self, now_ms: u64) -> fjall::Result<bool> {
        let partition = self.partition(now_ms);
        let rows = match self.rows {
            Some((counted, rows)) if counted == partition => rows,
            _ => self.partitions.get_or_create(partition)?.keyspace().len()?,
        };
        self.rows = Some((partition, rows));
        Ok(rows >= self.rows_max)
    }

    fn insert(&mut self, batch: &mut OwnedWriteBatch, key: &[u8], claimed_ms: u64) -> fjall::Result<()> {
        let partition = self.partition(claimed_ms);
        batch.insert(self.partitions.get_or_create(partition)?.keyspace(), key, claimed_ms.to_be_bytes());
        if let Some((counted, rows)) = &mut self.rows
            && *counted == partition
        {
            *rows += 1;
        }
        Ok(())
    }
}

/// Reads the nonces after `after` that are still remembered.
pub(super) fn page(
    partitions: &Partitions,
    after: Option<&[u8]>,
    memory_ms: u64,
    now_ms: u64,
) -> fjall::Result<NoncePage> {
    let oldest_ms = now_ms.saturating_sub(memory_ms);
    let (from, first) = after
        .and_then(|after| after.split_first_chunk())
        .map_or((None, None), |(order_key, key)| (Some(*order_key), Some(key)));
    let mut page = NoncePage::default();
    for (partition, keyspace) in partitions.overlapping(PartitionKind::Nonces, oldest_ms, u64::MAX) {
        let order_key = partition.order_key();
        if from.is_some_and(|from| order_key < from) {
            continue;
        }
        let begin = first.filter(|_| from == Some(order_key)).map_or(Bound::Unbounded, Bound::Excluded);
        for row in keyspace.range::<&[u8], _>((begin, Bound::Unbounded)) {
            let (key, value) = row.into_inner()?;
            let claimed_ms = claimed_ms(&value);
            let Some(nonce) = keys::read_nonce_key(&key).filter(|_| claimed_ms >= oldest_ms) else {
                continue;
            };
            page.nonces.push(ClaimedNonce { nonce, age_ms: now_ms.saturating_sub(claimed_ms) });
            if page.nonces.len() >= PAGE_ROWS {
                page.next = Some([order_key.as_slice(), &key].concat().into());
                return Ok(page);
            }
        }
    }
    Ok(page)
}

fn claimed_ms(value: &[u8]) -> u64 {
    value.first_chunk().copied().map_or(0, u64::from_be_bytes)
}
