//! `fanfare history copy`: from the store of one node into the one that nodes share.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Arg, ArgMatches, Command, value_parser};

use super::failure::{Failure, Outcome};
use super::{output, runtime};
use crate::app::{self, Progress};
use crate::config::{Config, StoreKind, flags};

/// Between two lines where nobody watches.
const LINE_EVERY: Duration = Duration::from_secs(10);
const BAR: usize = 30;

pub(super) fn command() -> Command {
    let from = Arg::new("from")
        .long("from")
        .value_name("DIR")
        .required(true)
        .value_parser(value_parser!(PathBuf))
        .help("The data folder of the node whose store is copied; the node must not run");
    Command::new("history")
        .about("What was published and is kept")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("copy")
                .about(
                    "Copies the embedded store of a data folder into the shared one (--store scylla); \
                     run again, it goes on where it was cut short, and stores nothing twice",
                )
                .arg(from)
                .args(flags::arguments()),
        )
}

pub(super) fn copy(config: &Config, matches: &ArgMatches) -> Result<Outcome, Failure> {
    if config.store != StoreKind::Scylla {
        return Err(Failure::usage("history copy: needs --store scylla, where it copies to"));
    }
    let from = matches.get_one::<PathBuf>("from").ok_or_else(|| Failure::usage("--from is missing"))?;
    runtime::interruptible(copied(config, from))
}

async fn copied(config: &Config, from: &Path) -> Result<Outcome, Failure> {
    let mut telling = Telling::default();
    let copied = app::copy_history(config, from, |progress| telling.hear(progress)).await;
    telling.end();
    let Progress { rows, before, .. } = copied.map_err(|error| Failure::because("history copy", &error))?;
    let before = if before > 0 { format!(", {before} of them earlier") } else { String::new() };
    let keyspace = &config.scylla_keyspace;
    output::print(&format!(
        "the keyspace {keyspace} has all that {} keeps: {rows} messages, events and counts{before}\n",
        from.display()
    ))
}

/// On stderr: one line that is drawn over on a terminal, else a line now and then.
struct Telling {
    on_terminal: bool,
    begun: Instant,
    last: Option<Instant>,
    /// The latest, where it was not time for a line.
    untold: Option<String>,
}

impl Default for Telling {
    fn default() -> Self {
        Self { on_terminal: std::io::stderr().is_terminal(), begun: Instant::now(), last: None, untold: None }
    }
}

impl Telling {
    fn hear(&mut self, progress: Progress) {
        if self.last.is_none() {
            self.begun = Instant::now();
        }
        let text = line(progress, self.begun.elapsed());
        if self.on_terminal {
            eprint!("\r{text}\u{1b}[K");
        } else if self.last.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
            output::tell(&text);
        } else {
            self.untold = Some(text);
            return;
        }
        (self.last, self.untold) = (Some(Instant::now()), None);
    }

    fn end(self) {
        if self.on_terminal && self.last.is_some() {
            eprintln!();
        }
        if let Some(text) = self.untold {
            output::tell(&text);
        }
    }
}

fn line(Progress { rows, of, before }: Progress, since: Duration) -> String {
    let of = of.max(rows);
    let share = if of == 0 { 1.0 } else { rows as f64 / of as f64 };
    let filled = (share * BAR as f64) as usize;
    let rate = (rows - before) as f64 / since.as_secs_f64().max(1.0);
    let left = if rate > 0.0 && rows < of {
        format!(", {} left", span((of - rows) as f64 / rate))
    } else {
        String::new()
    };
    format!(
        "[{}{}] {:3.0} %, {rows} of about {of} rows, {rate:.0}/s{left}",
        "#".repeat(filled),
        " ".repeat(BAR - filled.min(BAR)),
        100.0 * share
    )
}

fn span(seconds: f64) -> String {
    match seconds as u64 {
        seconds @ 0..=99 => format!("{seconds} s"),
        seconds @ 100..=5_999 => format!("{} min", seconds / 60),
        seconds => format!("{} h", seconds / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_how_far_it_is() {
        let at =
            |rows, of, before, seconds| line(Progress { rows, of, before }, Duration::from_secs(seconds));
        assert_eq!(
            at(3_000, 12_000, 1_000, 10),
            "[#######                       ]  25 %, 3000 of about 12000 rows, 200/s, 45 s left"
        );
        assert_eq!(at(0, 0, 0, 0), format!("[{}] 100 %, 0 of about 0 rows, 0/s", "#".repeat(30)));
        assert!(at(20, 10, 0, 1).contains("100 %, 20 of about 20 rows"), "an estimate may be low");
        assert!(at(1, 100_000, 0, 1).ends_with("27 h left"));
        assert!(at(100, 100_000, 0, 1).ends_with("16 min left"));
    }
}
