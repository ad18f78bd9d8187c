//! What the store that nodes share holds of a channel: the rows of all runs, in the order of their times.
//!
//! Whatever a run has acknowledged is in it. So nothing that counts is missing once all living nodes have said that nothing is on
//! its way there any more: what they number from then on is delivered here. Numbers of a run that follow each other by more than
//! one are no gap, since a node counts on where a channel was forgotten.

use fanfare_proto::frame::Format;
use fanfare_proto::http::read_record;
use fanfare_proto::serial::Serial;

use super::page::{PAGE_BYTES, PAGE_ROWS};
use super::{Found, Rows};
use crate::accounts::ChannelPolicy;
use crate::hub::RecentAfter;
use crate::model::{Amount, ConnectionId, Stamp};
use crate::origin::history::{Direction, HistoryPage, HistoryQuery, Position, Row};
use crate::session::Rewind;
use crate::telemetry::OFTEN;

/// As far as the clocks of nodes may differ, and what a message may take from one to another.
const APART_MS: u64 = 65_000;
/// Rows that are looked at to tell whether a time is before or behind a position.
const PROBE_ROWS: usize = 32;
/// Further pages of rows that do not tell it, until one does.
const UNTOLD_PAGES_MAX: usize = 32;
/// Times of questions, so that those who ask alike ask the same.
const ROUNDED_MS: u64 = 1_000;

/// How far somebody has come who is given what several runs have stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reading {
    /// It has all up to here.
    pub(in crate::edge::socket) has: Serial,
    /// Where the channel stood when it began to take part in deliveries.
    pub(super) stands: Serial,
    /// Up to where the rows of runs that live are given; all of them are in it.
    pub(super) living: Serial,
    /// Of these runs what was not heard is yet to be handed on to whoever is attached.
    pub(super) owed: Vec<u64>,
    /// Up to where that has been done of those that are gone. What they have stored since, as they may behind a cut, is handed on later.
    pub(super) handed: Serial,
    /// Messages that this node delivered before the attach, of runs that it holds for dead and that may still store them. A message
    /// counts as missing until the reading has it.
    pub(super) awaited: Serial,
    /// The next row is behind this one, and none is as late as that.
    pub(super) cursor: Position,
    pub(super) end_ms: u64,
    /// What runs that are gone have stored before this time, and no position has: nobody knows whether it was missed.
    pub(super) sure_ms: u64,
}

impl Reading {
    #[cfg(test)]
    pub(in crate::edge::socket) fn at(has: Serial, stands: Serial) -> Self {
        let (living, handed, awaited) = Default::default();
        let owed = Vec::new();
        Self { has, stands, living, owed, handed, awaited, cursor: behind(0), end_ms: 0, sure_ms: 0 }
    }

    /// Up to where the rows of runs are given whose further messages come by delivery.
    fn until(&self) -> Serial {
        self.living.join(&self.handed)
    }

    /// All that is awaited has been read.
    fn is_whole(&self) -> bool {
        self.awaited.entries().iter().all(|(run, sequence)| self.has.covers_one(*run, *sequence))
    }

    /// Who has read it all has all that the channel's deliveries behind its attach do not bring.
    pub(in crate::edge::socket) fn end(&self) -> Serial {
        self.has.join(&self.stands)
    }
}

/// Whether a row is one of those to be given.
enum Given {
    Yes,
    No,
    Unknown,
}

impl Rows<'_> {
    /// What follows the position, in the memory of the nodes, or else, where the channel keeps history, in the store.
    pub(super) async fn find_elsewhere(
        &self,
        position: Serial,
        stands: Serial,
        back_ms: Option<u64>,
        history: bool,
    ) -> Option<Found> {
        let (hub, key) = (&self.shared.hub, self.channel.key());
        let routing = self.shared.publisher.routing()?;
        // Nobody takes a question about it.
        if position.entries().len() > Serial::RUNS_MAX {
            return None;
        }
        let recent_ms = back_ms.unwrap_or(u64::MAX);
        routing.take_back(key, &position).await;
        if let Some(recent) = hub.recent_after(key, &position) {
            let RecentAfter { after, is_exact, missed_ms } = recent;
            return (missed_ms <= recent_ms).then_some(Found::Recent { after, is_exact });
        }
        let mut missed = routing.missed(key, &position, recent_ms).await;
        // The others have what it acknowledged.
        if missed.is_none() && routing.is_torn_lately() {
            routing.until_known().await;
            missed = routing.missed(key, &position, recent_ms).await;
        }
        let found = match missed {
            Some(missed) => Some(Found::Elsewhere(missed)),
            None if !history => None,
            None => self.after_everywhere(position.clone(), stands, back_ms).await,
        };
        if found.is_none() {
            self.begin_anew(&position).await;
        }
        found
    }

    /// A client with this position is told a loss, and begins where the channel stands. The positions that follow
    /// cover its messages of incarnations that have ended, so no node gives them again.
    pub(super) async fn begin_anew(&self, position: &Serial) {
        if let Some(routing) = self.shared.publisher.routing() {
            routing.know_gone_of_others(self.channel.key(), position).await;
        }
    }

    /// What follows a position. None where that cannot be told.
    async fn after_everywhere(
        &self,
        position: Serial,
        stands: Serial,
        back_ms: Option<u64>,
    ) -> Option<Found> {
        let reading = self.settled(position, stands).await?;
        self.begin_after(reading, back_ms).await
    }

    pub(super) async fn begin_after(&self, mut reading: Reading, back_ms: Option<u64>) -> Option<Found> {
        let now_ms = self.shared.clock.expiry_ms();
        let floor_ms = back_ms.map_or(self.oldest_ms, |back_ms| now_ms.saturating_sub(back_ms));
        let floor_ms = floor_ms - floor_ms % ROUNDED_MS;
        let floor_ms = self.readable_from(floor_ms)?;
        let is_known = self.is_of_this_run(&reading.has);
        let Some(newest) = self.newest(None).await? else {
            return Some(Found::Reading { reading: Box::new(reading), is_cut: false });
        };
        let end_ms = newest.timestamp_ms + 1;
        let first_ms = self.first_missed(&reading, is_known, floor_ms, end_ms).await?;
        let mut start_ms = first_ms.saturating_sub(APART_MS).max(floor_ms);
        reading.sure_ms = first_ms;
        if first_ms <= floor_ms {
            // Then the position is younger than the last row before, if it covers that.
            if let Some(older) = self.newest(Some(floor_ms)).await?
                && self.is_missed(&reading, is_known, older)
            {
                return None;
            }
            (start_ms, reading.sure_ms) = (floor_ms, 0);
        }
        reading.cursor = behind(start_ms);
        reading.end_ms = end_ms;
        Some(Found::Reading { reading: Box::new(reading), is_cut: false })
    }

    /// The last messages before an attach: those in the store, or what is recent on any node.
    pub(super) async fn back_of_all(&self, rewind: Rewind, stands: Serial, policy: ChannelPolicy) -> Found {
        let is_stored = self.is_stored_by_all(policy);
        let stored = if is_stored { self.back_everywhere(rewind, stands).await } else { None };
        match stored {
            Some(stored) => stored,
            None => self.back_in_recent(rewind, is_stored).await,
        }
    }

    async fn back_in_recent(&self, rewind: Rewind, is_stored: bool) -> Found {
        let recent = || self.channel.recent_back(rewind.count, rewind.since_ms);
        if let Some(routing) = self.shared.publisher.routing() {
            let is_lacking = || !recent().is_whole && !recent().is_of_all;
            routing.take_back_all(self.channel, is_lacking).await;
        }
        self.back_here(rewind, is_stored)
    }

    /// Of the last messages before an attach, those that are recent on this node by now.
    pub(super) fn back_here(&self, rewind: Rewind, is_stored: bool) -> Found {
        let recent = self.channel.recent_back(rewind.count, rewind.since_ms);
        let is_cut = rewind.is_cut && recent.found < rewind.count;
        Found::Back { recent, is_cut, is_stored: is_stored && !recent.is_whole }
    }

    pub(super) fn is_stored_by_all(&self, policy: ChannelPolicy) -> bool {
        policy.history && self.shared.store.is_shared()
    }

    async fn back_everywhere(&self, rewind: Rewind, stands: Serial) -> Option<Found> {
        let reading = self.settled(Serial::default(), stands).await?;
        self.begin_back(reading, rewind).await
    }

    pub(super) async fn begin_back(&self, mut reading: Reading, rewind: Rewind) -> Option<Found> {
        let mut query = HistoryQuery {
            limit: rewind.count,
            start_ms: Some(rewind.since_ms),
            // Their texts are read again, page by page.
            bytes_max: usize::MAX,
            until: Some(reading.until()),
            ..self.query(Direction::Backwards)
        };
        let mut found: Vec<Position> = Vec::new();
        loop {
            let page = self.shared.store.read(query.clone()).await.ok()?;
            found.extend(page.rows.iter().map(|row| row.position));
            query.limit = rewind.count.saturating_sub(found.len());
            query.cursor = page.next;
            if page.next.is_none() || query.limit == 0 {
                break;
            }
        }
        reading.has = before(&reading.stands, &found);
        // A rewind is of what is stored.
        reading.awaited = Serial::default();
        if let (Some(newest), Some(oldest)) = (found.first(), found.last()) {
            reading.end_ms = newest.timestamp_ms + 1;
            let sequence = oldest.sequence.saturating_sub(1);
            reading.cursor = Position { sequence, incarnation: u64::MAX, ..*oldest };
        }
        let is_cut = rewind.is_cut && found.len() < rewind.count;
        Some(Found::Reading { reading: Box::new(reading), is_cut })
    }

    /// A reading of nothing yet, once all is stored that was numbered before deliveries began.
    pub(super) async fn settled(&self, has: Serial, stands: Serial) -> Option<Reading> {
        let (key, shared) = (self.channel.key(), self.shared);
        let routing = shared.publisher.routing()?;
        if !shared.store.is_shared() || !routing.settle(key).await {
            return None;
        }
        let runs = routing.living();
        if !self.have_kept_alike(&runs).await? {
            return None;
        }
        let known = self.channel.lowered(&has);
        let read = routing.complete(key, &known).await?;
        if self.channel.is_unsure_but_for(&read) {
            return None;
        }
        let (here, owed) = (self.channel.mark().serial(), routing.owed(self.channel));
        // What a run that lives, or may do so behind a cut, has for this node would come once more. Of a dead one nobody has more.
        let may_come = |run: u64| owed.contains(&run) && routing.may_come(run);
        let is_ahead = |(run, sequence): &(u64, u64)| {
            !here.covers_one(*run, *sequence) && (runs.contains(run) || may_come(*run))
        };
        if known.entries().iter().any(is_ahead) {
            return None;
        }
        let mut living = Serial::default();
        for run in &runs {
            living.advance(*run, stands.sequence_of(*run).unwrap_or(0));
        }
        let mut handed = Serial::default();
        for run in owed.iter().filter(|run| !runs.contains(run)) {
            handed.advance(*run, self.channel.handed(*run));
        }
        let mut awaited = Serial::default();
        for (run, sequence) in stands.entries() {
            if !runs.contains(run) && routing.may_come(*run) && !known.covers_one(*run, *sequence) {
                awaited.advance(*run, *sequence);
            }
        }
        let cursor = behind(0);
        Some(Reading { has, stands, living, owed, handed, awaited, cursor, end_ms: 0, sure_ms: 0 })
    }

    /// For as long as anybody may come back, all runs have kept the history of the same channels as this one. Those that live have
    /// said so before they delivered anything.
    async fn have_kept_alike(&self, living: &[u64]) -> Option<bool> {
        let kept = self.shared.store.lately_kept().await;
        let kept = kept
            .inspect_err(|error| tracing::warn!(target: OFTEN, %error, "what nodes keep was not read"))
            .ok()?;
        let policies = self.shared.accounts.current().history_policies();
        let has_said = |run: &u64| kept.iter().any(|(of, _)| of == run);
        Some(living.iter().all(has_said) && kept.iter().all(|(_, of)| *of == policies))
    }

    /// The position was told when this run had begun.
    fn is_of_this_run(&self, position: &Serial) -> bool {
        position.sequence_of(self.shared.hub.incarnation()).is_some()
    }

    /// A row that a position does not cover. What a run that is gone had stored before this one began was not missed by whoever
    /// came later.
    fn is_missed(&self, reading: &Reading, is_known: bool, row: Position) -> bool {
        let Position { timestamp_ms, sequence, incarnation } = row;
        let is_named = |serial: &Serial| serial.sequence_of(incarnation).is_some();
        let is_former = is_known
            && timestamp_ms.saturating_add(APART_MS) < self.shared.ready_ms
            && !is_named(&reading.has)
            && !is_named(&reading.living);
        !is_former && !reading.has.covers_one(incarnation, sequence)
    }

    /// A time from which on rows are missed, and before which they are not, but for those of nodes whose clocks differ. None also where
    /// too many rows lie between of which that cannot be told.
    async fn first_missed(&self, reading: &Reading, is_known: bool, from_ms: u64, to_ms: u64) -> Option<u64> {
        let (mut from_ms, mut to_ms) = (from_ms, to_ms);
        // Each row is looked at once, so that this bounds them all.
        let mut pages = UNTOLD_PAGES_MAX;
        while from_ms < to_ms {
            let middle_ms = from_ms + (to_ms - from_ms) / 2;
            let mut query = HistoryQuery {
                limit: PROBE_ROWS,
                bytes_max: PAGE_BYTES,
                start_ms: Some(middle_ms),
                end_ms: Some(to_ms),
                ..self.query(Direction::Forwards)
            };
            let has = |row: &&Row| !self.is_missed(reading, is_known, row.position);
            loop {
                let page = self.shared.store.read(query.clone()).await.ok()?;
                // What runs have stored lies between each other.
                if let Some(row) = page.rows.iter().rfind(has) {
                    from_ms = row.position.timestamp_ms + 1;
                    break;
                }
                if page.next.is_none() || page.rows.iter().any(|row| tells(reading, row.position)) {
                    to_ms = middle_ms;
                    break;
                }
                pages = pages.checked_sub(1)?;
                (query.limit, query.cursor) = (PAGE_ROWS, page.next);
            }
        }
        Some(from_ms)
    }

    /// A page of what follows.
    pub(super) async fn read_on(
        &self,
        mut reading: Box<Reading>,
        format: Format,
        without: Option<ConnectionId>,
    ) -> Option<Found> {
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
            if is_end && !reading.is_whole() {
                return None;
            }
            if is_end || !frames.is_empty() {
                return Some(Found::Read { frames, amount, reading, is_end });
            }
        }
    }

    fn frames_of(
        &self,
        reading: &mut Reading,
        page: &HistoryPage,
        format: Format,
        without: Option<ConnectionId>,
        amount: &mut Amount,
    ) -> Option<Vec<bytes::Bytes>> {
        let without = without.map(|id| id.to_string());
        let is_known = self.is_of_this_run(&reading.has);
        let kept_from_ms = self.shared.clock.expiry_ms().saturating_sub(self.shared.keep_ms);
        let (mut frames, mut gone) = (Vec::new(), Serial::default());
        for row in &page.rows {
            let Position { timestamp_ms, sequence, incarnation } = row.position;
            reading.cursor = row.position;
            let is_gone = reading.living.sequence_of(incarnation).is_none();
            if is_gone && !reading.owed.contains(&incarnation) && timestamp_ms >= kept_from_ms {
                gone.advance(incarnation, sequence);
            }
            match self.given(reading, is_known, row.position) {
                Given::No => continue,
                Given::Unknown => return None,
                Given::Yes => {}
            }
            let record = read_record(&row.json)
                .inspect_err(|error| tracing::error!(target: OFTEN, %error, "a stored record cannot be read"))
                .ok()?;
            reading.has.advance(incarnation, sequence);
            if without.as_deref() != Some(&*record.connection_id) {
                frames.push(self.frame(&reading.has, &record, format, row.json.len(), amount));
            }
        }
        // So far they have come, and so they stand in the positions that follow.
        self.channel.know(&Stamp::all_of(&gone).collect::<Vec<_>>());
        Some(frames)
    }

    fn given(&self, reading: &Reading, is_known: bool, row: Position) -> Given {
        let Position { timestamp_ms, sequence, incarnation } = row;
        let last = reading.living.sequence_of(incarnation);
        match last.or_else(|| reading.handed.sequence_of(incarnation)) {
            // What follows is delivered.
            Some(until) if sequence > until => Given::No,
            _ if !self.is_missed(reading, is_known, row) => Given::No,
            _ if last.is_none()
                && timestamp_ms < reading.sure_ms
                && reading.has.sequence_of(incarnation).is_none() =>
            {
                Given::Unknown
            }
            _ => Given::Yes,
        }
    }
}

/// A row that the position does not cover was surely missed. One of a run that is gone, and that it does not name, may be from before.
fn tells(reading: &Reading, row: Position) -> bool {
    let is_named = |serial: &Serial| serial.sequence_of(row.incarnation).is_some();
    is_named(&reading.has) || is_named(&reading.living)
}

/// Behind it are the rows from that time on.
fn behind(timestamp_ms: u64) -> Position {
    let timestamp_ms = timestamp_ms.saturating_sub(1);
    Position { timestamp_ms, sequence: u64::MAX, incarnation: u64::MAX }
}

/// The position of who is to be given these rows, and then all that follows where the channel stands.
fn before(stands: &Serial, rows: &[Position]) -> Serial {
    let mut first = Serial::default();
    // From the newest to the oldest.
    for row in rows.iter().rev().filter(|row| row.sequence > 0) {
        if first.sequence_of(row.incarnation).is_none() {
            first.advance(row.incarnation, row.sequence - 1);
        }
    }
    let others = stands.entries().iter().filter(|(run, _)| first.sequence_of(*run).is_none());
    let others: Vec<(u64, u64)> = others.copied().collect();
    others.into_iter().for_each(|(run, sequence)| first.advance(run, sequence));
    first
}
