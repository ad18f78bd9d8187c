//! Backfill of a client from several nodes' rows, by a store that answers when the test says so.

use bytes::Bytes;
use fanfare_proto::serial::Serial;

use super::super::backlog::{BacklogResponse, SharedStoreCursor};
use super::*;
use crate::hub::{AnnounceResult, InterestAnnouncer};
use crate::model::{Amount, ChannelName, Stamp};

/// Incarnation of a peer, whose messages the client has in part.
const THERE: u64 = 77;

/// A cluster in which other nodes may exist, and none is waited for.
struct NoPeers;

impl InterestAnnouncer for NoPeers {
    fn announce(&self, _: &ChannelKey, _: u64, _: u64) -> AnnounceResult {
        AnnounceResult { is_done: true, unreachable: Vec::new() }
    }

    fn withdraw(&self, _: &ChannelKey, _: u64) {}
}

struct SocketTestClient<'a> {
    node: &'a SocketTestNode,
    stream: TcpStream,
    text: String,
}

impl SocketTestClient<'_> {
    /// Answers the query with this ticket until the text arrives. True if it did.
    fn is_answered(&mut self, ticket: u64, text: &str, found: impl Fn() -> BacklogResponse) {
        self.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let deadline = Instant::now() + Duration::from_secs(8);
        let mut buffer = [0; 4096];
        while !self.text.contains(text) {
            assert!(Instant::now() < deadline, "{text:?} did not come: {}", self.text);
            // The connection is the first one of its shard.
            for generation in 0..4 {
                let found = Box::new(found());
                self.node.shards.push_next(Input::BacklogResponse {
                    slot: 0,
                    generation,
                    ticket,
                    response: found,
                });
            }
            if let Ok(count) = self.stream.read(&mut buffer) {
                self.text += &String::from_utf8_lossy(&buffer[..count]);
            }
        }
    }

    fn text_positions(&self, texts: &[&str]) -> Vec<Option<usize>> {
        texts.iter().map(|text| self.text.find(text)).collect()
    }
}

fn attach(node: &SocketTestNode, position: &Serial) -> TcpStream {
    let mut stream = node.client();
    let request = format!(r#"{{"op":8,"channel":"a","serial":"{position}"}}"#);
    stream.write_all(&frame(&request)).unwrap();
    stream
}

/// A page of one frame with this text.
fn page(text: &'static str, sequence: u64, is_end: bool) -> BacklogResponse {
    let frames = vec![Bytes::from([&[0x81, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat())];
    let reading = Box::new(SharedStoreCursor::at(Serial::single(THERE, sequence), Serial::single(THERE, 8)));
    BacklogResponse::SharedPage { frames, amount: Amount::default(), reading, is_end }
}

#[test]
fn publish_during_store_read_is_delivered_after_the_rows() {
    let node = SocketTestNode::start();
    node.hub.set_interest(Arc::new(NoPeers));
    let position = Serial::single(THERE, 5);
    let mut client = SocketTestClient { node: &node, stream: attach(&node, &position), text: String::new() };
    let begin = || BacklogResponse::SharedBegin {
        reading: Box::new(SharedStoreCursor::at(Serial::single(THERE, 5), Serial::single(THERE, 8))),
        is_cut: false,
    };
    client.is_answered(1, "\"resumed\":true", begin);
    assert!(client.text.contains(&format!(r#""serial":"{position}""#)), "{}", client.text);
    let mut publisher = node.client();
    for text in ["early", "later"] {
        publisher.write_all(&frame(&format!(r#"{{"op":13,"channel":"a","data":"{text}"}}"#))).unwrap();
    }
    wait_until("both publishes", || node.store.0.lock().len() == 2);
    client.is_answered(2, "page one", || page("page one", 6, false));
    client.is_answered(3, "page two", || page("page two", 7, true));
    client.is_answered(0, "later", || BacklogResponse::Nothing);
    let positions = client.text_positions(&["page one", "page two", "early", "later"]);
    assert!(positions.iter().all(Option::is_some) && positions.is_sorted(), "{}", client.text);
    for text in ["page one", "page two", "early", "later", "\"op\":9"] {
        assert_eq!(client.text.matches(text).count(), 1, "{text} in {}", client.text);
    }
    // The client has the pages, and what the channel had on this node at the attach.
    let last = &client.text[positions[2].unwrap()..];
    assert!(last.contains(&Serial::single(THERE, 8).to_string()), "{last}");
}

#[test]
fn failed_store_read_gives_resumed_false_and_new_messages() {
    let node = SocketTestNode::start();
    node.hub.set_interest(Arc::new(NoPeers));
    let stream = attach(&node, &Serial::single(THERE, 5));
    let mut client = SocketTestClient { node: &node, stream, text: String::new() };
    let begin = || BacklogResponse::SharedBegin {
        reading: Box::new(SharedStoreCursor::at(Serial::single(THERE, 5), Serial::single(THERE, 8))),
        is_cut: false,
    };
    client.is_answered(1, "\"resumed\":true", begin);
    client.is_answered(2, "\"resumed\":false", || BacklogResponse::Nothing);
    let mut publisher = node.client();
    publisher.write_all(&frame(r#"{"op":13,"channel":"a","data":"later"}"#)).unwrap();
    client.is_answered(0, "later", || BacklogResponse::Nothing);
}

#[test]
fn loss_during_attach_is_sent_once_with_client_position() {
    let node = SocketTestNode::start();
    node.hub.set_interest(Arc::new(NoPeers));
    let position = Serial::single(THERE, 5);
    let mut client = SocketTestClient { node: &node, stream: attach(&node, &position), text: String::new() };
    let key = node.principal().channel(ChannelName::of("a"));
    wait_until("the attach", || node.hub.live(&key).is_some());
    let channel = node.hub.live(&key).unwrap();
    node.shards.push_next(Input::ContinuityLost(channel.number(), Box::new(channel.position())));
    for id in ["one", "two"] {
        client.stream.write_all(&frame(&format!(r#"{{"op":0,"id":"{id}"}}"#))).unwrap();
        client.is_answered(0, &format!(r#""{id}""#), || BacklogResponse::Nothing);
    }
    assert!(!client.text.contains("resumed"), "the store is still asked: {}", client.text);
    channel.learn_sequences(&[Stamp { incarnation: THERE, sequence: 5 }]);
    client.is_answered(2, "\"resumed\":false", || BacklogResponse::Nothing);
    assert!(client.text.contains(&position.to_string()), "{}", client.text);
}
