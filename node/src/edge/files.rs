//! The open files that client connections may take, and whether there is memory for more of them. Some of them are kept back for HTTP, so that sockets never crowd it out.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::memory::Memory;
use super::socket::Permit;
use crate::model::Limits;
use crate::telemetry::{Limit, OFTEN};

/// Files kept for everything but client connections; half of all where there are few.
const RESERVED_FILES: u64 = 512;
/// The kernel's table of so many open files takes half a MB.
const ROOM_MAX: u64 = 1 << 16;
/// Of an event stream, beside that of its connection.
const STREAM_FILES: usize = 2;
/// One in so many connections may be an event stream, where files are scarce.
const STREAMS_SHARE: usize = 8;
/// One in so many files of clients is kept back for HTTP, up to a bound.
const HTTP_SHARE: usize = 8;
const HTTP_FILES_MAX: usize = 1_024;
/// How long the node counts as full after the system had no file left.
const OUT_OF_FILES: Duration = Duration::from_secs(10);
const OPEN_FILES: &str = "/proc/self/fd";

/// Why a connection is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// There are as many sockets and event streams as may be. HTTP is still served.
    Sockets,
    /// There are as many connections as may be, those kept back for HTTP included.
    Connections,
    /// The system gives the process no further file.
    Files,
    /// Too many connections are on their way to the HTTP side.
    Http,
    /// The memory of the node is nearly used up. HTTP is still served.
    Memory,
}

impl Full {
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

    /// Counts a connection that is refused, and warns of it at most every 10 s.
    pub fn refused(self) {
        refusals(self).increment(1);
        match self {
            Self::Sockets | Self::Connections => Limit::Connections.hit(),
            Self::Memory => Limit::MemoryBytes.hit(),
            Self::Files | Self::Http => {}
        }
        tracing::warn!(target: OFTEN, reason = self.reason(), "a connection was refused: the node is full");
    }
}

fn refusals(full: Full) -> metrics::Counter {
    metrics::counter!("fanfare_connections_refused_total", "reason" => full.reason())
}

/// The files that the process may open, and the client connections that it has open.
#[derive(Debug)]
pub struct ClientFiles {
    allowed: u64,
    sockets_max: usize,
    connections_max: usize,
    streams_max: usize,
    /// Connections of clients, whatever they are.
    connections: Arc<AtomicUsize>,
    /// Sockets and event streams.
    sockets: Arc<AtomicUsize>,
    memory: Arc<Memory>,
    begun: Instant,
    /// When the system last had no file left, in milliseconds since `begun`; 0: never.
    out_of_files_ms: AtomicU64,
}

impl ClientFiles {
    /// Lifts the limit of open files as far as it goes, and makes room for them.
    pub fn open(limits: &Limits) -> Self {
        let allowed = lift_open_files();
        make_room(allowed);
        let files = Self { memory: Memory::open(limits), ..Self::within(allowed, limits) };
        for full in Full::ALL {
            refusals(full).increment(0);
        }
        files.tell();
        files
    }

    pub(super) fn within(allowed: u64, limits: &Limits) -> Self {
        let files = allowed - RESERVED_FILES.min(allowed / 2);
        let files = usize::try_from(files).unwrap_or(usize::MAX);
        let for_http = (files / HTTP_SHARE).min(HTTP_FILES_MAX);
        let rest = files - for_http;
        let streams_max = limits.sse_streams.min(files / STREAMS_SHARE);
        // An event stream counts as a connection, and without its further files it would be refused.
        let fitting = rest - STREAM_FILES * streams_max;
        let sockets_max = match limits.connections {
            0 => fitting,
            wanted => wanted.min(fitting),
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

    /// The limits with as many connections and event streams as there are open files for.
    pub fn limits(&self, limits: &Limits) -> Limits {
        Limits { connections: self.sockets_max, sse_streams: self.streams_max, ..limits.clone() }
    }

    /// A further connection, which may become a socket or stay with HTTP. One thread alone takes them.
    pub(super) fn take_connection(&self) -> Option<Permit> {
        let is_free = self.connections.load(Ordering::Relaxed) < self.connections_max;
        is_free.then(|| Permit::take(&self.connections))
    }

    /// A place for a further socket or event stream, or why there is none.
    pub(super) fn take_socket(&self) -> Result<Permit, Full> {
        if self.memory.is_full() {
            return Err(Full::Memory);
        }
        let permit = Permit::take(&self.sockets);
        let is_free = self.sockets.load(Ordering::SeqCst) <= self.sockets_max;
        if is_free { Ok(permit) } else { Err(Full::Sockets) }
    }

    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub(super) fn is_out_of_files(&self) {
        let now_ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.out_of_files_ms.store(now_ms.max(1), Ordering::Relaxed);
    }

    /// Connections are open that only HTTP may have: each ends with its answer.
    pub(super) fn is_scarce(&self) -> bool {
        self.connections.load(Ordering::Relaxed) > self.sockets_max
    }

    /// A client that comes now may be refused, for want of a place.
    pub fn is_full(&self) -> bool {
        let out_ms = self.out_of_files_ms.load(Ordering::Relaxed);
        let was_out =
            out_ms > 0 && self.begun.elapsed().saturating_sub(Duration::from_millis(out_ms)) < OUT_OF_FILES;
        was_out
            || self.sockets.load(Ordering::Relaxed) >= self.sockets_max
            || self.connections.load(Ordering::Relaxed) >= self.connections_max
    }

    /// Sets the gauges; to be called every few seconds. Before Linux 6.2 the system tells a process how many files it has open
    /// only one by one, so there those of client connections alone count.
    #[expect(clippy::cast_precision_loss, reason = "there are fewer open files than 2^52")]
    pub fn tell(&self) {
        let told = std::fs::metadata(OPEN_FILES).map_or(0, |folder| folder.len());
        let used = if told > 0 { told } else { self.connections.load(Ordering::Relaxed) as u64 };
        metrics::gauge!("fanfare_open_files").set(used as f64);
        metrics::gauge!("fanfare_open_files_max").set(self.allowed as f64);
        metrics::gauge!("fanfare_connections_max").set(self.sockets_max as f64);
    }
}

/// Lets the kernel's table of open files be as large as it may get at once. It grows to twice its size, and since threads share it whoever
/// opens a file waits each time until none of them can be looking at the old one.
#[expect(unsafe_code, reason = "there is no safe call that says which number a file is to have")]
fn make_room(files: u64) {
    let highest = files.clamp(1, ROOM_MAX) - 1;
    // SAFETY: both calls take numbers only, and the second one that of a file that nobody else knows.
    unsafe {
        let file = libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, highest);
        if file >= 0 {
            libc::close(file);
        }
    }
}

/// Says what becomes of a number of connections that is more than the files allow; none: all of them fit.
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
