//! Revocations of tokens: one row for each key and clientId, and one for all tokens of the key.

use std::collections::BTreeMap;
use std::sync::Arc;

use fjall::OwnedWriteBatch;

use crate::model::{ClientId, KeyName, Revocation};

use super::partitions::{Partition, PartitionKind, Partitions};
use super::tables::Table;
use super::{DAY_MS, keys};

/// Rows of revocations. The value is `issued_before_ms`, which also selects the partition, so a row is dropped once every token that it
/// revokes has expired.
pub(super) struct RevocationRows {
    pub(super) partitions: Arc<Partitions>,
    pub(super) retention_ms: u64,
}

impl RevocationRows {
    /// Adds revocations to the batch. The latest of each key and clientId is kept. A revocation of a whole key replaces those of its
    /// clientIds.
    pub(super) fn add(&self, batch: &mut OwnedWriteBatch, revocations: Vec<Revocation>) -> fjall::Result<()> {
        // Rows of this batch cannot be read yet, so the group is merged before it is compared with the stored rows.
        let mut group: BTreeMap<(KeyName, Option<ClientId>), u64> = BTreeMap::new();
        for Revocation { key_name, client_id, issued_before_ms } in revocations {
            let latest = group.entry((key_name, client_id)).or_default();
            *latest = issued_before_ms.max(*latest);
        }
        for ((key_name, client_id), issued_before_ms) in &group {
            let of_group = group.get(&(key_name.clone(), None)).copied().unwrap_or_default();
            let stored = self.latest(&keys::revocation_key(key_name, None))?;
            let of_key = stored.max(if client_id.is_some() { of_group } else { 0 });
            if of_key >= *issued_before_ms {
                continue;
            }
            let row = keys::revocation_key(key_name, client_id.as_ref());
            if client_id.is_some() && self.latest(&row)? >= *issued_before_ms {
                continue;
            }
            let own = Partition::containing(
                PartitionKind::Revocations,
                *issued_before_ms,
                DAY_MS,
                self.retention_ms,
            );
            for (partition, table) in self.partitions.of_kind(PartitionKind::Revocations) {
                if client_id.is_none() {
                    remove_covered(&table, batch, &row, *issued_before_ms, partition == own)?;
                } else if partition != own && table.keyspace().contains_key(&row)? {
                    batch.remove(table.keyspace(), row.as_slice());
                }
            }
            batch.insert(self.partitions.get_or_create(own)?.keyspace(), row, issued_before_ms.to_be_bytes());
        }
        Ok(())
    }

    /// Reads all rows, in no order.
    pub(super) fn all(partitions: &Partitions) -> fjall::Result<Vec<Revocation>> {
        let mut all = Vec::new();
        for (_, table) in partitions.of_kind(PartitionKind::Revocations) {
            for row in table.keyspace().iter() {
                let (key, value) = row.into_inner()?;
                all.extend(read(&key, &value));
            }
        }
        Ok(all)
    }

    /// Latest stored time of the row; 0 if there is none.
    fn latest(&self, row: &[u8]) -> fjall::Result<u64> {
        let mut latest = 0;
        for (_, table) in self.partitions.of_kind(PartitionKind::Revocations) {
            latest = latest.max(table.keyspace().get(row)?.map_or(0, |value| number(&value)));
        }
        Ok(latest)
    }
}

/// Removes the rows of a key that its new row makes redundant. `is_written`: the new row goes into the same table, so its key must not
/// also be removed, since a batch has no order.
fn remove_covered(
    table: &Table,
    batch: &mut OwnedWriteBatch,
    row: &[u8],
    issued_before_ms: u64,
    is_written: bool,
) -> fjall::Result<()> {
    for found in table.keyspace().prefix(row) {
        let (key, value) = found.into_inner()?;
        if number(&value) <= issued_before_ms && !(is_written && *key == *row) {
            batch.remove(table.keyspace(), key);
        }
    }
    Ok(())
}

fn number(value: &[u8]) -> u64 {
    value.first_chunk().copied().map_or(0, u64::from_be_bytes)
}

/// Returns `None` if the row is damaged.
fn read(key: &[u8], value: &[u8]) -> Option<Revocation> {
    let (key_name, client_id) = keys::read_revocation_key(key)?;
    let client_id = if client_id.is_empty() { None } else { Some(ClientId::stored(client_id)) };
    Some(Revocation { key_name: key_name.into(), client_id, issued_before_ms: number(value) })
}
