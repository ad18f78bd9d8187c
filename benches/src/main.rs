use std::process::ExitCode;

use clap::{Parser, Subcommand};
use fanfare_benches::targets::{confirm, receiver};
use fanfare_benches::{NotCarried, Result, baseline, burn, load, os, run, shares, store_loop};

/// Measures Fanfare beside the transport floor and the bare store loop.
#[derive(Parser)]
#[command(name = "bench", args_override_self = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything, in one go: a table on stdout, and with --out the same as JSON.
    Run(run::Options),
    /// Fan-out, idle connections, herds, durable publishes and slow readers, over Fanfare, the floor and every peer, in one go: tables on stdout, and with --out the same as JSON.
    Peers(run::peers::Options),
    /// Several nodes beside one, a link alone, and how long a node is held for alive; tables on stdout.
    Cluster(run::cluster::Options),
    /// The shared store beside the driver alone, over databases of one node and of three; tables on stdout.
    Store(run::store::Options),
    /// Integrations and queues: what an ack costs with a target, how many events leave, and whether targets that fail hold up others; tables on stdout.
    Targets(run::targets::Options),
    /// The load generator alone: one workload, its result as one JSON line on stdout.
    #[command(subcommand)]
    Load(load::Workload),
    /// The transport floor: writes a pre-encoded frame into every subscriber's socket, and does nothing else.
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
