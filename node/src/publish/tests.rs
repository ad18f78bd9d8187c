//! The publish path over a store that records its calls, and a target that records its deliveries.

mod ids;
mod order;
mod outcomes;
mod presence;
mod usage;

use parking_lot::Mutex;
use serde_json::value::RawValue;

use super::*;
use crate::accounts::{Account, Accounts};
use crate::hub::{ChannelPosition, DeliveryTarget, MessageDelivery, PresenceDelivery};
use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, Clock, ConnectionId, PresenceEvent, draft_bytes,
};
use crate::origin::history::IdLookupCallback;
use crate::testing::FakeStore;

const DIRECTORY: &str = r#"
[[tenants]]
id = "acme"
[[tenants.accounts]]
id = "acme-prod"
retention_hours = 72
[[tenants.accounts.channels]]
pattern = "off:*"
history = false
[[tenants.accounts.channels]]
pattern = "short:*"
retention_hours = 24
"#;

/// A recorded call of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PublishStoreCall {
    Find(Vec<String>),
    Append { sequences: Vec<u64>, retention_hours: Option<u32> },
    Presence { sequence: u64, retention_hours: Option<u32> },
}

type HeldAnswer = Box<dyn FnOnce(&PublishTestStore) + Send>;

#[derive(Default)]
struct PublishTestStore {
    calls: Mutex<Vec<PublishStoreCall>>,
    known: Mutex<HashMap<(IdScope, Box<str>), Stamp>>,
    find_error: Mutex<Option<StoreError>>,
    append_error: Mutex<Option<StoreError>>,
    full: Mutex<bool>,
    /// Answers wait for [`PublishTestStore::release`].
    holds: Mutex<bool>,
    held: Mutex<Vec<HeldAnswer>>,
}

impl PublishTestStore {
    fn hold_or_run(&self, answer: HeldAnswer) {
        if *self.holds.lock() {
            self.held.lock().push(answer);
        } else {
            answer(self);
        }
    }

    /// Answers the held calls in their order.
    fn release(&self) {
        *self.holds.lock() = false;
        loop {
            let answers = std::mem::take(&mut *self.held.lock());
            if answers.is_empty() {
                return;
            }
            for answer in answers {
                answer(self);
            }
        }
    }

    fn take_calls(&self) -> Vec<PublishStoreCall> {
        std::mem::take(&mut *self.calls.lock())
    }
}

impl FakeStore for PublishTestStore {
    fn append(&self, published: Arc<PublishedMessages>, retention_hours: Option<u32>, done: StoreCallback) {
        let sequences = published.messages.iter().map(|message| message.sequence).collect();
        self.calls.lock().push(PublishStoreCall::Append { sequences, retention_hours });
        let error = self.append_error.lock().clone();
        if error.is_none() {
            let scope = IdScope {
                key: published.key.clone(),
                key_name: published.key_name.clone(),
                client_id: published.client_id.clone(),
            };
            for message in published.messages.iter().filter(|message| message.id_given) {
                let stamp = Stamp { incarnation: published.incarnation, sequence: message.sequence };
                self.known.lock().entry((scope.clone(), message.id.clone())).or_insert(stamp);
            }
        }
        self.hold_or_run(Box::new(move |_| done(error.map_or(Ok(()), Err))));
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: StoreCallback) {
        self.calls.lock().push(PublishStoreCall::Presence { sequence: event.sequence, retention_hours });
        let error = self.append_error.lock().clone();
        self.hold_or_run(Box::new(move |_| done(error.map_or(Ok(()), Err))));
    }

    fn is_full(&self) -> bool {
        *self.full.lock()
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: IdLookupCallback) {
        self.calls.lock().push(PublishStoreCall::Find(ids.iter().map(ToString::to_string).collect()));
        let error = self.find_error.lock().clone();
        self.hold_or_run(Box::new(move |store| {
            let stamps = |known: &HashMap<_, Stamp>| {
                ids.into_iter().map(|id| known.get(&(scope.clone(), id)).copied()).collect()
            };
            let answer = match error {
                Some(error) => Err(error),
                None => Ok(stamps(&store.known.lock())),
            };
            found(answer);
        }));
    }
}

#[derive(Default)]
struct PublishTestTarget {
    congested: AtomicBool,
    deliveries: Mutex<Vec<Arc<MessageDelivery>>>,
    presence: Mutex<Vec<Arc<PresenceDelivery>>>,
}

impl DeliveryTarget for PublishTestTarget {
    fn deliver(&self, delivery: Arc<MessageDelivery>) {
        self.deliveries.lock().push(delivery);
    }

    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>) {
        self.presence.lock().push(delivery);
    }

    fn lose_continuity(&self, _channel: u64, _mark: &ChannelPosition) {}

    fn congested(&self) -> bool {
        self.congested.load(Ordering::SeqCst)
    }
}

type PublishResults = Arc<Mutex<Vec<Result<PublishAck, PublishError>>>>;

struct PublishTestNode {
    store: Arc<PublishTestStore>,
    target: Arc<PublishTestTarget>,
    hub: Arc<Hub>,
    account: Arc<Account>,
    publisher: Publisher,
}

impl PublishTestNode {
    fn new() -> Self {
        Self::waiting(Duration::from_secs(2))
    }

    fn waiting(store_wait: Duration) -> Self {
        let (store, target) = (Arc::new(PublishTestStore::default()), Arc::new(PublishTestTarget::default()));
        let targets = vec![Arc::clone(&target) as Arc<dyn DeliveryTarget>];
        let hub = Arc::new(Hub::new(targets, Clock::manual(1_767_225_600_500), &Limits::default()));
        let directory = Accounts::from_text(DIRECTORY).unwrap().current();
        let account = Arc::clone(directory.account(&AccountId::new("acme-prod")).unwrap());
        let published = metrics::counter!("published");
        let inner = PublisherInner {
            hub: Arc::clone(&hub),
            store: Arc::clone(&store) as Arc<dyn HistoryStore>,
            limits: Limits::default(),
            store_wait,
            published,
            next_id: AtomicU64::new(1),
            presence: metrics::counter!("presence"),
            missed: AtomicBool::new(false),
            has_missed: Notify::new(),
            delayed_leaves: DelayedLeaves::default(),
            targets: PublishTargets::default(),
            routing: None,
            claims_ids: false,
        };
        Self { store, target, hub, account, publisher: Publisher { inner: Arc::new(inner) } }
    }

    fn key(&self, channel: &str) -> ChannelKey {
        ChannelKey::new(self.account.id.clone(), ChannelName::of(channel))
    }

    fn request(&self, channel: &str, messages: Vec<Draft>) -> PublishRequest {
        let key = self.key(channel);
        self.hub.attach(&key, 0);
        PublishRequest {
            key,
            account: Arc::clone(&self.account),
            key_name: "k1".into(),
            connection_id: ConnectionId::from_bytes([1; 16]),
            client_id: None,
            messages,
            span: TraceSpan::default(),
        }
    }

    /// Begins a publish; the returned list gets its outcome.
    fn begin(&self, request: PublishRequest, queued: bool) -> PublishResults {
        let answered = PublishResults::default();
        let answers = Arc::clone(&answered);
        self.publisher.publish(request, queued, Box::new(move |result| answers.lock().push(result)));
        answered
    }

    /// The outcome of a publish that the store answers at once.
    fn outcome(&self, request: PublishRequest) -> Result<PublishAck, PublishError> {
        one(&self.begin(request, false))
    }

    /// Publishes on `channel`; the sequences of the ack.
    fn acked(&self, channel: &str, messages: Vec<Draft>) -> Vec<u64> {
        sequences(self.outcome(self.request(channel, messages)))
    }

    /// The ids of all messages that subscribers got.
    fn delivered(&self) -> Vec<String> {
        let deliveries = self.target.deliveries.lock();
        let messages = deliveries.iter().flat_map(|delivery| &delivery.published().messages);
        messages.map(|message| message.id.to_string()).collect()
    }
}

fn one(answered: &PublishResults) -> Result<PublishAck, PublishError> {
    let answered = answered.lock();
    assert_eq!(answered.len(), 1, "answered exactly once");
    answered[0].clone()
}

fn sequences(outcome: Result<PublishAck, PublishError>) -> Vec<u64> {
    outcome.unwrap().stamps.iter().map(|stamp| stamp.sequence).collect()
}

fn plain(data: &str) -> Draft {
    Draft { data: Some(RawValue::from_string(data.to_owned()).unwrap()), ..Draft::default() }
}

fn given(id: &str) -> Draft {
    Draft { id: Some(id.into()), ..Draft::default() }
}

fn append(sequences: &[u64], retention_hours: Option<u32>) -> PublishStoreCall {
    PublishStoreCall::Append { sequences: sequences.to_vec(), retention_hours }
}

fn find(ids: &[&str]) -> PublishStoreCall {
    PublishStoreCall::Find(ids.iter().map(ToString::to_string).collect())
}
