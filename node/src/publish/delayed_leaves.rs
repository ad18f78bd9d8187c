//! Delayed leaves: members whose connection is lost leave at once, or after the presence timeout in which another socket may take the
//! connection over.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{Publisher, PublisherInner};
use crate::accounts::Account;
use crate::model::{
    AccountId, Capability, ChannelKey, ClientId, ClosedSession, ConnectionId, MemberId, Operation,
    PresenceEvent, SessionOwner, SessionTakeover, SocketlessTakeover,
};
use crate::origin::outbox::EventSource;

/// Longest time for which leaves wait for an overloaded store or shard.
const HOLD_UP: Duration = Duration::from_secs(2);
/// Interval of the search for orphaned members.
const ORPHANED_POLL: Duration = Duration::from_millis(250);
/// Leaves between two yields of the thread.
const BATCH: usize = 64;

/// A leave of a connection's members.
#[derive(Debug, Clone)]
pub struct DelayedLeave {
    pub connection_id: ConnectionId,
    /// Owner of the connection. The leave has no effect once another socket has taken the connection over.
    pub owner: SessionOwner,
    pub account: Arc<Account>,
    /// Grants after a change of credentials: members on channels whose presence one of them allows stay.
    pub keeps: Option<Vec<Arc<Capability>>>,
}

impl DelayedLeave {
    fn concerns(&self, key: &ChannelKey) -> bool {
        let stays = |keeps: &Arc<Capability>| keeps.allows(key.channel(), Operation::Presence);
        !self.keeps.as_ref().is_some_and(|keeps| keeps.iter().any(stays))
    }
}

/// The queue of delayed leaves. Bounded by the connections with members: each has at most one entry for its end and one for lost rights.
#[derive(Debug, Default)]
pub(super) struct DelayedLeaves {
    queue: Mutex<LeaveQueue>,
    changed: Notify,
}

type LeaveKey = (ConnectionId, bool);

#[derive(Debug, Default)]
struct LeaveQueue {
    due: BTreeSet<(Instant, LeaveKey)>,
    orders: HashMap<LeaveKey, LeaveOrder>,
}

#[derive(Debug)]
struct LeaveOrder {
    at: Instant,
    /// Members that changed after this event stay.
    up_to_sequence: u64,
    leave: DelayedLeave,
}

impl LeaveQueue {
    /// Queues a leave. A new one for lost rights replaces the former; of a connection's ends the first counts.
    fn put(&mut self, order: LeaveOrder) {
        let leave_key = (order.leave.connection_id, order.leave.keeps.is_some());
        let earlier = |queued: &LeaveOrder| queued.leave.owner >= order.leave.owner && queued.at <= order.at;
        if order.leave.keeps.is_none() && self.orders.get(&leave_key).is_some_and(earlier) {
            return;
        }
        self.take(leave_key);
        self.due.insert((order.at, leave_key));
        self.orders.insert(leave_key, order);
    }

    fn take(&mut self, leave_key: LeaveKey) -> Option<LeaveOrder> {
        let order = self.orders.remove(&leave_key)?;
        self.due.remove(&(order.at, leave_key));
        Some(order)
    }

    /// Takes the next due leave, or returns the time of the next one.
    fn next(&mut self, now: Instant) -> Result<LeaveOrder, Option<Instant>> {
        let Some(&(at, leave_key)) = self.due.first() else { return Err(None) };
        if at > now {
            return Err(Some(at));
        }
        self.take(leave_key).ok_or(None)
    }
}

impl Publisher {
    /// Removes the connection's members now.
    pub fn leave(&self, delayed_leave: DelayedLeave) {
        self.schedule_leave(delayed_leave, Instant::now());
    }

    /// Removes the members of a lost connection after the presence timeout, unless it is taken over before.
    pub fn leave_after_timeout(&self, delayed_leave: DelayedLeave) {
        self.schedule_leave(delayed_leave, Instant::now() + self.presence_timeout());
    }

    pub(crate) fn presence_timeout(&self) -> Duration {
        Duration::from_millis(self.inner.limits.presence_grace_ms)
    }

    /// Announces to the peers that a connection is closed for good.
    pub fn announce_closed_session(&self, over: &ClosedSession) {
        if let Some(routing) = &self.inner.routing {
            routing.announce_closed(over);
        }
    }

    /// Announces to another node's incarnation that the connection it took over had no open socket at its old location.
    pub fn announce_socketless_takeover(&self, answer: Option<(u64, SocketlessTakeover)>) {
        if let Some(routing) = &self.inner.routing {
            routing.send_socketless_takeover(answer);
        }
    }

    /// Records a session takeover, under a higher epoch, and announces it to the peers.
    pub fn take_over_session(&self, taken: &SessionTakeover) {
        let (connection_id, owner) = (taken.ownership.connection_id, taken.ownership.owner());
        self.inner.hub.take_over_presence(connection_id, owner);
        if let Some(routing) = &self.inner.routing {
            routing.announce_takeover(taken);
        }
        let mut queue = self.inner.delayed_leaves.queue.lock();
        let leave_key = (connection_id, false);
        if queue.orders.get(&leave_key).is_some_and(|order| order.leave.owner < owner) {
            queue.take(leave_key);
        }
    }

    pub(crate) fn schedule_leave(&self, delayed_leave: DelayedLeave, at: Instant) {
        let PublisherInner { hub, delayed_leaves, .. } = &*self.inner;
        let DelayedLeave { connection_id, owner, .. } = delayed_leave;
        if hub.presence_owner(connection_id) != Some(owner)
            || !hub.has_member(connection_id, |key| delayed_leave.concerns(key))
        {
            return;
        }
        let up_to_sequence = hub.presence_sequence();
        delayed_leaves.queue.lock().put(LeaveOrder { at, up_to_sequence, leave: delayed_leave });
        delayed_leaves.changed.notify_one();
    }

    /// Removes members as their delayed leaves become due, until the node stops.
    pub async fn run_delayed_leaves(self, stopping: CancellationToken) {
        while !stopping.is_cancelled() {
            // Another leave may become due earlier.
            let change = stopping.run_until_cancelled(self.inner.delayed_leaves.changed.notified());
            match self.process_due_leave(Instant::now()).await {
                Ok(()) => {}
                Err(None) => drop(change.await),
                Err(Some(at)) => drop(tokio::time::timeout_at(at, change).await),
            }
        }
    }

    /// Removes the members of one connection if a leave is due by `now`; else returns the time of the next one.
    pub(crate) async fn process_due_leave(&self, now: Instant) -> Result<(), Option<Instant>> {
        let order = self.inner.delayed_leaves.queue.lock().next(now)?;
        self.inner.carry_out(order).await;
        Ok(())
    }

    /// Removes orphaned members, whose connections were at ended incarnations of other nodes, until the node stops.
    pub async fn run_orphaned_leaves(
        self,
        account: impl Fn(&AccountId) -> Arc<Account> + Send + Sync,
        stopping: CancellationToken,
    ) {
        let is_alone = self.routing().is_none();
        while !is_alone && stopping.run_until_cancelled(tokio::time::sleep(ORPHANED_POLL)).await.is_some() {
            self.remove_orphaned_members(&account, Instant::now()).await;
        }
    }

    /// Removes the orphaned members that are due; to be called every 250 ms.
    pub(crate) async fn remove_orphaned_members(
        &self,
        account: &(impl Fn(&AccountId) -> Arc<Account> + Sync),
        now: Instant,
    ) {
        let (Some(routing), inner) = (self.routing(), &self.inner) else { return };
        for (connection_id, owner) in routing.orphaned_connections(self.presence_timeout(), now) {
            let Some((key, _)) = inner.hub.memberships(connection_id).into_iter().next() else {
                continue;
            };
            let account = account(key.account());
            let delayed_leave = DelayedLeave { connection_id, owner, account, keeps: None };
            inner.carry_out(LeaveOrder { at: now, up_to_sequence: u64::MAX, leave: delayed_leave }).await;
        }
    }

    /// Finishes the due leaves after the last connection has ended. Members of lost connections stay for the node's next incarnation.
    pub async fn finish_due_leaves(&self) {
        while self.process_due_leave(Instant::now()).await.is_ok() {}
    }
}

impl PublisherInner {
    async fn carry_out(self: &Arc<Self>, order: LeaveOrder) {
        let members = self.hub.memberships(order.leave.connection_id);
        let leaving = members.into_iter().filter(|(key, _)| order.leave.concerns(key));
        let until = Instant::now() + HOLD_UP;
        for (count, (key, client_id)) in leaving.enumerate() {
            while (self.store.is_full() || self.hub.congested()) && Instant::now() < until {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            if count % BATCH == BATCH - 1 {
                tokio::task::yield_now().await;
            }
            self.remove_member(&order, &key, client_id);
        }
    }

    fn remove_member(self: &Arc<Self>, order: &LeaveOrder, key: &ChannelKey, client_id: ClientId) {
        let DelayedLeave { connection_id, owner, account, keeps } = &order.leave;
        let retention_hours = self.retention_hours(account, key);
        let member = MemberId { connection_id: *connection_id, client_id };
        self.hub.remove_lost_member(
            key,
            member.clone(),
            *owner,
            order.up_to_sequence,
            |action, data, stamp| {
                let event = match keeps {
                    // The member may enter again in the same epoch, so the id must be unique.
                    Some(_) => PresenceEvent::new(key.clone(), member, owner.epoch, action, data, stamp),
                    None => PresenceEvent::delayed_leave(key.clone(), member, *owner, data, stamp),
                };
                let routes = self.targets.of_accepted(account, key, EventSource::Presence);
                self.store_presence(&event, account, routes, retention_hours, Box::new(|_| {}));
                event
            },
        );
    }
}
