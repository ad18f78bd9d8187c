//! Walks over all connections of a shard, a slice at a time, so that none holds up the rest.

use std::sync::Arc;
use std::time::Instant;

use fanfare_proto::frame::{close, code};

use super::super::connection::Stage;
use super::super::survey::Survey;
use super::gauges::Waiting;
use super::{SLICE, Shard};

/// Connections visited between two looks at the clock.
const VISIT_BATCH: usize = 32;

/// One walk, and where it stands.
pub(super) struct Round {
    next_slot: usize,
    purpose: Purpose,
}

enum Purpose {
    /// The directory has changed: hold every credential against it.
    Review,
    Survey(Survey),
    /// How much waits for sockets that are full.
    Weigh(Waiting),
}

impl Shard {
    /// Answers in a later turn, once every connection was seen.
    pub(super) fn begin_survey(&mut self, survey: Survey) {
        self.rounds.push_back(Round { next_slot: 0, purpose: Purpose::Survey(survey) });
    }

    pub(super) fn begin_to_weigh(&mut self) {
        self.rounds.push_back(Round { next_slot: 0, purpose: Purpose::Weigh(Waiting::default()) });
    }

    /// Begins a review after a change of the directory; one that is under way begins anew.
    pub(super) fn look_at_directory(&mut self) {
        let generation = self.services.auth.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        self.rounds.retain(|round| !matches!(round.purpose, Purpose::Review));
        self.rounds.push_front(Round { next_slot: 0, purpose: Purpose::Review });
    }

    pub(super) fn rounds_turn(&mut self) {
        let until = Instant::now() + SLICE;
        while let Some(mut round) = self.rounds.pop_front() {
            let wanted = match &round.purpose {
                Purpose::Review | Purpose::Weigh(_) => true,
                Purpose::Survey(survey) => survey.is_awaited(),
            };
            while wanted && round.next_slot < self.slots.len() {
                let end = (round.next_slot + VISIT_BATCH).min(self.slots.len());
                for slot in round.next_slot..end {
                    self.visit(u32::try_from(slot).expect("slots are numbered by u32"), &mut round.purpose);
                }
                round.next_slot = end;
                if Instant::now() >= until {
                    // The others have their turn before this one goes on.
                    self.rounds.push_back(round);
                    return;
                }
            }
            match round.purpose {
                Purpose::Review => {}
                Purpose::Survey(survey) => survey.answer(),
                Purpose::Weigh(waiting) => self.weighed(waiting),
            }
        }
    }

    fn visit(&mut self, slot: u32, purpose: &mut Purpose) {
        match purpose {
            Purpose::Review => self.review(slot),
            Purpose::Weigh(waiting) => {
                let connection = self.slots.get(slot as usize).and_then(Option::as_deref);
                if let Some(connection) = connection.filter(|connection| connection.blocked_ms.is_some()) {
                    waiting.add(connection.outbox.bytes());
                }
            }
            Purpose::Survey(survey) => {
                let Some(Some(connection)) = self.slots.get(slot as usize) else { return };
                let Stage::Open(open) = &connection.stage else { return };
                if survey.visit(open) {
                    self.with_session(slot, |session, _, out| {
                        session.fail("closed by the account", code::CAPABILITY, close::CAPABILITY, out);
                    });
                }
            }
        }
    }

    /// Ends a connection whose credential would not be taken any more, and brings the others up to date.
    fn review(&mut self, slot: u32) {
        let auth = Arc::clone(&self.services.auth);
        self.with_session(slot, |session, _, out| match auth.review(session.principal()) {
            Some(principal) => session.renew(principal, out),
            None => session.fail("unauthorized", code::CREDENTIAL, close::CREDENTIAL, out),
        });
    }
}
