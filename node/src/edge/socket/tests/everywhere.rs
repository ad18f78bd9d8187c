//! A client that is given what several nodes stored, by a store that answers when it is told to.

use bytes::Bytes;
use fanfare_proto::serial::Serial;

use super::super::backlog::{Found, Reading};
use super::*;
use crate::hub::{Interest, Joins};
use crate::model::{Amount, ChannelName, Stamp};

/// A run of another node, and how far the client has it.
const THERE: u64 = 77;

/// There may be other nodes, and none is to be waited for.
struct Nobody;

impl Interest for Nobody {
    fn join(&self, _: &ChannelKey, _: u64, _: u64) -> Joins {
        Joins { is_done: true, unreached: Vec::new() }
    }

    fn leave(&self, _: &ChannelKey, _: u64) {}
}

struct Client<'a> {
    node: &'a Node,
    stream: TcpStream,
    text: String,
}

impl Client<'_> {
    /// Gives this answer to the question of that number until the text comes.
    fn is_answered(&mut self, ticket: u64, text: &str, found: impl Fn() -> Found) {
        self.stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
        let deadline = Instant::now() + Duration::from_secs(8);
        let mut buffer = [0; 4096];
        while !self.text.contains(text) {
            assert!(Instant::now() < deadline, "{text:?} did not come: {}", self.text);
            // It is the first one of its shard.
            for generation in 0..4 {
                let found = Box::new(found());
                self.node.shards.push_next(Input::Found { slot: 0, generation, ticket, found });
            }
            if let Ok(count) = self.stream.read(&mut buffer) {
                self.text += &String::from_utf8_lossy(&buffer[..count]);
            }
        }
    }

    fn places(&self, texts: &[&str]) -> Vec<Option<usize>> {
        texts.iter().map(|text| self.text.find(text)).collect()
    }
}

fn attach(node: &Node, has: &Serial) -> TcpStream {
    let mut stream = node.client();
    let asked = format!(r#"{{"op":8,"channel":"a","serial":"{has}"}}"#);
    stream.write_all(&frame(&asked)).unwrap();
    stream
}

/// A page of one frame with this text.
fn page(text: &'static str, has: u64, is_end: bool) -> Found {
    let frames = vec![Bytes::from([&[0x81, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat())];
    let reading = Box::new(Reading::at(Serial::single(THERE, has), Serial::single(THERE, 8)));
    Found::Read { frames, amount: Amount::default(), reading, is_end }
}

#[test]
fn publish_during_store_read_is_delivered_after_the_rows() {
    let node = Node::start();
    node.hub.set_interest(Arc::new(Nobody));
    let has = Serial::single(THERE, 5);
    let mut client = Client { node: &node, stream: attach(&node, &has), text: String::new() };
    let begin = || Found::Reading {
        reading: Box::new(Reading::at(Serial::single(THERE, 5), Serial::single(THERE, 8))),
        is_cut: false,
    };
    client.is_answered(1, "\"resumed\":true", begin);
    assert!(client.text.contains(&format!(r#""serial":"{has}""#)), "{}", client.text);
    let mut publisher = node.client();
    for text in ["early", "later"] {
        publisher.write_all(&frame(&format!(r#"{{"op":13,"channel":"a","data":"{text}"}}"#))).unwrap();
    }
    wait_until("both publishes", || node.store.0.lock().len() == 2);
    client.is_answered(2, "page one", || page("page one", 6, false));
    client.is_answered(3, "page two", || page("page two", 7, true));
    client.is_answered(0, "later", || Found::Nothing);
    let places = client.places(&["page one", "page two", "early", "later"]);
    assert!(places.iter().all(Option::is_some) && places.is_sorted(), "{}", client.text);
    for text in ["page one", "page two", "early", "later", "\"op\":9"] {
        assert_eq!(client.text.matches(text).count(), 1, "{text} in {}", client.text);
    }
    // It has what was read, and what the channel had on this node when it came.
    let last = &client.text[places[2].unwrap()..];
    assert!(last.contains(&Serial::single(THERE, 8).to_string()), "{last}");
}

#[test]
fn client_is_told_of_failed_store_read_and_gets_new_messages() {
    let node = Node::start();
    node.hub.set_interest(Arc::new(Nobody));
    let stream = attach(&node, &Serial::single(THERE, 5));
    let mut client = Client { node: &node, stream, text: String::new() };
    let begin = || Found::Reading {
        reading: Box::new(Reading::at(Serial::single(THERE, 5), Serial::single(THERE, 8))),
        is_cut: false,
    };
    client.is_answered(1, "\"resumed\":true", begin);
    client.is_answered(2, "\"resumed\":false", || Found::Nothing);
    let mut publisher = node.client();
    publisher.write_all(&frame(r#"{"op":13,"channel":"a","data":"later"}"#)).unwrap();
    client.is_answered(0, "later", || Found::Nothing);
}

#[test]
fn loss_during_attach_is_told_once_with_client_position() {
    let node = Node::start();
    node.hub.set_interest(Arc::new(Nobody));
    let has = Serial::single(THERE, 5);
    let mut client = Client { node: &node, stream: attach(&node, &has), text: String::new() };
    let key = node.principal().channel(ChannelName::of("a"));
    wait_until("the attach", || node.hub.live(&key).is_some());
    let channel = node.hub.live(&key).unwrap();
    node.shards.push_next(Input::Lose(channel.number(), Box::new(channel.mark())));
    for id in ["one", "two"] {
        client.stream.write_all(&frame(&format!(r#"{{"op":0,"id":"{id}"}}"#))).unwrap();
        client.is_answered(0, &format!(r#""{id}""#), || Found::Nothing);
    }
    assert!(!client.text.contains("resumed"), "the store is still asked: {}", client.text);
    channel.know(&[Stamp { incarnation: THERE, sequence: 5 }]);
    client.is_answered(2, "\"resumed\":false", || Found::Nothing);
    assert!(client.text.contains(&has.to_string()), "{}", client.text);
}
