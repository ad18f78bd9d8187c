//! Consumers of the queues: keys as users of the broker, which asks the node what they may, and the end of those that may no more.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::broker::Broker;
use super::{BrokerError, BrokerQueue, Catalog};
use crate::accounts::{Accounts, Key, is_key_name};
use crate::model::{KeyName, Operation};
use crate::telemetry::{OFTEN, Repeats};

const DENIALS: &str = "fanfare_broker_refusals_total";

/// A question of RabbitMQ's HTTP auth backend.
#[derive(Clone, Copy)]
pub enum BrokerRequest<'a> {
    User { username: &'a str, password: &'a str },
    Vhost { username: &'a str, vhost: &'a str },
    Resource { username: &'a str, vhost: &'a str, kind: &'a str, name: &'a str, permission: &'a str },
    Topic { username: &'a str },
}

impl BrokerRequest<'_> {
    fn username(&self) -> &str {
        match self {
            Self::User { username, .. }
            | Self::Vhost { username, .. }
            | Self::Resource { username, .. }
            | Self::Topic { username } => username,
        }
    }

    /// The label of the metric and the field of the log.
    pub fn check(&self) -> &'static str {
        match self {
            Self::User { .. } => "user",
            Self::Vhost { .. } => "vhost",
            Self::Resource { .. } => "resource",
            Self::Topic { .. } => "topic",
        }
    }
}

/// Why a user of the broker is refused. It is counted and logged for the operator; the broker is told none of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Denial {
    UnknownKey,
    BadSecret,
    RevokedKey,
    /// The key has `amqp-subscribe` on no channel.
    NoCapability,
    OtherVhost,
    /// Keys neither write nor configure, and read nothing but queues.
    NotReading,
    OtherAccount,
    UnknownQueue,
    /// The capability does not cover every channel that feeds the queue.
    NotCovered,
    /// The node has no broker.
    NoBroker,
}

impl Denial {
    const ALL: [Self; 10] = [
        Self::UnknownKey,
        Self::BadSecret,
        Self::RevokedKey,
        Self::NoCapability,
        Self::OtherVhost,
        Self::NotReading,
        Self::OtherAccount,
        Self::UnknownQueue,
        Self::NotCovered,
        Self::NoBroker,
    ];

    /// The label of the metric and the field of the log.
    const fn name(self) -> &'static str {
        match self {
            Self::UnknownKey => "unknown_key",
            Self::BadSecret => "bad_secret",
            Self::RevokedKey => "revoked_key",
            Self::NoCapability => "no_capability",
            Self::OtherVhost => "other_vhost",
            Self::NotReading => "not_reading",
            Self::OtherAccount => "other_account",
            Self::UnknownQueue => "unknown_queue",
            Self::NotCovered => "not_covered",
            Self::NoBroker => "no_broker",
        }
    }
}

/// Counts every refusal, and logs each reason and known key once in a while.
pub(super) struct Denials(Repeats);

impl Denials {
    pub(super) fn new() -> Self {
        for reason in Denial::ALL {
            metrics::counter!(DENIALS, "reason" => reason.name()).increment(0);
        }
        Self(Repeats::default())
    }

    pub(super) fn note(&self, denial: Denial, request: BrokerRequest<'_>, accounts: &Accounts) {
        let reason = denial.name();
        metrics::counter!(DENIALS, "reason" => reason).increment(1);
        let directory = accounts.current();
        let username = request.username();
        let known = directory.key(username).map(|key| &key.name);
        let Some(held_back) = self.0.happens(&(denial, known)) else { return };
        let key = directory.loggable(username);
        tracing::info!(check = request.check(), reason, key, held_back, "user of the broker refused");
    }
}

/// The answer, by the directory and the queues of this moment.
pub(super) fn check(
    accounts: &Accounts,
    catalog: &Catalog,
    vhost: &str,
    request: BrokerRequest<'_>,
) -> Result<(), Denial> {
    let directory = accounts.current();
    let key = directory.key(request.username()).ok_or(Denial::UnknownKey)?;
    match request {
        BrokerRequest::User { password, .. } if !key.secret.matches(password.as_bytes()) => {
            return Err(Denial::BadSecret);
        }
        BrokerRequest::Vhost { vhost: asked, .. } | BrokerRequest::Resource { vhost: asked, .. }
            if asked != vhost =>
        {
            return Err(Denial::OtherVhost);
        }
        _ => {}
    }
    may_consume(key)?;
    match request {
        BrokerRequest::User { .. } | BrokerRequest::Vhost { .. } => Ok(()),
        BrokerRequest::Resource { kind: "queue", name, permission: "read", .. } => {
            may_read(catalog, key, name)
        }
        BrokerRequest::Resource { .. } | BrokerRequest::Topic { .. } => Err(Denial::NotReading),
    }
}

fn may_consume(key: &Key) -> Result<(), Denial> {
    if !key.active {
        return Err(Denial::RevokedKey);
    }
    let may = key.capability.grants_anywhere(Operation::AmqpSubscribe);
    if may { Ok(()) } else { Err(Denial::NoCapability) }
}

/// Whether the key may read the queue of this name on the broker, or its dead letters.
fn may_read(catalog: &Catalog, key: &Key, physical: &str) -> Result<(), Denial> {
    may_consume(key)?;
    let (account, name) = BrokerQueue::parse(physical).ok_or(Denial::UnknownQueue)?;
    if key.account.id != account {
        return Err(Denial::OtherAccount);
    }
    let of_account = catalog.of(&account);
    let found = of_account.named(name).map_err(|_| Denial::UnknownQueue)?;
    if found.is_covered_by(&key.capability) { Ok(()) } else { Err(Denial::NotCovered) }
}

/// Every key that the directory had at some look, as it was at the last one.
#[derive(Default)]
pub(super) struct SeenKeys(HashMap<KeyName, Arc<Key>>);

impl SeenKeys {
    /// The user is a key that was changed since the last look, or is gone.
    fn has_changed(&self, user: &str, now: Option<&Arc<Key>>) -> bool {
        match (self.0.get(user), now) {
            (Some(before), Some(now)) => {
                before.secret != now.secret
                    || before.active != now.active
                    || before.capability.canonical() != now.capability.canonical()
            }
            (Some(_), None) => true,
            (None, _) => false,
        }
    }
}

impl super::service::Inner {
    /// Closes connections of keys that were changed or revoked since the last look, and of consumers that may not consume their queue any
    /// more, or whose key the directory does not have. Users whom the broker itself knows are its operator's.
    pub(super) async fn close_forbidden(&self, seen: &mut SeenKeys) -> Result<(), BrokerError> {
        let Some(broker) = &self.broker else { return Ok(()) };
        let directory = self.accounts.current();
        let is_gone = |user: &str| {
            let key = directory.key(user);
            seen.has_changed(user, key) || key.is_some_and(|key| may_consume(key).is_err())
        };
        let connections = broker.management.connections().await?;
        let gone = connections.into_iter().filter(|connected| is_gone(&connected.user));
        let mut forbidden: HashSet<(String, String)> =
            gone.map(|connected| (connected.name, connected.user)).collect();
        let consumers = broker.management.consumers().await?;
        let may_not = consumers.into_iter().filter(|consumer| {
            let (user, name) = (&consumer.channel_details.user, &consumer.queue.name);
            let is_refused = match directory.key(user) {
                Some(key) => may_read(&self.catalog, key, name).is_err(),
                // It may have gone before this node began to look.
                None => is_key_name(user),
            };
            is_refused && self.catalog.by_physical(name).is_some()
        });
        forbidden.extend(
            may_not.map(|consumer| (consumer.channel_details.connection_name, consumer.channel_details.user)),
        );
        if !forbidden.is_empty() {
            close(broker, forbidden).await?;
        }
        seen.0.extend(directory.keys().map(|key| (Arc::clone(&key.name), Arc::clone(key))));
        Ok(())
    }
}

/// Closes each, whatever becomes of the others.
async fn close(broker: &Broker, connections: HashSet<(String, String)>) -> Result<(), BrokerError> {
    let own: HashSet<String> = broker.management.users().await?.into_iter().collect();
    let mut outcome = Ok(());
    for (connection, user) in connections.into_iter().filter(|(_, user)| !own.contains(user)) {
        match broker.management.close_connection(&connection).await {
            Ok(()) => {
                metrics::counter!("fanfare_queue_connections_closed_total").increment(1);
                tracing::info!(target: OFTEN, key = %user, "connection to the broker was closed: its key was changed or may not consume");
            }
            Err(error) => outcome = Err(error),
        }
    }
    outcome
}
