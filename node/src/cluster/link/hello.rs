//! What either side of a lane says of the run of the other one.

use std::time::Duration;

use crate::cluster::inbound::Inbound;

/// Far above what a node tells of a run.
const DEATHS_MAX: usize = 16;

pub(super) fn held_for_dead_ms(inbound: &dyn Inbound, run: u64) -> Vec<u64> {
    let deaths = inbound.held_for_dead(run).into_iter();
    deaths.map(|ago| u64::try_from(ago.as_millis()).unwrap_or(u64::MAX)).collect()
}

pub(super) fn take(held_for_dead_ms: &[u64], inbound: &dyn Inbound) {
    for ago_ms in held_for_dead_ms.iter().take(DEATHS_MAX) {
        inbound.was_held_for_dead(Duration::from_millis(*ago_ms));
    }
}
