//! The client against a server whose frames the test chooses.

mod reconnecting;
mod tokens;

use std::net::SocketAddr;

use fastwebsockets::{Frame, OpCode, Payload, Role, WebSocket};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::{
    ChannelOccupancy, Client, Credential, Draft, Ending, Error, Event, Occupancy, Options, PresenceRequest,
    queue,
};

const ACCEPTED: &str = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\n";

struct Server(WebSocket<TcpStream>);

impl Server {
    /// Takes one connection, and answers its upgrade.
    async fn accept(listener: &TcpListener) -> Self {
        Self::accept_with_request(listener).await.0
    }

    async fn accept_with_request(listener: &TcpListener) -> (Self, String) {
        let (mut stream, request) = request(listener).await;
        let nonce =
            request.lines().find_map(|line| line.strip_prefix("sec-websocket-key: ")).expect("a nonce");
        let accept = crate::handshake::accept_of(nonce.trim());
        let head = format!("{ACCEPTED}sec-websocket-accept: {accept}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.expect("written");
        (Self(WebSocket::after_handshake(stream, Role::Server)), request)
    }

    async fn connected(listener: &TcpListener) -> Self {
        let mut server = Self::accept(listener).await;
        server.say(&connected("k", false)).await;
        server
    }

    async fn say(&mut self, frame: &Value) {
        let frame = Frame::text(Payload::Owned(frame.to_string().into_bytes()));
        self.0.write_frame(frame).await.expect("written");
    }

    async fn hear(&mut self) -> Value {
        let frame = self.0.read_frame().await.expect("a frame");
        assert_eq!(frame.opcode, OpCode::Text);
        serde_json::from_slice(&frame.payload).expect("JSON")
    }
}

fn connected(key: &str, resumed: bool) -> Value {
    json!({"op": 3, "connectionId": "c_1", "connectionKey": key, "nodeId": "n", "resumed": resumed,
        "heartbeatMs": 15_000, "resumeWindowMs": 120_000, "maxMessageBytes": 65_536, "serverTime": 1})
}

async fn request(listener: &TcpListener) -> (TcpStream, String) {
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let mut request = Vec::new();
    while !request.ends_with(b"\r\n\r\n") {
        assert!(stream.read_buf(&mut request).await.expect("a request") > 0);
    }
    (stream, String::from_utf8(request).expect("UTF-8"))
}

async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("bound");
    (listener, addr)
}

fn options(addr: SocketAddr) -> Options {
    Options::new(format!("ws://{addr}"), Credential::Key("secret.k1".into()))
}

#[tokio::test]
async fn answers_find_their_requests_and_the_rest_are_events() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let (first, second) = (server.hear().await, server.hear().await);
        assert_eq!((&first["op"], &first["channel"]), (&json!(13), &json!("c")));
        server
            .say(&json!({"op": 13, "channel": "c", "serial": "s",
            "messages": [{"id": "m", "data": [1.0], "connectionId": "c_1", "timestamp": 5}]}))
            .await;
        server.say(&json!({"op": 2, "id": second["id"], "error": "no", "code": 42900})).await;
        server.say(&json!({"op": 1, "id": first["id"], "serials": ["s"]})).await;
        let attach = server.hear().await;
        server
            .say(&json!({"op": 9, "id": attach["id"], "channel": "c", "serial": "s", "resumed": false,
            "presence": false, "modes": ["subscribe"]}))
            .await;
        assert_eq!(server.hear().await, json!({"op": 5}));
        server.say(&json!({"op": 6})).await;
    });
    let mut client = Client::connect(options(addr)).await.expect("connected");
    assert_eq!(client.connected().connection_id, "c_1");
    let first = client.publish_start("c", vec![Draft::default()]).await.expect("sent");
    let second = client.publish_start("c", vec![Draft::default()]).await.expect("sent");
    assert!(matches!(second.await, Err(Error::Refused { code: 42900, .. })));
    assert_eq!(first.await.expect("acknowledged"), ["s"]);
    assert_eq!(client.attach("c").await.expect("attached").modes, ["subscribe"]);
    let Some(Event::Messages(delivery)) = client.next().await else { panic!("messages") };
    assert_eq!((delivery.channel.as_str(), delivery.messages.len()), ("c", 1));
    client.close().await.expect("closed");
    tasks.join_all().await;
}

#[tokio::test]
async fn member_list_pages_are_one_event_and_presence_another() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let enter = server.hear().await;
        assert_eq!((&enter["op"], &enter["action"]), (&json!(12), &json!("enter")));
        assert_eq!((&enter["clientId"], enter.get("data")), (&json!("ann"), None));
        server.say(&json!({"op": 1, "id": enter["id"]})).await;
        let member = |name: &str| json!({"clientId": name, "connectionId": "c_1", "timestamp": 5});
        for (name, more) in [("a", true), ("b", true), ("c", false)] {
            server.say(&json!({"op": 14, "channel": "c", "members": [member(name)], "more": more})).await;
        }
        let event =
            json!({"action": "leave", "clientId": "a", "connectionId": "c_1", "data": null, "timestamp": 6});
        server.say(&json!({"op": 12, "channel": "c", "serial": "s", "presence": [event]})).await;
        server.hear().await;
    });
    let mut client = Client::connect(options(addr)).await.expect("connected");
    let request = PresenceRequest {
        channel: "c".into(),
        action: "enter".into(),
        client_id: Some("ann".into()),
        data: None,
    };
    client.present(request).await.expect("acknowledged");
    let Some(Event::Members(list)) = client.next().await else { panic!("the list") };
    let names: Vec<_> = list.members.iter().map(|member| member.client_id.as_str()).collect();
    assert_eq!((list.channel.as_str(), names), ("c", vec!["a", "b", "c"]));
    let Some(Event::Presence(presence)) = client.next().await else { panic!("an event") };
    let event = &presence.events[0];
    assert_eq!((event.action.as_str(), event.timestamp), ("leave", 6));
    assert_eq!(event.data.as_ref().map(|data| data.get()), Some("null"));
    client.leave("c", None).await.expect_err("the server is gone");
    tasks.join_all().await;
}

#[tokio::test]
async fn an_attach_with_occupancy_gives_events_of_it() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        let attach = server.hear().await;
        assert_eq!((&attach["op"], &attach["occupancy"]), (&json!(8), &json!(true)));
        server
            .say(&json!({"op": 9, "id": attach["id"], "channel": "c", "serial": "s", "resumed": false}))
            .await;
        let counts = json!({"connections": 4, "publishers": 3, "subscribers": 2, "members": 1});
        for source in ["cluster", "node"] {
            server.say(&json!({"op": 16, "channel": "c", "occupancy": counts, "source": source})).await;
        }
    });
    let mut client = Client::connect(options(addr)).await.expect("connected");
    client.attach_with_occupancy("c").await.expect("attached");
    let occupancy = Occupancy { connections: 4, publishers: 3, subscribers: 2, members: 1 };
    for is_of_all in [true, false] {
        let Some(Event::Occupancy(changed_counts)) = client.next().await else { panic!("the counts") };
        assert_eq!(changed_counts, ChannelOccupancy { channel: "c".into(), occupancy, is_of_all });
    }
    tasks.join_all().await;
}

#[tokio::test]
async fn a_lost_link_fails_what_waits_and_is_the_last_event() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut server = Server::connected(&listener).await;
        server.hear().await;
    });
    let mut client = Client::connect(options(addr)).await.expect("connected");
    let handle = client.handle();
    assert!(matches!(handle.publish("c", vec![Draft::default()]).await, Err(Error::Closed)));
    assert!(matches!(client.next().await, Some(Event::Ended(Ending::Lost(_)))));
    assert!(client.next().await.is_none());
    assert!(matches!(handle.attach("c").await, Err(Error::Closed)));
}

#[tokio::test]
async fn a_refusal_shows_its_reason() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let (mut stream, request) = request(&listener).await;
        assert!(request.contains("authorization: Basic c2VjcmV0Lmsx\r\n"), "{request}");
        let body = r#"{"error":"too many","reason":"connection_limit"}"#;
        let head = format!("HTTP/1.1 429 Too Many Requests\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        stream.write_all(head.as_bytes()).await.expect("written");
        let mut server = Server::accept(&listener).await;
        server.say(&json!({"op": 7, "error": "refused", "code": 40100})).await;
        server.0.write_frame(Frame::close(4001, b"")).await.expect("written");
    });
    let refused = Client::connect(options(addr)).await.err().expect("refused");
    let Error::Http { status: 429, error, reason } = refused else { panic!("{refused:?}") };
    assert_eq!((error.as_str(), reason.as_deref()), ("too many", Some("connection_limit")));
    let refused = Client::connect(options(addr)).await.err().expect("refused");
    assert!(matches!(refused, Error::Refused { code: 40100, .. }), "{refused:?}");
    tasks.join_all().await;
}

/// Case: the node ends the link at once after its last frame, and the client may read both in one go.
#[tokio::test]
async fn answered_close_is_clean_when_link_ends_at_once() {
    let (listener, addr) = listen().await;
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        for _ in 0..50 {
            let mut server = Server::connected(&listener).await;
            assert_eq!(server.hear().await, json!({"op": 5}));
            server.say(&json!({"op": 6})).await;
        }
    });
    for _ in 0..50 {
        Client::connect(options(addr)).await.expect("connected").close().await.expect("closed");
    }
    tasks.join_all().await;
}

#[tokio::test]
async fn events_that_wait_are_bounded_in_number_and_in_bytes() {
    const TEXT_BYTES: usize = 4_000;

    let message = |number: usize| {
        let data = format!("\"{}{number}\"", "x".repeat(TEXT_BYTES));
        let data = serde_json::value::RawValue::from_string(data).expect("JSON");
        let messages = vec![crate::MessageIn {
            id: "m".into(),
            name: None,
            data: Some(data),
            extras: None,
            client_id: None,
            connection_id: "c".into(),
            timestamp: 1,
        }];
        Event::Messages(crate::Delivery { channel: "c".into(), serial: number.to_string(), messages })
    };
    for (events_max, events_bytes_max, fits) in
        [(3, usize::MAX, 3), (64, 3 * TEXT_BYTES, 2), (64, 1, 1), (0, 0, 1)]
    {
        let options = Options { events_max, events_bytes_max, ..options(([127, 0, 0, 1], 1).into()) };
        let (sender, mut receiver) = queue::bounded(&options);
        for number in 0..fits {
            let sent = at_once(sender.send(message(number))).await;
            assert!(sent.is_some_and(|sent| sent.is_ok()), "{number} of {fits} finds room");
        }
        assert!(at_once(sender.send(message(fits))).await.is_none(), "there is no room for more than {fits}");
        let Some(Event::Messages(first)) = receiver.recv().await else { unreachable!("the first one") };
        assert_eq!(first.serial, "0");
        assert!(at_once(sender.send(message(fits))).await.is_some(), "room is given back");
        let waiting = sender.send(message(fits + 1));
        drop(receiver);
        assert!(waiting.await.is_err(), "nobody is left to make room");
    }
}

async fn at_once<T>(future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        output = future => Some(output),
        () = std::future::ready(()) => None,
    }
}
