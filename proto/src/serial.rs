//! The position in a channel that a client keeps and gives back.

use std::fmt;
use std::str::FromStr;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

/// "All up to here" of one channel: for each incarnation of a node the sequence of its last message.
///
/// As text opaque to clients: entries `<11 base64url characters>.<base36>` in rising order of incarnation, joined
/// by `~`; `0` is the one of no run, which says nothing.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Serial(Vec<(u64, u64)>);

/// The text is no serial that a node wrote.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SerialError;

impl fmt::Display for SerialError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("serial cannot be read")
    }
}

impl std::error::Error for SerialError {}

impl Serial {
    pub const BYTES_MAX: usize = 512;

    pub fn single(incarnation: u64, sequence: u64) -> Self {
        Self(vec![(incarnation, sequence)])
    }

    /// (incarnation, sequence) in rising order of incarnation.
    pub fn entries(&self) -> &[(u64, u64)] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn sequence_of(&self, incarnation: u64) -> Option<u64> {
        let index = self.0.binary_search_by_key(&incarnation, |entry| entry.0).ok()?;
        Some(self.0[index].1)
    }

    /// Raises one entry; never lowers it.
    pub fn advance(&mut self, incarnation: u64, sequence: u64) {
        match self.0.binary_search_by_key(&incarnation, |entry| entry.0) {
            Ok(index) => self.0[index].1 = self.0[index].1.max(sequence),
            Err(index) => self.0.insert(index, (incarnation, sequence)),
        }
    }

    /// Leaves out the other incarnations.
    pub fn retain(&mut self, is_kept: impl Fn(u64) -> bool) {
        self.0.retain(|(incarnation, _)| is_kept(*incarnation));
    }

    /// The least position that covers both.
    #[must_use]
    pub fn join(&self, other: &Self) -> Self {
        let mut joined = self.clone();
        for (incarnation, sequence) in &other.0 {
            joined.advance(*incarnation, *sequence);
        }
        joined
    }

    /// Whether everything up to `other` is up to here.
    pub fn covers(&self, other: &Self) -> bool {
        other.0.iter().all(|(incarnation, sequence)| self.covers_one(*incarnation, *sequence))
    }

    /// Whether it is as far as the other one in every run that both have.
    pub fn keeps_up_with(&self, other: &Self) -> bool {
        let is_behind = |(run, sequence): &(u64, u64)| other.sequence_of(*run) > Some(*sequence);
        !self.entries().iter().any(is_behind)
    }

    /// Whether the message with this stamp is up to here. Sequences begin at 1: 0 is covered by every position.
    pub fn covers_one(&self, incarnation: u64, sequence: u64) -> bool {
        sequence == 0 || self.sequence_of(incarnation).is_some_and(|reached| reached >= sequence)
    }
}

impl fmt::Display for Serial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("0");
        }
        for (index, (incarnation, sequence)) in self.0.iter().enumerate() {
            // In one piece, so that a string of the only one is allocated once.
            let mut text = *b"~00000000000.0000000000000";
            URL_SAFE_NO_PAD
                .encode_slice(incarnation.to_be_bytes(), &mut text[1..12])
                .map_err(|_| fmt::Error)?;
            let end = 13 + write_base36(&mut text[13..], *sequence);
            let begin = usize::from(index == 0);
            f.write_str(std::str::from_utf8(&text[begin..end]).map_err(|_| fmt::Error)?)?;
        }
        Ok(())
    }
}

impl FromStr for Serial {
    type Err = SerialError;

    fn from_str(text: &str) -> Result<Self, SerialError> {
        if text.len() > Self::BYTES_MAX {
            return Err(SerialError);
        }
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

fn read_entry(text: &str) -> Result<(u64, u64), SerialError> {
    let (incarnation, sequence) = text.split_once('.').ok_or(SerialError)?;
    let incarnation = URL_SAFE_NO_PAD.decode(incarnation).map_err(|_| SerialError)?;
    let incarnation = <[u8; 8]>::try_from(incarnation).map_err(|_| SerialError)?;
    Ok((u64::from_be_bytes(incarnation), read_base36(sequence)?))
}

/// At the start of `out`, which has room for 13 digits. Gives how many it took.
fn write_base36(out: &mut [u8], mut value: u64) -> usize {
    let count = value.checked_ilog(36).unwrap_or(0) as usize + 1;
    for digit in out[..count].iter_mut().rev() {
        *digit = b"0123456789abcdefghijklmnopqrstuvwxyz"[(value % 36) as usize];
        value /= 36;
    }
    count
}

/// Only the spelling that is written, so that a position has one text.
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
            let entries = (1..36).map(|incarnation| (incarnation, 0)).chain([(u64::MAX, last)]);
            Serial(entries.collect())
        };
        let (fits, longer) = (serial(36_u64.pow(9)), serial(36_u64.pow(10)));
        assert_eq!((fits.to_string().len(), longer.to_string().len()), (512, 513));
        assert_eq!(fits.to_string().parse(), Ok(fits));
        assert_eq!(longer.to_string().parse::<Serial>(), Err(SerialError));
    }
}
