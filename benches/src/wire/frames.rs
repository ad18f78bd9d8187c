//! Frames of Fanfare's protocol as text, and the few fields of them that the generator and the baseline read.

use super::dialect::ReplyKind;

pub mod op {
    pub const HEARTBEAT: u32 = 0;
    pub const ACK: u32 = 1;
    pub const NACK: u32 = 2;
    pub const CONNECTED: u32 = 3;
    pub const ERROR: u32 = 7;
    pub const ATTACH: u32 = 8;
    pub const ATTACHED: u32 = 9;
    pub const PRESENCE: u32 = 12;
    pub const MESSAGE: u32 = 13;
    pub const SYNC: u32 = 14;
}

pub const HEARTBEAT: &str = r#"{"op":0}"#;

pub fn attach(id: u64, channel: &str) -> String {
    format!(r#"{{"op":8,"id":"{id}","channel":"{channel}"}}"#)
}

/// Makes an `enter` or `update` under `client_id`, which needs no escapes.
pub fn presence(id: u64, channel: &str, action: &str, client_id: &str) -> String {
    format!(r#"{{"op":12,"id":"{id}","channel":"{channel}","action":"{action}","clientId":"{client_id}"}}"#)
}

/// Makes a publish of one message; `data` is JSON.
pub fn publish(id: u64, channel: &str, data: &str) -> String {
    format!(r#"{{"op":13,"id":"{id}","channel":"{channel}","data":{data}}}"#)
}

/// Makes a publish of one message with an id of its own, which needs no escapes.
pub fn publish_with_id(id: u64, channel: &str, message_id: &str, data: &str) -> String {
    format!(
        r#"{{"op":13,"id":"{id}","channel":"{channel}","messages":[{{"id":"{message_id}","data":{data}}}]}}"#
    )
}

/// Gives the op of a frame; `None` for a text that does not begin with one.
pub fn op(frame: &[u8]) -> Option<u32> {
    let rest = frame.strip_prefix(br#"{"op":"#)?;
    let digits = rest.iter().position(|byte| !byte.is_ascii_digit())?;
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

/// Gives the meaning of a frame that is no message.
pub fn reply_kind(frame: &[u8]) -> ReplyKind {
    match op(frame) {
        Some(op::CONNECTED | op::ATTACHED | op::ACK) => ReplyKind::Done,
        Some(op::NACK | op::ERROR) => ReplyKind::Refused,
        _ => ReplyKind::Other,
    }
}

/// Gives the first string field of this name, for values without escapes.
pub fn text_field<'a>(frame: &'a str, name: &str) -> Option<&'a str> {
    let after = frame.split_once(&format!(r#""{name}":""#))?.1;
    after.split_once('"').map(|(value, _)| value)
}

/// Gives the request id of a frame as a number, as the generator's clients use them.
pub fn request_id(frame: &[u8]) -> Option<u64> {
    text_field(std::str::from_utf8(frame).ok()?, "id")?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found() {
        let frame = publish(42, "bench:1", r#"{"id":"x"}"#);
        assert_eq!(op(frame.as_bytes()), Some(op::MESSAGE));
        assert_eq!(request_id(frame.as_bytes()), Some(42));
        assert_eq!(text_field(&frame, "channel"), Some("bench:1"));
        assert_eq!(text_field(&frame, "serial"), None);
        assert_eq!(op(HEARTBEAT.as_bytes()), Some(op::HEARTBEAT));
        assert_eq!(op(b"hello"), None);
    }
}
