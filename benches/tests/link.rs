//! Both ends of a link, in small: all that is sent arrives, with either way to feed it.
#![expect(clippy::unwrap_used, reason = "in a test a failed step is a failed test")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_benches::link::source::Outcome;

const BARE: &str = env!("CARGO_BIN_EXE_bench-bare");

struct Sink {
    process: Child,
    stdout: BufReader<ChildStdout>,
    address: String,
}

impl Sink {
    fn start(key: &Path) -> Self {
        let mut sink = Command::new(BARE);
        sink.arg("link-sink").arg("--cluster-key-file").arg(key);
        let mut process = sink.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(process.stdout.take().unwrap());
        let mut address = String::new();
        stdout.read_line(&mut address).unwrap();
        Self { process, stdout, address: address.trim().to_owned() }
    }

    /// Ends the sink and gives the number of messages that it received.
    fn end(mut self) -> u64 {
        drop(self.process.stdin.take());
        let mut rest = String::new();
        self.stdout.read_to_string(&mut rest).unwrap();
        assert!(self.process.wait().unwrap().success());
        rest.trim().parse().unwrap()
    }
}

fn sent_and_taken(fed: &[&str]) -> (Outcome, u64) {
    let folder = tempfile::tempdir().unwrap();
    let key = folder.path().join("cluster.key");
    std::fs::write(&key, STANDARD.encode([5; 32])).unwrap();
    let sink = Sink::start(&key);
    let mut source = Command::new(BARE);
    source.arg("link-source").arg("--cluster-key-file").arg(&key);
    source.arg("--folder").arg(folder.path().join("source"));
    source.args(["--sink", &sink.address, "--sink-pid", &sink.process.id().to_string(), "--seconds", "1"]);
    let output = source.args(fed).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    (serde_json::from_slice(&output.stdout).unwrap(), sink.end())
}

#[test]
fn peer_link_delivers_every_pre_encoded_message() {
    let (outcome, taken) = sent_and_taken(&["--fed", "encoded"]);
    assert_eq!(outcome.sent, taken);
    assert!(outcome.messages_per_s > 0.0 && outcome.item_bytes > 200);
}

#[test]
fn peer_link_delivers_every_published_message() {
    let (outcome, taken) = sent_and_taken(&["--fed", "published", "--together", "3"]);
    assert_eq!(outcome.sent, taken);
    assert!(outcome.messages_per_s > 0.0 && outcome.item_bytes > 600);
}
