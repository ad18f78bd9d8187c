//! Several nodes beside one, and a link alone.

mod attach;
mod false_death;
mod fan_out;
mod interest;
mod link;
mod nodes;
mod through;

use std::env;
use std::path::PathBuf;
use std::thread;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::bars::Bar;
use super::machine::Machine;
use super::markdown::{bar_table, failed};
use super::{bare_of, build_node, check, end, target_folder};
use crate::Result;
use attach::Attach;
use false_death::FalseDeath;
use fan_out::FanOut;
use interest::Interest;
use link::Link;
use nodes::BinaryPaths;
use through::PublishPath;

#[derive(Args)]
pub struct Options {
    /// File for all figures, as JSON.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Node binary to measure; without it the `dist` build of this checkout, built first if it is not fresh.
    #[arg(long)]
    pub node: Option<PathBuf>,
    /// Binary with the parts alone; without it the `dist` build of this checkout.
    #[arg(long)]
    pub bare: Option<PathBuf>,
    /// Number of repetitions; the tables have the medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Length of each measured part.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
    /// Parts to measure, with commas between them; without it all but `false-death`.
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
    /// Number of channels with interest when another node starts.
    #[arg(long, default_value_t = 100_000)]
    pub channels: u32,
    /// Length of `false-death`, in minutes; it is measured once.
    #[arg(long, default_value_t = false_death::MINUTES, value_parser = minutes)]
    pub minutes: f64,
    /// Number of threads that burn CPU in `false-death`; without it two for each core.
    #[arg(long)]
    pub burn: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Subscribers on the publishers' node, and on the other node.
    FanOut,
    /// A link alone.
    Link,
    /// Greatest throughput of publishes over two nodes.
    Through,
    /// Attaches to channels without interest.
    Attach,
    /// A new node beside one with very many channels.
    Interest,
    /// Nodes without CPU to spare, for minutes.
    FalseDeath,
}

#[derive(Serialize, Default)]
struct Measurements {
    fan_outs: Vec<FanOut>,
    links: Vec<Link>,
    through: Vec<PublishPath>,
    attach: Option<Attach>,
    interest: Option<Interest>,
    false_death: Option<FalseDeath>,
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    measured: Measurements,
    bars: Vec<Bar>,
    failures: Vec<String>,
}

/// Measures and prints the tables. A missed bar is reported; a failed measurement is an error, and so is a message that
/// was lost, duplicated or delivered out of order.
pub fn run(options: &Options) -> Result<()> {
    let given = check(options.node.as_deref(), options.out.as_deref())?;
    let this = env::current_exe()?;
    let node = given.map_or_else(|| build_node(&this), Ok)?;
    let bare = bare_of(&this, options.bare.as_deref())?;
    let machine = Machine::look(&node);
    print!("{machine}");
    let data = tempfile::Builder::new().prefix("bench-data-").tempdir_in(target_folder(&this)?)?;
    let places = BinaryPaths { bench: this, bare, node, data: data.path().to_owned() };
    let (measured, failures) = Bench { places, options }.measure();
    let bars = measured.bars();
    print!("\n{}{}{}", measured.tables(), bar_table(&bars), failed(&failures));
    let report = Report { machine, measured, bars, failures };
    end(&report, options.out.as_deref(), report.failures.len())
}

struct Bench<'a> {
    places: BinaryPaths,
    options: &'a Options,
}

impl Bench<'_> {
    /// Measures all that can be measured, and gives the failures as text.
    fn measure(&self) -> (Measurements, Vec<String>) {
        let Self { places, options } = self;
        let (mut measured, mut failures) = (Measurements::default(), Vec::new());
        if self.asked(Part::FanOut) {
            for rate in fan_out::DELIVERIES_PER_S {
                let mut fan_out = FanOut::new(rate);
                let title = fan_out.title();
                self.repeat(&title, &mut failures, || fan_out.measure(places, options.seconds));
                failures.extend(fan_out.faults());
                measured.fan_outs.push(fan_out);
            }
        }
        if self.asked(Part::Link) {
            let mut links = Link::all();
            self.repeat("one link", &mut failures, || {
                links.iter_mut().try_for_each(|link| link.measure(places, options.seconds))
            });
            measured.links = links;
        }
        if self.asked(Part::Through) {
            let mut through = PublishPath::all();
            self.repeat("publishes through two nodes", &mut failures, || {
                through.iter_mut().try_for_each(|through| through.measure(places, options.seconds))
            });
            measured.through = through;
        }
        if self.asked(Part::Attach) {
            let attach = measured.attach.insert(Attach::default());
            self.repeat("attaches", &mut failures, || attach.measure(places));
        }
        if self.asked(Part::Interest) {
            let interest = measured.interest.insert(Interest::new(options.channels));
            self.repeat("a node that comes", &mut failures, || interest.measure(places));
        }
        if options.only.contains(&Part::FalseDeath) {
            let cores = thread::available_parallelism().map_or(1, usize::from);
            match FalseDeath::measure(places, options.minutes, options.burn.unwrap_or(2 * cores)) {
                Ok(false_death) => measured.false_death = Some(false_death),
                Err(error) => failures.push(format!("false deaths: {error}")),
            }
        }
        (measured, failures)
    }

    fn asked(&self, part: Part) -> bool {
        self.options.only.is_empty() || self.options.only.contains(&part)
    }

    fn repeat(&self, title: &str, failures: &mut Vec<String>, mut once: impl FnMut() -> Result<()>) {
        for repetition in 1..=self.options.repetitions {
            eprintln!("bench: {title}, {repetition} of {}", self.options.repetitions);
            if let Err(error) = once() {
                failures.push(format!("{title}: {error}"));
            }
        }
    }
}

impl Measurements {
    fn tables(&self) -> String {
        let fan_outs = self.fan_outs.iter().map(FanOut::table);
        let links = (!self.links.is_empty()).then(|| link::table(&self.links));
        let through = self.through.iter().map(PublishPath::table);
        let attach = self.attach.as_ref().map(Attach::table);
        let interest = self.interest.as_ref().map(Interest::table);
        let false_death = self.false_death.as_ref().map(FalseDeath::table);
        fan_outs.chain(links).chain(through).chain(attach).chain(interest).chain(false_death).collect()
    }

    fn bars(&self) -> Vec<Bar> {
        let fan_outs = self.fan_outs.iter().flat_map(FanOut::bars);
        let attach = self.attach.as_ref().and_then(Attach::bar);
        let false_death = self.false_death.as_ref().map(FalseDeath::bar);
        fan_outs.chain(link::bars(&self.links)).chain(attach).chain(false_death).collect()
    }
}

fn minutes(text: &str) -> std::result::Result<f64, &'static str> {
    text.parse().ok().filter(|minutes: &f64| minutes.is_finite() && *minutes > 0.0).ok_or("a number above 0")
}
