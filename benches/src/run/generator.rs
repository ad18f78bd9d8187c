//! The load generator as a process of its own.

use std::path::Path;
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;

use super::server::Server;
use crate::Result;

/// The generator with this workload against this server; `bench` is the binary that is running.
pub(super) fn load(bench: &Path, workload: &str, server: &Server) -> Command {
    let mut command = Command::new(bench);
    command.args(["load", workload, "--address", &server.address.to_string()]);
    command.args(["--server-pid", &server.pid().to_string()]);
    if let Some(key_file) = &server.key_file {
        command.arg("--key-file").arg(key_file);
    }
    command
}

/// Runs to the end and reads the one line of the result.
pub(super) fn result_of<Outcome: DeserializeOwned>(mut command: Command) -> Result<Outcome> {
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output()?;
    if !output.status.success() {
        return Err(format!("the generator failed: {}", output.status).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}
