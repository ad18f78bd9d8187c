//! The load generator: its own process, so that its work is never counted as the server's.

mod attach;
mod connection_storm;
mod fanout;
mod history;
mod hold;
mod idle;
mod link;
mod opening;
mod presence;
mod publish;
mod tally;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use crate::wire::dialect::Dialect;
use crate::{Result, os};

pub use attach::{Attach, Outcome as AttachOutcome};
pub use connection_storm::{ConnectionStorm, Outcome as StormOutcome};
pub use fanout::{Fanout, Memory, Outcome as FanoutOutcome, SlowReaderStats};
pub use history::{History, Outcome as HistoryOutcome};
pub use hold::{Hold, Outcome as HoldOutcome};
pub use idle::{Idle, Outcome as IdleOutcome};
pub use presence::{Outcome as PresenceOutcome, Presence};
pub use publish::{Outcome as PublishOutcome, Publish};
pub use tally::Faults;

#[derive(Subcommand)]
pub enum Workload {
    /// Publishes at a constant rate to one channel or many, with many subscribers.
    Fanout(Fanout),
    /// Connections that are attached and receive no messages.
    Idle(Idle),
    /// A connection storm.
    #[command(name = "herd")]
    ConnectionStorm(ConnectionStorm),
    /// Publishes with a fixed number under way on each connection.
    Publish(Publish),
    /// Members that enter one channel, and clients that attach later and get the list of members.
    Presence(Presence),
    /// Attaches to channels without interest, one after another.
    Attach(Attach),
    /// Connections that are attached and read until stdin ends.
    Hold(Hold),
    /// Pages of history, one after another.
    History(History),
}

/// Target of a measurement: an address, and the processes behind it.
#[derive(Args, Clone)]
pub struct Target {
    /// Address of the server.
    #[arg(long)]
    pub address: SocketAddr,
    /// Process of the server, for its CPU time and memory; repeated if there are several.
    #[arg(long = "server-pid", required = true)]
    pub server_pids: Vec<u32>,
    /// Protocol of the server. Only `fanout`, `idle` and `herd` speak others than Fanfare's.
    #[arg(long, value_enum, default_value_t)]
    pub dialect: Dialect,
    /// A file with an API key, sent as Basic.
    #[arg(long, conflicts_with = "token_file")]
    pub key_file: Option<PathBuf>,
    /// A file with an access token, sent as Bearer.
    #[arg(long)]
    pub token_file: Option<PathBuf>,
}

/// Cost of the measured part, on both sides.
#[derive(Serialize, Deserialize)]
pub struct Cost {
    pub wall_s: f64,
    pub server_cpu_s: f64,
    pub generator_cpu_s: f64,
}

impl Workload {
    fn target(&self) -> &Target {
        match self {
            Self::Fanout(fanout) => &fanout.target,
            Self::Idle(idle) => &idle.target,
            Self::ConnectionStorm(storm) => &storm.target,
            Self::Publish(publish) => &publish.target,
            Self::Presence(presence) => &presence.target,
            Self::Attach(attach) => &attach.target,
            Self::Hold(hold) => &hold.target,
            Self::History(history) => &history.target,
        }
    }
}

/// Runs the workload and prints its result as one JSON line.
pub fn print(workload: &Workload) -> Result<()> {
    for pid in &workload.target().server_pids {
        os::cpu_time(*pid).map_err(|_| format!("--server-pid {pid}: there is no such process"))?;
    }
    let line = match workload {
        Workload::Fanout(fanout) => serde_json::to_string(&fanout.run()?),
        Workload::Idle(idle) => serde_json::to_string(&idle.run()?),
        Workload::ConnectionStorm(storm) => serde_json::to_string(&storm.run()?),
        Workload::Publish(publish) => serde_json::to_string(&publish.run()?),
        Workload::Presence(presence) => serde_json::to_string(&presence.run()?),
        Workload::Attach(attach) => serde_json::to_string(&attach.run()?),
        Workload::Hold(hold) => serde_json::to_string(&hold.run()?),
        Workload::History(history) => serde_json::to_string(&history.run()?),
    };
    println!("{}", line?);
    Ok(())
}

/// The clocks of server and generator at the beginning of a measured window.
pub(crate) struct Meter {
    server_pids: Vec<u32>,
    began: Instant,
    server_cpu: Duration,
    generator_cpu: Duration,
}

impl Meter {
    pub(crate) fn start(server_pids: &[u32]) -> Result<Self> {
        let [server_cpu, generator_cpu] = cpu_times(server_pids)?;
        Ok(Self { server_pids: server_pids.to_vec(), began: Instant::now(), server_cpu, generator_cpu })
    }

    pub(crate) fn stop(&self) -> Result<Cost> {
        let [server_cpu, generator_cpu] = cpu_times(&self.server_pids)?;
        Ok(Cost {
            wall_s: self.began.elapsed().as_secs_f64(),
            server_cpu_s: server_cpu.saturating_sub(self.server_cpu).as_secs_f64(),
            generator_cpu_s: generator_cpu.saturating_sub(self.generator_cpu).as_secs_f64(),
        })
    }
}

fn cpu_times(server_pids: &[u32]) -> Result<[Duration; 2]> {
    let servers: io::Result<Duration> = server_pids.iter().map(|pid| os::cpu_time(*pid)).sum();
    let servers = servers.map_err(|error| format!("the server's CPU time: {error}"))?;
    Ok([servers, os::cpu_time(std::process::id())?])
}
