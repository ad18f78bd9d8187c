//! Slows down who guesses at the token exchange.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::net::IpAddr;

use parking_lot::Mutex;

/// Address and key pairs counted apart within one second; further ones share a count.
const COUNTED_MAX: usize = 65_536;

/// Failed exchanges of the running second, per address and key. Its memory is bounded and cleared every second.
pub(super) struct Failures {
    /// 0: no limit.
    per_second: u32,
    hasher: RandomState,
    window: Mutex<Window>,
}

#[derive(Default)]
struct Window {
    second: u64,
    counts: HashMap<u64, u32>,
    uncounted: u32,
}

impl Failures {
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second, hasher: RandomState::new(), window: Mutex::default() }
    }

    pub(super) fn too_many(&self, address: Option<IpAddr>, key_name: &str, now_ms: u64) -> bool {
        if self.per_second == 0 {
            return false;
        }
        let mut window = self.window.lock();
        *window.at(now_ms).count(self.pair(address, key_name)) >= self.per_second
    }

    pub(super) fn add(&self, address: Option<IpAddr>, key_name: &str, now_ms: u64) {
        if self.per_second > 0 {
            let mut window = self.window.lock();
            *window.at(now_ms).entry(self.pair(address, key_name)) += 1;
        }
    }

    /// One customer holds a whole IPv6 /64.
    fn pair(&self, address: Option<IpAddr>, key_name: &str) -> u64 {
        let network = address.map(|address| match address.to_canonical() {
            IpAddr::V4(address) => u64::from(address.to_bits()),
            IpAddr::V6(address) => (address.to_bits() >> 64) as u64,
        });
        self.hasher.hash_one((network, key_name))
    }
}

impl Window {
    fn at(&mut self, now_ms: u64) -> &mut Self {
        let second = now_ms / 1000;
        if self.second != second {
            *self = Self { second, ..Self::default() };
        }
        self
    }

    fn count(&self, pair: u64) -> &u32 {
        let full = self.counts.len() >= COUNTED_MAX;
        self.counts.get(&pair).unwrap_or(if full { &self.uncounted } else { &0 })
    }

    fn entry(&mut self, pair: u64) -> &mut u32 {
        if self.counts.len() >= COUNTED_MAX && !self.counts.contains_key(&pair) {
            return &mut self.uncounted;
        }
        self.counts.entry(pair).or_default()
    }
}
