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

/// What a keyspace may hold in memory that is not sealed.
pub const UNSEALED_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// The same for all keyspaces together: of many, none may ever be full.
const UNSEALED_TOTAL_BYTES_MAX: u64 = 64 * 1024 * 1024;
/// Memtables that may wait for their flush, of all keyspaces.
const SEALED_MAX: usize = 3;
/// How long a writer waits for a flush. It slows down and never stands still, whatever became of the disk.
const FLUSH_WAIT: Duration = Duration::from_secs(2);
/// A table that a merge writes.
const MERGED_BYTES: u64 = 16 * 1024 * 1024;
/// Tables as flushed that are merged together; fjall's own 4 cost a sixth of the publish rate.
const FRESH_TABLES: u8 = 8;
/// A value from here on lies in a file of its own kind.
const LARGE_VALUE_BYTES: u32 = 1024;

/// Part of what the listener leaves to the node of the files that it may open.
const CACHED_FILES: usize = 128;
/// Beyond it fjall flushes what holds the oldest journal. A journal also holds the tables in it that were dropped, in memory.
const JOURNALS_BYTES: u64 = 128 * 1024 * 1024;

/// To be opened: a database that says itself when its journal goes to the disk.
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
    /// fjall's own limit is left where it is never reached.
    pub fn open(database: &Database, name: &str, unsealed_max: u64) -> fjall::Result<Self> {
        let options = || {
            let merging =
                Leveled::default().with_l0_threshold(FRESH_TABLES).with_table_target_size(MERGED_BYTES);
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

    /// Has what is in memory flushed by another thread.
    pub(in crate::origin) fn seal(&self) -> fjall::Result<()> {
        self.keyspace.rotate_memtable().map(|_| ())
    }

    /// What it holds in memory that is not sealed, also from the journal when it was opened.
    pub(in crate::origin) fn unsealed(&self) -> u64 {
        self.keyspace.tree.active_memtable().size()
    }
}

/// Between two commits: seals what is full, and the largest while all together are too large. Waits while too much of it
/// is not flushed yet. Says whether anything was sealed.
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
