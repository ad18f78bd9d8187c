//! Publishing on a socket: checks, the rate, and answers in the order of the requests.

use fanfare_proto::frame::{ServerFrame, code};

use super::lane::{Lane, Step, Waiting};
use super::{Context, Output, Session};
use crate::model::{ChannelName, Draft, DraftError, Operation, Stamp};
use crate::publish::{PublishAck, PublishError, PublishRequest};
use crate::telemetry::traces::Kind;
use crate::telemetry::{Limit, Span};

/// How a publish or presence request ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishResult {
    /// Stored as far as the channel's history asks for; one stamp per message, none for presence.
    Acked(Vec<Stamp>),
    Refused {
        code: u32,
        error: String,
        reason: Option<&'static str>,
    },
    /// The outcome is unknown.
    Unavailable,
    /// The answer was given already; what waited behind it goes on.
    Said,
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
    /// The outcome of an [`Output::Publish`] or [`Output::Present`]. A ticket that was answered before is ignored.
    pub fn answered(&mut self, cx: Context<'_>, ticket: u64, result: PublishResult, out: &mut Vec<Output>) {
        let answered = self.lanes.iter_mut().position(|(_, lane)| lane.answer(ticket, result.clone()));
        let Some(place) = answered else { return };
        let channel = self.lanes[place].0.clone();
        self.advance(cx, &channel, out);
    }

    /// A request that is answered later, with what comes after it on the channel waiting in its turn.
    pub(super) fn begin_in_lane(&mut self, channel: &ChannelName, id: Option<String>) -> u64 {
        self.in_flight += 1;
        self.begin(channel, id).0
    }

    /// The ticket of a request that begins in the channel's lane.
    pub(super) fn begin(&mut self, channel: &ChannelName, id: Option<String>) -> (u64, &mut Lane<Waiting>) {
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        let place = self.lanes.iter().position(|(name, _)| name == channel).unwrap_or_else(|| {
            self.lanes.push((channel.clone(), Lane::default()));
            self.lanes.len() - 1
        });
        let lane = &mut self.lanes[place].1;
        lane.begin(ticket, id);
        (ticket, lane)
    }

    /// Begins a publish whose turn has come; a refusal is its answer, which [`Session::advance`] gives.
    pub(super) fn publish(
        &mut self,
        cx: Context<'_>,
        channel: ChannelName,
        id: Option<String>,
        messages: Vec<Draft>,
        out: &mut Vec<Output>,
    ) {
        let refusal = self.refusal(cx, &channel, messages.len());
        let (ticket, lane) = self.begin(&channel, id);
        if let Some(refused) = refusal {
            lane.answer(ticket, refused);
            return;
        }
        lane.queued |= messages.iter().any(|draft| draft.id.is_some());
        let queued = lane.queued;
        let mut span = Span::first("publish", Kind::Producer);
        span.concerns(channel.as_str(), messages.len());
        let request = Box::new(PublishRequest {
            key: self.principal.channel(channel),
            account: self.principal.account.clone(),
            key_name: self.principal.key_name.clone(),
            connection_id: self.tenure.connection_id,
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

    /// Gives every answer whose turn has come, and runs what waited for it.
    pub(super) fn advance(&mut self, cx: Context<'_>, channel: &ChannelName, out: &mut Vec<Output>) {
        while let Some(place) = self.lanes.iter().position(|(name, _)| name == channel) {
            let lane = &mut self.lanes[place].1;
            match lane.step(Waiting::joins) {
                Step::Answer { id, result } => {
                    self.settled();
                    self.answer(id.as_deref(), result, out);
                }
                Step::Run(Waiting::Request(request)) if super::joins(&request) => {
                    self.join(cx, channel.clone(), request, None, out);
                }
                Step::Run(Waiting::Request(request)) => {
                    self.settled();
                    self.run_control(cx, channel.clone(), request, out);
                }
                Step::Run(Waiting::Refused { id, refused }) => {
                    self.settled();
                    self.answer(id.as_deref(), refused, out);
                }
                Step::Idle if lane.is_empty() => {
                    self.lanes.swap_remove(place);
                }
                Step::Idle => return,
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
            PublishResult::Said => {}
        }
    }
}
