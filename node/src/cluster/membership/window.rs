//! Which numbers of a sender were seen.

/// Takes each number once, in almost any order: one further behind the highest than [`Window::WIDTH`] counts as seen.
#[derive(Debug)]
pub(super) struct Window {
    highest: u64,
    /// Bit `i` stands for `highest - i`.
    seen: u128,
}

impl Window {
    const WIDTH: u64 = 128;

    /// Whatever is not above `number` was seen.
    pub(super) fn above(number: u64) -> Self {
        Self { highest: number, seen: u128::MAX }
    }

    /// Whether `number` was not seen; from now on it was.
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
    fn each_number_is_taken_once() {
        let mut window = Window::above(10);
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
