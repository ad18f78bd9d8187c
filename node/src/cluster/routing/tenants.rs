//! Connection counts of tenants over all nodes: sends changes of the counts here to the peers, and sums the counts of the peers.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::super::inbound::TenantCountMessage;
use super::super::link::PeerItem;
use super::{NodeFuture, Routing};
use crate::tasks::OnStop;

/// Interval at which changed counts are sent. With the time on the way it stays within the promised 250 ms.
const SEND_EVERY: Duration = Duration::from_millis(200);
/// Tenants in one item; each has at most 64 bytes.
const ITEM_TENANTS: usize = 1024;
/// Most tenants that are kept of one member; a further one counts only at its own node.
const TENANTS_MAX: usize = 262_144;

/// Connection counts of the tenants at this node.
pub trait LocalTenantCounts: Send + Sync + 'static {
    /// Resolves when a tenant's connections here have changed since they were taken. Changes count from the first call on.
    fn changed(&self) -> NodeFuture<()>;

    /// The tenants that have changed, with their connections here.
    fn take_changed(&self) -> Vec<(Arc<str>, u64)>;

    /// The tenants that have connections here, with how many.
    fn here(&self) -> Vec<(Arc<str>, u64)>;

    /// Sets the connections that these tenants have on all other nodes together.
    fn set_remote(&self, counts: Vec<(Arc<str>, u64)>);
}

pub(super) struct TenantCountSync {
    local: OnceLock<Arc<dyn LocalTenantCounts>>,
    /// Held while counts are sent, so that a peer gets the newest last.
    sending: Mutex<()>,
    /// Counts of the peers. Held while sums are passed on, so that the newest come last.
    remote: Mutex<RemoteTenantCounts>,
    sent: metrics::Counter,
}

impl Default for TenantCountSync {
    fn default() -> Self {
        let sent = metrics::counter!("fanfare_tenant_counts_told_total");
        metrics::counter!("fanfare_tenants_uncounted_total").increment(0);
        Self { local: OnceLock::new(), sending: Mutex::default(), remote: Mutex::default(), sent }
    }
}

impl Routing {
    /// Starts to exchange connection counts with peers. Called once, before there are peers.
    pub fn count_tenants(&self, local_counts: Arc<dyn LocalTenantCounts>) {
        self.counting.local.set(Arc::clone(&local_counts)).ok();
        let (routing, mut changed) = (self.this.clone(), local_counts.changed());
        self.tasks.spawn("tenants", OnStop::Cancel, async move {
            loop {
                changed.await;
                let Some(routing) = routing.upgrade() else { return };
                routing.send_changed_tenants(&*local_counts);
                drop(routing);
                changed = local_counts.changed();
                tokio::time::sleep(SEND_EVERY).await;
            }
        });
    }

    /// Sets the members that are not down. Their connections count, except those of members that have left, which have no clients any
    /// more.
    pub fn count_members(&self, members: &[u64]) {
        let Some(local_counts) = self.counting.local.get() else { return };
        let mut remote_counts = self.counting.remote.lock();
        // Under the lock, so that a member that leaves meanwhile is not added again.
        let members: Vec<u64> =
            members.iter().copied().filter(|member| !self.leaving.has_left(*member)).collect();
        local_counts.set_remote(remote_counts.set_members(&members));
        drop(remote_counts);
        members.iter().filter(|peer| self.is_up(**peer)).for_each(|peer| self.ask_if_lacking(*peer));
    }

    pub(super) fn take_tenants(&self, from: u64, tenants: TenantCountMessage) {
        let Some(local_counts) = self.counting.local.get() else { return };
        match tenants {
            TenantCountMessage::Connections { counts, begins, ends } => {
                let mut remote_counts = self.counting.remote.lock();
                local_counts.set_remote(remote_counts.take(from, counts, begins, ends));
            }
            TenantCountMessage::Asked => self.send_all_tenants(from, &**local_counts),
        }
    }

    pub(super) fn tenants_linked(&self, to: u64) {
        let Some(local_counts) = self.counting.local.get() else { return };
        self.send_all_tenants(to, &**local_counts);
        self.ask_if_lacking(to);
    }

    /// Drops the counts of a member that has said goodbye: its clients are gone, and its last counts may be older.
    pub(super) fn tenants_left(&self, peer: u64) {
        let Some(local_counts) = self.counting.local.get() else { return };
        let mut remote_counts = self.counting.remote.lock();
        let others: Vec<u64> =
            remote_counts.members.keys().copied().filter(|member| *member != peer).collect();
        local_counts.set_remote(remote_counts.set_members(&others));
    }

    /// Requests a new snapshot of a peer's counts after lost items.
    pub(super) fn tenants_lost(&self, from: u64) {
        self.counting.remote.lock().lost(from);
        self.ask_if_lacking(from);
    }

    fn ask_if_lacking(&self, peer: u64) {
        if self.counting.remote.lock().lacks(peer) {
            self.send_tenants(peer, &PeerItem::tenants(&TenantCountMessage::Asked));
        }
    }

    /// Sends changed counts to the peers with a link. Other peers get a snapshot once they have one.
    fn send_changed_tenants(&self, local_counts: &dyn LocalTenantCounts) {
        let _sending = self.counting.sending.lock();
        let changed = local_counts.take_changed();
        let peers = self.linked();
        for part in changed.chunks(ITEM_TENANTS) {
            let counts = part.to_vec();
            let item =
                PeerItem::tenants(&TenantCountMessage::Connections { counts, begins: false, ends: false });
            peers.iter().for_each(|peer| self.send_tenants(*peer, &item));
            self.counting.sent.increment(peers.len() as u64);
        }
    }

    fn send_all_tenants(&self, to: u64, local_counts: &dyn LocalTenantCounts) {
        let _sending = self.counting.sending.lock();
        let all = local_counts.here();
        let parts = all.len().div_ceil(ITEM_TENANTS).max(1);
        for part in 0..parts {
            let counts = all.iter().skip(part * ITEM_TENANTS).take(ITEM_TENANTS).cloned().collect();
            let (begins, ends) = (part == 0, part + 1 == parts);
            self.send_tenants(
                to,
                &PeerItem::tenants(&TenantCountMessage::Connections { counts, begins, ends }),
            );
        }
    }

    /// Sends an item over one stream for all counts, so that they come in order.
    fn send_tenants(&self, to: u64, item: &PeerItem) {
        if let Some(links) = self.links.get() {
            // The peer requests a snapshot after a loss.
            drop(links.send(to, 0, item));
        }
    }
}

/// Counts of each member, and their sums.
#[derive(Debug, Default)]
struct RemoteTenantCounts {
    members: HashMap<u64, PeerTenantCounts>,
    sums: HashMap<Arc<str>, u64>,
}

#[derive(Debug, Default)]
struct PeerTenantCounts {
    counts: HashMap<Arc<str>, TenantCountEntry>,
    /// Number of the snapshot. When one ends, counts of an earlier one are dropped.
    round: u64,
    is_in_snapshot: bool,
    /// True if a full snapshot has come and nothing was lost since.
    is_complete: bool,
}

#[derive(Debug)]
struct TenantCountEntry {
    connections: u64,
    round: u64,
}

impl RemoteTenantCounts {
    /// Sets the members, and returns the sums that have changed.
    fn set_members(&mut self, members: &[u64]) -> Vec<(Arc<str>, u64)> {
        let departed: Vec<PeerTenantCounts> = self
            .members
            .extract_if(|member, _| !members.contains(member))
            .map(|(_, peer_counts)| peer_counts)
            .collect();
        for member in members {
            self.members.entry(*member).or_default();
        }
        let counts = departed.into_iter().flat_map(|peer_counts| peer_counts.counts);
        counts.map(|(tenant, count)| add(&mut self.sums, tenant, count.connections, 0)).collect()
    }

    fn take(
        &mut self,
        from: u64,
        counts: Vec<(Arc<str>, u64)>,
        begins: bool,
        ends: bool,
    ) -> Vec<(Arc<str>, u64)> {
        let Some(peer_counts) = self.members.get_mut(&from) else { return Vec::new() };
        peer_counts.round += u64::from(begins);
        peer_counts.is_in_snapshot |= begins;
        let round = peer_counts.round;
        let mut sums = Vec::with_capacity(counts.len());
        for (tenant, connections) in counts {
            let before = peer_counts.counts.get(&tenant).map_or(0, |count| count.connections);
            if connections == 0 {
                peer_counts.counts.remove(&tenant);
            } else if before > 0 || peer_counts.counts.len() < TENANTS_MAX {
                peer_counts.counts.insert(Arc::clone(&tenant), TenantCountEntry { connections, round });
            } else {
                metrics::counter!("fanfare_tenants_uncounted_total").increment(1);
                continue;
            }
            sums.push(add(&mut self.sums, tenant, before, connections));
        }
        if ends && peer_counts.is_in_snapshot {
            (peer_counts.is_in_snapshot, peer_counts.is_complete) = (false, true);
            for (tenant, count) in peer_counts.counts.extract_if(|_, count| count.round < round) {
                sums.push(add(&mut self.sums, tenant, count.connections, 0));
            }
        }
        sums
    }

    fn lost(&mut self, from: u64) {
        if let Some(peer_counts) = self.members.get_mut(&from) {
            (peer_counts.is_in_snapshot, peer_counts.is_complete) = (false, false);
        }
    }

    /// True if the counts of a member are not complete.
    fn lacks(&self, member: u64) -> bool {
        self.members.get(&member).is_some_and(|peer_counts| !peer_counts.is_complete)
    }
}

fn add(sums: &mut HashMap<Arc<str>, u64>, tenant: Arc<str>, before: u64, now: u64) -> (Arc<str>, u64) {
    let sum = sums.get(&tenant).copied().unwrap_or(0).saturating_sub(before).saturating_add(now);
    match sum {
        0 => drop(sums.remove(&tenant)),
        _ => drop(sums.insert(Arc::clone(&tenant), sum)),
    }
    (tenant, sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    type TestTenantCounts<'a> = &'a [(&'a str, u64)];

    fn take(
        remote_counts: &mut RemoteTenantCounts,
        from: u64,
        counts: TestTenantCounts<'_>,
        begins: bool,
        ends: bool,
    ) {
        let counts = counts.iter().map(|(tenant, count)| ((*tenant).into(), *count)).collect();
        for (tenant, sum) in remote_counts.take(from, counts, begins, ends) {
            assert_eq!(remote_counts.sums.get(&tenant).copied().unwrap_or(0), sum, "{tenant}");
        }
    }

    fn assert_sums(remote_counts: &RemoteTenantCounts, expected: TestTenantCounts<'_>) {
        let mut sums: Vec<_> = remote_counts.sums.iter().map(|(tenant, sum)| (&**tenant, *sum)).collect();
        sums.sort_unstable();
        assert_eq!(sums, expected);
    }

    #[test]
    fn tenant_counts_of_nodes_are_summed_and_leave_with_them() {
        let mut remote_counts = RemoteTenantCounts::default();
        take(&mut remote_counts, 1, &[("acme", 5)], true, true);
        assert_sums(&remote_counts, &[]);
        remote_counts.set_members(&[1, 2]);
        assert!(remote_counts.lacks(1) && !remote_counts.lacks(3));
        take(&mut remote_counts, 1, &[("acme", 5), ("b", 1)], true, true);
        take(&mut remote_counts, 2, &[("acme", 2)], false, false);
        assert!(!remote_counts.lacks(1) && remote_counts.lacks(2));
        assert_sums(&remote_counts, &[("acme", 7), ("b", 1)]);
        take(&mut remote_counts, 1, &[("acme", 3), ("b", 0)], false, false);
        assert_sums(&remote_counts, &[("acme", 5)]);
        assert_eq!(remote_counts.set_members(&[2]), [("acme".into(), 2)]);
        assert_sums(&remote_counts, &[("acme", 2)]);
        remote_counts.set_members(&[1, 2]);
        assert!(remote_counts.lacks(1), "it is back, and has told nothing yet");
    }

    #[test]
    fn tenants_missing_from_full_count_snapshot_are_removed() {
        let mut remote_counts = RemoteTenantCounts::default();
        remote_counts.set_members(&[1]);
        take(&mut remote_counts, 1, &[("a", 1), ("b", 2), ("c", 3)], true, true);
        take(&mut remote_counts, 1, &[("b", 4)], true, false);
        assert_sums(&remote_counts, &[("a", 1), ("b", 4), ("c", 3)]);
        take(&mut remote_counts, 1, &[("c", 5)], false, true);
        assert_sums(&remote_counts, &[("b", 4), ("c", 5)]);
        take(&mut remote_counts, 1, &[], true, true);
        assert_sums(&remote_counts, &[]);
    }

    #[test]
    fn snapshot_end_without_its_begin_completes_nothing() {
        let mut remote_counts = RemoteTenantCounts::default();
        remote_counts.set_members(&[1]);
        take(&mut remote_counts, 1, &[("a", 1)], false, true);
        assert!(remote_counts.lacks(1));
        take(&mut remote_counts, 1, &[("b", 1)], true, false);
        remote_counts.lost(1);
        take(&mut remote_counts, 1, &[("c", 1)], false, true);
        assert!(remote_counts.lacks(1));
        assert_sums(&remote_counts, &[("a", 1), ("b", 1), ("c", 1)]);
        take(&mut remote_counts, 1, &[("a", 1)], true, true);
        assert!(!remote_counts.lacks(1));
        assert_sums(&remote_counts, &[("a", 1)]);
    }

    #[test]
    fn tenants_of_a_member_are_bounded() {
        let mut remote_counts = RemoteTenantCounts::default();
        remote_counts.set_members(&[1]);
        let many = (0..TENANTS_MAX + 10).map(|number| (format!("t{number}").into(), 1)).collect();
        remote_counts.take(1, many, true, true);
        assert_eq!(
            (remote_counts.members[&1].counts.len(), remote_counts.sums.len()),
            (TENANTS_MAX, TENANTS_MAX)
        );
        take(&mut remote_counts, 1, &[("t0", 0), ("new", 1), ("t1", 2)], false, false);
        assert_eq!(remote_counts.sums.len(), TENANTS_MAX);
        assert_eq!((remote_counts.sums["new"], remote_counts.sums["t1"]), (1, 2));
    }
}
