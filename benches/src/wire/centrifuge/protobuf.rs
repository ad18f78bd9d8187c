//! Protobuf frames, with each message after its length.

use crate::wire::dialect::ReplyKind;

/// Field numbers, which are the same in a command and in a reply.
const ID: u8 = 1;
const ERROR: u8 = 2;
const CONNECT: u8 = 4;
const SUBSCRIBE: u8 = 5;
const PUBLISH: u8 = 7;
const CHANNEL: u8 = 1;
const DATA: u8 = 2;

pub fn connect() -> Vec<u8> {
    command(1, CONNECT, &[])
}

pub fn subscribe(id: u32, channel: &str) -> Vec<u8> {
    command(id, SUBSCRIBE, &[(CHANNEL, channel)])
}

pub fn publish(id: u32, channel: &str, data: &str) -> Vec<u8> {
    command(id, PUBLISH, &[(CHANNEL, channel), (DATA, data)])
}

/// Splits a frame into replies; a ping is an empty one. A truncated reply ends the frame.
pub fn replies(mut frame: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let (bytes, rest) = varint(frame)?;
        let (reply, rest) = rest.split_at_checked(usize::try_from(bytes).ok()?)?;
        frame = rest;
        Some(reply)
    })
}

/// Gives the meaning of a reply, which begins with the id of its command; an error comes next.
pub fn reply_kind(reply: &[u8]) -> ReplyKind {
    match reply.strip_prefix(&[ID << 3]).and_then(varint) {
        Some((_, [tag, ..])) if *tag == ERROR << 3 | LENGTH_DELIMITED => ReplyKind::Refused,
        Some(_) => ReplyKind::Done,
        None => ReplyKind::Other,
    }
}

const LENGTH_DELIMITED: u8 = 2;

fn command(id: u32, kind: u8, fields: &[(u8, &str)]) -> Vec<u8> {
    let mut request = Vec::new();
    fields.iter().for_each(|(number, value)| write_field(*number, value.as_bytes(), &mut request));
    let mut command = vec![ID << 3];
    write_varint(id as usize, &mut command);
    write_field(kind, &request, &mut command);
    let mut framed = Vec::with_capacity(command.len() + 2);
    write_varint(command.len(), &mut framed);
    framed.extend_from_slice(&command);
    framed
}

fn write_field(number: u8, value: &[u8], out: &mut Vec<u8>) {
    out.push(number << 3 | LENGTH_DELIMITED);
    write_varint(value.len(), out);
    out.extend_from_slice(value);
}

fn write_varint(mut value: usize, out: &mut Vec<u8>) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0;
    for (at, byte) in bytes.iter().take(9).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * at);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[at + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_laid_out_as_the_definition_says() {
        assert_eq!(connect(), [4, 0x08, 1, 0x22, 0]);
        let expected = b"\x0d\x08\xac\x02\x3a\x08\x0a\x01c\x12\x03\"x\"";
        assert_eq!(publish(300, "c", "\"x\""), expected);
    }

    #[test]
    fn replies_are_split_and_distinguished() {
        let frame = b"\x04\x08\x01\x2a\x00\x00\x05\x08\x02\x12\x01x\x02\x22\x00\x09cut";
        let found: Vec<ReplyKind> = replies(frame).map(reply_kind).collect();
        assert_eq!(found, [ReplyKind::Done, ReplyKind::Other, ReplyKind::Refused, ReplyKind::Other]);
        assert!(replies(frame).nth(1).is_some_and(<[u8]>::is_empty));
    }
}
