//! What a running node keeps in its data folder: its id, and the addresses it has bound.

use std::io;
use std::path::Path;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::Addresses;
use crate::auth::ConnectionKeys;
use crate::config::Config;
use crate::data_file;

const NODE_ID: &str = "node-id";

/// As configured, else the host's name, else random and kept in `<data-dir>/node-id`.
pub(super) fn node_id(config: &Config) -> io::Result<Arc<str>> {
    if let Some(node_id) = known_node_id(config) {
        return Ok(node_id.into());
    }
    let node_id = URL_SAFE_NO_PAD.encode(crate::model::random_bytes::<9>());
    data_file::write_private(&config.data_dir.join(NODE_ID), node_id.as_bytes())?;
    Ok(node_id.into())
}

/// The same; none where it is yet to be made.
pub(super) fn known_node_id(config: &Config) -> Option<String> {
    let kept = || std::fs::read_to_string(config.data_dir.join(NODE_ID)).ok();
    let kept = || kept().map(|node_id| node_id.trim().to_owned()).filter(|node_id| !node_id.is_empty());
    config.node_id.clone().or_else(host_name).or_else(kept)
}

/// That of the node which ran in the data folder last, unless the configuration names one.
pub(super) fn last_node_id(config: &Config) -> Option<String> {
    #[derive(serde::Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Last {
        node_id: String,
    }
    let told = || std::fs::read(crate::config::node_file(&config.data_dir)).ok();
    let last = || Some(serde_json::from_slice::<Last>(&told()?).ok()?.node_id);
    config.node_id.clone().or_else(last).or_else(|| known_node_id(config))
}

/// Under which connection keys are sealed: kept in `<data-dir>/connection-key`, so that they outlive a restart.
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

/// Written whole: a reader sees the former file or this one. `tls` is there when clients must speak it.
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
