//! Writing: deliveries into outboxes, outboxes into sockets.

#[cfg(test)]
mod tests;

use std::net::Shutdown;
use std::time::Instant;

use bytes::Bytes;
use fanfare_proto::frame::{Format, close, code};
use fastwebsockets::OpCode;

use super::super::connection::{ConnectionStage, SocketConnection};
use super::super::ring::{IoUringWriter, SocketWrite, SocketWriteResult};
use super::reading::UNREAD_BYTES_MAX;
use super::{SLICE, Shard};
use crate::hub::{Flush, MessageDelivery, wire};
use crate::model::UsageKind;
use crate::telemetry::Limit;

/// Connections that are flushed between two looks at the clock.
const FLUSH_BATCH: usize = 64;
/// Number of connections from which on one call writes to all of them.
const TOGETHER_LEAST: usize = 2;

impl Shard {
    /// Puts the frame into the outbox of every subscriber here.
    pub(super) fn deliver(&mut self, delivery: &MessageDelivery) {
        let offset = delivery.offset();
        let (mut json, mut msgpack) = (None, None);
        let mut over = Vec::new();
        let (mut count, mut last) = (0, None);
        for subscriber in self.subscribers.deliver(delivery.channel, offset) {
            let Some(connection) = self.slots[subscriber.slot as usize].as_deref_mut() else { continue };
            let ConnectionStage::Open(open) = &connection.stage else { continue };
            if !subscriber.messages
                || offset <= subscriber.after_offset
                || !open.echo && open.session.connection_id() == delivery.connection_id()
            {
                continue;
            }
            let frame: &Bytes = match open.session.format() {
                Format::Json => json.get_or_insert_with(|| delivery.frame(Format::Json)),
                Format::MsgPack => msgpack.get_or_insert_with(|| delivery.frame(Format::MsgPack)),
            };
            count += 1;
            last = Some(subscriber.slot);
            connection.outbox.push(frame.clone());
            if connection.outbox.live_bytes() > self.services.limits.outbox_bytes {
                over.push(subscriber.slot);
            }
            if !connection.in_dirty && connection.blocked_ms.is_none() {
                connection.in_dirty = true;
                self.dirty.push_back(subscriber.slot);
            }
        }
        self.coalescing.handed(count);
        if let Some(slot) = last {
            self.count_deliveries(slot, count, delivery);
        }
        for slot in over {
            self.flush(slot);
            self.check_outbox(slot, 0);
        }
    }

    /// Counts the deliveries to `subscribers`. `slot` is one of them: they are all of one account.
    fn count_deliveries(&self, slot: u32, subscribers: u64, delivery: &MessageDelivery) {
        let messages = subscribers * delivery.count();
        self.metrics.deliveries.increment(messages);
        if let Some(connection) = &self.slots[slot as usize]
            && let ConnectionStage::Open(open) = &connection.stage
        {
            let usage = &open.session.principal().account.usage;
            usage.count(UsageKind::Deliver, messages, subscribers * delivery.counted_bytes());
        }
    }

    pub(super) fn send_payload(&mut self, connection: &mut SocketConnection, slot: u32, payload: &[u8]) {
        let Some(open) = connection.open_mut() else { return };
        let frame = payload_frame(open.session.format(), payload);
        self.send(connection, slot, frame);
    }

    pub(super) fn send(&mut self, connection: &mut SocketConnection, slot: u32, frame: Bytes) {
        connection.outbox.push_answer(frame);
        if !connection.in_dirty && connection.blocked_ms.is_none() {
            connection.in_dirty = true;
            self.dirty.push_back(slot);
        }
    }

    pub(super) fn send_heartbeat(&mut self, connection: &mut SocketConnection, slot: u32) {
        let Some(open) = connection.open_mut() else { return };
        let frame = match (open.heartbeat_pings, open.session.format()) {
            (true, _) => wire::frame(OpCode::Ping, b""),
            (false, Format::Json) => self.heartbeat_json.clone(),
            (false, Format::MsgPack) => self.heartbeat_msgpack.clone(),
        };
        self.send(connection, slot, frame);
    }

    /// Opens a ring with which the kernel writes to many sockets in one call, if the system can. Must be called on the thread of the shard.
    pub(super) fn open_ring(&mut self) {
        match IoUringWriter::new() {
            Ok(ring) => {
                self.ring = Some(ring);
                self.metrics.rings.increment(1.0);
            }
            // Nearly always all shards get the same error, so one logs it.
            Err(error) if self.index == 0 => {
                tracing::info!(%error, "io_uring unavailable: one write call for each socket");
            }
            Err(error) => tracing::debug!(shard = self.index, %error, "io_uring unavailable"),
        }
    }

    pub(super) fn close_ring(&mut self) {
        if self.ring.take().is_some() {
            self.metrics.rings.decrement(1.0);
        }
    }

    pub(super) fn flush_turn(&mut self) {
        let until = Instant::now() + SLICE;
        while !self.dirty.is_empty() {
            let slots: Vec<u32> = self.dirty.drain(..self.dirty.len().min(FLUSH_BATCH)).collect();
            let written = self.write_together(&slots);
            for (slot, written) in slots.into_iter().zip(written) {
                self.flush_begun(slot, written);
            }
            if Instant::now() >= until {
                return;
            }
        }
    }

    /// Starts writes to those connections that one call can serve. Each result must be passed to [`Self::flush_begun`] before any other use
    /// of its connection.
    fn write_together(&mut self, slots: &[u32]) -> Vec<SocketWriteResult> {
        let mut written = vec![SocketWriteResult::NOTHING; slots.len()];
        let Some(ring) = &mut self.ring else { return written };
        let mut dirty = Vec::with_capacity(slots.len());
        for (at, slot) in slots.iter().enumerate() {
            // A slot is in the list twice when its connection has gone since and the next one in it is dirty too.
            let connection = self.slots[*slot as usize].as_deref_mut();
            if connection.is_some_and(|connection| std::mem::take(&mut connection.in_dirty)) {
                dirty.push((at, slot));
            }
        }
        let mut writes = Vec::with_capacity(dirty.len());
        for (at, slot) in dirty {
            if let Some(SocketConnection { link, outbox, blocked_ms: None, .. }) =
                self.slots[*slot as usize].as_deref()
                && let Some(socket) = link.plain_socket()
                && !outbox.is_empty()
            {
                writes.push(SocketWrite { at, socket, outbox });
            }
        }
        if writes.len() < TOGETHER_LEAST {
            return written;
        }
        if let Err(error) = ring.write(&writes, &mut written) {
            tracing::warn!(shard = self.index, %error, "io_uring failed, no longer used");
            self.close_ring();
        }
        written
    }

    pub(super) fn flush(&mut self, slot: u32) {
        self.flush_begun(slot, SocketWriteResult::NOTHING);
    }

    fn flush_begun(&mut self, slot: u32, written: SocketWriteResult) {
        let Some(mut connection) = self.slots[slot as usize].take() else { return };
        connection.in_dirty = false;
        let SocketConnection { outbox, link, .. } = &mut *connection;
        let SocketWriteResult::Known(begun) = written else {
            // The client keeps what it has received, and resumes for the rest.
            outbox.leak();
            link.socket.shutdown(Shutdown::Both).ok();
            return self.forget(connection, slot);
        };
        let flushed = outbox.flush_after(begun, link);
        let part = link.take_progress();
        match flushed {
            Ok(Flush::Drained) => {
                connection.sent_ms = self.now_ms;
                connection.blocked_ms = None;
                if connection.has_closed() {
                    // Bytes that the client still sends are read and dropped until it closes too.
                    connection.link.shutdown_write();
                }
                self.unpause(&mut connection, slot);
                self.schedule_replay(&mut connection, slot);
                if self.pull_presence(&mut connection, slot) && !connection.in_dirty {
                    connection.in_dirty = true;
                    self.dirty.push_back(slot);
                }
            }
            Ok(Flush::Blocked { progress }) => {
                let progress = progress || part;
                self.blocked_scan.is_any = true;
                if progress {
                    connection.sent_ms = self.now_ms;
                }
                if progress || connection.blocked_ms.is_none() {
                    connection.begin_blocked(self.now_ms);
                    self.rearm(&mut connection, slot);
                }
                self.unpause(&mut connection, slot);
                self.schedule_replay(&mut connection, slot);
            }
            Err(_) => return self.forget(connection, slot),
        }
        self.slots[slot as usize] = Some(connection);
    }

    /// Ends a connection whose pending bytes exceed the limit; `held_bytes` wait outside its outbox.
    pub(super) fn check_outbox(&mut self, slot: u32, held_bytes: usize) {
        let Some(mut connection) = self.slots[slot as usize].take() else { return };
        if connection.outbox.live_bytes() + held_bytes > self.services.limits.outbox_bytes {
            self.end_slow(&mut connection, slot, Limit::OutboxBytes);
        }
        self.slots[slot as usize] = Some(connection);
    }

    pub(super) fn end_slow(&mut self, connection: &mut SocketConnection, slot: u32, limit: Limit) {
        self.metrics.slow.increment(1);
        connection.outbox.keep_partial_frame();
        let mut outputs = Vec::new();
        if let Some(open) = connection.open_mut() {
            limit.hit();
            open.session.disconnect("slow consumer", code::LIMIT, close::SLOW, 0, 0, &mut outputs);
        }
        self.run_outputs(connection, slot, outputs);
    }

    /// Resumes reading once fewer answers are pending.
    pub(super) fn unpause(&mut self, connection: &mut SocketConnection, slot: u32) {
        let waits = connection.open_mut().is_some_and(|open| !open.session.can_resume_reading());
        if !connection.paused || waits || connection.outbox.answers() > UNREAD_BYTES_MAX {
            return;
        }
        connection.resume_reading(self.now_ms);
        if !connection.in_ready {
            connection.in_ready = true;
            self.ready.push_back(slot);
        }
    }
}

/// A payload as a frame of its format.
pub(in crate::edge::socket) fn payload_frame(format: Format, payload: &[u8]) -> Bytes {
    let opcode = match format {
        Format::Json => OpCode::Text,
        Format::MsgPack => OpCode::Binary,
    };
    wire::frame(opcode, payload)
}
