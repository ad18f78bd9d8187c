//! The command line: arguments → one command → an exit code.

mod backup;
mod banner;
mod check;
mod failure;
mod history;
mod inspect;
mod key;
mod occupancy;
mod outbox;
mod output;
mod presence;
mod progress;
mod publish;
mod restart_in_place;
mod roundtrip;
mod running;
mod runtime;
mod schema;
mod serve;
mod subscribe;
mod target;
mod token;
mod webhook;

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Args, Command, FromArgMatches};

use crate::config::{self, Config, LoadedConfig, flags};
use failure::{CommandOutcome, Failure};

/// Runs the command that the arguments of the process name; without one, `serve`.
///
/// 0: done, 1: failed, 2: wrong use or configuration, 130: ended by SIGINT, 143: by SIGTERM.
pub fn run() -> ExitCode {
    let matches = match command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => return Failure::report_arguments(error),
    };
    match dispatch(&matches) {
        Ok(outcome) => outcome.exit_code(),
        Err(failure) => failure.report(),
    }
}

fn dispatch(matches: &ArgMatches) -> Result<CommandOutcome, Failure> {
    match matches.subcommand() {
        None => serve::run(loaded(matches)),
        Some(("serve", matches)) => serve::run(loaded(matches)),
        Some(("check-config", matches)) => check::run(loaded(matches)),
        Some(("config-reference", _)) => output::print(&config::reference()),
        Some(("pub", matches)) => publish::run(parsed(matches)?),
        Some(("sub", matches)) => subscribe::run(parsed(matches)?),
        Some(("roundtrip", matches)) => roundtrip::run(parsed(matches)?),
        Some(("token", matches)) => token::run(parsed(matches)?),
        Some(("key", _)) => key::run(),
        Some(("schema", matches)) => match matches.subcommand() {
            Some(("apply", matches)) => schema::apply(&configuration(matches)?),
            _ => Err(Failure::usage("schema: only apply is known")),
        },
        Some(("history", matches)) => match matches.subcommand() {
            Some(("copy", matches)) => history::copy(&configuration(matches)?, matches),
            _ => Err(Failure::usage("history: only copy is known")),
        },
        Some(("outbox", matches)) => {
            let (_, of) =
                matches.subcommand().ok_or_else(|| Failure::usage("outbox: a command is missing"))?;
            outbox::run(matches, &configuration(of)?)
        }
        Some(("backup", matches)) => backup::backup(&configuration(matches)?, matches),
        Some(("restore", matches)) => backup::restore(&configuration(matches)?, matches),
        Some(("webhook", matches)) => match matches.subcommand() {
            Some(("listen", matches)) => webhook::listen(parsed(matches)?),
            _ => Err(Failure::usage("webhook: only listen is known")),
        },
        Some((other, _)) => Err(Failure::usage(format!("there is no command {other}"))),
    }
}

fn command() -> Command {
    Command::new("fanfare")
        .about("A self-hosted realtime messaging service")
        .version(env!("CARGO_PKG_VERSION"))
        .args(flags::arguments())
        .args_conflicts_with_subcommands(true)
        .subcommand(Command::new("serve").about("Runs a node (the default)").args(flags::arguments()))
        .subcommand(publish::PublishArguments::augment_args(Command::new("pub").about("Publishes to a channel")))
        .subcommand(subscribe::SubscribeArguments::augment_args(
            Command::new("sub").about("Follows channels and prints what is published, one line per message"),
        ))
        .subcommand(roundtrip::RoundtripArguments::augment_args(Command::new("roundtrip").about(
            "Publishes through each of several nodes, and says how long each of them took to deliver the message",
        )))
        .subcommand(token::TokenArguments::augment_args(
            Command::new("token")
                .about("Signs a token request with a key, or inspects a token, without asking a node"),
        ))
        .subcommand(key_command())
        .subcommand(schema_command())
        .subcommand(history::command())
        .subcommand(outbox::command())
        .subcommands(backup::commands())
        .subcommand(webhook::command())
        .subcommand(
            Command::new("check-config")
                .about("Says everything that is wrong with the configuration, and runs nothing")
                .args(flags::arguments()),
        )
        .subcommand(
            Command::new("config-reference")
                .about("Prints a configuration file with every setting and its default")
                .arg(unused_data_dir()),
        )
}

fn key_command() -> Command {
    Command::new("key").about("Makes keys").subcommand_required(true).arg_required_else_help(true).subcommand(
        Command::new("new")
            .about("Prints a new key and its lines for the directory file")
            .arg(unused_data_dir()),
    )
}

fn schema_command() -> Command {
    Command::new("schema")
        .about("The tables of the shared store")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("apply")
                .about("Makes the keyspace and the tables that are missing in the database")
                .args(flags::arguments()),
        )
}

/// The data folder argument, which every command accepts, so that a script can give it to all of them.
fn unused_data_dir() -> Arg {
    Arg::new("data_dir").long("data-dir").value_name("DIR").help("Taken by every command; this one uses none")
}

fn loaded(matches: &ArgMatches) -> LoadedConfig {
    LoadedConfig::of(&flags::Flags::of(matches), std::env::vars_os())
}

fn configuration(matches: &ArgMatches) -> Result<Config, Failure> {
    check::settings(loaded(matches))
}

fn parsed<A: FromArgMatches>(matches: &ArgMatches) -> Result<A, Failure> {
    A::from_arg_matches(matches).map_err(|error| Failure::usage(error.to_string()))
}

#[cfg(test)]
mod tests;
