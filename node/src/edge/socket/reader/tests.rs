//! Streams of frames as well-behaved and hostile clients write them.

mod rules;
mod streams;
mod time;

use super::*;

const FIN: u8 = 0x80;
const CONTINUATION: u8 = 0;
const TEXT: u8 = 1;
const BINARY: u8 = 2;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// An owned copy of a frame from the reader.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ReceivedFrame {
    Text(Vec<u8>),
    Binary(Vec<u8>),
    Ping(Vec<u8>),
    Pong,
    Close(Option<u16>),
}

impl ReceivedFrame {
    fn of(incoming: &IncomingFrame<'_>) -> Self {
        match incoming {
            IncomingFrame::Message { text: true, payload } => Self::Text(payload.to_vec()),
            IncomingFrame::Message { text: false, payload } => Self::Binary(payload.to_vec()),
            IncomingFrame::Ping(payload) => Self::Ping(payload.to_vec()),
            IncomingFrame::Pong => Self::Pong,
            IncomingFrame::Close(code) => Self::Close(*code),
        }
    }
}

fn masked(first: u8, payload: &[u8], mask: [u8; 4]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        short @ 0..=125 => frame.push(0x80 | u8::try_from(short).unwrap()),
        middle @ 126..=0xffff => {
            frame.push(0x80 | 126);
            frame.extend_from_slice(&u16::try_from(middle).unwrap().to_be_bytes());
        }
        long => {
            frame.push(0x80 | 127);
            frame.extend_from_slice(&(long as u64).to_be_bytes());
        }
    }
    frame.extend_from_slice(&mask);
    frame.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    frame
}

fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    masked(first, payload, [0x37, 0xfa, 0x21, 0x3d])
}

fn text(payload: &str) -> Vec<u8> {
    frame(FIN | TEXT, payload.as_bytes())
}

fn feed(
    reader: &mut FrameReader,
    bytes: &[u8],
    limits: &Limits,
    now_ms: u64,
) -> (Vec<ReceivedFrame>, Result<(), FrameViolation>) {
    let mut got = Vec::new();
    let result = reader.feed(&mut bytes.to_vec(), limits, now_ms, |incoming| {
        got.push(ReceivedFrame::of(&incoming));
        ControlFlow::Continue(())
    });
    (got, result)
}

/// Feeds a whole stream at once.
fn read(bytes: &[u8], limits: &Limits) -> (Vec<ReceivedFrame>, Result<(), u16>) {
    let (got, result) = feed(&mut FrameReader::default(), bytes, limits, 0);
    (got, result.map_err(|broken| broken.code))
}
