//! WebSocket framing of what the server sends: head and payload in one buffer, unmasked.

use bytes::Bytes;
use fanfare_proto::frame::Format;
use fanfare_proto::msgpack;
use fastwebsockets::{Frame, OpCode, Payload};

/// Bytes that a buffer keeps free at its start for the head.
pub const HEAD_BYTES_MAX: usize = 10;

/// A buffer with space for the head, to which the payload is appended.
pub fn payload_buffer(payload_bytes: usize) -> Vec<u8> {
    let mut buffer = Vec::with_capacity(HEAD_BYTES_MAX + payload_bytes);
    buffer.resize(HEAD_BYTES_MAX, 0);
    buffer
}

/// Writes the head before the payload, which begins after the first [`HEAD_BYTES_MAX`] bytes of `buffer`.
pub fn seal(opcode: OpCode, mut buffer: Vec<u8>) -> Bytes {
    let mut head = [0; 16];
    let head_bytes = {
        let payload = Payload::Borrowed(&buffer[HEAD_BYTES_MAX..]);
        Frame::new(true, opcode, None, payload).fmt_head(&mut head)
    };
    let start = HEAD_BYTES_MAX - head_bytes;
    buffer[start..HEAD_BYTES_MAX].copy_from_slice(&head[..head_bytes]);
    let mut bytes = Bytes::from(buffer);
    bytes::Buf::advance(&mut bytes, start);
    bytes
}

/// A complete frame around a payload.
pub fn frame(opcode: OpCode, payload: &[u8]) -> Bytes {
    let mut buffer = payload_buffer(payload.len());
    buffer.extend_from_slice(payload);
    seal(opcode, buffer)
}

/// The frame around the payload of `encode`, which gets a buffer for JSON text of about `bytes`.
pub fn encoded(format: Format, bytes: usize, encode: impl FnOnce(Vec<u8>) -> Vec<u8>) -> Bytes {
    match format {
        Format::Json => seal(OpCode::Text, encode(payload_buffer(bytes))),
        Format::MsgPack => {
            let json = encode(Vec::with_capacity(bytes));
            let json = std::str::from_utf8(&json).expect("an encoded frame is JSON text");
            frame(OpCode::Binary, &msgpack::from_json(json))
        }
    }
}

/// A close frame; `reason` is cut to what a control frame can hold.
pub fn close(code: u16, reason: &str) -> Bytes {
    let mut end = reason.len().min(123);
    while !reason.is_char_boundary(end) {
        end -= 1;
    }
    let mut payload = code.to_be_bytes().to_vec();
    payload.extend_from_slice(&reason.as_bytes()[..end]);
    frame(OpCode::Close, &payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_of_every_length_class() {
        for (length, head) in [
            (5, vec![0x81, 5]),
            (126, vec![0x81, 126, 0, 126]),
            (70_000, vec![0x81, 127, 0, 0, 0, 0, 0, 1, 17, 112]),
        ] {
            let sealed = frame(OpCode::Text, &vec![b'x'; length]);
            assert_eq!(&sealed[..head.len()], &head[..]);
            assert_eq!(sealed.len(), head.len() + length);
        }
    }

    #[test]
    fn a_long_reason_is_cut_at_a_character() {
        let sealed = close(1008, &"é".repeat(100));
        assert!(sealed.len() <= 127);
        assert!(std::str::from_utf8(&sealed[4..]).is_ok());
    }
}
