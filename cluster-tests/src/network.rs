//! A network that a test can cut: each node has a host of its own behind one router.
//!
//! Hosts and router are network namespaces without a name. A namespace ends with its last process, so a killed test
//! leaves nothing behind, and tests do not disturb each other. The test runs in the namespace of the router and reaches
//! every host, whatever is cut.

use std::fs::File;
use std::io::Write as _;
use std::net::Ipv4Addr;
use std::os::fd::AsRawFd as _;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;

use crate::{binary, system};

pub struct Network {
    hosts: AtomicU8,
}

/// A host of the network, for one node.
#[derive(Debug, Clone)]
pub struct Host {
    number: u8,
    namespace: Arc<File>,
}

/// Packets from one host to another that are dropped silently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PacketLoss {
    All,
    /// TCP to this port.
    To(u16),
    /// TCP from this port.
    From(u16),
}

/// A loss of packets that lasts until this is dropped.
#[must_use]
#[derive(Debug)]
pub struct Cut(String);

/// Runs a test within a network of its own. Skipped where namespaces are not allowed, which is a failure in CI.
pub fn isolated(test: impl AsyncFnOnce(Network) + Send + 'static) {
    // A build of the binary may need the network of the machine.
    binary::path();
    let routing = thread::spawn(move || {
        if let Err(error) = system::leave_network() {
            system::not_run(&format!("a network namespace cannot be made, which takes root: {error}"));
            return;
        }
        std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").expect("a network of its own can be set");
        ip("link set lo up");
        // All must run on this thread, since it alone is in the network.
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(test(Network { hosts: AtomicU8::new(0) }));
    });
    if let Err(panic) = routing.join() {
        std::panic::resume_unwind(panic);
    }
}

impl Network {
    /// Adds a host, which reaches the others.
    pub fn host(&self) -> Host {
        let number = self.hosts.fetch_add(1, Ordering::Relaxed) + 1;
        let made = thread::spawn(|| system::leave_network().expect("the test made one itself"));
        let host = Host { number, namespace: Arc::new(made.join().expect("it is made")) };
        let (file, pid) = (host.namespace.as_raw_fd(), std::process::id());
        ip(&format!(
            "link add v{number} type veth peer name eth0 netns /proc/{pid}/fd/{file}
             address add {}/24 dev v{number}
             link set v{number} up",
            router(number)
        ));
        host.within(|| {
            ip(&format!(
                "link set lo up
                 address add {}/24 dev eth0
                 link set eth0 up
                 route add default via {}",
                host.address(),
                router(number)
            ));
        });
        host
    }

    /// Cuts one direction.
    pub fn cut(&self, from: &Host, to: &Host, lost: PacketLoss) -> Cut {
        let what = match lost {
            PacketLoss::All => String::new(),
            PacketLoss::To(port) => format!("ipproto tcp dport {port}"),
            PacketLoss::From(port) => format!("ipproto tcp sport {port}"),
        };
        let rule = format!("iif v{} to {} {what} blackhole", from.number, to.address());
        ip(&format!("rule add {rule}"));
        Cut(rule)
    }

    /// Cuts both directions between `these` and `those`.
    pub fn split(&self, these: &[&Host], those: &[&Host]) -> Vec<Cut> {
        let pairs = these.iter().flat_map(|this| those.iter().map(move |that| (*this, *that)));
        let both = pairs.flat_map(|(this, that)| [(this, that), (that, this)]);
        both.map(|(from, to)| self.cut(from, to, PacketLoss::All)).collect()
    }
}

impl Drop for Cut {
    fn drop(&mut self) {
        ip(&format!("rule delete {}", self.0));
    }
}

impl Host {
    pub fn address(&self) -> Ipv4Addr {
        Ipv4Addr::new(10, 0, self.number, 2)
    }

    /// Runs `act` on the host; all processes that it starts stay there.
    pub(crate) fn within<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        let enter = || {
            system::enter_network(&self.namespace);
            act()
        };
        let done = thread::scope(|scope| scope.spawn(enter).join());
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

fn router(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, number, 1)
}

/// Runs commands of `ip`, one in each line.
fn ip(commands: &str) {
    let mut running = Command::new("ip")
        .args(["-batch", "-"])
        .stdin(Stdio::piped())
        .spawn()
        .expect("`ip` is there (package iproute2)");
    let mut input = running.stdin.take().expect("piped");
    input.write_all(commands.as_bytes()).expect("ip reads");
    drop(input);
    let ended = running.wait().expect("a child process");
    assert!(ended.success(), "ip failed at one of\n{commands}");
}
