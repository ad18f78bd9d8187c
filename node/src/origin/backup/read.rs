//! Reads a backup block by block; every part that it gives has passed its checks.

use std::io::Read;

use super::error::BackupError;
use super::format::{BlockKind, BlockReader};
use super::{BackupDatabase, BackupHeader, BackupSummary, BackupTotals};
use crate::origin::{history, outbox};

/// A part of a backup, in the order in which it comes.
pub(super) enum BackupPart<'a> {
    File(&'a str, &'a [u8]),
    Table(BackupDatabase, &'a str),
    /// Rows of the last table, in the order of their keys.
    Rows(BlockRows<'a>),
}

/// Reads a backup to its end and discards the content. Reports after each block the rows read so far and their estimated total.
///
/// # Errors
/// The backup is incomplete or damaged, or this version cannot restore it.
pub fn check(from: impl Read, on_progress: impl FnMut(u64, u64)) -> Result<BackupSummary, BackupError> {
    read(from, on_progress, |_| Ok(()), |_| Ok(()))
}

/// Reads a backup like [`check`], and passes each part on.
pub(super) fn read(
    from: impl Read,
    mut on_progress: impl FnMut(u64, u64),
    begin: impl FnOnce(&BackupHeader) -> Result<(), BackupError>,
    mut take: impl FnMut(BackupPart<'_>) -> Result<(), BackupError>,
) -> Result<BackupSummary, BackupError> {
    let mut blocks = BlockReader::begin(from)?;
    let header = match blocks.next()? {
        (BlockKind::Header, content) => serde_json::from_slice::<BackupHeader>(content).ok(),
        _ => None,
    };
    let header = header.ok_or_else(|| blocks.damaged("it is no header"))?;
    check_formats(&header)?;
    begin(&header)?;
    let mut totals = BackupTotals::default();
    let mut databases: Vec<BackupDatabase> = Vec::new();
    loop {
        let (kind, content) = blocks.next()?;
        match kind {
            BlockKind::Header => return Err(blocks.damaged("it is a second header")),
            BlockKind::File => {
                let file = content
                    .iter()
                    .position(|byte| *byte == b'\n')
                    .and_then(|end| Some((std::str::from_utf8(&content[..end]).ok()?, &content[end + 1..])));
                let Some((name, content)) = file else { return Err(blocks.damaged("it is no file")) };
                take(BackupPart::File(name, content))?;
            }
            BlockKind::Table => {
                let Some((database, name)) =
                    std::str::from_utf8(content).ok().and_then(|text| table(text, &header))
                else {
                    return Err(blocks.damaged("this version does not know its table"));
                };
                if databases.last() != Some(&database) {
                    if databases.contains(&database) {
                        return Err(blocks.damaged("its database has ended before"));
                    }
                    databases.push(database);
                }
                take(BackupPart::Table(database, name))?;
                let table = format!("{}/{name}", database.name());
                blocks.set_table(&table);
                totals.tables += 1;
            }
            BlockKind::Rows => {
                let counted = if totals.tables > 0 { BlockRows(content).counted() } else { None };
                let Some((rows, bytes)) = counted else {
                    return Err(blocks.damaged("its rows have no end, or no key"));
                };
                totals.rows += rows;
                totals.row_bytes += bytes;
                take(BackupPart::Rows(BlockRows(content)))?;
                on_progress(totals.rows, header.rows_about);
            }
            BlockKind::GaveUp => {
                let reason = String::from_utf8_lossy(content).into_owned();
                return Err(BackupError::GaveUp { location: blocks.location(), reason });
            }
            BlockKind::End => {
                if serde_json::from_slice(content).ok() != Some(totals) {
                    return Err(blocks.damaged("it counts other rows than came before it"));
                }
                let bytes = blocks.end()?;
                return Ok(BackupSummary { header, totals, bytes });
            }
        }
    }
}

/// Checks that this version knows the formats of the rows.
///
/// # Errors
/// A later version wrote the rows.
fn check_formats(header: &BackupHeader) -> Result<(), BackupError> {
    let formats = [
        ("store", &header.store_format, history::STORE_FORMAT),
        ("outbox", &header.outbox_format, outbox::FORMAT),
    ];
    for (database, found, known) in formats {
        if let Some(found) = found.as_ref().filter(|found| **found != known) {
            let (found, node_version) = (found.clone(), header.node_version.clone());
            return Err(BackupError::Rows { database, found, known, node_version });
        }
    }
    Ok(())
}

fn table<'a>(text: &'a str, header: &BackupHeader) -> Option<(BackupDatabase, &'a str)> {
    let (database, name) = text.split_once('/')?;
    match database {
        "store" if header.store_format.is_some() && history::is_stored_table(name) => {
            Some((BackupDatabase::Store, name))
        }
        "outbox" if header.outbox_format.is_some() && outbox::is_table(name) => {
            Some((BackupDatabase::Outbox, name))
        }
        _ => None,
    }
}

/// Iterator over the rows of a block. Ends early if a length exceeds the block or a key is empty.
pub(super) struct BlockRows<'a>(&'a [u8]);

impl BlockRows<'_> {
    /// Counts the rows and the bytes of keys and values; `None` if the iterator ends early.
    fn counted(mut self) -> Option<(u64, u64)> {
        let (mut rows, mut bytes) = (0, 0);
        for (key, value) in self.by_ref() {
            rows += 1;
            bytes += (key.len() + value.len()) as u64;
        }
        self.0.is_empty().then_some((rows, bytes))
    }
}

impl<'a> Iterator for BlockRows<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (key_length, rest) = self.0.split_first_chunk()?;
        let (value_length, rest) = rest.split_first_chunk()?;
        let (key, rest) = rest.split_at_checked(u16::from_be_bytes(*key_length).into())?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*value_length) as usize)?;
        if key.is_empty() {
            return None;
        }
        self.0 = rest;
        Some((key, value))
    }
}
