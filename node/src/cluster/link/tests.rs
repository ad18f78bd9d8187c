//! Links between several nodes over real sockets of this machine.

mod bounds;
mod coalescing;
mod delivery;
mod keys;
mod relay;
mod strangers;
mod versions;

use std::collections::HashMap;
use std::sync::Weak;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::value::RawValue;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

use super::*;
use crate::cluster::ClusterKey;
use crate::cluster::inbound::{PeerAnswer, PeerSessionMessage, PresenceSyncMessage, TenantCountMessage};
use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, ForwardedMessages, ForwardedPresence,
    Message, RemoteMembersPage,
};

const DEADLINE: Duration = Duration::from_secs(60);
const SECRET: [u8; 32] = [7; 32];
/// A channel whose messages make the receiver panic.
const PANICS: &str = "panics";
const ONE_STREAM: LinkSettings =
    LinkSettings { streams: 1, queue: QueueBounds { bytes: 1 << 20, items: 1000 } };

/// Items and link events that a node received.
#[derive(Debug, Default, Clone)]
struct RecordedItems {
    forwarded: Vec<(u64, ForwardedMessages)>,
    /// Number of items in each batch.
    batches: Vec<usize>,
    lost: Vec<u64>,
    up: HashMap<u64, bool>,
    /// Number of reports that a link is down.
    downs: usize,
    /// Contiguity of each ended stream.
    ended: Vec<bool>,
    /// Peers that could not be sent to when their link was reported up.
    deaf: Vec<u64>,
}

impl RecordedItems {
    fn is_up(&self, to: u64) -> bool {
        self.up.get(&to) == Some(&true)
    }

    /// Sequences of one channel in the order of arrival.
    fn sequences(&self, channel: &str) -> Vec<u64> {
        let of_channel = self.forwarded.iter().filter(|(_, forwarded)| forwarded.key.channel() == channel);
        of_channel.map(|(_, forwarded)| forwarded.first).collect()
    }
}

struct InboundRecorder {
    seen: watch::Sender<RecordedItems>,
    links: OnceLock<Weak<GrpcPeerLinks>>,
}

impl Inbound for InboundRecorder {
    fn interest(&self, _from: &Peer, _interest: InterestMessage) {}

    fn request_received(&self, _from: &Peer, _number: u64, _request: Option<PeerRequest>) {}

    fn answer_received(&self, _from: &Peer, _number: u64, _answer: PeerAnswer) {}

    fn presence_changed(&self, _from: &Peer, _forwarded: ForwardedPresence) {}

    fn presence_members_received(&self, _from: &Peer, _number: u64, _members: RemoteMembersPage) {}

    fn presence_sync_received(&self, _from: &Peer, _said: PresenceSyncMessage) {}

    fn session_message_received(&self, _from: &Peer, _said: PeerSessionMessage) {}

    fn tenants(&self, _from: &Peer, _tenants: TenantCountMessage) {}

    fn batch_received(&self, bytes: usize) {
        self.seen.send_modify(|seen| seen.batches.push(bytes));
    }

    fn forwarded(&self, from: &Peer, forwarded: ForwardedMessages) {
        assert_ne!(forwarded.key.channel(), PANICS);
        self.seen.send_modify(|seen| seen.forwarded.push((from.incarnation, forwarded)));
    }

    fn continuity_lost(&self, from: &Peer) {
        self.seen.send_modify(|seen| seen.lost.push(from.incarnation));
    }

    fn stream_ended(&self, _from: &Peer, _stream: u32, is_contiguous: bool) {
        self.seen.send_modify(|seen| seen.ended.push(is_contiguous));
    }

    fn link(&self, to: &Peer, up: bool) {
        let links = self.links.get().and_then(Weak::upgrade);
        let is_deaf = up && links.is_some_and(|links| !links.is_up(to.incarnation));
        self.seen.send_modify(|seen| {
            seen.deaf.extend(is_deaf.then_some(to.incarnation));
            seen.up.insert(to.incarnation, up);
            seen.downs += usize::from(!up);
        });
    }
}

struct LinkTestNode {
    peer: Peer,
    addr: SocketAddr,
    links: Arc<GrpcPeerLinks>,
    seen: watch::Receiver<RecordedItems>,
}

impl LinkTestNode {
    async fn start(incarnation: u64) -> Self {
        Self::start_with(incarnation, &[SECRET], LinkSettings { streams: 2, ..LinkSettings::default() }).await
    }

    async fn start_with(incarnation: u64, secrets: &[[u8; 32]], settings: LinkSettings) -> Self {
        let tls = PeerTls::from_key(&key(secrets)).expect("the key makes certificates");
        Self::with(incarnation, tls, settings).await
    }

    async fn with(incarnation: u64, tls: PeerTls, settings: LinkSettings) -> Self {
        let (sender, seen) = watch::channel(RecordedItems::default());
        let peer = Peer { node_id: format!("node-{incarnation}").into(), incarnation };
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let recorder = Arc::new(InboundRecorder { seen: sender, links: OnceLock::new() });
        let inbound = Arc::clone(&recorder) as Arc<dyn Inbound>;
        let links = Arc::new(GrpcPeerLinks::new(peer.clone(), tls, inbound, tasks, settings));
        recorder.links.set(Arc::downgrade(&links)).expect("it is set once");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let addr = listener.local_addr().expect("bound");
        links.listen(listener);
        Self { peer, addr, links, seen }
    }

    fn at(&self, addr: SocketAddr) -> PeerAddr {
        PeerAddr { peer: self.peer.clone(), addr }
    }

    async fn link_to(&self, others: &[&Self]) {
        self.links.set_peers(others.iter().map(|other| other.at(other.addr)).collect());
        for other in others {
            self.until("the link is up", |seen| seen.is_up(other.peer.incarnation)).await;
        }
    }

    fn send(&self, to: &Self, channel: &str, sequence: u64) -> PeerAck {
        self.send_bytes(to, channel, sequence, 16)
    }

    /// Sends a message; the channel's name chooses the stream.
    fn send_bytes(&self, to: &Self, channel: &str, sequence: u64, bytes: usize) -> PeerAck {
        let forward = forward(self.peer.incarnation, channel, sequence, bytes);
        let hash = channel.bytes().map(u64::from).sum();
        self.links.send(to.peer.incarnation, hash, &forward)
    }

    async fn until(&self, what: &str, holds: impl FnMut(&RecordedItems) -> bool) -> RecordedItems {
        let mut seen = self.seen.clone();
        let reached = timeout(DEADLINE, seen.wait_for(holds)).await;
        match reached {
            Ok(seen) => seen.expect("the recorder lives as long as its node").clone(),
            Err(_) => panic!("not in time: {what}, but {} items", self.seen.borrow().forwarded.len()),
        }
    }
}

fn key(secrets: &[[u8; 32]]) -> ClusterKey {
    let lines: Vec<String> = secrets.iter().map(|secret| STANDARD.encode(secret)).collect();
    ClusterKey::parse(&lines.join("\n")).expect("one or two lines")
}

fn forward(incarnation: u64, channel: &str, sequence: u64, bytes: usize) -> PeerItem {
    let key = ChannelKey::new(AccountId::new("acme"), ChannelName::of(channel));
    let data = RawValue::from_string(format!("\"{}\"", "x".repeat(bytes))).expect("a text is JSON");
    let message =
        Message { id: "m".into(), id_given: false, sequence, name: None, data: Some(data), extras: None };
    let published = PublishedMessages::new(
        key,
        incarnation,
        5,
        ConnectionId::from_bytes([3; 16]),
        Some(ClientId::of("ada")),
        "kid".into(),
        vec![message],
    );
    PeerItem::forward(&published, None)
}
