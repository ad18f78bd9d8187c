//! Publishing on a socket: checks, the rate, and answers in the order of the requests.

use fanfare_proto::frame::{ServerFrame, code};

use super::request_queue::{ChannelRequestQueue, RequestStep, WaitingRequest};
use super::{Context, Output, Session};
use crate::model::{ChannelName, Draft, DraftError, Operation, Stamp};
use crate::publish::{PublishAck, PublishError, PublishRequest};
use crate::telemetry::traces::TraceSpanKind;
use crate::telemetry::{Limit, TraceSpan};

/// Outcome of a publish or presence request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishResult {
    /// Stored as far as the channel's history requires; one stamp per message, none for presence.
    Acked(Vec<Stamp>),
    Refused {
        code: u32,
        error: String,
        reason: Option<&'static str>,
    },
    /// Outcome unknown.
    Unavailable,
    /// Answered already; requests that waited behind it continue.
    AlreadyAnswered,
}

impl From<Result<PublishAck, PublishError>> for PublishResult {
    fn from(result: Result<PublishAck, PublishError>) -> Self {
        let refused = |code, error| Self::Refused { code, error, reason: None };
        match result {
            Ok(ack) => Self::Acked(ack.stamps),
            Err(PublishError::Unavailable) => Self::Unavailable,
            Err(error @ PublishError::Busy) => refused(code::UNAVAILABLE, error.to_string()),
            Err(PublishError::Draft(error @ (DraftError::TooLarge { .. } | DraftError::TooMany { .. }))) => {
                refused(code::TOO_LARGE, error.to_string())
            }
            Err(PublishError::Draft(error)) => refused(code::BAD_REQUEST, error.to_string()),
        }
    }
}

impl Session {
    /// Reports the outcome of an [`Output::Publish`] or [`Output::Present`]. A ticket that was answered before is ignored.
    pub fn answered(&mut self, cx: Context<'_>, ticket: u64, result: PublishResult, out: &mut Vec<Output>) {
        let answered =
            self.request_queues.iter_mut().position(|(_, queue)| queue.answer(ticket, result.clone()));
        let Some(index) = answered else { return };
        let channel = self.request_queues[index].0.clone();
        self.advance(cx, &channel, out);
    }

    /// Begins a request that is answered later; later requests of the channel wait for their turn.
    pub(super) fn begin_in_queue(&mut self, channel: &ChannelName, id: Option<String>) -> u64 {
        self.in_flight += 1;
        self.begin(channel, id).0
    }

    /// Adds a request to the channel's queue. Returns its ticket.
    pub(super) fn begin(
        &mut self,
        channel: &ChannelName,
        id: Option<String>,
    ) -> (u64, &mut ChannelRequestQueue<WaitingRequest>) {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        let index = self.request_queues.iter().position(|(name, _)| name == channel).unwrap_or_else(|| {
            self.request_queues.push((channel.clone(), ChannelRequestQueue::default()));
            self.request_queues.len() - 1
        });
        let queue = &mut self.request_queues[index].1;
        queue.begin(ticket, id);
        (ticket, queue)
    }

    /// Begins a publish whose turn has come; [`Session::advance`] sends a refusal as its answer.
    pub(super) fn publish(
        &mut self,
        cx: Context<'_>,
        channel: ChannelName,
        id: Option<String>,
        messages: Vec<Draft>,
        out: &mut Vec<Output>,
    ) {
        let refusal = self.refusal(cx, &channel, messages.len());
        let (ticket, queue) = self.begin(&channel, id);
        if let Some(refused) = refusal {
            queue.answer(ticket, refused);
            return;
        }
        queue.queued |= messages.iter().any(|draft| draft.id.is_some());
        let queued = queue.queued;
        let mut span = TraceSpan::first("publish", TraceSpanKind::Producer);
        span.concerns(channel.as_str(), messages.len());
        let request = Box::new(PublishRequest {
            key: self.principal.channel(channel),
            account: self.principal.account.clone(),
            key_name: self.principal.key_name.clone(),
            connection_id: self.ownership.connection_id,
            client_id: self.client_id.clone(),
            messages,
            span,
        });
        out.push(Output::Publish { ticket, request, queued });
    }

    fn refusal(&mut self, cx: Context<'_>, channel: &ChannelName, messages: usize) -> Option<PublishResult> {
        let refused =
            |code, error: &str, reason| PublishResult::Refused { code, error: error.to_owned(), reason };
        if !self.principal.allows(channel.as_str(), Operation::Publish) {
            return Some(refused(
                code::CAPABILITY,
                "the capability does not cover publish on this channel",
                None,
            ));
        }
        if messages == 0 {
            return Some(refused(code::BAD_REQUEST, "messages must not be empty", None));
        }
        let limits = cx.limits;
        if !self.publishes.take(messages, limits.publishes_per_second, limits.publish_burst, cx.now_ms) {
            Limit::PublishesPerSecond.hit();
            let error = "more messages than the connection may publish";
            return Some(refused(code::LIMIT, error, Some("rate_limit")));
        }
        None
    }

    /// Sends every answer whose turn has come, and runs requests that waited for it.
    pub(super) fn advance(&mut self, cx: Context<'_>, channel: &ChannelName, out: &mut Vec<Output>) {
        while let Some(index) = self.request_queues.iter().position(|(name, _)| name == channel) {
            let queue = &mut self.request_queues[index].1;
            match queue.step(WaitingRequest::is_concurrent) {
                RequestStep::Answer { id, result } => {
                    self.finish_request();
                    self.answer(id.as_deref(), result, out);
                }
                RequestStep::Run(WaitingRequest::Request(request)) if super::is_concurrent(&request) => {
                    self.start_concurrent(cx, channel.clone(), request, None, out);
                }
                RequestStep::Run(WaitingRequest::Request(request)) => {
                    self.finish_request();
                    self.run_control(cx, channel.clone(), request, out);
                }
                RequestStep::Run(WaitingRequest::Refused { id, refused }) => {
                    self.finish_request();
                    self.answer(id.as_deref(), refused, out);
                }
                RequestStep::Idle if queue.is_empty() => {
                    self.request_queues.swap_remove(index);
                }
                RequestStep::Idle => return,
            }
        }
    }

    pub(super) fn answer(&self, id: Option<&str>, result: PublishResult, out: &mut Vec<Output>) {
        let Some(id) = id else { return };
        match result {
            PublishResult::Acked(stamps) => {
                let serials: Vec<String> = stamps.into_iter().map(Self::serial_text).collect();
                let serials = Some(&*serials).filter(|serials| !serials.is_empty());
                self.send(&ServerFrame::Ack { id, serials }, out);
            }
            PublishResult::Refused { code, error, reason } => self.nack(Some(id), code, &error, reason, out),
            PublishResult::Unavailable => {
                self.nack(Some(id), code::UNAVAILABLE, &PublishError::Unavailable.to_string(), None, out);
            }
            PublishResult::AlreadyAnswered => {}
        }
    }
}
