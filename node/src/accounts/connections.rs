//! How many connections each tenant has open on this node, and whether it may open one more.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::directory::Account;

/// Live connections by tenant, over all its accounts.
#[derive(Debug, Default)]
pub struct TenantConnections {
    /// Holds the tenants that have a connection; one without is forgotten when another comes.
    tenants: Mutex<HashMap<Arc<str>, Arc<AtomicU64>>>,
}

/// One counted connection; given back when dropped.
#[derive(Debug)]
pub struct Seat(Arc<AtomicU64>);

impl TenantConnections {
    /// Counts one more connection of the account's tenant; `None` when the tenant is at its ceiling.
    pub fn admit(&self, account: &Account) -> Option<Seat> {
        self.take(account, account.tenant_connection_limit)
    }

    /// For a connection that takes the place of one still open: admitted at the ceiling too. The caller ends the
    /// former one, whose seat is free from then on.
    pub fn admit_successor(&self, account: &Account) -> Seat {
        self.take(account, None).expect("without a limit everyone is admitted")
    }

    /// What is open now.
    pub fn count(&self, tenant: &str) -> u64 {
        self.tenants.lock().get(tenant).map_or(0, |open| open.load(Ordering::SeqCst))
    }

    /// The lock makes look and count one step; a seat given back meanwhile only makes room.
    fn take(&self, account: &Account, limit: Option<u64>) -> Option<Seat> {
        let mut tenants = self.tenants.lock();
        let open = match tenants.get(&account.tenant) {
            Some(open) => Arc::clone(open),
            None => {
                tenants.retain(|_, open| open.load(Ordering::SeqCst) > 0);
                Arc::clone(tenants.entry(Arc::clone(&account.tenant)).or_default())
            }
        };
        if limit.is_some_and(|limit| open.load(Ordering::SeqCst) >= limit) {
            return None;
        }
        open.fetch_add(1, Ordering::SeqCst);
        Some(Seat(open))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(id: &str, tenant: &str, limit: Option<u64>) -> Account {
        Account { tenant: tenant.into(), tenant_connection_limit: limit, ..Account::plain(id) }
    }

    #[test]
    fn a_tenant_is_counted_over_its_accounts_and_apart_from_others() {
        let connections = TenantConnections::default();
        let (a, b) = (account("a", "acme", Some(2)), account("b", "acme", Some(2)));
        let first = connections.admit(&a).expect("below the ceiling");
        let _second = connections.admit(&b).expect("below the ceiling");
        assert!(connections.admit(&a).is_none() && connections.admit(&b).is_none());
        assert_eq!(connections.count("acme"), 2, "a refusal counts for nothing");
        let _other = connections.admit(&account("c", "other", None)).expect("a tenant without a ceiling");
        drop(first);
        assert_eq!((connections.count("acme"), connections.count("other")), (1, 1));
        assert!(connections.admit(&b).is_some(), "freed at once");
        assert_eq!(connections.count("nobody"), 0);
    }

    #[test]
    fn a_ceiling_that_came_down_admits_nobody_until_there_is_room() {
        let connections = TenantConnections::default();
        let mut seats: Vec<_> = (0..3)
            .map(|_| connections.admit(&account("a", "acme", Some(3))).expect("below the ceiling"))
            .collect();
        let lowered = account("a", "acme", Some(1));
        assert!(connections.admit(&lowered).is_none());
        seats.truncate(1);
        assert!(connections.admit(&lowered).is_none());
        seats.clear();
        assert!(connections.admit(&lowered).is_some());
        assert!(connections.admit(&account("a", "acme", Some(0))).is_none(), "zero is a ceiling");
    }

    #[test]
    fn a_successor_is_admitted_at_the_ceiling() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", Some(1));
        let former = connections.admit(&acme).expect("below the ceiling");
        let _successor = connections.admit_successor(&acme);
        drop(former);
        assert_eq!(connections.count("acme"), 1);
        assert!(connections.admit(&acme).is_none());
    }

    #[test]
    fn a_herd_is_never_admitted_beyond_the_ceiling() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", Some(5));
        let most = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let seat = connections.admit(&acme);
                        most.fetch_max(connections.count("acme"), Ordering::SeqCst);
                        std::thread::yield_now();
                        drop(seat);
                    }
                });
            }
            let _held: Vec<_> = (0..3).map(|_| connections.admit(&acme)).collect();
        });
        assert!(most.load(Ordering::SeqCst) <= 5);
        assert_eq!(connections.count("acme"), 0);
    }

    #[test]
    fn tenants_without_connections_are_forgotten() {
        let connections = TenantConnections::default();
        for number in 0..100 {
            connections.admit(&account("a", &format!("t{number}"), None));
        }
        assert!(connections.tenants.lock().len() <= 1);
    }
}
