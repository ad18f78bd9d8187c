//! Members whose connection went: they leave at once, or after a grace in which another socket may take it up.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Inner, Publisher};
use crate::accounts::Account;
use crate::model::{
    AccountId, Capability, ChannelKey, ClientId, ConnectionId, MemberId, NotOpen, Operation, Over, Owner,
    PresenceEvent, TakenUp,
};
use crate::origin::outbox::Source;

/// How long leaves wait for a store or a shard that has too much to do.
const HOLD_UP: Duration = Duration::from_secs(2);
/// How often it is looked for those of other nodes.
const ORPHANS_LOOK: Duration = Duration::from_millis(250);
/// Leaves between two looks at whether somebody else wants the thread.
const BATCH: usize = 64;

/// The end of what a connection was on its channels.
#[derive(Debug, Clone)]
pub struct Departure {
    pub connection_id: ConnectionId,
    /// Once another socket has taken the connection up, its end under a former owner means nothing.
    pub owner: Owner,
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
            |former: &Order| former.departure.owner >= order.departure.owner && former.at <= order.at;
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
        self.depart(departure, Instant::now());
    }

    /// The connection is lost: its members leave when nobody has taken it up within the grace.
    pub fn lost(&self, departure: Departure) {
        self.depart(departure, Instant::now() + self.grace());
    }

    pub(crate) fn grace(&self) -> Duration {
        Duration::from_millis(self.inner.limits.presence_grace_ms)
    }

    /// The connection has ended for good, which other nodes are to know.
    pub fn is_over(&self, over: &Over) {
        if let Some(routing) = &self.inner.routing {
            routing.tell_over(over);
        }
    }

    /// Another node's run has a connection that had no open socket where it was before.
    pub fn tell_not_open(&self, told: Option<(u64, NotOpen)>) {
        if let Some(routing) = &self.inner.routing {
            routing.tell_not_open(told);
        }
    }

    /// The connection is another socket's from now on, under a higher epoch.
    pub fn taken_up(&self, taken: &TakenUp) {
        let (connection_id, owner) = (taken.tenure.connection_id, taken.tenure.owner());
        self.inner.hub.take_over_presence(connection_id, owner);
        if let Some(routing) = &self.inner.routing {
            routing.tell_taken_up(taken);
        }
        let mut queue = self.inner.departures.queue.lock();
        let place = (connection_id, false);
        if queue.orders.get(&place).is_some_and(|order| order.departure.owner < owner) {
            queue.take(place);
        }
    }

    pub(crate) fn depart(&self, departure: Departure, at: Instant) {
        let Inner { hub, departures, .. } = &*self.inner;
        let Departure { connection_id, owner, .. } = departure;
        if hub.presence_owner(connection_id) != Some(owner)
            || !hub.has_member(connection_id, |key| departure.takes(key))
        {
            return;
        }
        let up_to_sequence = hub.presence_sequence();
        departures.queue.lock().put(Order { at, up_to_sequence, departure });
        departures.changed.notify_one();
    }

    /// Lets members leave when their time has come, until the node stops.
    pub async fn run_departures(self, stopping: CancellationToken) {
        while !stopping.is_cancelled() {
            // Time is up, or something else may be due before.
            let change = stopping.run_until_cancelled(self.inner.departures.changed.notified());
            match self.let_leave(Instant::now()).await {
                Ok(()) => {}
                Err(None) => drop(change.await),
                Err(Some(at)) => drop(tokio::time::timeout_at(at, change).await),
            }
        }
    }

    /// Lets members of one connection leave, if any are to by `now`; else says when the next are.
    pub(crate) async fn let_leave(&self, now: Instant) -> Result<(), Option<Instant>> {
        let order = self.inner.departures.queue.lock().next(now)?;
        self.inner.carry_out(order).await;
        Ok(())
    }

    /// Lets members leave whose connections were of runs of other nodes that have ended, until the node stops.
    pub async fn run_orphans(
        self,
        account: impl Fn(&AccountId) -> Arc<Account> + Send + Sync,
        stopping: CancellationToken,
    ) {
        let is_alone = self.routing().is_none();
        while !is_alone && stopping.run_until_cancelled(tokio::time::sleep(ORPHANS_LOOK)).await.is_some() {
            self.let_orphans_leave(&account, Instant::now()).await;
        }
    }

    /// To be called every 250 ms.
    pub(crate) async fn let_orphans_leave(
        &self,
        account: &(impl Fn(&AccountId) -> Arc<Account> + Sync),
        now: Instant,
    ) {
        let (Some(routing), inner) = (self.routing(), &self.inner) else { return };
        for (connection_id, owner) in routing.orphans(self.grace(), now) {
            let Some((key, _)) = inner.hub.memberships(connection_id).into_iter().next() else {
                continue;
            };
            let account = account(key.account());
            let departure = Departure { connection_id, owner, account, keeps: None };
            inner.carry_out(Order { at: now, up_to_sequence: u64::MAX, departure }).await;
        }
    }

    /// The last look, after the last connection: what is due leaves. What is lost stays for the node's next run.
    pub async fn finish_departures(&self) {
        while self.let_leave(Instant::now()).await.is_ok() {}
    }
}

impl Inner {
    async fn carry_out(self: &Arc<Self>, order: Order) {
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

    fn depart_one(self: &Arc<Self>, order: &Order, key: &ChannelKey, client_id: ClientId) {
        let Departure { connection_id, owner, account, keeps } = &order.departure;
        let retention_hours = self.retention_hours(account, key);
        let member = MemberId { connection_id: *connection_id, client_id };
        self.hub.depart(key, member.clone(), *owner, order.up_to_sequence, |action, data, stamp| {
            let event = match keeps {
                // It may enter again in the same epoch.
                Some(_) => PresenceEvent::new(key.clone(), member, owner.epoch, action, data, stamp),
                None => PresenceEvent::departure(key.clone(), member, *owner, data, stamp),
            };
            let routes = self.targets.of_begun(account, key, Source::Presence);
            self.store_presence(&event, account, routes, retention_hours, Box::new(|_| {}));
            event
        });
    }
}
