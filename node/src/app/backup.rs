//! Backups of this node, and of data folders of stopped nodes.

use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::Arc;

use super::StartError;
use super::outbox::NodeOutbox;
use crate::config::{Config, StoreKind};
use crate::model::Clock;
use crate::origin::backup::{
    self, BackupError, BackupOrigin, BackupRefusal, BackupSource, BackupStream, BackupSummary, Backups,
    StoppedNodeSource,
};
use crate::origin::history::HistoryStore;
use crate::origin::outbox::EventOutbox;

/// The parts that a backup of a running node is made of.
pub(super) struct NodeBackups {
    backups: Backups,
    store: Arc<dyn HistoryStore>,
    outbox: Arc<NodeOutbox>,
    data_dir: PathBuf,
    clock: Clock,
}

impl NodeBackups {
    pub(super) fn new(
        config: &Config,
        store: &Arc<dyn HistoryStore>,
        outbox: &Arc<NodeOutbox>,
        clock: &Clock,
    ) -> Self {
        Self {
            backups: Backups::default(),
            store: Arc::clone(store),
            outbox: Arc::clone(outbox),
            data_dir: config.data_dir.clone(),
            clock: clock.clone(),
        }
    }

    pub(super) async fn begin(&self, node_id: String) -> Result<BackupStream, BackupRefusal> {
        let origin = BackupOrigin { node_id, taken_ms: self.clock.now_ms() };
        let (store, outbox) = (Arc::clone(&self.store), Arc::clone(&self.outbox));
        let data_dir = self.data_dir.clone();
        self.backups
            .begin(move || {
                let outbox = || Ok(outbox.opened().as_ref().map(EventOutbox::snapshot));
                BackupSource::take(origin, &data_dir, || store.snapshot(), outbox)
            })
            .await
    }
}

/// The data folder of a stopped node. The node cannot start while it is open.
pub struct StoppedNode(StoppedNodeSource);

impl StoppedNode {
    /// Opens the folder; blocks on the disk.
    ///
    /// # Errors
    /// The folder has nothing to back up, or its node runs.
    pub fn open(config: &Config) -> Result<Self, StartError> {
        let data_dir = &config.data_dir;
        unfinished(config)?;
        let node_id = super::files::last_node_id(config).unwrap_or_default();
        let origin = BackupOrigin { node_id, taken_ms: Clock::system().now_ms() };
        let opened = StoppedNodeSource::open(origin, data_dir, config.store != StoreKind::Scylla);
        opened.map(Self).map_err(StartError::in_data(data_dir))
    }

    /// Writes the backup.
    ///
    /// # Errors
    /// The folder cannot be read, or `out` not be written.
    pub fn write(&self, out: impl Write) -> Result<(), StartError> {
        self.0.write(out).map(|_| ()).map_err(StartError::at("cannot write the backup"))
    }
}

/// Fills the data folder from a backup. `on_progress` gets the number of rows written, and the approximate total.
///
/// # Errors
/// The folder is not empty, or the backup is incomplete.
pub fn restore(
    config: &Config,
    from: impl Read,
    on_progress: impl FnMut(u64, u64),
) -> Result<BackupSummary, BackupError> {
    backup::restore(from, &config.data_dir, || Clock::system().now_ms(), on_progress)
}

/// Checks that no restore was cut short.
///
/// # Errors
/// A restore into the data folder was cut short.
pub(super) fn unfinished(config: &Config) -> Result<(), StartError> {
    if backup::is_unfinished(&config.data_dir) {
        let text = "a restore into it was cut short, or is under way: run fanfare restore again";
        return Err(StartError::in_data(&config.data_dir)(text));
    }
    Ok(())
}

/// The time (epoch milliseconds) up to which token requests may have been used without a trace here, because the data folder was restored
/// and nonces may have been claimed after its backup; 0 if there is none.
pub(super) fn unknown_until_ms(config: &Config, clock: &Clock) -> Result<u64, StartError> {
    let restored = backup::restore_record(&config.data_dir);
    let restored = restored.map_err(StartError::in_data(&config.data_dir.join("restored.json")))?;
    // A shared database has the nonces of all nodes.
    let Some(restored) = restored.filter(|_| config.store != StoreKind::Scylla) else { return Ok(0) };
    let until_ms = restored.restored_ms.saturating_add(config.limits.token_request_window_ms);
    let left_ms = until_ms.saturating_sub(clock.now_ms());
    if left_ms > 0 {
        let lost_ms = restored.restored_ms.saturating_sub(restored.taken_ms);
        tracing::warn!(
            lost_s = lost_ms / 1_000,
            token_requests_after_s = left_ms / 1_000,
            "data folder restored from a backup: revocations made since then are missing"
        );
    }
    Ok(until_ms)
}
