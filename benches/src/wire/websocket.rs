//! WebSocket frames, unfragmented.

use std::fmt;
use std::ops::Range;

pub mod opcode {
    pub const TEXT: u8 = 1;
    pub const BINARY: u8 = 2;
    pub const CLOSE: u8 = 8;
    pub const PING: u8 = 9;
    pub const PONG: u8 = 10;
}

/// Position of a frame within the read bytes.
pub struct Frame {
    pub opcode: u8,
    pub mask: Option<[u8; 4]>,
    pub payload: Range<usize>,
}

/// Error for a frame that no measured server sends: a fragment, or one with a reserved bit.
#[derive(Debug, PartialEq, Eq)]
pub struct UnexpectedFrame(u8);

impl fmt::Display for UnexpectedFrame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a WebSocket frame begins with {:#04x}", self.0)
    }
}

impl std::error::Error for UnexpectedFrame {}

/// Parses the first frame of `bytes`; `None` while it is incomplete.
pub fn first_frame(bytes: &[u8]) -> Result<Option<Frame>, UnexpectedFrame> {
    let &[first, second, ref rest @ ..] = bytes else { return Ok(None) };
    if first & 0xf0 != 0x80 {
        return Err(UnexpectedFrame(first));
    }
    let (payload_bytes, mut at) = match second & 0x7f {
        126 => (rest.first_chunk().map(|length| u16::from_be_bytes(*length) as usize), 4),
        127 => (rest.first_chunk().map(|length| u64::from_be_bytes(*length) as usize), 10),
        short => (Some(short as usize), 2),
    };
    let Some(payload_bytes) = payload_bytes else { return Ok(None) };
    let mut mask = None;
    if second & 0x80 != 0 {
        let Some(key) = bytes.get(at..).and_then(<[u8]>::first_chunk) else { return Ok(None) };
        mask = Some(*key);
        at += key.len();
    }
    let payload = at..at.saturating_add(payload_bytes);
    Ok((payload.end <= bytes.len()).then_some(Frame { opcode: first & 0x0f, mask, payload }))
}

pub fn unmask(payload: &mut [u8], mask: [u8; 4]) {
    payload.iter_mut().zip(mask.iter().cycle()).for_each(|(byte, key)| *byte ^= key);
}

/// Appends a frame of a server.
pub fn write_server(opcode: u8, payload: &[u8], out: &mut Vec<u8>) {
    write_head(opcode, payload.len(), 0, out);
    out.extend_from_slice(payload);
}

/// Appends a frame of a client. The masking key is constant, which costs the server as much as a random one.
pub fn write_client(opcode: u8, payload: &[u8], out: &mut Vec<u8>) {
    const KEY: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];
    write_head(opcode, payload.len(), 0x80, out);
    out.extend_from_slice(&KEY);
    let at = out.len();
    out.extend_from_slice(payload);
    unmask(&mut out[at..], KEY);
}

fn write_head(opcode: u8, payload_bytes: usize, mask_bit: u8, out: &mut Vec<u8>) {
    out.push(0x80 | opcode);
    if payload_bytes < 126 {
        out.push(mask_bit | payload_bytes as u8);
    } else if let Ok(short) = u16::try_from(payload_bytes) {
        out.push(mask_bit | 126);
        out.extend_from_slice(&short.to_be_bytes());
    } else {
        out.push(mask_bit | 127);
        out.extend_from_slice(&(payload_bytes as u64).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_frame_is_read_whole_and_a_cut_frame_is_incomplete() {
        for bytes in [0, 1, 125, 126, 65_535, 65_536] {
            let payload = vec![b'x'; bytes];
            for write in [write_server, write_client] {
                let mut out = Vec::new();
                write(opcode::TEXT, &payload, &mut out);
                assert!(first_frame(&out[..out.len() - 1]).unwrap().is_none());
                let frame = first_frame(&out).unwrap().unwrap();
                assert_eq!(frame.payload.end, out.len());
                let mut read = out[frame.payload].to_vec();
                frame.mask.iter().for_each(|mask| unmask(&mut read, *mask));
                assert_eq!(read, payload);
            }
        }
    }

    #[test]
    fn a_fragment_is_refused() {
        assert_eq!(first_frame(&[0x01, 0x00]).err(), Some(UnexpectedFrame(0x01)));
    }
}
