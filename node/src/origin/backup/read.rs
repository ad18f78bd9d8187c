//! A backup, read block by block: whatever it gives was whole.

use std::io::Read;

use super::error::BackupError;
use super::format::{BlockReader, Kind};
use super::{Database, Header, Summary, Totals};
use crate::origin::{history, outbox};

/// A part of a backup, in the order in which it comes.
pub(super) enum Part<'a> {
    File(&'a str, &'a [u8]),
    Table(Database, &'a str),
    /// Of the table before, in the order of their keys.
    Rows(Rows<'a>),
}

/// Reads a backup to its end and keeps nothing of it. `told` hears after each block how many rows were read, of about how many.
///
/// # Errors
/// It is not whole, or this version cannot restore it.
pub fn check(from: impl Read, told: impl FnMut(u64, u64)) -> Result<Summary, BackupError> {
    read(from, told, |_| Ok(()), |_| Ok(()))
}

/// The same, with each part.
pub(super) fn read(
    from: impl Read,
    mut told: impl FnMut(u64, u64),
    begin: impl FnOnce(&Header) -> Result<(), BackupError>,
    mut take: impl FnMut(Part<'_>) -> Result<(), BackupError>,
) -> Result<Summary, BackupError> {
    let mut blocks = BlockReader::begin(from)?;
    let header = match blocks.next()? {
        (Kind::Header, content) => serde_json::from_slice::<Header>(content).ok(),
        _ => None,
    };
    let header = header.ok_or_else(|| blocks.damaged("it is no header"))?;
    known(&header)?;
    begin(&header)?;
    let mut totals = Totals::default();
    let mut databases: Vec<Database> = Vec::new();
    loop {
        let (kind, content) = blocks.next()?;
        match kind {
            Kind::Header => return Err(blocks.damaged("it is a second header")),
            Kind::File => {
                let file = content
                    .iter()
                    .position(|byte| *byte == b'\n')
                    .and_then(|end| Some((std::str::from_utf8(&content[..end]).ok()?, &content[end + 1..])));
                let Some((name, content)) = file else { return Err(blocks.damaged("it is no file")) };
                take(Part::File(name, content))?;
            }
            Kind::Table => {
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
                take(Part::Table(database, name))?;
                let table = format!("{}/{name}", database.name());
                blocks.set_table(&table);
                totals.tables += 1;
            }
            Kind::Rows => {
                let counted = if totals.tables > 0 { Rows(content).counted() } else { None };
                let Some((rows, bytes)) = counted else {
                    return Err(blocks.damaged("its rows have no end, or no key"));
                };
                totals.rows += rows;
                totals.row_bytes += bytes;
                take(Part::Rows(Rows(content)))?;
                told(totals.rows, header.rows_about);
            }
            Kind::GaveUp => {
                let reason = String::from_utf8_lossy(content).into_owned();
                return Err(BackupError::GaveUp { place: blocks.place(), reason });
            }
            Kind::End => {
                if serde_json::from_slice(content).ok() != Some(totals) {
                    return Err(blocks.damaged("it counts other rows than came before it"));
                }
                let bytes = blocks.end()?;
                return Ok(Summary { header, totals, bytes });
            }
        }
    }
}

/// # Errors
/// Rows of a later version.
fn known(header: &Header) -> Result<(), BackupError> {
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

fn table<'a>(text: &'a str, header: &Header) -> Option<(Database, &'a str)> {
    let (database, name) = text.split_once('/')?;
    match database {
        "store" if header.store_format.is_some() && history::is_stored_table(name) => {
            Some((Database::Store, name))
        }
        "outbox" if header.outbox_format.is_some() && outbox::is_table(name) => {
            Some((Database::Outbox, name))
        }
        _ => None,
    }
}

/// Rows of a block, one after another. They end early where a length goes beyond the block or a key is empty.
pub(super) struct Rows<'a>(&'a [u8]);

impl Rows<'_> {
    /// The number of rows, and of the bytes of keys and values. None: they end early.
    fn counted(mut self) -> Option<(u64, u64)> {
        let (mut rows, mut bytes) = (0, 0);
        for (key, value) in self.by_ref() {
            rows += 1;
            bytes += (key.len() + value.len()) as u64;
        }
        self.0.is_empty().then_some((rows, bytes))
    }
}

impl<'a> Iterator for Rows<'a> {
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
