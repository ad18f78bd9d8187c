//! Limit of open files for client connections, and of memory for further ones. Some files are reserved for HTTP, so that sockets cannot use
//! up all of them.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::memory::MemoryMonitor;
use super::socket::ConnectionPermit;
use crate::model::Limits;
use crate::telemetry::{Limit, RATE_LIMITED};

/// Files reserved for everything but client connections; half of all files if there are few.
const RESERVED_FILES: u64 = 512;
/// Number of files up to which the kernel's descriptor table is pre-sized. A table of this size takes half a MB.
const FILE_TABLE_MAX: u64 = 1 << 16;
/// Files that an event stream needs beside that of its connection.
const STREAM_FILES: usize = 2;
/// One in this many connections may be an event stream if files are scarce.
const STREAMS_SHARE: usize = 8;
/// One in this many files of clients is reserved for HTTP, up to [`HTTP_FILES_MAX`].
const HTTP_SHARE: usize = 8;
const HTTP_FILES_MAX: usize = 1_024;
/// Time for which the node counts as full after the system had no file left.
const OUT_OF_FILES: Duration = Duration::from_secs(10);
const OPEN_FILES: &str = "/proc/self/fd";

/// The limit for which a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CapacityLimit {
    /// Limit of sockets and event streams reached. HTTP is still served.
    Sockets,
    /// Limit of all connections reached, those reserved for HTTP included.
    Connections,
    /// No file descriptor left in the process or system.
    Files,
    /// Queue of connections for the HTTP side full.
    Http,
    /// Memory of the node nearly used up. HTTP is still served.
    Memory,
}

impl CapacityLimit {
    const ALL: [Self; 5] = [Self::Sockets, Self::Connections, Self::Files, Self::Http, Self::Memory];

    const fn reason(self) -> &'static str {
        match self {
            Self::Sockets => "sockets",
            Self::Connections => "connections",
            Self::Files => "open_files",
            Self::Http => "http",
            Self::Memory => "memory",
        }
    }

    /// Counts and logs a refused connection; the log line is rate-limited.
    pub fn count_refusal(self) {
        refusals(self).increment(1);
        match self {
            Self::Sockets | Self::Connections => Limit::Connections.hit(),
            Self::Memory => Limit::MemoryBytes.hit(),
            Self::Files | Self::Http => {}
        }
        tracing::warn!(target: RATE_LIMITED, reason = self.reason(), "connection refused: the node is full");
    }
}

fn refusals(full: CapacityLimit) -> metrics::Counter {
    metrics::counter!("fanfare_connections_refused_total", "reason" => full.reason())
}

/// Limits of open files and client connections, and the numbers that are open now.
#[derive(Debug)]
pub struct ClientFiles {
    allowed: u64,
    sockets_max: usize,
    connections_max: usize,
    streams_max: usize,
    /// Client connections of any kind.
    connections: Arc<AtomicUsize>,
    /// Sockets and event streams.
    sockets: Arc<AtomicUsize>,
    memory: Arc<MemoryMonitor>,
    begun: Instant,
    /// Time at which the system last had no file left, in milliseconds since `begun`; 0: never.
    out_of_files_ms: AtomicU64,
}

impl ClientFiles {
    /// Raises the process's limit of open files as far as allowed, and pre-sizes the descriptor table.
    pub fn open(limits: &Limits) -> Self {
        let allowed = lift_open_files();
        presize_file_table(allowed);
        let files = Self { memory: MemoryMonitor::open(limits), ..Self::within(allowed, limits) };
        for full in CapacityLimit::ALL {
            refusals(full).increment(0);
        }
        files.set_gauges();
        files
    }

    pub(super) fn within(allowed: u64, limits: &Limits) -> Self {
        let files = allowed - RESERVED_FILES.min(allowed / 2);
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let for_http = (files / HTTP_SHARE).min(HTTP_FILES_MAX);
        let rest = files - for_http;
        let streams_max = limits.sse_streams.min(files / STREAMS_SHARE);
        // An event stream counts as a connection; without its further files it would be refused.
        let fitting = rest - STREAM_FILES * streams_max;
        let sockets_max = match limits.connections {
            0 => fitting,
            configured => configured.min(fitting),
        };
        Self {
            allowed,
            sockets_max,
            connections_max: sockets_max + for_http,
            streams_max,
            connections: Arc::default(),
            sockets: Arc::default(),
            memory: Arc::default(),
            begun: Instant::now(),
            out_of_files_ms: AtomicU64::new(0),
        }
    }

    /// The limits, lowered to as many connections and event streams as there are open files for.
    pub fn limits(&self, limits: &Limits) -> Limits {
        Limits { connections: self.sockets_max, sse_streams: self.streams_max, ..limits.clone() }
    }

    /// Permit for a further connection, which may become a socket or stay with HTTP. Called by one thread only.
    pub(super) fn take_connection(&self) -> Option<ConnectionPermit> {
        let is_free = self.connections.load(Ordering::Relaxed) < self.connections_max;
        is_free.then(|| ConnectionPermit::take(&self.connections))
    }

    /// Permit for a further socket or event stream, or the limit that refuses it.
    pub(super) fn take_socket(&self) -> Result<ConnectionPermit, CapacityLimit> {
        if self.memory.is_full() {
            return Err(CapacityLimit::Memory);
        }
        let permit = ConnectionPermit::take(&self.sockets);
        let is_free = self.sockets.load(Ordering::SeqCst) <= self.sockets_max;
        if is_free { Ok(permit) } else { Err(CapacityLimit::Sockets) }
    }

    pub fn memory(&self) -> &Arc<MemoryMonitor> {
        &self.memory
    }

    pub(super) fn record_out_of_files(&self) {
        let now_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.out_of_files_ms.store(now_ms.max(1), Ordering::Relaxed);
    }

    /// True while connections are open that only HTTP may have: each of them must close after its answer.
    pub(super) fn is_scarce(&self) -> bool {
        self.connections.load(Ordering::Relaxed) > self.sockets_max
    }

    /// True if a new client may be refused for want of a file or connection.
    pub fn is_full(&self) -> bool {
        let out_ms = self.out_of_files_ms.load(Ordering::Relaxed);
        let was_out =
            out_ms > 0 && self.begun.elapsed().saturating_sub(Duration::from_millis(out_ms)) < OUT_OF_FILES;
        was_out
            || self.sockets.load(Ordering::Relaxed) >= self.sockets_max
            || self.connections.load(Ordering::Relaxed) >= self.connections_max
    }

    /// Sets the gauges; must be called every few seconds. Before Linux 6.2 a process can only count its open files one by one, so there
    /// only client connections count.
    #[expect(clippy::cast_precision_loss, reason = "there are fewer open files than 2^52")]
    pub fn set_gauges(&self) {
        let open_files = std::fs::metadata(OPEN_FILES).map_or(0, |folder| folder.len());
        let used = if open_files > 0 { open_files } else { self.connections.load(Ordering::Relaxed) as u64 };
        metrics::gauge!("fanfare_open_files").set(used as f64);
        metrics::gauge!("fanfare_open_files_max").set(self.allowed as f64);
        metrics::gauge!("fanfare_connections_max").set(self.sockets_max as f64);
    }
}

/// Pre-sizes the kernel's descriptor table. Otherwise the table doubles again and again, and as threads share it, each time the opening
/// thread waits until no other thread can be using the old table.
#[expect(unsafe_code, reason = "there is no safe call that says which number a file is to have")]
fn presize_file_table(files: u64) {
    let highest = files.clamp(1, FILE_TABLE_MAX) - 1;
    // SAFETY: both calls take numbers only, and the second one closes a file that no other code knows.
    unsafe {
        let file = libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, highest);
        if file >= 0 {
            libc::close(file);
        }
    }
}

/// Message about a connection limit that is higher than the open files allow; none if it fits.
pub fn lowered_connections(limits: &Limits) -> Option<String> {
    let allowed = open_files_max();
    let fitting = ClientFiles::within(allowed, limits).sockets_max;
    (limits.connections > fitting).then(|| {
        format!(
            "{} is lowered to {fitting}, since the process may open {allowed} files, and event streams need their share",
            limits.connections
        )
    })
}

#[expect(unsafe_code, reason = "there is no safe call for the limit of open files")]
fn open_files_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call gets a valid pointer to a limit that lives here.
    match unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } {
        0 => limit.rlim_max,
        _ => 1024,
    }
}

#[expect(unsafe_code, reason = "there is no safe call for the limit of open files")]
fn lift_open_files() -> u64 {
    let files = open_files_max();
    let limit = libc::rlimit { rlim_cur: files, rlim_max: files };
    // SAFETY: the call gets a valid pointer to a limit that lives here.
    unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    files
}
