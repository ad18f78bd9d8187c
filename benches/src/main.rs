use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fanfare_benches::targets::{confirm, receiver};
use fanfare_benches::{NotCarried, Result, baseline, burn, load, os, run, shares, store_loop};

/// Measures Fanfare beside the baseline server and the bare store loop.
#[derive(Parser)]
#[command(name = "bench", args_override_self = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compares the node with the baseline server and the bare store loop: a table on stdout, and with --out the same
    /// as JSON.
    Run(run::Options),
    /// Fan-out, idle load, storms, durable publishes and slow readers, for Fanfare, the baseline and every peer; tables on stdout.
    Peers(run::peers::Options),
    /// Several nodes beside one, a link alone, and false failure detection without CPU to spare; tables on stdout.
    Cluster(run::cluster::Options),
    /// The shared store beside the driver alone, over databases of one node and of three; tables on stdout.
    Store(run::store::Options),
    /// Integrations and queues: cost of an ack with a target, events per second, and isolation from failing targets; tables on stdout.
    Targets(run::targets::Options),
    /// The load generator alone: one workload, its result as one JSON line on stdout.
    #[command(subcommand)]
    Load(load::Workload),
    /// The baseline server: writes a pre-encoded frame into every subscriber's socket, and does nothing else.
    #[command(name = "floor-server")]
    BaselineServer(baseline::Options),
    /// The bare store loop: batches with one fsync each, its result as one JSON line on stdout.
    StoreLoop(store_loop::Options),
    /// A receiver of webhooks that counts, until stdin ends.
    WebhookReceiver,
    /// A publisher to a broker that waits for each confirmation, its result as one JSON line on stdout.
    ConfirmLoop(confirm::Options),
    /// Threads that take all of the CPU that they are given, until stdin ends.
    Burn(burn::Options),
    /// Shares of a profile, read from stdin: perf script -F comm,ip,sym | bench shares
    Shares,
}

fn main() -> ExitCode {
    match dispatch(Arguments::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error}");
            let Some(NotCarried(reason)) = error.downcast_ref() else { return ExitCode::FAILURE };
            println!("{reason}");
            ExitCode::from(NotCarried::EXIT_CODE)
        }
    }
}

fn dispatch(command: Command) -> Result<()> {
    os::make_room_for_files(os::raise_open_files()?);
    match command {
        Command::Run(options) => run::run(&options),
        Command::Peers(options) => run::peers::run(&options),
        Command::Cluster(options) => run::cluster::run(&options),
        Command::Store(options) => run::store::run(&options),
        Command::Targets(options) => run::targets::run(&options),
        Command::Load(workload) => load::print(&workload),
        Command::BaselineServer(options) => baseline::serve(&options),
        Command::StoreLoop(options) => store_loop::print(&options),
        Command::WebhookReceiver => receiver::serve(),
        Command::ConfirmLoop(options) => confirm::print(&options),
        Command::Burn(options) => burn::burn(&options),
        Command::Shares => shares::print(),
    }
}
