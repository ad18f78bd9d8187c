//! The message store of the node, and its connection.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::StartError;
use crate::accounts::development;
use crate::config::{Config, SchemaMode, StoreKind};
use crate::model::{Clock, bare_secret};
use crate::origin::history::{
    self, EmbeddedOptions, EmbeddedStore, HistoryStore, ScyllaConnection, ScyllaOptions, ScyllaStore,
};

/// Opens the caller's own store, else the configured one.
pub(super) async fn open(
    config: &Config,
    own: Option<Arc<dyn HistoryStore>>,
    node_id: &Arc<str>,
    clock: &Clock,
) -> Result<Arc<dyn HistoryStore>, StartError> {
    if let Some(own) = own {
        return Ok(own);
    }
    match config.store {
        StoreKind::Embedded | StoreKind::None => embedded(config, clock).await,
        StoreKind::Scylla => Ok(Arc::new(shared(config, node_id, clock).await?)),
    }
}

async fn embedded(config: &Config, clock: &Clock) -> Result<Arc<dyn HistoryStore>, StartError> {
    let path = config.data_dir.join("store");
    let options = EmbeddedOptions::new(config.store == StoreKind::Embedded, &config.limits);
    let clock = clock.clone();
    development::make_private_folder(&path).map_err(StartError::in_data(&path))?;
    let opened = tokio::task::spawn_blocking(move || EmbeddedStore::open(&path, &options, clock)).await;
    let opened = opened.map_err(StartError::at("cannot open the store (--data-dir)"))?;
    Ok(Arc::new(opened.map_err(StartError::at("cannot open the store (--data-dir)"))?))
}

pub(super) async fn shared(
    config: &Config,
    node_id: &Arc<str>,
    clock: &Clock,
) -> Result<ScyllaStore, StartError> {
    let options = ScyllaOptions {
        keeps_members: config.gossip_listen.is_none(),
        makes_schema: config.scylla_schema == SchemaMode::Auto,
        ..ScyllaOptions::new(Arc::clone(node_id), &config.limits)
    };
    let opened = ScyllaStore::open(connection(config)?, options, clock.clone()).await;
    opened.map_err(StartError::at("cannot open the store (--store scylla)"))
}

/// Creates what the shared store needs in its database. True if something was missing.
pub async fn apply_schema(config: &Config) -> Result<bool, StartError> {
    let applied = history::apply_schema(&connection(config)?).await;
    applied.map_err(StartError::at("cannot make the schema"))
}

/// Reads the password of the user in the shared store; the error names the file.
pub fn read_password(file: &Path) -> Result<String, String> {
    let text = std::fs::read_to_string(file);
    let text = text.map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    match bare_secret(&text) {
        Ok("") => Err(format!("{} holds no password", file.display())),
        Ok(password) => Ok(password.to_owned()),
        Err(reason) => Err(format!("what {} holds {reason}", file.display())),
    }
}

fn connection(config: &Config) -> Result<ScyllaConnection, StartError> {
    let credentials = match (&config.scylla_user, &config.scylla_password_file) {
        (Some(user), Some(file)) => {
            let password =
                read_password(file).map_err(StartError::at("cannot use --scylla-password-file"))?;
            Some((user.clone(), password))
        }
        _ => None,
    };
    Ok(ScyllaConnection {
        nodes: config.scylla_nodes.clone(),
        keyspace: config.scylla_keyspace.clone(),
        replication: config.scylla_replication,
        datacenter: config.scylla_datacenter.clone(),
        credentials,
        wait: Duration::from_millis(config.limits.store_wait_ms),
    })
}
