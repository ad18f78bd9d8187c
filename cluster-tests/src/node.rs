//! One node: started, killed, stalled, and restarted on the same data.

mod log;

use std::io::{PipeReader, PipeWriter, Write as _};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;
use tempfile::TempDir;

use log::Log;

use crate::network::Host;
use crate::{Directory, Response, binary, http, system, wait_for, wait_until};

const START_MAX: Duration = Duration::from_secs(60);
const STOP_MAX: Duration = Duration::from_secs(40);
/// Admin token of nodes whose operators are on another machine.
const ADMIN_TOKEN: &str = "a-token-of-the-tests-and-of-nobody-else";
/// Stall that is long enough for peers to declare the node down.
const PAUSE_MIN: Duration = Duration::from_secs(2);
const OPEN_FILES: u64 = 8192;

/// Options of a node's start. Without a directory the node makes its own development account and key.
#[derive(Debug, Clone, Default)]
pub struct NodeOptions {
    directory: Option<Directory>,
    key: Option<String>,
    environment: Vec<(String, String)>,
    host: Option<Host>,
    open_files: Option<u64>,
    is_unread: bool,
}

impl NodeOptions {
    /// Uses a directory file; `key` is what [`Node::key`] gives.
    pub fn directory(mut self, directory: Directory, key: &str) -> Self {
        self.directory = Some(directory);
        self.key = Some(key.into());
        self
    }

    /// Sets a limit by its name in the configuration, `heartbeat_ms` for example.
    pub fn limit(self, name: &str, value: u64) -> Self {
        let name = format!("FANFARE_LIMITS_{}", name.to_uppercase());
        self.environment(&name, &value.to_string())
    }

    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.into(), value.into()));
        self
    }

    /// Limits the open files of the node to this number.
    pub fn open_files(mut self, files: u64) -> Self {
        self.open_files = Some(files);
        self
    }

    /// Connects stdout and stderr to a full pipe without a reader.
    pub fn unread(mut self) -> Self {
        self.is_unread = true;
        self
    }

    /// Runs the node on that host, and listens on its address.
    pub fn on(mut self, host: &Host) -> Self {
        self.host = Some(host.clone());
        self
    }
}

/// A node in a process of its own. Dropping it kills it and removes its data.
pub struct Node {
    options: NodeOptions,
    // The process is declared first, so that it ends before its data is removed.
    process: Process,
    data: TempDir,
    addresses: Addresses,
    log: Log,
    /// Time at which the node was last stalled.
    paused: Mutex<Option<Instant>>,
}

/// Content of the file `node.json` of a running node.
#[derive(Deserialize)]
struct Addresses {
    pid: u32,
    listen: SocketAddr,
    admin: SocketAddr,
    gossip: Option<SocketAddr>,
    peer: Option<SocketAddr>,
}

impl Node {
    /// Starts a node on fresh data and waits until it is ready.
    pub async fn start(options: NodeOptions) -> Self {
        Self::start_within(START_MAX, options).await
    }

    /// Starts a node with another timeout. After it the node is killed, its log is shown, and the test fails.
    pub async fn start_within(deadline: Duration, options: NodeOptions) -> Self {
        let (data, log, mut process) = Self::spawn(&options);
        let addresses = process.ready(deadline, data.path()).await;
        Self { options, process, data, addresses, log, paused: Mutex::default() }
    }

    /// Starts a node that is expected to end by itself. Gives its exit status and its output.
    pub async fn start_in_vain(options: NodeOptions) -> (ExitStatus, String) {
        let (_data, log, mut process) = Self::spawn(&options);
        let status = process.ended().await;
        wait_for(crate::SOON, "all that the node wrote", async || log.is_whole().then_some(())).await;
        (status, log.text())
    }

    /// Starts two nodes at once, one of which is expected to end by itself. Gives the other one, and the exit status
    /// and output of the ended one.
    pub async fn start_one_of(options: [NodeOptions; 2]) -> (Self, ExitStatus, String) {
        let mut nodes = options.map(|options| {
            let (data, log, process) = Self::spawn(&options);
            (options, data, log, process)
        });
        let (ended, status) = wait_for(STOP_MAX, "one of the nodes to stop", async || {
            let mut each = nodes.iter_mut().enumerate();
            each.find_map(|(at, (.., process))| {
                Some((at, process.child.try_wait().expect("a child process")?))
            })
        })
        .await;
        let [first, second] = nodes;
        let (stays, ends) = if ended == 0 { (second, first) } else { (first, second) };
        let log = ends.2;
        wait_for(crate::SOON, "all that the node wrote", async || log.is_whole().then_some(())).await;
        let (options, data, own, mut process) = stays;
        let addresses = process.ready(START_MAX, data.path()).await;
        (Self { options, process, data, addresses, log: own, paused: Mutex::default() }, status, log.text())
    }

    fn spawn(options: &NodeOptions) -> (TempDir, Log, Process) {
        system::raise_open_files(OPEN_FILES);
        let data = tempfile::tempdir().expect("a temporary folder");
        if let Some(directory) = &options.directory {
            std::fs::write(data.path().join("directory.toml"), directory.toml())
                .expect("the data folder is writable");
        }
        let log = Log::default();
        let process = Process::spawn(options, data.path(), &log);
        (data, log, process)
    }

    /// Gives the address for clients.
    pub fn addr(&self) -> SocketAddr {
        self.addresses.listen
    }

    /// Gives the address of the admin listener.
    pub fn admin(&self) -> SocketAddr {
        self.addresses.admin
    }

    /// Gives the gossip address, for other nodes of its cluster.
    pub fn gossip(&self) -> Option<SocketAddr> {
        self.addresses.gossip
    }

    /// Gives the peer address, for other nodes of its cluster.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.addresses.peer
    }

    pub fn url(&self) -> String {
        format!("ws://{}", self.addr())
    }

    pub fn data_dir(&self) -> &Path {
        self.data.path()
    }

    /// Gives the host of a node that was started on one.
    pub fn host(&self) -> &Host {
        self.options.host.as_ref().expect("it was started on a host")
    }

    pub fn pid(&self) -> u32 {
        self.process.child.id()
    }

    /// Gives the key of the directory, or of the development account.
    pub fn key(&self) -> String {
        if let Some(key) = &self.options.key {
            return key.clone();
        }
        let text = std::fs::read_to_string(self.data.path().join("dev-key"))
            .expect("a development node has a dev-key");
        text.trim().into()
    }

    /// Gives the resident memory, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        system::resident_bytes(self.pid())
    }

    /// Gives the greatest resident memory so far, in bytes.
    pub fn peak_resident_bytes(&self) -> u64 {
        system::peak_resident_bytes(self.pid())
    }

    /// Gives the number of times that the threads of this name were woken.
    pub fn woken(&self, name: &str) -> u64 {
        system::woken(self.pid(), name)
    }

    /// Forbids the node to open any file beyond its highest one. Gives the former limit, for [`Node::allow_files`].
    pub fn allow_no_further_file(&self) -> u64 {
        system::limit_open_files_of(self.pid(), system::highest_file(self.pid()) + 1)
    }

    pub fn allow_files(&self, files: u64) {
        system::limit_open_files_of(self.pid(), files);
    }

    /// Gives the last lines that the node wrote to its standard error and output.
    pub fn log(&self) -> String {
        self.log.text()
    }

    /// Gives the value of a metric in `/metrics`; its name ends with its labels if it has any. 0 if the page does not
    /// have it.
    pub async fn metric(&self, name: &str) -> f64 {
        metric(&http::request(self.admin(), "GET", "/metrics", &[], "").await, name).unwrap_or(0.0)
    }

    /// Gives several metrics of one page.
    pub async fn metrics<const N: usize>(&self, names: [&str; N]) -> [f64; N] {
        let page = http::request(self.admin(), "GET", "/metrics", &[], "").await;
        names.map(|name| metric(&page, name).unwrap_or(0.0))
    }

    /// Sends a request of an operator, with the token of the data folder.
    pub async fn operate(&self, method: &str, path: &str) -> Response {
        let token = std::fs::read_to_string(self.data.path().join("admin-token"));
        let bearer = format!("Bearer {}", token.expect("a node on loopback has made a token").trim());
        http::request(self.admin(), method, path, &[("authorization", &bearer)], "").await
    }

    /// Fails the test if any thread of the node has panicked.
    pub fn assert_no_panic(&self) {
        assert!(!self.log.panicked(), "the node panicked:\n{}", self.log());
    }

    /// Fails the test if the node does not run, does not answer or has panicked.
    pub async fn assert_well(&self) {
        let health = http::request(self.addr(), "GET", "/health", &[], "").await;
        assert_eq!((health.status, &health.body[..]), (200, &b"ok"[..]), "{}", self.log());
        self.assert_no_panic();
    }

    /// Ends the node with SIGKILL, and waits until it is gone.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Asks the node to stop with SIGTERM.
    pub fn terminate(&self) {
        system::terminate(self.pid());
    }

    /// Asks the node to stop with SIGTERM, and waits until it has.
    pub async fn stop(&mut self) -> ExitStatus {
        self.terminate();
        self.ended().await
    }

    /// Waits until the node has stopped.
    pub async fn ended(&mut self) -> ExitStatus {
        self.process.ended().await
    }

    /// Sends SIGUSR1 and SIGUSR2, which have no effect on a node.
    pub fn signal_in_vain(&self) {
        system::signal_in_vain(self.pid());
    }

    /// Stalls the node: no thread of it runs when this returns. [`Node::resume`] ends the stall.
    pub fn pause(&self) {
        system::pause(self.pid());
        let end = Instant::now() + crate::SOON;
        while !system::is_stopped(self.pid()) {
            assert!(Instant::now() < end, "the node does not stand still");
            thread::sleep(Duration::from_millis(1));
        }
        *self.paused.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    pub fn resume(&self) {
        system::resume(self.pid());
    }

    /// Waits until the stall is long enough for peers to declare the node down.
    pub async fn until_stalled_for_long(&self) {
        let paused = *self.paused.lock().unwrap_or_else(PoisonError::into_inner);
        let paused = paused.expect("it stands still");
        wait_until(crate::SOON, "the pause to be long", async || paused.elapsed() > PAUSE_MIN).await;
    }

    /// Ends a stall that is long enough for peers to declare the node down, and waits until the node has restarted in
    /// place `times` times.
    pub async fn resume_until_restarted(&self, times: u64) {
        self.until_stalled_for_long().await;
        self.resume();
        self.until_restarted(times).await;
    }

    /// Waits until the node has restarted in place `times` times and is ready. It keeps its addresses and loses its
    /// clients.
    pub async fn until_restarted(&self, times: u64) {
        let begun = wait_for(START_MAX, "the node to begin anew", async || {
            let ask = async |path| http::try_request(self.admin(), "GET", path, &[], "").await.ok();
            let begun = metric(&ask("/metrics").await?, "fanfare_runs_begun_anew_total")? as u64;
            (begun >= times && ask("/ready").await?.status == 200).then_some(begun)
        })
        .await;
        assert_eq!(begun, times, "it began anew more often than it stood still:\n{}", self.log());
    }

    /// Replaces the file of the directory, which the node notices by itself.
    pub fn replace_directory(&self, directory: &Directory) {
        let new = self.data.path().join("directory.toml.new");
        std::fs::write(&new, directory.toml()).expect("the data folder is writable");
        std::fs::rename(new, self.data.path().join("directory.toml")).expect("the data folder is writable");
    }

    /// Sets an environment variable for the next start.
    pub fn set_environment(&mut self, name: &str, value: &str) {
        self.options.environment.push((name.into(), value.into()));
    }

    /// Starts the node again on the same data, after [`Node::kill`] or [`Node::stop`]. Its addresses change, unless it
    /// has a host.
    pub async fn restart(&mut self) {
        self.kill();
        self.process = Process::spawn(&self.options, self.data.path(), &self.log);
        self.addresses = self.process.ready(START_MAX, self.data.path()).await;
    }
}

/// Parses the value of one metric.
fn metric(page: &Response, name: &str) -> Option<f64> {
    let text = String::from_utf8_lossy(&page.body);
    let values = text.lines().filter_map(|line| {
        let rest = line.strip_prefix(name)?;
        let value = rest.strip_prefix(' ').or_else(|| Some(rest.strip_prefix('{')?.rsplit_once("} ")?.1))?;
        Some(value.parse::<f64>().expect("a metric is a number"))
    });
    values.reduce(|sum, value| sum + value)
}

/// One process of the node. Dropping it ends it, and shows its output if the test has failed.
struct Process {
    child: Child,
    log: Log,
}

impl Process {
    fn spawn(options: &NodeOptions, data: &Path, log: &Log) -> Self {
        Self { child: spawn(options, data, log), log: log.clone() }
    }

    fn kill(&mut self) {
        // The process may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    async fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_for(STOP_MAX, "the node to stop", async || child.try_wait().expect("a child process")).await
    }

    async fn ready(&mut self, deadline: Duration, data: &Path) -> Addresses {
        let file = data.join("node.json");
        wait_for(deadline, "the node to be ready", async || {
            let ended = self.child.try_wait().expect("a child process");
            assert!(ended.is_none(), "the node ended with {ended:?}");
            let text = std::fs::read_to_string(&file).ok()?;
            let addresses: Addresses = serde_json::from_str(&text).ok()?;
            if addresses.pid != self.child.id() {
                return None;
            }
            let ready = http::try_request(addresses.admin, "GET", "/ready", &[], "").await.ok()?;
            (ready.status == 200).then_some(addresses)
        })
        .await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        if thread::panicking() {
            eprintln!("--- log of the node ---\n{}", self.log.text());
        }
    }
}

fn spawn(options: &NodeOptions, data: &Path, log: &Log) -> Child {
    let mut command = Command::new(binary::path());
    // On a host of its own the node keeps its ports over restarts.
    let [listen, admin] = [8080, 8081].map(|port| match &options.host {
        Some(host) => format!("{}:{port}", host.address()),
        None => "127.0.0.1:0".to_owned(),
    });
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FANFARE_") {
            command.env_remove(name);
        }
    }
    // The disk of a busy machine may take seconds. Only tests with their own store or disk check its latency.
    let has_its_own = |(name, _): &(String, String)| name == "FANFARE_STORE" || name == "LD_PRELOAD";
    if !options.environment.iter().any(has_its_own) {
        command.env("FANFARE_LIMITS_STORE_WAIT_MS", "10000");
    }
    command.arg("serve");
    if options.host.is_some() {
        let token = data.join("admin-token");
        std::fs::write(&token, ADMIN_TOKEN).expect("the data folder is writable");
        command.arg("--admin-token-file").arg(token);
    }
    command
        .args(["--listen", &listen, "--admin-listen", &admin, "--data-dir"])
        .arg(data)
        .envs(options.environment.iter().map(|(name, value)| (name, value)))
        .current_dir(data)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let unread = options.is_unread.then(full_pipe);
    if let Some((_, full)) = &unread {
        let end = || full.try_clone().expect("a pipe");
        command.stdout(end()).stderr(end());
    }
    if let Some(files) = options.open_files {
        system::limit_open_files(&mut command, files);
    }
    let mut start = || command.spawn().expect("the node can be started");
    let mut process = match &options.host {
        Some(host) => host.within(start),
        None => start(),
    };
    match unread {
        // The reader stays open, since writes to a pipe with a closed reader fail at once instead of blocking.
        Some((reader, _)) => log.hold(reader),
        None => log.follow(process.stderr.take().expect("piped")),
    }
    process
}

/// Both ends of a full pipe.
fn full_pipe() -> (PipeReader, PipeWriter) {
    const PIPE_BYTES: usize = 65_536;
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    writer.write_all(&[b'.'; PIPE_BYTES]).expect("that much is what a pipe holds");
    (reader, writer)
}

/// Waits until the memory of a node is small again after hostile input.
pub async fn wait_until_small(node: &Node, resident_bytes_max: u64) {
    let what = format!("the node to hold less than {resident_bytes_max} bytes");
    wait_until(crate::SOON, &what, async || node.resident_bytes() < resident_bytes_max).await;
}
