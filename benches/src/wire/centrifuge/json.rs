//! One object a line.

use crate::wire::dialect::Said;

pub const CONNECT: &str = r#"{"id":1,"connect":{}}"#;

pub fn subscribe(id: u32, channel: &str) -> String {
    format!(r#"{{"id":{id},"subscribe":{{"channel":"{channel}"}}}}"#)
}

pub fn publish(id: u32, channel: &str, data: &str) -> String {
    format!(r#"{{"id":{id},"publish":{{"channel":"{channel}","data":{data}}}}}"#)
}

/// Text is cut many times faster than bytes are, even when it has to be checked first.
pub fn replies(frame: &[u8], mut take: impl FnMut(&[u8])) {
    String::from_utf8_lossy(frame).split('\n').for_each(|reply| take(reply.as_bytes()));
}

/// A reply begins with the id of its command, and an error is what follows next.
pub fn said(reply: &[u8]) -> Said {
    let Some(after) = reply.strip_prefix(br#"{"id":"#) else { return Said::Other };
    let digits = after.iter().take_while(|byte| byte.is_ascii_digit()).count();
    if after[digits..].starts_with(br#","error":"#) { Said::Refused } else { Said::Done }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::dialect::Dialect;

    #[test]
    fn replies_are_told_apart() {
        assert_eq!(said(br#"{"id":12,"publish":{}}"#), Said::Done);
        assert_eq!(said(br#"{"id":12,"error":{"code":103,"message":"permission denied"}}"#), Said::Refused);
        assert_eq!(said(br#"{"push":{"channel":"c","pub":{"data":{}}}}"#), Said::Other);
        assert_eq!(said(b"{}"), Said::Other);
    }

    #[test]
    fn a_ping_among_messages_is_found() {
        let mut pings = 0;
        let dialect = Dialect::CentrifugeJson;
        let frame = b"{\"push\":{}}\n{}\n{\"push\":{}}";
        dialect.each(frame, |said| pings += usize::from(dialect.pong(said).is_some()));
        assert_eq!(pings, 1);
    }
}
