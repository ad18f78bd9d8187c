//! Presence in a shard: events for subscribers, member lists as sockets drain, and the leaves of members.

use std::sync::Arc;

use crate::hub::{LocalOffset, MemberSync, PresenceDelivery, PresenceMode, SyncVerdict};
use crate::model::ChannelName;
use crate::publish::{DelayedLeave, PresenceRequest};
use crate::session::LeaveScope;

use super::super::connection::{ConnectionStage, SocketConnection, SocketSubscription};
use super::Shard;

impl Shard {
    pub(super) fn present(
        &mut self,
        connection: &SocketConnection,
        slot: u32,
        ticket: u64,
        request: PresenceRequest,
    ) {
        let answer = self.answer_callback(connection, slot, ticket);
        self.services.publisher.present(request, answer);
    }

    pub(super) fn leave_presence(&mut self, connection: &mut SocketConnection, leaving: LeaveScope) {
        let Some(mut leave) = delayed_leave(connection) else { return };
        if leaving == LeaveScope::NotGranted {
            let open = connection.open_mut();
            leave.keeps = open.map(|open| vec![Arc::clone(&open.session.principal().capability)]);
        }
        self.services.publisher.leave(leave);
    }

    /// Schedules the delayed leave of the connection's members, unless they have left.
    pub(super) fn lose_presence(&mut self, connection: &mut SocketConnection) {
        if let Some(leave) = delayed_leave(connection) {
            self.services.publisher.leave_after_timeout(leave);
        }
    }

    /// Updates the subscription to the modes of the attach. True when a member list follows.
    pub(super) fn set_modes(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &ChannelName,
    ) -> bool {
        let Some(open) = connection.open_mut() else { return false };
        let (messages, presence) = open.session.takes(channel);
        let publishes = open.session.publishes(channel);
        let Some(subscription) = open.subscription_mut(channel) else { return false };
        let number = subscription.number;
        if !messages {
            subscription.since = SocketSubscription::NEVER;
            self.end_replay(connection, slot, number);
        } else if subscription.since == SocketSubscription::NEVER
            && let Some(channel) = self.subscribers.channel(number)
        {
            subscription.since = channel.position().offset;
        }
        self.subscribers.set(number, slot, |own| (own.messages, own.publishes) = (messages, publishes));
        self.subscribe_presence(connection, slot, number, presence)
    }

    /// Subscribes an attached connection to the channel's presence, as its modes ask; true when a member list follows.
    fn subscribe_presence(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        number: u64,
        subscribes: bool,
    ) -> bool {
        let Some(open) = connection.open_mut() else { return false };
        open.syncs.retain(|(channel, _)| *channel != number);
        let Some(channel) = self.subscribers.channel(number).filter(|_| subscribes) else {
            self.subscribers.set(number, slot, |own| own.presence = PresenceMode::Off);
            return false;
        };
        let (follows, last_sequence) = self.services.hub.presence_state(channel);
        let mode = if follows { PresenceMode::Syncing } else { PresenceMode::After(last_sequence) };
        self.subscribers.set(number, slot, |own| own.presence = mode);
        if follows {
            open.syncs.push((number, MemberSync::default()));
        }
        follows
    }

    /// Puts the event into the outbox of every subscriber here that is due for it.
    pub(super) fn deliver_presence(&mut self, delivery: &Arc<PresenceDelivery>) {
        let (mut over, mut handed) = (Vec::new(), 0);
        let Some((channel, subscribers, delivered)) = self.subscribers.all_mut(delivery.channel) else {
            return;
        };
        for subscriber in subscribers {
            let Some(connection) = self.slots[subscriber.slot as usize].as_deref_mut() else { continue };
            let ConnectionStage::Open(open) = &mut connection.stage else { continue };
            let format = open.session.format();
            let (verdict, held_bytes) = match subscriber.presence {
                PresenceMode::Off => continue,
                PresenceMode::After(last_sequence) if delivery.event.sequence <= last_sequence => continue,
                PresenceMode::After(_) => (SyncVerdict::Send, 0),
                PresenceMode::Syncing => {
                    let index = open.syncs.iter().position(|(channel, _)| *channel == delivery.channel);
                    let Some(index) = index else { continue };
                    let sync = &mut open.syncs[index].1;
                    let judged = (sync.judge(delivery), sync.held_bytes());
                    if sync.ends_with(delivery.event.sequence) {
                        subscriber.presence = PresenceMode::After(delivery.event.sequence);
                        open.syncs.swap_remove(index);
                    }
                    judged
                }
            };
            if verdict == SyncVerdict::Send {
                // The frame's position must not include messages that the client has not been sent yet.
                let live = subscriber.after_offset.max(delivered);
                let frame = match open.replay_position(delivery.channel) {
                    Some(position) => delivery.frame_at(format, &position),
                    None if live == delivery.offset() => delivery.frame(format),
                    None => delivery.frame_at(format, &channel.position_at(LocalOffset::end(live))),
                };
                connection.outbox.push(frame);
                handed += 1;
                if !connection.in_dirty && connection.blocked_ms.is_none() {
                    connection.in_dirty = true;
                    self.dirty.push_back(subscriber.slot);
                }
            }
            if connection.outbox.live_bytes() + held_bytes > self.services.limits.outbox_bytes {
                over.push((subscriber.slot, held_bytes));
            }
        }
        self.coalescing.handed(handed);
        for (slot, held_bytes) in over {
            self.flush(slot);
            self.check_outbox(slot, held_bytes);
        }
    }

    /// Puts the next page of a member list into the empty outbox. False when there is none.
    pub(super) fn pull_presence(&mut self, connection: &mut SocketConnection, slot: u32) -> bool {
        let Some(open) = connection.open_mut() else { return false };
        let Some(index) = open.syncs.iter().position(|(_, sync)| !sync.is_sent()) else { return false };
        let format = open.session.format();
        let (number, sync) = &mut open.syncs[index];
        let number = *number;
        let Some(channel) = self.subscribers.channel(number).cloned() else {
            open.syncs.swap_remove(index);
            return false;
        };
        let page = self.services.hub.presence_page(&channel, format, sync.after());
        let held = sync.sent(&page);
        if let Some(last_sequence) = sync.included_until() {
            self.subscribers.set(number, slot, |own| own.presence = PresenceMode::After(last_sequence));
            open.syncs.swap_remove(index);
        }
        let live = || {
            channel.position_at(LocalOffset::end(
                self.subscribers.delivered_offset(number, slot).unwrap_or_default(),
            ))
        };
        let position = (!held.is_empty()).then(|| open.replay_position(number).unwrap_or_else(live));
        connection.outbox.push_replay(std::iter::once(page.frame));
        if let Some(position) = position {
            held.into_iter().for_each(|one| connection.outbox.push(one.frame_at(format, &position)));
        }
        true
    }
}

/// Leave of all members of the connection.
fn delayed_leave(connection: &mut SocketConnection) -> Option<DelayedLeave> {
    let open = connection.open_mut()?;
    let session = &open.session;
    Some(DelayedLeave {
        connection_id: session.connection_id(),
        owner: session.owner(),
        account: Arc::clone(&session.principal().account),
        keeps: None,
    })
}
