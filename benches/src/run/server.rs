//! The servers under measurement, each a process of its own.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use tempfile::TempDir;

use crate::{Result, os};

const LOG: &str = "log";
const START_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(40);
const GLANCE: Duration = Duration::from_millis(20);

/// A running server. Dropping it ends the server.
pub(super) struct Server {
    process: Child,
    pub(super) address: SocketAddr,
    pub(super) key_file: Option<PathBuf>,
    /// Folder of the server, removed with it.
    folder: Option<TempDir>,
}

/// Addresses of a node that is up.
#[derive(Deserialize)]
pub(super) struct NodeFile {
    listen: SocketAddr,
    pub(super) admin: SocketAddr,
    /// Gossip address of a node in a cluster.
    pub(super) gossip: Option<SocketAddr>,
}

impl Server {
    pub(super) fn baseline(bench: &Path, window_ms: u32) -> Result<Self> {
        Self::announcing(Command::new(bench).args(["floor-server", "--window-ms", &window_ms.to_string()]))
    }

    /// Starts the baseline server with io_uring in `threads` threads.
    pub(super) fn baseline_io_uring(bench: &Path, window_ms: u32, threads: u8) -> Result<Self> {
        let (window_ms, threads) = (window_ms.to_string(), threads.to_string());
        let options = ["floor-server", "--io-uring", "--window-ms", &window_ms, "--threads", &threads];
        Self::announcing(Command::new(bench).args(options))
    }

    /// Starts the baseline server with as many heartbeats as a node sends by default.
    pub(super) fn baseline_with_heartbeats(bench: &Path) -> Result<Self> {
        Self::announcing(Command::new(bench).args(["floor-server", "--heartbeat-ms", "15000"]))
    }

    /// Starts a fresh node in a folder of its own under `data`, with default settings but for the limit on publishes
    /// and the variable in `set`.
    pub(super) fn node(binary: &Path, data: &Path, store: &str, set: Option<(&str, u32)>) -> Result<Self> {
        let set = set.map(|(variable, value)| (variable, value.to_string()));
        let environment: Vec<_> = set.into_iter().chain([("FANFARE_STORE", store.to_owned())]).collect();
        Self::development(binary, data, &environment)
    }

    /// Starts a node with these variables, the store among them, and with the development account and key that it makes
    /// itself.
    pub(super) fn development(binary: &Path, data: &Path, environment: &[(&str, String)]) -> Result<Self> {
        let mut server = Self::node_with(binary, data, environment)?;
        server.key_file = server.folder.as_ref().map(|folder| folder.path().join("dev-key"));
        Ok(server)
    }

    /// Starts a node with these variables, a directory among them.
    pub(super) fn node_with(binary: &Path, data: &Path, environment: &[(&str, String)]) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("node-").tempdir_in(data)?;
        let mut command = Command::new(binary);
        command.args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"]);
        command.arg("--data-dir").arg(folder.path()).env("FANFARE_LIMITS_PUBLISHES_PER_SECOND", "0");
        // With 20 000 open files a node keeps some for event streams, and by default accepts fewer connections than are
        // measured.
        command.env("FANFARE_LIMITS_CONNECTIONS", "18000");
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        Self::writing(&mut command, folder, |folder| Ok(node_file(folder)?.map(|node| node.listen)))
    }

    /// Reads the addresses of a node.
    pub(super) fn node_file(&self) -> Result<NodeFile> {
        let folder = self.folder.as_ref().ok_or("the server writes nothing")?;
        Ok(node_file(folder.path())?.ok_or("the node has not written where it listens")?)
    }

    /// All that the server has logged so far.
    pub(super) fn log(&self) -> Result<String> {
        let folder = self.folder.as_ref().ok_or("the server writes nothing")?;
        Ok(fs::read_to_string(folder.path().join(LOG))?)
    }

    /// Starts a server that prints its address in its first line, and ends when its stdin does.
    pub(super) fn announcing(command: &mut Command) -> Result<Self> {
        let mut process = spawn(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let mut line = String::new();
        let stdout = process.stdout.take().ok_or("the server has no stdout")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line.trim().parse().map_err(|error| format!("the server said {line:?}: {error}"))?;
        Ok(Self { process, address, key_file: None, folder: None })
    }

    /// Starts a server that logs into `folder`, in which `address` finds its address after a while.
    pub(super) fn writing(
        command: &mut Command,
        folder: TempDir,
        address: impl Fn(&Path) -> Result<Option<SocketAddr>>,
    ) -> Result<Self> {
        let log = folder.path().join(LOG);
        let file = File::create(&log)?;
        let process = spawn(command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file))?;
        let unbound = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut server = Self { process, address: unbound, key_file: None, folder: None };
        server.address = match server.await_address(|| address(folder.path())) {
            Ok(address) => address,
            Err(error) => return Err(format!("{error}{}", last_lines(&log)).into()),
        };
        server.folder = Some(folder);
        Ok(server)
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    fn await_address(&mut self, address: impl Fn() -> Result<Option<SocketAddr>>) -> Result<SocketAddr> {
        let deadline = Instant::now() + START_WITHIN;
        while Instant::now() < deadline {
            if let Some(status) = self.process.try_wait()? {
                return Err(format!("the server ended at once: {status}").into());
            }
            if let Some(address) = address()? {
                return Ok(address);
            }
            thread::sleep(GLANCE);
        }
        Err(format!("the server did not start within {START_WITHIN:?}").into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // The id of a process that was waited for may be that of another process now.
        if !matches!(self.process.try_wait(), Ok(None)) {
            return;
        }
        let pid = self.process.id();
        let deadline = Instant::now() + STOP_WITHIN;
        let mut asked = os::terminate(pid).is_ok();
        while asked && Instant::now() < deadline {
            match self.process.try_wait() {
                Ok(None) => thread::sleep(GLANCE),
                Ok(Some(_)) => return,
                Err(_) => asked = false,
            }
        }
        eprintln!("bench: process {pid} did not stop and is killed");
        // Both calls fail only if the process is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Reads the addresses of a node; `None` while it has not written them.
fn node_file(folder: &Path) -> Result<Option<NodeFile>> {
    match fs::read_to_string(folder.join("node.json")) {
        Ok(text) => Ok(Some(serde_json::from_str(&text)?)),
        Err(_) => Ok(None),
    }
}

fn spawn(command: &mut Command) -> Result<Child> {
    os::end_with_this(command);
    let spawned = command.spawn();
    Ok(spawned.map_err(|error| format!("{}: {error}", command.get_program().display()))?)
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].iter().map(|line| format!("\n  {line}")).collect()
}
