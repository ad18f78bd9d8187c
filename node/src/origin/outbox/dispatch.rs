//! Dispatch of one target's events: several channels at a time, the batches of a channel one after another.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use super::board::{ReadyChannel, TargetLineup, TurnOutcome};
use super::settings::{SendSettings, TargetSettings};
use super::store::{BatchBounds, EventBatch, FixedBatch};
use super::writer::{BatchSettlement, OutboxJob};
use super::{OutboxEngine, TargetId, count_attempt, event, traced};
use crate::accounts::Account;
use crate::model::AccountId;
use crate::origin::disk::queue::QueueWeight;
use crate::origin::history::StoreError;
use crate::origin::queues::{QueueCatalog, QueueLookup};
use crate::origin::targets::{DeliveryOutcome, TargetDelivery, TargetEndpoint, TargetKind};
use crate::telemetry::RATE_LIMITED;

/// Interval at which the directory is checked for a target that cannot be sent to.
const LOOK: Duration = Duration::from_secs(1);
/// Pause after an error of the outbox's disk.
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// Pause before the second attempt; doubled with each further one.
const BACKOFF: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(300);
/// Events that one read loads into memory if batches are single events.
const PREFETCH: BatchBounds = BatchBounds { events: 256, bytes: 256 * 1024 };
/// Reason for which a target is disabled.
const GONE: &str = "the target has answered that it is gone (410)";
/// Batch bounds of a target that was deleted or is disabled.
const DISCARD_BATCH: BatchBounds = BatchBounds { events: 100, bytes: 1024 * 1024 };

/// Number of a target's channels that are sent concurrently.
struct TargetPacing {
    allowed: usize,
    /// Time before which the target has asked for no attempt.
    not_before: Option<Instant>,
}

/// Outcome of a turn.
struct EndedTurn {
    channel: Box<str>,
    turn: TurnOutcome,
    /// Result of the attempt; `None` if none was made.
    success: Option<bool>,
    /// Time before which the target has asked for no attempt.
    not_before: Option<Instant>,
}

/// Sends a target's events; returns once the target was deleted and has no events.
pub(super) async fn run(engine: Arc<OutboxEngine>, lineup: Arc<TargetLineup>) {
    let mut sending = FuturesUnordered::new();
    let mut pace = TargetPacing { allowed: 1, not_before: None };
    let mut is_absent = false;
    loop {
        engine.fill(&lineup).await;
        let now = Instant::now();
        let known = engine.settings(&lineup.target);
        let was_absent = std::mem::replace(&mut is_absent, matches!(known, TargetLookup::Absent));
        if is_absent && !was_absent {
            engine.log_absent(&lineup.target);
        }
        if matches!(known, TargetLookup::Deleted) && sending.is_empty() && engine.has_ended(&lineup) {
            return;
        }
        let parallel = known.settings().map_or(1, |settings| settings.sending.parallel).max(1);
        pace.allowed = pace.allowed.min(parallel);
        let mut wake = pace.not_before.filter(|until| *until > now);
        while wake.is_none() && sending.len() < pace.allowed {
            match lineup.next(now) {
                Ok(next) => {
                    let (engine, lineup) = (Arc::clone(&engine), Arc::clone(&lineup));
                    let known = known.clone();
                    sending.push(async move { engine.take_turn(&lineup, next, known).await });
                }
                Err(first) => {
                    wake = first;
                    break;
                }
            }
        }
        let slept = tokio::time::sleep_until(wake.unwrap_or_else(|| now + LOOK));
        tokio::select! {
            Some(ended) = sending.next(), if !sending.is_empty() => {
                let EndedTurn { channel, turn, success, not_before } = ended;
                pace.allowed = match success {
                    Some(true) => (pace.allowed * 2).min(parallel),
                    Some(false) => 1,
                    None => pace.allowed,
                };
                pace.not_before = not_before.or(pace.not_before);
                lineup.end_turn(channel, turn, Instant::now());
            }
            () = lineup.changed.notified() => {}
            () = slept => {}
        }
    }
}

impl OutboxEngine {
    /// Loads channels from the tables if there is space for some.
    async fn fill(self: &Arc<Self>, lineup: &Arc<TargetLineup>) {
        let Some((after, count)) = lineup.next_scan() else { return };
        let target = lineup.target.clone();
        let found = self.read(move |tables| tables.channels(&target, after.as_deref(), count)).await;
        match found {
            Ok(channels) => {
                let is_end = channels.len() < count;
                lineup.add_channels(channels, is_end);
            }
            Err(error) => {
                tracing::error!(target: RATE_LIMITED, %error, "outbox read failed");
                tokio::time::sleep(RETRY_AFTER).await;
                lineup.set_overflowed();
            }
        }
    }

    /// Removes a target without events. Returns false if it has a channel, or events that are not in memory.
    fn has_ended(&self, lineup: &Arc<TargetLineup>) -> bool {
        let has_ended = self.depths.of(&lineup.target).events == 0 && self.board.remove(lineup);
        if has_ended {
            self.oldest.lock().remove(&lineup.target);
        }
        has_ended
    }

    /// Logs that events wait for an absent target; called once for each absence.
    fn log_absent(&self, target: &TargetId) {
        let events = self.depths.of(target).events;
        if events == 0 {
            return;
        }
        let has_account = self.accounts.current().account(&AccountId::new(target.parts().0)).is_some();
        if has_account && target.queue_id().is_some() {
            tracing::warn!(target: RATE_LIMITED, destination = %target, events, "events wait: queue unknown, or no broker configured (--amqp-url)");
        } else {
            tracing::warn!(target: RATE_LIMITED, destination = %target, events, "events wait: target not in the directory");
        }
    }

    fn report_unavailable(&self, lineup: &TargetLineup, reason: &str) {
        lineup.set_failure(Some(reason));
        if let Some(held_back) = self.logged_failures.happens(&("unavailable", &lineup.target)) {
            tracing::warn!(destination = %lineup.target, reason, held_back, "target is unavailable");
        }
    }

    fn report_failed(&self, lineup: &TargetLineup, channel: &str, reason: &str, failures: u32) {
        lineup.set_failure(Some(reason));
        if let Some(held_back) = self.logged_failures.happens(&("failed", &lineup.target)) {
            let (destination, attempt) = (&lineup.target, failures.saturating_add(1));
            tracing::warn!(%destination, channel, reason, attempt, held_back, "delivery failed, retrying");
        }
    }

    fn report_dead(&self, lineup: &TargetLineup, channel: &str, reason: &str, events: u64) {
        lineup.set_failure(Some(reason));
        if let Some(held_back) = self.logged_failures.happens(&("dead", &lineup.target)) {
            tracing::warn!(destination = %lineup.target, channel, reason, events, held_back, "events became dead letters");
        }
    }

    /// Returns whether the target is missing from the directory, or from the store of queues.
    pub(super) fn is_absent(&self, target: &TargetId) -> bool {
        matches!(self.settings(target), TargetLookup::Absent)
    }

    pub(super) fn settings(&self, target: &TargetId) -> TargetLookup {
        let (account, integration) = target.parts();
        let directory = self.accounts.current();
        let Some(account) = directory.account(&AccountId::new(account)).map(Arc::clone) else {
            return TargetLookup::Absent;
        };
        if let Some(queue_id) = target.queue_id() {
            return self
                .queues
                .as_ref()
                .map_or(TargetLookup::Absent, |queues| look_up_queue(queues, queue_id, account));
        }
        let found = account.integrations.iter().find(|found| *found.id == *integration).map(Arc::clone);
        let settings = found.map(|found| TargetSettings::of_integration(account, &found));
        settings.map_or(TargetLookup::Absent, |settings| TargetLookup::Settings(Arc::new(settings)))
    }

    /// Sends the next batch of the channel, and records the outcome.
    async fn take_turn(
        self: Arc<Self>,
        lineup: &Arc<TargetLineup>,
        ReadyChannel { channel, failures, from }: ReadyChannel,
        known: TargetLookup,
    ) -> EndedTurn {
        let unasked = |turn| EndedTurn { channel: channel.clone(), turn, success: None, not_before: None };
        // After an error of the disk the outcome of an attempt could not be written.
        if self.status.usable().is_err() {
            return unasked(TurnOutcome::Waits { not_before: Instant::now() + LOOK });
        }
        let disabled = lineup.disabled();
        let unsent = match &known {
            TargetLookup::Absent => return unasked(TurnOutcome::Waits { not_before: Instant::now() + LOOK }),
            TargetLookup::Deleted => Some(UnsentReason::Discarded),
            TargetLookup::Settings(settings) => {
                (disabled == Some(settings.hash)).then_some(UnsentReason::Dead)
            }
        };
        if disabled.is_some() && unsent.is_none() && self.disable(lineup, None).await.is_err() {
            return unasked(TurnOutcome::Waits { not_before: Instant::now() + RETRY_AFTER });
        }
        let sending = known.settings().filter(|_| unsent.is_none()).map(|settings| settings.sending);
        let bounds = sending.map_or(DISCARD_BATCH, |sending| sending.bounds);
        let mut batch = match self.batch(lineup, &channel, from, bounds).await {
            Ok(batch) => batch,
            Err(error) => {
                tracing::error!(target: RATE_LIMITED, %error, "outbox read failed");
                return unasked(TurnOutcome::Waits { not_before: Instant::now() + RETRY_AFTER });
            }
        };
        if batch.events.is_empty() {
            return unasked(TurnOutcome::Settled { has_more: batch.has_more, from, full: bounds.events });
        }
        let (Some(settings), None) = (known.settings(), unsent) else {
            let dead_reason = (unsent == Some(UnsentReason::Dead)).then(|| GONE.into());
            return match self.settle(lineup, &channel, &batch, dead_reason).await {
                Ok(()) => {
                    count_discarded(unsent, batch.events.len());
                    unasked(TurnOutcome::Settled { has_more: true, from: batch.end(), full: bounds.events })
                }
                Err(_) => unasked(TurnOutcome::Waits { not_before: Instant::now() + RETRY_AFTER }),
            };
        };
        if let Some(until) = self.lingers(settings.sending, &batch) {
            let lacking = bounds.events.saturating_sub(batch.events.len());
            return unasked(TurnOutcome::Lingers { not_before: until, lacking });
        }
        let event_id = match self.fix(lineup, &channel, &mut batch, bounds).await {
            Ok(event_id) => event_id,
            // The full target has lost the first event since the batch was read.
            Err(StoreError::Busy) => return unasked(TurnOutcome::Waits { not_before: Instant::now() }),
            Err(_) => return unasked(TurnOutcome::Waits { not_before: Instant::now() + RETRY_AFTER }),
        };
        let attempt = DeliveryAttempt { lineup, channel: &channel, batch: &batch, failures, settings };
        let (turn, success, not_before) = self.attempt(attempt, event_id.clone()).await;
        if let (None, Some((first, _)), false) =
            (&batch.fixed, batch.events.first(), matches!(turn, TurnOutcome::Settled { .. }))
        {
            // The next attempt may come under settings with larger batches, so the batch is fixed. If that is refused, the attempt is made
            // without it.
            let fixed = FixedBatch { event_id, last: *first };
            let _ = self.fix_batch(&lineup.target, &channel, *first, fixed).await;
        }
        EndedTurn { channel, turn, success, not_before }
    }

    /// Returns the next batch of the channel, from memory if its events are cached.
    async fn batch(
        &self,
        lineup: &TargetLineup,
        channel: &str,
        from: u64,
        bounds: BatchBounds,
    ) -> Result<EventBatch, StoreError> {
        if let Some(batch) = lineup.batch(channel, bounds) {
            return Ok(batch);
        }
        let (target, name) = (lineup.target.clone(), Box::<str>::from(channel));
        if bounds.events == 1 && lineup.has_budget() {
            let ahead = self.read(move |tables| tables.prefetch(&target, (&name, from), PREFETCH)).await?;
            if let Some(ahead) = ahead {
                lineup.load_prefetched(channel, ahead);
                if let Some(batch) = lineup.batch(channel, bounds) {
                    return Ok(batch);
                }
            }
        }
        let (target, name) = (lineup.target.clone(), Box::<str>::from(channel));
        self.read(move |tables| tables.batch(&target, (&name, from), bounds)).await
    }

    /// Time until which the channel waits for further events.
    fn lingers(
        &self,
        SendSettings { bounds, linger_ms, .. }: SendSettings,
        batch: &EventBatch,
    ) -> Option<Instant> {
        let (_, oldest) = batch.events.first()?;
        let is_full = batch.has_more || batch.events.len() >= bounds.events;
        if linger_ms == 0 || is_full || batch.fixed.is_some() {
            return None;
        }
        let left_ms = (oldest.written_ms + linger_ms).saturating_sub(self.clock.line_ms()).min(linger_ms);
        (left_ms > 0).then(|| Instant::now() + Duration::from_millis(left_ms))
    }

    /// Assigns an id to the batch and stores it, unless it has one. If the target has only batches of a single event, the id follows from
    /// the event.
    async fn fix(
        &self,
        lineup: &TargetLineup,
        channel: &str,
        batch: &mut EventBatch,
        bounds: BatchBounds,
    ) -> Result<Box<str>, StoreError> {
        if let Some(fixed) = &batch.fixed {
            return Ok(fixed.event_id.clone());
        }
        let (Some((first, event)), Some((last, _))) = (batch.events.first(), batch.events.last()) else {
            return Err(StoreError::Busy);
        };
        if bounds.events == 1 {
            return Ok(event.single_event_id(&lineup.target, *first));
        }
        let fixed = FixedBatch { event_id: super::new_event_id(), last: *last };
        self.fix_batch(&lineup.target, channel, *first, fixed.clone()).await?;
        Ok(batch.fixed.insert(fixed).event_id.clone())
    }

    /// Records that the target has received the batch, after all jobs queued before. Waits for the write only while the disk is behind.
    async fn settle_delivered(&self, lineup: &TargetLineup, channel: &str, batch: &EventBatch) {
        // If the disk fails or the node stops first, the batch is sent once more after the next start.
        if self.queue.is_nearly_full() {
            let _ = self.settle(lineup, channel, batch, None).await;
            return;
        }
        let settle = BatchSettlement::new(&lineup.target, channel, batch, None, None);
        let weight = QueueWeight { items: batch.events.len(), bytes: batch.bytes };
        let _ = self.queue.push_admitted(weight, OutboxJob::Settle(settle));
    }

    async fn settle(
        &self,
        lineup: &TargetLineup,
        channel: &str,
        batch: &EventBatch,
        dead_reason: Option<Box<str>>,
    ) -> Result<(), StoreError> {
        self.written(|answer| BatchSettlement::new(&lineup.target, channel, batch, dead_reason, Some(answer)))
            .await
    }

    async fn attempt(
        &self,
        attempt: DeliveryAttempt<'_>,
        event_id: Box<str>,
    ) -> (TurnOutcome, Option<bool>, Option<Instant>) {
        let DeliveryAttempt { lineup, channel, batch, failures, settings } = attempt;
        let (count, first) = (batch.events.len() as u64, &batch.events[0].1);
        let rule_id = first.rule_id(&lineup.target).unwrap_or_default();
        let body = event::envelope(&batch.events, rule_id);
        let bytes = body.len() as u64;
        let mut span = traced::span_of(lineup, settings.kind, &batch.events, failures);
        let delivery = TargetDelivery {
            account_id: settings.account.id.clone(),
            channel: channel.into(),
            source: first.source.as_str(),
            event_id,
            rule_id: rule_id.into(),
            body,
            trace: span.context(),
        };
        let outcome = self.transport.send(&settings.endpoint, &delivery).await;
        traced::end(&mut span, &outcome);
        drop(span);
        let (delivered, failed) = settings.kind.usage();
        let kind = settings.kind.as_str();
        let is_delivered = matches!(outcome, DeliveryOutcome::Delivered);
        settings.account.usage.count(if is_delivered { delivered } else { failed }, count, bytes);
        count_attempt(kind, is_delivered, failures > 0, count);
        let mut not_before = None;
        let is_expired = first.written_ms + self.retry_ms < self.clock.expiry_ms();
        let dead_reason: Option<Box<str>> = match outcome {
            DeliveryOutcome::Delivered => None,
            DeliveryOutcome::Unavailable { reason, after } if !is_expired => {
                self.report_unavailable(lineup, &reason);
                let next = Instant::now() + after;
                return (TurnOutcome::Waits { not_before: next }, Some(false), Some(next));
            }
            DeliveryOutcome::Unavailable { reason, .. } => Some(reason.into()),
            DeliveryOutcome::Retry { reason, after } => {
                if !is_expired {
                    self.report_failed(lineup, channel, &reason, failures);
                    not_before = after.map(|after| Instant::now() + after);
                    let next = Instant::now() + backoff(failures);
                    return (TurnOutcome::Failed { not_before: next }, Some(false), not_before);
                }
                Some(reason.into())
            }
            DeliveryOutcome::Rejected { reason } => Some(reason.into()),
            DeliveryOutcome::Gone => {
                tracing::error!(destination = %lineup.target, "target answered 410 and is disabled");
                if self.disable(lineup, Some(settings.hash)).await.is_err() {
                    return (
                        TurnOutcome::Waits { not_before: Instant::now() + RETRY_AFTER },
                        Some(false),
                        None,
                    );
                }
                Some(GONE.into())
            }
        };
        let full = settings.sending.bounds.events;
        let turn = TurnOutcome::Settled { has_more: batch.has_more, from: batch.end(), full };
        let Some(reason) = &dead_reason else {
            lineup.set_failure(None);
            // The next batch need not wait for this write: after a crash before it, the target receives this batch again.
            self.settle_delivered(lineup, channel, batch).await;
            return (turn, Some(is_delivered), not_before);
        };
        self.report_dead(lineup, channel, reason, count);
        match self.settle(lineup, channel, batch, dead_reason).await {
            Ok(()) => (turn, Some(is_delivered), not_before),
            Err(_) => (
                TurnOutcome::Waits { not_before: Instant::now() + RETRY_AFTER },
                Some(is_delivered),
                not_before,
            ),
        }
    }
}

struct DeliveryAttempt<'a> {
    lineup: &'a Arc<TargetLineup>,
    channel: &'a str,
    batch: &'a EventBatch,
    failures: u32,
    settings: &'a TargetSettings,
}

/// Reason for which events end without being sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UnsentReason {
    /// Their target is disabled, so they become dead letters.
    Dead,
    /// Their queue was deleted with all its events.
    Discarded,
}

/// Result of looking up a target.
#[derive(Debug, Clone)]
pub(super) enum TargetLookup {
    Settings(Arc<TargetSettings>),
    /// The target is missing, and may be configured again.
    Absent,
    /// A queue that was deleted by an API call.
    Deleted,
}

impl TargetLookup {
    fn settings(&self) -> Option<&TargetSettings> {
        match self {
            Self::Settings(settings) => Some(settings),
            Self::Absent | Self::Deleted => None,
        }
    }
}

fn count_discarded(unsent: Option<UnsentReason>, events: usize) {
    if unsent == Some(UnsentReason::Discarded) {
        metrics::counter!("fanfare_outbox_discarded_total").increment(events as u64);
        tracing::warn!(target: RATE_LIMITED, events, "events of a deleted queue were discarded");
    }
}

fn look_up_queue(queues: &QueueCatalog, queue_id: &str, account: Arc<Account>) -> TargetLookup {
    match queues.find(&account.id, queue_id) {
        QueueLookup::Queue(name) => {
            let (kind, sending) = (TargetKind::Queue, SendSettings::QUEUE);
            let endpoint = TargetEndpoint::Queue(name);
            TargetLookup::Settings(Arc::new(TargetSettings { account, kind, endpoint, sending, hash: 0 }))
        }
        QueueLookup::Deleted => TargetLookup::Deleted,
        QueueLookup::Unknown => TargetLookup::Absent,
    }
}

/// Wait before the next attempt after so many failures and one more; jitter shortens it by up to half.
fn backoff(failures: u32) -> Duration {
    let full = BACKOFF.saturating_mul(2_u32.saturating_pow(failures)).min(BACKOFF_MAX);
    let half_ms = full.as_millis() as u64 / 2;
    let jitter = u64::from_be_bytes(crate::model::random_bytes()) % half_ms.max(1);
    Duration::from_millis(half_ms + jitter)
}
