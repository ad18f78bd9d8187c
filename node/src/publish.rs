//! The only way in for messages and presence: check, claim given ids, number, hand to the hub and to the origin's store.

mod departures;
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

use crate::cluster::link::Receipt;
use crate::cluster::routing::{ClaimedIds, NotClaimed, Routing};
use crate::hub::{Hub, Numbering};
use crate::model::{
    Draft, DraftError, Limits, Message, PresenceEvent, Published, Stamp, UsageKind, check_draft,
};
use crate::origin::history::{Done, HistoryStore, IdScope, StoreError};
use crate::origin::outbox::{Outbox, Source};
use crate::pulse;
use crate::telemetry::traces::Kind;
use crate::telemetry::{Limit, OFTEN, Span};

pub use departures::Departure;
use departures::Departures;
pub use presence::{PresenceDone, PresenceError, PresenceRequest};
use request::limit_of;
pub use request::{PublishAck, PublishError, PublishRequest};
use targets::Targets;

pub type PublishDone = Box<dyn FnOnce(Result<PublishAck, PublishError>) + Send>;

/// Cheap to clone.
#[derive(Clone)]
pub struct Publisher {
    inner: Arc<Inner>,
}

struct Inner {
    hub: Arc<Hub>,
    store: Arc<dyn HistoryStore>,
    limits: Limits,
    /// A store that has not answered by then leaves the outcome unknown to the publisher.
    store_wait: Duration,
    /// Numbers the ids that the node gives, over all channels.
    next_id: AtomicU64,
    published: metrics::Counter,
    presence: metrics::Counter,
    departures: Departures,
    targets: Targets,
    /// The other nodes, where there may be some.
    routing: Option<Arc<Routing>>,
    /// Given ids are claimed on these nodes, too: the store is that of this one.
    claims_ids: bool,
    /// Something was delivered that its store did not take.
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
            store.set_deliveries(repeats::Delivered::by(routing));
        }
        Self {
            inner: Arc::new(Inner {
                hub: Arc::clone(hub),
                store: Arc::clone(store),
                store_wait: Duration::from_millis(limits.store_wait_ms),
                limits: limits.clone(),
                next_id: AtomicU64::new(1),
                published,
                presence: metrics::counter!("fanfare_presence_events_total"),
                departures: Departures::default(),
                targets: Targets::default(),
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

    /// The other nodes, where there may be some.
    pub fn routing(&self) -> Option<&Arc<Routing>> {
        self.inner.routing.as_ref()
    }

    /// From now on what is published also goes to the integrations of its account.
    pub fn open_outbox(&self, outbox: Outbox) {
        self.inner.targets.open(outbox);
    }

    /// Every message so far of which the store has answered, and whose channel keeps history, is stored.
    pub fn stores_all(&self) -> bool {
        !self.inner.missed.load(Ordering::SeqCst)
    }

    /// Resolves when [`Publisher::stores_all`] has come to be false. For one who waits.
    pub async fn has_missed(&self) {
        self.inner.has_missed.notified().await;
    }

    /// Publishes; `done` runs exactly once, at once for a refusal, else when the outcome is settled, on any thread.
    ///
    /// Without given ids the messages are numbered and on their way when this returns. With `queued` (or an id)
    /// they pass the store's look-up of ids first, in the order of the calls: a caller that has such a publish
    /// under way queues what follows, and so keeps its order.
    pub fn publish(&self, mut request: PublishRequest, queued: bool, done: PublishDone) {
        pulse::pass();
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
            let answer = Answer { stamps, repeats, done, span, _claimed: claimed };
            return self.inner.commit(request, answer);
        }
        self.claim(request, done);
    }

    /// The same, awaited for as long as a store may take.
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

    /// Finds out which of the given ids were published before; one publish of a channel and clientId comes after another.
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
        let claim = Claim { scope, ids, request, repeats, begun: Instant::now(), done };
        let Some(routing) = self.inner.routing.as_ref().filter(|_| self.inner.claims_ids) else {
            return self.inner.look_up(claim, ClaimedIds::default());
        };
        let inner = Arc::clone(&self.inner);
        let (scope, ids, until) = (claim.scope.clone(), claim.ids.clone(), claim.begun + inner.store_wait);
        let claimed = move |claimed| match claimed {
            Ok(claimed) => inner.look_up(claim, claimed),
            Err(NotClaimed::Busy) => claim.request.refuse(PublishError::Busy, claim.done),
            Err(NotClaimed::Late) => claim.request.refuse(PublishError::Unavailable, claim.done),
        };
        routing.claim_ids(scope, &ids, until, Box::new(claimed));
    }
}

/// A publish with what it must know of its ids.
struct Claim {
    scope: IdScope,
    ids: Vec<Box<str>>,
    request: PublishRequest,
    repeats: Vec<(usize, usize)>,
    begun: Instant,
    done: PublishDone,
}

/// Takes out every message whose id stands earlier in the same publish; gives for each its place and the earlier one's.
fn drop_repeats(messages: &mut Vec<Draft>) -> Vec<(usize, usize)> {
    let mut first: HashMap<Box<str>, usize> = HashMap::new();
    let mut repeats = Vec::new();
    let mut place = 0;
    messages.retain(|draft| {
        let earlier = draft.id.as_ref().and_then(|id| match first.entry(id.clone()) {
            Entry::Occupied(earlier) => Some(*earlier.get()),
            Entry::Vacant(vacant) => {
                vacant.insert(place);
                None
            }
        });
        if let Some(earlier) = earlier {
            repeats.push((place, earlier));
        }
        place += 1;
        earlier.is_none()
    });
    repeats
}

/// What is owed to the publisher.
struct Answer {
    /// Of the messages that are not repeats; known already for what was published before.
    stamps: Vec<Option<Stamp>>,
    repeats: Vec<(usize, usize)>,
    done: PublishDone,
    /// Of the publish.
    span: Span,
    /// Claimed until it is given.
    _claimed: ClaimedIds,
}

impl Answer {
    /// `published` fills what was not known.
    fn give(self, published: Option<&Published>) {
        let messages = published.iter().flat_map(|published| {
            let stamp = |sequence| Stamp { incarnation: published.incarnation, sequence };
            published.messages.iter().map(move |message| stamp(message.sequence))
        });
        let mut own = messages.fuse();
        let mut stamps: Vec<Stamp> =
            self.stamps.into_iter().filter_map(|known| known.or_else(|| own.next())).collect();
        for (place, earlier) in self.repeats {
            stamps.insert(place, stamps[earlier]);
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

impl Inner {
    /// Asks the store which of the ids were published before, here or as others have told.
    fn look_up(self: &Arc<Self>, claim: Claim, claimed: ClaimedIds) {
        let inner = Arc::clone(self);
        let Claim { scope, ids, mut request, repeats, begun, done } = claim;
        let found = move |found: Result<Vec<Option<Stamp>>, StoreError>| match found {
            // The publisher was told so by now, and what it sent since may have gone ahead.
            Ok(_) if begun.elapsed() >= inner.store_wait => request.refuse(PublishError::Unavailable, done),
            Ok(found) => {
                let mut elsewhere = claimed.known.iter().copied();
                let mut found = found.into_iter().map(|found| found.or(elsewhere.next().flatten()));
                let drafts = request.messages.iter();
                let stamps =
                    drafts.map(|draft| draft.id.as_ref().and_then(|_| found.next().flatten())).collect();
                drop(found);
                let span = request.take_span();
                let answer = Answer { stamps, repeats, done, span, _claimed: claimed };
                let mut first_time = answer.stamps.iter().map(Option::is_none);
                request.messages.retain(|_| first_time.next().unwrap_or(true));
                drop(first_time);
                inner.commit(request, answer);
            }
            Err(StoreError::Busy) => request.refuse(PublishError::Busy, done),
            Err(error) => {
                tracing::warn!(target: OFTEN, %error, "ids could not be looked up");
                request.refuse(PublishError::Unavailable, done);
            }
        };
        self.store.find_ids(scope, ids, Box::new(found));
    }

    /// Numbers, delivers and stores what is left of the request: all of it, or nothing.
    fn commit(self: &Arc<Self>, request: PublishRequest, answer: Answer) {
        if request.messages.is_empty() {
            return answer.give(None);
        }
        let retention_hours = self.retention_hours(&request.account, &request.key);
        let stores = retention_hours.is_some() || request.messages.iter().any(|draft| draft.id.is_some());
        if stores && self.store.is_full() {
            return answer.fail(PublishError::Busy);
        }
        let Ok(mut routes) = self.targets.of(&request.account, &request.key, Source::Message) else {
            return answer.fail(PublishError::Busy);
        };
        let count = request.messages.len() as u64;
        let key = request.key.clone();
        let usage = Arc::clone(&request.account.usage);
        self.hub.publish(&key, count, |numbering| {
            let published = number(request, numbering, self.next_id.fetch_add(count, Ordering::Relaxed));
            let (inner, stored) = (Arc::clone(self), Arc::clone(&published));
            let trace = answer.span.context();
            let done: Done = Box::new(move |result| match result {
                Ok(()) => {
                    pulse::pass();
                    inner.published.increment(count);
                    usage.count(UsageKind::Publish, count, stored.bytes);
                    answer.give(Some(&stored));
                }
                Err(error) => {
                    if retention_hours.is_some() && !inner.missed.swap(true, Ordering::SeqCst) {
                        inner.has_missed.notify_one();
                    }
                    tracing::warn!(target: OFTEN, %error, "a publish was not stored");
                    answer.fail(PublishError::Unavailable);
                }
            });
            let done = self.forward(&published, trace.as_deref(), done);
            let done = traced(Span::within(trace.as_deref(), "store", Kind::Internal), done);
            routes.set_trace(trace);
            self.keep(&published, routes, retention_hours, done);
            published
        });
    }

    /// Sends the publish to the nodes that want it; what is to run when the store has it waits for them too.
    fn forward(&self, published: &Published, trace: Option<&TraceContext>, done: Done) -> Done {
        let Some(routing) = &self.routing else { return done };
        let (owed, span) = routing.forward(published, trace);
        let is_given = |message: &Message| message.id_given;
        if self.claims_ids && published.messages.iter().any(is_given) {
            return both(done, |confirmed| {
                let confirmed = traced(span, confirmed);
                routing.after_with_ids(owed, published, Box::new(move || confirmed(Ok(()))));
            });
        }
        owe(routing, owed, span, done)
    }

    /// Sends the event to all nodes; the same.
    fn forward_presence(&self, event: &PresenceEvent, done: Done) -> Done {
        match &self.routing {
            Some(routing) => owe(routing, routing.forward_presence(event), Span::default(), done),
            None => done,
        }
    }
}

/// What is to run when the store has something then waits for these receipts too.
fn owe(routing: &Routing, owed: Vec<Receipt>, span: Span, done: Done) -> Done {
    if owed.is_empty() {
        return done;
    }
    both(done, |confirmed| {
        let confirmed = traced(span, confirmed);
        routing.after(owed, Box::new(move || confirmed(Ok(()))));
    })
}

/// A callback that ends the span first; the same one where it is not recorded.
fn traced(mut span: Span, done: Done) -> Done {
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

/// A callback that runs when the store and what `begin` begins have both ended; an error is told at once.
fn both(done: Done, begin: impl FnOnce(Done)) -> Done {
    let both = Arc::new(Mutex::new((Some(done), 0)));
    let stored = Arc::clone(&both);
    let one = move |both: &Mutex<(Option<Done>, u8)>, result: Result<(), StoreError>| {
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

/// Gives each message its number, and where the client gave none an id that no other message of the node has.
fn number(request: PublishRequest, numbering: Numbering, first_id: u64) -> Arc<Published> {
    let messages = request.messages.into_iter().zip(0..).map(|(draft, place)| {
        let sequence = numbering.first_sequence + place;
        let id_given = draft.id.is_some();
        let own_id = || given_id(numbering.incarnation, first_id + place);
        let id = draft.id.unwrap_or_else(own_id);
        Message { id, id_given, sequence, name: draft.name, data: draft.data, extras: draft.extras }
    });
    let messages = messages.collect();
    Published::new(
        request.key,
        numbering.incarnation,
        numbering.timestamp_ms,
        request.connection_id,
        request.client_id,
        request.key_name,
        messages,
    )
}

/// Of a form that no serial has, so that none is taken for the other.
fn given_id(incarnation: u64, number: u64) -> Box<str> {
    // As long as it can be.
    let mut id = String::with_capacity(32);
    URL_SAFE_NO_PAD.encode_string(incarnation.to_be_bytes(), &mut id);
    write!(id, ":{number}").expect("a string takes every byte");
    id.into()
}
