//! A database for a measurement, started by the script of the cluster tests.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::ValueEnum;
use serde::Serialize;
use tempfile::TempDir;

use super::super::companion::Companion;
use crate::Result;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../cluster-tests/cassandra/cassandra");

/// Number of nodes of Apache Cassandra, and the time at which they acknowledge a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Kind {
    #[value(name = "1-batch")]
    #[serde(rename = "1-batch")]
    OneBatch,
    #[value(name = "1-periodic")]
    #[serde(rename = "1-periodic")]
    OnePeriodic,
    #[value(name = "3-batch")]
    #[serde(rename = "3-batch")]
    ThreeBatch,
    #[value(name = "3-periodic")]
    #[serde(rename = "3-periodic")]
    ThreePeriodic,
}

impl Kind {
    pub(super) fn nodes(self) -> usize {
        match self {
            Self::OneBatch | Self::OnePeriodic => 1,
            Self::ThreeBatch | Self::ThreePeriodic => 3,
        }
    }

    /// Setting of the commit log: `batch` acknowledges a write when the log is on the disk, `periodic` before.
    fn sync(self) -> &'static str {
        match self {
            Self::OneBatch | Self::ThreeBatch => "batch",
            Self::OnePeriodic | Self::ThreePeriodic => "periodic",
        }
    }

    pub(super) fn title(self) -> String {
        let nodes = if self.nodes() == 1 { "1 node" } else { "3 nodes" };
        format!("{nodes}, {}", self.sync())
    }
}

/// A running database. Dropping it ends it, and so does the end of this process.
pub(super) struct Cassandra {
    pub(super) points: String,
    /// Process that ends the nodes when it ends.
    keeper: Option<Companion>,
    nodes: usize,
    folder: TempDir,
}

impl Cassandra {
    /// Starts the database with a folder of its own under `data`.
    pub(super) fn start(kind: Kind, data: &Path) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("cassandra-").tempdir_in(data)?;
        let mut keeper = Command::new("sh");
        keeper.args([
            "-c",
            "echo kept; cat >/dev/null; \"$0\" signal KILL --dir \"$1\" 2>/dev/null || true",
            SCRIPT,
        ]);
        keeper.arg(folder.path());
        let keeper = Companion::start(keeper)?;
        let mut start = Command::new(SCRIPT);
        start.args([
            "start",
            "--address",
            "auto",
            "--nodes",
            &kind.nodes().to_string(),
            "--sync",
            kind.sync(),
        ]);
        let output =
            start.arg("--dir").arg(folder.path()).stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
        if !output.status.success() {
            return Err(format!("Cassandra cannot be started: {}", output.status).into());
        }
        let points = String::from_utf8(output.stdout)?.trim().to_owned();
        Ok(Self { points, keeper: Some(keeper), nodes: kind.nodes(), folder })
    }

    /// Gives the process id of each node.
    pub(super) fn pids(&self) -> Result<Vec<u32>> {
        let file = |node: usize| self.folder.path().join(format!("node{node}")).join("pid");
        (1..=self.nodes).map(|node| Ok(fs::read_to_string(file(node))?.trim().parse()?)).collect()
    }
}

impl Drop for Cassandra {
    fn drop(&mut self) {
        // The keeper reports itself what it could not end.
        drop(self.keeper.take().map(Companion::end));
    }
}
