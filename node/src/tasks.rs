//! The only place that starts tasks and threads: each has a name, an owner, and a stated end.

mod single_flight;

use std::future::Future;
use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use single_flight::SingleFlight;

const THREADS_LAST: Duration = Duration::from_millis(500);

/// The end of a task when the node stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnStop {
    /// Dropped at its next await.
    Cancel,
    /// Notified by [`Tasks::stopping`], and waited for until the deadline of [`Tasks::stop`].
    Finish,
}

/// Owner of every task and thread of one node. A panic in a task ends that task alone and is logged.
#[derive(Debug)]
pub struct Tasks {
    runtime: Handle,
    tracker: TaskTracker,
    stopping: CancellationToken,
    failed: CancellationToken,
    threads: Mutex<Vec<(&'static str, std::thread::JoinHandle<()>)>>,
}

impl Tasks {
    pub fn new(runtime: Handle) -> Self {
        Self {
            runtime,
            tracker: TaskTracker::new(),
            stopping: CancellationToken::new(),
            failed: CancellationToken::new(),
            threads: Mutex::new(Vec::new()),
        }
    }

    /// An owner for tasks on another runtime, which end with those of this one and are waited for by it.
    pub fn on(&self, runtime: Handle) -> Self {
        let (tracker, stopping, failed) = (self.tracker.clone(), self.stopping.clone(), self.failed.clone());
        Self { runtime, tracker, stopping, failed, threads: Mutex::default() }
    }

    /// Resolves when the node begins to stop.
    pub fn stopping(&self) -> CancellationToken {
        self.stopping.clone()
    }

    /// Resolves when a thread has ended unasked, or has reported a failure by it: the node is broken and should stop.
    pub fn failed(&self) -> CancellationToken {
        self.failed.clone()
    }

    pub fn spawn<F>(&self, name: &'static str, on_stop: OnStop, task: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let stopping = self.stopping.clone();
        let guarded = async move {
            let _report = PanicReport { name };
            match on_stop {
                OnStop::Finish => task.await,
                OnStop::Cancel => {
                    stopping.run_until_cancelled(task).await;
                }
            }
        };
        self.tracker.spawn_on(guarded, &self.runtime);
    }

    /// Starts a thread that ends by itself once its owner tells it to; [`Tasks::stop`] joins it.
    pub fn spawn_thread(
        &self,
        name: &'static str,
        body: impl FnOnce() + Send + 'static,
    ) -> std::io::Result<()> {
        let (stopping, failed) = (self.stopping.clone(), self.failed.clone());
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let _report = PanicReport { name };
            let _end = ThreadEnd { stopping, failed };
            body();
        })?;
        self.threads.lock().push((name, thread));
        Ok(())
    }

    /// Notifies every task, waits at most `deadline` for those that finish their work, then joins the threads.
    pub async fn stop(&self, deadline: Duration) {
        self.stopping.cancel();
        self.tracker.close();
        let until = tokio::time::Instant::now() + deadline;
        if tokio::time::timeout_at(until, self.tracker.wait()).await.is_err() {
            tracing::warn!(left = self.tracker.len(), "tasks did not end in time");
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        let joined = tokio::task::spawn_blocking(move || {
            for (name, thread) in threads {
                if thread.join().is_err() {
                    tracing::error!(thread = name, "thread panicked");
                }
            }
        });
        // The threads were notified before. They get a little beyond the deadline, even if tasks took all of it.
        let until = until.max(tokio::time::Instant::now() + THREADS_LAST);
        if tokio::time::timeout_at(until, joined).await.is_err() {
            tracing::warn!("threads did not end in time");
        }
    }
}

/// Runs `act` on its own thread and waits for it at most `deadline`: for work that may never end, such as writing to a reader that does not
/// read.
///
/// # Errors
/// The work has not ended by then, or no thread can be started.
pub fn at_most<T: Send + 'static>(
    deadline: Duration,
    act: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RecvTimeoutError> {
    let (give, given) = std::sync::mpsc::channel();
    let started = std::thread::Builder::new().spawn(move || give.send(act()).ok());
    started.map_err(|_| RecvTimeoutError::Disconnected)?;
    given.recv_timeout(deadline)
}

struct ThreadEnd {
    stopping: CancellationToken,
    failed: CancellationToken,
}

impl Drop for ThreadEnd {
    fn drop(&mut self) {
        if std::thread::panicking() || !self.stopping.is_cancelled() {
            self.failed.cancel();
        }
    }
}

struct PanicReport {
    name: &'static str,
}

impl Drop for PanicReport {
    fn drop(&mut self) {
        if std::thread::panicking() {
            tracing::error!(task = self.name, "task panicked");
        }
    }
}
