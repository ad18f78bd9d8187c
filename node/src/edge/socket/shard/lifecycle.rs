//! Life cycle of connections: their opening and end, and their timers.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use fanfare_proto::frame::{self, Format, ServerFrame, close, code};
use mio::net::TcpStream;

use super::super::connection::{ConnectionPermit, ConnectionStage, OpenSocket, SocketConnection};
use super::super::handshake::{AdmittedConnection, SocketRefusal};
use super::{Shard, context};
use crate::edge::link::ClientLink;
use crate::hub::wire;
use crate::model::UsageKind;
use crate::session::PublishResult;
use crate::telemetry::{Limit, RATE_LIMITED, count_close};

/// Longest time that a stopping shard waits for its clients.
const STOP_MS_MAX: u64 = 3_000;
/// Spread of the delays after which a stopping node's clients reconnect.
const RECONNECT_SPREAD_MS: u64 = 500;
/// Least delay after which a client that is refused at a limit is asked to come back; the greatest one is twice as long.
const REFUSED_MS: u64 = 2_000;
/// After op 4 and its delay the client closes. Otherwise the node closes after this time.
pub(super) const CLOSE_AFTER_MS: u64 = 1_000;

impl Shard {
    pub(super) fn accept(&mut self, link: ClientLink<std::net::TcpStream>, permit: ConnectionPermit) {
        self.add(link, permit, |shard, connection, slot| {
            connection.in_ready = true;
            shard.ready.push_back(slot);
        });
    }

    pub(super) fn adopt(
        &mut self,
        link: ClientLink<std::net::TcpStream>,
        permit: ConnectionPermit,
        mut read: Vec<u8>,
        mut opening: AdmittedConnection,
    ) {
        self.add(link, permit, |shard, connection, slot| {
            // The credential was checked on another thread, and may have been reviewed there or changed since.
            match shard.services.auth.review(&opening.principal) {
                Some(principal) => opening.principal = Arc::new(principal),
                None => {
                    let (format, refused) = (opening.format, SocketRefusal::Credential);
                    return shard.refuse_in_socket(connection, slot, format, refused);
                }
            }
            shard.open(connection, slot, opening);
            shard.feed_frames(connection, slot, &mut read);
        });
    }

    pub(super) fn adopt_refused(
        &mut self,
        link: ClientLink<std::net::TcpStream>,
        permit: ConnectionPermit,
        format: Format,
        refused: SocketRefusal,
    ) {
        self.add(link, permit, |shard, connection, slot| {
            shard.refuse_in_socket(connection, slot, format, refused);
        });
    }

    fn add(
        &mut self,
        link: ClientLink<std::net::TcpStream>,
        permit: ConnectionPermit,
        begin: impl FnOnce(&mut Self, &mut SocketConnection, u32),
    ) {
        if self.stop_ms.is_some() {
            return;
        }
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).expect("fewer connections than 2^32")
        });
        self.next_generation = self.next_generation.wrapping_add(1);
        let link = link.map(TcpStream::from_std);
        let mut connection = Box::new(SocketConnection::new(link, permit, self.next_generation, self.now_ms));
        if let Err(error) = self.register(&mut connection, slot) {
            tracing::warn!(target: RATE_LIMITED, %error, "connection registration failed");
            self.free.push(slot);
            return;
        }
        begin(self, &mut connection, slot);
        // No event announces bytes that TLS has decrypted already.
        if connection.link.tls.is_some() && !connection.in_ready {
            connection.in_ready = true;
            self.ready.push_back(slot);
        }
        self.rearm(&mut connection, slot);
        self.slots[slot as usize] = Some(connection);
    }

    pub(super) fn open(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        mut opening: AdmittedConnection,
    ) {
        self.handle.connections.fetch_add(1, Ordering::Relaxed);
        let (ownership, resumed) = self.begin_session(connection, slot, opening.resumable.take());
        let mut open = OpenSocket::new(opening, ownership, self.epoch_ms);
        self.metrics.opened(&open);
        open.session.principal().account.usage.count(UsageKind::Connect, 1, 0);
        let mut outputs = Vec::new();
        open.session.opened(context(&self.services, self.epoch_ms), resumed, &mut outputs);
        connection.stage = ConnectionStage::Open(open);
        self.run_outputs(connection, slot, outputs);
        self.ask_new_connection(slot, connection.generation);
    }

    pub(super) fn refuse_in_socket(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        format: Format,
        refused: SocketRefusal,
    ) {
        let error = match refused {
            SocketRefusal::Credential => "unauthorized",
            SocketRefusal::ConnectionLimit => "too many connections",
        };
        let (refusal, close_code, after_ms) = match refused {
            SocketRefusal::Credential => {
                (ServerFrame::Error { error, code: code::CREDENTIAL, channel: None }, close::CREDENTIAL, 0)
            }
            SocketRefusal::ConnectionLimit => {
                let reconnect_after_ms = refused_ms();
                let (code, reason) = (code::LIMIT, Some("connection_limit"));
                let frame =
                    ServerFrame::Disconnected { error: Some(error), code, reason, reconnect_after_ms };
                (frame, close::RATE, reconnect_after_ms + CLOSE_AFTER_MS)
            }
        };
        count_close(close_code);
        let frame = super::writing::payload_frame(format, &frame::encode(&refusal, format));
        self.send(connection, slot, frame);
        connection.begin_closing(wire::close(close_code, error), self.now_ms, after_ms);
        self.close_if_due(connection, slot);
    }

    /// Ends a connection whose last frames are in the outbox; the close frame follows after `after_ms`.
    pub(super) fn end(&mut self, connection: &mut SocketConnection, slot: u32, code: u16, after_ms: u64) {
        count_close(code);
        self.leave(connection, slot);
        connection.begin_closing(wire::close(code, ""), self.now_ms, after_ms);
        // Read again, so that no unread bytes turn the close into a reset.
        connection.paused = false;
        if !connection.in_ready {
            connection.in_ready = true;
            self.ready.push_back(slot);
        }
        self.close_if_due(connection, slot);
        self.rearm(connection, slot);
    }

    pub(super) fn close_if_due(&mut self, connection: &mut SocketConnection, slot: u32) {
        if let ConnectionStage::Closing(closing) = &mut connection.stage
            && let Some((_, frame)) = closing.close.take_if(|(at_ms, _)| *at_ms <= self.now_ms)
        {
            self.send(connection, slot, frame);
        }
    }

    /// Drops a connection at once.
    pub(super) fn forget(&mut self, mut connection: Box<SocketConnection>, slot: u32) {
        self.leave(&mut connection, slot);
        connection.link.close();
        self.poll.registry().deregister(&mut connection.link.socket).ok();
        self.release(slot);
    }

    /// Frees the slot: its connection has moved or gone.
    pub(super) fn release(&mut self, slot: u32) {
        self.slots[slot as usize] = None;
        self.free.push(slot);
    }

    /// Ends every delivery to an open session.
    fn leave(&mut self, connection: &mut SocketConnection, slot: u32) {
        self.lose_presence(connection);
        let Some(open) = connection.open_mut() else { return };
        self.metrics.ended(open);
        self.handle.connections.fetch_sub(1, Ordering::Relaxed);
        let (ownership, for_good) = (open.session.ownership(), open.session.ended_for_good());
        let subscriptions = std::mem::take(&mut open.subscriptions);
        self.silent.end(&open.session, slot);
        let principal = open.session.principal();
        if !principal.account.integrations.is_empty() {
            open.session
                .channels()
                .for_each(|channel| self.handle.occupancy_notifier.note(principal, channel));
        }
        self.watching.end(&open.session, slot, |key| self.handle.watches.end(key, self.index));
        for subscription in &subscriptions {
            self.remove_subscriber(subscription.number, slot);
        }
        self.end_session(&ownership, for_good, &subscriptions);
    }

    pub(super) fn remove_subscriber(&mut self, number: u64, slot: u32) {
        if let Some(channel) = self.subscribers.remove(number, slot) {
            self.services.hub.detach(&channel, self.index);
        }
    }

    /// Sets the connection's timer if it is due earlier than the present one.
    pub(super) fn rearm(&mut self, connection: &mut SocketConnection, slot: u32) {
        let clock_ahead_ms = self.epoch_ms.saturating_sub(self.now_ms);
        let due_ms = connection.next_due_ms(&self.services.limits, clock_ahead_ms);
        if due_ms < connection.due_ms {
            connection.due_ms = due_ms;
            self.timers.arm(due_ms, slot);
        }
    }

    pub(super) fn timer_turn(&mut self) {
        while let Some((due_ms, slot)) = self.timers.pop_due(self.now_ms) {
            let Some(mut connection) = self.slots[slot as usize].take() else { continue };
            if connection.due_ms != due_ms {
                self.slots[slot as usize] = Some(connection);
                continue;
            }
            connection.due_ms = u64::MAX;
            if self.look_at_time(&mut connection, slot) {
                self.rearm(&mut connection, slot);
                self.slots[slot as usize] = Some(connection);
            } else {
                self.forget(connection, slot);
            }
        }
        while self.unanswered.front().is_some_and(|first| first.deadline_ms <= self.now_ms) {
            if let Some(late) = self.unanswered.pop_front() {
                self.answered(late.slot, late.generation, late.ticket, PublishResult::Unavailable);
            }
        }
        self.check_quota_slots();
    }

    /// Handles a connection's timers. False when its time is over.
    fn look_at_time(&mut self, connection: &mut SocketConnection, slot: u32) -> bool {
        let now_ms = self.now_ms;
        let limits = &self.services.limits;
        let passed = |at_ms: Option<u64>| at_ms.is_some_and(|at_ms| now_ms >= at_ms);
        let (silence_over, message_late) =
            (passed(connection.silence_ends_ms(limits)), passed(connection.message_ends_ms(limits)));
        let open = match &mut connection.stage {
            ConnectionStage::Opening { since_ms, .. } => {
                let is_in_time = now_ms < *since_ms + limits.header_ms;
                if !is_in_time {
                    Limit::HeaderMs.hit();
                }
                return is_in_time;
            }
            ConnectionStage::Closing(closing) if closing.close.is_none() => return now_ms < closing.until_ms,
            ConnectionStage::Closing(_) => {
                self.close_if_due(connection, slot);
                return true;
            }
            ConnectionStage::Open(open) => open,
        };
        if silence_over && connection.last_look_ms.is_some() {
            Limit::HeartbeatMs.hit();
            return false;
        }
        if silence_over {
            // After a stall of the whole process frames may be in the socket, unread.
            connection.last_look_ms = Some(now_ms);
            connection.readable = true;
            if !connection.in_ready {
                connection.in_ready = true;
                self.ready.push_back(slot);
            }
            return true;
        }
        if connection.blocked_ms.is_some_and(|since_ms| now_ms >= since_ms + limits.outbox_stall_ms) {
            if connection.is_taking() {
                connection.begin_blocked(now_ms);
                return true;
            }
            self.end_slow(connection, slot, Limit::OutboxStallMs);
            return true;
        }
        let mut outputs = Vec::new();
        if message_late {
            Limit::SocketMessageMs.hit();
            open.session.fail(
                "a message was not finished in time",
                code::BAD_REQUEST,
                close::TOO_BIG,
                &mut outputs,
            );
        } else {
            open.session.tick(context(&self.services, self.epoch_ms), &mut outputs);
        }
        let silent = now_ms >= connection.heartbeat_due_ms(limits);
        self.run_outputs(connection, slot, outputs);
        if silent {
            connection.sent_ms = now_ms;
            if connection.blocked_ms.is_none() {
                self.send_heartbeat(connection, slot);
            }
        }
        true
    }

    pub(super) fn stop(&mut self, within: Duration) {
        let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX).min(STOP_MS_MAX);
        self.stop_ms = Some(self.now_ms + within_ms);
        // Even the last client has a quarter of the time left when the node closes the connection.
        let spread_ms = RECONNECT_SPREAD_MS.min(within_ms / 4).max(1);
        let close_after_ms = CLOSE_AFTER_MS.min(within_ms / 2);
        for slot in 0..self.slots.len() {
            let Some(mut connection) = self.slots[slot].take() else { continue };
            let slot = u32::try_from(slot).expect("slots are numbered by u32");
            let mut outputs = Vec::new();
            let open = match &mut connection.stage {
                ConnectionStage::Open(open) => open,
                ConnectionStage::Opening { .. } => {
                    self.forget(connection, slot);
                    continue;
                }
                // The last frames may not be written yet. The connection keeps the time that it was given, or gets that of the others.
                ConnectionStage::Closing(closing) => {
                    if let Some((at_ms, _)) = &mut closing.close {
                        *at_ms = (*at_ms).min(self.now_ms + spread_ms + close_after_ms);
                    }
                    self.rearm(&mut connection, slot);
                    self.slots[slot as usize] = Some(connection);
                    continue;
                }
            };
            let spread = u64::from(u16::from_be_bytes(crate::model::random_bytes())) % spread_ms;
            let (code, close) = (code::UNAVAILABLE, close::DRAINING);
            let close_after = spread + close_after_ms;
            open.session.disconnect("the node is stopping", code, close, spread, close_after, &mut outputs);
            self.run_outputs(&mut connection, slot, outputs);
            self.slots[slot as usize] = Some(connection);
        }
    }
}

/// Delay after which a client that is refused at a limit is asked to come back.
pub(super) fn refused_ms() -> u64 {
    let spread = u64::from(u16::from_be_bytes(crate::model::random_bytes()));
    REFUSED_MS + spread % REFUSED_MS
}
