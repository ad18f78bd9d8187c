//! A connection is taken up by another socket, lost, or over.

use fanfare_proto::frame::{close, code};

use super::super::connection::{Connection, Subscription};
use super::super::identities::Former;
use super::Shard;
use crate::model::{Place, TakenUp, Tenure};

impl Shard {
    /// Whose connection a fresh socket carries on, and whether it was another's before.
    pub(super) fn begin_tenure(
        &self,
        connection: &Connection,
        slot: u32,
        former: Option<Former>,
    ) -> (Tenure, bool) {
        let place = Place {
            incarnation: self.services.hub.incarnation(),
            shard: u16::try_from(self.index).expect("a node has at most 64 shards"),
            slot,
            generation: connection.generation,
        };
        let (tenure, former) = self.services.identities.begin(former, place);
        if let Some(former) = former {
            self.services.publisher.taken_up(&TakenUp { tenure, former });
        }
        (tenure, former.is_some())
    }

    /// The socket is gone; unless its connection is over it may come back within the resume window.
    pub(super) fn end_tenure(&self, tenure: &Tenure, for_good: bool, subscriptions: &[Subscription]) {
        let taking = subscriptions.iter().filter(|subscription| subscription.since != Subscription::NEVER);
        let held = taking.map(|subscription| (subscription.number, subscription.since)).collect();
        self.services.identities.end(tenure, for_good, held);
    }

    /// Another socket goes on with the connection of this one.
    pub(super) fn taken_up(&mut self, slot: u32, generation: u32) {
        let held = self.slots.get(slot as usize).and_then(Option::as_deref);
        if held.is_some_and(|connection| connection.generation == generation) {
            self.with_session(slot, |session, _, out| {
                session.fail("taken up by another socket", code::TAKEN_UP, close::CREDENTIAL, out);
            });
        }
    }
}
