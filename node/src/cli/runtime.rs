//! The async runtime of a command.

use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::failure::{CommandOutcome, Failure};
use crate::stall_detector;

/// A runtime of `threads` workers; 0: one per core.
pub(super) fn multi_thread(threads: usize) -> Result<Runtime, Failure> {
    let mut builder = Builder::new_multi_thread();
    if threads > 0 {
        builder.worker_threads(threads);
    }
    let built =
        builder.thread_name("fanfare").on_thread_unpark(stall_detector::halt_if_stalled).enable_all().build();
    built.map_err(|error| Failure::because("cannot start threads", &error))
}

/// Runs `work` on this thread, independent of other runtimes.
pub(super) fn alone<T>(work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let built = Builder::new_current_thread().enable_all().build();
    built.map_err(|error| Failure::because("cannot start the runtime", &error))?.block_on(work)
}

/// Runs the work of a client command, unless a signal ends it first.
pub(super) fn interruptible(
    work: impl Future<Output = Result<CommandOutcome, Failure>>,
) -> Result<CommandOutcome, Failure> {
    let runtime = Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::because("cannot start the runtime", &error))?;
    let outcome = runtime.block_on(async {
        let mut stop = StopSignals::listen()?;
        tokio::select! {
            outcome = work => outcome,
            signal = stop.next() => Ok(CommandOutcome::Interrupted(signal)),
        }
    });
    // A read of stdin cannot be cancelled; the process ends without waiting for its line.
    runtime.shutdown_background();
    outcome
}

/// Ignores SIGUSR1 and SIGUSR2, which would end the process otherwise.
pub(super) fn ignore_user_signals() -> Result<[Signal; 2], Failure> {
    let ignore = |kind| signal(kind).map_err(|error| Failure::because("cannot listen for signals", &error));
    Ok([ignore(SignalKind::user_defined1())?, ignore(SignalKind::user_defined2())?])
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StopSignal {
    Interrupt,
    Terminate,
}

/// SIGINT and SIGTERM, which no longer end the process once this exists.
pub(super) struct StopSignals {
    interrupt: Signal,
    terminate: Signal,
}

impl StopSignals {
    pub(super) fn listen() -> Result<Self, Failure> {
        let listen =
            |kind| signal(kind).map_err(|error| Failure::because("cannot listen for signals", &error));
        Ok(Self { interrupt: listen(SignalKind::interrupt())?, terminate: listen(SignalKind::terminate())? })
    }

    /// The next signal of either kind. Safe to cancel.
    pub(super) async fn next(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.interrupt.recv() => StopSignal::Interrupt,
            _ = self.terminate.recv() => StopSignal::Terminate,
        }
    }
}
