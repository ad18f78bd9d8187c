//! The order of answers and effects within one channel of one connection.

use std::collections::VecDeque;

use fanfare_proto::frame::Request;

use super::PublishResult;

/// What waits in a lane of a session.
#[derive(Debug)]
pub(super) enum Waiting {
    Request(Request),
    /// Refused already, to be answered in its turn.
    Refused {
        id: Option<String>,
        refused: PublishResult,
    },
}

impl Waiting {
    pub(super) fn joins(&self) -> bool {
        matches!(self, Self::Request(request) if super::joins(request))
    }
}

/// Requests of one channel that are not answered yet, oldest first. Exists only while there are some.
#[derive(Debug)]
pub(super) struct Lane<R> {
    /// Those that have begun, then those that wait.
    slots: VecDeque<Slot<R>>,
    waiting: usize,
    /// A publish of this lane passes the look-up of ids, so those behind it do too.
    pub(super) queued: bool,
}

#[derive(Debug)]
enum Slot<R> {
    /// A publish or presence request that has begun; `answer` once it is settled.
    Begun { ticket: u64, id: Option<String>, answer: Option<PublishResult> },
    /// A request whose effect must wait for those before it.
    Waiting(R),
}

/// What the lane's owner does next.
#[derive(Debug)]
pub(super) enum Step<R> {
    Answer { id: Option<String>, result: PublishResult },
    Run(R),
    Idle,
}

impl<R> Default for Lane<R> {
    fn default() -> Self {
        Self { slots: VecDeque::new(), waiting: 0, queued: false }
    }
}

impl<R> Lane<R> {
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Something that must not be overtaken by a publish waits here.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// The request is a fresh one with nothing waiting before it, or the one that [`Lane::step`] has just given out.
    pub(super) fn begin(&mut self, ticket: u64, id: Option<String>) {
        let place = self.slots.len() - self.waiting;
        self.slots.insert(place, Slot::Begun { ticket, id, answer: None });
    }

    pub(super) fn wait(&mut self, request: R) {
        self.waiting += 1;
        self.slots.push_back(Slot::Waiting(request));
    }

    /// False when the ticket is not of this lane, or was answered before.
    pub(super) fn answer(&mut self, ticket: u64, result: PublishResult) -> bool {
        for slot in &mut self.slots {
            if let Slot::Begun { ticket: own, answer, .. } = slot
                && *own == ticket
            {
                let first = answer.is_none();
                answer.get_or_insert(result);
                return first;
            }
        }
        false
    }

    /// The next answer that may be given, or the request whose turn has come: the first that waits, when all before
    /// it are answered, or already when they have begun if it `may_join` them.
    pub(super) fn step(&mut self, may_join: impl Fn(&R) -> bool) -> Step<R> {
        if let Some(Slot::Begun { answer: Some(_), .. }) = self.slots.front()
            && let Some(Slot::Begun { id, answer: Some(result), .. }) = self.slots.pop_front()
        {
            return Step::Answer { id, result };
        }
        let place = self.slots.len() - self.waiting;
        let joins = |slot: &Slot<R>| matches!(slot, Slot::Waiting(request) if may_join(request));
        if (place == 0 || self.slots.get(place).is_some_and(joins))
            && let Some(Slot::Waiting(request)) = self.slots.remove(place)
        {
            self.waiting -= 1;
            return Step::Run(request);
        }
        Step::Idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(lane: &mut Lane<&'static str>) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            match lane.step(|request| *request == "publish") {
                Step::Answer { id, .. } => seen.push(id.unwrap_or_default()),
                Step::Run(request) => seen.push(request.to_owned()),
                Step::Idle => return seen,
            }
        }
    }

    #[test]
    fn answers_keep_the_order_of_the_requests() {
        let mut lane = Lane::default();
        lane.begin(1, Some("a".into()));
        lane.begin(2, Some("b".into()));
        lane.wait("detach");
        assert!(lane.answer(2, PublishResult::Unavailable));
        assert!(!lane.answer(2, PublishResult::Unavailable), "answered once");
        assert_eq!(answers(&mut lane), Vec::<String>::new());
        assert!(lane.has_waiting());
        assert!(lane.answer(1, PublishResult::Unavailable));
        assert_eq!(answers(&mut lane), ["a", "b", "detach"]);
        assert!(lane.is_empty());
        assert!(!lane.answer(1, PublishResult::Unavailable));
    }

    #[test]
    fn waiting_requests_are_answered_in_order_after_begun_ones() {
        let mut lane = Lane::default();
        lane.begin(1, Some("a".into()));
        lane.wait("publish");
        lane.wait("detach");
        lane.wait("publish");
        assert_eq!(answers(&mut lane), ["publish"]);
        lane.begin(2, Some("b".into()));
        assert!(lane.answer(2, PublishResult::Unavailable));
        assert_eq!(answers(&mut lane), Vec::<String>::new());
        assert!(lane.answer(1, PublishResult::Unavailable));
        assert_eq!(answers(&mut lane), ["a", "b", "detach", "publish"]);
    }
}
