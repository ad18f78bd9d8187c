//! A client command of the binary, `fanfare sub` for example, and what it writes.

use std::io::{BufRead as _, BufReader, Read, Write as _};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::{SOON, binary, system, wait_for, wait_until};

/// A running command. Dropping it kills it.
pub struct RunningCommand {
    process: Child,
    stdout: Lines,
    stderr: Lines,
}

/// Complete lines of the output so far.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<CapturedOutput>>);

#[derive(Default)]
struct CapturedOutput {
    lines: Vec<String>,
    is_complete: bool,
}

impl Lines {
    fn of(output: impl Read + Send + 'static) -> Self {
        let lines = Self::default();
        let kept = lines.clone();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                kept.lock().lines.push(line);
            }
            kept.lock().is_complete = true;
        });
        lines
    }

    fn lock(&self) -> MutexGuard<'_, CapturedOutput> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all(&self) -> Vec<String> {
        self.lock().lines.clone()
    }
}

impl RunningCommand {
    /// Starts the binary with an empty environment; stdin stays open until [`RunningCommand::end_stdin`].
    pub fn start(arguments: &[&str]) -> Self {
        Self::start_with(&[], arguments)
    }

    /// Starts the binary with these variables alone.
    pub fn start_with(environment: &[(&str, &str)], arguments: &[&str]) -> Self {
        let mut command = Command::new(binary::path());
        command.args(arguments).env_clear().envs(environment.iter().copied());
        Self::spawn(command)
    }

    /// Starts another program.
    pub fn other(program: &str, arguments: &[&str]) -> Self {
        let mut command = Command::new(program);
        command.args(arguments);
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        let mut process = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary can be started");
        let stdout = Lines::of(process.stdout.take().expect("piped"));
        let stderr = Lines::of(process.stderr.take().expect("piped"));
        Self { process, stdout, stderr }
    }

    /// All lines of stdout so far.
    pub fn stdout(&self) -> Vec<String> {
        self.stdout.all()
    }

    /// All lines of stderr so far.
    pub fn stderr(&self) -> Vec<String> {
        self.stderr.all()
    }

    /// Waits until stdout has `lines` lines, and gives all.
    pub async fn wait_for_stdout(&self, lines: usize) -> Vec<String> {
        let what = format!("{lines} lines on stdout");
        let waiting = wait_for(SOON, &what, async || Some(self.stdout()).filter(|all| all.len() >= lines));
        waiting.await
    }

    /// Waits for a line on stderr that contains the text, after the first `after` lines; gives the number of lines up
    /// to it.
    pub async fn wait_for_stderr(&self, text: &str, after: usize) -> usize {
        let what = format!("{text:?} on stderr");
        let place = || self.stderr().iter().skip(after).position(|line| line.contains(text));
        wait_for(SOON, &what, async || place().map(|at| after + at + 1)).await
    }

    /// Writes a line to stdin.
    pub fn write(&mut self, line: &str) {
        let stdin = self.process.stdin.as_mut().expect("it is open");
        stdin.write_all(format!("{line}\n").as_bytes()).expect("the command reads");
    }

    pub fn end_stdin(&mut self) {
        drop(self.process.stdin.take());
    }

    /// Sends SIGINT, as Ctrl-C does.
    pub fn interrupt(&self) {
        system::interrupt(self.process.id());
    }

    /// Waits for the end of the process and of its output.
    pub async fn ended(&mut self) -> ExitStatus {
        self.ended_within(SOON).await
    }

    pub async fn ended_within(&mut self, deadline: Duration) -> ExitStatus {
        let process = &mut self.process;
        let ended =
            wait_for(deadline, "the command to end", async || process.try_wait().expect("a child process"))
                .await;
        let outputs = [&self.stdout, &self.stderr];
        let is_complete = async || outputs.iter().all(|lines| lines.lock().is_complete);
        wait_until(deadline, "its last line", is_complete).await;
        ended
    }
}

impl Drop for RunningCommand {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
        if thread::panicking() {
            eprintln!("--- stderr of the command ---\n{}", self.stderr().join("\n"));
        }
    }
}
