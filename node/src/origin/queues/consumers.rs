//! Consumers of the queues: keys as users of the broker, which asks the node what they may, and the end of those that may no more.

use std::collections::HashSet;

use super::definitions::Definition;
use super::{BrokerError, BrokerQueue, Catalog};
use crate::accounts::{Accounts, Key};
use crate::model::{AccountId, Operation};

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
    with_queue(catalog, physical, |account, found| {
        key.account.id == *account && found.is_covered_by(&key.capability)
    })
}

/// False where no account has the queue.
fn with_queue(catalog: &Catalog, physical: &str, is: impl FnOnce(&AccountId, &Definition) -> bool) -> bool {
    let Some((account, name)) = BrokerQueue::parse(physical) else { return false };
    catalog.of(&account).named(name).is_ok_and(|found| is(&account, found))
}

impl super::service::Inner {
    /// Closes the connections of consumers that may not consume any more. Users whom the broker itself knows are its operator's.
    pub(super) async fn close_forbidden_consumers(&self) -> Result<(), BrokerError> {
        let consumers = self.broker.management.consumers().await?;
        let forbidden = consumers.into_iter().filter(|consumer| {
            let name = &consumer.queue.name;
            with_queue(&self.catalog, name, |_, _| true)
                && !may_read(&self.accounts, &self.catalog, &consumer.channel_details.user, name)
        });
        let forbidden: HashSet<(String, String)> = forbidden
            .map(|consumer| (consumer.channel_details.connection_name, consumer.channel_details.user))
            .collect();
        if forbidden.is_empty() {
            return Ok(());
        }
        let own: HashSet<String> = self.broker.management.users().await?.into_iter().collect();
        for (connection, user) in forbidden.into_iter().filter(|(_, user)| !own.contains(user)) {
            self.broker.management.close_connection(&connection).await?;
            metrics::counter!("fanfare_queue_consumers_closed_total").increment(1);
            tracing::info!(key = %user, "connection of a consumer was closed: its key may not consume the queue");
        }
        Ok(())
    }
}
