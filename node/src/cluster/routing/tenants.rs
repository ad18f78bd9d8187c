//! The connections of tenants over all nodes: those here are told the others as they change, and what others tell is added up.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;

use super::super::inbound::Tenants;
use super::super::link::Item;
use super::{Later, Routing};
use crate::tasks::OnStop;

/// From one telling of changes to the next. With the time that it takes on its way it stays within what is promised, 250 ms.
const TELL_EVERY: Duration = Duration::from_millis(200);
/// Tenants in one item; each has at most 64 bytes.
const ITEM_TENANTS: usize = 1024;
/// Tenants kept of one member; a further one counts only where its connections are.
const TENANTS_MAX: usize = 262_144;

/// What a node counts.
pub trait Seats: Send + Sync + 'static {
    /// Resolves when a tenant's connections here have changed since they were taken. Changes count from the first call on.
    fn changed(&self) -> Later<()>;

    /// The tenants that have changed, with their connections here.
    fn take_changed(&self) -> Vec<(Arc<str>, u64)>;

    /// The tenants that have connections here, with how many.
    fn here(&self) -> Vec<(Arc<str>, u64)>;

    /// On all other nodes together the tenants have so many connections now.
    fn set_elsewhere(&self, counts: Vec<(Arc<str>, u64)>);
}

pub(super) struct Counting {
    seats: OnceLock<Arc<dyn Seats>>,
    /// Held while a peer is told, so that what it is told last is the newest.
    telling: Mutex<()>,
    /// Held while it is passed on, for the same reason.
    heard: Mutex<Heard>,
    told: metrics::Counter,
}

impl Default for Counting {
    fn default() -> Self {
        let told = metrics::counter!("fanfare_tenant_counts_told_total");
        metrics::counter!("fanfare_tenants_uncounted_total").increment(0);
        Self { seats: OnceLock::new(), telling: Mutex::default(), heard: Mutex::default(), told }
    }
}

impl Routing {
    /// To be called once, before there are peers.
    pub fn count_tenants(&self, seats: Arc<dyn Seats>) {
        self.counting.seats.set(Arc::clone(&seats)).ok();
        let (routing, mut changed) = (self.this.clone(), seats.changed());
        self.tasks.spawn("tenants", OnStop::Cancel, async move {
            loop {
                changed.await;
                let Some(routing) = routing.upgrade() else { return };
                routing.tell_changed(&*seats);
                drop(routing);
                changed = seats.changed();
                tokio::time::sleep(TELL_EVERY).await;
            }
        });
    }

    /// The members that are not held for dead. Their connections count, but for those that have left: nobody is there any more.
    pub fn count_members(&self, members: &[u64]) {
        let Some(seats) = self.counting.seats.get() else { return };
        let mut heard = self.counting.heard.lock();
        // Under the lock, so that whoever leaves meanwhile is not among them again.
        let members: Vec<u64> =
            members.iter().copied().filter(|member| !self.leaving.has_left(*member)).collect();
        seats.set_elsewhere(heard.set_members(&members));
        drop(heard);
        members.iter().filter(|peer| self.is_up(**peer)).for_each(|peer| self.ask_if_lacking(*peer));
    }

    pub(super) fn take_tenants(&self, from: u64, tenants: Tenants) {
        let Some(seats) = self.counting.seats.get() else { return };
        match tenants {
            Tenants::Connections { counts, begins, ends } => {
                let mut heard = self.counting.heard.lock();
                seats.set_elsewhere(heard.take(from, counts, begins, ends));
            }
            Tenants::Asked => self.tell_all(from, &**seats),
        }
    }

    pub(super) fn tenants_linked(&self, to: u64) {
        let Some(seats) = self.counting.seats.get() else { return };
        self.tell_all(to, &**seats);
        self.ask_if_lacking(to);
    }

    /// A member has said goodbye, and its clients are gone. What it told of them last may be from before.
    pub(super) fn tenants_left(&self, peer: u64) {
        let Some(seats) = self.counting.seats.get() else { return };
        let mut heard = self.counting.heard.lock();
        let others: Vec<u64> = heard.members.keys().copied().filter(|member| *member != peer).collect();
        seats.set_elsewhere(heard.set_members(&others));
    }

    /// Something of what the peer told is lost.
    pub(super) fn tenants_lost(&self, from: u64) {
        self.counting.heard.lock().lost(from);
        self.ask_if_lacking(from);
    }

    fn ask_if_lacking(&self, peer: u64) {
        if self.counting.heard.lock().lacks(peer) {
            self.tell(peer, &Item::tenants(&Tenants::Asked));
        }
    }

    /// Whoever cannot be reached is told all when it can.
    fn tell_changed(&self, seats: &dyn Seats) {
        let _telling = self.counting.telling.lock();
        let changed = seats.take_changed();
        let peers = self.linked();
        for part in changed.chunks(ITEM_TENANTS) {
            let counts = part.to_vec();
            let item = Item::tenants(&Tenants::Connections { counts, begins: false, ends: false });
            peers.iter().for_each(|peer| self.tell(*peer, &item));
            self.counting.told.increment(peers.len() as u64);
        }
    }

    fn tell_all(&self, to: u64, seats: &dyn Seats) {
        let _telling = self.counting.telling.lock();
        let all = seats.here();
        let parts = all.len().div_ceil(ITEM_TENANTS).max(1);
        for part in 0..parts {
            let counts = all.iter().skip(part * ITEM_TENANTS).take(ITEM_TENANTS).cloned().collect();
            let (begins, ends) = (part == 0, part + 1 == parts);
            self.tell(to, &Item::tenants(&Tenants::Connections { counts, begins, ends }));
        }
    }

    /// All of it over one lane, so that it comes in order.
    fn tell(&self, to: u64, item: &Item) {
        if let Some(links) = self.links.get() {
            // What is lost is asked for.
            drop(links.send(to, 0, item));
        }
    }
}

/// What the members have told, and the sums of it.
#[derive(Debug, Default)]
struct Heard {
    members: HashMap<u64, Told>,
    sums: HashMap<Arc<str>, u64>,
}

#[derive(Debug, Default)]
struct Told {
    counts: HashMap<Arc<str>, Count>,
    /// Rises whenever all is told anew; what is older when that ends is not there any more.
    round: u64,
    is_telling_all: bool,
    /// Nothing is missing.
    is_whole: bool,
}

#[derive(Debug)]
struct Count {
    connections: u64,
    round: u64,
}

impl Heard {
    /// Gives the sums that have changed, as all of these do.
    fn set_members(&mut self, members: &[u64]) -> Vec<(Arc<str>, u64)> {
        let gone: Vec<Told> =
            self.members.extract_if(|member, _| !members.contains(member)).map(|(_, told)| told).collect();
        for member in members {
            self.members.entry(*member).or_default();
        }
        let counts = gone.into_iter().flat_map(|told| told.counts);
        counts.map(|(tenant, count)| add(&mut self.sums, tenant, count.connections, 0)).collect()
    }

    fn take(
        &mut self,
        from: u64,
        counts: Vec<(Arc<str>, u64)>,
        begins: bool,
        ends: bool,
    ) -> Vec<(Arc<str>, u64)> {
        let Some(told) = self.members.get_mut(&from) else { return Vec::new() };
        told.round += u64::from(begins);
        told.is_telling_all |= begins;
        let round = told.round;
        let mut sums = Vec::with_capacity(counts.len());
        for (tenant, connections) in counts {
            let before = told.counts.get(&tenant).map_or(0, |count| count.connections);
            if connections == 0 {
                told.counts.remove(&tenant);
            } else if before > 0 || told.counts.len() < TENANTS_MAX {
                told.counts.insert(Arc::clone(&tenant), Count { connections, round });
            } else {
                metrics::counter!("fanfare_tenants_uncounted_total").increment(1);
                continue;
            }
            sums.push(add(&mut self.sums, tenant, before, connections));
        }
        if ends && told.is_telling_all {
            (told.is_telling_all, told.is_whole) = (false, true);
            for (tenant, count) in told.counts.extract_if(|_, count| count.round < round) {
                sums.push(add(&mut self.sums, tenant, count.connections, 0));
            }
        }
        sums
    }

    fn lost(&mut self, from: u64) {
        if let Some(told) = self.members.get_mut(&from) {
            (told.is_telling_all, told.is_whole) = (false, false);
        }
    }

    /// A member of whom not all is known.
    fn lacks(&self, member: u64) -> bool {
        self.members.get(&member).is_some_and(|told| !told.is_whole)
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

    type Counts<'a> = &'a [(&'a str, u64)];

    fn take(heard: &mut Heard, from: u64, counts: Counts<'_>, begins: bool, ends: bool) {
        let counts = counts.iter().map(|(tenant, count)| ((*tenant).into(), *count)).collect();
        for (tenant, sum) in heard.take(from, counts, begins, ends) {
            assert_eq!(heard.sums.get(&tenant).copied().unwrap_or(0), sum, "{tenant}");
        }
    }

    fn assert_sums(heard: &Heard, expected: Counts<'_>) {
        let mut sums: Vec<_> = heard.sums.iter().map(|(tenant, sum)| (&**tenant, *sum)).collect();
        sums.sort_unstable();
        assert_eq!(sums, expected);
    }

    #[test]
    fn tenant_counts_of_nodes_are_summed_and_leave_with_them() {
        let mut heard = Heard::default();
        take(&mut heard, 1, &[("acme", 5)], true, true);
        assert_sums(&heard, &[]);
        heard.set_members(&[1, 2]);
        assert!(heard.lacks(1) && !heard.lacks(3));
        take(&mut heard, 1, &[("acme", 5), ("b", 1)], true, true);
        take(&mut heard, 2, &[("acme", 2)], false, false);
        assert!(!heard.lacks(1) && heard.lacks(2));
        assert_sums(&heard, &[("acme", 7), ("b", 1)]);
        take(&mut heard, 1, &[("acme", 3), ("b", 0)], false, false);
        assert_sums(&heard, &[("acme", 5)]);
        assert_eq!(heard.set_members(&[2]), [("acme".into(), 2)]);
        assert_sums(&heard, &[("acme", 2)]);
        heard.set_members(&[1, 2]);
        assert!(heard.lacks(1), "it is back, and has told nothing yet");
    }

    #[test]
    fn tenants_missing_from_full_count_snapshot_are_removed() {
        let mut heard = Heard::default();
        heard.set_members(&[1]);
        take(&mut heard, 1, &[("a", 1), ("b", 2), ("c", 3)], true, true);
        take(&mut heard, 1, &[("b", 4)], true, false);
        assert_sums(&heard, &[("a", 1), ("b", 4), ("c", 3)]);
        take(&mut heard, 1, &[("c", 5)], false, true);
        assert_sums(&heard, &[("b", 4), ("c", 5)]);
        take(&mut heard, 1, &[], true, true);
        assert_sums(&heard, &[]);
    }

    #[test]
    fn an_end_whose_beginning_was_lost_ends_nothing() {
        let mut heard = Heard::default();
        heard.set_members(&[1]);
        take(&mut heard, 1, &[("a", 1)], false, true);
        assert!(heard.lacks(1));
        take(&mut heard, 1, &[("b", 1)], true, false);
        heard.lost(1);
        take(&mut heard, 1, &[("c", 1)], false, true);
        assert!(heard.lacks(1));
        assert_sums(&heard, &[("a", 1), ("b", 1), ("c", 1)]);
        take(&mut heard, 1, &[("a", 1)], true, true);
        assert!(!heard.lacks(1));
        assert_sums(&heard, &[("a", 1)]);
    }

    #[test]
    fn tenants_of_a_member_are_bounded() {
        let mut heard = Heard::default();
        heard.set_members(&[1]);
        let many = (0..TENANTS_MAX + 10).map(|number| (format!("t{number}").into(), 1)).collect();
        heard.take(1, many, true, true);
        assert_eq!((heard.members[&1].counts.len(), heard.sums.len()), (TENANTS_MAX, TENANTS_MAX));
        take(&mut heard, 1, &[("t0", 0), ("new", 1), ("t1", 2)], false, false);
        assert_eq!(heard.sums.len(), TENANTS_MAX);
        assert_eq!((heard.sums["new"], heard.sums["t1"]), (1, 2));
    }
}
