//! The peers that this node has seen, kept in the data folder: a majority of them must remember a nonce, also after a restart.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::cluster::routing::KeptNodes;
use crate::data_file;

pub(super) const FILE: &str = "peers.json";

#[derive(Default, Serialize, Deserialize)]
struct SeenPeersFile {
    /// Whether this node remembers all nonces that it should.
    counts: bool,
    /// Peers by id, with the time of their last sighting: epoch milliseconds of [`crate::model::Clock::line_ms`].
    seen: BTreeMap<Box<str>, u64>,
    /// Peers that were away at the time of the write.
    #[serde(default)]
    away: Vec<Box<str>>,
}

/// Reads the file. A damaged one counts as missing: the node asks its peers for all nonces.
pub(super) fn read(data_dir: &Path, now_ms: u64) -> io::Result<KeptNodes> {
    let text = match std::fs::read(data_dir.join(FILE)) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(KeptNodes::default()),
        Err(error) => return Err(error),
    };
    let SeenPeersFile { counts, seen, away } = serde_json::from_slice(&text).unwrap_or_default();
    let seen = seen.into_iter().map(|(node_id, at_ms)| (node_id, now_ms.saturating_sub(at_ms))).collect();
    Ok(KeptNodes { counts, seen, away })
}

/// Writes one version after the other, and never an older one over a newer.
pub(super) struct SeenPeersWriter {
    data_dir: PathBuf,
    last: AtomicU64,
    written: Mutex<u64>,
}

impl SeenPeersWriter {
    pub(super) fn new(data_dir: &Path) -> Self {
        Self { data_dir: data_dir.to_owned(), last: AtomicU64::new(0), written: Mutex::new(0) }
    }

    /// Takes the number of a write; to be called when its content is known.
    pub(super) fn turn(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(super) fn write(&self, turn: u64, nodes: &KeptNodes, now_ms: u64) -> io::Result<()> {
        let mut written = self.written.lock();
        if turn < *written {
            return Ok(());
        }
        write(&self.data_dir, nodes, now_ms)?;
        *written = turn;
        Ok(())
    }
}

/// Writes the file atomically: a start reads the former content or this one.
fn write(data_dir: &Path, nodes: &KeptNodes, now_ms: u64) -> io::Result<()> {
    let seen = nodes.seen.iter().map(|(node_id, age_ms)| (node_id.clone(), now_ms.saturating_sub(*age_ms)));
    let text = serde_json::to_vec(&SeenPeersFile {
        counts: nodes.counts,
        seen: seen.collect(),
        away: nodes.away.clone(),
    })?;
    data_file::write(&data_dir.join(FILE), &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_kept_nodes_do_not_overwrite_newer_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let keeper = SeenPeersWriter::new(folder.path());
        let kept = |counts| KeptNodes { counts, seen: vec![("a".into(), 5)], away: vec!["a".into()] };
        let (before, after) = (keeper.turn(), keeper.turn());
        keeper.write(after, &kept(false), 100).expect("written");
        keeper.write(before, &kept(true), 100).expect("left out");
        let read = read(folder.path(), 100).expect("read");
        assert_eq!(read, kept(false));
    }
}
