//! Partitions of rows by time range, so that expired rows are dropped as a whole.

use std::collections::BTreeMap;

use fjall::{Database, Keyspace};
use parking_lot::RwLock;

use super::tables::{Table, UNSEALED_BYTES_MAX};
use crate::origin::disk::snapshot::DiskSnapshot;

/// Time that a partition outlives its last row, so that no queued write or read finds it removed.
const DROP_DELAY_MS: u64 = 10 * 60_000;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum PartitionKind {
    Messages,
    Presence,
    Ids,
    Nonces,
    Revocations,
    Metrics,
}

/// A time range of rows, and their retention; its name contains both.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Partition {
    pub(super) kind: PartitionKind,
    pub(super) start_ms: u64,
    width_ms: u64,
    pub(super) keep_ms: u64,
}

impl Partition {
    pub(super) fn containing(kind: PartitionKind, timestamp_ms: u64, width_ms: u64, keep_ms: u64) -> Self {
        let width_ms = width_ms.max(1);
        Self { kind, start_ms: timestamp_ms - timestamp_ms % width_ms, width_ms, keep_ms }
    }

    /// Sort key of the partitions of one kind.
    pub(super) fn order_key(&self) -> [u8; 24] {
        let numbers = [self.start_ms, self.width_ms, self.keep_ms].map(u64::to_be_bytes);
        std::array::from_fn(|byte| numbers.as_flattened()[byte])
    }

    fn end_ms(&self) -> u64 {
        self.start_ms.saturating_add(self.width_ms)
    }

    fn has_expired(&self, now_ms: u64) -> bool {
        self.end_ms().saturating_add(self.keep_ms).saturating_add(DROP_DELAY_MS) <= now_ms
    }

    pub(super) fn name(&self) -> String {
        let kind = match self.kind {
            PartitionKind::Messages => "messages",
            PartitionKind::Presence => "presence",
            PartitionKind::Ids => "ids",
            PartitionKind::Nonces => "nonces",
            PartitionKind::Revocations => "revocations",
            PartitionKind::Metrics => "metrics",
        };
        format!("{kind}.{}.{}.{}", self.start_ms, self.width_ms, self.keep_ms)
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        let mut parts = name.split('.');
        let kind = match parts.next()? {
            "messages" => PartitionKind::Messages,
            "presence" => PartitionKind::Presence,
            "ids" => PartitionKind::Ids,
            "nonces" => PartitionKind::Nonces,
            "revocations" => PartitionKind::Revocations,
            "metrics" => PartitionKind::Metrics,
            _ => return None,
        };
        let mut number = || parts.next()?.parse().ok();
        Some(Self { kind, start_ms: number()?, width_ms: number()?, keep_ms: number()? })
    }
}

pub(super) struct Partitions {
    database: Database,
    open: RwLock<BTreeMap<Partition, Table>>,
}

impl Partitions {
    pub(super) fn open(database: Database) -> fjall::Result<Self> {
        let mut open = BTreeMap::new();
        for name in database.list_keyspace_names() {
            if let Some(partition) = Partition::parse(&name) {
                open.insert(partition, Table::open(&database, &name, UNSEALED_BYTES_MAX)?);
            }
        }
        Ok(Self { database, open: RwLock::new(open) })
    }

    pub(super) fn get_or_create(&self, partition: Partition) -> fjall::Result<Table> {
        if let Some(table) = self.open.read().get(&partition) {
            return Ok(table.clone());
        }
        let mut open = self.open.write();
        let table = Table::open(&self.database, &partition.name(), UNSEALED_BYTES_MAX)?;
        open.insert(partition, table.clone());
        Ok(table)
    }

    /// Takes a snapshot of the named tables, which must exist, and of all partitions, at one moment.
    pub(super) fn snapshot(&self, format: &'static str, names: &[&str]) -> fjall::Result<DiskSnapshot> {
        let mut tables = Vec::new();
        for name in names {
            let table = Table::open(&self.database, name, UNSEALED_BYTES_MAX)?;
            tables.push(((*name).into(), table.keyspace().clone()));
        }
        Ok(DiskSnapshot::take(&self.database, format, || {
            let open = self.open.read();
            let partitions =
                open.iter().map(|(partition, table)| (partition.name().into(), table.keyspace().clone()));
            tables.extend(partitions);
            tables
        }))
    }

    pub(super) fn tables(&self) -> Vec<Table> {
        self.open.read().values().cloned().collect()
    }

    /// Returns the partitions that may hold rows of `from_ms..=to_ms`, oldest first.
    pub(super) fn overlapping(
        &self,
        kind: PartitionKind,
        from_ms: u64,
        to_ms: u64,
    ) -> Vec<(Partition, Keyspace)> {
        let open = self.open.read();
        let of_kind = open.iter().filter(|(partition, _)| partition.kind == kind);
        of_kind
            .filter(|(partition, _)| partition.start_ms <= to_ms && partition.end_ms() > from_ms)
            .map(|(partition, table)| (*partition, table.keyspace().clone()))
            .collect()
    }

    pub(super) fn of_kind(&self, kind: PartitionKind) -> Vec<(Partition, Table)> {
        let open = self.open.read();
        let of_kind = open.iter().filter(|(partition, _)| partition.kind == kind);
        of_kind.map(|(partition, table)| (*partition, table.clone())).collect()
    }

    pub(super) fn drop_expired(&self, now_ms: u64) -> fjall::Result<usize> {
        let expired: Vec<Partition> =
            self.open.read().keys().filter(|partition| partition.has_expired(now_ms)).copied().collect();
        for partition in &expired {
            let Some(table) = self.open.read().get(partition).cloned() else { continue };
            self.database.delete_keyspace(table.keyspace().clone())?;
            self.open.write().remove(partition);
        }
        Ok(expired.len())
    }
}
