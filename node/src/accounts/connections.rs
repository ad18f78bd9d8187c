//! Connection counts of tenants, here and on other nodes, and their limits.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::directory::Account;

/// Live connections by tenant, over all its accounts.
#[derive(Debug, Default)]
pub struct TenantConnections {
    /// Tenants with a connection on this node or another; one without is forgotten when another tenant is added.
    tenants: Mutex<HashMap<Arc<str>, Arc<TenantCount>>>,
    changes: Arc<TenantChanges>,
}

#[derive(Debug)]
struct TenantCount {
    id: Arc<str>,
    here: AtomicU64,
    /// Connections on the other nodes, by their last announcements.
    other_nodes: AtomicU64,
    /// Whether the tenant is in the list of changes.
    is_changed: AtomicBool,
    changes: Arc<TenantChanges>,
}

/// The tenants whose connections here have changed.
#[derive(Debug, Default)]
struct TenantChanges {
    /// Whether changes are taken by a caller; otherwise none are recorded.
    are_followed: AtomicBool,
    /// Changed tenants, each about once, so at most as many as tenants with connections.
    ids: Mutex<Vec<Arc<str>>>,
    is_there: Notify,
}

/// A quota slot: one counted connection, released when dropped.
#[derive(Debug)]
pub struct QuotaSlot(Arc<TenantCount>);

impl TenantConnections {
    /// Takes a quota slot of the account's tenant; `None` when the tenant is at its limit.
    pub fn admit(&self, account: &Account) -> Option<QuotaSlot> {
        self.take(account, account.tenant_connection_limit)
    }

    /// Takes a quota slot for a connection that replaces an open one, even at the limit. The caller ends the former connection, whose slot
    /// is then free.
    pub fn admit_successor(&self, account: &Account) -> QuotaSlot {
        self.take(account, None).expect("without a limit everyone is admitted")
    }

    /// Whether the tenant has more connections than its limit.
    pub fn is_over_limit(&self, account: &Account) -> bool {
        account.tenant_connection_limit.is_some_and(|limit| self.count(&account.tenant) > limit)
    }

    /// The tenant's open connections on all nodes.
    pub fn count(&self, tenant: &str) -> u64 {
        self.tenants.lock().get(tenant).map_or(0, |tenant| tenant.open())
    }

    /// Resolves when a tenant's connections here have changed since [`TenantConnections::take_changed`]. Changes are recorded only from the
    /// first call on.
    pub fn changed(&self) -> impl Future<Output = ()> + Send + use<> {
        let changes = Arc::clone(&self.changes);
        changes.are_followed.store(true, Ordering::SeqCst);
        async move { changes.is_there.notified().await }
    }

    /// The changed tenants, with their connections here.
    pub fn take_changed(&self) -> Vec<(Arc<str>, u64)> {
        let ids = std::mem::take(&mut *self.changes.ids.lock());
        let tenants = self.tenants.lock();
        let here = |tenant: &Arc<TenantCount>| {
            // Cleared first, so that a later change is recorded again.
            tenant.is_changed.store(false, Ordering::SeqCst);
            tenant.here.load(Ordering::SeqCst)
        };
        let counted = |id: Arc<str>| {
            let here = tenants.get(&id).map_or(0, here);
            (id, here)
        };
        ids.into_iter().map(counted).collect()
    }

    /// The tenants with connections here, and their number.
    pub fn here(&self) -> Vec<(Arc<str>, u64)> {
        let tenants = self.tenants.lock();
        let all = tenants.values().map(|tenant| (Arc::clone(&tenant.id), tenant.here.load(Ordering::SeqCst)));
        all.filter(|(_, here)| *here > 0).collect()
    }

    /// Records the connections of tenants on all other nodes together.
    pub fn set_other_nodes(&self, counts: impl IntoIterator<Item = (Arc<str>, u64)>) {
        let mut tenants = self.tenants.lock();
        for (id, remote) in counts {
            match tenants.get(&id) {
                Some(tenant) => tenant.other_nodes.store(remote, Ordering::SeqCst),
                None if remote == 0 => {}
                None => {
                    let tenant = self.tenant(&id);
                    tenant.other_nodes.store(remote, Ordering::SeqCst);
                    tenants.insert(id, Arc::new(tenant));
                }
            }
        }
    }

    /// Takes a quota slot. The lock makes check and count one step; a slot released meanwhile only frees space.
    fn take(&self, account: &Account, limit: Option<u64>) -> Option<QuotaSlot> {
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
        Some(QuotaSlot(tenant))
    }

    fn tenant(&self, id: &Arc<str>) -> TenantCount {
        let (id, changes) = (Arc::clone(id), Arc::clone(&self.changes));
        let (here, remote, is_changed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicBool::new(false));
        TenantCount { id, here, other_nodes: remote, is_changed, changes }
    }
}

impl TenantCount {
    fn open(&self) -> u64 {
        self.here.load(Ordering::SeqCst).saturating_add(self.other_nodes.load(Ordering::SeqCst))
    }

    fn changed(&self) {
        if self.changes.are_followed.load(Ordering::SeqCst) && !self.is_changed.swap(true, Ordering::SeqCst) {
            self.changes.ids.lock().push(Arc::clone(&self.id));
            self.changes.is_there.notify_one();
        }
    }
}

impl Drop for QuotaSlot {
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
    fn lowered_limit_admits_no_connection_until_slots_are_free() {
        let connections = TenantConnections::default();
        let mut slots: Vec<_> = (0..3)
            .map(|_| connections.admit(&account("a", "acme", Some(3))).expect("below the ceiling"))
            .collect();
        let lowered = account("a", "acme", Some(1));
        assert!(connections.admit(&lowered).is_none());
        slots.truncate(1);
        assert!(connections.admit(&lowered).is_none());
        slots.clear();
        assert!(connections.admit(&lowered).is_some());
        assert!(connections.admit(&account("a", "acme", Some(0))).is_none(), "zero is a ceiling");
    }

    #[test]
    fn a_successor_is_admitted_at_the_ceiling() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", Some(1));
        let previous = connections.admit(&acme).expect("below the ceiling");
        let _successor = connections.admit_successor(&acme);
        drop(previous);
        assert_eq!(connections.count("acme"), 1);
        assert!(connections.admit(&acme).is_none());
    }

    #[test]
    fn connection_storm_is_never_admitted_beyond_the_limit() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", Some(5));
        let most = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..2_000 {
                        let slot = connections.admit(&acme);
                        most.fetch_max(connections.count("acme"), Ordering::SeqCst);
                        std::thread::yield_now();
                        drop(slot);
                    }
                });
            }
            let _held: Vec<_> = (0..3).map(|_| connections.admit(&acme)).collect();
        });
        assert!(most.load(Ordering::SeqCst) <= 5);
        assert_eq!(connections.count("acme"), 0);
    }

    #[test]
    fn remote_connections_take_local_quota_slots() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", Some(3));
        connections.set_other_nodes([("acme".into(), 2)]);
        let slot = connections.admit(&acme).expect("below the ceiling");
        assert!(connections.admit(&acme).is_none());
        let _successor = connections.admit_successor(&acme);
        drop(slot);
        assert_eq!((connections.count("acme"), connections.here()), (3, vec![("acme".into(), 1)]));
        connections.set_other_nodes([("acme".into(), 0), ("other".into(), 0)]);
        assert_eq!((connections.count("acme"), connections.tenants.lock().len()), (1, 1));
    }

    #[tokio::test]
    async fn changes_are_taken_once_and_none_is_missed() {
        let connections = TenantConnections::default();
        let acme = account("a", "acme", None);
        drop(connections.admit(&acme));
        assert!(connections.take_changed().is_empty(), "nobody wants them");
        let changed = connections.changed();
        let slots = [connections.admit(&acme), connections.admit(&acme)];
        connections.set_other_nodes([("other".into(), 1)]);
        changed.await;
        assert_eq!(connections.take_changed(), [("acme".into(), 2)]);
        assert!(connections.take_changed().is_empty());
        drop(slots);
        connections.changed().await;
        // The tenant is forgotten meanwhile.
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
