//! The bare store loop: what the disk and fjall give when there is nothing before them.
//!
//! One thread, groups of rows as large as the pipelined publishes under way, one batch and one fsync per group.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use fjall::{Database, KeyspaceCreateOptions, PersistMode};
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::histogram::Histogram;

/// What a row of history is for a publish of 128 bytes: account, channel, time and sequence; and the record as JSON.
const KEY_BYTES: usize = 48;
const VALUE_BYTES: usize = 288;
const WARM_UP: Duration = Duration::from_secs(2);

#[derive(Args)]
pub struct Options {
    /// An empty folder on the disk to measure.
    #[arg(long)]
    pub folder: PathBuf,
    /// Rows per batch and fsync.
    #[arg(long, default_value_t = 1024)]
    pub group: usize,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub rows_per_s: f64,
    pub commit_p50_ms: f64,
    pub commit_p99_ms: f64,
}

/// Runs the loop and prints its result as one JSON line.
pub fn print(options: &Options) -> Result<()> {
    println!("{}", serde_json::to_string(&run(options)?)?);
    Ok(())
}

fn run(options: &Options) -> Result<Outcome> {
    let database = Database::builder(&options.folder).open()?;
    let keyspace = database.keyspace("rows", KeyspaceCreateOptions::default)?;
    let mut row = 0;
    let mut commits_for = |time: Duration| -> Result<(Histogram, f64)> {
        let mut commits = Histogram::default();
        let began = Instant::now();
        while began.elapsed() < time {
            let group_began = Instant::now();
            let mut batch = database.batch().durability(Some(PersistMode::SyncData));
            for _ in 0..options.group {
                batch.insert(&keyspace, key(row), value(row));
                row += 1;
            }
            batch.commit()?;
            commits.record(group_began.elapsed().as_nanos() as u64);
        }
        Ok((commits, began.elapsed().as_secs_f64()))
    };
    commits_for(WARM_UP)?;
    let (commits, wall_s) = commits_for(Duration::from_secs(options.seconds))?;
    Ok(Outcome {
        rows_per_s: (commits.total() * options.group as u64) as f64 / wall_s,
        commit_p50_ms: commits.quantile_ms(0.5),
        commit_p99_ms: commits.quantile_ms(0.99),
    })
}

/// Newest first, spread over as many channels as there are publishers.
fn key(row: u64) -> [u8; KEY_BYTES] {
    let mut key = [b'c'; KEY_BYTES];
    key[0] = (row % 16) as u8;
    key[KEY_BYTES - 16..].copy_from_slice(&(!u128::from(row)).to_be_bytes());
    key
}

/// Text that differs from row to row in its numbers, like the records of one publisher.
fn value(row: u64) -> Vec<u8> {
    let mut value =
        format!(r#"{{"channel":"bench:publish:0","id":"{row:020}","timestamp":{row:013},"data":""#)
            .into_bytes();
    value.resize(VALUE_BYTES, b'x');
    value
}
