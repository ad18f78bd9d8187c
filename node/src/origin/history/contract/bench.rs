//! An open store under test, with messages and queries.

use std::ops::RangeInclusive;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use serde_json::value::RawValue;

use super::super::{Direction, HistoryPage, HistoryQuery, HistoryStore, IdScope, Nonce, RowKind, StoreError};
use super::{INCARNATION, StoreFixture};
use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, Clock, ConnectionId, KeyName, Message, PublishedMessages,
    Stamp,
};

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// An open store with a clock set to `base_ms`.
pub(super) struct ContractStore<'a> {
    pub(super) fixture: &'a dyn StoreFixture,
    pub(super) store: Arc<dyn HistoryStore>,
    pub(super) clock: Clock,
    pub(super) base_ms: u64,
}

impl<'a> ContractStore<'a> {
    pub(super) fn new(fixture: &'a dyn StoreFixture) -> Self {
        let base_ms = Clock::system().now_ms();
        let clock = Clock::manual(base_ms);
        Self { fixture, store: fixture.open(&clock), clock, base_ms }
    }

    pub(super) fn reopen(self) -> Self {
        let Self { fixture, store, clock, base_ms } = self;
        store.shutdown();
        Self { fixture, store: fixture.open(&clock), clock, base_ms }
    }

    pub(super) fn append(
        &self,
        published: Arc<PublishedMessages>,
        retention_hours: Option<u32>,
    ) -> Result<(), StoreError> {
        let (send, receive) = mpsc::channel();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        self.store.append(published, retention_hours, done);
        receive.recv_timeout(PATIENCE).expect("answered")
    }

    pub(super) fn read(&self, query: HistoryQuery) -> HistoryPage {
        wait(self.store.read(query)).expect("read")
    }

    pub(super) fn find(&self, scope: IdScope, ids: &[&str]) -> Vec<Option<Stamp>> {
        let (send, receive) = mpsc::channel();
        let ids = ids.iter().map(|id| (*id).into()).collect();
        self.store.find_ids(scope, ids, Box::new(move |found| send.send(found).expect("test waits")));
        receive.recv_timeout(PATIENCE).expect("answered").expect("looked up")
    }

    pub(super) fn claim(&self, nonce: &Nonce) -> Result<bool, StoreError> {
        wait(self.store.claim_nonce(nonce.clone()))
    }
}

pub(crate) fn wait<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("answered") })
}

pub(crate) fn channel(account: &str, channel: &str) -> ChannelKey {
    ChannelKey::new(AccountId::new(account), ChannelName::of(channel))
}

pub(crate) fn messages(
    key: &ChannelKey,
    timestamp_ms: u64,
    sequences: RangeInclusive<u64>,
) -> Arc<PublishedMessages> {
    let messages = sequences.map(|sequence| message(sequence, &format!("m{sequence}"), false));
    published(key, timestamp_ms, messages.collect())
}

pub(crate) fn with_ids(key: &ChannelKey, timestamp_ms: u64, ids: &[(u64, &str)]) -> Arc<PublishedMessages> {
    let messages = ids.iter().map(|(sequence, id)| message(*sequence, id, true));
    published(key, timestamp_ms, messages.collect())
}

pub(crate) fn message(sequence: u64, id: &str, id_given: bool) -> Message {
    Message { id: id.into(), id_given, sequence, name: None, data: raw("null"), extras: None }
}

pub(crate) fn published(
    key: &ChannelKey,
    timestamp_ms: u64,
    messages: Vec<Message>,
) -> Arc<PublishedMessages> {
    let IdScope { key, key_name, client_id } = scope(key);
    PublishedMessages::new(
        key,
        INCARNATION,
        timestamp_ms,
        ConnectionId::random(),
        client_id,
        key_name,
        messages,
    )
}

pub(crate) fn scope(key: &ChannelKey) -> IdScope {
    IdScope { key: key.clone(), key_name: KeyName::from("k1"), client_id: Some(ClientId::of("ana")) }
}

pub(crate) fn stamp(sequence: u64) -> Stamp {
    Stamp { incarnation: INCARNATION, sequence }
}

pub(crate) fn nonce(key_name: &str, timestamp_ms: u64, nonce: &str) -> Nonce {
    Nonce { key_name: KeyName::from(key_name), timestamp_ms, nonce: nonce.into() }
}

pub(crate) fn query(key: &ChannelKey) -> HistoryQuery {
    HistoryQuery {
        key: key.clone(),
        kind: RowKind::Messages,
        limit: 1_000,
        bytes_max: usize::MAX,
        start_ms: None,
        end_ms: None,
        oldest_ms: 0,
        cursor: None,
        direction: Direction::Backwards,
        until: None,
    }
}

pub(crate) fn sequences(page: &HistoryPage) -> Vec<u64> {
    page.rows.iter().map(|row| row.position.sequence).collect()
}

pub(crate) fn raw(json: &str) -> Option<Box<RawValue>> {
    Some(RawValue::from_string(json.to_owned()).expect("valid JSON"))
}
