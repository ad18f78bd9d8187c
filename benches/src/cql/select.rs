//! The newest rows of one channel, one read after another.

use std::time::{Duration, Instant};

use clap::Args;
use scylla::client::session::Session;
use scylla::statement::prepared::PreparedStatement;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use super::Database;
use crate::Result;
use crate::histogram::Histogram;
use crate::load::{Cost, Meter};

const WARM_UP: Duration = Duration::from_secs(2);
const DAYS: &str = "SELECT day, bucket FROM {}.days WHERE account = ? AND channel = ? AND kind = 0";
const SELECT: &str = "SELECT timestamp_ms, sequence, incarnation, id, record FROM {}.history WHERE account = ? \
     AND channel = ? AND kind = 0 AND day = ? AND bucket = ? LIMIT ?";

#[derive(Args)]
pub struct Options {
    #[command(flatten)]
    pub database: Database,
    /// Account of the channel, which must have rows.
    #[arg(long)]
    pub account: String,
    #[arg(long)]
    pub channel: String,
    /// Rows of a read.
    #[arg(long, default_value_t = 100)]
    pub limit: i32,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Process of the database, for its CPU time; repeated if the database has several.
    #[arg(long = "database-pid")]
    pub database_pids: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub reads: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// Cost of the database as the server, and of this process as the generator.
    pub cost: Cost,
}

pub fn print(runtime: &Runtime, options: &Options) -> Result<()> {
    println!("{}", serde_json::to_string(&runtime.block_on(run(options))?)?);
    Ok(())
}

async fn run(options: &Options) -> Result<Outcome> {
    let Options { database, account, channel, .. } = options;
    let session = database.session().await?;
    let days = database.prepare(&session, DAYS).await?;
    let found = session.execute_unpaged(&days, (account, channel)).await?.into_rows_result()?;
    let newest = found.rows::<(i32, i32)>()?.collect::<std::result::Result<Vec<_>, _>>()?.into_iter().max();
    let newest = newest.ok_or_else(|| format!("{channel} has no rows"))?;
    let select = database.prepare(&session, SELECT).await?;
    let read_for = async |time: Duration| -> Result<Histogram> {
        let mut times = Histogram::default();
        let until = Instant::now() + time;
        while Instant::now() < until {
            let began = Instant::now();
            read(&session, &select, options, newest).await?;
            times.record(u64::try_from(began.elapsed().as_nanos())?);
        }
        Ok(times)
    };
    read_for(WARM_UP).await?;
    let meter = Meter::start(&options.database_pids)?;
    let times = read_for(Duration::from_secs(options.seconds)).await?;
    let cost = meter.stop()?;
    let (p50_ms, p99_ms) = (times.quantile_ms(0.5), times.quantile_ms(0.99));
    Ok(Outcome { reads: times.total(), p50_ms, p99_ms, cost })
}

/// Reads the newest rows and takes out all their values, as an application would.
async fn read(
    session: &Session,
    select: &PreparedStatement,
    options: &Options,
    newest: (i32, i32),
) -> Result<()> {
    let values = (&options.account, &options.channel, newest.0, newest.1, options.limit);
    let found = session.execute_unpaged(select, values).await?.into_rows_result()?;
    let mut rows = 0;
    for row in found.rows::<(i64, i64, i64, Option<String>, String)>()? {
        row?;
        rows += 1;
    }
    if rows != options.limit {
        return Err(format!("a read of {} has {rows} rows", options.limit).into());
    }
    Ok(())
}
