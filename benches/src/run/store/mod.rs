//! The shared store: a node with a database, beside the driver alone.

mod cassandra;
mod reading;
mod writing;

use std::cell::Cell;
use std::env;
use std::path::PathBuf;
use std::process::{self, Command};
use std::thread;

use clap::Args;
use serde::Serialize;

use super::bars::Bar;
use super::machine::Machine;
use super::markdown::{bar_table, failed};
use super::server::Server;
use super::{bare_of, build_node, check, end, target_folder};
use crate::{Result, os};
use cassandra::{Cassandra, Kind};
use reading::Reading;
use writing::{SHAPES, Writing};

const KEYSPACE: &str = "bench";
/// Account of a development directory.
const ACCOUNT: &str = "dev";

#[derive(Args)]
pub struct Options {
    /// File for all figures, as JSON.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Node binary to measure; without it the `dist` build of this checkout, built first if it is not fresh.
    #[arg(long)]
    pub node: Option<PathBuf>,
    /// Binary with the driver alone; without it the `dist` build of this checkout.
    #[arg(long)]
    pub bare: Option<PathBuf>,
    /// Number of repetitions; the tables have the medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Length of each measured part.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Seconds for which each database is written to, and then read from, before it is measured, since it gets faster
    /// with use.
    #[arg(long, default_value_t = 20)]
    pub warm_up: u32,
    /// Databases to measure, with commas between them.
    #[arg(long, value_enum, value_delimiter = ',')]
    databases: Vec<Kind>,
    /// Also measures publishes whose messages have an id each.
    #[arg(long)]
    pub ids: bool,
    /// Gives the database one half of the cores and all other processes the other half, as if it had a machine of its
    /// own.
    #[arg(long, conflicts_with = "points")]
    apart: bool,
    /// Addresses of a running database, `host:port` with commas between them, to use instead of starting one.
    #[arg(long, conflicts_with = "databases", value_parser = points)]
    pub points: Option<String>,
}

fn points(text: &str) -> Result<String> {
    let is_point = |point: &str| {
        let parts = point.rsplit_once(':');
        parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0))
    };
    match text.split(',').find(|point| !is_point(point)) {
        Some(point) => {
            Err(format!("expected a host and a port such as 127.0.0.1:9042, got `{point}`").into())
        }
        None => Ok(text.to_owned()),
    }
}

#[derive(Serialize)]
struct Measurements {
    database: String,
    writing: Vec<Writing>,
    reading: Reading,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    measured: Vec<Measurements>,
    bars: Vec<Bar>,
    failures: Vec<String>,
}

/// Measures and prints the tables. A missed bar is reported; a failed measurement is an error.
pub fn run(options: &Options) -> Result<()> {
    let given = check(options.node.as_deref(), options.out.as_deref())?;
    let this = env::current_exe()?;
    let node = given.map_or_else(|| build_node(&this), Ok)?;
    let bare = bare_of(&this, options.bare.as_deref())?;
    let machine = Machine::look(&node);
    print!("{machine}");
    // The folder is beside the binaries, since the folder for temporary files is memory on some machines.
    let folder = tempfile::Builder::new().prefix("bench-data-").tempdir_in(target_folder(&this)?)?;
    let cores = thread::available_parallelism()?.get();
    if options.apart && cores < 2 {
        return Err("--apart: there is one core".into());
    }
    let (data, prefixes) = (folder.path().to_owned(), Cell::new(0));
    let bench = Bench { this, node, bare, data, options, cores, prefixes };
    let (measured, failures) = bench.measure();
    let bars = measured.iter().flat_map(Measurements::bars).collect::<Vec<_>>();
    let tables: String = measured.iter().map(Measurements::tables).collect();
    print!("\n{tables}{}{}", bar_table(&bars), failed(&failures));
    let report = Report { machine, measured, bars, failures };
    end(&report, options.out.as_deref(), report.failures.len())
}

struct Bench<'a> {
    this: PathBuf,
    node: PathBuf,
    bare: PathBuf,
    data: PathBuf,
    options: &'a Options,
    cores: usize,
    prefixes: Cell<u32>,
}

/// A running database.
struct Database {
    title: String,
    points: String,
    /// Process ids; empty for a database that this program did not start.
    pids: Vec<u32>,
    _own: Option<Cassandra>,
}

impl Database {
    fn add_pids(&self, command: &mut Command) {
        for pid in &self.pids {
            command.args(["--database-pid", &pid.to_string()]);
        }
    }
}

impl Bench<'_> {
    /// Measures all that can be measured, and gives the failures as text.
    fn measure(&self) -> (Vec<Measurements>, Vec<String>) {
        let (mut all, mut failures) = (Vec::new(), Vec::new());
        if let Some(points) = &self.options.points {
            let (title, points) = (points.clone(), points.clone());
            let database = Database { title, points, pids: Vec::new(), _own: None };
            all.push(self.over(&database, &mut failures));
            return (all, failures);
        }
        let named = &self.options.databases;
        let kinds = <Kind as clap::ValueEnum>::value_variants().iter().copied();
        for kind in kinds.filter(|kind| named.is_empty() || named.contains(kind)) {
            eprintln!("bench: Cassandra, {}", kind.title());
            match self.start(kind) {
                Ok(database) => all.push(self.over(&database, &mut failures)),
                Err(error) => failures.push(format!("{}: {error}", kind.title())),
            }
        }
        (all, failures)
    }

    fn start(&self, kind: Kind) -> Result<Database> {
        let (this, apart) = (process::id(), self.options.apart);
        if apart {
            // The database inherits the cores of this process, and must see all of them when it sizes itself at its
            // start.
            os::pin(this, 0..self.cores)?;
        }
        let own = Cassandra::start(kind, &self.data)?;
        let (title, points, pids) = (kind.title(), own.points.clone(), own.pids()?);
        if apart {
            pids.iter().try_for_each(|pid| os::pin(*pid, 0..self.cores / 2))?;
            os::pin(this, self.cores / 2..self.cores)?;
        }
        Ok(Database { title, points, pids, _own: Some(own) })
    }

    fn over(&self, database: &Database, failures: &mut Vec<String>) -> Measurements {
        let Options { repetitions, seconds, warm_up, .. } = *self.options;
        let mut writing: Vec<Writing> = SHAPES.into_iter().map(Writing::new).collect();
        let mut reading = Reading::default();
        let mut record = |what: &str, result: Result<()>| {
            if let Err(error) = result {
                failures.push(format!("{}: {what}: {error}", database.title));
            }
        };
        // A node that starts creates the tables.
        record("the schema", self.node(database).map(drop));
        for shape in SHAPES {
            record("warm-up", writing::bare(shape, self, database, warm_up.div_ceil(2)).map(drop));
        }
        for repetition in 1..=repetitions {
            for writing in &mut writing {
                let title = writing.shape.title();
                eprintln!("bench: {}: {title}, {repetition} of {repetitions}", database.title);
                record(&title, writing.measure(self, database, seconds));
            }
        }
        record("warm-up", Reading::default().measure(self, database, warm_up.div_ceil(2)));
        for repetition in 1..=repetitions {
            eprintln!("bench: {}: pages of history, {repetition} of {repetitions}", database.title);
            record("pages of history", reading.measure(self, database, seconds));
        }
        Measurements { database: database.title.clone(), writing, reading }
    }

    /// Starts a fresh node, alone, with the database as its store.
    fn node(&self, database: &Database) -> Result<Server> {
        let environment = [
            ("FANFARE_STORE", "scylla".to_owned()),
            ("FANFARE_SCYLLA_NODE", database.points.clone()),
            ("FANFARE_SCYLLA_KEYSPACE", KEYSPACE.to_owned()),
        ];
        Server::development(&self.node, &self.data, &environment)
    }

    fn bare(&self, what: &str, database: &Database) -> Command {
        let mut command = Command::new(&self.bare);
        command.args([what, "--points", &database.points, "--keyspace", KEYSPACE]);
        command
    }

    /// Gives a prefix of channel names that no run has written to.
    fn fresh_prefix(&self) -> String {
        self.prefixes.set(self.prefixes.get() + 1);
        format!("loop:{}", self.prefixes.get())
    }
}

/// Gives the table cell of a CPU time; a dash for a database whose processes are not known.
fn microseconds(us: f64) -> String {
    if us > 0.0 { format!("{us:.0}") } else { "–".to_owned() }
}

impl Measurements {
    fn tables(&self) -> String {
        let writing = self.writing.iter().map(|writing| writing.table(&self.database));
        writing.chain([self.reading.table(&self.database)]).collect()
    }

    fn bars(&self) -> Vec<Bar> {
        let writing = self.writing.iter().filter_map(|writing| writing.bar(&self.database));
        writing.chain(self.reading.bar(&self.database)).collect()
    }
}
