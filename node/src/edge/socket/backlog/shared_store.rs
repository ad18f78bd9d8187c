//! Backfill of a channel from the store that nodes share: the rows of all incarnations, in the order of their times.
//!
//! Every acknowledged message is in the store. So nothing that counts is missing once all live nodes have confirmed that no earlier write
//! is pending: later messages are delivered here. A gap in the sequences of an incarnation is no loss, since a node skips sequences when it
//! has forgotten a channel.

mod rows;

use fanfare_proto::frame::Format;
use fanfare_proto::http::read_record;
use fanfare_proto::serial::Serial;

use super::page::{PAGE_BYTES, PAGE_ROWS};
use super::{BacklogResponse, ChannelBacklog};
use crate::accounts::ChannelPolicy;
use crate::hub::AgedReplayStart;
use crate::model::{Amount, ConnectionId, Stamp};
use crate::origin::history::{Direction, HistoryPage, HistoryPosition, HistoryQuery, HistoryRow};
use crate::session::Rewind;
use crate::telemetry::RATE_LIMITED;
use rows::{before, behind, is_surely_missed};

/// Largest difference of the nodes' clocks, plus the longest time that a message takes from one node to another.
const APART_MS: u64 = 65_000;
/// Rows that are read to decide whether a time is before or after a position.
const PROBE_ROWS: usize = 32;
/// Bound of further pages that are read while all rows leave that undecided.
const UNDECIDED_PAGES_MAX: usize = 32;
/// Rounding of query times, so that similar queries are equal and can share an answer.
const ROUNDED_MS: u64 = 1_000;

/// Progress of a read over the rows of several incarnations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedStoreCursor {
    /// Position up to which the client has all messages.
    pub(in crate::edge::socket) position: Serial,
    /// Channel position from which deliveries reach the client.
    pub(super) attach_position: Serial,
    /// Sequences up to which rows of live incarnations are read; has an entry for each of them.
    pub(super) live_until: Serial,
    /// Incarnations whose unreceived messages are still to be delivered to attached clients.
    pub(super) undelivered_incarnations: Vec<u64>,
    /// Sequences up to which messages of retired incarnations have been delivered here. Later ones, stored by a partitioned node, are
    /// delivered later.
    pub(super) delivered_until: Serial,
    /// Messages that this node delivered before the attach, of incarnations that it takes for down and that may still store them. Each
    /// counts as missing until it has been read.
    pub(super) awaited: Serial,
    /// Store position after which the next row is read. All rows are before `end_ms`.
    pub(super) cursor: HistoryPosition,
    pub(super) end_ms: u64,
    /// Time before which rows of retired incarnations that no position names are uncertain: the client may or may not have received them.
    pub(super) uncertain_before_ms: u64,
}

impl SharedStoreCursor {
    #[cfg(test)]
    pub(in crate::edge::socket) fn at(position: Serial, attach_position: Serial) -> Self {
        let (live_until, delivered_until, awaited) = Default::default();
        let undelivered_incarnations = Vec::new();
        Self {
            position,
            attach_position,
            live_until,
            undelivered_incarnations,
            delivered_until,
            awaited,
            cursor: behind(0),
            end_ms: 0,
            uncertain_before_ms: 0,
        }
    }

    /// Sequences up to which rows are read of incarnations whose later messages are delivered.
    fn until(&self) -> Serial {
        self.live_until.join(&self.delivered_until)
    }

    /// True if all awaited messages have been read.
    fn has_all_awaited(&self) -> bool {
        self.awaited
            .entries()
            .iter()
            .all(|(incarnation, sequence)| self.position.includes_one(*incarnation, *sequence))
    }

    /// Position of the client after the last page, from which deliveries continue.
    pub(in crate::edge::socket) fn end(&self) -> Serial {
        self.position.join(&self.attach_position)
    }
}

/// Decision whether a row belongs to the answer.
enum RowInclusion {
    Yes,
    No,
    Unknown,
}

impl ChannelBacklog<'_> {
    /// Finds the messages after a position: in the replay buffers of the nodes, or else, if the channel keeps history, in the store.
    pub(super) async fn find_in_cluster(
        &self,
        position: Serial,
        attach_position: Serial,
        back_ms: Option<u64>,
        history: bool,
    ) -> Option<BacklogResponse> {
        let (hub, key) = (&self.shared.hub, self.channel.key());
        let routing = self.shared.publisher.routing()?;
        // Peers refuse longer positions.
        if position.entries().len() > Serial::RUNS_MAX {
            return None;
        }
        let recent_ms = back_ms.unwrap_or(u64::MAX);
        routing.fetch_replay_after(key, &position).await;
        if let Some(recent) = hub.replay_after(key, &position) {
            let AgedReplayStart { after, is_exact, missed_ms } = recent;
            return (missed_ms <= recent_ms).then_some(BacklogResponse::Recent { after, is_exact });
        }
        let mut missed = routing.backfill_from_peers(key, &position, recent_ms).await;
        // Once unreachable nodes are known to be down, the others have all that those acknowledged.
        if missed.is_none() && routing.has_recently_unreachable() {
            routing.until_failures_known().await;
            missed = routing.backfill_from_peers(key, &position, recent_ms).await;
        }
        let found = match missed {
            Some(missed) => Some(BacklogResponse::FromPeers(missed)),
            None if !history => None,
            None => self.after_in_shared_store(position.clone(), attach_position, back_ms).await,
        };
        if found.is_none() {
            self.record_loss_position(&position).await;
        }
        found
    }

    /// Records the position of a client that is told a continuity loss and begins at the channel's present position. Positions that follow
    /// include its messages of retired incarnations, so that no node delivers them again.
    pub(super) async fn record_loss_position(&self, position: &Serial) {
        if let Some(routing) = self.shared.publisher.routing() {
            routing.learn_retired_incarnations(self.channel.key(), position).await;
        }
    }

    /// Finds the messages after a position in the store. None if they cannot be told with certainty.
    async fn after_in_shared_store(
        &self,
        position: Serial,
        attach_position: Serial,
        back_ms: Option<u64>,
    ) -> Option<BacklogResponse> {
        let reading = self.settled_cursor(position, attach_position).await?;
        self.begin_after(reading, back_ms).await
    }

    pub(super) async fn begin_after(
        &self,
        mut reading: SharedStoreCursor,
        back_ms: Option<u64>,
    ) -> Option<BacklogResponse> {
        let now_ms = self.shared.clock.expiry_ms();
        let from_ms = back_ms.map_or(self.oldest_ms, |back_ms| now_ms.saturating_sub(back_ms));
        let from_ms = from_ms - from_ms % ROUNDED_MS;
        let from_ms = self.readable_from(from_ms)?;
        let is_known = self.names_this_incarnation(&reading.position);
        let Some(newest) = self.newest(None).await? else {
            return Some(BacklogResponse::SharedBegin { reading: Box::new(reading), is_cut: false });
        };
        let end_ms = newest.timestamp_ms + 1;
        let first_ms = self.first_missed(&reading, is_known, from_ms, end_ms).await?;
        let mut start_ms = first_ms.saturating_sub(APART_MS).max(from_ms);
        reading.uncertain_before_ms = first_ms;
        if first_ms <= from_ms {
            // All rows from there on are missed. If the last row before is missed too, missed rows are out of reach.
            if let Some(older) = self.newest(Some(from_ms)).await?
                && self.is_missed(&reading, is_known, older)
            {
                return None;
            }
            (start_ms, reading.uncertain_before_ms) = (from_ms, 0);
        }
        reading.cursor = behind(start_ms);
        reading.end_ms = end_ms;
        Some(BacklogResponse::SharedBegin { reading: Box::new(reading), is_cut: false })
    }

    /// Finds the last messages before an attach: in the store, or in the replay buffers of all nodes.
    pub(super) async fn rewind_in_cluster(
        &self,
        rewind: Rewind,
        attach_position: Serial,
        policy: ChannelPolicy,
    ) -> BacklogResponse {
        let is_stored = self.is_stored_by_all(policy);
        let stored =
            if is_stored { self.rewind_in_shared_store(rewind, attach_position).await } else { None };
        match stored {
            Some(stored) => stored,
            None => self.rewind_in_recent(rewind, is_stored).await,
        }
    }

    async fn rewind_in_recent(&self, rewind: Rewind, is_stored: bool) -> BacklogResponse {
        let recent = || self.channel.rewind(rewind.count, rewind.since_ms);
        if let Some(routing) = self.shared.publisher.routing() {
            let is_lacking = || !recent().is_complete && !recent().is_cluster_wide;
            routing.fetch_all_replay(self.channel, is_lacking).await;
        }
        self.rewind_local(rewind, is_stored)
    }

    /// The last messages before an attach that this node's replay buffer has by now.
    pub(super) fn rewind_local(&self, rewind: Rewind, is_stored: bool) -> BacklogResponse {
        let recent = self.channel.rewind(rewind.count, rewind.since_ms);
        let is_cut = rewind.is_cut && recent.found < rewind.count;
        BacklogResponse::RecentRewind { recent, is_cut, is_stored: is_stored && !recent.is_complete }
    }

    pub(super) fn is_stored_by_all(&self, policy: ChannelPolicy) -> bool {
        policy.history && self.shared.store.is_shared()
    }

    async fn rewind_in_shared_store(
        &self,
        rewind: Rewind,
        attach_position: Serial,
    ) -> Option<BacklogResponse> {
        let reading = self.settled_cursor(Serial::default(), attach_position).await?;
        self.begin_rewind(reading, rewind).await
    }

    pub(super) async fn begin_rewind(
        &self,
        mut reading: SharedStoreCursor,
        rewind: Rewind,
    ) -> Option<BacklogResponse> {
        let mut query = HistoryQuery {
            limit: rewind.count,
            start_ms: Some(rewind.since_ms),
            // Only positions are needed here; the texts are read later, page by page.
            bytes_max: usize::MAX,
            until: Some(reading.until()),
            ..self.query(Direction::Backwards)
        };
        let mut found: Vec<HistoryPosition> = Vec::new();
        loop {
            let page = self.shared.store.read(query.clone()).await.ok()?;
            found.extend(page.rows.iter().map(|row| row.position));
            query.limit = rewind.count.saturating_sub(found.len());
            query.cursor = page.next;
            if page.next.is_none() || query.limit == 0 {
                break;
            }
        }
        reading.position = before(&reading.attach_position, &found);
        // A rewind covers stored messages only.
        reading.awaited = Serial::default();
        if let (Some(newest), Some(oldest)) = (found.first(), found.last()) {
            reading.end_ms = newest.timestamp_ms + 1;
            let sequence = oldest.sequence.saturating_sub(1);
            reading.cursor = HistoryPosition { sequence, incarnation: u64::MAX, ..*oldest };
        }
        let is_cut = rewind.is_cut && found.len() < rewind.count;
        Some(BacklogResponse::SharedBegin { reading: Box::new(reading), is_cut })
    }

    /// Creates a cursor once all messages that were numbered before deliveries began are stored.
    pub(super) async fn settled_cursor(
        &self,
        position: Serial,
        attach_position: Serial,
    ) -> Option<SharedStoreCursor> {
        let (key, shared) = (self.channel.key(), self.shared);
        let routing = shared.publisher.routing()?;
        if !shared.store.is_shared() || !routing.settle(key).await {
            return None;
        }
        let alive = routing.alive_incarnations();
        if !self.share_history_policies(&alive).await? {
            return None;
        }
        let known = self.channel.clamp_position(&position);
        let read = routing.complete_from_store(key, &known).await?;
        if self.channel.is_in_doubt_except(&read) {
            return None;
        }
        let (here, undelivered) =
            (self.channel.position().serial(), routing.confirmed_incarnations(self.channel));
        // A message of an incarnation that lives, or may live behind a partition, would be delivered again. One that is down sends nothing
        // more.
        let may_come =
            |incarnation: u64| undelivered.contains(&incarnation) && routing.may_still_deliver(incarnation);
        let is_ahead = |(incarnation, sequence): &(u64, u64)| {
            !here.includes_one(*incarnation, *sequence)
                && (alive.contains(incarnation) || may_come(*incarnation))
        };
        if known.entries().iter().any(is_ahead) {
            return None;
        }
        let mut living = Serial::default();
        for incarnation in &alive {
            living.advance(*incarnation, attach_position.sequence_of(*incarnation).unwrap_or(0));
        }
        let mut handed = Serial::default();
        for incarnation in undelivered.iter().filter(|incarnation| !alive.contains(incarnation)) {
            handed.advance(*incarnation, self.channel.delivered_sequence(*incarnation));
        }
        let mut awaited = Serial::default();
        for (incarnation, sequence) in attach_position.entries() {
            if !alive.contains(incarnation)
                && routing.may_still_deliver(*incarnation)
                && !known.includes_one(*incarnation, *sequence)
            {
                awaited.advance(*incarnation, *sequence);
            }
        }
        let cursor = behind(0);
        Some(SharedStoreCursor {
            position,
            attach_position,
            live_until: living,
            undelivered_incarnations: undelivered,
            delivered_until: handed,
            awaited,
            cursor,
            end_ms: 0,
            uncertain_before_ms: 0,
        })
    }

    /// True if all incarnations within the resume window have kept the history of the same channels as this one. Live ones have recorded
    /// their policies before their first delivery.
    async fn share_history_policies(&self, living: &[u64]) -> Option<bool> {
        let kept = self.shared.store.recent_policies().await;
        let kept = kept
            .inspect_err(|error| tracing::warn!(target: RATE_LIMITED, %error, "cluster backfill failed: history policies not read"))
            .ok()?;
        let policies = self.shared.accounts.current().history_policies();
        let is_recorded = |incarnation: &u64| kept.iter().any(|(of, _)| of == incarnation);
        Some(living.iter().all(is_recorded) && kept.iter().all(|(_, of)| *of == policies))
    }

    /// True if the position is from after the start of this incarnation.
    fn names_this_incarnation(&self, position: &Serial) -> bool {
        position.sequence_of(self.shared.hub.incarnation()).is_some()
    }

    /// True if the client may have missed the row: its position does not include it. Rows that a retired incarnation stored before this one
    /// began are not missed by clients that came later.
    fn is_missed(&self, reading: &SharedStoreCursor, is_known: bool, row: HistoryPosition) -> bool {
        let HistoryPosition { timestamp_ms, sequence, incarnation } = row;
        let is_named = |serial: &Serial| serial.sequence_of(incarnation).is_some();
        let is_earlier_row = is_known
            && timestamp_ms.saturating_add(APART_MS) < self.shared.ready_ms
            && !is_named(&reading.position)
            && !is_named(&reading.live_until);
        !is_earlier_row && !reading.position.includes_one(incarnation, sequence)
    }

    /// Binary search for the time of the first missed row, exact up to the difference of the nodes' clocks. None if the read fails, or if
    /// too many rows in between are undecided.
    async fn first_missed(
        &self,
        reading: &SharedStoreCursor,
        is_known: bool,
        from_ms: u64,
        to_ms: u64,
    ) -> Option<u64> {
        let (mut from_ms, mut to_ms) = (from_ms, to_ms);
        // Each row is read at most once, so this bounds the whole search.
        let mut pages = UNDECIDED_PAGES_MAX;
        while from_ms < to_ms {
            let middle_ms = from_ms + (to_ms - from_ms) / 2;
            let mut query = HistoryQuery {
                limit: PROBE_ROWS,
                bytes_max: PAGE_BYTES,
                start_ms: Some(middle_ms),
                end_ms: Some(to_ms),
                ..self.query(Direction::Forwards)
            };
            let is_received = |row: &&HistoryRow| !self.is_missed(reading, is_known, row.position);
            loop {
                let page = self.shared.store.read(query.clone()).await.ok()?;
                // Rows of several incarnations are interleaved.
                if let Some(row) = page.rows.iter().rfind(is_received) {
                    from_ms = row.position.timestamp_ms + 1;
                    break;
                }
                if page.next.is_none() || page.rows.iter().any(|row| is_surely_missed(reading, row.position))
                {
                    to_ms = middle_ms;
                    break;
                }
                pages = pages.checked_sub(1)?;
                (query.limit, query.cursor) = (PAGE_ROWS, page.next);
            }
        }
        Some(from_ms)
    }

    /// The next page of messages.
    pub(super) async fn next_shared_page(
        &self,
        mut reading: Box<SharedStoreCursor>,
        format: Format,
        without: Option<ConnectionId>,
    ) -> Option<BacklogResponse> {
        let mut amount = Amount::default();
        loop {
            let page = if reading.cursor.timestamp_ms >= reading.end_ms {
                HistoryPage::default()
            } else {
                let query = HistoryQuery {
                    limit: PAGE_ROWS,
                    bytes_max: PAGE_BYTES,
                    end_ms: Some(reading.end_ms),
                    cursor: Some(reading.cursor),
                    ..self.query(Direction::Forwards)
                };
                self.shared.store.read(query).await.ok()?
            };
            let frames = self.frames_of(&mut reading, &page, format, without, &mut amount)?;
            let is_end = page.next.is_none();
            if is_end && !reading.has_all_awaited() {
                return None;
            }
            if is_end || !frames.is_empty() {
                return Some(BacklogResponse::SharedPage { frames, amount, reading, is_end });
            }
        }
    }

    fn frames_of(
        &self,
        reading: &mut SharedStoreCursor,
        page: &HistoryPage,
        format: Format,
        without: Option<ConnectionId>,
        amount: &mut Amount,
    ) -> Option<Vec<bytes::Bytes>> {
        let without = without.map(|id| id.to_string());
        let is_known = self.names_this_incarnation(&reading.position);
        let kept_from_ms = self.shared.clock.expiry_ms().saturating_sub(self.shared.keep_ms);
        let (mut frames, mut ended) = (Vec::new(), Serial::default());
        for row in &page.rows {
            let HistoryPosition { timestamp_ms, sequence, incarnation } = row.position;
            reading.cursor = row.position;
            let is_ended = reading.live_until.sequence_of(incarnation).is_none();
            if is_ended
                && !reading.undelivered_incarnations.contains(&incarnation)
                && timestamp_ms >= kept_from_ms
            {
                ended.advance(incarnation, sequence);
            }
            match self.row_inclusion(reading, is_known, row.position) {
                RowInclusion::No => continue,
                RowInclusion::Unknown => return None,
                RowInclusion::Yes => {}
            }
            let record = read_record(&row.json)
                .inspect_err(
                    |error| tracing::error!(target: RATE_LIMITED, %error, "stored record cannot be decoded"),
                )
                .ok()?;
            reading.position.advance(incarnation, sequence);
            if without.as_deref() != Some(&*record.connection_id) {
                frames.push(self.frame(&reading.position, &record, format, row.json.len(), amount));
            }
        }
        // These messages have arrived here, so following positions include them.
        self.channel.learn_sequences(&Stamp::all_of(&ended).collect::<Vec<_>>());
        Some(frames)
    }

    fn row_inclusion(
        &self,
        reading: &SharedStoreCursor,
        is_known: bool,
        row: HistoryPosition,
    ) -> RowInclusion {
        let HistoryPosition { timestamp_ms, sequence, incarnation } = row;
        let last = reading.live_until.sequence_of(incarnation);
        match last.or_else(|| reading.delivered_until.sequence_of(incarnation)) {
            // Later messages are delivered.
            Some(until) if sequence > until => RowInclusion::No,
            _ if !self.is_missed(reading, is_known, row) => RowInclusion::No,
            _ if last.is_none()
                && timestamp_ms < reading.uncertain_before_ms
                && reading.position.sequence_of(incarnation).is_none() =>
            {
                RowInclusion::Unknown
            }
            _ => RowInclusion::Yes,
        }
    }
}
