//! The bytes of a backup: a line that names the format, then blocks.
//!
//! A block is its kind (1 byte), the length of its content, the length of what is stored of it, a checksum (4 bytes each, big-endian),
//! and the stored bytes: the content itself, or its LZ4 block where that is shorter. The checksum is a CRC-32 of all that and of the
//! block's number, so a block that is changed, missing, doubled or in another place is found.

use std::io::{self, Read, Write};

use flate2::Crc;

use super::error::{BackupError, BlockLocation};

/// The first line of a backup, before the number of its format.
const MAGIC: &[u8] = b"fanfare backup ";
pub(super) const FORMAT: u32 = 1;
/// The magic, four digits and the end of the line.
const LINE_BYTES: usize = MAGIC.len() + 5;
const HEAD_BYTES: usize = 13;
/// Largest content of a block, which bounds the allocation that a damaged length can cause. A row fits into one block and is far smaller.
pub(super) const CONTENT_BYTES_MAX: usize = 64 * 1024 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum BlockKind {
    /// First: JSON.
    Header = b'H',
    /// A file of the data folder: its name, a line feed, its content.
    File = b'F',
    /// The table of the rows that follow: database, a slash, name.
    Table = b'T',
    Rows = b'R',
    /// Last: the totals as JSON.
    End = b'E',
    /// Replaces `End` in a backup that was given up: the reason.
    GaveUp = b'X',
}

impl BlockKind {
    const ALL: [Self; 6] = [Self::Header, Self::File, Self::Table, Self::Rows, Self::End, Self::GaveUp];

    fn of(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

pub(super) struct BlockWriter<W> {
    out: W,
    number: u64,
    block: Vec<u8>,
}

impl<W: Write> BlockWriter<W> {
    pub(super) fn begin(mut out: W) -> io::Result<Self> {
        let line = [MAGIC, format!("{FORMAT:04}\n").as_bytes()].concat();
        out.write_all(&line)?;
        Ok(Self { out, number: 0, block: Vec::new() })
    }

    pub(super) fn put(&mut self, kind: BlockKind, content: &[u8]) -> io::Result<()> {
        if content.len() > CONTENT_BYTES_MAX {
            return Err(io::Error::other("a row is too long for a backup"));
        }
        let most = lz4_flex::block::get_maximum_output_size(content.len());
        self.block.resize(HEAD_BYTES + most, 0);
        let packed = lz4_flex::block::compress_into(content, &mut self.block[HEAD_BYTES..]);
        let stored = match packed {
            Ok(length) if length < content.len() => length,
            _ => {
                self.block.truncate(HEAD_BYTES);
                self.block.extend_from_slice(content);
                content.len()
            }
        };
        self.block.truncate(HEAD_BYTES + stored);
        self.block[0] = kind as u8;
        self.block[1..5].copy_from_slice(&(content.len() as u32).to_be_bytes());
        self.block[5..9].copy_from_slice(&(stored as u32).to_be_bytes());
        let sum = checksum(self.number, &self.block[..9], &self.block[HEAD_BYTES..]);
        self.block[9..HEAD_BYTES].copy_from_slice(&sum.to_be_bytes());
        self.number += 1;
        self.out.write_all(&self.block)
    }

    pub(super) fn finish(mut self) -> io::Result<()> {
        self.out.flush()
    }
}

pub(super) struct BlockReader<R> {
    from: R,
    /// Location of the block that was read last.
    location: BlockLocation,
    next_byte: u64,
    next_block: u64,
    stored: Vec<u8>,
    content: Vec<u8>,
}

impl<R: Read> BlockReader<R> {
    /// Begins to read a backup.
    ///
    /// # Errors
    /// The input is not a backup, or one of another format.
    pub(super) fn begin(mut from: R) -> Result<Self, BackupError> {
        let mut line = [0; LINE_BYTES];
        let length = read_all(&mut from, &mut line).map_err(BackupError::Unread)?;
        let Some(number) = line[..length].strip_prefix(MAGIC) else {
            // // A file that ends within its first line counts as truncated too.
            return Err(match !line[..length].is_empty() && MAGIC.starts_with(&line[..length]) {
                true => BackupError::Cut(BlockLocation::default()),
                false => BackupError::Foreign,
            });
        };
        if length < LINE_BYTES {
            return Err(BackupError::Cut(BlockLocation::default()));
        }
        let Some(number) = number.strip_suffix(b"\n") else { return Err(BackupError::Foreign) };
        let found = String::from_utf8_lossy(number).into_owned();
        match found.parse() {
            Ok(FORMAT) => {}
            Ok(_) => return Err(BackupError::Version { found }),
            Err(_) => return Err(BackupError::Foreign),
        }
        let (location, next_byte) = (BlockLocation::default(), LINE_BYTES as u64);
        Ok(Self { from, location, next_byte, next_block: 0, stored: Vec::new(), content: Vec::new() })
    }

    /// Location of the block that was read last, or could not be read.
    pub(super) fn location(&self) -> BlockLocation {
        self.location.clone()
    }

    pub(super) fn set_table(&mut self, table: &str) {
        self.location.table = Some(table.into());
    }

    /// Reads the next block and verifies its checksum.
    pub(super) fn next(&mut self) -> Result<(BlockKind, &[u8]), BackupError> {
        (self.location.byte, self.location.block) = (self.next_byte, self.next_block);
        let mut head = [0; HEAD_BYTES];
        let length = read_all(&mut self.from, &mut head).map_err(BackupError::Unread)?;
        if length < HEAD_BYTES {
            return Err(BackupError::Cut(self.location()));
        }
        let field = |at: usize| u32::from_be_bytes(std::array::from_fn(|byte| head[at + byte]));
        let (content, stored, sum) = (field(1) as usize, field(5) as usize, field(9));
        if content > CONTENT_BYTES_MAX || stored > content {
            return Err(self.damaged("its length cannot be"));
        }
        self.stored.resize(stored, 0);
        let length = read_all(&mut self.from, &mut self.stored).map_err(BackupError::Unread)?;
        if length < stored {
            return Err(BackupError::Cut(self.location()));
        }
        if checksum(self.location.block, &head[..9], &self.stored) != sum {
            return Err(self.damaged("its checksum is another one"));
        }
        let kind = BlockKind::of(head[0]).ok_or_else(|| self.damaged("its kind is unknown"))?;
        if stored == content {
            std::mem::swap(&mut self.content, &mut self.stored);
        } else {
            self.content.resize(content, 0);
            let unpacked = lz4_flex::block::decompress_into(&self.stored, &mut self.content);
            if !matches!(unpacked, Ok(length) if length == content) {
                return Err(self.damaged("it cannot be unpacked"));
            }
        }
        self.next_block += 1;
        self.next_byte += (HEAD_BYTES + stored) as u64;
        Ok((kind, &self.content))
    }

    /// Ends the reading and returns the size of the backup in bytes.
    ///
    /// # Errors
    /// Bytes follow the last block.
    pub(super) fn end(mut self) -> Result<u64, BackupError> {
        match read_all(&mut self.from, &mut [0]).map_err(BackupError::Unread)? {
            0 => Ok(self.next_byte),
            _ => Err(self.damaged("something follows it, and it is the last one")),
        }
    }

    pub(super) fn damaged(&self, reason: &'static str) -> BackupError {
        BackupError::Damaged { location: self.location(), reason }
    }
}

fn checksum(number: u64, head: &[u8], stored: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(&number.to_be_bytes());
    crc.update(head);
    crc.update(stored);
    crc.sum()
}

/// Reads until the buffer is full or the input ends, and returns the number of bytes.
fn read_all(from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
    let mut length = 0;
    while length < buffer.len() {
        match from.read(&mut buffer[length..]) {
            Ok(0) => break,
            Ok(count) => length += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(length)
}
