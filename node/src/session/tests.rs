//! One session over a directory and a manual clock; its outputs are handled as a shard handles them.

mod attach;
mod frames;
mod limits;
mod presence;
mod refresh;
mod request_queue;
mod resume;
mod rewind;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_proto::serial::Serial;
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use serde_json::{Value, json};

use super::*;
use crate::accounts::Accounts;
use crate::auth::{Credentials, Reason};
use crate::model::{Clock, PresenceAction, SessionLocation};
use crate::testing::{DirectoryText, NoTokenStore};

const NOW_MS: u64 = 1_767_225_600_500;
const NOW_S: u64 = NOW_MS / 1000;

fn directory() -> DirectoryText {
    DirectoryText::default()
        .account("acme")
        .key("all", r#"{ "*" = ["subscribe", "publish", "presence", "history"] }"#)
        .key("chat", r#"{ "chat:*" = ["subscribe", "publish"] }"#)
        .key("reader", r#"{ "*" = ["subscribe"] }"#)
        .key("writer", r#"{ "*" = ["publish"] }"#)
        .account("other")
        .key("other", r#"{ "*" = ["subscribe", "publish"] }"#)
}

/// Effects that a session asks of its owner, in order.
#[derive(Debug, Clone, PartialEq)]
enum SessionEffect {
    Frame(Value),
    Pong(Vec<u8>),
    Publish { ticket: u64, messages: usize, queued: bool },
    Present { ticket: u64, client_id: String, action: PresenceAction },
    Deliver(String, bool),
    Detach(String),
    Recount(String),
    End { code: u16, after_ms: u64 },
}

struct SessionTestClient {
    auth: Authenticator,
    clock: Clock,
    limits: Limits,
    keys: ConnectionKeys,
    session: Session,
    /// Attaches that wait for their outcome.
    looked_for: Vec<(DeliveryStart, AttachReply)>,
    /// Leaves of members, kept apart from the other effects.
    left: Vec<LeaveScope>,
    /// Refused tokens, kept apart as well.
    refused: Vec<Reason>,
}

const OWNERSHIP: SessionOwnership = SessionOwnership {
    connection_id: ConnectionId::from_bytes([7; 16]),
    epoch: 3,
    location: SessionLocation { incarnation: 1, shard: 2, slot: 3, generation: 4 },
};

/// Position that every attach gets, since there is no hub.
const POSITION: Stamp = Stamp { incarnation: 1, sequence: 7 };

fn serial(stamp: Stamp) -> String {
    Serial::single(stamp.incarnation, stamp.sequence).to_string()
}

impl SessionTestClient {
    fn key(name: &str) -> Self {
        Self::key_as(name, None)
    }

    fn key_as(name: &str, client_id: Option<&str>) -> Self {
        let basic = format!("Basic {}", STANDARD.encode(format!("secret-of-{name}.{name}")));
        Self::begin(&basic, client_id, Format::Json, Limits::default())
    }

    fn limited(limits: Limits) -> Self {
        let basic = format!("Basic {}", STANDARD.encode("secret-of-all.all"));
        Self::begin(&basic, None, Format::Json, limits)
    }

    fn token(token: &str) -> Self {
        Self::begin(&format!("Bearer {token}"), None, Format::Json, Limits::default())
    }

    fn begin(authorization: &str, chosen: Option<&str>, format: Format, limits: Limits) -> Self {
        let clock = Clock::manual(NOW_MS);
        let accounts = Accounts::from_text(directory().text()).unwrap();
        let auth = Authenticator::new(accounts, NoTokenStore, clock.clone(), &limits, true);
        let credentials = Credentials {
            authorization: vec![authorization.as_bytes()],
            query: "",
            socket: true,
            address: None,
        };
        let principal = auth.authenticate(&credentials).unwrap();
        let client_id = principal.client_id.clone().or(chosen.map(ClientId::of));
        let ownership = SessionOwnership { connection_id: ConnectionId::random(), ..OWNERSHIP };
        let session = Session::new(Arc::new(principal), client_id, ownership, format);
        let keys = ConnectionKeys::new(&[1; 32]);
        Self {
            auth,
            clock,
            limits,
            keys,
            session,
            looked_for: Vec::new(),
            left: Vec::new(),
            refused: Vec::new(),
        }
    }

    /// Runs `step`, then handles its outputs.
    fn act(&mut self, step: impl FnOnce(&mut Session, Context<'_>, &mut Vec<Output>)) -> Vec<SessionEffect> {
        let now_ms = self.clock.now_ms();
        let Self { limits, auth, keys, .. } = self;
        let cx = Context { limits, auth, keys, node_id: "node-1", is_clustered: false, now_ms };
        let mut out = Vec::new();
        step(&mut self.session, cx, &mut out);
        let mut seen = Vec::new();
        for output in out {
            match output {
                Output::Frame(payload) => seen.push(SessionEffect::Frame(self.read(&payload))),
                Output::Pong(payload) => seen.push(SessionEffect::Pong(payload)),
                Output::Publish { ticket, request, queued } => {
                    seen.push(SessionEffect::Publish { ticket, messages: request.messages.len(), queued });
                }
                Output::Attach { delivers, begin, reply } => {
                    seen.push(SessionEffect::Deliver(reply.channel.as_str().to_owned(), delivers));
                    if matches!(begin, DeliveryStart::After(_) | DeliveryStart::Rewind(_)) {
                        self.looked_for.push((begin, reply));
                        continue;
                    }
                    let resumed = begin == DeliveryStart::Unchanged;
                    seen.extend(self.settle(&reply, POSITION, resumed));
                }
                Output::Detach { channel } => seen.push(SessionEffect::Detach(channel.as_str().to_owned())),
                Output::Recount { channel } => seen.push(SessionEffect::Recount(channel.as_str().to_owned())),
                Output::Present { ticket, request } => seen.push(SessionEffect::Present {
                    ticket,
                    client_id: request.member.client_id.as_str().to_owned(),
                    action: request.action,
                }),
                Output::Leave(leaving) => self.left.push(leaving),
                Output::NoteRefused(refused) => self.refused.push(refused.reason),
                Output::End { code, after_ms } => seen.push(SessionEffect::End { code, after_ms }),
            }
        }
        seen
    }

    /// Completes an attach.
    fn settle(&mut self, reply: &AttachReply, position: Stamp, resumed: bool) -> Vec<SessionEffect> {
        let position = Serial::single(position.incarnation, position.sequence);
        let outcome = AttachOutcome { position, resumed, warning: None };
        self.act(|session, cx, out| session.attached(cx, reply, &outcome, false, out))
    }

    fn read(&self, payload: &[u8]) -> Value {
        match self.session.format() {
            Format::Json => serde_json::from_slice(payload).unwrap(),
            Format::MsgPack => {
                let text = fanfare_proto::msgpack::to_json(payload, 64, 1 << 20).unwrap();
                serde_json::from_str(&text).unwrap()
            }
        }
    }

    fn opened(&mut self) -> Vec<SessionEffect> {
        self.act(|session, cx, out| session.opened(cx, false, out))
    }

    fn send(&mut self, frame: &Value) -> Vec<SessionEffect> {
        self.send_together(std::slice::from_ref(frame))
    }

    /// Sends frames that arrive with one read.
    fn send_together(&mut self, frames: &[Value]) -> Vec<SessionEffect> {
        self.act(|session, cx, out| {
            for frame in frames {
                session.message(cx, true, frame.to_string().as_bytes(), out);
            }
        })
    }

    fn payload(&mut self, text: bool, payload: &[u8]) -> Vec<SessionEffect> {
        self.act(|session, cx, out| session.message(cx, text, payload, out))
    }

    fn acked(&mut self, ticket: u64) -> Vec<SessionEffect> {
        let result = PublishResult::Acked(vec![Stamp { incarnation: 1, sequence: ticket }]);
        self.answered(ticket, result)
    }

    fn answered(&mut self, ticket: u64, result: PublishResult) -> Vec<SessionEffect> {
        self.act(|session, cx, out| session.answered(cx, ticket, result, out))
    }

    fn tick_at(&mut self, now_ms: u64) -> Vec<SessionEffect> {
        self.clock.pass_to(now_ms);
        self.act(Session::tick)
    }
}

fn publish(id: &str, channel: &str) -> Value {
    json!({"op": 13, "id": id, "channel": channel, "data": 1})
}

fn attach(id: &str, channel: &str) -> Value {
    json!({"op": 8, "id": id, "channel": channel})
}

fn detach(id: &str, channel: &str) -> Value {
    json!({"op": 10, "id": id, "channel": channel})
}

/// A frame as `op`, id and, if it has one, code: enough for tests of the order.
fn brief(seen: &[SessionEffect]) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let one = |seen: &SessionEffect| match seen {
        SessionEffect::Frame(frame) => match frame.get("code") {
            Some(code) => format!("{} {} {code}", frame["op"], text(&frame["id"])),
            None => format!("{} {}", frame["op"], text(&frame["id"])),
        },
        SessionEffect::Pong(payload) => format!("pong {payload:?}"),
        SessionEffect::Publish { ticket, .. } => format!("publish {ticket}"),
        SessionEffect::Present { ticket, .. } => format!("present {ticket}"),
        SessionEffect::Deliver(channel, delivers) => format!("deliver {channel} {delivers}"),
        SessionEffect::Detach(channel) => format!("detach {channel}"),
        SessionEffect::Recount(channel) => format!("recount {channel}"),
        SessionEffect::End { code, .. } => format!("end {code}"),
    };
    seen.iter().map(one).collect()
}

fn frame(seen: &[SessionEffect]) -> &Value {
    match seen {
        [SessionEffect::Frame(frame)] => frame,
        _ => panic!("one frame expected: {seen:?}"),
    }
}

fn end(code: u16) -> SessionEffect {
    SessionEffect::End { code, after_ms: 0 }
}

/// A token of a key, valid for `seconds` from now.
fn token_of(key: &str, capability: &Value, client_id: Option<&str>, seconds: u64) -> String {
    let mut claims = json!({
        "iat": NOW_S, "exp": NOW_S + seconds, "x-service-capability": capability.to_string(),
    });
    if let Some(client_id) = client_id {
        claims["x-service-client-id"] = json!(client_id);
    }
    let header = Header { kid: Some(key.to_owned()), ..Header::new(Algorithm::HS256) };
    encode(&header, &claims, &EncodingKey::from_secret(format!("secret-of-{key}").as_bytes())).unwrap()
}
