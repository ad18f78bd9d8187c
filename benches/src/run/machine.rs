use std::env;
use std::fmt;
use std::path::Path;
use std::process::Command;
use std::thread;

use serde::Serialize;

use super::CHECKOUT;
use crate::procfs;

/// Arguments of git that list the changes of the checkout, without the pages that a run writes.
const CHANGES: [&str; 7] =
    ["-C", CHECKOUT, "status", "--porcelain", "--", ":/", ":(top,exclude)docs/benchmarks"];

/// Machine, versions and command of a run, without which its figures mean nothing.
#[derive(Serialize)]
pub(super) struct Machine {
    cpu: String,
    cores: usize,
    kernel: String,
    /// Congestion control of TCP.
    congestion_control: String,
    /// Mitigation of the kernel for indirect calls, of which sending a segment makes dozens.
    spectre_v2: String,
    node: String,
    bench: String,
    rustc: String,
    commit: String,
    command: String,
    /// Day on which the run began, in UTC.
    date: String,
}

impl Machine {
    pub(super) fn look(node: &Path) -> Self {
        let changed = !first_line("git", &CHANGES).is_empty();
        let commit = first_line("git", &["-C", CHECKOUT, "rev-parse", "--short=12", "HEAD"]);
        Self {
            cpu: procfs::cpu_model(),
            cores: thread::available_parallelism().map_or(0, usize::from),
            kernel: procfs::kernel(),
            congestion_control: procfs::congestion_control(),
            spectre_v2: procfs::spectre_v2(),
            node: first_line(&node.to_string_lossy(), &["--version"]),
            bench: concat!(env!("CARGO_PKG_NAME"), " ", env!("CARGO_PKG_VERSION")).to_owned(),
            rustc: first_line("rustc", &["--version"]),
            date: first_line("date", &["-u", "+%Y-%m-%d"]),
            commit: if changed { commit + " with changes" } else { commit },
            command: env::args()
                .skip(1)
                .fold("bench".to_owned(), |command, argument| command + " " + &argument),
        }
    }
}

impl Machine {
    /// Gives the line below a picture.
    pub(super) fn in_short(&self) -> String {
        let Self { cpu, cores, kernel, commit, date, .. } = self;
        format!("{cores} × {cpu}, Linux {kernel}, commit {commit}, {date}")
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "machine  {} × {}, Linux {}", self.cores, self.cpu, self.kernel)?;
        writeln!(f, "kernel   TCP with {}, spectre_v2: {}", self.congestion_control, self.spectre_v2)?;
        writeln!(f, "versions {}, {}, {}", self.node, self.bench, self.rustc)?;
        writeln!(f, "date     {}", self.date)?;
        writeln!(f, "commit   {}", self.commit)?;
        writeln!(f, "command  {}", self.command)
    }
}

/// Gives the first line of the program's output; empty if the program is missing.
pub(super) fn first_line(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}
