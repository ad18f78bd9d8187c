use crate::os;
use crate::wire::frames;
use crate::wire::websocket::{opcode, write_server};

/// A channel's subscribers, and its frames, which are as long as the node's.
#[derive(Default)]
pub(super) struct Channel {
    pub(super) subscribers: Vec<usize>,
    sequence: u64,
}

/// Incarnation as text, as a serial has it. The next constant has the form of message ids.
const INCARNATION: &str = "AAAAAAAA";
const ID_INCARNATION: &str = "AAAAAAAAAAA";
const CONNECTION_ID: &str = "c_AAAAAAAAAAAAAAAAAAAAAA";

pub(super) fn connected() -> Vec<u8> {
    encode(&format!(
        r#"{{"op":3,"connectionId":"{CONNECTION_ID}","connectionKey":"{CONNECTION_ID}","nodeId":"floor","resumed":false,"heartbeatMs":15000,"resumeWindowMs":120000,"maxMessageBytes":65536,"serverTime":{}}}"#,
        time_ms()
    ))
}

pub(super) fn heartbeat() -> Vec<u8> {
    encode(frames::HEARTBEAT)
}

impl Channel {
    pub(super) fn attached(&self, id: &str, name: &str) -> Vec<u8> {
        let serial = self.serial();
        encode(&format!(
            r#"{{"op":9,"id":"{id}","channel":"{name}","serial":"{serial}","resumed":false,"presence":false,"modes":["subscribe","publish","presence"]}}"#
        ))
    }

    /// Gives a published message its number and encodes the frame for subscribers; `None` without `data`, which must be
    /// the last field.
    pub(super) fn message(&mut self, name: &str, publish: &str) -> Option<Vec<u8>> {
        let data = publish.split_once(r#""data":"#)?.1.strip_suffix('}')?;
        self.sequence += 1;
        let (serial, sequence, time_ms) = (self.serial(), self.sequence, time_ms());
        Some(encode(&format!(
            r#"{{"op":13,"channel":"{name}","serial":"{serial}","messages":[{{"id":"{ID_INCARNATION}:{sequence}","data":{data},"connectionId":"{CONNECTION_ID}","timestamp":{time_ms}}}]}}"#
        )))
    }

    pub(super) fn ack(&self, publish: &str) -> Vec<u8> {
        let id = frames::text_field(publish, "id").unwrap_or_default();
        encode(&format!(r#"{{"op":1,"id":"{id}","serials":["{}"]}}"#, self.serial()))
    }

    fn serial(&self) -> String {
        format!("{INCARNATION}.{:x}", self.sequence)
    }
}

fn encode(text: &str) -> Vec<u8> {
    let mut frame = Vec::with_capacity(text.len() + 10);
    write_server(opcode::TEXT, text.as_bytes(), &mut frame);
    frame
}

/// Current time in epoch milliseconds, which has thirteen digits.
fn time_ms() -> u64 {
    1_700_000_000_000 + os::monotonic_ns() / 1_000_000
}

#[cfg(test)]
mod tests {
    use fanfare::model::ConnectionId;
    use fanfare_proto::frame::{MessageOut, encode_messages};
    use fanfare_proto::serial::Serial;
    use serde_json::value::RawValue;

    use super::*;

    #[test]
    fn a_message_is_as_long_as_the_nodes() {
        let data = r#"{"a":1}"#;
        let ours = Channel::default().message("room", &format!(r#"{{"op":5,"data":{data}}}"#));
        let connection = ConnectionId::random().to_string();
        let serial = Serial::single((1 << Serial::INCARNATION_BITS) - 1, 1).to_string();
        let data = RawValue::from_string(data.to_owned()).expect("JSON");
        let id = format!("{ID_INCARNATION}:1");
        let message = MessageOut { id: &id, name: None, data: Some(&data), extras: None };
        let mut text = Vec::new();
        encode_messages("room", &serial, time_ms(), &connection, None, [message].into_iter(), &mut text);
        let theirs = encode(str::from_utf8(&text).expect("text"));
        assert_eq!(ours.expect("data is the last field").len(), theirs.len());
    }
}
