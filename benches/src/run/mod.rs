//! The whole comparison in one run: the node, the baseline server and the bare loop, one after another on the same
//! machine.

mod admin;
mod bars;
pub mod cluster;
mod companion;
mod durable;
mod generator;
mod machine;
mod markdown;
mod measure;
pub mod peers;
mod report;
mod server;
pub mod store;
mod table;
pub mod targets;

use std::env;
use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf, absolute};
use std::process::Command;

use clap::Args;
use serde::Serialize;

use crate::{Result, os};
use machine::{Machine, first_line};
use measure::Bench;
use report::Report;

/// Checkout that this binary was built from.
const CHECKOUT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// Open files that a process needs: 10 000 connections and some more.
const OPEN_FILES: u64 = 10_500;

#[derive(Args)]
pub struct Options {
    /// File for all figures, as JSON.
    #[arg(long)]
    pub out: Option<PathBuf>,
    /// Node binary to measure; without it the `dist` build of this checkout, built first if it is not fresh.
    #[arg(long)]
    pub node: Option<PathBuf>,
    /// Number of repetitions; the table has the medians.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    pub repetitions: u32,
    /// Length of each measured part.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub seconds: u32,
}

/// Measures and prints the table. A missed bar is reported; a failed measurement is an error, and so is a lost or
/// duplicated message.
pub fn run(options: &Options) -> Result<()> {
    os::need_open_files(OPEN_FILES)?;
    let given = check(options.node.as_deref(), options.out.as_deref())?;
    let this = env::current_exe()?;
    let node = given.map_or_else(|| build_node(&this), Ok)?;
    let machine = Machine::look(&node);
    print!("{machine}");
    // The folder is beside the binaries, since the folder for temporary files is memory on some machines.
    let data = tempfile::Builder::new().prefix("bench-data-").tempdir_in(target_folder(&this)?)?;
    let bench = Bench { this, node, data: data.path().to_owned(), options };
    let (measured, failures) = bench.measure();
    let report = Report::new(machine, measured, failures);
    print!("\n{}", table::of(&report));
    end(&report, options.out.as_deref(), report.failures.len())
}

/// Checks the options before the measurement; an error names the option. Gives the absolute path of the node, since a
/// bare name would be looked up elsewhere.
fn check(node: Option<&Path>, out: Option<&Path>) -> Result<Option<PathBuf>> {
    let node = node.map(|node| whole("--node", node)).transpose()?;
    if let Some(node) = &node
        && !first_line(&node.to_string_lossy(), &["--version"]).starts_with("fanfare ")
    {
        return Err(format!("--node {}: it is no node, by what its --version says", node.display()).into());
    }
    if let Some(out) = out {
        let opened = OpenOptions::new().append(true).create(true).open(out);
        opened.map_err(|error| format!("--out {}: {error}", out.display()))?;
    }
    Ok(node)
}

fn whole(option: &str, file: &Path) -> Result<PathBuf> {
    if !file.is_file() {
        return Err(format!("{option} {}: there is no such file", file.display()).into());
    }
    Ok(absolute(file)?)
}

fn bare_of(this: &Path, given: Option<&Path>) -> Result<PathBuf> {
    given.map_or_else(|| build_bare(this), |bare| whole("--bare", bare))
}

/// Writes the report as JSON. Returns an error if a measurement failed.
fn end(report: &impl Serialize, out: Option<&Path>, failures: usize) -> Result<()> {
    if let Some(out) = out {
        fs::write(out, serde_json::to_string_pretty(report)? + "\n")
            .map_err(|error| format!("--out {}: {error}", out.display()))?;
    }
    match failures {
        0 => Ok(()),
        count => Err(format!("{count} measurements failed").into()),
    }
}

fn build_node(this: &Path) -> Result<PathBuf> {
    build(this, "fanfare", "fanfare", "--node")
}

fn build_bare(this: &Path) -> Result<PathBuf> {
    build(this, "fanfare-benches", "bench-bare", "--bare")
}

/// Cargo profile of a measured binary, and the name of its folder.
const PROFILE: &str = "dist";

/// Builds a `dist` binary of the checkout that this program was built from, whatever the current folder. An error names
/// the option that gives another binary.
fn build(this: &Path, package: &str, binary: &str, option: &str) -> Result<PathBuf> {
    let (manifest, target) = (Path::new(CHECKOUT).join("Cargo.toml"), target_folder(this)?);
    if !manifest.is_file() {
        return Err(format!(
            "{CHECKOUT}: there is no checkout to build {binary} from; name one with {option}"
        )
        .into());
    }
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // Build settings of the current folder do not apply to this build.
    command.current_dir(CHECKOUT);
    command.args(["build", "--profile", PROFILE, "--locked", "-p", package, "--bin", binary]);
    command.arg("--manifest-path").arg(manifest).arg("--target-dir").arg(target);
    match command.status() {
        Ok(built) if built.success() => Ok(target.join(PROFILE).join(binary)),
        Ok(_) => Err(format!("{binary} could not be built; name a built one with {option}").into()),
        Err(error) => {
            Err(format!("cargo, to build {binary}: {error}; name a built one with {option}").into())
        }
    }
}

/// Gives the build's `target` folder, two levels above the binary.
fn target_folder(this: &Path) -> Result<&Path> {
    Ok(this.parent().and_then(Path::parent).ok_or("the binary is in no folder")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_rejects_a_path_that_is_no_node_before_measuring() {
        let another = env::current_exe().expect("the test's binary");
        for (node, reason) in [(another.as_path(), "it is no node"), (Path::new("no-node"), "no such file")] {
            let error = check(Some(node), None).expect_err("nothing to measure").to_string();
            assert!(error.starts_with("--node ") && error.contains(reason), "{error}");
        }
    }
}
