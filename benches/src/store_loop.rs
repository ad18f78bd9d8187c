//! The bare store loop: the throughput of the disk and of fjall alone.
//!
//! It writes groups of rows as large as the pipelined publishes under way, with one batch and one fsync per group, one
//! commit after another in one thread. A second thread makes the rows meanwhile, since else the background work of the
//! database would have a core for itself between two commits, in time that is not counted. Database and table have the
//! settings and the encryption of the node's.

use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, SyncSender};
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use fanfare::model::Clock;
use fanfare::origin::history::HistoryPosition;
use fanfare::origin::history::tables::{self, Table, UNSEALED_BYTES_MAX};
use fanfare_proto::http::{Record, write_record};
use fjall::{Database, Keyspace, OwnedWriteBatch, PersistMode};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::Result;
use crate::histogram::Histogram;
use crate::load::Meter;
use crate::wire::stamp::Stamp;

const WARM_UP: Duration = Duration::from_secs(2);
/// Number of batches that may wait to be committed.
const BATCHES_READY: usize = 4;
/// Number of channels of the rows: that of the publishers of a run.
const CHANNELS: u64 = 16;
const DATA_BYTES: usize = 128;
/// Account of a development directory.
const ACCOUNT: &str = "dev";
const INCARNATION: u64 = 0x0123_4567_89ab_cdef;

#[derive(Args)]
pub struct Options {
    /// Empty folder on the disk to measure.
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
    /// Rows per second, without the time in which the loop waited for rows.
    pub rows_per_s: f64,
    pub waited_s: f64,
    pub commit_p50_ms: f64,
    pub commit_p99_ms: f64,
    /// Cores that the threads used, with the thread that makes the rows.
    pub cores: f64,
    pub cpu_us_each: f64,
}

/// Runs the loop and prints its result as one JSON line.
pub fn print(options: &Options) -> Result<()> {
    println!("{}", serde_json::to_string(&run(options)?)?);
    Ok(())
}

fn run(options: &Options) -> Result<Outcome> {
    let database = tables::database(&options.folder).open()?;
    let table = Table::open(&database, "rows", UNSEALED_BYTES_MAX)?;
    let (made, batches) = mpsc::sync_channel(BATCHES_READY);
    thread::scope(|scope| {
        let rows = table.keyspace().clone();
        let maker = scope.spawn(move || make(&database, &rows, options.group, &made));
        let outcome = commit(batches, &[table], options);
        match maker.join() {
            Ok(made) => made.and(outcome),
            Err(_) => Err("who makes the rows panicked".into()),
        }
    })
}

/// Makes batches until the receiver is dropped.
fn make(
    database: &Database,
    rows: &Keyspace,
    group: usize,
    made: &SyncSender<OwnedWriteBatch>,
) -> Result<()> {
    let clock = Clock::system();
    for first in (0..).step_by(group) {
        let batch = OwnedWriteBatch::with_capacity(database.clone(), group);
        let mut batch = batch.durability(Some(PersistMode::SyncData));
        for row in first..first + group as u64 {
            batch.insert(rows, key(row, clock.now_ms()), value(row, clock.now_ms())?);
        }
        if made.send(batch).is_err() {
            break;
        }
    }
    Ok(())
}

fn commit(batches: Receiver<OwnedWriteBatch>, tables: &[Table], options: &Options) -> Result<Outcome> {
    let commits_for = |time: Duration| -> Result<(Histogram, Duration)> {
        let (mut commits, mut waited) = (Histogram::default(), Duration::ZERO);
        let began = Instant::now();
        while began.elapsed() < time {
            let waiting = Instant::now();
            let batch = batches.recv()?;
            let committing = Instant::now();
            waited += committing - waiting;
            batch.commit()?;
            commits.record(committing.elapsed().as_nanos() as u64);
            tables::seal_full(tables)?;
        }
        Ok((commits, waited))
    };
    commits_for(WARM_UP)?;
    let meter = Meter::start(&[])?;
    let (commits, waited) = commits_for(Duration::from_secs(options.seconds))?;
    let (cost, rows) = (meter.stop()?, (commits.total() * options.group as u64) as f64);
    Ok(Outcome {
        rows_per_s: rows / (cost.wall_s - waited.as_secs_f64()),
        waited_s: waited.as_secs_f64(),
        commit_p50_ms: commits.quantile_ms(0.5),
        commit_p99_ms: commits.quantile_ms(0.99),
        cores: cost.generator_cpu_s / cost.wall_s,
        cpu_us_each: 1e6 * cost.generator_cpu_s / rows,
    })
}

/// Makes the key of a row: account and channel with their lengths, then the inverted position, so that the newest row
/// is first.
fn key(row: u64, timestamp_ms: u64) -> Vec<u8> {
    let mut key = Vec::with_capacity(64);
    for part in [ACCOUNT, &channel(row)] {
        key.push(part.len() as u8);
        key.extend_from_slice(part.as_bytes());
    }
    let position = HistoryPosition { timestamp_ms, sequence: row / CHANNELS, incarnation: INCARNATION };
    key.extend(position.to_bytes().map(|byte| !byte));
    key
}

/// Makes the record of a message, as the node stores those of the comparison.
fn value(row: u64, timestamp_ms: u64) -> Result<Vec<u8>> {
    let data = Stamp { sent_ns: timestamp_ms * 1_000_000, sequence: row as u32 }.data(DATA_BYTES);
    let data = RawValue::from_string(data)?;
    let mut value = Vec::with_capacity(320);
    let record = Record {
        channel: &channel(row),
        name: None,
        data: Some(&data),
        id: &format!("ASNFZ4mrze8:{}", row / CHANNELS),
        client_id: None,
        connection_id: "c_BwcHBwcHBwcHBwcHBwcHBw",
        extras: None,
        timestamp: timestamp_ms,
    };
    write_record(&mut value, &record);
    Ok(value)
}

fn channel(row: u64) -> String {
    format!("bench:publish:{}", row % CHANNELS)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use fanfare::hub::Hub;
    use fanfare::model::Limits;
    use fanfare::origin::history::{EmbeddedOptions, EmbeddedStore, HistoryStore};
    use fanfare::publish::Publisher;

    use super::*;
    use crate::link::Publishing;

    /// Gives the key and value that the node stores for one publish.
    fn stored() -> (Vec<u8>, Vec<u8>) {
        let folder = tempfile::tempdir().expect("a folder");
        let (limits, clock) = (Limits::default(), Clock::system());
        let store = EmbeddedStore::open(folder.path(), &EmbeddedOptions::new(true, &limits), clock.clone())
            .expect("a store");
        let store = Arc::new(store) as Arc<dyn HistoryStore>;
        let hub = Arc::new(Hub::new(Vec::new(), clock.clone(), &limits));
        let data = Stamp { sent_ns: 1, sequence: 2 }.data(DATA_BYTES);
        let publisher = Publisher::new(&hub, &store, &limits, None);
        let publishing =
            Publishing::new(publisher, clock, ACCOUNT, &[channel(0)], data).expect("a principal");
        let (done, is_done) = mpsc::channel();
        publishing.publish(0, 1, Box::new(move |result| done.send(result.is_ok()).expect("somebody waits")));
        assert_eq!(is_done.recv(), Ok(true));
        store.shutdown();
        drop((publishing, store));
        let database = tables::database(folder.path()).open().expect("the same store");
        let names = database.list_keyspace_names();
        let name = names.iter().find(|name| name.starts_with("messages.")).expect("a table of messages");
        let table = Table::open(&database, name, UNSEALED_BYTES_MAX).expect("its table");
        let (key, value) =
            table.keyspace().first_key_value().expect("a row").into_inner().expect("its bytes");
        (key.to_vec(), value.to_vec())
    }

    #[test]
    fn a_row_is_as_large_as_what_the_node_stores() {
        let (key, value) = stored();
        assert_eq!(super::key(0, 1_800_000_000_000).len(), key.len());
        let ours = super::value(0, 1_800_000_000_000).expect("a record");
        let (ours, stored) = (String::from_utf8_lossy(&ours), String::from_utf8_lossy(&value));
        assert_eq!(ours.len(), stored.len(), "\n{ours}\n{stored}");
    }
}
