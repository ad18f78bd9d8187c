//! A TCP load balancer (HAProxy) in front of nodes, with checks of their readiness.

use std::fmt::Write as _;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UnixStream;

use crate::{Node, SOON, system, wait_until};

const PROGRAM: &str = "haproxy";

/// A balancer in a process of its own. A new connection goes to the node with the fewest. Dropping it ends it.
pub struct Balancer {
    addr: SocketAddr,
    socket: PathBuf,
    process: Child,
    _folder: TempDir,
}

impl Balancer {
    /// Starts a balancer in front of `nodes`, and waits until it finds all of them ready. Gives `None` if
    /// HAProxy is missing, which is a failure in CI.
    pub async fn start(nodes: &[Node]) -> Option<Self> {
        Self::start_with(nodes, "").await
    }

    /// Starts a balancer as [`Balancer::start`] does, with further words for each server, such as `send-proxy-v2`.
    pub async fn start_with(nodes: &[Node], server: &str) -> Option<Self> {
        let is_there = Command::new(PROGRAM).arg("-v").stdout(Stdio::null()).status().is_ok();
        if !is_there {
            system::not_run(&format!("{PROGRAM} is not here"));
            return None;
        }
        let folder = tempfile::tempdir().expect("a temporary folder");
        let (file, socket) = (folder.path().join("haproxy.cfg"), folder.path().join("haproxy.sock"));
        // The balancer gets a socket that listens already, so that no other process can take its port.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("bound");
        let mut text = format!(
            "global\n  stats socket {} mode 600 level admin\n  maxconn 2000\n\
             defaults\n  mode tcp\n  timeout connect 1s\n  timeout client 1h\n  timeout server 1h\n  timeout check 2s\n  \
             retries 3\n  option redispatch 1\n\
             listen clients\n  bind fd@{}\n  balance leastconn\n  option httpchk GET /ready\n  \
             default-server check inter 200ms fall 1 rise 1\n",
            socket.display(),
            listener.as_raw_fd(),
        );
        for (index, node) in nodes.iter().enumerate() {
            let (clients, admin) = (node.addr(), node.admin());
            writeln!(text, "  server n{index} {clients} addr {} port {} {server}", admin.ip(), admin.port())
                .expect("a string takes all text");
        }
        std::fs::write(&file, text).expect("the folder is writable");
        let mut command = Command::new(PROGRAM);
        command.arg("-q").arg("-db").arg("-f").arg(&file).stdin(Stdio::null());
        system::hand_down(&mut command, listener.as_raw_fd());
        let process = command.spawn().expect("it was there just now");
        let balancer = Self { addr, socket, process, _folder: folder };
        for index in 0..nodes.len() {
            balancer.wait_until_ready(index).await;
        }
        Some(balancer)
    }

    /// Gives the address for clients.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn url(&self) -> String {
        format!("ws://{}", self.addr)
    }

    /// Sends connections to the present address of a restarted node, and waits until it is ready for the balancer.
    pub async fn follow(&self, index: usize, node: &Node) {
        let (clients, admin) = (node.addr(), node.admin());
        let at = |addr: SocketAddr| format!("{} port {}", addr.ip(), addr.port());
        let server = format!("set server clients/n{index}");
        self.ask(&format!("{server} addr {}", at(clients))).await.expect("it runs");
        self.ask(&format!("{server} check-addr {}", at(admin))).await.expect("it runs");
        self.wait_until_ready(index).await;
    }

    /// Whether the node of this index gets connections.
    pub async fn is_ready(&self, index: usize) -> bool {
        let Some(servers) = self.ask("show stat -1 4 -1").await else { return false };
        let name = format!("n{index}");
        let mut rows = servers.lines().map(|row| row.split(',').collect::<Vec<_>>());
        let columns = rows.next().unwrap_or_default();
        let Some(status) = columns.iter().position(|column| *column == "status") else { return false };
        rows.any(|row| row.get(1) == Some(&&*name) && row.get(status) == Some(&"UP"))
    }

    pub async fn wait_until_ready(&self, index: usize) {
        wait_until(SOON, "the balancer to find the node ready", async || self.is_ready(index).await).await;
    }

    /// Sends a command to the balancer; `None` while it does not run.
    async fn ask(&self, command: &str) -> Option<String> {
        let mut stream = UnixStream::connect(&self.socket).await.ok()?;
        stream.write_all(format!("{command}\n").as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.ok()?;
        Some(answer)
    }
}

impl Drop for Balancer {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
