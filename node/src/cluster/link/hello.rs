//! What the hello of either side says of the run of the other one.

use std::time::Duration;

use fanfare_proto::peer::v1;

use crate::cluster::inbound::Inbound;

pub(super) fn held_for_dead_ms(inbound: &dyn Inbound, run: u64) -> Option<u64> {
    inbound.held_for_dead(run).map(|ago| u64::try_from(ago.as_millis()).unwrap_or(u64::MAX))
}

pub(super) fn take(hello: &v1::Hello, inbound: &dyn Inbound) {
    if let Some(ago_ms) = hello.held_for_dead_ms {
        inbound.was_held_for_dead(Duration::from_millis(ago_ms));
    }
}
