//! The embedded store of a data folder, copied into the shared one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{StartError, files, store};
use crate::config::Config;
use crate::model::Clock;
use crate::origin::history::{self, HistoryStore as _, Progress, Source};

/// Copies what the node of the data folder `from` has kept, while it does not run. `told` hears about once a second how far it is.
pub async fn copy_history(
    config: &Config,
    from: &Path,
    told: impl FnMut(Progress),
) -> Result<Progress, StartError> {
    let from = from.to_owned();
    let own = Config { data_dir: from.clone(), ..config.clone() };
    let source = open(from).await?;
    let node_id =
        files::node_id(&own).map_err(StartError::at("cannot use the node id in the data folder (--from)"))?;
    let target = Arc::new(store::shared(config, &node_id, &Clock::system()).await?);
    let copied = history::copy(source, &target, told).await;
    // It waits for what is under way.
    tokio::task::spawn_blocking(move || target.shutdown()).await.ok();
    copied.map_err(StartError::at("the copy was cut short"))
}

async fn open(from: PathBuf) -> Result<Source, StartError> {
    let opened = tokio::task::spawn_blocking(move || Source::open(&from)).await;
    let opened = opened.map_err(StartError::at("cannot open the store (--from)"))?;
    opened.map_err(StartError::at("cannot open the store (--from); its node must not run"))
}
