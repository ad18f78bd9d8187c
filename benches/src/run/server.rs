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

const START_WITHIN: Duration = Duration::from_secs(30);
const STOP_WITHIN: Duration = Duration::from_secs(40);
const GLANCE: Duration = Duration::from_millis(20);

/// A running server; it ends when this is dropped.
pub(super) struct Server {
    process: Child,
    pub(super) address: SocketAddr,
    pub(super) key_file: Option<PathBuf>,
    _data: Option<TempDir>,
}

impl Server {
    pub(super) fn floor(bench: &Path) -> Result<Self> {
        let mut process =
            Command::new(bench).arg("floor-server").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let mut line = String::new();
        let stdout = process.stdout.take().ok_or("the floor has no stdout")?;
        BufReader::new(stdout).read_line(&mut line)?;
        let address = line.trim().parse().map_err(|error| format!("the floor said {line:?}: {error}"))?;
        Ok(Self { process, address, key_file: None, _data: None })
    }

    /// A fresh node in a folder of its own under `data`, default settings except for the limit on publishes.
    pub(super) fn node(binary: &Path, data: &Path, store: &str) -> Result<Self> {
        let data = tempfile::Builder::new().prefix("node-").tempdir_in(data)?;
        let log = File::create(data.path().join("log"))?;
        let process = Command::new(binary)
            .args(["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--store", store])
            .arg("--data-dir")
            .arg(data.path())
            .env("FANFARE_LIMITS_PUBLISHES_PER_SECOND", "0")
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .map_err(|error| format!("{}: {error}", binary.display()))?;
        let unbound = SocketAddr::from(([127, 0, 0, 1], 0));
        let key_file = Some(data.path().join("dev-key"));
        let mut server = Self { process, address: unbound, key_file, _data: None };
        server.address = match server.bound_address(data.path()) {
            Ok(address) => address,
            Err(error) => return Err(format!("{error}{}", last_lines(&data.path().join("log"))).into()),
        };
        server._data = Some(data);
        Ok(server)
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Waits until the node has written where it listens.
    fn bound_address(&mut self, data: &Path) -> Result<SocketAddr> {
        #[derive(Deserialize)]
        struct Written {
            listen: SocketAddr,
        }
        let deadline = Instant::now() + START_WITHIN;
        while Instant::now() < deadline {
            if let Some(status) = self.process.try_wait()? {
                return Err(format!("the node ended at once: {status}").into());
            }
            if let Ok(text) = fs::read_to_string(data.join("node.json")) {
                return Ok(serde_json::from_str::<Written>(&text)?.listen);
            }
            thread::sleep(GLANCE);
        }
        Err(format!("the node did not start within {START_WITHIN:?}").into())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A process that was waited for has given its id back, perhaps to another one.
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
        // Both fail only when the process is gone already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn last_lines(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(20)..].iter().map(|line| format!("\n  {line}")).collect()
}
