//! Frames that a peer may send: of later minor versions, of another major version, and malformed ones.

use fanfare_proto::peer::v1::frame::Kind;
use fanfare_proto::peer::{MAJOR, MINOR};
use futures_util::stream;
use prost::Message as _;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;
use tonic::{Status, Streaming};

use super::super::grpc::{self, PeerConnectionExecutor};
use super::*;

/// A peer whose frames are scripted by the test.
struct ScriptedPeer {
    frames: mpsc::Sender<v1::Frame>,
    answers: Streaming<v1::Frame>,
    _end: tokio_util::sync::DropGuard,
}

impl ScriptedPeer {
    async fn open(node: &LinkTestNode) -> Self {
        let tls = PeerTls::from_key(&key(&[SECRET])).expect("the key makes certificates");
        let socket = TcpStream::connect(node.addr).await.expect("the listener is there");
        let name = ServerName::try_from(SERVER_NAME).expect("a name");
        let socket = TlsConnector::from(tls.client).connect(name, socket).await.expect("a handshake");
        let (frames, receiver) = mpsc::channel(8);
        let end = CancellationToken::new();
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let connections = PeerConnectionExecutor { tasks, end: end.clone() };
        let sent = stream::unfold(receiver, |mut receiver: mpsc::Receiver<v1::Frame>| async move {
            Some((receiver.recv().await?, receiver))
        });
        let answers = grpc::open(socket, connections, sent).await.expect("a lane");
        Self { frames, answers, _end: end.drop_guard() }
    }

    async fn say(&mut self, kind: Kind) {
        let sent = self.frames.send(v1::Frame { kind: Some(kind) }).await;
        sent.expect("the lane is read");
    }

    async fn answer(&mut self) -> Result<Option<Kind>, Status> {
        let frame = timeout(DEADLINE, self.answers.message()).await.expect("an answer in time")?;
        Ok(frame.and_then(|frame| frame.kind))
    }

    async fn hello(&mut self, hello: v1::Hello) -> Result<Option<Kind>, Status> {
        self.say(Kind::Hello(hello)).await;
        self.answer().await
    }

    /// Sends a batch. Returns the sequence up to which the node has received.
    async fn batch(&mut self, sequence: u64, items: impl Into<Bytes>) -> Result<Option<u64>, Status> {
        self.say(Kind::Batch(v1::Batch { sequence, items: items.into() })).await;
        match self.answer().await? {
            Some(Kind::Confirm(confirm)) => Ok(Some(confirm.sequence)),
            _ => Ok(None),
        }
    }
}

fn hello() -> v1::Hello {
    v1::Hello {
        major: MAJOR,
        minor: MINOR,
        node_id: "hand".into(),
        incarnation: 9,
        next: 1,
        to: 1,
        ..Default::default()
    }
}

fn item(sequence: u64) -> Bytes {
    forward(9, "room", sequence, 3).encoded()
}

/// The encoding of nodes from before there were traces.
const UNTRACED: &str = concat!(
    "0a9b010a98010a0c0a0461636d651204726f6f6d11090000000000000018012001280532100303030303030303030303",
    "03030303033a0361646142607b226964223a226d222c2264617461223a22787878222c22636c69656e744964223a2261",
    "6461222c22636f6e6e656374696f6e4964223a22635f41774d4441774d4441774d4441774d4441774d444177222c2274",
    "696d657374616d70223a357d480a",
);

#[test]
fn an_untraced_publish_is_sent_as_before_traces() {
    let text: String = item(1).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(text, UNTRACED);
}

#[tokio::test]
async fn a_traced_publish_is_taken_whatever_its_trace_says() {
    let node = LinkTestNode::start(1).await;
    let mut hand = ScriptedPeer::open(&node).await;
    let Ok(Some(Kind::Hello(_))) = hand.hello(hello()).await else { panic!("no hello") };
    let items = [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "a=1"),
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00", ""),
        ("hush", "\u{1f600}"),
    ];
    let items = items.into_iter().zip(1..).map(|((traceparent, tracestate), sequence)| {
        let Some(v1::item::Kind::Forward(forward)) = decoded(&item(sequence)).kind else {
            panic!("no forward")
        };
        let [traceparent, tracestate] = [traceparent, tracestate].map(str::to_owned);
        let forward = v1::Forward { traceparent, tracestate, ..forward };
        encode_item(&v1::Item { kind: Some(v1::item::Kind::Forward(forward)) }).to_vec()
    });
    assert_eq!(hand.batch(1, items.flatten().collect::<Vec<_>>()).await.expect("the lane lives"), Some(1));
    assert_eq!(node.seen.borrow().sequences("room"), [1, 2, 3]);
}

fn decoded(item: &Bytes) -> v1::Item {
    let items = v1::Items::decode(item.clone()).expect("one item");
    items.items.into_iter().next().expect("one item")
}

#[tokio::test]
async fn a_later_minor_is_spoken_to_and_its_fields_are_passed_over() {
    let node = LinkTestNode::start(1).await;
    let mut hand = ScriptedPeer::open(&node).await;
    let Ok(Some(Kind::Hello(answer))) = hand.hello(v1::Hello { minor: 77, ..hello() }).await else {
        panic!("no hello")
    };
    assert_eq!((answer.major, answer.minor, answer.incarnation, answer.taken), (MAJOR, MINOR, 1, 0));
    // An unknown kind of frame and an unknown kind of item, each before a known one.
    hand.frames.send(v1::Frame { kind: None }).await.expect("the lane is read");
    let mut items = vec![0x0a, 3, 0xba, 0x06, 0];
    // An unknown field of the batch.
    items.extend([0x7a, 2, 1, 2]);
    items.extend(item(1));
    assert_eq!(hand.batch(1, items).await.expect("the lane lives"), Some(1));
    assert_eq!(node.seen.borrow().sequences("room"), [1]);
    // An unknown kind of change in a known item.
    let change = v1::PresenceDelta { action: 77, ..Default::default() };
    let change = v1::Item { kind: Some(v1::item::Kind::PresenceDelta(change)) }.encode_to_vec();
    let items = [vec![0x0a, change.len() as u8], change].concat();
    assert_eq!(hand.batch(2, items).await.expect("the lane lives"), Some(2));
    assert_eq!(node.seen.borrow().lost, [0; 0]);
    hand.say(Kind::Ping(v1::Ping { number: 5, waits_ms: None })).await;
    let pong = hand.answer().await.expect("the lane lives");
    assert_eq!(pong, Some(Kind::Pong(v1::Pong { number: 5 })));
}

#[tokio::test]
async fn another_major_is_refused_with_a_sentence() {
    let node = LinkTestNode::start(1).await;
    let mut hand = ScriptedPeer::open(&node).await;
    let refused = hand.hello(v1::Hello { major: 2, ..hello() }).await.expect_err("it is refused");
    assert_eq!(
        refused.message(),
        "nodes of version 1 and version 2 of the peer protocol do not speak to each other"
    );
}

#[tokio::test]
async fn repeated_batch_counts_once_and_a_gap_is_reported() {
    let node = LinkTestNode::start(1).await;
    let mut hand = ScriptedPeer::open(&node).await;
    hand.hello(hello()).await.expect("it is welcome");
    assert_eq!(hand.batch(1, item(1)).await.expect("the lane lives"), Some(1));
    assert_eq!(hand.batch(1, item(1)).await.expect("the lane lives"), Some(1));
    let mut again = ScriptedPeer::open(&node).await;
    let Ok(Some(Kind::Hello(answer))) = again.hello(hello()).await else { panic!("no hello") };
    assert_eq!(answer.taken, 1);
    let older = hand.batch(2, item(2)).await.expect_err("the lane is another stream's");
    assert_eq!(older.message(), "the lane was opened again");
    assert_eq!(node.seen.borrow().lost, [0; 0]);
    assert_eq!(again.batch(3, item(3)).await.expect("the lane lives"), Some(3));
    assert_eq!(node.seen.borrow().sequences("room"), [1, 3]);
    assert_eq!(node.seen.borrow().lost, [9]);
    let mut third = ScriptedPeer::open(&node).await;
    third.hello(v1::Hello { next: 9, ..hello() }).await.expect("it is welcome");
    assert_eq!(node.seen.borrow().lost, [9, 9], "also before a batch comes");
}

#[tokio::test]
async fn malformed_input_of_a_peer_is_bounded_and_harms_no_node() {
    let node = LinkTestNode::start(1).await;
    let friend = LinkTestNode::start(2).await;
    friend.link_to(&[&node]).await;

    let mut early = ScriptedPeer::open(&node).await;
    let refused = early.batch(1, item(1)).await.expect_err("it is refused");
    assert_eq!(refused.message(), "a lane begins with hello");

    let mut far = ScriptedPeer::open(&node).await;
    assert!(far.hello(v1::Hello { peer_stream: STREAMS_MAX as u32, ..hello() }).await.is_err());
    let mut own = ScriptedPeer::open(&node).await;
    assert!(own.hello(v1::Hello { incarnation: 1, ..hello() }).await.is_err(), "the node itself");

    let mut hand = ScriptedPeer::open(&node).await;
    hand.hello(hello()).await.expect("it is welcome");
    // A length of a gigabyte, no protobuf, and an empty item: each counts as lost and the batch ends there.
    let claimed = vec![0x0a, 0x80, 0x80, 0x80, 0x80, 0x04, 1, 2, 3];
    let empty = fanfare_proto::peer::encode_item(&v1::Item {
        kind: Some(v1::item::Kind::Forward(v1::Forward::default())),
    });
    for (index, items) in [claimed.into(), vec![0xff; 300].into(), empty].into_iter().enumerate() {
        let sequence = index as u64 + 1;
        assert_eq!(hand.batch(sequence, items).await.expect("the lane lives"), Some(sequence));
        assert_eq!(node.seen.borrow().lost.len(), index + 1);
    }
    let long = v1::Batch { sequence: 4, items: vec![0; FRAME_BYTES_MAX].into() };
    assert!(long.encoded_len() > FRAME_BYTES_MAX);
    hand.say(Kind::Batch(long)).await;
    let refused = hand.answer().await.expect_err("it is refused");
    assert_eq!(refused.code(), tonic::Code::OutOfRange);

    assert_eq!(node.seen.borrow().forwarded.len(), 0);
    assert_eq!(timeout(DEADLINE, friend.send(&node, "room", 1)).await, Ok(Ok(())));
}
