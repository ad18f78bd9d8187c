//! One shard on its thread, with real sockets and a store that answers when the test says so.

mod cluster_backfill;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Instant;

use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use parking_lot::Mutex;

use super::connection::{ConnectionStage, OpenSocket, SocketConnection};
use super::session_registry::ResumableSession;
use super::*;
use crate::accounts::{Account, Accounts, QuotaSlot};
use crate::auth::{ConnectionKeys, Credentials, Principal};
use crate::hub::wire;
use crate::model::{ConnectionId, PresenceEvent, PublishedMessages, SessionLocation, SessionOwnership};
use crate::origin::history::{IdLookupCallback, IdScope, StoreCallback};
use crate::testing::{DirectoryText, FakeStore, NoTokenStore};

const CEILING: usize = 100;

const UPGRADE: &str = "GET /realtime?key=secret-of-all.all HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\n\
     upgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";

/// Store that keeps its callbacks until the test runs them.
#[derive(Default)]
struct DeferredStore(Mutex<Vec<StoreCallback>>);

impl FakeStore for DeferredStore {
    fn append(&self, _: Arc<PublishedMessages>, _: Option<u32>, done: StoreCallback) {
        self.0.lock().push(done);
    }

    fn append_presence(&self, _: Arc<PresenceEvent>, _: Option<u32>, done: StoreCallback) {
        self.0.lock().push(done);
    }

    fn find_ids(&self, _: IdScope, ids: Vec<Box<str>>, found: IdLookupCallback) {
        found(Ok(vec![None; ids.len()]));
    }
}

fn session_registry(incarnation: u64, shards: &Shards, clock: &Clock, limits: &Limits) -> SessionRegistry {
    let keys = ConnectionKeys::new(&[1; 32]);
    SessionRegistry::new(keys, incarnation, vec![(2, 0)], shards.handles(), clock.clone(), limits)
}

pub(super) struct SocketTestNode {
    listener: TcpListener,
    shards: Arc<Shards>,
    store: Arc<DeferredStore>,
    open: Arc<AtomicUsize>,
    auth: Arc<Authenticator>,
    limits: Limits,
    hub: Arc<Hub>,
    connections: Arc<TenantConnections>,
    session_registry: Arc<SessionRegistry>,
    /// Reader that is never run, so that backlog queries stay unanswered.
    _reader: BacklogReader,
}

impl SocketTestNode {
    fn start() -> Self {
        Self::run(Self::at_rest())
    }

    fn run((node, shards): (Self, Vec<Shard>)) -> Self {
        for shard in shards {
            std::thread::spawn(move || shard.run(true));
        }
        node
    }

    /// A node whose shards do not run.
    pub(super) fn at_rest() -> (Self, Vec<Shard>) {
        Self::within(Limits::default())
    }

    /// A node whose shards do not run, with these limits.
    fn within(limits: Limits) -> (Self, Vec<Shard>) {
        let limits = Limits { publishes_per_second: 0, ..limits };
        let (shards, polls) = Shards::prepare(1).unwrap();
        let clock = Clock::system();
        let hub = Arc::new(Hub::new(shards.targets(), clock.clone(), &limits));
        let session_registry = Arc::new(session_registry(hub.incarnation(), &shards, &clock, &limits));
        let store = Arc::new(DeferredStore::default());
        let ceiling = format!("connection_limit = {CEILING}");
        let directory = DirectoryText::default()
            .account_in("acme", &ceiling)
            .key("all", r#"{ "*" = ["subscribe", "publish"] }"#);
        let accounts = Accounts::from_text(directory.text()).unwrap();
        let auth =
            Arc::new(Authenticator::new(Arc::clone(&accounts), NoTokenStore, clock.clone(), &limits, true));
        let publisher = Publisher::new(&hub, &(Arc::clone(&store) as _), &limits, None);
        let (backlog, reader) = Backlog::new(&publisher, &accounts, &clock, &[], &limits);
        let connections = Arc::new(TenantConnections::default());
        let services = ShardServices {
            publisher,
            backlog,
            hub: Arc::clone(&hub),
            auth: Arc::clone(&auth),
            connections: Arc::clone(&connections),
            session_registry: Arc::clone(&session_registry),
            limits: limits.clone(),
            files: Arc::new(ClientFiles::within(1 << 20, &limits)),
            proxies: Arc::default(),
            clock,
            node_id: "node-1".into(),
            http: mpsc::channel(1).0,
        };
        let make = |(index, poll)| Shard::new(index, shards.handle(index), poll, services.clone());
        let ready = polls.into_iter().enumerate().map(make).collect();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (shards, open) = (Arc::new(shards), Arc::default());
        let node = Self {
            listener,
            shards,
            store,
            open,
            auth,
            limits,
            hub,
            connections,
            session_registry,
            _reader: reader,
        };
        (node, ready)
    }

    pub(super) fn permit(&self) -> ConnectionPermit {
        ConnectionPermit::take(&self.open)
    }

    pub(super) fn pair(&self) -> (TcpStream, TcpStream) {
        let client = TcpStream::connect(self.listener.local_addr().unwrap()).unwrap();
        let (server, _) = self.listener.accept().unwrap();
        server.set_nonblocking(true).unwrap();
        client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        (client, server)
    }

    /// A client whose socket is open: the answer to its upgrade and op 3 are read.
    fn client(&self) -> TcpStream {
        let mut client = self.silent_client();
        client.write_all(UPGRADE.as_bytes()).unwrap();
        read_until(&mut client, "serverTime");
        client
    }

    /// A client that has received nothing yet.
    fn silent_client(&self) -> TcpStream {
        let (client, server) = self.pair();
        self.shards.push_next(Input::Accept(ClientLink::plain(server), ConnectionPermit::take(&self.open)));
        client
    }

    /// A client whose upgrade came through the HTTP side.
    fn adopted(&self, principal: &Arc<Principal>) -> TcpStream {
        let quota_slot = TenantConnections::default().admit(&Account::plain("acme")).unwrap();
        self.adopted_from(principal, quota_slot, None)
    }

    fn adopted_from(
        &self,
        principal: &Arc<Principal>,
        quota_slot: QuotaSlot,
        resumable: Option<ResumableSession>,
    ) -> TcpStream {
        let (client, server) = self.pair();
        let opening = Box::new(Self::opening(principal, quota_slot, resumable));
        let permit = ConnectionPermit::take(&self.open);
        self.shards.push_next(Input::Adopt {
            link: ClientLink::plain(server),
            permit,
            read: Vec::new(),
            opening,
        });
        client
    }

    pub(super) fn opening(
        principal: &Arc<Principal>,
        quota_slot: QuotaSlot,
        resumable: Option<ResumableSession>,
    ) -> AdmittedConnection {
        AdmittedConnection {
            principal: Arc::clone(principal),
            client_id: None,
            format: Format::Json,
            echo: true,
            heartbeat_pings: false,
            quota_slot,
            socket_permit: ConnectionPermit::take(&Arc::default()),
            transport: ClientTransport::WebSocket,
            resumable,
        }
    }

    /// All quota slots of an account.
    pub(super) fn all_quota_slots(&self, account: &Account) -> Vec<QuotaSlot> {
        let take = || self.connections.admit(account).expect("below the ceiling");
        std::iter::repeat_with(take).take(CEILING).collect()
    }

    /// A session of an earlier incarnation that had an open socket when it was looked up, and has none now.
    pub(super) fn resumable_without_socket(&self, principal: &Principal) -> ResumableSession {
        let location = SessionLocation { incarnation: 2, shard: 0, slot: 0, generation: 1 };
        let ownership =
            SessionOwnership { connection_id: ConnectionId::from_bytes([3; 16]), epoch: 9, location };
        let mut resumable = self.resumable(&ownership, principal);
        resumable.is_open = true;
        resumable
    }

    pub(super) fn resumable(&self, ownership: &SessionOwnership, principal: &Principal) -> ResumableSession {
        let key = self.session_registry.keys().seal(ownership, principal, None);
        self.session_registry.find_resumable(&key, principal, None).expect("it may be taken up")
    }

    pub(super) fn successor(&self, account: &Arc<Account>) -> QuotaSlot {
        self.connections.admit_successor(account)
    }

    pub(super) fn principal(&self) -> Arc<Principal> {
        let query = "key=secret-of-all.all";
        let credentials = Credentials { authorization: vec![], query, socket: true, address: None };
        Arc::new(self.auth.authenticate(&credentials).unwrap())
    }

    pub(super) fn open_count(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }
}

impl Drop for SocketTestNode {
    fn drop(&mut self) {
        self.shards.stop(Duration::from_secs(3));
    }
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(8);
    while !condition() {
        assert!(Instant::now() < deadline, "{what} did not come");
        std::thread::yield_now();
    }
}

fn read_until(client: &mut TcpStream, text: &str) {
    let (mut all, mut buffer) = (Vec::new(), [0; 4096]);
    while !String::from_utf8_lossy(&all).contains(text) {
        match client.read(&mut buffer) {
            Ok(count) if count > 0 => all.extend_from_slice(&buffer[..count]),
            end => panic!("{end:?} before {text:?}"),
        }
    }
}

/// A text frame under a mask of zeros.
fn frame(text: &str) -> Vec<u8> {
    let length = u8::try_from(text.len()).unwrap();
    assert!(length < 126);
    [&[0x81, 0x80 | length, 0, 0, 0, 0], text.as_bytes()].concat()
}

#[test]
fn a_stream_that_ends_with_its_last_frame_is_seen_to_end() {
    let node = SocketTestNode::start();
    let clients: Vec<_> = (0..50).map(|_| node.client()).collect();
    assert_eq!(node.open_count(), 50);
    for mut client in clients {
        socket2::SockRef::from(&client).set_tcp_cork(true).unwrap();
        client.write_all(&frame(r#"{"op":0}"#)).unwrap();
        client.shutdown(Shutdown::Write).unwrap();
    }
    wait_until("the end of every connection", || node.open_count() == 0);
}

/// Writes whole frames until the socket stays full for a while. Returns the number of bytes written.
fn write_until_full(client: &mut TcpStream, frames: &[u8], at: &mut usize) -> usize {
    let mut taken = 0;
    let mut full_since = None;
    loop {
        match client.write(&frames[*at..]) {
            Ok(count) => {
                taken += count;
                *at = (*at + count) % frames.len();
                full_since = None;
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let since = *full_since.get_or_insert_with(Instant::now);
                if since.elapsed() > Duration::from_millis(10) {
                    return taken;
                }
                std::thread::yield_now();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn client_at_answer_limit_is_read_no_faster_than_answered() {
    let node = SocketTestNode::start();
    let mut client = node.client();
    client.set_nonblocking(true).unwrap();
    let frames = frame(r#"{"op":13,"channel":"a"}"#).repeat(1000);
    let mut at = 0;
    write_until_full(&mut client, &frames, &mut at);
    wait_until("all publishes in flight", || node.store.0.lock().len() >= 1024);
    write_until_full(&mut client, &frames, &mut at);
    let mut taken = 0;
    for round in 1..=5 {
        // Reading resumes when half of the pending requests are answered.
        let answers: Vec<_> = node.store.0.lock().drain(..600).collect();
        answers.into_iter().for_each(|done| done(Ok(())));
        wait_until("as many publishes after them", || node.store.0.lock().len() >= 1024);
        taken += write_until_full(&mut client, &frames, &mut at);
        assert!(taken < 1024 * 1024, "{taken} bytes were let in by {round} × 600 answers");
    }
}

#[test]
fn silence_of_a_client_that_is_not_read_does_not_count() {
    let node = SocketTestNode::start();
    let (_client, server) = node.pair();
    let link = ClientLink::plain(mio::net::TcpStream::from_std(server));
    let mut connection = SocketConnection::new(link, ConnectionPermit::take(&node.open), 1, 0);
    let opening = AdmittedConnection {
        principal: node.principal(),
        client_id: None,
        format: Format::Json,
        echo: true,
        heartbeat_pings: false,
        quota_slot: TenantConnections::default().admit(&Account::plain("acme-prod")).unwrap(),
        socket_permit: ConnectionPermit::take(&Arc::default()),
        transport: ClientTransport::WebSocket,
        resumable: None,
    };
    let location = SessionLocation { incarnation: 1, shard: 0, slot: 0, generation: 1 };
    let ownership = SessionOwnership { connection_id: ConnectionId::from_bytes([1; 16]), epoch: 0, location };
    connection.stage = ConnectionStage::Open(OpenSocket::new(opening, ownership, 0));
    let feed_a_part = |connection: &mut SocketConnection| {
        let part = &mut frame(r#"{"op":0}"#)[..5];
        let reader = &mut connection.open_mut().unwrap().reader;
        reader.feed(part, &node.limits, 1_000, |_| std::ops::ControlFlow::Continue(())).unwrap();
    };
    feed_a_part(&mut connection);
    let times = |connection: &SocketConnection| {
        (connection.silence_ends_ms(&node.limits), connection.message_ends_ms(&node.limits))
    };
    assert_eq!(times(&connection), (Some(40_000), Some(31_000)));
    connection.last_look_ms = Some(90_000);
    assert_eq!(times(&connection).0, Some(91_000), "a second from the look on, however late the look was");
    connection.last_look_ms = None;
    connection.paused = true;
    connection.sent_ms = 100_000;
    assert_eq!(times(&connection), (None, None));
    assert_eq!(
        connection.next_due_ms(&node.limits, 0),
        983 * 117,
        "the next heartbeat, with all of that moment"
    );
    connection.sent_ms = 100_011;
    assert_eq!(connection.next_due_ms(&node.limits, 0), 983 * 117);
    connection.sent_ms = 100_012;
    assert_eq!(connection.next_due_ms(&node.limits, 0), 984 * 117);
    connection.resume_reading(90_000);
    assert!(!connection.paused);
    assert_eq!(times(&connection), (Some(130_000), Some(120_000)));
}

#[test]
fn token_revoked_on_its_way_to_shard_opens_no_session() {
    let node = SocketTestNode::start();
    let now_s = Clock::system().now_ms() / 1000;
    let claims = serde_json::json!({
        "iat": now_s - 1, "exp": now_s + 60, "x-service-capability": r#"{"*":["subscribe"]}"#,
    });
    let header = Header { kid: Some("all".into()), ..Header::new(Algorithm::HS256) };
    let token = encode(&header, &claims, &EncodingKey::from_secret(b"secret-of-all")).unwrap();
    let principal = Arc::new(node.auth.authenticate_token(&token).unwrap());
    let mut early = node.adopted(&principal);
    read_until(&mut early, "serverTime");
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(node.auth.revoke_tokens(&node.principal(), "all", b"{}")).unwrap();
    // When this client is told, the shard has reviewed it and will not do so again.
    read_until(&mut early, "40100");
    read_until(&mut node.adopted(&principal), "40100");
}

#[test]
fn takeover_of_gone_socket_is_refused_when_quota_is_full() {
    let node = SocketTestNode::start();
    let principal = node.principal();
    let mut quota_slots = node.all_quota_slots(&principal.account);
    let mut there = node.adopted_from(&principal, quota_slots.remove(0), None);
    let quota_slot = node.successor(&principal.account);
    let resumable = node.resumable_without_socket(&principal);
    read_until(&mut node.adopted_from(&principal, quota_slot, Some(resumable)), "42900");
    there.write_all(&frame(r#"{"op":0,"id":"1"}"#)).unwrap();
    read_until(&mut there, r#""id":"1""#);
}

#[test]
fn client_connecting_while_all_must_leave_is_asked_too() {
    let node = SocketTestNode::start();
    let mut there = node.client();
    let mut begun = node.silent_client();
    begun.write_all(&UPGRADE.as_bytes()[..20]).unwrap();
    node.shards.ask_all_to_reconnect(Duration::from_secs(60));
    read_until(&mut there, "50003");
    // A later request of an operator does not let any connection stay.
    node.shards.ask_to_reconnect(0, Duration::from_secs(60));
    begun.write_all(&UPGRADE.as_bytes()[20..]).unwrap();
    read_until(&mut begun, "50003");
    let mut late = node.silent_client();
    late.write_all(UPGRADE.as_bytes()).unwrap();
    read_until(&mut late, "50003");
    read_until(&mut node.adopted(&node.principal()), "50003");
    wait_until("the end of every session", || node.shards.connection_count() == 0);
}

#[test]
fn client_asked_to_leave_before_stop_is_notified_and_closed() {
    let node = SocketTestNode::start();
    let mut clients: Vec<_> = (0..20).map(|_| node.client()).collect();
    node.shards.ask_all_to_reconnect(Duration::ZERO);
    wait_until("the end of every session", || node.shards.connection_count() == 0);
    node.shards.stop(Duration::from_secs(3));
    for client in &mut clients {
        let mut received = Vec::new();
        client.read_to_end(&mut received).unwrap();
        assert!(received.ends_with(&wire::close(1012, "")), "{}", String::from_utf8_lossy(&received));
        assert!(String::from_utf8_lossy(&received).contains("50003"));
    }
}

/// Sockets of clients that publish again are reported as readable only once.
#[test]
fn publish_while_busy_shard_coalesces_is_read_afterwards() {
    let node =
        SocketTestNode::run(SocketTestNode::within(Limits { delivery_window_ms: 50, ..Limits::default() }));
    let mut clients: Vec<_> = (0..20).map(|_| node.client()).collect();
    for client in &mut clients {
        client.write_all(&frame(r#"{"op":8,"id":"1","channel":"room"}"#)).unwrap();
        read_until(client, r#""op":9"#);
    }
    for number in 0..5 {
        for publisher in [0, 1] {
            let data = format!("{number} of {publisher}");
            let publish = format!(r#"{{"op":13,"channel":"room","data":"{data}"}}"#);
            clients[publisher].write_all(&frame(&publish)).unwrap();
            clients.iter_mut().for_each(|client| read_until(client, &data));
        }
    }
}

/// Limit that shows that the shard did not wait. A stopping shard takes at most three seconds; its clients are closed after one and a half.
const NOT_WAITED: Duration = Duration::from_millis(1_000);

#[test]
fn client_that_does_not_close_after_stop_is_not_waited_for() {
    let (node, mut shards) = SocketTestNode::at_rest();
    let shard = shards.pop().expect("there is one");
    let running = std::thread::spawn(move || shard.run(true));
    let mut client = node.client();
    node.shards.stop(Duration::from_secs(20));
    let mut received = Vec::new();
    client.read_to_end(&mut received).unwrap();
    assert!(received.ends_with(&wire::close(1012, "")), "{}", String::from_utf8_lossy(&received));
    let closed_at = Instant::now();
    wait_until("the end of the shard", || running.is_finished());
    assert!(closed_at.elapsed() < NOT_WAITED, "{:?}", closed_at.elapsed());
}

#[test]
fn client_connecting_while_some_must_leave_stays() {
    let node = SocketTestNode::start();
    let mut there = node.client();
    node.shards.ask_to_reconnect(1, Duration::from_secs(60));
    read_until(&mut there, "50003");
    let mut late = node.client();
    late.write_all(&frame(r#"{"op":0,"id":"1"}"#)).unwrap();
    read_until(&mut late, r#""id":"1""#);
    assert_eq!(node.shards.connection_count(), 1);
}
