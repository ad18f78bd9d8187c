//! Anti-replay window over a sender's datagram numbers.

/// Accepts each number once, in almost any order: a number that is more than [`AntiReplayWindow::WIDTH`] behind the highest counts as seen.
#[derive(Debug)]
pub(super) struct AntiReplayWindow {
    highest: u64,
    /// Bit `i` stands for `highest - i`.
    seen: u128,
}

impl AntiReplayWindow {
    const WIDTH: u64 = 128;

    /// A window in which all numbers up to `number` count as seen.
    pub(super) fn above(number: u64) -> Self {
        Self { highest: number, seen: u128::MAX }
    }

    /// True if `number` was not seen before; marks it as seen.
    pub(super) fn take(&mut self, number: u64) -> bool {
        if let Some(ahead) = number.checked_sub(self.highest).filter(|ahead| *ahead > 0) {
            self.seen = if ahead < Self::WIDTH { self.seen << ahead | 1 } else { 1 };
            self.highest = number;
            return true;
        }
        let behind = self.highest - number;
        let bit = if behind < Self::WIDTH { 1 << behind } else { return false };
        let fresh = self.seen & bit == 0;
        self.seen |= bit;
        fresh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replay_window_takes_each_number_once() {
        let mut window = AntiReplayWindow::above(10);
        for (number, fresh) in [
            (10, false),
            (9, false),
            (0, false),
            (11, true),
            (11, false),
            (15, true),
            (13, true),
            (13, false),
            (10, false),
            (300, true),
            (173, true),
            (173, false),
            (172, false),
            (15, false),
            (u64::MAX, true),
            (u64::MAX, false),
            (u64::MAX - 127, true),
            (u64::MAX - 128, false),
            (0, false),
        ] {
            assert_eq!(window.take(number), fresh, "{number}");
        }
    }
}
