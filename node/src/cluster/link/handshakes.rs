//! Handshakes under way. A new connection always gets a slot, so silent strangers cannot occupy all of them.

use std::collections::{BTreeMap, HashMap};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

/// Number of slots: as many connections must arrive during the handshake of a peer to evict it.
const HANDSHAKES_MAX: usize = 256;

/// Slots of handshakes. If all are taken, the source address with most of them loses its oldest one to the new connection.
pub(super) struct Handshakes {
    slots: Arc<Semaphore>,
    under_way: Arc<Mutex<PendingHandshakes>>,
}

#[derive(Default)]
struct PendingHandshakes {
    last: u64,
    by_age: BTreeMap<u64, (IpAddr, CancellationToken)>,
}

/// Slot of one handshake, until dropped.
pub(super) struct HandshakeSlot {
    number: u64,
    under_way: Arc<Mutex<PendingHandshakes>>,
    /// Cancelled when the slot was given to another connection: the handshake must end at once.
    pub(super) lost: CancellationToken,
    _permit: OwnedSemaphorePermit,
}

impl Handshakes {
    pub(super) fn new() -> Self {
        Self { slots: Arc::new(Semaphore::new(HANDSHAKES_MAX)), under_way: Arc::default() }
    }

    pub(super) async fn enter(&self, from: IpAddr) -> HandshakeSlot {
        let slots = || Arc::clone(&self.slots);
        let permit = match slots().try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                self.under_way.lock().evict_oldest();
                // The evicted handshake waits for nothing more, so a permit is free soon.
                slots().acquire_owned().await.expect("places are never closed")
            }
        };
        let (number, lost) = self.under_way.lock().add(from);
        HandshakeSlot { number, under_way: Arc::clone(&self.under_way), lost, _permit: permit }
    }
}

impl PendingHandshakes {
    fn add(&mut self, from: IpAddr) -> (u64, CancellationToken) {
        let lost = CancellationToken::new();
        self.last += 1;
        self.by_age.insert(self.last, (source(from), lost.clone()));
        (self.last, lost)
    }

    fn evict_oldest(&mut self) {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        self.by_age.values().for_each(|(source, _)| *counts.entry(*source).or_default() += 1);
        let most = counts.values().max().copied();
        let oldest = self.by_age.iter().find(|(_, (source, _))| counts.get(source).copied() == most);
        if let Some((_, lost)) = oldest.map(|(number, _)| *number).and_then(|one| self.by_age.remove(&one)) {
            lost.cancel();
        }
    }
}

impl Drop for HandshakeSlot {
    fn drop(&mut self) {
        self.under_way.lock().by_age.remove(&self.number);
    }
}

/// Source of an address. An IPv6 client usually has a whole /64 network, so all of its addresses are one source.
fn source(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << 64)).into(),
        address => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(address: &str) -> IpAddr {
        address.parse().expect("an address")
    }

    #[test]
    fn the_source_with_most_makes_room_the_oldest_first() {
        let mut under_way = PendingHandshakes::default();
        let mut enter = |address| under_way.add(at(address)).1;
        let peers = [enter("10.0.0.1"), enter("10.0.0.2"), enter("10.0.0.2")];
        let strangers = ["10.9.0.1", "::ffff:10.9.0.1", "10.9.0.1"].map(&mut enter);
        let wide = ["fd00::1", "fd00::2:0:0:1", "fd00::3:0:0:1", "fd00::4"].map(enter);
        let lost = |entered: &[CancellationToken]| {
            entered.iter().map(CancellationToken::is_cancelled).collect::<Vec<_>>()
        };
        under_way.evict_oldest();
        assert_eq!(lost(&wide), [true, false, false, false]);
        under_way.evict_oldest();
        assert_eq!(lost(&strangers), [true, false, false]);
        under_way.evict_oldest();
        assert_eq!(lost(&wide), [true, true, false, false]);
        assert_eq!(lost(&peers), [false; 3]);
        under_way.evict_oldest();
        assert_eq!(lost(&peers), [false, true, false], "the oldest of those who have two");
    }

    #[tokio::test]
    async fn handshakes_never_exceed_their_bound() {
        let handshakes = Handshakes::new();
        let mut slots = Vec::new();
        for _ in 0..HANDSHAKES_MAX {
            slots.push(handshakes.enter(at("10.0.0.1")).await);
        }
        let entering = handshakes.enter(at("10.0.0.2"));
        tokio::pin!(entering);
        assert!(futures_util::poll!(&mut entering).is_pending(), "nobody has given up a place yet");
        assert!(slots[0].lost.is_cancelled() && !slots[1].lost.is_cancelled());
        slots.remove(0);
        let _entered = entering.await;
        assert_eq!(handshakes.under_way.lock().by_age.len(), HANDSHAKES_MAX);
        drop(slots);
        assert_eq!(handshakes.under_way.lock().by_age.len(), 1);
    }
}
