//! Inserts of history rows, as fast as the database takes a given number of writes at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use fanfare::model::Clock;
use scylla::client::session::Session;
use scylla::statement::batch::{Batch, BatchStatement, BatchType};
use scylla::statement::prepared::PreparedStatement;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use super::Database;
use crate::Result;
use crate::histogram::Histogram;
use crate::load::{Cost, Meter};

const WARM_UP: Duration = Duration::from_secs(2);
const TTL_S: i32 = 72 * 3_600;
const DAY_MS: u64 = 24 * 3_600 * 1_000;
/// Number of rows after which a writer goes on with another partition, as a node does.
const PARTITION_ROWS: u64 = 50_000;
/// Size of the record of a publish of 128 bytes.
const RECORD_BYTES: usize = 256;

const INSERT: &str = "INSERT INTO {}.history (account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation, \
     node_id, id, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TTL ? AND TIMESTAMP ?";

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    pub database: Database,
    /// Writes at a time, each to a channel of its own.
    #[arg(long)]
    pub writers: usize,
    /// Rows of one write; more than one are an unlogged batch of one partition.
    #[arg(long)]
    pub rows: usize,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Beginning of the channel names.
    #[arg(long, default_value = "loop")]
    pub prefix: String,
    /// Process of the database, for its CPU time; repeated if the database has several.
    #[arg(long = "database-pid")]
    pub database_pids: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub rows_per_s: f64,
    pub write_p50_ms: f64,
    pub write_p99_ms: f64,
    /// Cost of the database as the server, and of this process as the generator.
    pub cost: Cost,
}

pub fn print(runtime: &Runtime, options: &Options) -> Result<()> {
    println!("{}", serde_json::to_string(&runtime.block_on(run(options))?)?);
    Ok(())
}

async fn run(options: &Options) -> Result<Outcome> {
    let session = Arc::new(options.database.session().await?);
    let insert = options.database.prepare(&session, INSERT).await?;
    let begins = Instant::now() + WARM_UP;
    let ends = begins + Duration::from_secs(options.seconds);
    let clock = Clock::system();
    let mut writers = JoinSet::new();
    for number in 0..options.writers {
        let writer = Writer {
            session: Arc::clone(&session),
            insert: insert.clone(),
            clock: clock.clone(),
            channel: format!("{}:{number}", options.prefix).into(),
            rows: options.rows,
            written: 0,
        };
        // The task set holds the writers, and is awaited.
        writers.spawn(writer.write(begins, ends));
    }
    tokio::time::sleep_until(begins.into()).await;
    let meter = Meter::start(&options.database_pids)?;
    tokio::time::sleep_until(ends.into()).await;
    let cost = meter.stop()?;
    let mut times = Histogram::default();
    while let Some(written) = writers.join_next().await {
        written??.into_iter().for_each(|ns| times.record(ns));
    }
    let rows_per_s = (times.total() * options.rows as u64) as f64 / options.seconds as f64;
    let (write_p50_ms, write_p99_ms) = (times.quantile_ms(0.5), times.quantile_ms(0.99));
    Ok(Outcome { rows_per_s, write_p50_ms, write_p99_ms, cost })
}

struct Writer {
    session: Arc<Session>,
    insert: PreparedStatement,
    clock: Clock,
    channel: Arc<str>,
    rows: usize,
    written: u64,
}

type Row<'a> = (&'a str, &'a str, i8, i32, i32, i64, i64, i64, &'a str, String, String, i32, i64);

impl Writer {
    /// Makes one write after another. Gives the duration of each write that ended in the measured part.
    async fn write(mut self, begins: Instant, ends: Instant) -> Result<Vec<u64>> {
        let each = vec![BatchStatement::from(self.insert.clone()); self.rows];
        let mut batch = Batch::new_with_statements(BatchType::Unlogged, each);
        batch.set_is_idempotent(true);
        let mut times = Vec::new();
        loop {
            let began = Instant::now();
            let rows: Vec<Row<'_>> = (0..self.rows as u64).map(|nth| self.row(self.written + nth)).collect();
            match &rows[..] {
                [only] => drop(self.session.execute_unpaged(&self.insert, only).await?),
                _ => drop(self.session.batch(&batch, &rows).await?),
            }
            drop(rows);
            self.written += self.rows as u64;
            let now = Instant::now();
            if now >= ends {
                return Ok(times);
            }
            if now >= begins {
                times.push(u64::try_from((now - began).as_nanos())?);
            }
        }
    }

    fn row(&self, nth: u64) -> Row<'_> {
        let now_ms = self.clock.now_ms();
        let (day, bucket) = ((now_ms / DAY_MS) as i32, (nth / PARTITION_ROWS) as i32);
        let (now_ms, sequence) = (now_ms as i64, nth as i64);
        let id = format!("AAAAAAAAAAA:{nth}");
        let record = record(&id, now_ms);
        (
            "loop",
            &self.channel,
            0,
            day,
            bucket,
            now_ms,
            sequence,
            7,
            "loop",
            id,
            record,
            TTL_S,
            now_ms * 1_000,
        )
    }
}

/// Record with the length of a real one, and with other numbers in each row.
fn record(id: &str, now_ms: i64) -> String {
    let mut record = format!(r#"{{"channel":"bench:publish:0","id":"{id}","timestamp":{now_ms},"data":""#);
    let padding = RECORD_BYTES.saturating_sub(record.len() + 2);
    record.extend(std::iter::repeat_n('x', padding));
    record + "\"}"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_of_one_length() {
        assert_eq!(record("AAAAAAAAAAA:1", 1_800_000_000_000).len(), RECORD_BYTES);
        assert_eq!(record("AAAAAAAAAAA:1234567", 1_800_000_000_000).len(), RECORD_BYTES);
    }
}
