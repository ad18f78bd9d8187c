//! The client protocol of NATS, inside WebSocket frames. A request that needs an answer is followed by a PING.

use super::dialect::ReplyKind;

pub const CONNECT: &str =
    "CONNECT {\"verbose\":false,\"pedantic\":false,\"echo\":true,\"protocol\":1}\r\nPING\r\n";
const END: &[u8] = b"\r\n";

pub fn subscribe(id: u32, subject: &str) -> String {
    format!("SUB {subject} {id}\r\nPING\r\n")
}

pub fn publish(subject: &str, data: &str) -> String {
    format!("PUB {subject} {}\r\n{data}\r\n", data.len())
}

/// Splits a frame into operations, a message with its payload. A truncated operation ends the frame.
pub fn operations(mut frame: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let line_bytes = frame.windows(END.len()).position(|window| window == END)?;
        let line = &frame[..line_bytes];
        let carried = if line.starts_with(b"MSG ") { carried_bytes(line)? + END.len() } else { 0 };
        let (operation, rest) = frame.split_at_checked(line_bytes + END.len() + carried)?;
        frame = rest;
        Some(operation)
    })
}

pub fn reply_kind(operation: &[u8]) -> ReplyKind {
    if operation.starts_with(b"PONG") {
        ReplyKind::Done
    } else if operation.starts_with(b"-ERR") {
        ReplyKind::Refused
    } else {
        ReplyKind::Other
    }
}

/// Gives the size of a payload: the last word of `MSG subject sid bytes`.
fn carried_bytes(line: &[u8]) -> Option<usize> {
    let last = line.rsplit(|byte| *byte == b' ').next()?;
    std::str::from_utf8(last).ok()?.parse().ok().filter(|bytes| *bytes <= CARRIED_BYTES_MAX)
}

/// Greatest size of a message that the server allows by default. A larger size is a parse error of this reader.
const CARRIED_BYTES_MAX: usize = 1024 * 1024;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_are_cut_by_what_they_say_of_their_length() {
        let frame = b"INFO {}\r\nMSG a.b 7 6\r\nx\r\nPIN\r\nPING\r\nPONG\r\n-ERR 'no'\r\nMSG a 7 99\r\ncut";
        let found: Vec<&[u8]> = operations(frame).collect();
        let expected: [&[u8]; 5] =
            [b"INFO {}\r\n", b"MSG a.b 7 6\r\nx\r\nPIN\r\n", b"PING\r\n", b"PONG\r\n", b"-ERR 'no'\r\n"];
        assert_eq!(found, expected);
        let replies: Vec<ReplyKind> = found.into_iter().map(reply_kind).collect();
        assert_eq!(
            replies,
            [ReplyKind::Other, ReplyKind::Other, ReplyKind::Other, ReplyKind::Done, ReplyKind::Refused]
        );
    }

    #[test]
    fn a_publish_says_its_length() {
        assert_eq!(publish("a.b", "{\"x\":1}"), "PUB a.b 7\r\n{\"x\":1}\r\n");
    }
}
