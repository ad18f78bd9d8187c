//! Events on their way to webhooks and queues: cost of an ack with a target, events per second, and isolation from
//! failing targets.

mod acks;
mod isolation;
mod rabbitmq;
mod throughput;

use std::env;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::bars::Bar;
use super::companion::Companion;
use super::machine::Machine;
use super::markdown::{bar_table, failed};
use super::server::Server;
use super::{build_node, check, end, target_folder};
use crate::Result;
use crate::targets::receiver::Tally;
use crate::wire::http::Http;
use acks::Acks;
use isolation::Isolation;
use rabbitmq::RabbitMq;
use throughput::Throughput;

/// Key in the directory of the nodes.
const KEY: &str = "secret.bench";

#[derive(Args)]
pub struct Options {
    /// File for all figures, as JSON.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Node binary to measure; without it the `dist` build of this checkout, built first if it is not fresh.
    #[arg(long)]
    pub node: Option<PathBuf>,
    /// Number of repetitions; the tables have the medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Length of each measured part.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// The one part to measure; without it all.
    #[arg(long, value_enum)]
    pub part: Option<Part>,
}

/// Parts of the measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
    Acks,
    Throughput,
    Isolation,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    acks: Acks,
    throughput: Throughput,
    isolation: Isolation,
    bars: Vec<Bar>,
    failures: Vec<String>,
}

/// Measures and prints the tables. A missed bar is reported; a failed measurement is an error.
pub fn run(options: &Options) -> Result<()> {
    let given = check(options.node.as_deref(), options.out.as_deref())?;
    let this = env::current_exe()?;
    let node = given.map_or_else(|| build_node(&this), Ok)?;
    let machine = Machine::look(&node);
    print!("{machine}");
    // The folder is beside the binaries, since the folder for temporary files is memory on some machines.
    let folder = tempfile::Builder::new().prefix("bench-data-").tempdir_in(target_folder(&this)?)?;
    let bench = Bench { data: folder.path().to_owned(), this, node, seconds: options.seconds };
    let (mut acks, mut throughput, mut isolation) =
        (Acks::new(), Throughput::default(), Isolation::default());
    let mut failures = Vec::new();
    for repetition in 1..=options.repetitions {
        for part in [Part::Acks, Part::Throughput, Part::Isolation] {
            if options.part.is_some_and(|only| only != part) {
                continue;
            }
            eprintln!("bench: {part:?}, {repetition} of {}", options.repetitions);
            let result = match part {
                Part::Acks => acks.measure(&bench),
                Part::Throughput => throughput.measure(&bench),
                Part::Isolation => isolation.measure(&bench),
            };
            if let Err(error) = result {
                failures.push(format!("{part:?}: {error}"));
            }
        }
    }
    let measured = |part| options.part.is_none_or(|only| only == part);
    let parts = [
        (Part::Acks, acks.bars(), acks.table()),
        (Part::Throughput, throughput.bars(), throughput.table()),
        (Part::Isolation, isolation.bars(), isolation.table()),
    ];
    let mut bars = Vec::new();
    println!();
    for (_, of_part, table) in parts.into_iter().filter(|(part, ..)| measured(*part)) {
        print!("{table}");
        bars.extend(of_part);
    }
    print!("{}", bar_table(&bars));
    print!("{}", failed(&failures));
    let report = Report { machine, acks, throughput, isolation, bars, failures };
    end(&report, options.out.as_deref(), report.failures.len())
}

struct Bench {
    this: PathBuf,
    node: PathBuf,
    data: PathBuf,
    seconds: u32,
}

/// A receiver of webhooks in a process of its own.
struct Receiver {
    _process: Companion,
    address: SocketAddr,
}

impl Receiver {
    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Events that the receiver has taken since the last call.
    fn tally(&self) -> Result<Tally> {
        let page = Http::connect(self.address, None)?.get("/tally")?.success("the tally")?;
        Ok(serde_json::from_slice(&page)?)
    }
}

impl Bench {
    fn receiver(&self) -> Result<Receiver> {
        let mut command = Command::new(&self.this);
        command.arg("webhook-receiver");
        let process = Companion::start(command)?;
        let address = process.first_line.parse()?;
        Ok(Receiver { _process: process, address })
    }

    /// Starts a fresh node on the embedded store, with an account that has webhooks at these addresses, and queues if
    /// there is a broker.
    fn node(&self, webhooks: &[(&str, String)], broker: Option<&RabbitMq>) -> Result<Server> {
        let hook = |(id, url): &(&str, String)| {
            format!(
                "[[tenants.accounts.integrations]]\nid = \"{id}\"\nkind = \"webhook\"\nurl = \"{url}\"\nsecret = \"s\"\n"
            )
        };
        let hooks: String = webhooks.iter().map(hook).collect();
        let directory = format!(
            "[[tenants]]\nid = \"bench\"\n[[tenants.accounts]]\nid = \"bench\"\n{hooks}\
             [[tenants.accounts.keys]]\nname = \"bench\"\nsecret = \"secret\"\n\
             capability = {{ \"*\" = [\"subscribe\", \"publish\", \"history\", \"amqp-subscribe\"] }}\n"
        );
        let (directory_file, key_file) = (self.data.join("directory.toml"), self.data.join("key"));
        fs::write(&directory_file, directory)?;
        fs::write(&key_file, KEY)?;
        let mut environment = vec![
            ("FANFARE_STORE", "embedded".to_owned()),
            ("FANFARE_DIRECTORY", directory_file.display().to_string()),
            ("FANFARE_WEBHOOK_ALLOW", "127.0.0.1".to_owned()),
        ];
        if let Some(broker) = broker {
            environment.push(("FANFARE_AMQP_URL", broker.amqp.clone()));
            environment.push(("FANFARE_AMQP_MANAGEMENT_URL", broker.management.clone()));
        }
        let mut node = Server::node_with(&self.node, &self.data, &environment)?;
        node.key_file = Some(key_file);
        Ok(node)
    }

    fn api(&self, node: &Server) -> Result<Http> {
        Ok(Http::connect(node.address, Some(format!("Basic {}", STANDARD.encode(KEY))))?)
    }
}
