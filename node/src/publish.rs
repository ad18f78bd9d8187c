//! The only entry for messages and presence: checks, claims given ids, numbers, hands over to the hub and to the
//! origin's store.

mod delayed_leaves;
mod occupancy;
mod presence;
mod repeats;
mod request;
mod targets;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::trace::TraceContext;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::cluster::link::PeerAck;
use crate::cluster::routing::{ClaimedIds, IdClaimError, Routing};
use crate::hub::{Hub, Numbering};
use crate::model::{
    Draft, DraftError, Limits, Message, PresenceEvent, PublishedMessages, Stamp, UsageKind, check_draft,
};
use crate::origin::history::{HistoryStore, IdScope, StoreCallback, StoreError};
use crate::origin::outbox::{EventOutbox, EventSource};
use crate::stall_detector;
use crate::telemetry::traces::TraceSpanKind;
use crate::telemetry::{Limit, RATE_LIMITED, TraceSpan};

pub use delayed_leaves::DelayedLeave;
use delayed_leaves::DelayedLeaves;
pub use presence::{PresenceDone, PresenceError, PresenceRequest};
use request::limit_of;
pub use request::{PublishAck, PublishError, PublishRequest};
use targets::PublishTargets;

pub type PublishDone = Box<dyn FnOnce(Result<PublishAck, PublishError>) + Send>;

/// Publishes messages and presence of one node. Cheap to clone.
#[derive(Clone)]
pub struct Publisher {
    inner: Arc<PublisherInner>,
}

struct PublisherInner {
    hub: Arc<Hub>,
    store: Arc<dyn HistoryStore>,
    limits: Limits,
    /// Time after which the outcome of an unanswered store operation is unknown to the publisher.
    store_wait: Duration,
    /// Counter of the message ids that the node gives, over all channels.
    next_id: AtomicU64,
    published: metrics::Counter,
    presence: metrics::Counter,
    delayed_leaves: DelayedLeaves,
    targets: PublishTargets,
    /// Routing to the peers; none on a single node.
    routing: Option<Arc<Routing>>,
    /// Whether given ids are also claimed at the peers, because this node has a store of its own.
    claims_ids: bool,
    /// Whether a delivered message was refused by the store.
    missed: AtomicBool,
    has_missed: Notify,
}

impl Publisher {
    pub fn new(
        hub: &Arc<Hub>,
        store: &Arc<dyn HistoryStore>,
        limits: &Limits,
        routing: Option<&Arc<Routing>>,
    ) -> Self {
        let published = metrics::counter!("fanfare_published_messages_total");
        if let Some(routing) = routing {
            store.set_deliveries(repeats::DeliveryProbe::by(routing));
        }
        Self {
            inner: Arc::new(PublisherInner {
                hub: Arc::clone(hub),
                store: Arc::clone(store),
                store_wait: Duration::from_millis(limits.store_wait_ms),
                limits: limits.clone(),
                next_id: AtomicU64::new(1),
                published,
                presence: metrics::counter!("fanfare_presence_events_total"),
                delayed_leaves: DelayedLeaves::default(),
                targets: PublishTargets::default(),
                routing: routing.map(Arc::clone),
                claims_ids: routing.is_some() && !store.is_shared(),
                missed: AtomicBool::new(false),
                has_missed: Notify::new(),
            }),
        }
    }

    pub fn hub(&self) -> &Arc<Hub> {
        &self.inner.hub
    }

    pub fn store(&self) -> &Arc<dyn HistoryStore> {
        &self.inner.store
    }

    /// Routing to the peers; none on a single node.
    pub fn routing(&self) -> Option<&Arc<Routing>> {
        self.inner.routing.as_ref()
    }

    /// Opens the outbox: publishes from now on also go to the integrations of their account.
    pub fn open_outbox(&self, outbox: EventOutbox) {
        self.inner.targets.open(outbox);
    }

    /// Whether every message that the store has answered so far is stored, in channels that keep history.
    pub fn stores_all(&self) -> bool {
        !self.inner.missed.load(Ordering::SeqCst)
    }

    /// Resolves when [`Publisher::stores_all`] has become false. For a single waiter.
    pub async fn wait_unstored(&self) {
        self.inner.has_missed.notified().await;
    }

    /// Publishes messages. `done` runs exactly once: at once for a refusal, else when the outcome is known, on any
    /// thread.
    ///
    /// Without given ids the messages are numbered and on their way when this returns. With `queued`, or a given id,
    /// they first pass the store's look-up of ids, in the order of the calls: a caller with such a publish in progress
    /// queues the following ones, and so keeps its order.
    pub fn publish(&self, mut request: PublishRequest, queued: bool, done: PublishDone) {
        stall_detector::halt_if_stalled();
        if request.messages.is_empty() {
            let error = DraftError::Bad("messages must not be empty".into());
            return request.refuse(PublishError::Draft(error), done);
        }
        let messages_max = self.inner.limits.publish_messages;
        if request.messages.len() > messages_max {
            Limit::PublishMessages.hit();
            return request.refuse(PublishError::Draft(DraftError::TooMany { messages_max }), done);
        }
        for draft in &request.messages {
            if let Err(error) = check_draft(draft, request.client_id.as_ref(), &self.inner.limits) {
                if let Some(limit) = limit_of(&error) {
                    limit.hit();
                }
                return request.refuse(PublishError::Draft(error), done);
            }
        }
        if !queued && request.messages.iter().all(|draft| draft.id.is_none()) {
            let stamps = vec![None; request.messages.len()];
            let (repeats, span, claimed) = (Vec::new(), request.take_span(), ClaimedIds::default());
            let answer = PublishAnswer { stamps, repeats, done, span, _claimed: claimed };
            return self.inner.commit(request, answer);
        }
        self.claim(request, done);
    }

    /// Publishes and waits for the outcome, as long as a store may take.
    pub async fn publish_and_wait(&self, request: PublishRequest) -> Result<PublishAck, PublishError> {
        let wait = self.inner.store_wait;
        let congested = async {
            while self.inner.hub.congested() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        if tokio::time::timeout(wait, congested).await.is_err() {
            return Err(PublishError::Busy);
        }
        let (answer, answered) = tokio::sync::oneshot::channel();
        self.publish(request, false, Box::new(move |result| drop(answer.send(result))));
        match tokio::time::timeout(wait, answered).await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) | Err(_) => Err(PublishError::Unavailable),
        }
    }

    /// Looks up which of the given ids were published before. Publishes of one channel and clientId pass one after
    /// another.
    fn claim(&self, mut request: PublishRequest, done: PublishDone) {
        let scope = IdScope {
            key: request.key.clone(),
            key_name: request.key_name.clone(),
            client_id: request.client_id.clone(),
        };
        let repeats = drop_repeats(&mut request.messages);
        let ids: Vec<_> = request.messages.iter().filter_map(|draft| draft.id.clone()).collect();
        if !ids.is_empty() && self.inner.store.is_full() {
            return request.refuse(PublishError::Busy, done);
        }
        let claim = PublishClaim { scope, ids, request, repeats, begun: Instant::now(), done };
        let Some(routing) = self.inner.routing.as_ref().filter(|_| self.inner.claims_ids) else {
            return self.inner.look_up(claim, ClaimedIds::default());
        };
        let inner = Arc::clone(&self.inner);
        let (scope, ids, until) = (claim.scope.clone(), claim.ids.clone(), claim.begun + inner.store_wait);
        let claimed = move |claimed| match claimed {
            Ok(claimed) => inner.look_up(claim, claimed),
            Err(IdClaimError::Busy) => claim.request.refuse(PublishError::Busy, claim.done),
            Err(IdClaimError::Late) => claim.request.refuse(PublishError::Unavailable, claim.done),
        };
        routing.claim_ids(scope, &ids, until, Box::new(claimed));
    }
}

/// A publish with the scope of its ids.
struct PublishClaim {
    scope: IdScope,
    ids: Vec<Box<str>>,
    request: PublishRequest,
    repeats: Vec<(usize, usize)>,
    begun: Instant,
    done: PublishDone,
}

/// Removes every message whose id occurs earlier in the same publish; returns the index of each and of the earlier one.
fn drop_repeats(messages: &mut Vec<Draft>) -> Vec<(usize, usize)> {
    let mut first: HashMap<Box<str>, usize> = HashMap::new();
    let mut repeats = Vec::new();
    let mut index = 0;
    messages.retain(|draft| {
        let earlier = draft.id.as_ref().and_then(|id| match first.entry(id.clone()) {
            Entry::Occupied(earlier) => Some(*earlier.get()),
            Entry::Vacant(vacant) => {
                vacant.insert(index);
                None
            }
        });
        if let Some(earlier) = earlier {
            repeats.push((index, earlier));
        }
        index += 1;
        earlier.is_none()
    });
    repeats
}

/// The pending answer to the publisher.
struct PublishAnswer {
    /// Stamps of the messages that are not repeats; known already for ids that were published before.
    stamps: Vec<Option<Stamp>>,
    repeats: Vec<(usize, usize)>,
    done: PublishDone,
    /// Span of the publish.
    span: TraceSpan,
    /// Claim on the ids, held until the answer is given.
    _claimed: ClaimedIds,
}

impl PublishAnswer {
    /// Answers the publisher; `published` has the stamps that were not known.
    fn give(self, published: Option<&PublishedMessages>) {
        let messages = published.iter().flat_map(|published| {
            let stamp = |sequence| Stamp { incarnation: published.incarnation, sequence };
            published.messages.iter().map(move |message| stamp(message.sequence))
        });
        let mut own = messages.fuse();
        let mut stamps: Vec<Stamp> =
            self.stamps.into_iter().filter_map(|known| known.or_else(|| own.next())).collect();
        for (index, earlier) in self.repeats {
            stamps.insert(index, stamps[earlier]);
        }
        drop(self.span);
        (self.done)(Ok(PublishAck { stamps }));
    }

    fn fail(mut self, error: PublishError) {
        self.span.fail(error.reason());
        drop(self.span);
        (self.done)(Err(error));
    }
}

impl PublisherInner {
    /// Asks the store which of the ids were published before, here or at peers.
    fn look_up(self: &Arc<Self>, claim: PublishClaim, claimed: ClaimedIds) {
        let inner = Arc::clone(self);
        let PublishClaim { scope, ids, mut request, repeats, begun, done } = claim;
        let found = move |found: Result<Vec<Option<Stamp>>, StoreError>| match found {
            // The publisher was already told that the outcome is unknown, and its later publishes may have gone ahead.
            Ok(_) if begun.elapsed() >= inner.store_wait => request.refuse(PublishError::Unavailable, done),
            Ok(found) => {
                let mut known = claimed.known.iter().copied();
                let mut found = found.into_iter().map(|found| found.or(known.next().flatten()));
                let drafts = request.messages.iter();
                let stamps =
                    drafts.map(|draft| draft.id.as_ref().and_then(|_| found.next().flatten())).collect();
                drop(found);
                let span = request.take_span();
                let answer = PublishAnswer { stamps, repeats, done, span, _claimed: claimed };
                let mut first_time = answer.stamps.iter().map(Option::is_none);
                request.messages.retain(|_| first_time.next().unwrap_or(true));
                drop(first_time);
                inner.commit(request, answer);
            }
            Err(StoreError::Busy) => request.refuse(PublishError::Busy, done),
            Err(error) => {
                tracing::warn!(target: RATE_LIMITED, %error, "message id lookup failed");
                request.refuse(PublishError::Unavailable, done);
            }
        };
        self.store.find_ids(scope, ids, Box::new(found));
    }

    /// Numbers, delivers and stores the remaining messages: all of them, or none.
    fn commit(self: &Arc<Self>, request: PublishRequest, answer: PublishAnswer) {
        if request.messages.is_empty() {
            return answer.give(None);
        }
        let retention_hours = self.retention_hours(&request.account, &request.key);
        let stores = retention_hours.is_some() || request.messages.iter().any(|draft| draft.id.is_some());
        if stores && self.store.is_full() {
            return answer.fail(PublishError::Busy);
        }
        let Ok(mut routes) = self.targets.of(&request.account, &request.key, EventSource::Message) else {
            return answer.fail(PublishError::Busy);
        };
        let count = request.messages.len() as u64;
        let key = request.key.clone();
        let usage = Arc::clone(&request.account.usage);
        self.hub.publish(&key, count, |numbering| {
            let published = number(request, numbering, self.next_id.fetch_add(count, Ordering::Relaxed));
            let (inner, stored) = (Arc::clone(self), Arc::clone(&published));
            let trace = answer.span.context();
            let done: StoreCallback = Box::new(move |result| match result {
                Ok(()) => {
                    stall_detector::halt_if_stalled();
                    inner.published.increment(count);
                    usage.count(UsageKind::Publish, count, stored.bytes);
                    answer.give(Some(&stored));
                }
                Err(error) => {
                    if retention_hours.is_some() && !inner.missed.swap(true, Ordering::SeqCst) {
                        inner.has_missed.notify_one();
                    }
                    tracing::warn!(target: RATE_LIMITED, %error, "publish not stored");
                    answer.fail(PublishError::Unavailable);
                }
            });
            let done = self.forward(&published, trace.as_deref(), done);
            let done = traced(TraceSpan::within(trace.as_deref(), "store", TraceSpanKind::Internal), done);
            routes.set_trace(trace);
            self.keep(&published, routes, retention_hours, done);
            published
        });
    }

    /// Sends the publish to the peers that have interest. The returned callback waits for their acks too.
    fn forward(
        &self,
        published: &PublishedMessages,
        trace: Option<&TraceContext>,
        done: StoreCallback,
    ) -> StoreCallback {
        let Some(routing) = &self.routing else { return done };
        let (acks, span) = routing.forward(published, trace);
        let is_given = |message: &Message| message.id_given;
        if self.claims_ids && published.messages.iter().any(is_given) {
            return after_both(done, |confirmed| {
                let confirmed = traced(span, confirmed);
                routing.on_peer_acks_and_ids(acks, published, Box::new(move || confirmed(Ok(()))));
            });
        }
        await_peer_acks(routing, acks, span, done)
    }

    /// Sends the presence event to all peers. The returned callback waits for their acks too.
    fn forward_presence(&self, event: &PresenceEvent, done: StoreCallback) -> StoreCallback {
        match &self.routing {
            Some(routing) => {
                await_peer_acks(routing, routing.forward_presence(event), TraceSpan::default(), done)
            }
            None => done,
        }
    }
}

/// A callback that waits for these peer acks before it runs `done`.
fn await_peer_acks(
    routing: &Routing,
    acks: Vec<PeerAck>,
    span: TraceSpan,
    done: StoreCallback,
) -> StoreCallback {
    if acks.is_empty() {
        return done;
    }
    after_both(done, |confirmed| {
        let confirmed = traced(span, confirmed);
        routing.on_peer_acks(acks, Box::new(move || confirmed(Ok(()))));
    })
}

/// A callback that first ends the span; `done` itself if the span is not recorded.
fn traced(mut span: TraceSpan, done: StoreCallback) -> StoreCallback {
    if !span.is_recorded() {
        return done;
    }
    Box::new(move |result| {
        if result.is_err() {
            span.fail("unavailable");
        }
        drop(span);
        done(result);
    })
}

/// A callback that runs `done` once the store and the work of `begin` have both ended; an error is passed on at once.
fn after_both(done: StoreCallback, begin: impl FnOnce(StoreCallback)) -> StoreCallback {
    let both = Arc::new(Mutex::new((Some(done), 0)));
    let stored = Arc::clone(&both);
    let one = move |both: &Mutex<(Option<StoreCallback>, u8)>, result: Result<(), StoreError>| {
        let mut both = both.lock();
        both.1 += 1;
        let done = if both.1 == 2 || result.is_err() { both.0.take() } else { None };
        drop(both);
        if let Some(done) = done {
            done(result);
        }
    };
    begin(Box::new(move |result| one(&both, result)));
    Box::new(move |result| one(&stored, result))
}

/// Gives each message its sequence, and an id that is unique on this node if the client gave none.
fn number(request: PublishRequest, numbering: Numbering, first_id: u64) -> Arc<PublishedMessages> {
    let messages = request.messages.into_iter().zip(0..).map(|(draft, index)| {
        let sequence = numbering.first_sequence + index;
        let id_given = draft.id.is_some();
        let own_id = || given_id(numbering.incarnation, first_id + index);
        let id = draft.id.unwrap_or_else(own_id);
        Message { id, id_given, sequence, name: draft.name, data: draft.data, extras: draft.extras }
    });
    let messages = messages.collect();
    PublishedMessages::new(
        request.key,
        numbering.incarnation,
        numbering.timestamp_ms,
        request.connection_id,
        request.client_id,
        request.key_name,
        messages,
    )
}

/// A message id of the node, in a form that no serial has.
fn given_id(incarnation: u64, number: u64) -> Box<str> {
    // The maximal length.
    let mut id = String::with_capacity(32);
    URL_SAFE_NO_PAD.encode_string(incarnation.to_be_bytes(), &mut id);
    write!(id, ":{number}").expect("a string takes every byte");
    id.into()
}
