//! Nonces that this node has seen used: a repeat is refused without asking the store or other nodes.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};

use parking_lot::Mutex;

use crate::model::Nonce;

/// Size of each of two generations. The older one is dropped when the newer one is full, so at least this many of the last nonces are
/// known.
const NONCES_MAX: usize = 32_768;

/// 64-bit hashes under a key of this process: no client can produce two nonces with the same hash.
pub(super) struct UsedNonces {
    hasher: RandomState,
    generations: Mutex<NonceGenerations>,
}

#[derive(Default)]
struct NonceGenerations {
    newer: HashSet<u64>,
    older: HashSet<u64>,
}

impl UsedNonces {
    pub(super) fn new() -> Self {
        Self { hasher: RandomState::new(), generations: Mutex::default() }
    }

    /// Whether the nonce was used lately; false if it may be new, or was used long ago.
    pub(super) fn holds(&self, nonce: &Nonce) -> bool {
        let hash = self.hasher.hash_one(nonce);
        let generations = self.generations.lock();
        generations.newer.contains(&hash) || generations.older.contains(&hash)
    }

    pub(super) fn add(&self, nonce: &Nonce) {
        let hash = self.hasher.hash_one(nonce);
        let mut generations = self.generations.lock();
        if generations.newer.len() >= NONCES_MAX {
            generations.older = std::mem::take(&mut generations.newer);
        }
        generations.newer.insert(hash);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_nonces_are_known_and_the_oldest_forgotten() {
        let used = UsedNonces::new();
        let nonce = |number: usize| Nonce {
            key_name: "k1".into(),
            timestamp_ms: 1,
            nonce: number.to_string().into(),
        };
        for number in 0..=2 * NONCES_MAX {
            assert!(!used.holds(&nonce(number)));
            used.add(&nonce(number));
        }
        assert!((NONCES_MAX..=2 * NONCES_MAX).all(|number| used.holds(&nonce(number))));
        assert!(!used.holds(&nonce(0)));
        let generations = used.generations.lock();
        assert!(generations.newer.len() + generations.older.len() <= 2 * NONCES_MAX);
    }
}
