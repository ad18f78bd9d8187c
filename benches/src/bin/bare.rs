//! Parts of a node and of its database alone, each a process that `bench` starts. The allocator is that of the node,
//! with huge pages if the system has them.

use std::process::ExitCode;
use std::thread::available_parallelism;

use clap::Parser;
use fanfare_benches::{Result, cql, link};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Parts of a node and of its database, to be measured alone.
#[derive(Parser)]
#[command(name = "bench-bare")]
enum Command {
    /// Takes the messages of a link and counts them, until stdin ends.
    LinkSink(link::sink::Options),
    /// Sends over a link as fast as the other end takes it; the result as one JSON line on stdout.
    LinkSource(link::source::Options),
    /// Inserts rows of history with the driver alone; the result as one JSON line on stdout.
    CqlInsert(cql::insert::Options),
    /// Reads rows of history with the driver alone; the result as one JSON line on stdout.
    CqlSelect(cql::select::Options),
}

fn main() -> ExitCode {
    match run(&Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench-bare: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: &Command) -> Result<()> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    if let Command::LinkSink(_) | Command::LinkSource(_) = command {
        // A node has as many threads for its peers.
        builder.worker_threads(available_parallelism()?.get().div_ceil(4));
    }
    let runtime = builder.enable_all().build()?;
    match command {
        Command::LinkSink(options) => link::sink::serve(&runtime, options),
        Command::LinkSource(options) => link::source::print(&runtime, options),
        Command::CqlInsert(options) => cql::insert::print(&runtime, options),
        Command::CqlSelect(options) => cql::select::print(&runtime, options),
    }
}
