//! Limit of the failed token exchanges that are answered in full.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::net::IpAddr;

use parking_lot::Mutex;

/// Address and key pairs counted apart within one second; further ones share a count.
const COUNTED_MAX: usize = 65_536;

/// Failed exchanges of the current second, per address and key. Bounded, and cleared every second.
pub(super) struct Failures {
    /// Limit per second; 0: none.
    per_second: u32,
    hasher: RandomState,
    window: Mutex<FailureWindow>,
}

#[derive(Default)]
struct FailureWindow {
    second: u64,
    counts: HashMap<u64, u32>,
    uncounted: u32,
}

impl Failures {
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second, hasher: RandomState::new(), window: Mutex::default() }
    }

    /// Counts one more failure; true if the limit had been reached before it.
    pub(super) fn is_one_too_many(&self, address: Option<IpAddr>, key_name: &str, now_ms: u64) -> bool {
        if self.per_second == 0 {
            return false;
        }
        let mut window = self.window.lock();
        let count = window.at(now_ms).entry(self.pair(address, key_name));
        *count = count.saturating_add(1);
        *count > self.per_second
    }

    /// The hash of network and key. IPv6 addresses count by /64, which one customer holds.
    fn pair(&self, address: Option<IpAddr>, key_name: &str) -> u64 {
        let network = address.map(|address| match address.to_canonical() {
            IpAddr::V4(address) => u64::from(address.to_bits()),
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        });
        self.hasher.hash_one((network, key_name))
    }
}

impl FailureWindow {
    fn at(&mut self, now_ms: u64) -> &mut Self {
        let second = now_ms / 1000;
        if self.second != second {
            *self = Self { second, ..Self::default() };
        }
        self
    }

    fn entry(&mut self, pair: u64) -> &mut u32 {
        if self.counts.len() >= COUNTED_MAX && !self.counts.contains_key(&pair) {
            return &mut self.uncounted;
        }
        self.counts.entry(pair).or_default()
    }
}
