//! Files of a running node in its data folder: its id, and its bound addresses.

use std::io;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::{Addresses, StartError};
use crate::auth::ConnectionKeys;
use crate::config::Config;
use crate::data_file;

const NODE_ID: &str = "node-id";

/// The node id: as configured, else the host's name, else random and kept in `<data-dir>/node-id`.
pub(super) fn node_id(config: &Config) -> Result<Arc<str>, StartError> {
    if let Some(node_id) = known_node_id(config) {
        return Ok(node_id.into());
    }
    let node_id = URL_SAFE_NO_PAD.encode(crate::model::random_bytes::<9>());
    let file = config.data_dir.join(NODE_ID);
    data_file::write_private(&file, node_id.as_bytes()).map_err(StartError::in_data(&file))?;
    Ok(node_id.into())
}

/// The node id, or none if it has not been generated yet.
pub(super) fn known_node_id(config: &Config) -> Option<String> {
    let kept = || std::fs::read_to_string(config.data_dir.join(NODE_ID)).ok();
    let kept = || kept().map(|node_id| node_id.trim().to_owned()).filter(|node_id| !node_id.is_empty());
    config.node_id.clone().or_else(host_name).or_else(kept)
}

/// The configured id, else that of the last node that ran in the data folder.
pub(super) fn last_node_id(config: &Config) -> Option<String> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct LastNodeFile {
        node_id: String,
    }
    let last_file = || std::fs::read(crate::config::node_file(&config.data_dir)).ok();
    let last = || Some(serde_json::from_slice::<LastNodeFile>(&last_file()?).ok()?.node_id);
    config.node_id.clone().or_else(last).or_else(|| known_node_id(config))
}

/// The secret that seals connection keys, kept in `<data-dir>/connection-key` so that they outlive a restart.
pub(super) fn connection_keys(data_dir: &Path) -> io::Result<ConnectionKeys> {
    let file = data_dir.join("connection-key");
    let kept = match std::fs::read(&file) {
        Ok(text) => URL_SAFE_NO_PAD.decode(text.trim_ascii()).ok().and_then(|secret| secret.try_into().ok()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let secret = match kept {
        Some(secret) => secret,
        None => {
            let secret = crate::model::random_bytes::<{ ConnectionKeys::SECRET_BYTES }>();
            data_file::write_private(&file, format!("{}\n", URL_SAFE_NO_PAD.encode(secret)).as_bytes())?;
            secret
        }
    };
    Ok(ConnectionKeys::new(&secret))
}

fn host_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
    let name = name.trim();
    (!name.is_empty() && name != "(none)" && name != "localhost").then(|| name.to_owned())
}

/// Writes the node file atomically: a reader sees the former content or this one. `tls` is set when clients must use
/// TLS.
pub(super) fn write_node_file(file: &Path, node_id: &str, addresses: Addresses, tls: bool) -> io::Result<()> {
    let mut text = serde_json::json!({
        "nodeId": node_id,
        "pid": std::process::id(),
        "listen": addresses.listen.to_string(),
        "admin": addresses.admin.to_string(),
    });
    if tls {
        text["tls"] = true.into();
    }
    if let Some(gossip) = addresses.gossip {
        text["gossip"] = gossip.to_string().into();
    }
    if let Some(peer) = addresses.peer {
        text["peer"] = peer.to_string().into();
    }
    data_file::write(file, format!("{text}\n").as_bytes())
}
