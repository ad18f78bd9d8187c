//! Keyspaces: how their rows lie in memory and on the disk, so that a flood of publishes is stored in bounded memory.
//!
//! fjall asks its workers to seal a memtable that is full, once per commit. Each of these requests needs the journal,
//! which a busy writer holds almost always: hundreds wait behind each other, and the flush behind them, while the memtable
//! grows to gigabytes. So the writer seals, and waits where the flushes lag.
//!
//! A merge of tables keeps the last key of each block, and with it the whole block as it was before compression, until its
//! output is finished. So large values lie in files of their own, which merges do not read, and outputs are small.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use fjall::compaction::Leveled;
use fjall::{
    AbstractTree as _, Database, DatabaseBuilder, Keyspace, KeyspaceCreateOptions, KvSeparationOptions,
};

/// Unsealed bytes in memory that one keyspace may hold.
pub const UNSEALED_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Unsealed bytes in memory of all keyspaces together: with many keyspaces, none may ever be full.
const UNSEALED_TOTAL_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Sealed memtables that may wait for their flush, over all keyspaces.
const SEALED_MAX: usize = 3;
/// Longest wait of a writer for a flush. The writer slows down but never stalls, whatever the disk does.
const FLUSH_WAIT: Duration = Duration::from_secs(2);
/// Size of a table that a compaction writes.
const COMPACTED_BYTES: u64 = 16 * 1024 * 1024;
/// Number of freshly flushed tables that are compacted together; fjall's default of 4 cost a sixth of the publish rate.
const FRESH_TABLES: u8 = 8;
/// Size from which a value is stored in a separate file.
const LARGE_VALUE_BYTES: u32 = 1024;

/// Files that fjall keeps open, a part of those that the listener reserves for the node.
const CACHED_FILES: usize = 128;
/// Journal size beyond which fjall flushes the keyspaces that hold the oldest journal. Dropped tables in a journal also stay in memory.
const JOURNALS_BYTES: u64 = 128 * 1024 * 1024;

/// Builds a database that syncs its journal only on request.
pub fn database(folder: &Path) -> DatabaseBuilder<Database> {
    Database::builder(folder)
        .manual_journal_persist(true)
        .max_cached_files(Some(CACHED_FILES))
        .max_journaling_size(JOURNALS_BYTES)
}

#[derive(Clone)]
pub struct Table {
    keyspace: Keyspace,
    unsealed_max: u64,
}

impl Table {
    /// Opens a table. fjall's own memtable limit is set so high that it is never reached.
    pub fn open(database: &Database, name: &str, unsealed_max: u64) -> fjall::Result<Self> {
        let options = || {
            let merging =
                Leveled::default().with_l0_threshold(FRESH_TABLES).with_table_target_size(COMPACTED_BYTES);
            let large = KvSeparationOptions::default().separation_threshold(LARGE_VALUE_BYTES);
            KeyspaceCreateOptions::default()
                .max_memtable_size(u64::MAX)
                .with_kv_separation(Some(large))
                .compaction_strategy(Arc::new(merging))
        };
        let keyspace = database.keyspace(name, options)?;
        Ok(Self { keyspace, unsealed_max })
    }

    pub fn keyspace(&self) -> &Keyspace {
        &self.keyspace
    }

    /// Seals the memtable, which another thread then flushes.
    pub(in crate::origin) fn seal(&self) -> fjall::Result<()> {
        self.keyspace.rotate_memtable().map(|_| ())
    }

    /// Unsealed bytes in memory, including those recovered from the journal at open.
    pub(in crate::origin) fn unsealed(&self) -> u64 {
        self.keyspace.tree.active_memtable().size()
    }
}

/// Seals full tables between two commits, and the largest ones while the sum exceeds its limit. Waits while too many sealed memtables are
/// not flushed yet. Returns whether a table was sealed.
pub fn seal_full(tables: &[Table]) -> fjall::Result<bool> {
    let mut unsealed: Vec<(u64, &Table)> = tables.iter().map(|table| (table.unsealed(), table)).collect();
    unsealed.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
    let mut total: u64 = unsealed.iter().map(|(bytes, _)| bytes).sum();
    let until = Instant::now() + FLUSH_WAIT;
    let mut sealed = false;
    for (bytes, table) in unsealed {
        if total <= UNSEALED_TOTAL_BYTES_MAX && bytes < table.unsealed_max {
            continue;
        }
        while tables.iter().map(|table| table.keyspace.sealed_memtable_count()).sum::<usize>() >= SEALED_MAX {
            if Instant::now() > until {
                return Ok(sealed);
            }
            thread::sleep(Duration::from_millis(1));
        }
        table.seal()?;
        sealed = true;
        total -= bytes;
    }
    Ok(sealed)
}
