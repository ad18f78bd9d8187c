//! Pages of history over HTTP, one after another on one connection.

use std::time::{Duration, Instant};

use clap::Args;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::{Cost, Meter, Target};
use crate::histogram::Histogram;
use crate::wire::http::Http;
use crate::{Result, os};

const WARM_UP: Duration = Duration::from_secs(2);
/// Messages of one publish while the channel is filled.
const TOGETHER: usize = 100;

#[derive(Args, Clone)]
pub struct History {
    #[command(flatten)]
    pub target: Target,
    /// Channel that is read.
    #[arg(long, default_value = "bench:history")]
    pub channel: String,
    /// Number of messages that are published before the measured part, 100 at a time.
    #[arg(long, default_value_t = 1_000)]
    pub fill: usize,
    /// Messages of a page.
    #[arg(long, default_value_t = 100)]
    pub limit: usize,
    /// Size of a message's data.
    #[arg(long, default_value_t = 128)]
    pub bytes: usize,
    /// Length of the measured part.
    #[arg(long, default_value_t = 10)]
    pub seconds: u64,
    /// Process of the database behind the server, for its CPU time; repeated if the database has several.
    #[arg(long = "database-pid")]
    pub database_pids: Vec<u32>,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub pages: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub cost: Cost,
    pub database_cpu_s: f64,
}

#[derive(Deserialize)]
struct Page {
    messages: Vec<IgnoredAny>,
}

impl History {
    pub fn run(&self) -> Result<Outcome> {
        let mut http = Http::connect(self.target.address, self.target.authorization()?)?;
        let channel = self.channel.replace(':', "%3A");
        let message = format!(r#"{{"data":"{}"}}"#, "x".repeat(self.bytes.saturating_sub(2)));
        let publish = format!("/api/channels/{channel}/publish");
        for filled in (0..self.fill).step_by(TOGETHER) {
            let count = TOGETHER.min(self.fill - filled);
            let body = format!("[{}]", vec![message.as_str(); count].join(","));
            http.post(&publish, &body)?.success("a publish")?;
        }
        let page = format!("/api/channels/{channel}/history?limit={}", self.limit);
        let first: Page = serde_json::from_slice(&http.get(&page)?.success("a page")?)?;
        if first.messages.len() != self.limit.min(self.fill) {
            return Err(format!("a page of {} has {} messages", self.limit, first.messages.len()).into());
        }
        read_for(&mut http, &page, WARM_UP)?;
        let meter = Meter::start(&self.target.server_pids)?;
        let database = Meter::start(&self.database_pids)?;
        let times = read_for(&mut http, &page, Duration::from_secs(self.seconds))?;
        let (cost, database_cpu_s) = (meter.stop()?, database.stop()?.server_cpu_s);
        let (p50_ms, p99_ms) = (times.quantile_ms(0.5), times.quantile_ms(0.99));
        Ok(Outcome { pages: times.total(), p50_ms, p99_ms, cost, database_cpu_s })
    }
}

fn read_for(http: &mut Http, page: &str, time: Duration) -> Result<Histogram> {
    let mut times = Histogram::default();
    let until = Instant::now() + time;
    while Instant::now() < until {
        let began_ns = os::monotonic_ns();
        http.get(page)?.success("a page")?;
        times.record(os::monotonic_ns().saturating_sub(began_ns));
    }
    Ok(times)
}
