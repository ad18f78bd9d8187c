//! The protocol of Pusher, version 7, as Sockudo speaks it, with one event in each frame. Clients publish on private
//! channels, and subscribe to them with a signature.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

use super::dialect::ReplyKind;

/// Key of the application that the bench configures.
pub const KEY: &str = "bench-key";
pub const SECRET: &str = "bench-secret";

const PING: &[u8] = br#"{"event":"pusher:ping""#;
pub const PONG: &[u8] = br#"{"event":"pusher:pong","data":{}}"#;

pub fn path() -> String {
    format!("/app/{KEY}?protocol=7&client=bench&version=1")
}

/// Makes the signed subscription. `welcome` is the first event of the connection, with the socket id to sign.
pub fn subscribe(welcome: &[u8], channel: &str) -> String {
    let channel = private(channel);
    let signature = sign(&format!("{}:{channel}", socket_id(welcome)));
    format!(r#"{{"event":"pusher:subscribe","data":{{"channel":"{channel}","auth":"{KEY}:{signature}"}}}}"#)
}

pub fn publish(channel: &str, data: &str) -> String {
    let channel = private(channel);
    format!(r#"{{"event":"client-bench","channel":"{channel}","data":{data}}}"#)
}

pub fn is_ping(event: &[u8]) -> bool {
    event.starts_with(PING)
}

pub fn reply_kind(event: &[u8]) -> ReplyKind {
    let event = event.strip_prefix(br#"{"event":""#).unwrap_or_default();
    let name = event.split(|byte| *byte == b'"').next().unwrap_or_default();
    match name {
        b"pusher:connection_established" | b"pusher_internal:subscription_succeeded" => ReplyKind::Done,
        b"pusher:error" | b"pusher:subscription_error" => ReplyKind::Refused,
        _ => ReplyKind::Other,
    }
}

/// Gives the name of the private channel. Colons are replaced, since they have another meaning here.
fn private(channel: &str) -> String {
    format!("private-{}", channel.replace(':', "-"))
}

/// Gives the socket id, two numbers with a dot, from JSON within a string; empty if there is none.
fn socket_id(welcome: &[u8]) -> String {
    let text = String::from_utf8_lossy(welcome);
    let after = text.split_once("socket_id").map_or("", |(_, after)| after);
    let digits = after.trim_start_matches(|letter: char| !letter.is_ascii_digit());
    digits.chars().take_while(|letter| letter.is_ascii_digit() || *letter == '.').collect()
}

fn sign(text: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(SECRET.as_bytes()).expect("HMAC takes a key of any length");
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const WELCOME: &[u8] = br#"{"event":"pusher:connection_established","data":"{\"socket_id\":\"1234.5678\",\"activity_timeout\":120}"}"#;

    #[test]
    fn a_subscription_is_signed_for_its_connection() {
        assert_eq!(socket_id(WELCOME), "1234.5678");
        let signature = sign("1234.5678:private-a-b");
        assert_eq!(signature.len(), 64);
        let expected = format!(
            r#"{{"event":"pusher:subscribe","data":{{"channel":"private-a-b","auth":"bench-key:{signature}"}}}}"#
        );
        assert_eq!(subscribe(WELCOME, "a:b"), expected);
    }

    #[test]
    fn events_are_distinguished() {
        assert_eq!(reply_kind(WELCOME), ReplyKind::Done);
        assert_eq!(
            reply_kind(br#"{"event":"pusher_internal:subscription_succeeded","channel":"c"}"#),
            ReplyKind::Done
        );
        assert_eq!(reply_kind(br#"{"event":"pusher:error","data":{"code":4009}}"#), ReplyKind::Refused);
        assert_eq!(reply_kind(br#"{"event":"client-bench","channel":"c","data":{}}"#), ReplyKind::Other);
        assert!(is_ping(br#"{"event":"pusher:ping","data":{}}"#));
    }
}
