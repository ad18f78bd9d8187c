//! Side by side: Fanfare, the baseline and the peers under the same load, one after another on the same machine.

mod bars;
mod connection_storms;
mod contender;
mod holding;
mod measure;
mod page;
mod plot;
mod servers;
mod slow;
mod table;
mod workload;

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::bars::Bar;
use super::machine::Machine;
use super::{build_node, check, end, target_folder};
use crate::{Result, os};
use contender::{Contender, ServerPaths};
use measure::{Comparison, Measurements};
use workload::Part;

/// Open files of a node: its limit of 18 000 connections, and the files that it opens beside them.
const OPEN_FILES: u64 = 20_000;

#[derive(Args)]
pub struct Options {
    /// File for all figures, as JSON.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Folder for pictures (SVG) of W1, W2 and w2-groups and for the printed tables (`peers.md`); it is created.
    /// Pictures of parts that were not measured are removed. After a failed measurement nothing is changed.
    #[arg(long)]
    pub plots: Option<PathBuf>,
    /// Node binary to measure; without it the `dist` build of this checkout, built first if it is not fresh.
    #[arg(long)]
    pub node: Option<PathBuf>,
    /// Folder of the peers' binaries; without it that of `make peers`.
    #[arg(long)]
    pub peers: Option<PathBuf>,
    /// Number of repetitions; the tables have the medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Length of each measured part, in seconds; durable publishes and a slow reader have ten at least.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Microseconds that subscribers sleep after each read, so that they do not use the other cores at the same time.
    #[arg(long, default_value_t = 0)]
    pub rest_us: u32,
    /// Greatest number of connections in W3, W4 and W6, to try the command out; a bar that needs more is not judged.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub connections: Option<u32>,
    /// Parts to measure, with commas between them.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Servers to measure, with commas between them; without it those of the published tables.
    #[arg(long, value_enum, value_delimiter = ',')]
    servers: Vec<Contender>,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    contenders: Vec<contender::ServerDescription>,
    measured: Measurements,
    bars: Vec<Bar>,
    failures: Vec<String>,
}

/// Measures and prints the tables. A fault of a peer or of the baseline is reported; a failed measurement is an error,
/// and so is a load that Fanfare did not carry, or a message that it lost, duplicated or delivered out of order.
pub fn run(options: &Options) -> Result<()> {
    os::need_open_files(OPEN_FILES)?;
    let this = env::current_exe()?;
    let target = target_folder(&this)?;
    let peers = options.peers.clone().unwrap_or_else(|| target.join("tools").join("peers"));
    let contenders = options.contenders()?;
    need_peers(&contenders, &peers)?;
    let given = check(options.node.as_deref(), options.out.as_deref())?;
    if let Some(folder) = &options.plots {
        let tried = fs::create_dir_all(folder).and_then(|()| tempfile::tempfile_in(folder));
        tried.map_err(|error| of_plots(folder, error))?;
    }
    let node = given.map_or_else(|| build_node(&this), Ok)?;
    let data = tempfile::Builder::new().prefix("bench-data-").tempdir_in(target)?;
    // Some peers are started in folders of their own, so the path must be absolute.
    let peers = std::path::absolute(peers)?;
    let machine = Machine::look(&node);
    print!("{machine}");
    let places = ServerPaths { bench: this, node, peers, data: data.path().to_owned() };
    let comparison = Comparison { places, contenders, options };
    let described = comparison.described();
    described.iter().for_each(|contender| println!("{contender}"));
    let (measured, mut failures) = comparison.measure();
    let bars = bars::bars(&measured, options.connections);
    let tables = table::of(&measured, &bars, &failures);
    print!("\n{tables}");
    if let Some(folder) = &options.plots
        && !failures.is_empty()
    {
        eprintln!("bench: what failed is no page, so what {} has of before stays", folder.display());
    } else if let Some(folder) = &options.plots {
        let pictures = plot::write(&measured.fixed, folder, &machine.in_short());
        let written =
            pictures.and_then(|drawn| page::write(folder, &machine, &described, &tables).map(|()| drawn));
        match written {
            Ok(pictures) => eprintln!("bench: a page and {pictures} pictures are in {}", folder.display()),
            Err(error) => failures.push(of_plots(folder, error)),
        }
    }
    let report = Report { machine, contenders: described, measured, bars, failures };
    end(&report, options.out.as_deref(), report.failures.len())
}

impl Options {
    fn is_asked(&self, part: Part, contenders: &[Contender]) -> bool {
        let asked = self.only.is_empty() || self.only.contains(&part);
        asked && contenders.iter().any(|contender| part.measures(*contender))
    }

    /// Gives the contenders that have a row. An error names a part that none of the named contenders has.
    fn contenders(&self) -> Result<Vec<Contender>> {
        let mut contenders = Contender::chosen(&self.servers);
        let Some(part) = self.only.iter().find(|part| !self.is_asked(**part, &contenders)) else {
            contenders.retain(|one| Part::value_variants().iter().any(|part| self.is_asked(*part, &[*one])));
            return Ok(contenders);
        };
        let servers: Vec<String> = self.servers.iter().map(name_of).collect();
        let (part, servers) = (name_of(part), servers.join(","));
        Err(format!("--only {part} is measured of none of --servers {servers}").into())
    }
}

fn of_plots(folder: &Path, error: io::Error) -> String {
    format!("--plots {}: {error}", folder.display())
}

/// Gives the name of a value on the command line.
fn name_of(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Checks that the peers' binaries exist. An error names all that are missing.
fn need_peers(contenders: &[Contender], folder: &Path) -> Result<()> {
    let peers: BTreeSet<&str> = contenders.iter().filter_map(|contender| contender.peer()).collect();
    let missing: Vec<&str> = peers.into_iter().filter(|peer| !folder.join(peer).exists()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let (missing, folder) = (missing.join(", "), folder.display());
    let error =
        format!("{missing}: not in {folder}; `make peers` builds them, or measure others with --servers");
    Err(error.into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }

    fn check(arguments: &str) -> Result<Vec<Contender>> {
        Command::try_parse_from(["bench"].into_iter().chain(arguments.split(' ')))?.options.contenders()
    }

    #[test]
    fn only_measured_servers_are_required() {
        assert_eq!(check("--only w5").expect("it has a row"), [Contender::Fanfare]);
        assert!(check("--only w1,w5").expect("they have rows").contains(&Contender::Nats));
    }

    #[test]
    fn workload_without_a_row_is_refused_before_measuring() {
        for arguments in
            ["--only w7", "--servers floor", "--only w5,w7 --servers fanfare", "--only w1 --servers nats"]
        {
            check(arguments).expect(arguments);
        }
        for (arguments, part) in [
            ("--only w7 --servers floor", "w7"),
            ("--only w1,w5 --servers floor,nats", "w5"),
            ("--only w3 --servers fanfare-window-5", "w3"),
        ] {
            let error = check(arguments).expect_err(arguments).to_string();
            assert!(error.contains(&format!("--only {part} ")) && error.contains("--servers "), "{error}");
        }
    }
}
