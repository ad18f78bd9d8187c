//! One session over a directory and a clock that stands still; what it puts out is run as a shard runs it.

mod attach;
mod frames;
mod lanes;
mod limits;
mod presence;
mod refresh;
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
use crate::model::{Clock, Place, PresenceAction};
use crate::testing::{DirectoryText, NoTokens};

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

/// What the owner of a session has to do, in the order in which it has to.
#[derive(Debug, Clone, PartialEq)]
enum Seen {
    Frame(Value),
    Pong(Vec<u8>),
    Publish { ticket: u64, messages: usize, queued: bool },
    Present { ticket: u64, client_id: String, action: PresenceAction },
    Deliver(String, bool),
    Detach(String),
    Recount(String),
    End { code: u16, after_ms: u64 },
}

struct Client {
    auth: Authenticator,
    clock: Clock,
    limits: Limits,
    keys: ConnectionKeys,
    session: Session,
    /// Attaches whose standing is looked for.
    looked_for: Vec<(Begin, AttachReply)>,
    /// Members that were told to leave, kept apart from the rest.
    left: Vec<Leaving>,
    /// Tokens that were refused, kept apart as well.
    refused: Vec<Reason>,
}

const TENURE: Tenure = Tenure {
    connection_id: ConnectionId::from_bytes([7; 16]),
    epoch: 3,
    place: Place { incarnation: 1, shard: 2, slot: 3, generation: 4 },
};

/// The position that every attach gets from the hub that is not there.
const POSITION: Stamp = Stamp { incarnation: 1, sequence: 7 };

fn serial(stamp: Stamp) -> String {
    Serial::single(stamp.incarnation, stamp.sequence).to_string()
}

impl Client {
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
        let auth = Authenticator::new(accounts, NoTokens, clock.clone(), &limits, true);
        let credentials = Credentials {
            authorization: vec![authorization.as_bytes()],
            query: "",
            socket: true,
            address: None,
        };
        let principal = auth.authenticate(&credentials).unwrap();
        let client_id = principal.client_id.clone().or(chosen.map(ClientId::of));
        let tenure = Tenure { connection_id: ConnectionId::random(), ..TENURE };
        let session = Session::new(Arc::new(principal), client_id, tenure, format);
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

    /// Runs `step`, then what it put out.
    fn act(&mut self, step: impl FnOnce(&mut Session, Context<'_>, &mut Vec<Output>)) -> Vec<Seen> {
        let now_ms = self.clock.now_ms();
        let Self { limits, auth, keys, .. } = self;
        let cx = Context { limits, auth, keys, node_id: "node-1", is_clustered: false, now_ms };
        let mut out = Vec::new();
        step(&mut self.session, cx, &mut out);
        let mut seen = Vec::new();
        for output in out {
            match output {
                Output::Frame(payload) => seen.push(Seen::Frame(self.read(&payload))),
                Output::Pong(payload) => seen.push(Seen::Pong(payload)),
                Output::Publish { ticket, request, queued } => {
                    seen.push(Seen::Publish { ticket, messages: request.messages.len(), queued });
                }
                Output::Attach { delivers, begin, reply } => {
                    seen.push(Seen::Deliver(reply.channel.as_str().to_owned(), delivers));
                    if matches!(begin, Begin::After(_) | Begin::Back(_)) {
                        self.looked_for.push((begin, reply));
                        continue;
                    }
                    let resumed = begin == Begin::Kept;
                    seen.extend(self.settle(&reply, POSITION, resumed));
                }
                Output::Detach { channel } => seen.push(Seen::Detach(channel.as_str().to_owned())),
                Output::Recount { channel } => seen.push(Seen::Recount(channel.as_str().to_owned())),
                Output::Present { ticket, request } => seen.push(Seen::Present {
                    ticket,
                    client_id: request.member.client_id.as_str().to_owned(),
                    action: request.action,
                }),
                Output::Leave(leaving) => self.left.push(leaving),
                Output::NoteRefused(refused) => self.refused.push(refused.reason),
                Output::End { code, after_ms } => seen.push(Seen::End { code, after_ms }),
            }
        }
        seen
    }

    /// Gives an attach its outcome.
    fn settle(&mut self, reply: &AttachReply, position: Stamp, resumed: bool) -> Vec<Seen> {
        let position = Serial::single(position.incarnation, position.sequence);
        let standing = Standing { position, resumed, warning: None };
        self.act(|session, cx, out| session.attached(cx, reply, &standing, false, out))
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

    fn opened(&mut self) -> Vec<Seen> {
        self.act(|session, cx, out| session.opened(cx, false, out))
    }

    fn send(&mut self, frame: &Value) -> Vec<Seen> {
        self.send_together(std::slice::from_ref(frame))
    }

    /// Frames that came with one read.
    fn send_together(&mut self, frames: &[Value]) -> Vec<Seen> {
        self.act(|session, cx, out| {
            for frame in frames {
                session.message(cx, true, frame.to_string().as_bytes(), out);
            }
        })
    }

    fn payload(&mut self, text: bool, payload: &[u8]) -> Vec<Seen> {
        self.act(|session, cx, out| session.message(cx, text, payload, out))
    }

    fn acked(&mut self, ticket: u64) -> Vec<Seen> {
        let result = PublishResult::Acked(vec![Stamp { incarnation: 1, sequence: ticket }]);
        self.answered(ticket, result)
    }

    fn answered(&mut self, ticket: u64, result: PublishResult) -> Vec<Seen> {
        self.act(|session, cx, out| session.answered(cx, ticket, result, out))
    }

    fn tick_at(&mut self, now_ms: u64) -> Vec<Seen> {
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

/// A frame as `op`, id and, if it has one, code: enough where the order is what matters.
fn brief(seen: &[Seen]) -> Vec<String> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let one = |seen: &Seen| match seen {
        Seen::Frame(frame) => match frame.get("code") {
            Some(code) => format!("{} {} {code}", frame["op"], text(&frame["id"])),
            None => format!("{} {}", frame["op"], text(&frame["id"])),
        },
        Seen::Pong(payload) => format!("pong {payload:?}"),
        Seen::Publish { ticket, .. } => format!("publish {ticket}"),
        Seen::Present { ticket, .. } => format!("present {ticket}"),
        Seen::Deliver(channel, delivers) => format!("deliver {channel} {delivers}"),
        Seen::Detach(channel) => format!("detach {channel}"),
        Seen::Recount(channel) => format!("recount {channel}"),
        Seen::End { code, .. } => format!("end {code}"),
    };
    seen.iter().map(one).collect()
}

fn frame(seen: &[Seen]) -> &Value {
    match seen {
        [Seen::Frame(frame)] => frame,
        _ => panic!("one frame expected: {seen:?}"),
    }
}

fn end(code: u16) -> Seen {
    Seen::End { code, after_ms: 0 }
}

/// A token of a key for `seconds` from now.
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
