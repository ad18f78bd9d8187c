//! The load generator as a process of its own.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;

use super::server::Server;
use crate::{NotCarried, Result, os};

/// Timeout of a measurement, longer than any takes.
const END_WITHIN: Duration = Duration::from_secs(240);
const GLANCE: Duration = Duration::from_millis(20);

/// Makes the command of the generator with this workload against this server; `bench` is the running binary.
pub(super) fn load(bench: &Path, workload: &str, server: &Server) -> Command {
    let mut command = Command::new(bench);
    command.args(["load", workload, "--address", &server.address.to_string()]);
    command.args(["--server-pid", &server.pid().to_string()]);
    if let Some(key_file) = &server.key_file {
        command.arg("--key-file").arg(key_file);
    }
    command
}

/// Runs the command to its end and parses the one line of the result. A generator that does not end in time is killed.
pub(super) fn result_of<Outcome: DeserializeOwned>(command: Command) -> Result<Outcome> {
    Ok(serde_json::from_slice(&output_within(command, END_WITHIN)?)?)
}

/// Runs a command, and gives its output once it has ended. The output must fit into a pipe.
fn output_within(mut command: Command, time: Duration) -> Result<Vec<u8>> {
    os::end_with_this(&mut command);
    let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn()?;
    let deadline = Instant::now() + time;
    while process.try_wait()?.is_none() {
        if Instant::now() > deadline {
            process.kill()?;
            process.wait()?;
            return Err(format!("the generator did not end within {time:?}").into());
        }
        thread::sleep(GLANCE);
    }
    let output = process.wait_with_output()?;
    if output.status.code() == Some(NotCarried::EXIT_CODE.into()) {
        return Err(NotCarried(String::from_utf8_lossy(&output.stdout).trim().to_owned()).into());
    }
    if !output.status.success() {
        return Err(format!("the generator failed: {}", output.status).into());
    }
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(line: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", line]);
        command
    }

    #[test]
    fn a_generator_that_hangs_is_given_up() {
        let output = output_within(shell("echo so far; exec sleep 600"), Duration::from_millis(300));
        assert!(output.is_err_and(|error| error.to_string().contains("did not end")));
    }

    #[test]
    fn generator_output_is_read_only_after_exit_code_zero() {
        let output =
            output_within(shell("echo 42"), Duration::from_secs(60)).expect("a shell that ends well");
        assert_eq!(output, b"42\n");
        assert!(output_within(shell("exit 2"), Duration::from_secs(60)).is_err());
    }

    #[test]
    fn generator_exit_code_3_is_reported_as_not_carried() {
        let output = output_within(shell("echo too much; exit 3"), Duration::from_secs(60));
        let error = output.expect_err("an exit code of its own");
        assert_eq!(error.downcast_ref().map(|NotCarried(reason)| reason.as_str()), Some("too much"));
        let output = output_within(shell("echo broken; exit 1"), Duration::from_secs(60));
        assert!(!output.expect_err("an exit code of failure").is::<NotCarried>());
    }
}
