//! Pages of a backlog, encoded as frames.

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, MessageOut};
use fanfare_proto::http::{StoredRecord, read_record};
use fanfare_proto::serial::Serial;

use super::{BacklogCursor, BacklogPage, BacklogResponse, ChannelBacklog, StampOrder};
use crate::hub::wire;
use crate::model::{Amount, ConnectionId, Stamp, message_bytes};
use crate::origin::history::{Direction, HistoryPage, HistoryQuery};
use crate::telemetry::RATE_LIMITED;

/// Approximate size of a page: as much as one pull from a replay buffer.
pub(super) const PAGE_BYTES: usize = 64 * 1024;
pub(super) const PAGE_ROWS: usize = 512;

impl ChannelBacklog<'_> {
    /// Reads the next page. None when a row is missing. No frames once the replay buffer has the following messages.
    pub(super) async fn page(
        &self,
        cursor: BacklogCursor,
        format: Format,
        without: Option<ConnectionId>,
    ) -> Option<BacklogResponse> {
        let own = self.shared.hub.incarnation();
        let mut is_settled = false;
        loop {
            if cursor.after.incarnation == own && self.channel.can_replay_from(cursor.after.sequence) {
                return Some(BacklogResponse::Page(BacklogPage {
                    frames: Vec::new(),
                    amount: Amount::default(),
                    cursor,
                }));
            }
            let query = HistoryQuery {
                limit: PAGE_ROWS,
                bytes_max: PAGE_BYTES,
                cursor: Some(cursor.cursor),
                ..self.query(Direction::Forwards)
            };
            let page = self.shared.store.read(query).await.ok()?;
            if !page.rows.is_empty() || cursor.order != StampOrder::Strict {
                return self.frames(cursor, &page, format, without).map(BacklogResponse::Page);
            }
            if is_settled {
                return None;
            }
            // The next message was delivered, and its write is still pending.
            self.shared.store.flush().await.ok()?;
            is_settled = true;
        }
    }

    fn frames(
        &self,
        mut cursor: BacklogCursor,
        read: &HistoryPage,
        format: Format,
        without: Option<ConnectionId>,
    ) -> Option<BacklogPage> {
        let without = without.map(|id| id.to_string());
        let mut messages = Vec::with_capacity(read.rows.len());
        for row in &read.rows {
            let stamp = Stamp { incarnation: row.position.incarnation, sequence: row.position.sequence };
            cursor = self.step(cursor, stamp)?;
            cursor.cursor = row.position;
            messages.push((stamp, &*row.json));
        }
        if read.next.is_none()
            && let StampOrder::IntoThisIncarnation { until_sequence, .. } | StampOrder::Any { until_sequence } =
                cursor.order
        {
            // All messages up to that sequence are read: the position is now one of this incarnation.
            cursor.after = self.shared.own(until_sequence);
            cursor.order = StampOrder::Strict;
            if let Some((last, _)) = messages.last_mut() {
                *last = cursor.after;
            }
        }
        let mut amount = Amount::default();
        let mut frames = Vec::with_capacity(messages.len());
        for (stamp, json) in messages {
            let record = read_record(json)
                .inspect_err(
                    |error| tracing::error!(target: RATE_LIMITED, %error, "stored record cannot be decoded"),
                )
                .ok()?;
            if without.as_deref() != Some(&*record.connection_id) {
                let serial = Serial::single(stamp.incarnation, stamp.sequence);
                frames.push(self.frame(&serial, &record, format, json.len(), &mut amount));
            }
        }
        Some(BacklogPage { frames, amount, cursor })
    }

    /// The cursor after a row with this stamp; none when rows between them are missing.
    fn step(&self, cursor: BacklogCursor, stamp: Stamp) -> Option<BacklogCursor> {
        let Stamp { incarnation, sequence } = stamp;
        let is_own = incarnation == self.shared.hub.incarnation();
        let stepped = BacklogCursor { after: stamp, ..cursor };
        match cursor.order {
            StampOrder::IntoThisIncarnation { until_sequence, .. } | StampOrder::Any { until_sequence }
                if is_own && sequence > until_sequence =>
            {
                let from_own = BacklogCursor {
                    after: self.shared.own(until_sequence),
                    order: StampOrder::Strict,
                    ..cursor
                };
                self.step(from_own, stamp)
            }
            StampOrder::Any { .. } => Some(stepped),
            StampOrder::IntoThisIncarnation { from, .. } if incarnation != from => {
                let incarnations_since = |incarnation| self.shared.incarnations_since(incarnation);
                (incarnations_since(incarnation)? <= incarnations_since(cursor.after.incarnation)?)
                    .then_some(stepped)
            }
            StampOrder::Strict | StampOrder::IntoThisIncarnation { .. } => {
                let Stamp { incarnation: previous, sequence: before } = cursor.after;
                (incarnation == previous && sequence == before + 1).then_some(stepped)
            }
        }
    }

    /// Encodes a message, with the position of a client that has received it and all earlier ones.
    pub(super) fn frame(
        &self,
        serial: &Serial,
        record: &StoredRecord<'_>,
        format: Format,
        bytes: usize,
        amount: &mut Amount,
    ) -> Bytes {
        let StoredRecord { id, data, extras, connection_id, timestamp, .. } = record;
        let (name, client_id) = (record.name.as_deref(), record.client_id.as_deref());
        amount.add(Amount { count: 1, bytes: message_bytes(name, *data, *extras, client_id) as u64 });
        let message = std::iter::once(MessageOut { id, name, data: *data, extras: *extras });
        let serial = serial.to_string();
        wire::encoded(format, bytes + 128, |mut out| {
            let channel = self.channel.key().channel();
            frame::encode_messages(channel, &serial, *timestamp, connection_id, client_id, message, &mut out);
            out
        })
    }
}
