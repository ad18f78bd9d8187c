//! The task that owns the reading half: reading a frame must not be cancelled halfway, so nobody else reads.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::frame::{self, Body, Format, Incoming, MemberIn, Request, op};
use fastwebsockets::{Frame, OpCode, WebSocketError};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::event::{self, Ending, Event};
use crate::handshake::ReadHalf;
use crate::pending::Pending;
use crate::writer::{LastSent, Outgoing};

/// Added to the node's heartbeat before it is taken for dead.
const SILENCE_EXTRA: Duration = Duration::from_secs(10);

pub(crate) struct Reader {
    pub(crate) half: ReadHalf,
    pub(crate) format: Format,
    pub(crate) heartbeat_ms: u64,
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    pub(crate) last_sent: LastSent,
    pub(crate) pending: Arc<Pending>,
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) closed: Option<oneshot::Sender<()>>,
    /// Pages of member lists that are not whole yet, by channel.
    pub(crate) pages: HashMap<String, Vec<MemberIn>>,
}

impl Reader {
    /// Reads to the end of the connection, which is the last event.
    pub(crate) async fn run(mut self) {
        let ending = loop {
            let silence = Duration::from_millis(self.heartbeat_ms) + SILENCE_EXTRA;
            let frame = match timeout(silence, read(&mut self.half, self.format, &self.outgoing)).await {
                Ok(Ok(frame)) => frame,
                Ok(Err(ending)) => break ending,
                Err(_) => break Ending::Silent,
            };
            self.answer_heartbeat();
            if let Some(frame) = frame
                && !self.take(frame).await
            {
                return;
            }
        };
        self.pending.end();
        // The owner may be gone, and then nobody wants to know.
        let _ = self.events.send(Event::Ended(ending)).await;
    }

    /// False when the owner is gone.
    async fn take(&mut self, mut frame: Incoming) -> bool {
        if frame.op == op::SYNC && !self.gather(&mut frame) {
            return true;
        }
        match frame.op {
            op::ATTACHED => drop(frame.channel.as_ref().and_then(|channel| self.pages.remove(channel))),
            op::CLOSED => {
                if let Some(closed) = self.closed.take() {
                    let _ = closed.send(());
                }
                return true;
            }
            op::DISCONNECTED => drop(self.outgoing.try_send(Outgoing::Close)),
            op::CONNECTED => self.heartbeat_ms = frame.heartbeat_ms.unwrap_or(self.heartbeat_ms),
            _ => {}
        }
        match self.pending.resolve(frame).and_then(event::of) {
            Some(event) => self.events.send(event).await.is_ok(),
            None => true,
        }
    }

    /// False while pages of the list are missing; then the last one has all members.
    fn gather(&mut self, frame: &mut Incoming) -> bool {
        let pages = self.pages.entry(frame.channel.clone().unwrap_or_default()).or_default();
        pages.append(&mut frame.members);
        if frame.more == Some(true) {
            return false;
        }
        frame.members = std::mem::take(pages);
        self.pages.remove(frame.channel.as_deref().unwrap_or_default());
        true
    }

    /// Tells the node that this side lives, when nothing else did for a heartbeat.
    fn answer_heartbeat(&self) {
        if self.last_sent.ago_ms() >= self.heartbeat_ms {
            let request = Request { id: None, body: Body::Heartbeat };
            let bytes = frame::encode_request(&request, self.format);
            // A full queue is about to send something anyway.
            let _ = self.outgoing.try_send(Outgoing::Request(bytes));
        }
    }
}

/// The next frame; none for a WebSocket pong.
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
