//! How many connections each tenant has open, here and on other nodes, and whether it may open one more here.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::directory::Account;

/// Live connections by tenant, over all its accounts.
#[derive(Debug, Default)]
pub struct TenantConnections {
    /// Holds the tenants that have a connection, on this node or another; one without is forgotten when another comes.
    tenants: Mutex<HashMap<Arc<str>, Arc<Tenant>>>,
    changes: Arc<Changes>,
}

#[derive(Debug)]
struct Tenant {
    id: Arc<str>,
    here: AtomicU64,
    /// On the other nodes, as they said last.
    elsewhere: AtomicU64,
    /// Stands in the list of changes.
    is_changed: AtomicBool,
    changes: Arc<Changes>,
}

/// The tenants whose connections here have changed.
#[derive(Debug, Default)]
struct Changes {
    /// Somebody takes them; else none are kept.
    are_followed: AtomicBool,
    /// Each about once, so as many as there are tenants with connections.
    ids: Mutex<Vec<Arc<str>>>,
    is_there: Notify,
}

/// One counted connection; given back when dropped.
#[derive(Debug)]
pub struct Seat(Arc<Tenant>);

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

    /// More is open than the tenant may have.
    pub fn is_over(&self, account: &Account) -> bool {
        account.tenant_connection_limit.is_some_and(|limit| self.count(&account.tenant) > limit)
    }

    /// What is open now, on all nodes.
    pub fn count(&self, tenant: &str) -> u64 {
        self.tenants.lock().get(tenant).map_or(0, |tenant| tenant.open())
    }

    /// Resolves when a tenant's connections here have changed since [`TenantConnections::take_changed`]. Only from the first
    /// call on are changes kept.
    pub fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let changes = Arc::clone(&self.changes);
        changes.are_followed.store(true, Ordering::SeqCst);
        async move { changes.is_there.notified().await }
    }

    /// The tenants that have changed, with their connections here.
    pub fn take_changed(&self) -> Vec<(Arc<str>, u64)> {
        let ids = std::mem::take(&mut *self.changes.ids.lock());
        let tenants = self.tenants.lock();
        let here = |tenant: &Arc<Tenant>| {
            // First, so that a change after it is one to be taken later.
            tenant.is_changed.store(false, Ordering::SeqCst);
            tenant.here.load(Ordering::SeqCst)
        };
        let counted = |id: Arc<str>| {
            let here = tenants.get(&id).map_or(0, here);
            (id, here)
        };
        ids.into_iter().map(counted).collect()
    }

    /// The tenants that have connections here, with how many.
    pub fn here(&self) -> Vec<(Arc<str>, u64)> {
        let tenants = self.tenants.lock();
        let all = tenants.values().map(|tenant| (Arc::clone(&tenant.id), tenant.here.load(Ordering::SeqCst)));
        all.filter(|(_, here)| *here > 0).collect()
    }

    /// Notes how many connections tenants have on all other nodes together.
    pub fn set_elsewhere(&self, counts: impl IntoIterator<Item = (Arc<str>, u64)>) {
        let mut tenants = self.tenants.lock();
        for (id, elsewhere) in counts {
            match tenants.get(&id) {
                Some(tenant) => tenant.elsewhere.store(elsewhere, Ordering::SeqCst),
                None if elsewhere == 0 => {}
                None => {
                    let tenant = self.tenant(&id);
                    tenant.elsewhere.store(elsewhere, Ordering::SeqCst);
                    tenants.insert(id, Arc::new(tenant));
                }
            }
        }
    }

    /// The lock makes look and count one step; a seat given back meanwhile only makes room.
    fn take(&self, account: &Account, limit: Option<u64>) -> Option<Seat> {
        let mut tenants = self.tenants.lock();
        let tenant = match tenants.get(&account.tenant) {
            Some(tenant) => Arc::clone(tenant),
            None => {
                tenants.retain(|_, tenant| tenant.open() > 0);
                let tenant = Arc::new(self.tenant(&account.tenant));
                tenants.insert(Arc::clone(&account.tenant), Arc::clone(&tenant));
                tenant
            }
        };
        if limit.is_some_and(|limit| tenant.open() >= limit) {
            return None;
        }
        tenant.here.fetch_add(1, Ordering::SeqCst);
        tenant.changed();
        Some(Seat(tenant))
    }

    fn tenant(&self, id: &Arc<str>) -> Tenant {
        let (id, changes) = (Arc::clone(id), Arc::clone(&self.changes));
        let (here, elsewhere, is_changed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        Tenant { id, here, elsewhere, is_changed, changes }
    }
}

impl Tenant {
    fn open(&self) -> u64 {
        self.here.load(Ordering::SeqCst).saturating_add(self.elsewhere.load(Ordering::SeqCst))
    }

    fn changed(&self) {
        if self.changes.are_followed.load(Ordering::SeqCst) && !self.is_changed.swap(true, Ordering::SeqCst) {
            self.changes.ids.lock().push(Arc::clone(&self.id));
            self.changes.is_there.notify_one();
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.here.fetch_sub(1, Ordering::SeqCst);
        self.0.changed();
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
    fn connections_elsewhere_take_quota_slots_here() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", Some(3));
        connections.set_elsewhere([("acme".into(), 2)]);
        let seat = connections.admit(&acme).expect("below the ceiling");
        assert!(connections.admit(&acme).is_none());
        let _successor = connections.admit_successor(&acme);
        drop(seat);
        assert_eq!((connections.count("acme"), connections.here()), (3, vec![("acme".into(), 1)]));
        connections.set_elsewhere([("acme".into(), 0), ("other".into(), 0)]);
        assert_eq!((connections.count("acme"), connections.tenants.lock().len()), (1, 1));
    }

    #[tokio::test]
    async fn changes_are_taken_once_and_none_is_missed() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", None);
        drop(connections.admit(&acme));
        assert!(connections.take_changed().is_empty(), "nobody wants them");
        let changed = connections.changed();
        let seats = [connections.admit(&acme), connections.admit(&acme)];
        connections.set_elsewhere([("other".into(), 1)]);
        changed.await;
        assert_eq!(connections.take_changed(), [("acme".into(), 2)]);
        assert!(connections.take_changed().is_empty());
        drop(seats);
        connections.changed().await;
        // It is forgotten meanwhile.
        connections.admit(&account("b", "b", None));
        let mut changed = connections.take_changed();
        changed.sort();
        assert_eq!(changed, [("acme".into(), 0), ("b".into(), 0)]);
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
