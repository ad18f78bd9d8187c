//! JSON frames, with one object in each line.

use crate::wire::dialect::ReplyKind;

pub const CONNECT: &str = r#"{"id":1,"connect":{}}"#;

pub fn subscribe(id: u32, channel: &str) -> String {
    format!(r#"{{"id":{id},"subscribe":{{"channel":"{channel}"}}}}"#)
}

pub fn publish(id: u32, channel: &str, data: &str) -> String {
    format!(r#"{{"id":{id},"publish":{{"channel":"{channel}","data":{data}}}}}"#)
}

/// Splits a frame into replies. The frame is checked as UTF-8 first, since text is split many times faster than bytes.
pub fn replies(frame: &[u8], mut take: impl FnMut(&[u8])) {
    String::from_utf8_lossy(frame).split('\n').for_each(|reply| take(reply.as_bytes()));
}

/// Gives the meaning of a reply, which begins with the id of its command; an error comes next.
pub fn reply_kind(reply: &[u8]) -> ReplyKind {
    let Some(after) = reply.strip_prefix(br#"{"id":"#) else { return ReplyKind::Other };
    let digits = after.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if after[digits..].starts_with(br#","error":"#) { ReplyKind::Refused } else { ReplyKind::Done }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::dialect::Dialect;

    #[test]
    fn replies_are_distinguished() {
        assert_eq!(reply_kind(br#"{"id":12,"publish":{}}"#), ReplyKind::Done);
        assert_eq!(
            reply_kind(br#"{"id":12,"error":{"code":103,"message":"permission denied"}}"#),
            ReplyKind::Refused
        );
        assert_eq!(reply_kind(br#"{"push":{"channel":"c","pub":{"data":{}}}}"#), ReplyKind::Other);
        assert_eq!(reply_kind(b"{}"), ReplyKind::Other);
    }

    #[test]
    fn a_ping_among_messages_is_found() {
        let mut pings = 0;
        let dialect = Dialect::CentrifugeJson;
        let frame = b"{\"push\":{}}\n{}\n{\"push\":{}}";
        dialect.each(frame, |payload| pings += usize::from(dialect.pong(payload).is_some()));
        assert_eq!(pings, 1);
    }
}
