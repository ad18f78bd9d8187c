//! Steps that the node takes for each publish, delivery, connection or token, as closures to repeat.

use std::hint::black_box;
use std::io;
use std::sync::Arc;

use bytes::Bytes;
use fanfare::accounts::Accounts;
use fanfare::auth::{Authenticator, NonceClaim, RevocationWrite, TokenStore};
use fanfare::hub::{
    ChannelPosition, DeliveryTarget, Flush, Hub, Inbox, MessageDelivery, PresenceDelivery, SocketOutbox,
    Subscriber, Subscribers, wire,
};
use fanfare::model::{Capability, Clock, Limits, Nonce, Operation, Revocation};
use fanfare::origin::history::{EmbeddedOptions, EmbeddedStore, HistoryStore};
use fanfare::publish::Publisher;
use fanfare_benches::link::Publishing;
use fanfare_client::sign::{self, JwtParams};
use fanfare_proto::frame::{self, Format, MessageOut};
use fanfare_proto::serial::Serial;
use fanfare_proto::token;
use serde_json::value::RawValue;

pub(crate) struct Step {
    pub(crate) name: &'static str,
    /// Prepares the step and gives the closure to repeat. The preparation is not counted.
    pub(crate) make: Box<dyn Fn() -> Box<dyn FnMut()>>,
    /// Number of times that the closure takes the step.
    pub(crate) times: u32,
}

const NOW_S: u64 = 1_800_000_000;
const SECRET: &str = "a-secret-of-forty-characters-0123456789ab";
const INCARNATION: u64 = 0x4567_89ab_cdef;

pub(crate) fn all() -> Vec<Step> {
    vec![
        step("read a publish", read_a_publish),
        step("encode a delivery", encode_a_delivery),
        step("hand a delivery to a shard", hand_to_a_shard),
        step("queue a frame and write it", queue_and_write),
        Step { times: SUBSCRIBERS, ..step("publish, of each delivery", publish_and_deliver) },
        step("match a capability", match_a_capability),
        step("verify a token", verify_a_token),
        step("sign a token request", || || drop(black_box(token::mac(SECRET.as_bytes(), black_box(SIGNED))))),
        step("join two positions", join_positions),
    ]
}

fn step<Once: FnMut() + 'static>(name: &'static str, make: impl Fn() -> Once + 'static) -> Step {
    Step { name, make: Box::new(move || Box::new(make())), times: 1 }
}

const SIGNED: &str = "app.key\n3600000\n{\"*\":[\"subscribe\"]}\n\n1800000000000\n0123456789abcdef012345\n";

/// Data of 128 bytes, as in the fan-out benchmark.
fn data() -> String {
    format!("\"{}\"", "x".repeat(126))
}

fn read_a_publish() -> impl FnMut() {
    let text = format!(r#"{{"op":13,"id":"1234","channel":"bench:fanout:000001","data":{}}}"#, data());
    let nesting = Limits::default().nesting;
    move || {
        let read = frame::parse(Format::Json, black_box(text.as_bytes()), nesting);
        drop(black_box(read.expect("a publish as a client sends it")));
    }
}

/// Encodes a delivery once for all subscribers of a format, with the WebSocket head.
fn encode_a_delivery() -> impl FnMut() {
    let data = RawValue::from_string(data()).expect("a JSON text");
    move || {
        let message = MessageOut { id: "AAAAAAAAAAA.1", name: None, data: Some(&data), extras: None };
        let encoded = wire::encoded(Format::Json, 512, |mut out| {
            let (serial, connection) = (black_box("AAAAAAAA.1"), "c_AAAAAAAAAAAAAAAAAAAAAA");
            let messages = [message].into_iter();
            let (channel, time_ms) = ("bench:fanout:000001", NOW_S * 1000);
            frame::encode_messages(channel, serial, time_ms, connection, None, messages, &mut out);
            out
        });
        drop(black_box(encoded));
    }
}

/// Hands a delivery to a shard that is awake.
fn hand_to_a_shard() -> impl FnMut() {
    let poll = mio::Poll::new().expect("a poll");
    let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).expect("a waker"));
    let inbox = Inbox::new(waker, 1 << 20);
    let mut taken = Vec::new();
    move || {
        // The poll must outlive its waker.
        let _ = &poll;
        inbox.push(black_box(1_u64), 256);
        inbox.take(&mut taken);
        taken.clear();
    }
}

/// Queues and writes a frame, as for each subscriber of a delivery.
fn queue_and_write() -> impl FnMut() {
    let shared = Bytes::from(vec![b'x'; 320]);
    let mut outbox = SocketOutbox::default();
    move || {
        outbox.push(shared.clone());
        let flushed = outbox.flush(&mut io::sink());
        assert!(matches!(flushed, Ok(Flush::Drained)), "a sink takes everything");
    }
}

/// Subscribers of a channel, as in the fan-out benchmark.
const SUBSCRIBERS: u32 = 80;

/// Publishes and writes to the sockets, as a shard that has all subscribers does.
fn publish_and_deliver() -> impl FnMut() {
    let (limits, clock) = (Limits::default(), Clock::manual(NOW_S * 1000));
    let shard = Arc::new(PolledInbox::new());
    let hub = Arc::new(Hub::new(vec![Arc::clone(&shard) as Arc<dyn DeliveryTarget>], clock.clone(), &limits));
    let folder = tempfile::tempdir().expect("a folder");
    let store = EmbeddedStore::open(folder.path(), &EmbeddedOptions::new(false, &limits), clock.clone())
        .expect("a store");
    let publisher = Publisher::new(&hub, &(Arc::new(store) as Arc<dyn HistoryStore>), &limits, None);
    let names = ["bench:fanout:000001".to_owned()];
    let publishing = Publishing::new(publisher, clock, "dev", &names, data()).expect("a principal");
    let (mut subscribers, mut taken) = (Subscribers::default(), Vec::new());
    for slot in 0..SUBSCRIBERS {
        let (channel, position) = hub.attach(publishing.channel(0), 0);
        subscribers.add(&channel, Subscriber::new(slot, position.offset));
    }
    let mut outboxes: Vec<SocketOutbox> = (0..SUBSCRIBERS).map(|_| SocketOutbox::default()).collect();
    move || {
        let _ = &folder;
        publishing.publish(0, 1, Box::new(|done| drop(done.expect("nothing is in its way"))));
        shard.inbox.take(&mut taken);
        for delivery in taken.drain(..) {
            let (mut frame, place) = (None, delivery.offset());
            for subscriber in subscribers.deliver(delivery.channel, place) {
                if subscriber.messages && place > subscriber.after_offset {
                    let frame: &Bytes = frame.get_or_insert_with(|| delivery.frame(Format::Json));
                    let outbox = &mut outboxes[subscriber.slot as usize];
                    outbox.push(frame.clone());
                    assert!(outbox.live_bytes() <= limits.outbox_bytes, "it was written before");
                }
            }
        }
        for outbox in &mut outboxes {
            assert!(!outbox.is_empty(), "each of them is delivered to");
            assert!(matches!(outbox.flush(&mut io::sink()), Ok(Flush::Drained)), "a sink takes everything");
        }
    }
}

/// Inbox of a shard that is awake.
struct PolledInbox {
    /// Poll of the inbox's waker.
    _poll: mio::Poll,
    inbox: Inbox<Arc<MessageDelivery>>,
}

impl PolledInbox {
    fn new() -> Self {
        let poll = mio::Poll::new().expect("a poll");
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).expect("a waker"));
        Self { _poll: poll, inbox: Inbox::new(waker, 1 << 20) }
    }
}

impl DeliveryTarget for PolledInbox {
    fn deliver(&self, delivery: Arc<MessageDelivery>) {
        let bytes = delivery.bytes();
        self.inbox.push(delivery, bytes);
    }

    fn deliver_presence(&self, _: Arc<PresenceDelivery>) {}

    fn lose_continuity(&self, _: u64, _: &ChannelPosition) {}

    fn congested(&self) -> bool {
        self.inbox.congested()
    }
}

fn match_a_capability() -> impl FnMut() {
    let text =
        r#"{"orders:*":["subscribe"],"chat":["publish"],"news:de:*":["subscribe"],"bench:*":["publish"]}"#;
    let capability = Capability::parse_json(text).expect("a capability");
    move || assert!(capability.allows(black_box("bench:fanout:000001"), Operation::Publish))
}

fn verify_a_token() -> impl FnMut() {
    let directory = format!(
        "[[tenants]]\nid = \"t\"\n[[tenants.accounts]]\nid = \"a\"\n[[tenants.accounts.keys]]\nname = \"key\"\n\
         secret = \"{SECRET}\"\nstatus = \"active\"\ncapability = {{ \"*\" = [\"subscribe\"] }}\n"
    );
    let accounts = Accounts::from_text(&directory).expect("a directory");
    let clock = Clock::manual(NOW_S * 1000);
    let auth = Authenticator::new(accounts, NoTokenStore, clock, &Limits::default(), true);
    let params = JwtParams {
        capability: r#"{"bench:*":["subscribe"]}"#.to_owned(),
        client_id: Some("client-1".to_owned()),
        issued_s: Some(NOW_S),
        ttl_s: 3_600,
    };
    let key = format!("{SECRET}.key").parse().expect("a key");
    let jwt = sign::jwt(&key, &params).expect("what a node takes");
    move || drop(black_box(auth.authenticate_token(black_box(&jwt)).expect("a token of the key")))
}

fn join_positions() -> impl FnMut() {
    let three = [1, 2, 3].map(|nth| (INCARNATION + nth, nth));
    let mut position = Serial::default();
    three.iter().for_each(|(incarnation, sequence)| position.advance(*incarnation, *sequence));
    let other = Serial::single(INCARNATION + 2, 100);
    move || {
        let joined = black_box(&position).join(&other);
        let read: Serial = joined.to_string().parse().expect("what was written is read");
        assert!(read.includes(&position));
    }
}

struct NoTokenStore;

impl TokenStore for NoTokenStore {
    fn claim_nonce(&self, _: Nonce) -> NonceClaim {
        Box::pin(async { Ok(true) })
    }

    fn keep_revocation(&self, _: Revocation) -> RevocationWrite {
        Box::pin(async { Ok(()) })
    }
}
