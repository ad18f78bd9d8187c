//! Order of answers and effects within one channel of one connection.

use std::collections::VecDeque;

use fanfare_proto::frame::Request;

use super::PublishResult;

/// A request that waits in a channel's queue.
#[derive(Debug)]
pub(super) enum WaitingRequest {
    Request(Request),
    /// Request that is refused already, to be answered in its turn.
    Refused {
        id: Option<String>,
        refused: PublishResult,
    },
}

impl WaitingRequest {
    pub(super) fn is_concurrent(&self) -> bool {
        matches!(self, Self::Request(request) if super::is_concurrent(request))
    }
}

/// Unanswered requests of one channel, oldest first. Exists only while there are some.
#[derive(Debug)]
pub(super) struct ChannelRequestQueue<R> {
    /// Requests that have begun, then those that wait.
    slots: VecDeque<RequestSlot<R>>,
    waiting: usize,
    /// True once a publish of this queue has gone through the look-up of message ids: later ones then take the same way, to keep the order.
    pub(super) queued: bool,
}

#[derive(Debug)]
enum RequestSlot<R> {
    /// A publish or presence request that has begun; `answer` is set when its outcome is known.
    Begun { ticket: u64, id: Option<String>, answer: Option<PublishResult> },
    /// A request whose effect must wait for earlier requests.
    Waiting(R),
}

/// Next action of the queue's owner.
#[derive(Debug)]
pub(super) enum RequestStep<R> {
    Answer { id: Option<String>, result: PublishResult },
    Run(R),
    Idle,
}

impl<R> Default for ChannelRequestQueue<R> {
    fn default() -> Self {
        Self { slots: VecDeque::new(), waiting: 0, queued: false }
    }
}

impl<R> ChannelRequestQueue<R> {
    pub(super) fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// True if a request waits here that publishes must not overtake.
    pub(super) fn has_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Begins a request: a new one with none waiting before it, or the one that [`ChannelRequestQueue::step`] has just returned.
    pub(super) fn begin(&mut self, ticket: u64, id: Option<String>) {
        let index = self.slots.len() - self.waiting;
        self.slots.insert(index, RequestSlot::Begun { ticket, id, answer: None });
    }

    pub(super) fn wait(&mut self, request: R) {
        self.waiting += 1;
        self.slots.push_back(RequestSlot::Waiting(request));
    }

    /// Sets the answer of a request. False when the ticket is not in this queue, or was answered before.
    pub(super) fn answer(&mut self, ticket: u64, result: PublishResult) -> bool {
        for slot in &mut self.slots {
            if let RequestSlot::Begun { ticket: own, answer, .. } = slot
                && *own == ticket
            {
                let first = answer.is_none();
                answer.get_or_insert(result);
                return first;
            }
        }
        false
    }

    /// The next answer to send, or the next request to run: the first waiting one, when all earlier ones are answered, or already when they
    /// have begun if `may_join` allows.
    pub(super) fn step(&mut self, may_join: impl Fn(&R) -> bool) -> RequestStep<R> {
        if let Some(RequestSlot::Begun { answer: Some(_), .. }) = self.slots.front()
            && let Some(RequestSlot::Begun { id, answer: Some(result), .. }) = self.slots.pop_front()
        {
            return RequestStep::Answer { id, result };
        }
        let index = self.slots.len() - self.waiting;
        let joins =
            |slot: &RequestSlot<R>| matches!(slot, RequestSlot::Waiting(request) if may_join(request));
        if (index == 0 || self.slots.get(index).is_some_and(joins))
            && let Some(RequestSlot::Waiting(request)) = self.slots.remove(index)
        {
            self.waiting -= 1;
            return RequestStep::Run(request);
        }
        RequestStep::Idle
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answers(queue: &mut ChannelRequestQueue<&'static str>) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            match queue.step(|request| *request == "publish") {
                RequestStep::Answer { id, .. } => seen.push(id.unwrap_or_default()),
                RequestStep::Run(request) => seen.push(request.to_owned()),
                RequestStep::Idle => return seen,
            }
        }
    }

    #[test]
    fn answers_keep_the_order_of_the_requests() {
        let mut queue = ChannelRequestQueue::default();
        queue.begin(1, Some("a".into()));
        queue.begin(2, Some("b".into()));
        queue.wait("detach");
        assert!(queue.answer(2, PublishResult::Unavailable));
        assert!(!queue.answer(2, PublishResult::Unavailable), "answered once");
        assert_eq!(answers(&mut queue), Vec::<String>::new());
        assert!(queue.has_waiting());
        assert!(queue.answer(1, PublishResult::Unavailable));
        assert_eq!(answers(&mut queue), ["a", "b", "detach"]);
        assert!(queue.is_empty());
        assert!(!queue.answer(1, PublishResult::Unavailable));
    }

    #[test]
    fn waiting_requests_are_answered_in_order_after_begun_ones() {
        let mut queue = ChannelRequestQueue::default();
        queue.begin(1, Some("a".into()));
        queue.wait("publish");
        queue.wait("detach");
        queue.wait("publish");
        assert_eq!(answers(&mut queue), ["publish"]);
        queue.begin(2, Some("b".into()));
        assert!(queue.answer(2, PublishResult::Unavailable));
        assert_eq!(answers(&mut queue), Vec::<String>::new());
        assert!(queue.answer(1, PublishResult::Unavailable));
        assert_eq!(answers(&mut queue), ["a", "b", "detach", "publish"]);
    }
}
