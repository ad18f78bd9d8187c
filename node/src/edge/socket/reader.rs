//! WebSocket frames from a client: strict, bounded, and fed with whatever the socket gave.

#[cfg(test)]
mod tests;

use std::ops::ControlFlow;

use fanfare_proto::frame::close;
use fastwebsockets::{OpCode, unmask};

use crate::model::Limits;
use crate::telemetry::Limit;

/// What a client sent. Control frames may stand between the fragments of a message.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming<'a> {
    Message { text: bool, payload: &'a [u8] },
    Ping(&'a [u8]),
    Pong,
    Close,
}

/// Why the connection must end, with its close code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Broken {
    pub(super) code: u16,
    pub(super) reason: &'static str,
}

const fn protocol(reason: &'static str) -> Broken {
    Broken { code: close::PROTOCOL, reason }
}

const TOO_BIG: Broken = Broken { code: close::TOO_BIG, reason: "the message is over the limit" };
const BAD_UTF8: Broken = Broken { code: close::BAD_UTF8, reason: "the reason of a close is not UTF-8" };

/// The reading half of one connection. Keeps nothing while no message is begun.
#[derive(Debug, Default)]
pub(super) struct Reader {
    /// Bytes that are not yet taken: a frame's beginning, or what followed when the sink had enough.
    kept: Vec<u8>,
    fragments: Option<Box<Fragments>>,
    begun_ms: u64,
    /// The sink had enough, so what is kept may hold whole frames.
    stopped: bool,
}

#[derive(Debug)]
struct Fragments {
    text: bool,
    payload: Vec<u8>,
    count: usize,
}

struct Head {
    fin: bool,
    opcode: OpCode,
    mask: [u8; 4],
    head_bytes: usize,
    payload_bytes: usize,
}

impl Reader {
    /// Since when a message is begun and not finished.
    pub(super) fn begun_ms(&self) -> Option<u64> {
        (!self.kept.is_empty() || self.fragments.is_some()).then_some(self.begun_ms)
    }

    /// The time of a message that is begun counts from here.
    pub(super) fn begin_anew(&mut self, now_ms: u64) {
        self.begun_ms = now_ms;
    }

    /// The sink broke, and what is left was not looked at: to be fed nothing before more is read.
    pub(super) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Takes `bytes` and gives each whole message or control frame to `sink`, until it breaks.
    /// What is left is kept; feeding nothing goes on with it.
    pub(super) fn feed(
        &mut self,
        bytes: &mut [u8],
        limits: &Limits,
        now_ms: u64,
        mut sink: impl FnMut(Incoming<'_>) -> ControlFlow<()>,
    ) -> Result<(), Broken> {
        let idle = self.begun_ms().is_none();
        let (mut finished, mut stopped) = (false, false);
        let mut sink = |incoming: Incoming<'_>| {
            finished |= matches!(incoming, Incoming::Message { .. });
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
        if idle || finished || result.is_ok_and(|taken| taken > 0) && self.fragments.is_none() {
            self.begun_ms = now_ms;
        }
        result.map(drop)
    }

    /// Returns how many bytes are done with.
    fn frames(
        &mut self,
        bytes: &mut [u8],
        limits: &Limits,
        sink: &mut impl FnMut(Incoming<'_>) -> ControlFlow<()>,
    ) -> Result<usize, Broken> {
        let mut taken = 0;
        while let Some(head) = head(&bytes[taken..], limits)? {
            let start = taken + head.head_bytes;
            let Some(payload) = bytes.get_mut(start..start + head.payload_bytes) else { break };
            unmask(payload, head.mask);
            taken = start + head.payload_bytes;
            if self.frame(&head, payload, limits, sink)?.is_break() {
                break;
            }
        }
        Ok(taken)
    }

    fn frame(
        &mut self,
        head: &Head,
        payload: &[u8],
        limits: &Limits,
        sink: &mut impl FnMut(Incoming<'_>) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, Broken> {
        match (head.opcode, &mut self.fragments) {
            (OpCode::Ping, _) => Ok(sink(Incoming::Ping(payload))),
            (OpCode::Pong, _) => Ok(sink(Incoming::Pong)),
            (OpCode::Close, _) => check_close(payload).map(|()| sink(Incoming::Close)),
            (OpCode::Text | OpCode::Binary, Some(_)) => Err(protocol("a message began within another")),
            (OpCode::Continuation, None) => Err(protocol("a continuation of nothing")),
            (opcode @ (OpCode::Text | OpCode::Binary), None) => {
                let text = opcode == OpCode::Text;
                if head.fin {
                    return Ok(sink(Incoming::Message { text, payload }));
                }
                self.fragments = Some(Box::new(Fragments { text, payload: payload.to_vec(), count: 1 }));
                Ok(ControlFlow::Continue(()))
            }
            (OpCode::Continuation, Some(fragments)) => {
                fragments.count += 1;
                if fragments.count > limits.socket_message_fragments {
                    Limit::SocketMessageFragments.hit();
                    return Err(TOO_BIG);
                }
                if fragments.payload.len() + payload.len() > limits.socket_message_bytes {
                    Limit::SocketMessageBytes.hit();
                    return Err(TOO_BIG);
                }
                fragments.payload.extend_from_slice(payload);
                if !head.fin {
                    return Ok(ControlFlow::Continue(()));
                }
                match self.fragments.take() {
                    Some(done) => Ok(sink(Incoming::Message { text: done.text, payload: &done.payload })),
                    None => Ok(ControlFlow::Continue(())),
                }
            }
        }
    }
}

fn check_close(payload: &[u8]) -> Result<(), Broken> {
    let Some((code, reason)) = payload.split_first_chunk::<2>() else {
        return if payload.is_empty() { Ok(()) } else { Err(protocol("a close frame of one byte")) };
    };
    if !matches!(u16::from_be_bytes(*code), 1000..=1003 | 1007..=1014 | 3000..=4999) {
        return Err(protocol("a close code that may not be sent"));
    }
    std::str::from_utf8(reason).map(drop).map_err(|_| BAD_UTF8)
}

/// None when more bytes are needed. Refuses before the payload is there.
fn head(bytes: &[u8], limits: &Limits) -> Result<Option<Head>, Broken> {
    let [first, second, rest @ ..] = bytes else { return Ok(None) };
    if first & 0x70 != 0 {
        return Err(protocol("a reserved bit is set"));
    }
    if second & 0x80 == 0 {
        return Err(protocol("a client's frame is not masked"));
    }
    let fin = first & 0x80 != 0;
    let opcode = OpCode::try_from(first & 0x0f).map_err(|_| protocol("an unknown opcode"))?;
    let control = matches!(opcode, OpCode::Close | OpCode::Ping | OpCode::Pong);
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
    if control && (!fin || payload_bytes > 125) {
        return Err(protocol("a control frame is fragmented or too long"));
    }
    if payload_bytes > limits.socket_message_bytes as u64 {
        Limit::SocketMessageBytes.hit();
        return Err(TOO_BIG);
    }
    let Some(mask) = rest[length_bytes..].first_chunk::<4>() else { return Ok(None) };
    let payload_bytes = usize::try_from(payload_bytes).map_err(|_| TOO_BIG)?;
    Ok(Some(Head { fin, opcode, mask: *mask, head_bytes: 2 + length_bytes + 4, payload_bytes }))
}
