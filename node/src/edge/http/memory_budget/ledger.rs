//! Accounting of permits: no clock, no lock and no wake-ups.

use std::collections::{BTreeMap, HashMap, VecDeque};

use crate::model::AccountId;

/// Ledger of a memory budget.
///
/// Half of the budget guarantees a portion to every account. Of the other half an account may take at most as much as remains free for all
/// others. So however many accounts take all they can, half of the budget is free or taken as portions.
///
/// Claims of one account are granted in order. Waiting accounts take turns, and an account at its maximum is passed over.
pub(super) struct PermitLedger<W> {
    bytes_max: usize,
    portion: usize,
    taken: usize,
    /// Bytes of `taken` that accounts have beyond their portions.
    beyond: usize,
    /// Accounts that hold bytes or wait.
    accounts: HashMap<AccountId, AccountPermits<W>>,
    /// Waiting accounts, the next one first.
    turns: VecDeque<AccountId>,
    next_ticket: u64,
}

struct AccountPermits<W> {
    taken: usize,
    /// Waiting claims by ticket.
    waiting: BTreeMap<u64, (usize, W)>,
}

impl<W> PermitLedger<W> {
    /// Creates the ledger. `portion` is what one request may need; at most a quarter of the budget counts.
    pub(super) fn new(bytes_max: usize, portion: usize) -> Self {
        Self {
            bytes_max,
            portion: portion.min(bytes_max / 4),
            taken: 0,
            beyond: 0,
            accounts: HashMap::new(),
            turns: VecDeque::new(),
            next_ticket: 0,
        }
    }

    /// Bytes that a claim counts as: at most what one account can have.
    pub(super) fn claim(&self, bytes: usize) -> usize {
        bytes.min(self.portion + self.bytes_max / 4)
    }

    /// Grants a claim at once or not at all, even before waiting claims of the account.
    pub(super) fn take(&mut self, id: &AccountId, claim: usize) -> bool {
        let own = self.accounts.get(id).map_or(0, |account| account.taken);
        let fits = self.fits(own, claim);
        if fits {
            self.add(id, claim);
        }
        fits
    }

    /// Grants a claim at once unless an earlier claim of the account waits.
    pub(super) fn take_in_turn(&mut self, id: &AccountId, claim: usize) -> bool {
        let waits = self.accounts.get(id).is_some_and(|account| !account.waiting.is_empty());
        !waits && self.take(id, claim)
    }

    /// Queues a claim that could not be granted. [`PermitLedger::next`] returns `waiter` when it is granted, unless it has left by then.
    pub(super) fn wait(&mut self, id: &AccountId, claim: usize, waiter: W) -> u64 {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let account = self.accounts.entry(id.clone()).or_default();
        if account.waiting.is_empty() {
            self.turns.push_back(id.clone());
        }
        account.waiting.insert(ticket, (claim, waiter));
        ticket
    }

    /// Removes a waiting claim. True if it was still waiting: then a claim behind it may be next.
    pub(super) fn leave(&mut self, id: &AccountId, ticket: u64) -> bool {
        let Some(account) = self.accounts.get_mut(id) else { return false };
        let waited = account.waiting.remove(&ticket).is_some();
        if waited && account.waiting.is_empty() {
            self.turns.retain(|waiting| waiting != id);
        }
        self.forget(id);
        waited
    }

    pub(super) fn give_back(&mut self, id: &AccountId, bytes: usize) {
        let Some(account) = self.accounts.get_mut(id) else { return };
        let before = account.taken;
        account.taken -= bytes;
        self.taken -= bytes;
        self.beyond -= before.saturating_sub(self.portion) - account.taken.saturating_sub(self.portion);
        self.forget(id);
    }

    /// Grants the next waiting claim. Must be called until it returns none, whenever bytes were returned or a claim has left.
    pub(super) fn next(&mut self) -> Option<(AccountId, usize, W)> {
        let met = |id: &AccountId| {
            let account = self.accounts.get(id)?;
            let (_, (claim, _)) = account.waiting.first_key_value()?;
            self.fits(account.taken, *claim).then_some(())
        };
        let index = self.turns.iter().position(|id| met(id).is_some())?;
        let id = self.turns.remove(index)?;
        let account = self.accounts.get_mut(&id)?;
        let (_, (claim, waiter)) = account.waiting.pop_first()?;
        if !account.waiting.is_empty() {
            self.turns.push_back(id.clone());
        }
        self.add(&id, claim);
        Some((id, claim, waiter))
    }

    fn fits(&self, own: usize, claim: usize) -> bool {
        let others = self.beyond - own.saturating_sub(self.portion);
        let beyond = (own + claim).saturating_sub(self.portion);
        self.taken + claim <= self.bytes_max && (beyond == 0 || 2 * beyond + others <= self.bytes_max / 2)
    }

    fn add(&mut self, id: &AccountId, bytes: usize) {
        let account = self.accounts.entry(id.clone()).or_default();
        let before = account.taken;
        account.taken += bytes;
        self.taken += bytes;
        self.beyond += account.taken.saturating_sub(self.portion) - before.saturating_sub(self.portion);
    }

    fn forget(&mut self, id: &AccountId) {
        if self.accounts.get(id).is_some_and(|account| account.taken == 0 && account.waiting.is_empty()) {
            self.accounts.remove(id);
        }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.taken == 0 && self.beyond == 0 && self.accounts.is_empty() && self.turns.is_empty()
    }
}

impl<W> Default for AccountPermits<W> {
    fn default() -> Self {
        Self { taken: 0, waiting: BTreeMap::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES_MAX: usize = 6_400;
    const PORTION: usize = 200;

    fn ledger() -> PermitLedger<char> {
        PermitLedger::new(BYTES_MAX, PORTION)
    }

    fn id(number: usize) -> AccountId {
        AccountId::new(&format!("account-{number}"))
    }

    /// Takes as many claims of one size as the account can have. Returns their sum.
    fn take_all(ledger: &mut PermitLedger<char>, id: &AccountId, claim: usize) -> usize {
        std::iter::from_fn(|| ledger.take(id, claim).then_some(claim)).sum()
    }

    #[test]
    fn account_taking_all_it_can_leaves_others_their_portion() {
        for claim in [1, 7, 100, 110, PORTION] {
            let mut ledger = ledger();
            let taken: Vec<_> = (0..16).map(|number| take_all(&mut ledger, &id(number), claim)).collect();
            assert!(taken[0] > PORTION + BYTES_MAX / 4 - claim && taken[1] > taken[2], "{claim}: {taken:?}");
            assert!(taken.iter().all(|taken| *taken > PORTION - claim), "{claim}: {taken:?}");
            assert!(taken.iter().sum::<usize>() <= BYTES_MAX);
        }
        // Half a portion each is what twice as many accounts can have, and the first account gets no more of it.
        let mut ledger = ledger();
        take_all(&mut ledger, &id(0), 100);
        take_all(&mut ledger, &id(1), 100);
        for number in 2..32 {
            assert!(ledger.take(&id(number), PORTION / 2), "{number}");
        }
    }

    #[test]
    fn oversized_claim_is_capped_at_what_an_account_may_hold() {
        let mut ledger = ledger();
        let claim = ledger.claim(usize::MAX);
        assert_eq!(claim, PORTION + BYTES_MAX / 4);
        assert!(ledger.take(&id(0), claim));
        assert!(!ledger.take(&id(0), 1));
        assert!(ledger.take(&id(1), PORTION + BYTES_MAX / 8));
        ledger.give_back(&id(0), claim);
        ledger.give_back(&id(1), PORTION + BYTES_MAX / 8);
        assert!(ledger.is_empty());
    }

    #[test]
    fn small_memory_budget_is_still_shared_by_several_accounts() {
        let mut ledger: PermitLedger<char> = PermitLedger::new(1_000, 5_000);
        let claim = ledger.claim(5_000);
        assert!(ledger.take(&id(0), claim));
        assert!(ledger.take(&id(1), 250) && ledger.take(&id(2), 250), "the portion is a quarter");
    }

    #[test]
    fn claims_of_account_are_met_in_order_and_accounts_alternate() {
        let mut ledger = ledger();
        let all = ledger.claim(usize::MAX);
        for number in 0..3 {
            assert!(ledger.take(&id(number), PORTION));
        }
        assert!(ledger.take(&id(0), all - PORTION));
        ledger.wait(&id(0), 100, 'a');
        ledger.wait(&id(0), 10, 'b');
        assert!(!ledger.take_in_turn(&id(0), 10), "one of its own is before it");
        // An account at its maximum does not hold up the others.
        assert!(ledger.take_in_turn(&id(1), BYTES_MAX / 8));
        ledger.wait(&id(1), 100, 'c');
        ledger.wait(&id(1), 100, 'd');
        assert!(ledger.next().is_none());
        ledger.give_back(&id(0), all);
        let met: Vec<char> = std::iter::from_fn(|| ledger.next().map(|(.., waiter)| waiter)).collect();
        assert_eq!(met, ['a', 'c', 'b', 'd']);
    }

    #[test]
    fn departing_claim_makes_way_for_the_next_claim() {
        let mut ledger = ledger();
        assert!(ledger.take(&id(0), PORTION + BYTES_MAX / 4 - 10));
        let large = ledger.wait(&id(0), 1_000, 'l');
        let small = ledger.wait(&id(0), 10, 's');
        assert!(ledger.next().is_none());
        assert!(ledger.leave(&id(0), large) && !ledger.leave(&id(0), large));
        assert_eq!(ledger.next(), Some((id(0), 10, 's')));
        assert!(!ledger.leave(&id(0), small), "it was met");
        ledger.give_back(&id(0), PORTION + BYTES_MAX / 4);
        assert!(ledger.is_empty());
    }

    /// Random claims, leaves and returns keep the sums right, and no claim waits for free bytes.
    #[test]
    fn random_use_keeps_sums_right_and_no_claim_waits_for_free() {
        let mut state = 88_172_645_463_325_252_u64;
        let mut random = |below: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state % below as u64) as usize
        };
        let mut ledger = ledger();
        let (mut held, mut waiting) = (Vec::new(), Vec::new());
        for _ in 0..20_000 {
            let (account, claim) = (id(random(6)), ledger.claim(1 + random(2_000)));
            match random(4) {
                0 | 1 if ledger.take_in_turn(&account, claim) => held.push((account, claim)),
                0 | 1 => waiting.push((ledger.wait(&account, claim, 'w'), account)),
                2 if !waiting.is_empty() => {
                    let (ticket, account) = waiting.swap_remove(random(waiting.len()));
                    ledger.leave(&account, ticket);
                }
                _ if !held.is_empty() => {
                    let (account, claim) = held.swap_remove(random(held.len()));
                    ledger.give_back(&account, claim);
                }
                _ => {}
            }
            while let Some((account, claim, _)) = ledger.next() {
                held.push((account, claim));
            }
            let of = |owner: &AccountId| -> usize {
                held.iter().filter(|(account, _)| account == owner).map(|(_, claim)| claim).sum()
            };
            let beyond: usize = (0..6).map(|number| of(&id(number)).saturating_sub(PORTION)).sum();
            assert_eq!(ledger.taken, held.iter().map(|(_, claim)| claim).sum::<usize>());
            assert_eq!(ledger.beyond, beyond);
            assert!(ledger.taken <= BYTES_MAX && ledger.beyond <= BYTES_MAX / 2);
            for (id, account) in &ledger.accounts {
                assert_eq!(account.taken, of(id));
                assert_eq!(!account.waiting.is_empty(), ledger.turns.contains(id));
            }
        }
        for (ticket, account) in waiting {
            ledger.leave(&account, ticket);
        }
        while let Some((account, claim, _)) = ledger.next() {
            held.push((account, claim));
        }
        for (account, claim) in held {
            ledger.give_back(&account, claim);
        }
        assert!(ledger.is_empty());
    }
}
