//! A new node beside one with very many channels: time until each knows the interest of the other.

use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::super::companion::Companion;
use super::super::markdown::Table;
use super::super::report::median;
use super::nodes::{BinaryPaths, Cluster};
use crate::load::HoldOutcome;
use crate::{Result, os, procfs};

/// Number of channels of each connection: the greatest allowed.
const ATTACHED: u32 = 200;
/// Time for the memory of both nodes to settle.
const SETTLE: Duration = Duration::from_secs(2);

#[derive(Serialize)]
pub(super) struct Interest {
    pub(super) channels: u32,
    pub(super) without: Vec<JoinCost>,
    pub(super) with: Vec<JoinCost>,
}

#[derive(Serialize)]
pub(super) struct JoinCost {
    /// Time from the start of the new node until each knows the interest of the other.
    pub(super) wall_s: f64,
    /// CPU time of both nodes in that time.
    pub(super) cpu_s: f64,
    /// Resident memory of the new node. The next field is the growth of the other node's.
    pub(super) new_bytes: u64,
    pub(super) grown_bytes: u64,
}

impl Interest {
    pub(super) fn new(channels: u32) -> Self {
        Self { channels, without: Vec::new(), with: Vec::new() }
    }

    pub(super) fn measure(&mut self, places: &BinaryPaths) -> Result<()> {
        self.without.push(join(places, 0)?);
        self.with.push(join(places, self.channels / ATTACHED)?);
        Ok(())
    }

    pub(super) fn table(&self) -> String {
        let title = format!("a second node comes, {} channels wanted at the first", self.channels);
        let columns =
            ["s until both know", "s of CPU, both", "MB RSS of the new one", "MB more at the other one"];
        let mut table = Table::new(&title, &columns);
        let none = "none wanted".to_owned();
        for (name, runs) in [(none, &self.without), (format!("{} wanted", self.channels), &self.with)] {
            let cells = vec![
                format!("{:.2}", median(runs, |run| run.wall_s)),
                format!("{:.2}", median(runs, |run| run.cpu_s)),
                format!("{:.1}", median(runs, |run| run.new_bytes as f64 / 1e6)),
                format!("{:.1}", median(runs, |run| run.grown_bytes as f64 / 1e6)),
            ];
            table.row(&name, runs.len(), cells);
        }
        table.text()
    }
}

fn join(places: &BinaryPaths, connections: u32) -> Result<JoinCost> {
    let mut cluster = Cluster::start(places, 1)?;
    let mut hold = cluster.load(&places.bench, "hold", 0);
    hold.args(["--connections", &connections.to_string(), "--attached", &ATTACHED.to_string()]);
    let hold = Companion::start(hold)?;
    let first = cluster.nodes[0].pid();
    let (before_bytes, before) = (procfs::resident_bytes(first)?, os::cpu_time(first)?);
    let began = Instant::now();
    cluster.add()?;
    cluster.until_linked()?;
    let wall_s = began.elapsed().as_secs_f64();
    let second = cluster.nodes[1].pid();
    let cpu = os::cpu_time(first)?.saturating_sub(before) + os::cpu_time(second)?;
    thread::sleep(SETTLE);
    let grown_bytes = procfs::resident_bytes(first)?.saturating_sub(before_bytes);
    let joining = JoinCost {
        wall_s,
        cpu_s: cpu.as_secs_f64(),
        new_bytes: procfs::resident_bytes(second)?,
        grown_bytes,
    };
    let held: HoldOutcome = serde_json::from_str(&hold.end()?)?;
    match held.channels == (connections * ATTACHED) as usize {
        true => Ok(joining),
        false => Err("not all channels were held".into()),
    }
}
