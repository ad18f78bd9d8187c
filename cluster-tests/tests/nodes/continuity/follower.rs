//! A subscriber that keeps its position.

use std::time::Duration;

use fanfare_cluster_tests::Socket;
use serde_json::Value;

/// State of a client that follows one channel whose messages count up from 0.
pub(crate) struct Follower {
    pub(crate) channel: String,
    pub(crate) serial: Value,
    /// Next number, if no message is lost.
    pub(crate) next: Option<u64>,
}

impl Follower {
    pub(crate) fn begin(channel: &str, attached: &Value) -> Self {
        Self { channel: channel.into(), serial: attached["serial"].clone(), next: None }
    }

    /// Takes a frame: every message must follow the last one.
    pub(crate) fn take(&mut self, frame: &Value) {
        if frame["channel"] != *self.channel {
            return;
        }
        match frame["op"].as_u64() {
            Some(9) if frame["resumed"] == false => {
                self.next = None;
                self.serial = frame["serial"].clone();
            }
            Some(13) => {
                for message in frame["messages"].as_array().expect("messages") {
                    let number = message["data"].as_u64().expect("a number");
                    assert_eq!(number, self.next.unwrap_or(number), "{}: {frame}", self.channel);
                    self.next = Some(number + 1);
                }
                self.serial = frame["serial"].clone();
            }
            Some(12) => self.serial = frame["serial"].clone(),
            _ => {}
        }
    }

    /// Reads until message `last` has been received.
    pub(crate) async fn read_to(&mut self, socket: &mut Socket, last: u64) {
        while self.next != Some(last + 1) {
            let frame = socket.next_within(Duration::from_secs(20)).await;
            let seen = self.next;
            self.take(&frame.unwrap_or_else(|end| unreachable!("{end:?} after {seen:?} of {last}")));
        }
    }
}
