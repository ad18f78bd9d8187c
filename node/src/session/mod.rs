//! Protocol of one connection as a state machine. Frames, answers and the time go in, outputs come out.

mod attach;
mod credential;
mod presence;
mod publish;
mod rate;
mod request_queue;
mod rewind;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use fanfare_proto::frame::{self, Body, Format, FrameError, Request, ServerFrame, close, code};

use crate::auth::{Authenticator, ConnectionKeys, Principal, RefusedCredential};
use crate::model::{ChannelName, ClientId, ConnectionId, Limits, SessionOwnership, Stamp};
use crate::publish::{PresenceRequest, PublishRequest};
use crate::telemetry::{Limit, count_nack};
use attach::Attachment;
pub use attach::{AttachOutcome, AttachReply, DeliveryStart};
pub use presence::LeaveScope;
pub use publish::PublishResult;
use rate::RateLimit;
use request_queue::{ChannelRequestQueue, WaitingRequest};
pub use rewind::Rewind;

/// Unanswered requests of one connection above which its socket is not read.
const IN_FLIGHT_MAX: u32 = 1024;
/// The same bound in bytes of frames, counted since all requests were answered.
const IN_FLIGHT_BYTES_MAX: u32 = 4 * 1024 * 1024;

/// Context that a session needs for its decisions, lent for one call.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    pub limits: &'a Limits,
    pub auth: &'a Authenticator,
    pub keys: &'a ConnectionKeys,
    pub node_id: &'a str,
    /// True if an attach may have to wait for peers.
    pub is_clustered: bool,
    pub now_ms: u64,
}

/// Action for the connection's owner; actions are performed in order.
#[derive(Debug)]
pub enum Output {
    /// An encoded payload to send.
    Frame(Vec<u8>),
    /// The answer to a ping, with the ping's bytes.
    Pong(Vec<u8>),
    /// Publish, and give the result back by [`Session::answered`].
    Publish { ticket: u64, request: Box<PublishRequest>, queued: bool },
    /// Change presence, and give the result back by [`Session::answered`].
    Present { ticket: u64, request: Box<PresenceRequest> },
    /// Members of this connection leave at once.
    Leave(LeaveScope),
    /// Count and log that a new token was refused.
    NoteRefused(RefusedCredential),
    /// Begin delivery if `delivers` (else end it), and report the outcome by [`Session::attached`]: at once, or later if the start must be
    /// searched.
    Attach { delivers: bool, begin: DeliveryStart, reply: AttachReply },
    /// End delivery.
    Detach { channel: ChannelName },
    /// Refresh what the credential grants on an attached channel; the attachment itself is unchanged.
    Recount { channel: ChannelName },
    /// Close with this code after `after_ms`; earlier frames tell the reason.
    End { code: u16, after_ms: u64 },
}

#[derive(Debug)]
pub struct Session {
    principal: Arc<Principal>,
    ownership: SessionOwnership,
    /// Forced by the credential, or chosen by the client.
    client_id: Option<ClientId>,
    format: Format,
    /// Sorted by name.
    attached: Vec<Attachment>,
    request_queues: Vec<(ChannelName, ChannelRequestQueue<WaitingRequest>)>,
    publishes: RateLimit,
    controls: RateLimit,
    next_ticket: u64,
    in_flight: u32,
    in_flight_bytes: u32,
    refresh_requested: bool,
    ended: bool,
    ended_for_good: bool,
}

impl Session {
    pub fn new(
        principal: Arc<Principal>,
        client_id: Option<ClientId>,
        ownership: SessionOwnership,
        format: Format,
    ) -> Self {
        Self {
            principal,
            ownership,
            client_id,
            format,
            attached: Vec::new(),
            request_queues: Vec::new(),
            publishes: RateLimit::default(),
            controls: RateLimit::default(),
            next_ticket: 0,
            in_flight: 0,
            in_flight_bytes: 0,
            refresh_requested: false,
            ended: false,
            ended_for_good: false,
        }
    }

    pub fn connection_id(&self) -> ConnectionId {
        self.ownership.connection_id
    }

    /// Owner of the session, by node and socket.
    pub fn ownership(&self) -> SessionOwnership {
        self.ownership
    }

    /// True if the session cannot be resumed: the client has closed it, or was refused.
    pub fn ended_for_good(&self) -> bool {
        self.ended_for_good
    }

    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    pub fn client_id(&self) -> Option<&ClientId> {
        self.client_id.as_ref()
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// True if so many answers are pending that the socket is not read.
    pub fn is_full(&self) -> bool {
        self.in_flight >= IN_FLIGHT_MAX || self.in_flight_bytes >= IN_FLIGHT_BYTES_MAX
    }

    /// True after the final frames; further input is ignored.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// True if a request of the client is not answered yet.
    pub fn has_unanswered(&self) -> bool {
        self.in_flight > 0
    }

    /// True if reading may resume: when half of the answers are given, not after each.
    pub fn can_resume_reading(&self) -> bool {
        self.in_flight <= IN_FLIGHT_MAX / 2 && self.in_flight_bytes < IN_FLIGHT_BYTES_MAX
    }

    /// The first output of every connection: op 3. `resumed` is true if the session was taken over from an earlier socket.
    pub fn opened(&mut self, cx: Context<'_>, resumed: bool, out: &mut Vec<Output>) {
        self.send_connected(cx, resumed, out);
        if resumed {
            // The new credential may grant less than the earlier one.
            out.push(Output::Leave(LeaveScope::NotGranted));
        }
        self.tick(cx, out);
    }

    /// Handles one complete message of the client; `text` tells text frames from binary ones.
    pub fn message(&mut self, cx: Context<'_>, text: bool, payload: &[u8], out: &mut Vec<Output>) {
        if self.ended {
            return;
        }
        if text != matches!(self.format, Format::Json) {
            return self.protocol_error("a frame of the other format", out);
        }
        match frame::parse_within(self.format, payload, cx.limits.nesting, cx.limits.socket_message_bytes) {
            Ok(request) => self.request(cx, request, out),
            Err(FrameError::Fatal(error)) => self.protocol_error(&error, out),
            Err(error @ FrameError::TooDeep { .. }) => {
                Limit::Nesting.hit();
                self.protocol_error(&error.to_string(), out);
            }
            Err(error @ FrameError::BadUtf8) => {
                self.fail(&error.to_string(), code::BAD_REQUEST, close::BAD_UTF8, out);
            }
            Err(error @ FrameError::TooBig { .. }) => {
                Limit::SocketMessageBytes.hit();
                self.fail(&error.to_string(), code::BAD_REQUEST, close::TOO_BIG, out);
            }
            Err(FrameError::Refused { id, error }) => {
                self.nack(id.as_deref(), code::BAD_REQUEST, &error, None, out)
            }
        }
        if self.in_flight > 0 {
            let bytes = u32::try_from(payload.len()).unwrap_or(u32::MAX);
            self.in_flight_bytes = self.in_flight_bytes.saturating_add(bytes);
        }
    }

    /// Answers a ping in order; ignored after the end.
    pub fn ping(&mut self, payload: &[u8], out: &mut Vec<Output>) {
        if !self.ended {
            out.push(Output::Pong(payload.to_vec()));
        }
    }

    /// Counts one request as answered.
    fn finish_request(&mut self) {
        self.in_flight -= 1;
        if self.in_flight == 0 {
            self.in_flight_bytes = 0;
        }
    }

    /// Sends op 7 and ends the connection for an invalid frame.
    pub fn protocol_error(&mut self, error: &str, out: &mut Vec<Output>) {
        self.fail(error, code::BAD_REQUEST, close::PROTOCOL, out);
    }

    /// Sends op 7 without a channel, which means that the client must not retry unchanged, and ends the connection.
    pub fn fail(&mut self, error: &str, code: u32, close_code: u16, out: &mut Vec<Output>) {
        if matches!(code, code::CREDENTIAL | code::CAPABILITY) {
            self.ended_for_good |= !self.ended;
            self.leave_all(out);
        }
        self.send(&ServerFrame::Error { error, code, channel: None }, out);
        self.end(close_code, 0, out);
    }

    /// Sends op 4, which asks the client to reconnect after `reconnect_after_ms`, and ends the connection.
    pub fn disconnect(
        &mut self,
        error: &str,
        code: u32,
        close_code: u16,
        reconnect_after_ms: u64,
        close_after_ms: u64,
        out: &mut Vec<Output>,
    ) {
        self.send(
            &ServerFrame::Disconnected { error: Some(error), code, reason: None, reconnect_after_ms },
            out,
        );
        self.end(close_code, close_after_ms, out);
    }

    /// Sends op 4 for a connection above its tenant's limit, and ends the connection.
    pub fn disconnect_at_ceiling(
        &mut self,
        reconnect_after_ms: u64,
        close_after_ms: u64,
        out: &mut Vec<Output>,
    ) {
        let (error, reason) = (Some("too many connections"), Some("connection_limit"));
        self.send(&ServerFrame::Disconnected { error, code: code::LIMIT, reason, reconnect_after_ms }, out);
        self.end(close::RATE, close_after_ms, out);
    }

    fn request(&mut self, cx: Context<'_>, request: Request, out: &mut Vec<Output>) {
        let id = request.id.as_deref();
        match &request.body {
            Body::Heartbeat if id.is_some() => self.send(&ServerFrame::Heartbeat { id }, out),
            Body::Heartbeat => {}
            Body::Close => {
                self.ended_for_good |= !self.ended;
                self.leave_all(out);
                self.send(&ServerFrame::Closed, out);
                self.end(close::NORMAL, 0, out);
            }
            Body::Auth { access_token } => match self.control_refusal(cx) {
                None => self.refresh(cx, id, access_token, out),
                Some(refused) => self.answer(id, refused, out),
            },
            Body::Unknown { op } => {
                self.nack(id, code::BAD_REQUEST, &format!("op {op} is unknown"), None, out)
            }
            Body::Attach(_) | Body::Detach { .. } | Body::Presence(_) => {
                let refusal = self.control_refusal(cx);
                self.channel_request(cx, request, refusal, out);
            }
            Body::Message { .. } => self.channel_request(cx, request, None, out),
        }
    }

    /// Handles a request that names a channel. It goes through the channel's queue, if there is one; a refusal too.
    fn channel_request(
        &mut self,
        cx: Context<'_>,
        request: Request,
        refusal: Option<PublishResult>,
        out: &mut Vec<Output>,
    ) {
        let channel = match ChannelName::new(channel_of(&request.body), cx.limits) {
            Ok(channel) => channel,
            Err(error) => {
                Limit::ChannelNameBytes.hit_if(error.is_too_long());
                let error = format!("channel {error}");
                return self.nack(request.id.as_deref(), code::BAD_NAME, &error, None, out);
            }
        };
        let joins = is_concurrent(&request);
        match self.request_queue(&channel) {
            Some(queue) if !joins || queue.has_waiting() => {
                queue.wait(match refusal {
                    None => WaitingRequest::Request(request),
                    Some(refused) => WaitingRequest::Refused { id: request.id, refused },
                });
                self.in_flight += 1;
            }
            _ if joins => {
                self.in_flight += 1;
                self.start_concurrent(cx, channel.clone(), request, refusal, out);
                self.advance(cx, &channel, out);
            }
            _ => match refusal {
                None => self.run_control(cx, channel, request, out),
                Some(refused) => self.answer(request.id.as_deref(), refused, out),
            },
        }
    }

    fn run_control(
        &mut self,
        cx: Context<'_>,
        channel: ChannelName,
        request: Request,
        out: &mut Vec<Output>,
    ) {
        match request.body {
            Body::Attach(attach) => self.attach(cx, channel, request.id, &attach, out),
            Body::Detach { .. } => self.detach(channel, request.id.as_deref(), out),
            _ => {}
        }
    }

    /// Begins a request that is answered later, concurrently with those of its queue that have begun.
    fn start_concurrent(
        &mut self,
        cx: Context<'_>,
        channel: ChannelName,
        request: Request,
        refusal: Option<PublishResult>,
        out: &mut Vec<Output>,
    ) {
        match request.body {
            Body::Message { messages, .. } => self.publish(cx, channel, request.id, messages, out),
            Body::Presence(presence) => self.present(cx, channel, request.id, presence, refusal, out),
            _ => {}
        }
    }

    fn leave_all(&self, out: &mut Vec<Output>) {
        if !self.ended {
            out.push(Output::Leave(LeaveScope::All));
        }
    }

    fn control_refusal(&mut self, cx: Context<'_>) -> Option<PublishResult> {
        let Limits { controls_per_second, control_burst, .. } = *cx.limits;
        let allowed = self.controls.take(1, controls_per_second, control_burst, cx.now_ms);
        (!allowed).then(|| {
            Limit::ControlsPerSecond.hit();
            PublishResult::Refused {
                code: code::LIMIT,
                error: "more attach, detach, presence and auth frames than the connection may send"
                    .to_owned(),
                reason: Some("rate_limit"),
            }
        })
    }

    fn request_queue(&mut self, channel: &ChannelName) -> Option<&mut ChannelRequestQueue<WaitingRequest>> {
        self.request_queues.iter_mut().find(|(name, _)| name == channel).map(|(_, queue)| queue)
    }

    /// Refuses a request. One without an id is dropped without an answer.
    fn nack(&self, id: Option<&str>, code: u32, error: &str, reason: Option<&str>, out: &mut Vec<Output>) {
        count_nack(code);
        if let Some(id) = id {
            self.send(&ServerFrame::Nack { id, error, code, reason }, out);
        }
    }

    fn send(&self, server_frame: &ServerFrame<'_>, out: &mut Vec<Output>) {
        if !self.ended {
            out.push(Output::Frame(frame::encode(server_frame, self.format)));
        }
    }

    fn end(&mut self, code: u16, after_ms: u64, out: &mut Vec<Output>) {
        if !self.ended {
            self.ended = true;
            out.push(Output::End { code, after_ms });
        }
    }

    fn serial_text(stamp: Stamp) -> String {
        fanfare_proto::serial::Serial::single(stamp.incarnation, stamp.sequence).to_string()
    }
}

/// True for requests that are answered later and may run concurrently with earlier ones.
fn is_concurrent(request: &Request) -> bool {
    matches!(request.body, Body::Message { .. } | Body::Presence(_))
}

fn channel_of(body: &Body) -> &str {
    match body {
        Body::Attach(attach) => &attach.channel,
        Body::Presence(presence) => &presence.channel,
        Body::Detach { channel } | Body::Message { channel, .. } => channel,
        Body::Heartbeat | Body::Close | Body::Auth { .. } | Body::Unknown { .. } => "",
    }
}
