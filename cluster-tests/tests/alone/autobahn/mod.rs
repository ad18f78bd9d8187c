//! The original cases of the Autobahn test suite against a node, through a bridge that translates messages.

mod bridge;

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use fanfare_cluster_tests::python::KOSOKU;
use fanfare_cluster_tests::{Node, NodeOptions, http, python};
use serde::Deserialize;
use tokio::process::Command;

use bridge::{Bridge, Messages};

const PATIENCE: Duration = Duration::from_secs(150);
/// Number of cases of the suite, without those of compression.
const CASES: usize = 301;
/// Cases of compression, which a node does not offer.
const EXCLUDED: &str = "12.* 13.*";
/// Cases of large or many binary messages.
const LARGE_BINARY: &str = "9.2.* 9.4.* 9.6.* 9.8.*";
/// Cases of these with a message of 4 MiB in fragments.
const FRAGMENTED: &str = "9.4.*";

#[derive(Deserialize)]
struct Case {
    case: String,
    behavior: String,
    close: String,
    why: String,
    received: String,
    ms: u64,
}

impl Case {
    /// Whether the result is good. Informational cases, which the suite does not judge, count as good.
    fn is_good(&self) -> bool {
        let is_good = |verdict: &str| matches!(verdict, "OK" | "INFORMATIONAL");
        is_good(&self.behavior) && is_good(&self.close)
    }

    fn describe(&self) -> String {
        let Self { case, behavior, close, why, received, ms } = self;
        format!("{case}: {behavior}, closed {close}, in {ms} ms. {why} {received}")
    }
}

async fn run(
    python: &str,
    node: &Node,
    messages: Messages,
    at_once: u32,
    cases: &str,
    excluded: &str,
) -> Vec<Case> {
    let bridge = Bridge::open(node.addr(), &http::basic(&node.key()), messages).await;
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/alone/autobahn/run.py");
    let begun = Instant::now();
    let process = Command::new(python)
        .arg(script)
        .args([&format!("ws://{}", bridge.addr()), &at_once.to_string(), cases, excluded])
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(PATIENCE, process).await.expect("the cases end in time");
    let text = String::from_utf8(output.expect("python runs").stdout).expect("lines of JSON");
    let cases: Vec<Case> = text.lines().map(|line| serde_json::from_str(line).expect("a case")).collect();
    let slowest = cases.iter().max_by_key(|case| case.ms).expect("some case");
    println!("{} cases in {:?}, the slowest {}", cases.len(), begun.elapsed(), slowest.describe());
    cases
}

#[tokio::test(flavor = "multi_thread")]
async fn all_cases_of_autobahn_pass() {
    let python = tokio::task::spawn_blocking(|| python(KOSOKU)).await.expect("fetched");
    let Some(python) = python else { return };
    let options = NodeOptions::default()
        .limit("socket_message_bytes", 64 * 1024 * 1024)
        .limit("socket_message_fragments", 65_536)
        .limit("socket_message_ms", 600_000)
        .limit("pings_per_second", 1_000_000);
    let node = Node::start(options).await;
    let fragmented = Messages::Binary { fragmented_bytes: 4 * 1024 * 1024 };
    let whole = Messages::Binary { fragmented_bytes: 0 };
    let mut cases = Vec::new();
    for (messages, at_once, included, excluded) in [
        (Messages::Text, 16, "*", format!("1.2.* 9.* {EXCLUDED}")),
        (whole, 16, "1.2.*", String::new()),
        (Messages::Text, 4, "9.*", LARGE_BINARY.to_owned()),
        (whole, 4, LARGE_BINARY, FRAGMENTED.to_owned()),
        (fragmented, 4, FRAGMENTED, String::new()),
    ] {
        cases.extend(run(&python, &node, messages, at_once, included, &excluded).await);
    }
    let bad: Vec<String> = cases.iter().filter(|case| !case.is_good()).map(Case::describe).collect();
    assert!(bad.is_empty(), "{} of {} cases: {bad:#?}", bad.len(), cases.len());
    assert_eq!(cases.len(), CASES, "the whole suite was run");
    node.assert_well().await;
}
