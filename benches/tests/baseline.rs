//! The generator against the baseline server, in small: every delivery is found and every publish acked.
#![expect(clippy::unwrap_used, reason = "in a test a failed step is a failed test")]

use std::io::{BufRead as _, BufReader, Read as _};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use fanfare_benches::NotCarried;
use fanfare_benches::load::{
    AttachOutcome, FanoutOutcome, HoldOutcome, IdleOutcome, PublishOutcome, StormOutcome,
};
use socket2::{Domain, Socket, Type};

const BENCH: &str = env!("CARGO_BIN_EXE_bench");

struct BaselineProcess {
    process: Child,
    address: String,
}

impl BaselineProcess {
    fn start() -> Self {
        Self::with_window("0")
    }

    fn with_window(window_ms: &str) -> Self {
        Self::with(&["--window-ms", window_ms])
    }

    fn with(options: &[&str]) -> Self {
        let mut server = Command::new(BENCH);
        server.arg("floor-server").args(options);
        let mut process = server.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let mut address = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut address).unwrap();
        Self { process, address: address.trim().to_owned() }
    }

    /// Gives the reason why the baseline does not carry the workload.
    fn not_carried(&self, workload: &[&str]) -> String {
        let output = self.generator(workload).output().unwrap();
        assert_eq!(output.status.code(), Some(NotCarried::EXIT_CODE.into()));
        String::from_utf8(output.stdout).unwrap()
    }

    fn load<Outcome: serde::de::DeserializeOwned>(&self, workload: &[&str]) -> Outcome {
        let output = self.generator(workload).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl BaselineProcess {
    fn generator(&self, workload: &[&str]) -> Command {
        let mut load = Command::new(BENCH);
        load.arg("load").args(workload).args(["--address", &self.address]);
        load.args(["--server-pid", &self.process.id().to_string()]);
        load
    }
}

impl Drop for BaselineProcess {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let _ = self.process.wait();
    }
}

#[test]
fn a_fan_out_is_counted_to_the_last_delivery() {
    let server = BaselineProcess::start();
    let fanout = ["fanout", "--subscribers", "150", "--rate", "50", "--seconds", "1"];
    let outcome: FanoutOutcome = server.load(&fanout);
    assert_eq!(outcome.deliveries, 150 * 50);
    assert!(!outcome.faults.any(), "{:?}", outcome.faults);
    assert!(outcome.p50_ms > 0.0 && outcome.p50_ms <= outcome.p99_ms);
    assert!(outcome.cost.server_cpu_s > 0.0);
    assert!(outcome.segments >= outcome.deliveries, "{} for deliveries one by one", outcome.segments);
}

#[test]
fn fanout_over_many_channels_counts_deliveries_per_attachment() {
    let fanout =
        ["fanout", "--subscribers", "50", "--channels", "25", "--attached", "4", "--publishers", "3"];
    for server in [BaselineProcess::start(), BaselineProcess::with(&["--threads", "3"])] {
        let outcome: FanoutOutcome =
            server.load(&[&fanout[..], &["--rate", "100", "--seconds", "1"]].concat());
        assert_eq!(outcome.deliveries, 50 * 4 * 100 / 25);
        assert!(!outcome.faults.any(), "{:?}", outcome.faults);
        assert!(outcome.memory.resident_bytes > 0);
    }
}

#[test]
fn non_reading_subscribers_expect_no_deliveries() {
    let fanout = ["fanout", "--subscribers", "20", "--slow", "2", "--rate", "200", "--seconds", "1"];
    let outcome: FanoutOutcome = BaselineProcess::start().load(&[&fanout[..], &["--bytes", "4096"]].concat());
    assert_eq!(outcome.deliveries, 18 * 200);
    assert!(!outcome.faults.any(), "{:?}", outcome.faults);
    // The baseline closes each of the two as soon as a write fails. The time until then depends on the machine.
    let slow = outcome.slow.unwrap();
    assert!(slow.given_up >= 2 && (0.0..1.0).contains(&slow.attached), "{slow:?}");
}

#[test]
fn with_a_window_messages_wait_and_none_is_missed() {
    let fanout = ["fanout", "--subscribers", "50", "--rate", "500", "--seconds", "1"];
    let fanout = [&fanout[..], &["--rest-us", "500"]].concat();
    let outcome: FanoutOutcome = BaselineProcess::with_window("40").load(&fanout);
    assert_eq!(outcome.deliveries, 50 * 500);
    assert!(!outcome.faults.any(), "{:?}", outcome.faults);
    assert!(outcome.p50_ms >= 10.0, "half of a window that opens with a message is at least so long");
}

#[test]
fn idle_connections_are_held() {
    let outcome: IdleOutcome =
        BaselineProcess::start().load(&["idle", "--connections", "250", "--settle-seconds", "1"]);
    assert_eq!(outcome.connections, 250);
    assert!(outcome.holding.wall_s >= 1.0);
    assert_eq!(outcome.received, 0.0);
}

#[test]
fn each_connection_hears_each_heartbeat() {
    let idle = ["idle", "--connections", "50", "--attached", "3", "--settle-seconds", "2"];
    let outcome: IdleOutcome = BaselineProcess::with(&["--heartbeat-ms", "200"]).load(&idle);
    // A late heartbeat delays the next one, and none comes early.
    let most = (outcome.opening.wall_s + outcome.holding.wall_s) / 0.2 + 1.0;
    assert!((2.0..=most).contains(&outcome.received), "{}", outcome.received);
    assert_eq!(outcome.sent, 0.0, "who spoke a moment ago need not say that it lives");
}

#[test]
fn connection_storm_attaches_every_connection() {
    let server = BaselineProcess::start();
    for together in [&[][..], &["--together", "7"]] {
        let storm = ["herd", "--connections", "300", "--sources", "3"];
        let outcome: StormOutcome = server.load(&[&storm[..], together].concat());
        assert_eq!((outcome.connections, outcome.refused), (300, 0), "{:?}", outcome.refusal);
        assert!(outcome.p50_ms > 0.0 && outcome.p99_ms <= outcome.cost.wall_s * 1e3);
    }
}

#[test]
fn refused_connections_are_counted() {
    let mut refusing = BaselineProcess::start();
    // The socket is bound, so that no other process gets the port, and does not listen.
    let not_listening = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    not_listening.bind(&SocketAddr::from(([127, 0, 0, 1], 0)).into()).unwrap();
    refusing.address = not_listening.local_addr().unwrap().as_socket().unwrap().to_string();
    let outcome: StormOutcome = refusing.load(&["herd", "--connections", "20"]);
    assert_eq!(outcome.refused, 20);
    assert!(outcome.refusal.is_some());
}

#[test]
fn all_servers_are_counted() {
    let (server, other) = (BaselineProcess::start(), BaselineProcess::start());
    let pid = other.process.id().to_string();
    let fanout = ["fanout", "--subscribers", "20", "--rate", "50", "--seconds", "1", "--server-pid", &pid];
    let one: FanoutOutcome = server.load(&fanout[..7]);
    let both: FanoutOutcome = server.load(&fanout);
    assert!(both.memory.resident_bytes > one.memory.resident_bytes * 3 / 2, "{}", both.memory.resident_bytes);
}

#[test]
fn publish_at_another_baseline_delivers_nothing_here() {
    let (server, other) = (BaselineProcess::start(), BaselineProcess::start());
    let fanout = ["fanout", "--subscribers", "5", "--rate", "20", "--seconds", "1", "--publish-at"];
    let reason = server.not_carried(&[&fanout[..], &[&other.address]].concat());
    assert!(
        reason.starts_with("0 of 200 deliveries of the warm-up"),
        "floors know nothing of each other: {reason}"
    );
}

#[test]
fn each_attach_is_timed() {
    let outcome: AttachOutcome =
        BaselineProcess::start().load(&["attach", "--connections", "3", "--attached", "7"]);
    assert_eq!(outcome.attaches, 14, "the first connection warms up");
    assert!(outcome.p50_ms > 0.0 && outcome.p50_ms <= outcome.p99_ms);
}

#[test]
fn held_connections_receive_until_stdin_closes() {
    let server = BaselineProcess::start();
    let mut hold = Command::new(BENCH);
    hold.args(["load", "hold", "--connections", "4", "--prefix", "bench:publish:"]);
    hold.args(["--address", &server.address, "--server-pid", &server.process.id().to_string()]);
    let mut hold = hold.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = BufReader::new(hold.stdout.take().unwrap());
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "attached\n");
    let publish = ["publish", "--connections", "4", "--window", "8", "--seconds", "1"];
    let published: PublishOutcome = server.load(&publish);
    drop(hold.stdin.take());
    let mut rest = String::new();
    stdout.read_to_string(&mut rest).unwrap();
    assert!(hold.wait().unwrap().success());
    let held: HoldOutcome = serde_json::from_str(&rest).unwrap();
    assert_eq!(held.channels, 4);
    assert!(held.received as f64 >= published.acked_per_s, "{} of {}", held.received, published.acked_per_s);
}

#[test]
fn pipelined_publishes_are_acked() {
    let publish = ["publish", "--connections", "4", "--window", "8", "--seconds", "1"];
    let outcome: PublishOutcome = BaselineProcess::start().load(&publish);
    assert!(outcome.acked_per_s > 0.0);
}
