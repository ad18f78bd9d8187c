//! Members whose connection went: they leave at once, or after a grace in which another socket may take it up.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{Inner, Publisher};
use crate::accounts::Account;
use crate::model::{
    Capability, ChannelKey, ClientId, ConnectionId, MemberId, Operation, PresenceEvent, TakenUp, Tenure,
};

/// How long leaves wait for a store or a shard that has too much to do.
const HOLD_UP: Duration = Duration::from_secs(2);
/// Leaves between two looks at whether somebody else wants the thread.
const BATCH: usize = 64;

/// The end of what a connection was on its channels.
#[derive(Debug, Clone)]
pub struct Departure {
    pub connection_id: ConnectionId,
    /// Once another socket has taken the connection up, its end in a former epoch means nothing.
    pub epoch: u64,
    pub account: Arc<Account>,
    /// Members on channels whose presence one of these grants stay.
    pub keeps: Option<Vec<Arc<Capability>>>,
}

impl Departure {
    fn takes(&self, key: &ChannelKey) -> bool {
        let stays = |keeps: &Arc<Capability>| keeps.allows(key.channel(), Operation::Presence);
        !self.keeps.as_ref().is_some_and(|keeps| keeps.iter().any(stays))
    }
}

/// What is to leave when. Bounded by the connections that have members: each stands here at most once for its end and
/// once for what it may no longer do.
#[derive(Debug, Default)]
pub(super) struct Departures {
    queue: Mutex<Queue>,
    changed: Notify,
}

type Place = (ConnectionId, bool);

#[derive(Debug, Default)]
struct Queue {
    due: BTreeSet<(Instant, Place)>,
    orders: HashMap<Place, Order>,
}

#[derive(Debug)]
struct Order {
    at: Instant,
    /// Members that changed after this event stay.
    up_to_sequence: u64,
    departure: Departure,
}

impl Queue {
    /// What a connection may no longer do is said anew each time; of its ends the first counts.
    fn put(&mut self, order: Order) {
        let place = (order.departure.connection_id, order.departure.keeps.is_some());
        let earlier =
            |former: &Order| former.departure.epoch >= order.departure.epoch && former.at <= order.at;
        if order.departure.keeps.is_none() && self.orders.get(&place).is_some_and(earlier) {
            return;
        }
        self.take(place);
        self.due.insert((order.at, place));
        self.orders.insert(place, order);
    }

    fn take(&mut self, place: Place) -> Option<Order> {
        let order = self.orders.remove(&place)?;
        self.due.remove(&(order.at, place));
        Some(order)
    }

    /// What is due, or when the next is.
    fn next(&mut self, now: Instant) -> Result<Order, Option<Instant>> {
        let Some(&(at, place)) = self.due.first() else { return Err(None) };
        if at > now {
            return Err(Some(at));
        }
        self.take(place).ok_or(None)
    }
}

impl Publisher {
    /// The connection's members leave now.
    pub fn leave(&self, departure: Departure) {
        self.depart(departure, Duration::ZERO);
    }

    /// The connection is lost: its members leave when nobody has taken it up within the grace.
    pub fn lost(&self, departure: Departure) {
        self.depart(departure, Duration::from_millis(self.inner.limits.presence_grace_ms));
    }

    /// The connection is another socket's from now on, under a higher epoch.
    pub fn taken_up(&self, taken: &TakenUp) {
        let Tenure { connection_id, epoch, .. } = taken.tenure;
        if let Some(routing) = &self.inner.routing {
            routing.tell_taken_up(taken);
        }
        self.inner.hub.raise_presence_epoch(connection_id, epoch);
        let mut queue = self.inner.departures.queue.lock();
        let place = (connection_id, false);
        if queue.orders.get(&place).is_some_and(|order| order.departure.epoch < epoch) {
            queue.take(place);
        }
    }

    fn depart(&self, departure: Departure, after: Duration) {
        let Inner { hub, departures, .. } = &*self.inner;
        let Departure { connection_id, epoch, .. } = departure;
        if hub.presence_epoch(connection_id) != Some(epoch)
            || !hub.has_member(connection_id, |key| departure.takes(key))
        {
            return;
        }
        let up_to_sequence = hub.presence_sequence();
        departures.queue.lock().put(Order { at: Instant::now() + after, up_to_sequence, departure });
        departures.changed.notify_one();
    }

    /// Lets members leave when their time has come, until the node stops.
    pub async fn run_departures(self, stopping: CancellationToken) {
        let inner = self.inner;
        while !stopping.is_cancelled() {
            let next = inner.departures.queue.lock().next(Instant::now());
            // Time is up, or something else may be due before.
            let change = stopping.run_until_cancelled(inner.departures.changed.notified());
            match next {
                Ok(order) => inner.carry_out(order).await,
                Err(None) => drop(change.await),
                Err(Some(at)) => drop(tokio::time::timeout_at(at.into(), change).await),
            }
        }
    }

    /// The last look, after the last connection: what is due leaves. What is lost stays for the node's next run.
    pub async fn finish_departures(&self) {
        loop {
            let next = self.inner.departures.queue.lock().next(Instant::now());
            let Ok(order) = next else { return };
            self.inner.carry_out(order).await;
        }
    }
}

impl Inner {
    async fn carry_out(&self, order: Order) {
        let members = self.hub.memberships(order.departure.connection_id);
        let leaving = members.into_iter().filter(|(key, _)| order.departure.takes(key));
        let until = Instant::now() + HOLD_UP;
        for (count, (key, client_id)) in leaving.enumerate() {
            while (self.store.is_full() || self.hub.congested()) && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if count % BATCH == BATCH - 1 {
                tokio::task::yield_now().await;
            }
            self.depart_one(&order, &key, client_id);
        }
    }

    fn depart_one(&self, order: &Order, key: &ChannelKey, client_id: ClientId) {
        let Departure { connection_id, epoch, account, .. } = &order.departure;
        let retention_hours = self.retention_hours(account, key);
        let member = MemberId { connection_id: *connection_id, client_id };
        self.hub.depart(key, member.clone(), *epoch, order.up_to_sequence, |action, data, stamp| {
            let event = PresenceEvent::new(key.clone(), member, *epoch, action, data, stamp);
            self.store_presence(&event, account, retention_hours, Box::new(|_| {}));
            event
        });
    }
}
