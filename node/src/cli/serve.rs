//! `fanfare serve`: a node from its start to the end of its drain.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::runtime::Handle;
use tokio::task::JoinError;
use tracing_appender::non_blocking::WorkerGuard;

use super::banner::Banner;
use super::check;
use super::failure::{CommandOutcome, Failure};
use super::output;
use super::restart_in_place;
use super::runtime::{self, StopSignals};
use crate::app::App;
use crate::config::{Config, ConfigMistake, LoadedConfig};
use crate::{stall_detector, tasks, telemetry};

/// Time within which a stalled node learns of a stop signal that came during the stall.
const SIGNAL_WITHIN: Duration = Duration::from_millis(100);
const DEAD: &str = "process stalled before the drain was finished";

pub(super) fn run(loaded: LoadedConfig) -> Result<CommandOutcome, Failure> {
    let (config, warnings) = check::accepted(loaded)?;
    let config = &config;
    let logs = telemetry::start_logs(&config.log, config.log_format)
        .map_err(|error| Failure::because("cannot start the logs", &error))?;
    let _logs = LogsGuard(Some(logs));
    for ConfigMistake { location, problem } in warnings {
        tracing::warn!(target: telemetry::CONFIGURATION, place = location, problem, "configuration warning");
    }
    if config.gossip_listen.is_some() {
        stall_detector::watch();
    }
    let runtime = runtime::multi_thread(config.threads)?;
    // This thread has its own runtime: it continues after a stall of the process.
    let outcome = runtime::alone(serve(config, runtime.handle()));
    // Everything that still runs has had its time.
    runtime.shutdown_background();
    outcome
}

async fn serve(config: &Config, threads: &Handle) -> Result<CommandOutcome, Failure> {
    let config = &restart_in_place::with_members(config.clone());
    let mut signals = StopSignals::listen()?;
    let _others = runtime::ignore_user_signals()?;
    let app = tokio::select! {
        started = threads.spawn(App::start(config.clone())) => {
            unwrap_join(started).map_err(|error| Failure::because("cannot start", &error))?
        }
        _ = signals.next() => return Ok(CommandOutcome::Done),
    };
    restart_in_place::count();
    let banner = Banner {
        config,
        node_id: app.node_id().to_string(),
        addresses: app.addresses(),
        key: app.development_key(),
    };
    // A closed stdout is no reason to stop a node.
    let text = banner.text();
    tasks::at_most(output::READ_WITHIN, move || output::write(&text)).ok();
    notify_supervisor(NotifyState::Ready);
    let (failed, reason) = tokio::select! {
        biased;
        _ = signals.next() => (false, "stopping: signal received, a further signal stops at once"),
        () = app.drain_requested() => (false, "stopping: drain requested, a signal stops at once"),
        () = app.failed() => (true, "stopping: fatal error, a signal stops at once"),
        () = stall_detector::stalled() => {
            let is_asked = tokio::select! {
                biased;
                _ = signals.next() => true,
                () = app.drain_requested() => true,
                () = tokio::time::sleep(SIGNAL_WITHIN) => false,
            };
            return Err(match is_asked {
                true => Failure::failed(DEAD),
                false => restart_in_place::begin(config, app.addresses(), &app.members()),
            });
        }
    };
    tracing::info!("{reason}");
    notify_supervisor(NotifyState::Stopping);
    tokio::select! {
        stopped = threads.spawn(app.stop()) => {
            unwrap_join(stopped);
            match failed {
                false => Ok(CommandOutcome::Done),
                true => Err(Failure::failed("node stopped after a fatal error, its log has the cause")),
            }
        }
        _ = signals.next() => Err(Failure::failed("stopped by a signal before the drain was finished")),
        () = stall_detector::stalled() => Err(Failure::failed(DEAD)),
    }
}

/// Notifies systemd (`Type=notify`); does nothing without it.
fn notify_supervisor(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "supervisor notification failed");
    }
}

/// The log writer. Its drop waits at most a second, because without a reader the writer reports that itself, and waits.
struct LogsGuard(Option<WorkerGuard>);

impl Drop for LogsGuard {
    fn drop(&mut self) {
        let writer = self.0.take();
        tasks::at_most(output::READ_WITHIN, move || drop(writer)).ok();
    }
}

/// The result of a task that nothing cancels. Resumes the task's panic.
fn unwrap_join<T>(joined: Result<T, JoinError>) -> T {
    joined.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}
