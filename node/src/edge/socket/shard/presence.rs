//! Presence in a shard: events to those who want them, member lists as their sockets drain, and the end of members.

use std::sync::Arc;

use crate::hub::{PresenceDelivery, PresenceMode, Spot, Sync, Verdict};
use crate::model::ChannelName;
use crate::publish::{Departure, PresenceRequest};
use crate::session::Leaving;

use super::super::connection::{Connection, Stage, Subscription};
use super::Shard;

impl Shard {
    pub(super) fn present(
        &mut self,
        connection: &Connection,
        slot: u32,
        ticket: u64,
        request: PresenceRequest,
    ) {
        let answer = self.owe_answer(connection, slot, ticket);
        self.services.publisher.present(request, answer);
    }

    pub(super) fn leave_presence(&mut self, connection: &mut Connection, leaving: Leaving) {
        let Some(mut departure) = departure(connection) else { return };
        if leaving == Leaving::NotGranted {
            let open = connection.open_mut();
            departure.keeps = open.map(|open| vec![Arc::clone(&open.session.principal().capability)]);
        }
        self.services.publisher.leave(departure);
    }

    /// The link is gone: members stay for their grace, unless they have left.
    pub(super) fn lose_presence(&mut self, connection: &mut Connection) {
        if let Some(departure) = departure(connection) {
            self.services.publisher.lost(departure);
        }
    }

    /// After the subscription: what of the channel its modes ask for. True when a member list follows.
    pub(super) fn set_modes(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        channel: &ChannelName,
    ) -> bool {
        let Some(open) = connection.open_mut() else { return false };
        let (messages, presence) = open.session.takes(channel);
        let publishes = open.session.publishes(channel);
        let Some(subscription) = open.subscription_mut(channel) else { return false };
        let number = subscription.number;
        if !messages {
            subscription.since = Subscription::NEVER;
            self.end_replay(connection, slot, number);
        } else if subscription.since == Subscription::NEVER
            && let Some(channel) = self.subscribers.channel(number)
        {
            subscription.since = channel.mark().place;
        }
        self.subscribers.set(number, slot, |own| (own.messages, own.publishes) = (messages, publishes));
        self.subscribe_presence(connection, slot, number, presence)
    }

    /// What an attached connection gets of the channel's presence from now on; true when a member list follows.
    fn subscribe_presence(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        number: u64,
        wanted: bool,
    ) -> bool {
        let Some(open) = connection.open_mut() else { return false };
        open.syncs.retain(|(channel, _)| *channel != number);
        let Some(channel) = self.subscribers.channel(number).filter(|_| wanted) else {
            self.subscribers.set(number, slot, |own| own.presence = PresenceMode::Off);
            return false;
        };
        let (follows, mark) = self.services.hub.presence_mark(channel);
        let mode = if follows { PresenceMode::Syncing } else { PresenceMode::After(mark) };
        self.subscribers.set(number, slot, |own| own.presence = mode);
        if follows {
            open.syncs.push((number, Sync::default()));
        }
        follows
    }

    /// Puts the event into the outbox of every subscriber here that wants it now.
    pub(super) fn deliver_presence(&mut self, delivery: &Arc<PresenceDelivery>) {
        let (mut over, mut handed) = (Vec::new(), 0);
        let Some((channel, subscribers, delivered)) = self.subscribers.all_mut(delivery.channel) else {
            return;
        };
        for subscriber in subscribers {
            let Some(connection) = self.slots[subscriber.slot as usize].as_deref_mut() else { continue };
            let Stage::Open(open) = &mut connection.stage else { continue };
            let format = open.session.format();
            let (verdict, held_bytes) = match subscriber.presence {
                PresenceMode::Off => continue,
                PresenceMode::After(mark) if delivery.event.sequence <= mark => continue,
                PresenceMode::After(_) => (Verdict::Send, 0),
                PresenceMode::Syncing => {
                    let place = open.syncs.iter().position(|(channel, _)| *channel == delivery.channel);
                    let Some(place) = place else { continue };
                    let sync = &mut open.syncs[place].1;
                    let judged = (sync.judge(delivery), sync.held_bytes());
                    if sync.ends_with(delivery.event.sequence) {
                        subscriber.presence = PresenceMode::After(delivery.event.sequence);
                        open.syncs.swap_remove(place);
                    }
                    judged
                }
            };
            if verdict == Verdict::Send {
                // What it has not been given of the messages yet may not count as given by its position.
                let live = subscriber.after_place.max(delivered);
                let frame = match open.replay_position(delivery.channel) {
                    Some(position) => delivery.frame_at(format, &position),
                    None if live == delivery.place() => delivery.frame(format),
                    None => delivery.frame_at(format, &channel.position_at(Spot::end(live))),
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
        self.pace.handed(handed);
        for (slot, held_bytes) in over {
            self.flush(slot);
            self.check_outbox(slot, held_bytes);
        }
    }

    /// The outbox is empty: the next page of a member list goes into it. False when there is none.
    pub(super) fn pull_presence(&mut self, connection: &mut Connection, slot: u32) -> bool {
        let Some(open) = connection.open_mut() else { return false };
        let Some(place) = open.syncs.iter().position(|(_, sync)| !sync.is_sent()) else { return false };
        let format = open.session.format();
        let (number, sync) = &mut open.syncs[place];
        let number = *number;
        let Some(channel) = self.subscribers.channel(number).cloned() else {
            open.syncs.swap_remove(place);
            return false;
        };
        let page = self.services.hub.presence_page(&channel, format, sync.after());
        let held = sync.sent(&page);
        if let Some(mark) = sync.covers_up_to() {
            self.subscribers.set(number, slot, |own| own.presence = PresenceMode::After(mark));
            open.syncs.swap_remove(place);
        }
        let live =
            || channel.position_at(Spot::end(self.subscribers.position(number, slot).unwrap_or_default()));
        let position = (!held.is_empty()).then(|| open.replay_position(number).unwrap_or_else(live));
        connection.outbox.push_replay(std::iter::once(page.frame));
        if let Some(position) = position {
            held.into_iter().for_each(|one| connection.outbox.push(one.frame_at(format, &position)));
        }
        true
    }
}

/// Of all members of the connection.
fn departure(connection: &mut Connection) -> Option<Departure> {
    let open = connection.open_mut()?;
    let session = &open.session;
    Some(Departure {
        connection_id: session.connection_id(),
        owner: session.owner(),
        account: Arc::clone(&session.principal().account),
        keeps: None,
    })
}
