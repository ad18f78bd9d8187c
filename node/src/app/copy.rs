//! Copy of a data folder's embedded store into the shared one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{StartError, files, store};
use crate::config::Config;
use crate::model::Clock;
use crate::origin::history::{self, CopyProgress, CopySource, HistoryStore as _};

/// Copies the store of the stopped node in the data folder `from`. `on_progress` gets the progress about once a second.
pub async fn copy_history(
    config: &Config,
    from: &Path,
    on_progress: impl FnMut(CopyProgress),
) -> Result<CopyProgress, StartError> {
    let from = from.to_owned();
    let own = Config { data_dir: from.clone(), ..config.clone() };
    let source = open(from).await?;
    let node_id =
        files::node_id(&own).map_err(StartError::at("cannot use the node id in the data folder (--from)"))?;
    let target = Arc::new(store::shared(config, &node_id, &Clock::system()).await?);
    let copied = history::copy(source, &target, on_progress).await;
    // The shutdown waits for running operations.
    tokio::task::spawn_blocking(move || target.shutdown()).await.ok();
    copied.map_err(StartError::at("the copy was cut short"))
}

async fn open(from: PathBuf) -> Result<CopySource, StartError> {
    let opened = tokio::task::spawn_blocking(move || CopySource::open(&from)).await;
    let opened = opened.map_err(StartError::at("cannot open the store (--from)"))?;
    opened.map_err(StartError::at("cannot open the store (--from); its node must not run"))
}
