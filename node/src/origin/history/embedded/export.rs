//! Export of a whole store, read in one order while no node uses it.

use std::collections::HashMap;
use std::ops::Bound;
use std::path::Path;

use fjall::{Keyspace, KvPair};

use super::open::{MARKER, OpenedStore, StoreOpenError};
use super::partitions::{Partition, PartitionKind};
use super::revocations::RevocationRows;
use super::{INCARNATIONS, failed, keys, metrics, nonces};
use crate::model::{AccountId, ChannelKey, ChannelName, ClientId, Stamp};
use crate::origin::history::copy::{
    CopiedChannelRows, CopyCheckpoint, CopyPiece, DedupWindows, ExportedPiece, StoredId,
};
use crate::origin::history::{HistoryPosition, IdScope, RowKind, StoreError};

/// Rows of one piece.
const PIECE_ROWS: usize = 256;
const PIECE_BYTES: usize = 256 * 1024;

/// Export of the store of a stopped node.
pub(in super::super) struct StoreExport {
    opened: OpenedStore,
}

/// Receiver of the pieces; returns false to stop the export.
pub(in super::super) type PieceSink<'a> = dyn FnMut(ExportedPiece) -> bool + 'a;

impl StoreExport {
    /// Opens the store; creates nothing if there is none.
    pub(in super::super) fn open(path: &Path) -> Result<Self, StoreOpenError> {
        if !path.join(MARKER).exists() {
            return Err(StoreOpenError::Missing(path.to_owned()));
        }
        Ok(Self { opened: OpenedStore::open(path)? })
    }

    /// Highest timestamp of a row.
    pub(in super::super) fn highest_ms(&self) -> u64 {
        self.opened.highest_ms
    }

    /// Stored incarnations of the node; `None` if there are none.
    pub(in super::super) fn incarnations(&self) -> Option<Vec<u8>> {
        self.opened
            .state
            .keyspace()
            .get(INCARNATIONS)
            .ok()
            .flatten()
            .map(|incarnations| incarnations.to_vec())
    }

    /// Estimated number of messages, presence events and metric rows.
    pub(in super::super) fn rows(&self) -> u64 {
        let rows = self.stretches().into_iter().map(|(_, keyspace)| keyspace.approximate_len() as u64);
        rows.sum()
    }

    /// Exports first the rows that expire soonest, always all of them, then history and metrics from the checkpoint on.
    pub(in super::super) fn walk(
        &self,
        checkpoint: &CopyCheckpoint,
        memory: DedupWindows,
        give: &mut PieceSink<'_>,
    ) -> Result<(), StoreError> {
        if !self.export_state(memory, give)? {
            return Ok(());
        }
        let stretches = self.stretches();
        let begun = Partition::parse(&checkpoint.stretch);
        for (stretch, keyspace) in stretches {
            if begun.is_some_and(|begun| stretch < begun) {
                continue;
            }
            let channel = checkpoint.channel.as_deref().filter(|_| begun == Some(stretch));
            let goes_on = match stretch.kind {
                PartitionKind::Messages => {
                    export_history(RowKind::Messages, stretch, &keyspace, channel, give)?
                }
                PartitionKind::Presence => {
                    export_history(RowKind::Presence, stretch, &keyspace, channel, give)?
                }
                _ => channel.is_some() || export_metrics(stretch, &keyspace, give)?,
            };
            if !goes_on {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Partitions that a checkpoint can refer to, in the order of the export.
    fn stretches(&self) -> Vec<(Partition, Keyspace)> {
        let kinds = [PartitionKind::Messages, PartitionKind::Presence, PartitionKind::Metrics];
        let of_kinds = kinds.map(|kind| self.opened.partitions.overlapping(kind, 0, u64::MAX));
        of_kinds.into_iter().flatten().collect()
    }

    fn export_state(&self, memory: DedupWindows, give: &mut PieceSink<'_>) -> Result<bool, StoreError> {
        let partitions = &self.opened.partitions;
        let mut give = |piece| give(ExportedPiece { piece, rows: 0, checkpoint: None });
        let mut ids = Vec::new();
        let oldest_ms = memory.now_ms.saturating_sub(memory.ids_ms);
        for (_, keyspace) in partitions.overlapping(PartitionKind::Ids, oldest_ms, u64::MAX) {
            for row in keyspace.iter() {
                let (key, value) = row.into_inner().map_err(failed)?;
                ids.extend(read_id(&key, &value).filter(|id| id.timestamp_ms >= oldest_ms));
                if ids.len() >= PIECE_ROWS && !give(CopyPiece::Ids(std::mem::take(&mut ids))) {
                    return Ok(false);
                }
            }
        }
        if !give(CopyPiece::Ids(ids)) {
            return Ok(false);
        }
        let mut after = None;
        loop {
            let page = nonces::page(partitions, after.as_deref(), memory.nonces_ms, memory.now_ms);
            let page = page.map_err(failed)?;
            for nonces in page.nonces.chunks(PIECE_ROWS) {
                if !give(CopyPiece::Nonces(nonces.to_vec())) {
                    return Ok(false);
                }
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let revocations = RevocationRows::all(partitions).map_err(failed)?;
        let members = self.opened.members.all().map_err(failed)?;
        let queues = self.opened.queues.changed(&HashMap::new())?;
        let mut pieces = revocations
            .chunks(PIECE_ROWS)
            .map(|revocations| CopyPiece::Revocations(revocations.to_vec()))
            .chain(members.chunks(PIECE_ROWS).map(|members| CopyPiece::Members(members.to_vec())))
            .chain(queues.into_iter().map(|row| CopyPiece::Queues(vec![row])));
        Ok(pieces.all(give))
    }
}

/// Exports the channels of one partition, from the last to the first; leaves out `channel` and the channels after it.
fn export_history(
    kind: RowKind,
    stretch: Partition,
    keyspace: &Keyspace,
    channel: Option<&[u8]>,
    give: &mut PieceSink<'_>,
) -> Result<bool, StoreError> {
    let end = channel.map_or(Bound::Unbounded, Bound::Excluded);
    // Keys ascend from the newest row of a channel to the oldest.
    let rows = keyspace.range::<&[u8], _>((Bound::Unbounded, end)).rev();
    let mut buffer = ChannelRowBuffer {
        kind,
        stretch,
        prefix: Vec::new(),
        is_first_part: true,
        rows: Vec::new(),
        bytes: 0,
    };
    for row in rows {
        let row = row.into_inner().map_err(failed)?;
        let prefix = row.0.len().checked_sub(HistoryPosition::BYTES);
        let prefix = prefix.map(|length| &row.0[..length]).ok_or_else(damaged)?;
        let is_other = prefix != buffer.prefix;
        if (is_other || buffer.is_full()) && !buffer.emit(is_other, give)? {
            return Ok(false);
        }
        if is_other {
            buffer.prefix = prefix.to_vec();
        }
        buffer.bytes += row.1.len();
        buffer.rows.push(row);
    }
    buffer.emit(true, give)
}

/// Rows of one channel that are not emitted yet.
struct ChannelRowBuffer {
    kind: RowKind,
    stretch: Partition,
    prefix: Vec<u8>,
    is_first_part: bool,
    rows: Vec<KvPair>,
    bytes: usize,
}

impl ChannelRowBuffer {
    fn is_full(&self) -> bool {
        self.rows.len() >= PIECE_ROWS || self.bytes >= PIECE_BYTES
    }

    /// Emits the rows; `ends`: this is the last piece of the channel.
    fn emit(&mut self, ends: bool, give: &mut PieceSink<'_>) -> Result<bool, StoreError> {
        let buffer = std::mem::take(&mut self.rows);
        let begins = std::mem::replace(&mut self.is_first_part, ends);
        self.bytes = 0;
        if buffer.is_empty() {
            return Ok(true);
        }
        let (account, rest) = keys::take_part(&self.prefix).ok_or_else(damaged)?;
        let (channel, _) = keys::take_part(rest).ok_or_else(damaged)?;
        let key = ChannelKey::new(AccountId::new(account), ChannelName::stored(channel));
        let count = buffer.len() as u64;
        let read = |(key, value): KvPair| {
            let position = keys::position_of(&key).ok_or_else(damaged)?;
            Ok((position, std::str::from_utf8(&value).map_err(|_| damaged())?.into()))
        };
        let rows = buffer.into_iter().map(read).collect::<Result<Vec<_>, StoreError>>()?;
        let piece = CopiedChannelRows {
            kind: self.kind,
            key,
            retention_ms: self.stretch.keep_ms,
            is_first_part: begins,
            rows,
        };
        let checkpoint =
            ends.then(|| CopyCheckpoint { stretch: self.stretch.name(), channel: Some(self.prefix.clone()) });
        Ok(give(ExportedPiece { piece: CopyPiece::Rows(piece), rows: count, checkpoint }))
    }
}

/// Returns `None` if the row is damaged.
fn read_id(key: &[u8], value: &[u8]) -> Option<StoredId> {
    let [account, channel, key_name, client_id, id] = keys::read_id_key(key)?;
    let scope = IdScope {
        key: ChannelKey::new(AccountId::new(account), ChannelName::stored(channel)),
        key_name: key_name.into(),
        client_id: (!client_id.is_empty()).then(|| ClientId::stored(client_id)),
    };
    let field = |at: usize| value.get(at..)?.first_chunk().copied().map(u64::from_be_bytes);
    let stamp = Stamp { incarnation: field(0)?, sequence: field(8)? };
    Some(StoredId { scope, id: id.into(), stamp, timestamp_ms: field(16)? })
}

fn export_metrics(
    stretch: Partition,
    keyspace: &Keyspace,
    give: &mut PieceSink<'_>,
) -> Result<bool, StoreError> {
    let mut rows = Vec::new();
    let mut give_rows = |rows: Vec<_>| {
        let count = rows.len() as u64;
        give(ExportedPiece { piece: CopyPiece::Metrics(rows), rows: count, checkpoint: None })
    };
    for row in keyspace.iter() {
        let (key, value) = row.into_inner().map_err(failed)?;
        rows.extend(metrics::read_row(&key, &value)?);
        if rows.len() >= PIECE_ROWS && !give_rows(std::mem::take(&mut rows)) {
            return Ok(false);
        }
    }
    let count = rows.len() as u64;
    let checkpoint = CopyCheckpoint { stretch: stretch.name(), channel: Some(Vec::new()) };
    Ok(give(ExportedPiece { piece: CopyPiece::Metrics(rows), rows: count, checkpoint: Some(checkpoint) }))
}

fn damaged() -> StoreError {
    failed("a stored row is damaged")
}
