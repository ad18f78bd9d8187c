//! All that a store holds, read in one order while no node uses it.

use std::collections::HashMap;
use std::ops::Bound;
use std::path::Path;

use fjall::{Keyspace, KvPair};

use super::open::{MARKER, OpenError, Opened};
use super::partitions::{Kind, Partition};
use super::revocations::Revocations;
use super::{RUNS, failed, keys, metrics, nonces};
use crate::model::{AccountId, ChannelKey, ChannelName, ClientId, Stamp};
use crate::origin::history::copy::{ChannelRows, Mark, Memory, Piece, Read, StoredId};
use crate::origin::history::{IdScope, Position, RowKind, StoreError};

/// Of one piece.
const PIECE_ROWS: usize = 256;
const PIECE_BYTES: usize = 256 * 1024;

/// The store of a node that does not run.
pub(in super::super) struct Export {
    opened: Opened,
}

/// Takes what was read; false: it wants no more.
pub(in super::super) type Give<'a> = dyn FnMut(Read) -> bool + 'a;

impl Export {
    /// Makes nothing where there is no store.
    pub(in super::super) fn open(path: &Path) -> Result<Self, OpenError> {
        if !path.join(MARKER).exists() {
            return Err(OpenError::Missing(path.to_owned()));
        }
        Ok(Self { opened: Opened::open(path)? })
    }

    /// The highest time of a row.
    pub(in super::super) fn highest_ms(&self) -> u64 {
        self.opened.highest_ms
    }

    /// What is noted of the runs of the node; none if nothing is.
    pub(in super::super) fn runs(&self) -> Option<Vec<u8>> {
        self.opened.state.keyspace().get(RUNS).ok().flatten().map(|runs| runs.to_vec())
    }

    /// About how many messages, presence events and counts there are.
    pub(in super::super) fn rows(&self) -> u64 {
        let rows = self.stretches().into_iter().map(|(_, keyspace)| keyspace.approximate_len() as u64);
        rows.sum()
    }

    /// First what ends soonest, all of it, then from the mark on history and counts.
    pub(in super::super) fn walk(
        &self,
        mark: &Mark,
        memory: Memory,
        give: &mut Give<'_>,
    ) -> Result<(), StoreError> {
        if !self.remembered(memory, give)? {
            return Ok(());
        }
        let stretches = self.stretches();
        let begun = Partition::parse(&mark.stretch);
        for (stretch, keyspace) in stretches {
            if begun.is_some_and(|begun| stretch < begun) {
                continue;
            }
            let channel = mark.channel.as_deref().filter(|_| begun == Some(stretch));
            let goes_on = match stretch.kind {
                Kind::Messages => history(RowKind::Messages, stretch, &keyspace, channel, give)?,
                Kind::Presence => history(RowKind::Presence, stretch, &keyspace, channel, give)?,
                _ => channel.is_some() || counts(stretch, &keyspace, give)?,
            };
            if !goes_on {
                return Ok(());
            }
        }
        Ok(())
    }

    /// What is copied from a mark on, in the order in which it is.
    fn stretches(&self) -> Vec<(Partition, Keyspace)> {
        let kinds = [Kind::Messages, Kind::Presence, Kind::Metrics];
        let of_kinds = kinds.map(|kind| self.opened.partitions.overlapping(kind, 0, u64::MAX));
        of_kinds.into_iter().flatten().collect()
    }

    fn remembered(&self, memory: Memory, give: &mut Give<'_>) -> Result<bool, StoreError> {
        let partitions = &self.opened.partitions;
        let mut give = |piece| give(Read { piece, rows: 0, mark: None });
        let mut ids = Vec::new();
        let oldest_ms = memory.now_ms.saturating_sub(memory.ids_ms);
        for (_, keyspace) in partitions.overlapping(Kind::Ids, oldest_ms, u64::MAX) {
            for row in keyspace.iter() {
                let (key, value) = row.into_inner().map_err(failed)?;
                ids.extend(read_id(&key, &value).filter(|id| id.timestamp_ms >= oldest_ms));
                if ids.len() >= PIECE_ROWS && !give(Piece::Ids(std::mem::take(&mut ids))) {
                    return Ok(false);
                }
            }
        }
        if !give(Piece::Ids(ids)) {
            return Ok(false);
        }
        let mut after = None;
        loop {
            let page = nonces::page(partitions, after.as_deref(), memory.nonces_ms, memory.now_ms);
            let page = page.map_err(failed)?;
            for nonces in page.nonces.chunks(PIECE_ROWS) {
                if !give(Piece::Nonces(nonces.to_vec())) {
                    return Ok(false);
                }
            }
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        let revocations = Revocations::all(partitions).map_err(failed)?;
        let members = self.opened.members.all().map_err(failed)?;
        let queues = self.opened.queues.changed(&HashMap::new())?;
        let mut pieces = revocations
            .chunks(PIECE_ROWS)
            .map(|revocations| Piece::Revocations(revocations.to_vec()))
            .chain(members.chunks(PIECE_ROWS).map(|members| Piece::Members(members.to_vec())))
            .chain(queues.into_iter().map(|row| Piece::Queues(vec![row])));
        Ok(pieces.all(give))
    }
}

/// The channels of one stretch, from the last to the first; those behind `channel` are left out, and so is that one.
fn history(
    kind: RowKind,
    stretch: Partition,
    keyspace: &Keyspace,
    channel: Option<&[u8]>,
    give: &mut Give<'_>,
) -> Result<bool, StoreError> {
    let end = channel.map_or(Bound::Unbounded, Bound::Excluded);
    // Keys ascend from the newest row of a channel to the oldest.
    let rows = keyspace.range::<&[u8], _>((Bound::Unbounded, end)).rev();
    let mut gathered =
        Gathered { kind, stretch, prefix: Vec::new(), begins: true, rows: Vec::new(), bytes: 0 };
    for row in rows {
        let row = row.into_inner().map_err(failed)?;
        let prefix = row.0.len().checked_sub(Position::BYTES);
        let prefix = prefix.map(|length| &row.0[..length]).ok_or_else(damaged)?;
        let is_other = prefix != gathered.prefix;
        if (is_other || gathered.is_full()) && !gathered.hand_over(is_other, give)? {
            return Ok(false);
        }
        if is_other {
            gathered.prefix = prefix.to_vec();
        }
        gathered.bytes += row.1.len();
        gathered.rows.push(row);
    }
    gathered.hand_over(true, give)
}

/// Rows of one channel that are not handed over yet.
struct Gathered {
    kind: RowKind,
    stretch: Partition,
    prefix: Vec<u8>,
    begins: bool,
    rows: Vec<KvPair>,
    bytes: usize,
}

impl Gathered {
    fn is_full(&self) -> bool {
        self.rows.len() >= PIECE_ROWS || self.bytes >= PIECE_BYTES
    }

    /// `ends`: it is the last piece of the channel.
    fn hand_over(&mut self, ends: bool, give: &mut Give<'_>) -> Result<bool, StoreError> {
        let gathered = std::mem::take(&mut self.rows);
        let begins = std::mem::replace(&mut self.begins, ends);
        self.bytes = 0;
        if gathered.is_empty() {
            return Ok(true);
        }
        let (account, rest) = keys::take_part(&self.prefix).ok_or_else(damaged)?;
        let (channel, _) = keys::take_part(rest).ok_or_else(damaged)?;
        let key = ChannelKey::new(AccountId::new(account), ChannelName::stored(channel));
        let count = gathered.len() as u64;
        let read = |(key, value): KvPair| {
            let position = keys::position_of(&key).ok_or_else(damaged)?;
            Ok((position, std::str::from_utf8(&value).map_err(|_| damaged())?.into()))
        };
        let rows = gathered.into_iter().map(read).collect::<Result<Vec<_>, StoreError>>()?;
        let piece = ChannelRows { kind: self.kind, key, kept_ms: self.stretch.keep_ms, begins, rows };
        let mark = ends.then(|| Mark { stretch: self.stretch.name(), channel: Some(self.prefix.clone()) });
        Ok(give(Read { piece: Piece::Rows(piece), rows: count, mark }))
    }
}

/// None: the row is damaged.
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

fn counts(stretch: Partition, keyspace: &Keyspace, give: &mut Give<'_>) -> Result<bool, StoreError> {
    let mut rows = Vec::new();
    let mut hand_over = |rows: Vec<_>| {
        let count = rows.len() as u64;
        give(Read { piece: Piece::Metrics(rows), rows: count, mark: None })
    };
    for row in keyspace.iter() {
        let (key, value) = row.into_inner().map_err(failed)?;
        rows.extend(metrics::read_row(&key, &value)?);
        if rows.len() >= PIECE_ROWS && !hand_over(std::mem::take(&mut rows)) {
            return Ok(false);
        }
    }
    let count = rows.len() as u64;
    let mark = Mark { stretch: stretch.name(), channel: Some(Vec::new()) };
    Ok(give(Read { piece: Piece::Metrics(rows), rows: count, mark: Some(mark) }))
}

fn damaged() -> StoreError {
    failed("a stored row is damaged")
}
