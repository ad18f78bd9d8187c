//! A server that a script runs in a folder of its own, and that ends with its last handle or with this process.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use tempfile::TempDir;

/// Script of one server. Its arguments are a command, options, and the folder as `--dir`.
pub(crate) struct Script {
    program: PathBuf,
    folder: TempDir,
    /// Process that ends the server when its input closes, so also if this process is killed.
    keeper: Mutex<Child>,
}

impl Script {
    /// Makes the script `program` of this crate's folder. Its command `end` ends the server, which does not run yet.
    pub(crate) fn new(program: &str, end: &[&str]) -> Self {
        let program = Path::new(env!("CARGO_MANIFEST_DIR")).join(program);
        let folder = tempfile::tempdir().expect("a temporary folder");
        let keeper = Mutex::new(keeper(&program, folder.path(), end));
        Self { program, folder, keeper }
    }

    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Runs a command of the script, and gives its output; `None` if it fails, which the script reports on stderr.
    /// Blocks.
    pub(crate) fn run(&self, arguments: &[&str]) -> Option<String> {
        self.run_with(&[], arguments)
    }

    /// Runs a command with further variables.
    pub(crate) fn run_with(&self, environment: &[(&str, &str)], arguments: &[&str]) -> Option<String> {
        let output = Command::new(&self.program)
            .args(arguments)
            .envs(environment.iter().copied())
            .arg("--dir")
            .arg(self.folder.path())
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output()
            .expect("the script can be started");
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        let mut keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner);
        drop(keeper.stdin.take());
        // The keeper reports itself why it could not end the server.
        let _ = keeper.wait();
    }
}

fn keeper(program: &Path, folder: &Path, end: &[&str]) -> Child {
    use std::os::unix::process::CommandExt as _;
    Command::new("sh")
        .args(["-c", "cat >/dev/null; dir=$1; shift; \"$0\" \"$@\" --dir \"$dir\"; rm -rf \"$dir\""])
        .args([program, folder])
        .args(end)
        .stdin(Stdio::piped())
        .process_group(0)
        .spawn()
        .expect("a shell can be started")
}
