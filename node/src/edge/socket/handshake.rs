//! From a request's head to an open socket, or to the answer that refuses it.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_proto::frame::Format;
use sha1::{Digest as _, Sha1};

use super::connection::Permit;
use super::identities::{Former, Identities};
use crate::accounts::{Seat, TenantConnections};
use crate::auth::{Authenticator, Credentials, Principal};
use crate::edge::errors::{Kind, Refusal};
use crate::edge::files::ClientFiles;
use crate::edge::host;
use crate::edge::http::cors;
use crate::model::{ClientId, Limits};
use crate::telemetry::Limit;

pub const PATH: &str = "/realtime";
/// The one that is chosen where it is offered.
const SUBPROTOCOL: &str = "fanfare";
/// The end of the year 9999.
const LAST_DATE_MS: u64 = 253_402_300_799_000;
/// A head with more headers than this is parsed with room for as many as it has.
const HEADERS_FEW: usize = 64;

/// The parts of a request's head that decide.
#[derive(Debug)]
pub struct Head<'a> {
    pub query: &'a str,
    pub headers: Vec<(&'a str, &'a [u8])>,
}

/// The answer to a good handshake.
#[derive(Debug, PartialEq, Eq)]
pub struct Accept {
    key: String,
    subprotocol: bool,
}

impl Accept {
    /// Headers of the 101 beside those of CORS.
    pub fn headers(&self) -> impl Iterator<Item = (&'static str, &str)> {
        let fixed = [
            ("connection", "Upgrade"),
            ("upgrade", "websocket"),
            ("sec-websocket-accept", self.key.as_str()),
        ];
        let subprotocol = self.subprotocol.then_some(("sec-websocket-protocol", SUBPROTOCOL));
        fixed.into_iter().chain(subprotocol)
    }
}

/// An accepted upgrade.
#[derive(Debug)]
pub struct Opening {
    pub principal: Arc<Principal>,
    /// Forced by the credential or chosen in the query.
    pub client_id: Option<ClientId>,
    pub format: Format,
    pub echo: bool,
    pub heartbeat_pings: bool,
    pub seat: Seat,
    /// Of the sockets and event streams of the node.
    pub place: Permit,
    pub transport: Transport,
    /// The connection that it takes up.
    pub former: Option<Former>,
}

/// What a client speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    WebSocket,
    /// Server-sent events.
    Sse,
}

impl Transport {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::WebSocket => "websocket",
            Self::Sse => "sse",
        }
    }
}

/// What a socket must pass.
#[derive(Clone, Copy)]
pub struct Gate<'a> {
    pub auth: &'a Authenticator,
    pub connections: &'a TenantConnections,
    /// None: nothing is taken up here.
    pub identities: Option<&'a Identities>,
    pub limits: &'a Limits,
    pub files: &'a ClientFiles,
    /// The client's.
    pub address: Option<IpAddr>,
}

/// Why a socket is refused after its upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    Credential,
    ConnectionLimit,
}

/// The outcome of a credential and the query of a socket.
#[derive(Debug)]
pub enum Decision {
    /// Answer 101.
    Open(Opening),
    /// Answer 101, then refuse within the socket, for clients that cannot read a status.
    OpenRefused {
        format: Format,
        refused: Refused,
    },
    Refuse(Refusal),
}

/// What the first bytes of a connection are.
pub(super) enum FirstLook<'a> {
    /// With what becomes of its handshake, and the length of the head.
    Upgrade(Head<'a>, Result<Accept, Refusal>, usize),
    /// For the HTTP side, with the length of the head.
    Http(usize),
    /// The head has not ended yet.
    Partial,
    TooLarge,
    Malformed,
}

/// Tells an upgrade of the socket's path from everything else. The first `seen` bytes were looked at before, and the
/// head did not end in them.
pub(super) fn first_look(bytes: &[u8], seen: usize, bytes_max: usize) -> FirstLook<'_> {
    let look = if seen > 0 && !ends_behind(bytes, seen) {
        FirstLook::Partial
    } else {
        parse(bytes, &mut [httparse::EMPTY_HEADER; HEADERS_FEW]).unwrap_or_else(|| {
            let within = &bytes[..bytes.len().min(bytes_max)];
            let lines = within.iter().filter(|byte| **byte == b'\n').count();
            parse(bytes, &mut vec![httparse::EMPTY_HEADER; lines]).unwrap_or(FirstLook::TooLarge)
        })
    };
    match look {
        FirstLook::Partial if bytes.len() > bytes_max => FirstLook::TooLarge,
        FirstLook::Upgrade(.., length) | FirstLook::Http(length) if length > bytes_max => FirstLook::TooLarge,
        look => look,
    }
}

/// Whether an empty line ends behind the first `seen` bytes. Without it a head that comes in many pieces would be parsed with
/// each of them.
fn ends_behind(bytes: &[u8], seen: usize) -> bool {
    let new = &bytes[seen.saturating_sub(2)..];
    new.windows(2).any(|line| line == b"\n\n") || new.windows(3).any(|line| line == b"\n\r\n")
}

/// None: there are more headers than slots.
fn parse<'a>(bytes: &'a [u8], slots: &mut [httparse::Header<'a>]) -> Option<FirstLook<'a>> {
    let mut request = httparse::Request::new(slots);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Partial) => return Some(FirstLook::Partial),
        Err(httparse::Error::TooManyHeaders) => return None,
        Err(_) => return Some(FirstLook::Malformed),
        Ok(httparse::Status::Complete(length)) => length,
    };
    let target = request.path.unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let head =
        Head { query, headers: request.headers.iter().map(|header| (header.name, header.value)).collect() };
    let is_upgrade = request.method == Some("GET") && path == PATH && request.version == Some(1);
    match head.handshake().filter(|_| is_upgrade) {
        Some(handshake) => Some(FirstLook::Upgrade(head, handshake, length)),
        None => Some(FirstLook::Http(length)),
    }
}

impl<'a> Head<'a> {
    /// Checks the headers of an upgrade over HTTP/1.1; none when another one or none is asked for.
    pub fn handshake(&self) -> Option<Result<Accept, Refusal>> {
        let is_asked = self.lists("upgrade", b"websocket") && self.lists("connection", b"upgrade");
        is_asked.then(|| self.accept())
    }

    fn accept(&self) -> Result<Accept, Refusal> {
        host::check(self.all("host"), true)?;
        let has_length = self.all("content-length").any(|length| length.iter().any(|digit| *digit != b'0'));
        if has_length || self.all("transfer-encoding").next().is_some() {
            return Err(Refusal::malformed("an upgrade has no body"));
        }
        let versions = self.all("sec-websocket-version").flat_map(|value| value.split(|byte| *byte == b','));
        match one(versions.map(<[u8]>::trim_ascii)) {
            Err(Different) => return Err(Refusal::malformed("sec-websocket-version must be given once")),
            Ok(Some(b"13")) => {}
            Ok(_) => {
                return Err(Refusal::new(Kind::UpgradeRequired, "sec-websocket-version must be 13"));
            }
        }
        let key = one(self.all("sec-websocket-key"))
            .map_err(|Different| Refusal::malformed("sec-websocket-key must be given once"))?
            .filter(|key| is_key(key))
            .ok_or_else(|| Refusal::malformed("sec-websocket-key must be 16 bytes in base64"))?;
        let mut offered =
            self.all("sec-websocket-protocol").flat_map(|value| value.split(|byte| *byte == b','));
        let subprotocol = offered.any(|own| own.trim_ascii() == SUBPROTOCOL.as_bytes());
        Ok(Accept { key: accept_of(key), subprotocol })
    }

    /// From the first to the last.
    pub(super) fn forwarded_for(&self) -> impl DoubleEndedIterator<Item = &'a [u8]> {
        self.all("x-forwarded-for").collect::<Vec<_>>().into_iter()
    }

    /// Checks the credential, and takes a place of the node and a seat of the tenant.
    pub fn decide(&self, gate: Gate<'_>) -> Decision {
        let place = match gate.files.take_socket() {
            Ok(place) => place,
            Err(full) => {
                full.refused();
                return Decision::Refuse(Refusal::full());
            }
        };
        let authorization: Vec<&[u8]> = self.all("authorization").collect();
        let address = gate.address;
        let credentials = Credentials { authorization, query: self.query, socket: true, address };
        let parameters = Parameters::read(self.query);
        let (principal, parameters) = match (gate.auth.authenticate(&credentials), parameters) {
            (Err(_), Some(Parameters { errors_in_socket: true, format, .. })) => {
                return Decision::OpenRefused { format, refused: Refused::Credential };
            }
            (Err(_), _) => return Decision::Refuse(Refusal::unauthorized()),
            (Ok(_), None) => return Decision::Refuse(Refusal::malformed("format must be json or msgpack")),
            (Ok(principal), Some(parameters)) => (Arc::new(principal), parameters),
        };
        let Parameters { format, echo, heartbeat_pings, errors_in_socket, client_id, resume } = parameters;
        let client_id = match (&principal.client_id, client_id) {
            (Some(forced), _) => Some(forced.clone()),
            (None, None) => None,
            (None, Some(chosen)) => match ClientId::new(&chosen, gate.limits) {
                Ok(client_id) => Some(client_id),
                Err(error) => {
                    Limit::ClientIdBytes.hit_if(error.is_too_long());
                    return Decision::Refuse(Refusal::malformed(format!("clientId {error}")));
                }
            },
        };
        // What cannot be taken up, for whatever reason, is a fresh connection.
        let former = gate
            .identities
            .zip(resume)
            .and_then(|(identities, key)| identities.look(&key, &principal, client_id.as_ref()));
        let replaces = former.as_ref().is_some_and(|former| former.is_open);
        let seat = if replaces {
            Some(gate.connections.admit_successor(&principal.account))
        } else {
            gate.connections.admit(&principal.account)
        };
        let Some(seat) = seat else {
            metrics::counter!("fanfare_connection_limit_refusals_total").increment(1);
            if errors_in_socket {
                return Decision::OpenRefused { format, refused: Refused::ConnectionLimit };
            }
            return Decision::Refuse(Refusal::connection_limit());
        };
        let transport = Transport::WebSocket;
        let opening =
            Opening { principal, client_id, format, echo, heartbeat_pings, seat, place, transport, former };
        Decision::Open(opening)
    }

    /// Whether a header that is a list holds the word.
    fn lists(&self, name: &str, word: &[u8]) -> bool {
        let mut words = self.all(name).flat_map(|value| value.split(|byte| *byte == b','));
        words.any(|own| own.trim_ascii().eq_ignore_ascii_case(word))
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let matching = self.headers.iter().filter(move |(own, _)| own.eq_ignore_ascii_case(name));
        matching.map(|(_, value)| value.trim_ascii())
    }
}

/// Values of which one was to be given.
struct Different;

/// The value that all of them are.
fn one<'a>(mut values: impl Iterator<Item = &'a [u8]>) -> Result<Option<&'a [u8]>, Different> {
    let first = values.next();
    if values.all(|other| Some(other) == first) { Ok(first) } else { Err(Different) }
}

fn is_key(text: &[u8]) -> bool {
    STANDARD.decode(text).is_ok_and(|key| key.len() == 16)
}

fn accept_of(key: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(key);
    hash.update(b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    STANDARD.encode(hash.finalize())
}

/// What the query says beside the credential; of repeated parameters the first counts.
struct Parameters {
    format: Format,
    echo: bool,
    heartbeat_pings: bool,
    errors_in_socket: bool,
    client_id: Option<String>,
    resume: Option<String>,
}

impl Parameters {
    fn read(query: &str) -> Option<Self> {
        let first = |name: &str| {
            form_urlencoded::parse(query.as_bytes())
                .find(|(own, _)| own == name)
                .map(|(_, value)| value.into_owned())
        };
        let format = match first("format").as_deref() {
            None | Some("json") => Format::Json,
            Some("msgpack") => Format::MsgPack,
            Some(_) => return None,
        };
        Some(Self {
            format,
            echo: first("echo").as_deref() != Some("false"),
            heartbeat_pings: first("heartbeats").as_deref() == Some("ping"),
            errors_in_socket: first("errors").as_deref() == Some("socket"),
            client_id: first("clientId"),
            resume: first("resume"),
        })
    }
}

/// The bytes of the answer that opens a socket.
pub(super) fn switching_protocols(accept: &Accept) -> Vec<u8> {
    let mut head = "HTTP/1.1 101 Switching Protocols\r\n".to_owned();
    for (name, value) in accept.headers().chain(cors::EVERY) {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head += "\r\n";
    head.into_bytes()
}

/// As the `date` of an answer has it.
pub fn date(epoch_ms: u64) -> String {
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_millis(epoch_ms.min(LAST_DATE_MS)))
}

/// The bytes of an answer that refuses, after which the connection is closed.
pub fn refusal_bytes(refusal: &Refusal, date: String) -> Vec<u8> {
    let status = refusal.kind.status();
    let reason =
        StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason()).unwrap_or_default();
    let body = refusal.body();
    let mut head = format!("HTTP/1.1 {status} {reason}\r\n");
    let fixed = [
        ("content-type", "application/json".to_owned()),
        ("content-length", body.len().to_string()),
        ("date", date),
    ];
    let cors = cors::EVERY.map(|(name, value)| (name, value.to_owned()));
    let own = refusal.headers().into_iter().filter(|(name, _)| *name != "connection");
    let closing = ("connection", "close".to_owned());
    for (name, value) in fixed.into_iter().chain(cors).chain(own).chain([closing]) {
        head += &format!("{name}: {value}\r\n");
    }
    head += "\r\n";
    let mut bytes = head.into_bytes();
    bytes.extend_from_slice(&body);
    bytes
}
