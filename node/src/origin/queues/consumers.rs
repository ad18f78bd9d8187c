//! Consumers of the queues: keys as users of the broker, the answers to the broker's authorisation requests, and the disconnection of
//! consumers that lose their permission.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::broker::QueueBroker;
use super::{BrokerError, BrokerQueue, QueueCatalog};
use crate::accounts::{Accounts, Key, is_key_name};
use crate::model::{KeyName, Operation};
use crate::telemetry::{RATE_LIMITED, Repeats};

const DENIALS: &str = "fanfare_broker_refusals_total";

/// A request of RabbitMQ's HTTP auth backend.
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

    /// Label of the metric, and field of the log.
    pub fn check(&self) -> &'static str {
        match self {
            Self::User { .. } => "user",
            Self::Vhost { .. } => "vhost",
            Self::Resource { .. } => "resource",
            Self::Topic { .. } => "topic",
        }
    }
}

/// Reason why a user of the broker is refused. It is counted and logged for the operator; the broker does not learn it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum BrokerDenial {
    UnknownKey,
    BadSecret,
    RevokedKey,
    /// The key has `amqp-subscribe` on no channel.
    NoCapability,
    OtherVhost,
    /// The request is not a read of a queue, which is all that keys may do.
    NotReading,
    OtherAccount,
    UnknownQueue,
    /// The capability does not cover every channel that feeds the queue.
    NotCovered,
    /// The node has no broker.
    NoBroker,
}

impl BrokerDenial {
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

    /// Label of the metric, and field of the log.
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

/// Counter of refusals, with rate-limited logging for each reason and known key.
pub(super) struct BrokerDenials(Repeats);

impl BrokerDenials {
    pub(super) fn new() -> Self {
        for reason in BrokerDenial::ALL {
            metrics::counter!(DENIALS, "reason" => reason.name()).increment(0);
        }
        Self(Repeats::default())
    }

    pub(super) fn record(&self, denial: BrokerDenial, request: BrokerRequest<'_>, accounts: &Accounts) {
        let reason = denial.name();
        metrics::counter!(DENIALS, "reason" => reason).increment(1);
        let directory = accounts.current();
        let username = request.username();
        let known = directory.key(username).map(|key| &key.name);
        let Some(held_back) = self.0.happens(&(denial, known)) else { return };
        let key = directory.loggable(username);
        tracing::info!(check = request.check(), reason, key, held_back, "broker user refused");
    }
}

/// Decides the request by the present directory and queues.
pub(super) fn check(
    accounts: &Accounts,
    catalog: &QueueCatalog,
    vhost: &str,
    request: BrokerRequest<'_>,
) -> Result<(), BrokerDenial> {
    let directory = accounts.current();
    let key = directory.key(request.username()).ok_or(BrokerDenial::UnknownKey)?;
    match request {
        BrokerRequest::User { password, .. } if !key.secret.matches(password.as_bytes()) => {
            return Err(BrokerDenial::BadSecret);
        }
        BrokerRequest::Vhost { vhost: requested, .. } | BrokerRequest::Resource { vhost: requested, .. }
            if requested != vhost =>
        {
            return Err(BrokerDenial::OtherVhost);
        }
        _ => {}
    }
    may_consume(key)?;
    match request {
        BrokerRequest::User { .. } | BrokerRequest::Vhost { .. } => Ok(()),
        BrokerRequest::Resource { kind: "queue", name, permission: "read", .. } => {
            may_read(catalog, key, name)
        }
        BrokerRequest::Resource { .. } | BrokerRequest::Topic { .. } => Err(BrokerDenial::NotReading),
    }
}

fn may_consume(key: &Key) -> Result<(), BrokerDenial> {
    if !key.active {
        return Err(BrokerDenial::RevokedKey);
    }
    let may = key.capability.grants_anywhere(Operation::AmqpSubscribe);
    if may { Ok(()) } else { Err(BrokerDenial::NoCapability) }
}

/// Checks that the key may read the queue of this name on the broker, or its dead letters.
fn may_read(catalog: &QueueCatalog, key: &Key, physical: &str) -> Result<(), BrokerDenial> {
    may_consume(key)?;
    let (account, name) = BrokerQueue::parse(physical).ok_or(BrokerDenial::UnknownQueue)?;
    if key.account.id != account {
        return Err(BrokerDenial::OtherAccount);
    }
    let of_account = catalog.of(&account);
    let found = of_account.named(name).map_err(|_| BrokerDenial::UnknownQueue)?;
    if found.is_covered_by(&key.capability) { Ok(()) } else { Err(BrokerDenial::NotCovered) }
}

/// Every key that the directory had at some check, as it was at the last one.
#[derive(Default)]
pub(super) struct SeenKeys(HashMap<KeyName, Arc<Key>>);

impl SeenKeys {
    /// Returns whether the user is a key that was changed or removed since the last check.
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

impl super::service::QueuesInner {
    /// Closes the connections of keys that were changed or revoked since the last check. Also closes those of consumers that may no longer
    /// read their queue, or whose key is not in the directory. Users that the broker itself has are its operator's, and stay.
    pub(super) async fn close_forbidden(&self, seen: &mut SeenKeys) -> Result<(), BrokerError> {
        let Some(broker) = &self.broker else { return Ok(()) };
        let directory = self.accounts.current();
        let is_removed = |user: &str| {
            let key = directory.key(user);
            seen.has_changed(user, key) || key.is_some_and(|key| may_consume(key).is_err())
        };
        let connections = broker.management.connections().await?;
        let removed = connections.into_iter().filter(|connected| is_removed(&connected.user));
        let mut forbidden: HashSet<(String, String)> =
            removed.map(|connected| (connected.name, connected.user)).collect();
        let consumers = broker.management.consumers().await?;
        let may_not = consumers.into_iter().filter(|consumer| {
            let (user, name) = (&consumer.channel_details.user, &consumer.queue.name);
            let is_refused = match directory.key(user) {
                Some(key) => may_read(&self.catalog, key, name).is_err(),
                // The key may have been removed before the first check of this node.
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

/// Closes each connection, also after an error.
async fn close(broker: &QueueBroker, connections: HashSet<(String, String)>) -> Result<(), BrokerError> {
    let own: HashSet<String> = broker.management.users().await?.into_iter().collect();
    let mut outcome = Ok(());
    for (connection, user) in connections.into_iter().filter(|(_, user)| !own.contains(user)) {
        match broker.management.close_connection(&connection).await {
            Ok(()) => {
                metrics::counter!("fanfare_queue_connections_closed_total").increment(1);
                tracing::info!(target: RATE_LIMITED, key = %user, "broker connection closed: key changed, or may not consume");
            }
            Err(error) => outcome = Err(error),
        }
    }
    outcome
}
