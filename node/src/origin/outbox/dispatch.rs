//! Sends what waits for one target: channels side by side, the batches of a channel one after another.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use tokio::time::Instant;

use super::board::{Lineup, Next, Turn};
use super::settings::{Sending, TargetSettings};
use super::store::{Batch, BatchBounds, Fixed};
use super::writer::{Job, Settle};
use super::{Engine, TargetId, count_attempt, event, traced};
use crate::accounts::Account;
use crate::model::AccountId;
use crate::origin::disk::queue::Weight;
use crate::origin::history::StoreError;
use crate::origin::queues::{Catalog, Found};
use crate::origin::targets::{Delivery, Endpoint, Outcome, TargetKind};
use crate::telemetry::OFTEN;

/// The directory is looked at this often for a target that cannot be sent to.
const LOOK: Duration = Duration::from_secs(1);
/// The outbox's disk failed.
const AGAIN: Duration = Duration::from_millis(200);
/// Before the second attempt; doubled with each further one.
const BACKOFF: Duration = Duration::from_millis(500);
const BACKOFF_MAX: Duration = Duration::from_secs(300);
/// Events that one read takes into memory where batches are single events.
const AHEAD: BatchBounds = BatchBounds { events: 256, bytes: 256 * 1024 };
/// Why a target is disabled.
const GONE: &str = "the target has answered that it is gone (410)";
/// Of a target that was deleted, or is disabled.
const FEW: BatchBounds = BatchBounds { events: 100, bytes: 1024 * 1024 };

/// How many channels of a target are sent at the same time.
struct Pace {
    allowed: usize,
    /// The target has asked for no attempt before.
    not_before: Option<Instant>,
}

/// How a turn of a channel ended.
struct Ended {
    channel: Box<str>,
    turn: Turn,
    /// None: the target was not asked.
    success: Option<bool>,
    /// The target has asked for no attempt before.
    not_before: Option<Instant>,
}

/// Returns when the target was deleted and has nothing left.
pub(super) async fn run(engine: Arc<Engine>, lineup: Arc<Lineup>) {
    let mut sending = FuturesUnordered::new();
    let mut pace = Pace { allowed: 1, not_before: None };
    let mut is_absent = false;
    loop {
        engine.fill(&lineup).await;
        let now = Instant::now();
        let known = engine.settings(&lineup.target);
        let was_absent = std::mem::replace(&mut is_absent, matches!(known, Known::Absent));
        if is_absent && !was_absent {
            engine.tell_absent(&lineup.target);
        }
        if matches!(known, Known::Deleted) && sending.is_empty() && engine.has_ended(&lineup) {
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
                let Ended { channel, turn, success, not_before } = ended;
                pace.allowed = match success {
                    Some(true) => (pace.allowed * 2).min(parallel),
                    Some(false) => 1,
                    None => pace.allowed,
                };
                pace.not_before = not_before.or(pace.not_before);
                lineup.ended(channel, turn, Instant::now());
            }
            () = lineup.changed.notified() => {}
            () = slept => {}
        }
    }
}

impl Engine {
    /// Reads channels from the tables where there is room for some.
    async fn fill(self: &Arc<Self>, lineup: &Arc<Lineup>) {
        let Some((after, count)) = lineup.wants_more() else { return };
        let target = lineup.target.clone();
        let found = self.read(move |tables| tables.channels(&target, after.as_deref(), count)).await;
        match found {
            Ok(channels) => {
                let is_end = channels.len() < count;
                lineup.add(channels, is_end);
            }
            Err(error) => {
                tracing::error!(target: OFTEN, %error, "the outbox could not be read");
                tokio::time::sleep(AGAIN).await;
                lineup.set_overflowed();
            }
        }
    }

    /// Forgets a target without any channel; false: it has one, or events that are not in memory.
    fn has_ended(&self, lineup: &Arc<Lineup>) -> bool {
        let has_ended = self.depths.of(&lineup.target).events == 0 && self.board.remove(lineup);
        if has_ended {
            self.oldest.lock().remove(&lineup.target);
        }
        has_ended
    }

    /// Not before the target is there again is it told once more.
    fn tell_absent(&self, target: &TargetId) {
        let events = self.depths.of(target).events;
        if events == 0 {
            return;
        }
        let has_account = self.accounts.current().account(&AccountId::new(target.parts().0)).is_some();
        if has_account && target.queue_id().is_some() {
            tracing::warn!(target: OFTEN, destination = %target, events, "events wait for a queue that this node does not know, or has no broker for (--amqp-url)");
        } else {
            tracing::warn!(target: OFTEN, destination = %target, events, "events wait, since the directory does not have their target");
        }
    }

    fn tell_unavailable(&self, lineup: &Lineup, reason: &str) {
        lineup.set_failure(Some(reason));
        if let Some(held_back) = self.told.happens(&("unavailable", &lineup.target)) {
            tracing::warn!(destination = %lineup.target, reason, held_back, "target is unavailable");
        }
    }

    fn tell_failed(&self, lineup: &Lineup, channel: &str, reason: &str, failures: u32) {
        lineup.set_failure(Some(reason));
        if let Some(held_back) = self.told.happens(&("failed", &lineup.target)) {
            let (destination, attempt) = (&lineup.target, failures.saturating_add(1));
            tracing::warn!(%destination, channel, reason, attempt, held_back, "delivery failed and is tried again");
        }
    }

    fn tell_dead(&self, lineup: &Lineup, channel: &str, reason: &str, events: u64) {
        lineup.set_failure(Some(reason));
        if let Some(held_back) = self.told.happens(&("dead", &lineup.target)) {
            tracing::warn!(destination = %lineup.target, channel, reason, events, held_back, "events became dead letters");
        }
    }

    /// The directory, or the store of queues, does not have the target.
    pub(super) fn is_absent(&self, target: &TargetId) -> bool {
        matches!(self.settings(target), Known::Absent)
    }

    pub(super) fn settings(&self, target: &TargetId) -> Known {
        let (account, integration) = target.parts();
        let directory = self.accounts.current();
        let Some(account) = directory.account(&AccountId::new(account)).map(Arc::clone) else {
            return Known::Absent;
        };
        if let Some(queue_id) = target.queue_id() {
            return self
                .queues
                .as_ref()
                .map_or(Known::Absent, |queues| known_queue(queues, queue_id, account));
        }
        let found = account.integrations.iter().find(|found| *found.id == *integration).map(Arc::clone);
        let settings = found.map(|found| TargetSettings::of_integration(account, &found));
        settings.map_or(Known::Absent, |settings| Known::Settings(Arc::new(settings)))
    }

    /// Sends the next batch of the channel, and writes what became of it.
    async fn take_turn(
        self: Arc<Self>,
        lineup: &Arc<Lineup>,
        Next { channel, failures, from }: Next,
        known: Known,
    ) -> Ended {
        let unasked = |turn| Ended { channel: channel.clone(), turn, success: None, not_before: None };
        // The outcome of an attempt could not be written.
        if self.status.usable().is_err() {
            return unasked(Turn::Waits { not_before: Instant::now() + LOOK });
        }
        let disabled = lineup.disabled();
        let unsent = match &known {
            Known::Absent => return unasked(Turn::Waits { not_before: Instant::now() + LOOK }),
            Known::Deleted => Some(Unsent::Discarded),
            Known::Settings(settings) => (disabled == Some(settings.hash)).then_some(Unsent::Dead),
        };
        if disabled.is_some() && unsent.is_none() && self.disable(lineup, None).await.is_err() {
            return unasked(Turn::Waits { not_before: Instant::now() + AGAIN });
        }
        let sending = known.settings().filter(|_| unsent.is_none()).map(|settings| settings.sending);
        let bounds = sending.map_or(FEW, |sending| sending.bounds);
        let mut batch = match self.batch(lineup, &channel, from, bounds).await {
            Ok(batch) => batch,
            Err(error) => {
                tracing::error!(target: OFTEN, %error, "the outbox could not be read");
                return unasked(Turn::Waits { not_before: Instant::now() + AGAIN });
            }
        };
        if batch.events.is_empty() {
            return unasked(Turn::Settled { has_more: batch.has_more, from, full: bounds.events });
        }
        let (Some(settings), None) = (known.settings(), unsent) else {
            let dead_reason = (unsent == Some(Unsent::Dead)).then(|| GONE.into());
            return match self.settle(lineup, &channel, &batch, dead_reason).await {
                Ok(()) => {
                    count_discarded(unsent, batch.events.len());
                    unasked(Turn::Settled { has_more: true, from: batch.end(), full: bounds.events })
                }
                Err(_) => unasked(Turn::Waits { not_before: Instant::now() + AGAIN }),
            };
        };
        if let Some(until) = self.lingers(settings.sending, &batch) {
            let lacking = bounds.events.saturating_sub(batch.events.len());
            return unasked(Turn::Lingers { not_before: until, lacking });
        }
        let event_id = match self.fix(lineup, &channel, &mut batch, bounds).await {
            Ok(event_id) => event_id,
            // A full target lost the first event since it was read.
            Err(StoreError::Busy) => return unasked(Turn::Waits { not_before: Instant::now() }),
            Err(_) => return unasked(Turn::Waits { not_before: Instant::now() + AGAIN }),
        };
        let attempt = Attempt { lineup, channel: &channel, batch: &batch, failures, settings };
        let (turn, success, not_before) = self.attempt(attempt, event_id.clone()).await;
        if let (None, Some((first, _)), false) =
            (&batch.fixed, batch.events.first(), matches!(turn, Turn::Settled { .. }))
        {
            // The next attempt may come under settings with larger batches. Refused, it comes as it would have without.
            let fixed = Fixed { event_id, last: *first };
            let _ = self.fix_batch(&lineup.target, &channel, *first, fixed).await;
        }
        Ended { channel, turn, success, not_before }
    }

    /// The next batch of the channel, from memory where its events are there.
    async fn batch(
        &self,
        lineup: &Lineup,
        channel: &str,
        from: u64,
        bounds: BatchBounds,
    ) -> Result<Batch, StoreError> {
        if let Some(batch) = lineup.batch(channel, bounds) {
            return Ok(batch);
        }
        let (target, name) = (lineup.target.clone(), Box::<str>::from(channel));
        if bounds.events == 1 && lineup.has_room() {
            let ahead = self.read(move |tables| tables.ahead(&target, (&name, from), AHEAD)).await?;
            if let Some(ahead) = ahead {
                lineup.refill(channel, ahead);
                if let Some(batch) = lineup.batch(channel, bounds) {
                    return Ok(batch);
                }
            }
        }
        let (target, name) = (lineup.target.clone(), Box::<str>::from(channel));
        self.read(move |tables| tables.batch(&target, (&name, from), bounds)).await
    }

    /// Until when the channel waits for further events.
    fn lingers(&self, Sending { bounds, linger_ms, .. }: Sending, batch: &Batch) -> Option<Instant> {
        let (_, oldest) = batch.events.first()?;
        let is_full = batch.has_more || batch.events.len() >= bounds.events;
        if linger_ms == 0 || is_full || batch.fixed.is_some() {
            return None;
        }
        let left_ms = (oldest.written_ms + linger_ms).saturating_sub(self.clock.line_ms()).min(linger_ms);
        (left_ms > 0).then(|| Instant::now() + Duration::from_millis(left_ms))
    }

    /// Gives the batch its id, and writes it, unless it has one. A batch of a single event has one by itself where the target has no others.
    async fn fix(
        &self,
        lineup: &Lineup,
        channel: &str,
        batch: &mut Batch,
        bounds: BatchBounds,
    ) -> Result<Box<str>, StoreError> {
        if let Some(fixed) = &batch.fixed {
            return Ok(fixed.event_id.clone());
        }
        let (Some((first, event)), Some((last, _))) = (batch.events.first(), batch.events.last()) else {
            return Err(StoreError::Busy);
        };
        if bounds.events == 1 {
            return Ok(event.lone_id(&lineup.target, *first));
        }
        let fixed = Fixed { event_id: super::new_event_id(), last: *last };
        self.fix_batch(&lineup.target, channel, *first, fixed.clone()).await?;
        Ok(batch.fixed.insert(fixed).event_id.clone())
    }

    /// Writes that the target has the batch, behind all that was to be written before. It is waited for only while the disk is behind.
    async fn settle_delivered(&self, lineup: &Lineup, channel: &str, batch: &Batch) {
        // Not written when the disk fails or the node stops: then the batch is sent once more after the next start.
        if self.queue.is_nearly_full() {
            let _ = self.settle(lineup, channel, batch, None).await;
            return;
        }
        let settle = Settle::new(&lineup.target, channel, batch, None, None);
        let weight = Weight { items: batch.events.len(), bytes: batch.bytes };
        let _ = self.queue.push_begun(weight, Job::Settle(settle));
    }

    async fn settle(
        &self,
        lineup: &Lineup,
        channel: &str,
        batch: &Batch,
        dead_reason: Option<Box<str>>,
    ) -> Result<(), StoreError> {
        self.written(|answer| Settle::new(&lineup.target, channel, batch, dead_reason, Some(answer))).await
    }

    async fn attempt(
        &self,
        attempt: Attempt<'_>,
        event_id: Box<str>,
    ) -> (Turn, Option<bool>, Option<Instant>) {
        let Attempt { lineup, channel, batch, failures, settings } = attempt;
        let (count, first) = (batch.events.len() as u64, &batch.events[0].1);
        let rule_id = first.rule_id(&lineup.target).unwrap_or_default();
        let body = event::envelope(&batch.events, rule_id);
        let bytes = body.len() as u64;
        let mut span = traced::span_of(lineup, settings.kind, &batch.events, failures);
        let delivery = Delivery {
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
        let is_delivered = matches!(outcome, Outcome::Delivered);
        settings.account.usage.count(if is_delivered { delivered } else { failed }, count, bytes);
        count_attempt(kind, is_delivered, failures > 0, count);
        let mut not_before = None;
        let is_over = first.written_ms + self.retry_ms < self.clock.expiry_ms();
        let dead_reason: Option<Box<str>> = match outcome {
            Outcome::Delivered => None,
            Outcome::Unavailable { reason, after } if !is_over => {
                self.tell_unavailable(lineup, &reason);
                let next = Instant::now() + after;
                return (Turn::Waits { not_before: next }, Some(false), Some(next));
            }
            Outcome::Unavailable { reason, .. } => Some(reason.into()),
            Outcome::Retry { reason, after } => {
                if !is_over {
                    self.tell_failed(lineup, channel, &reason, failures);
                    not_before = after.map(|after| Instant::now() + after);
                    let next = Instant::now() + backoff(failures);
                    return (Turn::Failed { not_before: next }, Some(false), not_before);
                }
                Some(reason.into())
            }
            Outcome::Rejected { reason } => Some(reason.into()),
            Outcome::Gone => {
                tracing::error!(destination = %lineup.target, "target answered 410 and is disabled until its settings change, or an operator retries its dead letters");
                if self.disable(lineup, Some(settings.hash)).await.is_err() {
                    return (Turn::Waits { not_before: Instant::now() + AGAIN }, Some(false), None);
                }
                Some(GONE.into())
            }
        };
        let full = settings.sending.bounds.events;
        let turn = Turn::Settled { has_more: batch.has_more, from: batch.end(), full };
        let Some(reason) = &dead_reason else {
            lineup.set_failure(None);
            // The next batch need not wait for it: after a fault before that the target receives this one once more.
            self.settle_delivered(lineup, channel, batch).await;
            return (turn, Some(is_delivered), not_before);
        };
        self.tell_dead(lineup, channel, reason, count);
        match self.settle(lineup, channel, batch, dead_reason).await {
            Ok(()) => (turn, Some(is_delivered), not_before),
            Err(_) => (Turn::Waits { not_before: Instant::now() + AGAIN }, Some(is_delivered), not_before),
        }
    }
}

struct Attempt<'a> {
    lineup: &'a Arc<Lineup>,
    channel: &'a str,
    batch: &'a Batch,
    failures: u32,
    settings: &'a TargetSettings,
}

/// The end of events that are not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unsent {
    /// Their target is disabled: they are dead letters.
    Dead,
    /// Their queue was deleted, and all in it with it.
    Discarded,
}

/// The knowledge of a target at a moment.
#[derive(Debug, Clone)]
pub(super) enum Known {
    Settings(Arc<TargetSettings>),
    /// It may be named again.
    Absent,
    /// A queue that an API call deleted.
    Deleted,
}

impl Known {
    fn settings(&self) -> Option<&TargetSettings> {
        match self {
            Self::Settings(settings) => Some(settings),
            Self::Absent | Self::Deleted => None,
        }
    }
}

fn count_discarded(unsent: Option<Unsent>, events: usize) {
    if unsent == Some(Unsent::Discarded) {
        metrics::counter!("fanfare_outbox_discarded_total").increment(events as u64);
        tracing::warn!(target: OFTEN, events, "events of a deleted queue were discarded");
    }
}

fn known_queue(queues: &Catalog, queue_id: &str, account: Arc<Account>) -> Known {
    match queues.find(&account.id, queue_id) {
        Found::Queue(name) => {
            let (kind, sending) = (TargetKind::Queue, Sending::QUEUE);
            let endpoint = Endpoint::Queue(name);
            Known::Settings(Arc::new(TargetSettings { account, kind, endpoint, sending, hash: 0 }))
        }
        Found::Deleted => Known::Deleted,
        Found::Unknown => Known::Absent,
    }
}

/// The wait after so many failures and one more, jittered by half.
fn backoff(failures: u32) -> Duration {
    let full = BACKOFF.saturating_mul(2_u32.saturating_pow(failures)).min(BACKOFF_MAX);
    let half_ms = full.as_millis() as u64 / 2;
    let jitter = u64::from_be_bytes(crate::model::random_bytes()) % half_ms.max(1);
    Duration::from_millis(half_ms + jitter)
}
