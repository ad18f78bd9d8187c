//! `fanfare history copy`: from the store of one node into the shared one.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgMatches, Command, value_parser};

use super::failure::{CommandOutcome, Failure};
use super::progress::ProgressReporter;
use super::{output, runtime};
use crate::app::{self, CopyProgress};
use crate::config::{Config, StoreKind, flags};

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

pub(super) fn copy(config: &Config, matches: &ArgMatches) -> Result<CommandOutcome, Failure> {
    if config.store != StoreKind::Scylla {
        return Err(Failure::usage("history copy: needs --store scylla, where it copies to"));
    }
    let from = matches.get_one::<PathBuf>("from").ok_or_else(|| Failure::usage("--from is missing"))?;
    runtime::interruptible(copied(config, from))
}

async fn copied(config: &Config, from: &Path) -> Result<CommandOutcome, Failure> {
    let mut reporter = ProgressReporter::default();
    let copied = app::copy_history(config, from, |progress| reporter.report(progress)).await;
    reporter.end();
    let CopyProgress { rows, before, .. } =
        copied.map_err(|error| Failure::because("history copy", &error))?;
    let before = if before > 0 { format!(", {before} of them earlier") } else { String::new() };
    let keyspace = &config.scylla_keyspace;
    output::print(&format!(
        "the keyspace {keyspace} has all that {} keeps: {rows} messages, events and counts{before}\n",
        from.display()
    ))
}
