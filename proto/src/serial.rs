//! Channel positions, and the serials by which clients keep them.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// A channel position: for each incarnation the sequence of its last message that is included, a version
/// vector.
///
/// The text is opaque to clients: entries `<incarnation>.<base36>` in rising order of incarnation, joined by
/// `~`. `0` is the position without entries. An incarnation is 8 base64url characters, or 11 if it has more
/// bits than nodes give theirs.
///
/// A position whose text is over [`Self::BYTES_MAX`] is `~` for clients, which no node can read. A client
/// that resumes from it is told a continuity loss.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Serial(Vec<(u64, u64)>);

/// Bytes of an incarnation as nodes give themselves.
const SHORT_BYTES: usize = Serial::INCARNATION_BITS as usize / 8;
/// Greatest length of an entry: `~`, 11 characters, `.` and 13 digits.
const ENTRY_BYTES_MAX: usize = 26;
/// Text for clients in place of a position that is too long.
const TOO_LONG: &str = "~";

/// Error of a text that is no serial of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SerialError;

impl fmt::Display for SerialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("serial cannot be read")
    }
}

impl std::error::Error for SerialError {}

impl Serial {
    /// Greatest length of the text for clients, in bytes.
    pub const BYTES_MAX: usize = 512;
    /// Bits of an incarnation as nodes give themselves: few enough for positions of thirty nodes to fit.
    pub const INCARNATION_BITS: u32 = 48;
    /// Greatest number of incarnations in a position between nodes.
    pub const RUNS_MAX: usize = 1_024;

    /// Makes a position with one entry.
    pub fn single(incarnation: u64, sequence: u64) -> Self {
        Self(vec![(incarnation, sequence)])
    }

    /// Gives the entries, incarnation and sequence, in rising order of incarnation.
    pub fn entries(&self) -> &[(u64, u64)] {
        &self.0
    }

    /// Tells whether the position has no entries.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Gives the sequence of one incarnation, or `None` if the position has no entry of it.
    pub fn sequence_of(&self, incarnation: u64) -> Option<u64> {
        let index = self.0.binary_search_by_key(&incarnation, |entry| entry.0).ok()?;
        Some(self.0[index].1)
    }

    /// Raises the entry of one incarnation, and never lowers it.
    pub fn advance(&mut self, incarnation: u64, sequence: u64) {
        match self.0.binary_search_by_key(&incarnation, |entry| entry.0) {
            Ok(index) => self.0[index].1 = self.0[index].1.max(sequence),
            Err(index) => self.0.insert(index, (incarnation, sequence)),
        }
    }

    /// Removes the entries of all other incarnations.
    pub fn retain(&mut self, is_kept: impl Fn(u64) -> bool) {
        self.0.retain(|(incarnation, _)| is_kept(*incarnation));
    }

    /// Gives the least position that covers both.
    #[must_use]
    pub fn join(&self, other: &Self) -> Self {
        let mut joined = self.clone();
        for (incarnation, sequence) in &other.0 {
            joined.advance(*incarnation, *sequence);
        }
        joined
    }

    /// Tells whether this position includes all messages that `other` includes.
    pub fn includes(&self, other: &Self) -> bool {
        other.0.iter().all(|(incarnation, sequence)| self.includes_one(*incarnation, *sequence))
    }

    /// Tells whether this position is as far as `other` in every incarnation that both have.
    pub fn keeps_up_with(&self, other: &Self) -> bool {
        let is_behind =
            |(incarnation, sequence): &(u64, u64)| other.sequence_of(*incarnation) > Some(*sequence);
        !self.entries().iter().any(is_behind)
    }

    /// Tells whether this position includes the message with this incarnation and sequence. Sequences begin
    /// at 1; every position includes 0.
    pub fn includes_one(&self, incarnation: u64, sequence: u64) -> bool {
        sequence == 0 || self.sequence_of(incarnation).is_some_and(|reached| reached >= sequence)
    }
}

/// Writes the text for clients.
impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() <= Self::BYTES_MAX / ENTRY_BYTES_MAX {
            return self.write(f);
        }
        let whole = self.to_whole();
        f.write_str(if whole.len() <= Self::BYTES_MAX { &whole } else { TOO_LONG })
    }
}

impl FromStr for Serial {
    type Err = SerialError;

    fn from_str(text: &str) -> Result<Self, SerialError> {
        if text.len() > Self::BYTES_MAX { Err(SerialError) } else { Self::read(text) }
    }
}

impl Serial {
    /// Gives the text for nodes, which has no limit but that of its entries.
    pub fn to_whole(&self) -> String {
        let mut text = String::new();
        // Writing to a string does not fail.
        self.write(&mut text).ok();
        text
    }

    /// Reads the text of [`Self::to_whole`].
    ///
    /// # Errors
    /// The text is no serial, or has more than [`Self::RUNS_MAX`] incarnations.
    pub fn of_whole(text: &str) -> Result<Self, SerialError> {
        if text.len() > Self::RUNS_MAX * ENTRY_BYTES_MAX {
            return Err(SerialError);
        }
        Self::read(text)
            .and_then(|serial| if serial.0.len() > Self::RUNS_MAX { Err(SerialError) } else { Ok(serial) })
    }

    fn write(&self, out: &mut impl fmt::Write) -> fmt::Result {
        if self.0.is_empty() {
            return out.write_str("0");
        }
        for (index, (incarnation, sequence)) in self.0.iter().enumerate() {
            // Each entry is written in one piece, so that the string of a single entry is allocated once.
            let mut text = [b'~'; ENTRY_BYTES_MAX];
            let bytes = incarnation.to_be_bytes();
            let written = URL_SAFE_NO_PAD.encode_slice(significant(&bytes), &mut text[1..12]);
            let dot = 1 + written.map_err(|_| fmt::Error)?;
            text[dot] = b'.';
            let end = dot + 1 + write_base36(&mut text[dot + 1..], *sequence);
            let begin = usize::from(index == 0);
            out.write_str(std::str::from_utf8(&text[begin..end]).map_err(|_| fmt::Error)?)?;
        }
        Ok(())
    }

    fn read(text: &str) -> Result<Self, SerialError> {
        if text == "0" {
            return Ok(Self::default());
        }
        let entries = text.split('~').map(read_entry).collect::<Result<Vec<_>, _>>()?;
        if !entries.is_sorted_by(|a, b| a.0 < b.0) {
            return Err(SerialError);
        }
        Ok(Self(entries))
    }
}

/// Gives the bytes of an incarnation that are written.
fn significant(bytes: &[u8; 8]) -> &[u8] {
    let (rest, short) = bytes.split_at(8 - SHORT_BYTES);
    if rest.iter().all(|byte| *byte == 0) { short } else { bytes }
}

fn read_entry(text: &str) -> Result<(u64, u64), SerialError> {
    let (incarnation, sequence) = text.split_once('.').ok_or(SerialError)?;
    let read = URL_SAFE_NO_PAD.decode(incarnation).map_err(|_| SerialError)?;
    if ![SHORT_BYTES, 8].contains(&read.len()) {
        return Err(SerialError);
    }
    let mut bytes = [0; 8];
    bytes[8 - read.len()..].copy_from_slice(&read);
    Ok((u64::from_be_bytes(bytes), read_base36(sequence)?))
}

/// Writes the digits at the start of `out`, which has room for 13, and gives their number.
fn write_base36(out: &mut [u8], mut value: u64) -> usize {
    let count = value.checked_ilog(36).unwrap_or(0) as usize + 1;
    for digit in out[..count].iter_mut().rev() {
        *digit = b"0123456789abcdefghijklmnopqrstuvwxyz"[(value % 36) as usize];
        value /= 36;
    }
    count
}

/// Reads a number in the one spelling that [`write_base36`] writes.
fn read_base36(text: &str) -> Result<u64, SerialError> {
    let canonical = text.bytes().all(|byte| byte.is_ascii_digit() || byte.is_ascii_lowercase())
        && (text == "0" || !text.starts_with('0'));
    if !canonical {
        return Err(SerialError);
    }
    u64::from_str_radix(text, 36).map_err(|_| SerialError)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_serial_at_its_limit_and_one_past() {
        let serial = |last: u64| {
            let entries = (1..46).map(|incarnation| (incarnation, 0)).chain([(u64::MAX, last)]);
            Serial(entries.collect())
        };
        let (fits, longer) = (serial(36_u64.pow(4)), serial(36_u64.pow(5)));
        assert_eq!((fits.to_whole().len(), longer.to_whole().len()), (512, 513));
        assert_eq!(fits.to_string().parse(), Ok(fits));
        assert_eq!(longer.to_whole().parse::<Serial>(), Err(SerialError));
        assert_eq!(longer.to_string(), "~", "clients have no text of it");
        assert_eq!(longer.to_string().parse::<Serial>(), Err(SerialError));
        assert_eq!(Serial::of_whole(&longer.to_whole()), Ok(longer), "nodes have");
    }

    #[test]
    fn serial_of_thirty_incarnations_at_one_billion_round_trips() {
        let last_of_all = (1 << Serial::INCARNATION_BITS) - 1;
        let serial =
            Serial((0..30).map(|incarnation| (last_of_all - 29 + incarnation, 1_000_000_000)).collect());
        assert_eq!(serial.to_string().parse(), Ok(serial));
    }

    #[test]
    fn incarnation_has_eight_characters_and_reads_from_eleven() {
        let short = Serial::single(1 << 40, 7);
        let long = Serial::single(1 << Serial::INCARNATION_BITS, 7);
        assert_eq!((short.to_string(), long.to_string()), ("AQAAAAAA.7".into(), "AAEAAAAAAAA.7".into()));
        for serial in [short, long] {
            assert_eq!(serial.to_string().parse(), Ok(serial));
        }
        assert_eq!("AAABAAAAAAA.7".parse(), Ok(Serial::single(1 << 40, 7)));
        for other in ["AQ.7", ".7", "AAEAAAAAA.7", "AAEAAAAAAAAA.7", "AAEAAAAAAAAAAAAA.7"] {
            assert_eq!(other.parse::<Serial>(), Err(SerialError), "{other}");
        }
    }

    #[test]
    fn position_of_too_many_incarnations_is_refused() {
        let serial = |count: usize| {
            Serial((0..count as u64).map(|incarnation| (u64::MAX - incarnation, u64::MAX)).rev().collect())
        };
        let most = serial(Serial::RUNS_MAX);
        assert_eq!(Serial::of_whole(&most.to_whole()), Ok(most));
        assert_eq!(Serial::of_whole(&serial(Serial::RUNS_MAX + 1).to_whole()), Err(SerialError));
    }
}
