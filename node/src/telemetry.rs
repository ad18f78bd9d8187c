//! Logs, metrics and traces of the process.

mod help;
mod limits;
mod rate_limited;
mod refusals;
mod repeats;
mod store_times;
pub mod traces;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal as _, Write};
use std::panic::PanicHookInfo;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tracing_appender::non_blocking::{ErrorCounter, NonBlockingBuilder, WorkerGuard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::{SubscriberInitExt as _, TryInitError};

pub use limits::Limit;
pub use rate_limited::{RATE_LIMITED, log_held_back};
pub use refusals::{AdminRefusal, PeerRefusal, count_close, count_loss, count_nack, count_tls_failure};
pub use repeats::Repeats;
pub use store_times::{StoreOperation, StoreTimes};
pub use traces::TraceSpan;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// Text if stderr is a terminal, else JSON.
    Auto,
    Text,
    Json,
}

/// Log lines that wait for the reader; further ones are dropped.
const LINES_MAX: usize = 4_096;
const LINES_DROPPED: &str = "fanfare_log_lines_dropped_total";
static DROPPED: OnceLock<ErrorCounter> = OnceLock::new();
/// Lines that the system did not take, for example because the reader is gone.
static UNWRITTEN: AtomicU64 = AtomicU64::new(0);
/// Target of warnings about the configuration at start, which pass every filter.
pub const CONFIGURATION: &str = "fanfare::configuration";

/// Buckets of every histogram of seconds, from a fast disk to a call that no caller waits for any more.
const SECONDS: [f64; 14] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// Counters without labels that exist from the start, with their help texts.
const COUNTERS: [(&str, &str); 8] = [
    (
        LINES_DROPPED,
        "Lines of the log dropped by a reader that is gone or too slow, or that could not be written",
    ),
    ("fanfare_published_messages_total", "Messages acknowledged"),
    ("fanfare_deliveries_total", "Messages handed to a socket"),
    ("fanfare_slow_consumers_total", "Connections ended because they did not read"),
    ("fanfare_connection_limit_refusals_total", "Connections refused for the ceiling of their tenant"),
    ("fanfare_directory_errors_total", "Readings of the directory file that were refused"),
    ("fanfare_peer_queue_overflows_total", "Times that the whole queue of a peer was dropped"),
    ("fanfare_peer_continuity_lost_total", "Times that items of a peer for this node were lost"),
];
const GAUGES: [(&str, &str); 4] = [
    ("fanfare_socket_connections", "Open realtime sockets"),
    ("fanfare_io_uring_shards", "Threads that write to many sockets with one call of the kernel"),
    ("fanfare_directory_generation", "Rises when a changed directory file is applied"),
    ("fanfare_directory_stale", "1 while the directory file was refused and an earlier one is in use"),
];

/// Writes logs and panics to stderr from a thread of their own, so that no caller waits for a reader. `filter` has been accepted by the
/// configuration. Dropping the guard waits for the last lines, about a second at most while stderr is read.
///
/// # Errors
/// The process already has a log subscriber.
pub fn start_logs(filter: &str, format: LogFormat) -> Result<WorkerGuard, TryInitError> {
    let text = match format {
        LogFormat::Auto => std::io::stderr().is_terminal(),
        LogFormat::Text => true,
        LogFormat::Json => false,
    };
    let (writer, end) = NonBlockingBuilder::default()
        .buffered_lines_limit(LINES_MAX)
        .lossy(true)
        .thread_name("log")
        .finish(CountingWriter { lines: io::stderr(), unwritten: &UNWRITTEN });
    DROPPED.set(writer.error_counter()).ok();
    let lines = fmt::layer().with_writer(writer);
    let filter = EnvFilter::new(with_configuration(&with_quiet_drivers(filter)));
    let registry = tracing_subscriber::registry().with(filter).with(rate_limited::RateLimitLayer);
    if text {
        registry.with(lines.with_ansi(std::io::stderr().is_terminal())).try_init()?;
    } else {
        registry.with(lines.json().flatten_event(true).with_current_span(false)).try_init()?;
    }
    std::panic::set_hook(Box::new(log_panic));
    Ok(end)
}

/// Logs a panic. The hook of the standard library would write to stderr itself, and wait for its reader.
fn log_panic(panic: &PanicHookInfo<'_>) {
    let thread = std::thread::current();
    let thread = thread.name().unwrap_or_default();
    let backtrace = Backtrace::capture();
    match backtrace.status() {
        BacktraceStatus::Captured => tracing::error!(thread, %backtrace, "{panic}"),
        _ => tracing::error!(thread, "{panic}"),
    }
}

/// Counts the dropped log lines; to be called every few seconds.
pub fn count_dropped_lines() {
    let dropped = DROPPED.get().map_or(0, ErrorCounter::dropped_lines);
    metrics::counter!(LINES_DROPPED).absolute(dropped as u64 + UNWRITTEN.load(Ordering::Relaxed));
}

/// Measures the process by the system's figures; to be called every few seconds.
pub fn measure_process() {
    metrics_process::Collector::default().collect();
}

/// Counts the lines that are not written. The log writer passes each line in one call of `write_all`.
struct CountingWriter<W> {
    lines: W,
    unwritten: &'static AtomicU64,
}

impl<W: Write> Write for CountingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.lines.write(bytes)
    }

    fn write_all(&mut self, line: &[u8]) -> io::Result<()> {
        self.lines.write_all(line).inspect_err(|_| {
            self.unwritten.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.lines.flush()
    }
}

/// Adds the target of configuration warnings to a filter that would hide them; `off` alone is kept.
fn with_configuration(filter: &str) -> String {
    if filter.eq_ignore_ascii_case("off") {
        filter.to_owned()
    } else {
        format!("{filter},{CONFIGURATION}=warn")
    }
}

/// Adds quieter levels for two drivers. The database driver logs each of its connections as the node does itself. The broker driver logs
/// message contents, and the password at `trace`; the node logs each of its errors.
fn with_quiet_drivers(filter: &str) -> String {
    let parts = || filter.split(',').map(str::trim);
    let is_plain = parts().any(|part| part.eq_ignore_ascii_case("info"));
    let is_named = |driver: &str| parts().any(|part| part.starts_with(driver));
    let scylla = if is_plain && !is_named("scylla") { ",scylla=warn" } else { "" };
    let lapin = if is_named("lapin") { "" } else { ",lapin=off" };
    format!("{filter}{scylla}{lapin}")
}

/// The handle that renders the metrics. The first call installs the recorder of the process, which all its nodes share.
///
/// `run_upkeep` has to be called every few seconds, otherwise histograms grow until the next rendering.
pub fn metrics() -> PrometheusHandle {
    static HANDLE: OnceLock<PrometheusHandle> = OnceLock::new();
    HANDLE.get_or_init(install_recorder).clone()
}

fn install_recorder() -> PrometheusHandle {
    let recorder = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS)
        .expect("there are bounds")
        .build_recorder();
    let handle = recorder.handle();
    if metrics::set_global_recorder(recorder).is_err() {
        tracing::warn!("another metrics recorder is installed: /metrics stays empty");
    }
    for (name, help) in COUNTERS {
        metrics::describe_counter!(name, help);
        metrics::counter!(name).increment(0);
    }
    for (name, help) in GAUGES {
        metrics::describe_gauge!(name, help);
        metrics::gauge!(name).increment(0.0);
    }
    help::describe();
    metrics_process::Collector::default().describe();
    metrics::describe_gauge!("fanfare_build_info", "1, with the version of the node");
    metrics::gauge!("fanfare_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    limits::begin();
    refusals::begin();
    traces::begin_to_count();
    handle
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use parking_lot::Mutex;

    use super::*;

    /// Starts a process that panics while its standard error is a full pipe without a reader.
    #[test]
    fn a_panic_does_not_wait_for_a_reader_of_the_log() {
        const NAME: &str = "telemetry::tests::a_panic_does_not_wait_for_a_reader_of_the_log";
        const PANICS: &str = "FANFARE_TEST_PANICS";
        const PIPE_BYTES: usize = 65_536;
        if std::env::var_os(PANICS).is_some() {
            let _end = start_logs("info", LogFormat::Json).expect("no other test runs here");
            assert!(std::thread::spawn(|| std::panic::panic_any("said to nobody")).join().is_err());
            return;
        }
        let (reader, mut full) = std::io::pipe().expect("a pipe");
        full.write_all(&[b'.'; PIPE_BYTES]).expect("that much is what a pipe holds");
        let mut command = Command::new(std::env::current_exe().expect("its file"));
        command.args(["--exact", NAME, "--nocapture"]).env(PANICS, "1").stdout(Stdio::null()).stderr(full);
        let mut child = command.spawn().expect("a process");
        let deadline = Instant::now() + Duration::from_secs(20);
        let ended = loop {
            match child.try_wait().expect("a child process") {
                Some(ended) => break Some(ended),
                None if Instant::now() >= deadline => break None,
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        child.kill().ok();
        drop(reader);
        assert!(ended.is_some_and(|ended| ended.success()), "{ended:?}");
    }

    #[test]
    fn a_line_that_cannot_be_written_is_counted() {
        static UNWRITTEN: AtomicU64 = AtomicU64::new(0);
        let (reader, lines) = io::pipe().expect("a pipe");
        let mut counting = CountingWriter { lines, unwritten: &UNWRITTEN };
        counting.write_all(b"read\n").expect("there is a reader");
        assert_eq!(UNWRITTEN.load(Ordering::Relaxed), 0);
        drop(reader);
        for lost in 1..=2 {
            counting.write_all(b"unread\n").expect_err("the reader is gone");
            assert_eq!(UNWRITTEN.load(Ordering::Relaxed), lost);
        }
    }

    #[test]
    fn configuration_warnings_pass_every_filter_but_off() {
        for filter in ["fanfre=debug", "error", "fanfare=off", "off,fanfare::edge=debug"] {
            let whole = with_configuration(filter);
            let filter = EnvFilter::builder().parse(&whole).expect("a filter");
            let lines = Arc::new(Mutex::new(Vec::new()));
            let own = Arc::clone(&lines);
            let writer = move || SharedLines(Arc::clone(&own));
            let subscriber =
                tracing_subscriber::registry().with(filter).with(fmt::layer().with_writer(writer));
            tracing::subscriber::with_default(subscriber, || {
                tracing::warn!(target: CONFIGURATION, "told");
            });
            assert!(String::from_utf8_lossy(&lines.lock()).contains("told"), "{whole}");
        }
        assert_eq!(with_configuration("OFF"), "OFF");
    }

    struct SharedLines(Arc<Mutex<Vec<u8>>>);

    impl Write for SharedLines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn drivers_are_quiet_unless_named() {
        assert_eq!(with_quiet_drivers("info"), "info,scylla=warn,lapin=off");
        assert_eq!(with_quiet_drivers("INFO, fanfare=debug"), "INFO, fanfare=debug,scylla=warn,lapin=off");
        for other in ["warn", "debug", "info,scylla=info", "info, scylla::cluster=debug", "fanfare=info"] {
            assert_eq!(with_quiet_drivers(other), format!("{other},lapin=off"));
        }
        assert_eq!(with_quiet_drivers("warn,lapin=debug"), "warn,lapin=debug");
        assert!(EnvFilter::builder().parse(with_quiet_drivers("info")).is_ok());
    }
}
