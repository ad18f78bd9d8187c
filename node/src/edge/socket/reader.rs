//! WebSocket frames of a client: parsed strictly, with bounds, from reads of any size.

#[cfg(test)]
mod tests;

use std::ops::ControlFlow;

use fanfare_proto::frame::close;
use fastwebsockets::{OpCode, unmask};

use crate::model::Limits;
use crate::telemetry::Limit;

/// A message or control frame of a client. Control frames may come between the fragments of a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum IncomingFrame<'a> {
    Message {
        text: bool,
        payload: &'a [u8],
    },
    Ping(&'a [u8]),
    Pong,
    /// Close frame with its code, if it has one.
    Close(Option<u16>),
}

/// The reason why the connection must end, with its close code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameViolation {
    pub(super) code: u16,
    pub(super) reason: &'static str,
}

const fn protocol(reason: &'static str) -> FrameViolation {
    FrameViolation { code: close::PROTOCOL, reason }
}

const TOO_BIG: FrameViolation =
    FrameViolation { code: close::TOO_BIG, reason: "the message is over the limit" };
const BAD_UTF8: FrameViolation = FrameViolation { code: close::BAD_UTF8, reason: "text is not valid UTF-8" };
const BAD_REASON: FrameViolation =
    FrameViolation { code: close::BAD_UTF8, reason: "the reason of a close is not UTF-8" };

/// Parser of one connection's frames. Holds no memory while no message has begun.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    /// Unparsed bytes: the start of a header or control frame, or bytes that followed when the sink stopped.
    kept: Vec<u8>,
    unfinished: Option<Box<PartialMessage>>,
    begun_ms: u64,
    /// True if the sink stopped, so that `kept` may hold complete frames.
    stopped: bool,
}

/// An incomplete message.
#[derive(Debug)]
struct PartialMessage {
    text: bool,
    /// Payload so far, unmasked.
    payload: Vec<u8>,
    /// Length of the payload that was checked as UTF-8. At most the start of one character follows.
    checked: usize,
    fragments: usize,
    /// The frame whose payload is incomplete.
    frame: Option<PartialFrame>,
}

/// The part of a data frame that has not arrived yet.
#[derive(Debug, Clone, Copy)]
struct PartialFrame {
    fin: bool,
    bytes: usize,
    /// Mask, rotated so that its first byte applies to the next byte.
    mask: [u8; 4],
}

struct FrameHeader {
    fin: bool,
    opcode: OpCode,
    mask: [u8; 4],
    head_bytes: usize,
    payload_bytes: usize,
}

impl FrameReader {
    /// Time since which a message is incomplete.
    pub(super) fn begun_ms(&self) -> Option<u64> {
        (!self.kept.is_empty() || self.unfinished.is_some()).then_some(self.begun_ms)
    }

    /// Restarts the timer of an incomplete message.
    pub(super) fn restart_message_timer(&mut self, now_ms: u64) {
        self.begun_ms = now_ms;
    }

    /// True if the sink stopped and bytes are unparsed: the reader must be fed nothing before more is read.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Parses `bytes` and passes each complete message or control frame to `sink`, until the sink stops. Unparsed bytes are kept; feeding
    /// nothing continues with them.
    pub(super) fn feed(
        &mut self,
        bytes: &mut [u8],
        limits: &Limits,
        now_ms: u64,
        mut sink: impl FnMut(IncomingFrame<'_>) -> ControlFlow<()>,
    ) -> Result<(), FrameViolation> {
        let (idle, no_message) = (self.begun_ms().is_none(), self.unfinished.is_none());
        let (mut given, mut finished, mut stopped) = (false, false, false);
        let mut sink = |incoming: IncomingFrame<'_>| {
            given = true;
            finished |= matches!(incoming, IncomingFrame::Message { .. });
            let flow = sink(incoming);
            stopped = flow.is_break();
            flow
        };
        let result = if self.kept.is_empty() {
            let taken = self.frames(bytes, limits, &mut sink);
            if let Ok(taken) = taken {
                self.kept = bytes[taken..].to_vec();
            }
            taken
        } else {
            let mut kept = std::mem::take(&mut self.kept);
            kept.extend_from_slice(bytes);
            let taken = self.frames(&mut kept, limits, &mut sink);
            if let Ok(taken) = taken
                && taken < kept.len()
            {
                kept.drain(..taken);
                self.kept = kept;
            }
            taken
        };
        self.stopped = stopped && !self.kept.is_empty();
        if idle || finished || given && no_message {
            self.begun_ms = now_ms;
        }
        result.map(drop)
    }

    /// Parses frames. Returns the number of bytes that are done with.
    fn frames(
        &mut self,
        bytes: &mut [u8],
        limits: &Limits,
        sink: &mut impl FnMut(IncomingFrame<'_>) -> ControlFlow<()>,
    ) -> Result<usize, FrameViolation> {
        let mut taken = 0;
        loop {
            if let Some(unfinished) = &mut self.unfinished
                && let Some(rest) = unfinished.frame
            {
                let count = rest.bytes.min(bytes.len() - taken);
                unfinished.take(rest, &mut bytes[taken..taken + count])?;
                taken += count;
                if count < rest.bytes || self.finish(rest.fin, sink).is_break() {
                    break;
                }
                continue;
            }
            let Some(head) = head(&bytes[taken..], limits)? else { break };
            let start = taken + head.head_bytes;
            let payload = bytes.get_mut(start..start + head.payload_bytes);
            if let Some(payload) = payload
                && self.stands_alone(&head)
            {
                unmask(payload, head.mask);
                taken = start + head.payload_bytes;
                if whole(&head, payload, sink)?.is_break() {
                    break;
                }
            } else if is_control(head.opcode) {
                break;
            } else {
                self.begin(&head, limits)?;
                taken = start;
            }
        }
        Ok(taken)
    }

    /// True if the frame's payload can be passed on as it is, once complete.
    fn stands_alone(&self, head: &FrameHeader) -> bool {
        is_control(head.opcode)
            || head.fin && head.opcode != OpCode::Continuation && self.unfinished.is_none()
    }

    /// Begins a data frame, whose payload is taken as it arrives.
    fn begin(&mut self, head: &FrameHeader, limits: &Limits) -> Result<(), FrameViolation> {
        let unfinished = match (head.opcode, &mut self.unfinished) {
            (OpCode::Continuation, None) => return Err(protocol("a continuation of nothing")),
            (OpCode::Continuation, Some(unfinished)) => unfinished,
            (_, Some(_)) => return Err(protocol("a message began within another")),
            (opcode, none) => none.insert(Box::new(PartialMessage {
                text: opcode == OpCode::Text,
                payload: Vec::new(),
                checked: 0,
                fragments: 0,
                frame: None,
            })),
        };
        unfinished.fragments += 1;
        if unfinished.fragments > limits.socket_message_fragments {
            Limit::SocketMessageFragments.hit();
            return Err(TOO_BIG);
        }
        if unfinished.payload.len() + head.payload_bytes > limits.socket_message_bytes {
            Limit::SocketMessageBytes.hit();
            return Err(TOO_BIG);
        }
        unfinished.frame = Some(PartialFrame { fin: head.fin, bytes: head.payload_bytes, mask: head.mask });
        Ok(())
    }

    /// Passes the message on if the frame that is complete now was its last.
    fn finish(
        &mut self,
        fin: bool,
        sink: &mut impl FnMut(IncomingFrame<'_>) -> ControlFlow<()>,
    ) -> ControlFlow<()> {
        match self.unfinished.take_if(|_| fin) {
            Some(done) => sink(IncomingFrame::Message { text: done.text, payload: &done.payload }),
            None => ControlFlow::Continue(()),
        }
    }
}

impl PartialMessage {
    /// Takes the next bytes of the frame. Invalid UTF-8 fails at the offending byte, not at the end of the message.
    fn take(&mut self, rest: PartialFrame, bytes: &mut [u8]) -> Result<(), FrameViolation> {
        let PartialFrame { fin, bytes: left, mut mask } = rest;
        unmask(bytes, mask);
        mask.rotate_left(bytes.len() % 4);
        self.payload.extend_from_slice(bytes);
        let rest = PartialFrame { fin, bytes: left - bytes.len(), mask };
        self.frame = (rest.bytes > 0).then_some(rest);
        if !self.text {
            return Ok(());
        }
        match std::str::from_utf8(&self.payload[self.checked..]) {
            Ok(_) => self.checked = self.payload.len(),
            Err(error) if error.error_len().is_some() || fin && self.frame.is_none() => return Err(BAD_UTF8),
            Err(error) => self.checked += error.valid_up_to(),
        }
        Ok(())
    }
}

/// Passes on a control frame, or a message of a single frame.
fn whole(
    head: &FrameHeader,
    payload: &[u8],
    sink: &mut impl FnMut(IncomingFrame<'_>) -> ControlFlow<()>,
) -> Result<ControlFlow<()>, FrameViolation> {
    Ok(match head.opcode {
        OpCode::Ping => sink(IncomingFrame::Ping(payload)),
        OpCode::Pong => sink(IncomingFrame::Pong),
        OpCode::Close => sink(IncomingFrame::Close(close_code(payload)?)),
        opcode => sink(IncomingFrame::Message { text: opcode == OpCode::Text, payload }),
    })
}

const fn is_control(opcode: OpCode) -> bool {
    matches!(opcode, OpCode::Close | OpCode::Ping | OpCode::Pong)
}

fn close_code(payload: &[u8]) -> Result<Option<u16>, FrameViolation> {
    let Some((code, reason)) = payload.split_first_chunk::<2>() else {
        return if payload.is_empty() { Ok(None) } else { Err(protocol("a close frame of one byte")) };
    };
    let code = u16::from_be_bytes(*code);
    if !matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999) {
        return Err(protocol("a close code that may not be sent"));
    }
    std::str::from_utf8(reason).map(|_| Some(code)).map_err(|_| BAD_REASON)
}

/// Parses a frame header. None when more bytes are needed. Violations are found before the payload arrives.
fn head(bytes: &[u8], limits: &Limits) -> Result<Option<FrameHeader>, FrameViolation> {
    let [first, second, rest @ ..] = bytes else { return Ok(None) };
    if first & 0x70 != 0 {
        return Err(protocol("a reserved bit is set"));
    }
    if second & 0x80 == 0 {
        return Err(protocol("a client's frame is not masked"));
    }
    let fin = first & 0x80 != 0;
    let opcode = OpCode::try_from(first & 0x0f).map_err(|_| protocol("an unknown opcode"))?;
    let (payload_bytes, length_bytes) = match second & 0x7f {
        126 => match rest.first_chunk::<2>() {
            Some(length) => (u64::from(u16::from_be_bytes(*length)), 2),
            None => return Ok(None),
        },
        127 => match rest.first_chunk::<8>() {
            Some(length) => (u64::from_be_bytes(*length), 8),
            None => return Ok(None),
        },
        short => (u64::from(short), 0),
    };
    if is_control(opcode) && (!fin || payload_bytes > 125) {
        return Err(protocol("a control frame is fragmented or too long"));
    }
    // RFC 6455 §5.2: the shortest form, and the first bit of the longest is 0.
    let least = match length_bytes {
        2 => 126,
        8 => 1 << 16,
        _ => 0,
    };
    if payload_bytes < least || payload_bytes >> 63 != 0 {
        return Err(protocol("a length is not in its shortest form"));
    }
    if payload_bytes > limits.socket_message_bytes as u64 {
        Limit::SocketMessageBytes.hit();
        return Err(TOO_BIG);
    }
    let Some(mask) = rest[length_bytes..].first_chunk::<4>() else { return Ok(None) };
    let payload_bytes = usize::try_from(payload_bytes).map_err(|_| TOO_BIG)?;
    Ok(Some(FrameHeader { fin, opcode, mask: *mask, head_bytes: 2 + length_bytes + 4, payload_bytes }))
}
