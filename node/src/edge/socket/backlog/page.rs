//! Reading on from a place, as frames.

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, MessageOut};
use fanfare_proto::http::{StoredRecord, read_record};
use fanfare_proto::serial::Serial;

use super::{Found, Order, Page, Place, Rows};
use crate::hub::wire;
use crate::model::{Amount, ConnectionId, Stamp, message_bytes};
use crate::origin::history::{Direction, HistoryPage, HistoryQuery};
use crate::telemetry::OFTEN;

/// What one page brings, about: as much as one pull from a ring.
pub(super) const PAGE_BYTES: usize = 64 * 1024;
pub(super) const PAGE_ROWS: usize = 512;

impl Rows<'_> {
    /// None when a row is missing. Without frames once the channel's recent messages go on from here.
    pub(super) async fn page(
        &self,
        place: Place,
        format: Format,
        without: Option<ConnectionId>,
    ) -> Option<Found> {
        let own = self.shared.hub.incarnation();
        let mut is_settled = false;
        loop {
            if place.after.incarnation == own && self.channel.reaches(place.after.sequence) {
                return Some(Found::Page(Page { frames: Vec::new(), amount: Amount::default(), place }));
            }
            let query = HistoryQuery {
                limit: PAGE_ROWS,
                bytes_max: PAGE_BYTES,
                cursor: Some(place.cursor),
                ..self.query(Direction::Forwards)
            };
            let page = self.shared.store.read(query).await.ok()?;
            if !page.rows.is_empty() || place.order != Order::Strict {
                return self.frames(place, &page, format, without).map(Found::Page);
            }
            if is_settled {
                return None;
            }
            // What follows was delivered and is on its way to where it can be read.
            self.shared.store.settled().await.ok()?;
            is_settled = true;
        }
    }

    fn frames(
        &self,
        mut place: Place,
        read: &HistoryPage,
        format: Format,
        without: Option<ConnectionId>,
    ) -> Option<Page> {
        let without = without.map(|id| id.to_string());
        let mut messages = Vec::with_capacity(read.rows.len());
        for row in &read.rows {
            let stamp = Stamp { incarnation: row.position.incarnation, sequence: row.position.sequence };
            place = self.step(place, stamp)?;
            place.cursor = row.position;
            messages.push((stamp, &*row.json));
        }
        if read.next.is_none()
            && let Order::IntoThisRun { mark, .. } | Order::Any { mark } = place.order
        {
            // That was all up to the mark: from here on the position is one of this run.
            place.after = self.shared.own(mark);
            place.order = Order::Strict;
            if let Some((last, _)) = messages.last_mut() {
                *last = place.after;
            }
        }
        let mut amount = Amount::default();
        let mut frames = Vec::with_capacity(messages.len());
        for (stamp, json) in messages {
            let record = read_record(json)
                .inspect_err(|error| tracing::error!(target: OFTEN, %error, "a stored record cannot be read"))
                .ok()?;
            if without.as_deref() != Some(&*record.connection_id) {
                let serial = Serial::single(stamp.incarnation, stamp.sequence);
                frames.push(self.frame(&serial, &record, format, json.len(), &mut amount));
            }
        }
        Some(Page { frames, amount, place })
    }

    /// The place behind a row with this stamp; none when rows between are missing.
    fn step(&self, place: Place, stamp: Stamp) -> Option<Place> {
        let Stamp { incarnation, sequence } = stamp;
        let is_own = incarnation == self.shared.hub.incarnation();
        let stepped = Place { after: stamp, ..place };
        match place.order {
            Order::IntoThisRun { mark, .. } | Order::Any { mark } if is_own && sequence > mark => {
                let from_mark = Place { after: self.shared.own(mark), order: Order::Strict, ..place };
                self.step(from_mark, stamp)
            }
            Order::Any { .. } => Some(stepped),
            Order::IntoThisRun { from, .. } if incarnation != from => {
                let runs_since = |incarnation| self.shared.runs_since(incarnation);
                (runs_since(incarnation)? <= runs_since(place.after.incarnation)?).then_some(stepped)
            }
            Order::Strict | Order::IntoThisRun { .. } => {
                let Stamp { incarnation: former, sequence: before } = place.after;
                (incarnation == former && sequence == before + 1).then_some(stepped)
            }
        }
    }

    /// With the position of who has it and all before it.
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
