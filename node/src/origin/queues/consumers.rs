//! Consumers of the queues: keys as users of the broker, which asks the node what they may, and the end of those that may no more.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::broker::Broker;
use super::definitions::Definition;
use super::{BrokerError, BrokerQueue, Catalog};
use crate::accounts::{Accounts, Key};
use crate::model::{KeyName, Operation};
use crate::telemetry::OFTEN;

/// A question of RabbitMQ's HTTP auth backend.
#[derive(Clone, Copy)]
pub enum BrokerRequest<'a> {
    User { username: &'a str, password: &'a str },
    Vhost { username: &'a str, vhost: &'a str },
    Resource { username: &'a str, vhost: &'a str, kind: &'a str, name: &'a str, permission: &'a str },
    Topic,
}

/// The answer, by the directory and the queues of this moment.
pub(super) fn is_allowed(
    accounts: &Accounts,
    catalog: &Catalog,
    vhost: &str,
    request: BrokerRequest<'_>,
) -> bool {
    match request {
        BrokerRequest::User { username, password } => {
            let directory = accounts.current();
            let key = directory.key(username);
            key.is_some_and(|key| key.secret.matches(password.as_bytes()) && may_consume(key))
        }
        BrokerRequest::Vhost { username, vhost: asked } => {
            asked == vhost && accounts.current().key(username).is_some_and(|key| may_consume(key))
        }
        BrokerRequest::Resource { username, vhost: asked, kind: "queue", name, permission: "read" } => {
            asked == vhost && may_read(accounts, catalog, username, name)
        }
        BrokerRequest::Resource { .. } | BrokerRequest::Topic => false,
    }
}

fn may_consume(key: &Key) -> bool {
    key.active && key.capability.grants_anywhere(Operation::AmqpSubscribe)
}

/// Whether the key of this name may read the queue of this name on the broker, or its dead letters.
fn may_read(accounts: &Accounts, catalog: &Catalog, key_name: &str, physical: &str) -> bool {
    let directory = accounts.current();
    let Some(key) = directory.key(key_name).filter(|key| may_consume(key)) else { return false };
    let Some((account, name)) = BrokerQueue::parse(physical) else { return false };
    let of_account = catalog.of(&account);
    let is_covered = |found: &Definition| found.is_covered_by(&key.capability);
    key.account.id == account && of_account.named(name).is_ok_and(is_covered)
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
    /// more. Users whom the broker itself knows are its operator's.
    pub(super) async fn close_forbidden(&self, seen: &mut SeenKeys) -> Result<(), BrokerError> {
        let Some(broker) = &self.broker else { return Ok(()) };
        let directory = self.accounts.current();
        let is_gone = |user: &str| {
            let key = directory.key(user);
            seen.has_changed(user, key) || key.is_some_and(|key| !may_consume(key))
        };
        let connections = broker.management.connections().await?;
        let gone = connections.into_iter().filter(|connected| is_gone(&connected.user));
        let mut forbidden: HashSet<(String, String)> =
            gone.map(|connected| (connected.name, connected.user)).collect();
        let consumers = broker.management.consumers().await?;
        let may_not = consumers.into_iter().filter(|consumer| {
            let (user, name) = (&consumer.channel_details.user, &consumer.queue.name);
            directory.key(user).is_some()
                && self.catalog.by_physical(name).is_some()
                && !may_read(&self.accounts, &self.catalog, user, name)
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
