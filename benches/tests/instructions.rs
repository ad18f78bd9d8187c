//! Instructions of each hot step, against the bounds in `instructions.json`: a step that does more than
//! before is found on any machine, however busy.
//!
//! The test counts in the build of the tests, which is not optimized; `cargo bench` measures time. Counting
//! needs valgrind. Without it nothing is counted, and with CI=true that is a failure. The bounds are those of
//! one release of rustc: with another one the counts are printed and not judged, and with CI=true that is a
//! failure, too.

#[path = "../steps.rs"]
mod steps;

use std::collections::BTreeMap;
use std::env;
use std::error::Error;
use std::process::{Command, ExitCode, Stdio};

use serde::{Deserialize, Serialize};
use steps::Step;

/// Greatest deviation of a step from its bound: C libraries and processors differ in how they copy and hash. A step
/// that costs less gets a new bound, or a later increase would not be found.
const MARGIN: f64 = 0.15;
/// Repetitions of the first of two counts. The difference of the counts contains no start and no end.
const BASE_TIMES: u32 = 50;
const MANY: u32 = 250;
const REPEAT: &str = "--repeat";
const MEASURE: &str = "--measure";
const BOUNDS: &str = include_str!("instructions.json");

/// Bounds of one repetition of each step, by name.
#[derive(Serialize, Deserialize)]
struct Bounds<'a> {
    /// Release of rustc with which the bounds were counted.
    rustc: String,
    #[serde(borrow)]
    steps: BTreeMap<&'a str, u64>,
}

fn main() -> Result<ExitCode, Box<dyn Error>> {
    let arguments: Vec<String> = env::args().collect();
    let words: Vec<&str> = arguments.iter().skip(1).map(String::as_str).collect();
    match words[..] {
        [REPEAT, name, times] => repeat(name, times.parse()?),
        [MEASURE] => {
            let counted: Result<BTreeMap<&str, u64>, _> =
                steps::all().iter().map(|step| Ok::<_, Box<dyn Error>>((step.name, count(step)?))).collect();
            let counted = Bounds { rustc: rustc()?, steps: counted? };
            println!("{}", serde_json::to_string_pretty(&counted)?);
            Ok(ExitCode::SUCCESS)
        }
        // The test runner asks every test binary for its list of tests.
        _ if words.contains(&"--list") => Ok(ExitCode::SUCCESS),
        _ => check(),
    }
}

fn repeat(name: &str, times: u32) -> Result<ExitCode, Box<dyn Error>> {
    let step = steps::all().into_iter().find(|step| step.name == name).ok_or("there is no such step")?;
    let mut once = (step.make)();
    (0..times).for_each(|_| once());
    Ok(ExitCode::SUCCESS)
}

fn check() -> Result<ExitCode, Box<dyn Error>> {
    if !cfg!(target_arch = "x86_64") {
        println!("instructions of the hot steps: NOT COUNTED, the bounds are those of x86-64");
        return Ok(missing());
    }
    if !Command::new("valgrind")
        .arg("--version")
        .stdout(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
    {
        println!(
            "instructions of the hot steps: NOT COUNTED, valgrind is missing (Debian: apt-get install valgrind)"
        );
        return Ok(missing());
    }
    let Bounds { rustc: release, steps: mut bounds } = serde_json::from_str(BOUNDS)?;
    let present = rustc()?;
    let mut findings = Vec::new();
    for step in steps::all() {
        let Some(bound) = bounds.remove(step.name) else {
            findings.push(format!("{}: has no bound", step.name));
            continue;
        };
        let counted = count(&step)?;
        let percent = 100.0 * counted as f64 / bound as f64;
        println!("{}: {counted} instructions, {percent:.0} % of {bound}", step.name);
        findings.extend(judge(counted, bound).map(|finding| format!("{}: {finding}", step.name)));
    }
    findings.extend(bounds.into_keys().map(|name| format!("{name}: a bound without a step")));
    if present != release {
        println!(
            "instructions of the hot steps: NOT JUDGED, the bounds are those of rustc {release}, and this is {present}"
        );
        return Ok(missing());
    }
    if findings.is_empty() {
        println!("instructions of the hot steps: ok, each within {:.0} % of its bound", 100.0 * MARGIN);
        return Ok(ExitCode::SUCCESS);
    }
    println!("\n{}\n", findings.join("\n"));
    println!(
        "A step that has to cost more, or costs less, gets a new bound, from the output of\n  \
         cargo test --workspace --test instructions -- {MEASURE} > benches/tests/instructions.json\n\
         with the reason in the commit."
    );
    Ok(ExitCode::FAILURE)
}

fn missing() -> ExitCode {
    let required = env::var("CI").is_ok_and(|ci| ci == "true");
    if required { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

/// Gives the release of rustc, such as 1.95.
fn rustc() -> Result<String, Box<dyn Error>> {
    let output =
        Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into())).arg("--version").output()?;
    let text = String::from_utf8(output.stdout)?;
    let version = text.split(' ').nth(1).ok_or_else(|| format!("this is no version of rustc: {text}"))?;
    Ok(version.split('.').take(2).collect::<Vec<_>>().join("."))
}

fn judge(counted: u64, bound: u64) -> Option<String> {
    let of_bound = counted as f64 / bound as f64;
    let percent = of_bound * 100.0;
    if of_bound > 1.0 + MARGIN {
        return Some(format!("{counted} instructions, {percent:.0} % of its bound"));
    }
    (of_bound < 1.0 - MARGIN)
        .then(|| format!("{counted} instructions, {percent:.0} % of its bound: renew it"))
}

/// Counts the instructions of one repetition.
fn count(step: &Step) -> Result<u64, Box<dyn Error>> {
    let [base, many] = [BASE_TIMES, MANY].map(|times| instructions(step.name, times));
    Ok(many?.saturating_sub(base?) / u64::from((MANY - BASE_TIMES) * step.times))
}

fn instructions(name: &str, times: u32) -> Result<u64, Box<dyn Error>> {
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["--tool=callgrind", "--callgrind-out-file=/dev/null"]).arg(env::current_exe()?);
    let output = valgrind.args([REPEAT, name, &times.to_string()]).output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let collected =
        text.lines().find_map(|line| line.split_once("Collected : ")).map(|(_, count)| count.trim());
    match collected {
        Some(count) if output.status.success() => Ok(count.parse()?),
        _ => Err(format!("{name}: valgrind ended with {}:\n{text}", output.status).into()),
    }
}
