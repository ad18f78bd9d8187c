//! Connection scans: passes over all connections of a shard, a slice at a time, so that none holds up the rest.

use std::sync::Arc;
use std::time::Instant;

use fanfare_proto::frame::{close, code};

use super::super::account_query::AccountQuery;
use super::super::connection::ConnectionStage;
use super::gauges::BlockedTotals;
use super::{SLICE, Shard};

/// Connections that are visited between two looks at the clock.
const VISIT_BATCH: usize = 32;

/// One scan and its progress.
pub(super) struct ConnectionScan {
    next_slot: usize,
    purpose: ScanPurpose,
}

enum ScanPurpose {
    /// Review of every credential after a change of the directory.
    Review,
    AccountQuery(AccountQuery),
    /// Measure of the outboxes of connections with a full socket.
    Weigh(BlockedTotals),
}

impl Shard {
    /// Starts an account query; it is answered in a later turn, after all connections were visited.
    pub(super) fn begin_account_query(&mut self, query: AccountQuery) {
        self.scans.push_back(ConnectionScan { next_slot: 0, purpose: ScanPurpose::AccountQuery(query) });
    }

    pub(super) fn begin_blocked_scan(&mut self) {
        self.scans.push_back(ConnectionScan {
            next_slot: 0,
            purpose: ScanPurpose::Weigh(BlockedTotals::default()),
        });
    }

    /// Starts a review after a change of the directory; a review under way starts again.
    pub(super) fn look_at_directory(&mut self) {
        let generation = self.services.auth.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.scans.retain(|round| !matches!(round.purpose, ScanPurpose::Review));
        self.scans.push_front(ConnectionScan { next_slot: 0, purpose: ScanPurpose::Review });
    }

    pub(super) fn scan_turn(&mut self) {
        let until = Instant::now() + SLICE;
        while let Some(mut round) = self.scans.pop_front() {
            let is_needed = match &round.purpose {
                ScanPurpose::Review | ScanPurpose::Weigh(_) => true,
                ScanPurpose::AccountQuery(query) => query.is_awaited(),
            };
            while is_needed && round.next_slot < self.slots.len() {
                let end = (round.next_slot + VISIT_BATCH).min(self.slots.len());
                for slot in round.next_slot..end {
                    self.visit(u32::try_from(slot).expect("slots are numbered by u32"), &mut round.purpose);
                }
                round.next_slot = end;
                if Instant::now() >= until {
                    // Other scans get their turn before this one continues.
                    self.scans.push_back(round);
                    return;
                }
            }
            match round.purpose {
                ScanPurpose::Review => {}
                ScanPurpose::AccountQuery(query) => query.answer(),
                ScanPurpose::Weigh(waiting) => self.finish_blocked_scan(waiting),
            }
        }
    }

    fn visit(&mut self, slot: u32, purpose: &mut ScanPurpose) {
        match purpose {
            ScanPurpose::Review => self.review(slot),
            ScanPurpose::Weigh(waiting) => {
                let connection = self.slots.get(slot as usize).and_then(Option::as_deref);
                if let Some(connection) = connection.filter(|connection| connection.blocked_ms.is_some()) {
                    waiting.add(connection.outbox.bytes());
                }
            }
            ScanPurpose::AccountQuery(query) => {
                let Some(Some(connection)) = self.slots.get(slot as usize) else { return };
                let ConnectionStage::Open(open) = &connection.stage else { return };
                if query.visit(open) {
                    self.with_session(slot, |session, _, out| {
                        session.fail("closed by the account", code::CAPABILITY, close::CAPABILITY, out);
                    });
                }
            }
        }
    }

    /// Closes a connection whose credential is no longer valid, and updates the others.
    fn review(&mut self, slot: u32) {
        let auth = Arc::clone(&self.services.auth);
        self.with_session(slot, |session, _, out| match auth.review(session.principal()) {
            Some(principal) => session.renew(principal, out),
            None => session.fail("unauthorized", code::CREDENTIAL, close::CREDENTIAL, out),
        });
    }
}
