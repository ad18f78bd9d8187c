//! The directory in use: read at start, read again when its file or a file it names has changed.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use sha2::{Digest as _, Sha256};
use tokio::signal::unix::{SignalKind, signal};

use super::directory::Directory;
use super::parse::{NodeSettings, parse};
use super::reader::{DirectoryError, DirectoryMistake};
use super::usages::Usages;
use crate::model::{AllowRule, Limits};

/// Interval of the comparison. Contents are compared, not times or inodes: a mounted config map is swapped by renaming a link far above the
/// file.
const POLL: Duration = Duration::from_millis(500);

/// The directory in use, shared by all parts that check credentials. An unusable file changes nothing.
pub struct Accounts {
    path: Option<PathBuf>,
    current: RwLock<Arc<Directory>>,
    generation: AtomicU64,
    /// Number of applied directories that changed which channels keep history for some account.
    policy_changes: AtomicU64,
    before_policy_change: OnceLock<Box<dyn Fn(u64) + Send + Sync>>,
    /// Digests of the last attempt, good or bad; locked for the length of an attempt.
    seen: Mutex<DirectoryDigests>,
    usages: Usages,
    settings: NodeSettings,
}

impl Accounts {
    /// Reads the file for the first time; `retention_hours` is its default.
    pub fn open(path: &Path, retention_hours: u32) -> Result<Arc<Self>, DirectoryError> {
        Self::open_with(path, NodeSettings { retention_hours, allow: None })
    }

    /// Reads the file for a node that may send only to these addresses; warns of targets elsewhere.
    pub fn open_guarded(
        path: &Path,
        retention_hours: u32,
        allow: &[AllowRule],
    ) -> Result<Arc<Self>, DirectoryError> {
        Self::open_with(path, NodeSettings { retention_hours, allow: Some(allow.into()) })
    }

    fn open_with(path: &Path, settings: NodeSettings) -> Result<Arc<Self>, DirectoryError> {
        let usages = Usages::default();
        let (directory, seen) = read(path, &usages, &settings);
        let accounts = Self::with(directory?, Some(path.to_owned()), seen, usages, settings);
        publish_generation(1);
        publish_stale(false);
        Ok(Arc::new(accounts))
    }

    /// A directory that never changes: for tests, and for a node without credentials.
    pub fn fixed(directory: Directory) -> Arc<Self> {
        Arc::new(Self::with(
            directory,
            None,
            DirectoryDigests::default(),
            Usages::default(),
            default_settings(),
        ))
    }

    /// A fixed directory from the text of a file; a relative `secret_file` begins in the working directory.
    pub fn from_text(text: &str) -> Result<Arc<Self>, DirectoryError> {
        let (usages, settings) = (Usages::default(), default_settings());
        let read_secret = &mut |path| std::fs::read_to_string(path);
        let directory = parse(text, Path::new(""), read_secret, &usages, &settings);
        let mistakes = |mistakes| DirectoryError::Mistakes { path: "<text>".into(), mistakes };
        Ok(Arc::new(Self::with(
            directory.map_err(mistakes)?,
            None,
            DirectoryDigests::default(),
            usages,
            settings,
        )))
    }

    fn with(
        directory: Directory,
        path: Option<PathBuf>,
        seen: DirectoryDigests,
        usages: Usages,
        settings: NodeSettings,
    ) -> Self {
        Self {
            path,
            current: RwLock::new(Arc::new(directory)),
            generation: AtomicU64::new(1),
            policy_changes: AtomicU64::new(0),
            before_policy_change: OnceLock::new(),
            seen: Mutex::new(seen),
            usages,
            settings,
        }
    }

    pub fn current(&self) -> Arc<Directory> {
        self.current.read().clone()
    }

    /// Usage counters of the accounts, over all readings of the file.
    pub fn usages(&self) -> &Usages {
        &self.usages
    }

    /// Counts the directories applied, from 1. Read it before `current` to notice a change afterwards.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Counts the changes of which channels keep history; an added account is none. Counted before a change takes effect: an unchanged
    /// number afterwards means that nothing was delivered under other rules.
    pub fn policy_changes(&self) -> u64 {
        self.policy_changes.load(Ordering::SeqCst)
    }

    /// Registers an action that runs before other [`Directory::history_policies`] take effect, and is waited for; also if only an added
    /// account has them. It may block; only the first one registered counts.
    pub fn before_policy_change(&self, act: impl Fn(u64) + Send + Sync + 'static) {
        let _first = self.before_policy_change.set(Box::new(act));
    }

    /// Reads the file again, whether it changed or not. Blocks on the disk; logs the outcome.
    pub fn reload(&self) -> Result<(), DirectoryError> {
        let Some(path) = &self.path else { return Ok(()) };
        self.apply(path, &mut self.seen.lock())
    }

    /// Reloads when a file of the last attempt has changed.
    pub fn reload_if_changed(&self) -> Result<(), DirectoryError> {
        let Some(path) = &self.path else { return Ok(()) };
        let mut seen = self.seen.lock();
        if seen.is_current() { Ok(()) } else { self.apply(path, &mut seen) }
    }

    /// Polls the files forever, and reads them again on SIGHUP, which no longer ends the process after this call. The task that runs it may
    /// be dropped at any time.
    pub fn watch(self: Arc<Self>) -> impl Future<Output = ()> + Send {
        let mut hangups = match signal(SignalKind::hangup()) {
            Ok(hangups) => Some(hangups),
            Err(error) => {
                tracing::warn!(%error, "cannot listen for SIGHUP, the directory is only polled");
                None
            }
        };
        async move {
            loop {
                let is_requested = tokio::select! {
                    () = tokio::time::sleep(POLL) => false,
                    Some(()) = next_signal(&mut hangups) => true,
                };
                let accounts = self.clone();
                let attempt =
                    move || if is_requested { accounts.reload() } else { accounts.reload_if_changed() };
                // The reload has logged and counted its mistakes.
                let _outcome = tokio::task::spawn_blocking(attempt).await;
            }
        }
    }

    fn apply(&self, path: &Path, seen: &mut DirectoryDigests) -> Result<(), DirectoryError> {
        let (directory, now_seen) = read(path, &self.usages, &self.settings);
        *seen = now_seen;
        match directory {
            Ok(directory) => {
                let (before, policies) = (self.current(), directory.history_policies());
                let keeps_as = directory.keeps_as(&before);
                if !keeps_as {
                    self.policy_changes.fetch_add(1, Ordering::SeqCst);
                }
                if (!keeps_as || policies != before.history_policies())
                    && let Some(act) = self.before_policy_change.get()
                {
                    act(policies);
                }
                log_warnings(path, &directory);
                *self.current.write() = Arc::new(directory);
                let generation = self.generation.fetch_add(1, Ordering::Release) + 1;
                publish_generation(generation);
                publish_stale(false);
                tracing::info!(generation, "directory applied");
                Ok(())
            }
            Err(error) => {
                metrics::counter!("fanfare_directory_errors_total").increment(1);
                publish_stale(true);
                log_refusal(&error);
                Err(error)
            }
        }
    }
}

async fn next_signal(hangups: &mut Option<tokio::signal::unix::Signal>) -> Option<()> {
    match hangups {
        Some(hangups) => hangups.recv().await,
        None => std::future::pending().await,
    }
}

fn publish_generation(generation: u64) {
    #[expect(clippy::cast_precision_loss, reason = "a count of reloads stays far below 2^52")]
    metrics::gauge!("fanfare_directory_generation").set(generation as f64);
}

/// Sets the metric for a refused file, while an earlier one is in use.
fn publish_stale(is_stale: bool) {
    metrics::gauge!("fanfare_directory_stale").set(u8::from(is_stale));
}

fn log_warnings(path: &Path, directory: &Directory) {
    for DirectoryMistake { line, key, reason } in directory.warnings() {
        tracing::warn!(path = %path.display(), line, key, reason, "directory applied with a warning");
    }
}

fn log_refusal(error: &DirectoryError) {
    match error {
        DirectoryError::Unreadable { path, source } => {
            tracing::error!(path = %path.display(), error = %source, "directory unreadable, nothing changed");
        }
        DirectoryError::Mistakes { path, mistakes } => {
            for mistake in mistakes {
                tracing::error!(
                    path = %path.display(), line = mistake.line, key = mistake.key, reason = mistake.reason,
                    "directory refused, nothing changed"
                );
            }
        }
    }
}

fn default_settings() -> NodeSettings {
    NodeSettings { retention_hours: Limits::default().history_retention_hours, allow: None }
}

fn read(
    path: &Path,
    usages: &Usages,
    settings: &NodeSettings,
) -> (Result<Directory, DirectoryError>, DirectoryDigests) {
    let mut seen = DirectoryDigests::default();
    let text = match seen.read(path.to_owned()) {
        Ok(text) => text,
        Err(source) => return (Err(DirectoryError::Unreadable { path: path.to_owned(), source }), seen),
    };
    let folder = path.parent().unwrap_or(Path::new(""));
    let read_secret = &mut |secret_file| seen.read(secret_file);
    let directory = parse(&text, folder, read_secret, usages, settings)
        .map_err(|mistakes| DirectoryError::Mistakes { path: path.to_owned(), mistakes });
    (directory, seen)
}

/// Digests of the files that were read; `None` for one that could not be read.
#[derive(Default)]
struct DirectoryDigests(Vec<(PathBuf, Option<[u8; 32]>)>);

impl DirectoryDigests {
    fn read(&mut self, path: PathBuf) -> std::io::Result<String> {
        let text = std::fs::read_to_string(&path);
        self.0.push((path, text.as_ref().ok().map(digest)));
        text
    }

    fn is_current(&self) -> bool {
        self.0.iter().all(|(path, seen)| std::fs::read_to_string(path).ok().as_ref().map(digest) == *seen)
    }
}

fn digest(text: &String) -> [u8; 32] {
    Sha256::digest(text).into()
}
