//! Digest of a sequence of parts, the same on every node and in every version.

/// FNV-1a over length-prefixed parts, mixed at the end so that every bit depends on all of the input. Not collision-resistant against an
/// attacker.
#[derive(Debug, Clone, Copy)]
pub struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Digest {
    pub fn of(self, part: &[u8]) -> Self {
        let length = (part.len() as u64).to_be_bytes();
        let add = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        Self(length.iter().chain(part).fold(self.0, add))
    }

    pub fn number(self) -> u64 {
        let mix = |number: u64, shift: u32, by: u64| (number ^ (number >> shift)).wrapping_mul(by);
        let mixed = mix(mix(self.0, 30, 0xbf58_476d_1ce4_e5b9), 27, 0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_is_stable_and_tells_parts_apart() {
        let of = |parts: &[&str]| {
            parts.iter().fold(Digest::default(), |digest, part| digest.of(part.as_bytes())).number()
        };
        assert_eq!(of(&["acme", "room"]), GOLDEN);
        let others = [&["acme", "roon"][..], &["acmer", "oom"], &["acme"], &["", "acme", "room"], &[]];
        assert!(others.iter().all(|parts| of(parts) != GOLDEN));
    }

    /// Guards the value against change, since nodes of other versions compute it too.
    const GOLDEN: u64 = 12_473_986_322_274_200_794;
}
