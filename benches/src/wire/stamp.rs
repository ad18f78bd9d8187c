//! The sequence and sending time in every measured message, found without parsing JSON.

const MARKER: &[u8] = b"{\"bench\":\"";
const TIME_DIGITS: usize = 20;
const SEQUENCE_DIGITS: usize = 10;
const STAMP_BYTES: usize = MARKER.len() + TIME_DIGITS + 1 + SEQUENCE_DIGITS;

/// The smallest `data` that holds a stamp.
pub const DATA_BYTES_MIN: usize = STAMP_BYTES + 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Nanoseconds on the machine's monotonic clock.
    pub sent_ns: u64,
    /// Counted from 0 by the publisher.
    pub sequence: u32,
}

impl Stamp {
    /// The message's `data`: a JSON object of exactly `bytes` bytes (at least `DATA_BYTES_MIN`).
    pub fn data(self, bytes: usize) -> String {
        let Self { sent_ns, sequence } = self;
        let padding = "x".repeat(bytes.saturating_sub(DATA_BYTES_MIN));
        format!(r#"{{"bench":"{sent_ns:020}.{sequence:010}{padding}"}}"#)
    }

    fn at(text: &[u8], at: usize) -> Option<Self> {
        let (marker, digits) = text.get(at..at + STAMP_BYTES)?.split_at(MARKER.len());
        if marker != MARKER {
            return None;
        }
        let sent_ns = number(&digits[..TIME_DIGITS])?;
        let sequence = number(&digits[TIME_DIGITS + 1..])?;
        Some(Self { sent_ns, sequence: u32::try_from(sequence).ok()? })
    }
}

fn number(digits: &[u8]) -> Option<u64> {
    digits.iter().try_fold(0u64, |value, digit| {
        let digit = digit.wrapping_sub(b'0');
        if digit > 9 { None } else { value.checked_mul(10)?.checked_add(u64::from(digit)) }
    })
}

/// Finder of the stamps of a frame, which first tries the place of the last frame's only stamp.
///
/// Frames of one length have the same layout, so nearly every frame costs one comparison instead of a search.
#[derive(Default)]
pub struct Finder {
    frame_bytes: usize,
    at: usize,
}

impl Finder {
    /// Passes each stamp of a frame to `take`, and returns whether there was one.
    pub fn each(&mut self, frame: &[u8], mut take: impl FnMut(Stamp)) -> bool {
        if frame.len() == self.frame_bytes
            && let Some(stamp) = Stamp::at(frame, self.at)
        {
            take(stamp);
            return true;
        }
        let mut found = 0;
        for at in 0..frame.len().saturating_sub(STAMP_BYTES) {
            if frame[at] == MARKER[0]
                && let Some(stamp) = Stamp::at(frame, at)
            {
                found += 1;
                self.at = at;
                take(stamp);
            }
        }
        self.frame_bytes = if found == 1 { frame.len() } else { 0 };
        found > 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stamp_is_found_in_frames_of_any_layout() {
        let stamps = [7, 8, 9].map(|sequence| Stamp { sent_ns: 1_234_567 + u64::from(sequence), sequence });
        let [one, two, three] = stamps.map(|stamp| stamp.data(128));
        assert_eq!(one.len(), 128);
        let mut finder = Finder::default();
        let mut found = Vec::new();
        for frame in [
            format!(r#"{{"op":13,"messages":[{{"data":{one}}}]}}"#),
            format!(r#"{{"op":13,"messages":[{{"data":{two}}}]}}"#),
            format!(r#"{{"op":13,"messages":[{{"data":{two}}},{{"data":{three}}}]}}"#),
            r#"{"op":0}"#.to_owned(),
        ] {
            finder.each(frame.as_bytes(), |stamp| found.push(stamp));
        }
        assert_eq!(found, [stamps[0], stamps[1], stamps[1], stamps[2]]);
    }

    #[test]
    fn data_is_json_of_the_size_asked_for() {
        let data = Stamp { sent_ns: u64::MAX, sequence: u32::MAX }.data(DATA_BYTES_MIN);
        assert_eq!(data.len(), DATA_BYTES_MIN);
        serde_json::from_str::<serde_json::Value>(&data).unwrap();
    }
}
