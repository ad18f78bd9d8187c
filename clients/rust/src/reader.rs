//! The reading of one connection. Nothing may be read after a read of a frame was cancelled halfway.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::frame::{self, Body, Format, Incoming, MemberIn, Request, code, op};
use fastwebsockets::{Frame, OpCode, WebSocketError};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout};

use crate::driver::{Driver, End};
use crate::event::{self, Delivery, Ending, Event};
use crate::handshake::ReadHalf;
use crate::shared::FrameOwner;
use crate::writer::{LastSent, Outgoing};

/// Time beyond the node's heartbeat after which the node counts as lost.
const SILENCE_EXTRA: Duration = Duration::from_secs(10);
/// Delay before the library repeats a request that the node could not carry out at the moment.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
/// Notice below which a token that is about to end is a short one: the node asks for another half a minute
/// before the end, or at once.
const TOKEN_NOTICE: Duration = Duration::from_secs(25);
/// Reason of a nack 42900 for a limit that does not pass by itself.
const CHANNEL_LIMIT: &str = "channel_limit";

pub(crate) struct Reader<'a> {
    pub(crate) half: ReadHalf,
    pub(crate) format: Format,
    pub(crate) heartbeat_ms: u64,
    /// Epoch milliseconds of the node, and the time at which the node said so.
    pub(crate) clock: (u64, Instant),
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    pub(crate) last_sent: LastSent,
    /// Members of incomplete lists, by channel.
    pub(crate) pages: HashMap<String, Vec<MemberIn>>,
    /// End that the node has announced.
    pub(crate) last_word: Option<End>,
    /// Fetches of tokens and repeated requests, at most one for each channel and member.
    pub(crate) errands: JoinSet<()>,
    pub(crate) driver: &'a mut Driver,
}

impl Reader<'_> {
    pub(crate) async fn run(mut self) -> End {
        let ending = loop {
            let frame =
                match timeout(self.patience(), read(&mut self.half, self.format, &self.outgoing)).await {
                    Ok(Ok(frame)) => frame,
                    Ok(Err(ending)) => break ending,
                    Err(_) => break Ending::Silent,
                };
            self.answer_heartbeat();
            if let Some(frame) = frame
                && !self.take(frame).await
            {
                break Ending::Lost("nobody wants the events".into());
            }
        };
        self.last_word.unwrap_or(End { ending, not_before: None })
    }

    /// Gives the time to wait for a frame. Once the node has said when to reconnect, the wait for its close
    /// ends at that time.
    fn patience(&self) -> Duration {
        let silence = Duration::from_millis(self.heartbeat_ms) + SILENCE_EXTRA;
        let not_before = self.last_word.as_ref().and_then(|end| end.not_before);
        not_before.map_or(silence, |at| silence.min(at.saturating_duration_since(Instant::now())))
    }

    /// Handles one frame. Gives `false` if the client is dropped.
    async fn take(&mut self, mut frame: Incoming) -> bool {
        if frame.op == op::SYNC && !self.collect_page(&mut frame) {
            return true;
        }
        match frame.op {
            op::MESSAGE => return self.deliver(frame).await,
            op::ATTACHED => drop(frame.channel.as_ref().and_then(|channel| self.pages.remove(channel))),
            op::CLOSED => {
                if let Some(closed) = self.driver.closed.take() {
                    let _ = closed.send(());
                }
                return true;
            }
            op::DISCONNECTED => {
                self.disconnected(frame);
                return true;
            }
            op::ERROR if frame.channel.is_none() => {
                let (code, error) = (frame.code.unwrap_or_default(), frame.error.unwrap_or_default());
                self.last_word = Some(End { ending: Ending::Refused { code, error }, not_before: None });
                return true;
            }
            op::AUTH if self.fetch_token(frame.expires) => return true,
            op::CONNECTED => {
                self.heartbeat_ms = frame.heartbeat_ms.unwrap_or(self.heartbeat_ms);
                self.driver.dialler.connection_key.clone_from(&frame.connection_key);
                self.clock = (frame.server_time.unwrap_or_default(), Instant::now());
            }
            _ => {}
        }
        let event = match self.driver.shared.resolve(frame) {
            FrameOwner::Caller => None,
            FrameOwner::Library(body, answer) => self.settle(body, answer),
            FrameOwner::Unsolicited(frame) => event::of(frame),
        };
        match event {
            Some(event) => self.driver.events.send(event).await.is_ok(),
            None => true,
        }
    }

    /// Hands over the messages that were not handed over before, and only then moves the channel's position.
    async fn deliver(&mut self, frame: Incoming) -> bool {
        let channel = frame.channel.unwrap_or_default();
        let serial = frame.serial.unwrap_or_default();
        let mut messages = frame.messages;
        messages.retain(|message| self.driver.seen.is_new(&channel, message));
        if !messages.is_empty() {
            let delivery = Delivery { channel: channel.clone(), serial: serial.clone(), messages };
            if self.driver.events.send(Event::Messages(delivery)).await.is_err() {
                return false;
            }
        }
        self.driver.shared.delivered(&channel, &serial);
        true
    }

    fn disconnected(&mut self, frame: Incoming) {
        let _ = self.outgoing.try_send(Outgoing::Close);
        let code = frame.code.unwrap_or_default();
        let reconnect_after_ms = frame.reconnect_after_ms.unwrap_or_default();
        let ending =
            Ending::Disconnected { code, error: frame.error.unwrap_or_default(), reconnect_after_ms };
        let not_before = Some(Instant::now() + Duration::from_millis(reconnect_after_ms));
        self.last_word = Some(End { ending, not_before });
    }

    /// Handles the answer to a request of the library itself, and gives the event for the application, if
    /// there is one.
    fn settle(&mut self, body: Body, answer: Incoming) -> Option<Event> {
        if answer.op != op::NACK {
            return (answer.op == op::ATTACHED).then(|| Event::Attached(event::attached(answer)));
        }
        let (code, error) = (answer.code.unwrap_or_default(), answer.error);
        let passes = code == code::LIMIT || code >= code::INTERNAL;
        if passes && answer.reason.as_deref() != Some(CHANNEL_LIMIT) && !matches!(body, Body::Auth { .. }) {
            let shared = Arc::clone(&self.driver.shared);
            self.spawn(async move {
                sleep(AGAIN_AFTER).await;
                shared.start_own(body).await;
            });
            return None;
        }
        self.driver.shared.forget(&body);
        match body {
            Body::Attach(attach) => {
                Some(Event::Detached { channel: attach.channel, error, code: Some(code) })
            }
            Body::Presence(presence) => {
                Some(Event::Error { code, error: error.unwrap_or_default(), channel: Some(presence.channel) })
            }
            _ => Some(Event::AuthRequired { expires: None, error }),
        }
    }

    /// Starts to fetch a token from the source. Gives `false` if there is no source, so that the application
    /// has to act.
    fn fetch_token(&mut self, expires: Option<u64>) -> bool {
        let Some(source) = self.driver.dialler.credential.source().cloned() else { return false };
        let left =
            expires.map_or(Duration::ZERO, |at| Duration::from_millis(at.saturating_sub(self.server_ms())));
        // The node asks at once when a token holds for less than its usual notice; the next may be no better.
        let wait = if left < TOKEN_NOTICE { left / 2 } else { Duration::ZERO };
        let (shared, events) = (Arc::clone(&self.driver.shared), self.driver.events.clone());
        let options = Arc::clone(&self.driver.dialler.options);
        self.spawn(async move {
            sleep(wait).await;
            match source.fetch(&options).await {
                Ok(access_token) => shared.start_own(Body::Auth { access_token }).await,
                Err(error) => {
                    let error = Some(error.to_string());
                    let _ = events.send(Event::AuthRequired { expires, error }).await;
                }
            }
        });
        true
    }

    /// Gives the time by the node's clock, in epoch milliseconds.
    fn server_ms(&self) -> u64 {
        let (server_ms, at) = self.clock;
        server_ms + u64::try_from(at.elapsed().as_millis()).unwrap_or_default()
    }

    fn spawn(&mut self, errand: impl Future<Output = ()> + Send + 'static) {
        while self.errands.try_join_next().is_some() {}
        self.errands.spawn(errand);
    }

    /// Collects the pages of a list of members. Gives `false` while pages are missing; the last frame then
    /// has all members.
    fn collect_page(&mut self, frame: &mut Incoming) -> bool {
        let pages = self.pages.entry(frame.channel.clone().unwrap_or_default()).or_default();
        pages.append(&mut frame.members);
        if frame.more == Some(true) {
            return false;
        }
        frame.members = std::mem::take(pages);
        self.pages.remove(frame.channel.as_deref().unwrap_or_default());
        true
    }

    /// Sends a heartbeat if this side has sent nothing for the time of one.
    fn answer_heartbeat(&self) {
        if self.last_sent.ago_ms() >= self.heartbeat_ms {
            let request = Request { id: None, body: Body::Heartbeat };
            let bytes = frame::encode_request(&request, self.format);
            // A full queue is about to send something anyway.
            let _ = self.outgoing.try_send(Outgoing::Request(bytes));
        }
    }
}

/// Reads the next frame. Gives `None` for a WebSocket pong.
pub(crate) async fn read(
    half: &mut ReadHalf,
    format: Format,
    outgoing: &mpsc::Sender<Outgoing>,
) -> Result<Option<Incoming>, Ending> {
    let mut answer = |frame: Frame<'static>| {
        if frame.opcode == OpCode::Pong {
            let _ = outgoing.try_send(Outgoing::Pong(frame.payload.to_vec()));
        } else if frame.opcode == OpCode::Close {
            let _ = outgoing.try_send(Outgoing::Close);
        }
        std::future::ready(Ok::<(), WebSocketError>(()))
    };
    let frame = half.read_frame(&mut answer).await.map_err(|e| Ending::Lost(format!("{e}")))?;
    match frame.opcode {
        OpCode::Text | OpCode::Binary => frame::parse_server(format, &frame.payload)
            .map(Some)
            .map_err(|_| Ending::Lost("a frame that is not of the protocol".into())),
        OpCode::Close => Err(closed(&frame.payload)),
        _ => Ok(None),
    }
}

fn closed(payload: &[u8]) -> Ending {
    match payload {
        [high, low, reason @ ..] => Ending::Closed {
            code: u16::from_be_bytes([*high, *low]),
            reason: String::from_utf8_lossy(reason).into_owned(),
        },
        _ => Ending::Closed { code: 1005, reason: String::new() },
    }
}
