//! Process of this program that works beside a measurement: it prints one line when it is ready, and ends when its
//! stdin does.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, ChildStdout, Command, Stdio};

use crate::Result;

pub(super) struct Companion {
    process: Child,
    stdout: BufReader<ChildStdout>,
    /// First line of its stdout.
    pub(super) first_line: String,
}

impl Companion {
    /// Starts the process and waits for its line.
    pub(super) fn start(mut command: Command) -> Result<Self> {
        let name = format!("{}", command.get_program().display());
        let spawned = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
        let mut process = spawned.map_err(|error| format!("{name}: {error}"))?;
        let stdout = BufReader::new(process.stdout.take().ok_or("a companion has no stdout")?);
        let mut companion = Self { process, stdout, first_line: String::new() };
        let mut first_line = String::new();
        if companion.stdout.read_line(&mut first_line)? == 0 {
            return Err(format!("{name} has ended before it was ready").into());
        }
        first_line.trim().clone_into(&mut companion.first_line);
        Ok(companion)
    }

    pub(super) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Closes stdin, waits for the end, and gives the output after the first line.
    pub(super) fn end(mut self) -> Result<String> {
        drop(self.process.stdin.take());
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest)?;
        let status = self.process.wait()?;
        if status.success() {
            Ok(rest.trim().to_owned())
        } else {
            Err(format!("a companion failed: {status}").into())
        }
    }
}

impl Drop for Companion {
    fn drop(&mut self) {
        if matches!(self.process.try_wait(), Ok(None)) {
            // Both calls fail only if the process is gone already.
            let _ = self.process.kill();
            let _ = self.process.wait();
        }
    }
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
    fn a_companion_lasts_until_it_is_let_go() {
        let companion = Companion::start(shell("echo ready; cat; echo 42")).expect("a shell that is ready");
        assert_eq!(companion.first_line, "ready");
        assert_eq!(companion.end().expect("a shell that ends well"), "42");
        assert!(Companion::start(shell("exit 3")).is_err());
        let failing = Companion::start(shell("echo ready; cat; exit 3")).expect("a shell that is ready");
        assert!(failing.end().is_err());
    }
}
