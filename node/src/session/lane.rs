//! The order of answers and effects within one channel of one connection.

use std::collections::VecDeque;

use super::PublishResult;

/// Requests of one channel that are not answered yet, oldest first. Exists only while there are some.
#[derive(Debug)]
pub(super) struct Lane<R> {
    slots: VecDeque<Slot<R>>,
    waiting: usize,
    /// A publish of this lane passes the look-up of ids, so those behind it do too.
    pub(super) queued: bool,
}

#[derive(Debug)]
enum Slot<R> {
    /// A publish that has begun; `answer` once it is settled.
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

    pub(super) fn begin(&mut self, ticket: u64, id: Option<String>) {
        self.slots.push_back(Slot::Begun { ticket, id, answer: None });
    }

    /// The same for a request that [`Lane::step`] has just given out.
    pub(super) fn begin_first(&mut self, ticket: u64, id: Option<String>) {
        self.slots.push_front(Slot::Begun { ticket, id, answer: None });
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

    /// The next answer that may be given, or the request whose turn has come.
    pub(super) fn step(&mut self) -> Step<R> {
        match self.slots.pop_front() {
            Some(Slot::Begun { id, answer: Some(result), .. }) => Step::Answer { id, result },
            Some(Slot::Waiting(request)) => {
                self.waiting -= 1;
                Step::Run(request)
            }
            Some(begun) => {
                self.slots.push_front(begun);
                Step::Idle
            }
            None => Step::Idle,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(lane: &mut Lane<&'static str>) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            match lane.step() {
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
}
