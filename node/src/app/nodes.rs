//! Which other nodes this one has seen, kept in the data folder: of them a majority must remember a nonce, also after a restart.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::cluster::routing::KeptNodes;

const FILE: &str = "peers.json";

#[derive(Default, Serialize, Deserialize)]
struct Kept {
    /// This node remembers all nonces that it is to remember.
    counts: bool,
    /// The others, and when each was seen last: epoch milliseconds.
    seen: BTreeMap<Box<str>, u64>,
    /// Those of them that were away by then.
    #[serde(default)]
    away: Vec<Box<str>>,
}

/// A file that is damaged is as none: the node asks the others for all.
pub(super) fn read(data_dir: &Path, now_ms: u64) -> io::Result<KeptNodes> {
    let text = match std::fs::read(data_dir.join(FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(KeptNodes::default()),
        Err(error) => return Err(error),
    };
    let Kept { counts, seen, away } = serde_json::from_slice(&text).unwrap_or_default();
    let seen = seen.into_iter().map(|(node_id, at_ms)| (node_id, now_ms.saturating_sub(at_ms))).collect();
    Ok(KeptNodes { counts, seen, away })
}

/// Written whole: a start reads the former file or this one.
pub(super) fn write(data_dir: &Path, nodes: &KeptNodes, now_ms: u64) -> io::Result<()> {
    let seen = nodes.seen.iter().map(|(node_id, age_ms)| (node_id.clone(), now_ms.saturating_sub(*age_ms)));
    let text =
        serde_json::to_vec(&Kept { counts: nodes.counts, seen: seen.collect(), away: nodes.away.clone() })?;
    let (file, fresh) = (data_dir.join(FILE), data_dir.join("peers.json.new"));
    std::fs::write(&fresh, text)?;
    std::fs::rename(fresh, file)
}
