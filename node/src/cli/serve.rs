//! `fanfare serve`: a node from start to drained.

use std::time::Duration;

use sd_notify::NotifyState;
use tokio::runtime::Handle;
use tokio::task::JoinError;
use tracing_appender::non_blocking::WorkerGuard;

use super::anew;
use super::banner::Banner;
use super::check;
use super::failure::{Failure, Outcome};
use super::output;
use super::runtime::{self, StopSignals};
use crate::app::App;
use crate::config::{Config, Loaded, Mistake};
use crate::{pulse, tasks, telemetry};

/// A node that stood still may have been asked to stop meanwhile, and hears that no later than this.
const HEARS_WITHIN: Duration = Duration::from_millis(100);
const DEAD: &str = "stood still, so it was dead before everything was drained";

pub(super) fn run(loaded: Loaded) -> Result<Outcome, Failure> {
    let (config, warnings) = check::accepted(loaded)?;
    let config = &config;
    let logs = telemetry::start_logs(&config.log, config.log_format)
        .map_err(|error| Failure::because("cannot start the logs", &error))?;
    let _logs = Logs(Some(logs));
    for Mistake { place, problem } in warnings {
        tracing::warn!(target: telemetry::CONFIGURATION, place, problem, "configuration warning");
    }
    if config.gossip_listen.is_some() {
        pulse::watch();
    }
    let runtime = runtime::multi_thread(config.threads)?;
    // This thread has a runtime of its own: it is the one that goes on after the process has stood still.
    let outcome = runtime::alone(serve(config, runtime.handle()));
    // Whatever still runs had its time.
    runtime.shutdown_background();
    outcome
}

async fn serve(config: &Config, threads: &Handle) -> Result<Outcome, Failure> {
    let config = &anew::with_members(config.clone());
    let mut signals = StopSignals::listen()?;
    let _others = runtime::ignore_user_signals()?;
    let app = tokio::select! {
        started = threads.spawn(App::start(config.clone())) => {
            whole(started).map_err(|error| Failure::because("cannot start", &error))?
        }
        _ = signals.next() => return Ok(Outcome::Done),
    };
    anew::count();
    let banner = Banner {
        config,
        node_id: app.node_id().to_string(),
        addresses: app.addresses(),
        key: app.development_key(),
    };
    // A closed stdout is no reason to stop a node.
    let text = banner.text();
    tasks::at_most(output::READ_WITHIN, move || output::write(&text)).ok();
    tell_supervisor(NotifyState::Ready);
    let (failed, told) = tokio::select! {
        biased;
        _ = signals.next() => (false, "stopping, a further signal stops at once"),
        () = app.drain_asked() => (false, "stopping as an operator asks, a signal stops at once"),
        () = app.failed() => (true, "stopping as the node cannot go on, a signal stops at once"),
        () = pulse::stood_still() => {
            let is_asked = tokio::select! {
                biased;
                _ = signals.next() => true,
                () = app.drain_asked() => true,
                () = tokio::time::sleep(HEARS_WITHIN) => false,
            };
            return Err(match is_asked {
                true => Failure::failed(DEAD),
                false => anew::begin(config, app.addresses(), &app.members()),
            });
        }
    };
    tracing::info!("{told}");
    tell_supervisor(NotifyState::Stopping);
    tokio::select! {
        stopped = threads.spawn(app.stop()) => {
            whole(stopped);
            match failed {
                false => Ok(Outcome::Done),
                true => Err(Failure::failed("the node could not go on, its log says why")),
            }
        }
        _ = signals.next() => Err(Failure::failed("stopped by a signal before everything was drained")),
        () = pulse::stood_still() => Err(Failure::failed(DEAD)),
    }
}

/// Of systemd with `Type=notify`; without one, nobody is told.
fn tell_supervisor(state: NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(&[state]) {
        tracing::warn!(%error, "the supervisor cannot be told how the node stands");
    }
}

/// The writer of the logs. Its end waits a second at most, because without a reader the writer reports that itself, and waits.
struct Logs(Option<WorkerGuard>);

impl Drop for Logs {
    fn drop(&mut self) {
        let writer = self.0.take();
        tasks::at_most(output::READ_WITHIN, move || drop(writer)).ok();
    }
}

/// The result of a task that nothing cancels. Resumes the task's panic.
fn whole<T>(joined: Result<T, JoinError>) -> T {
    joined.unwrap_or_else(|error| std::panic::resume_unwind(error.into_panic()))
}
