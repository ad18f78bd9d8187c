//! Handshake: from a request's head to an open socket, or to a refusal.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_proto::frame::Format;
use sha1::{Digest as _, Sha1};

use super::connection::ConnectionPermit;
use super::session_registry::{ResumableSession, SessionRegistry};
use crate::accounts::{QuotaSlot, TenantConnections};
use crate::auth::{Authenticator, Credentials, Principal};
use crate::edge::errors::{HttpRefusal, RefusalKind};
use crate::edge::files::ClientFiles;
use crate::edge::host;
use crate::edge::http::cors;
use crate::model::{ClientId, Limits};
use crate::telemetry::Limit;

pub const PATH: &str = "/realtime";
/// Subprotocol that is chosen if it is offered.
const SUBPROTOCOL: &str = "fanfare";
/// The end of the year 9999.
const LAST_DATE_MS: u64 = 253_402_300_799_000;
/// Number of header slots; a head with more headers is parsed again with enough slots.
const HEADER_SLOTS: usize = 64;

/// The parts of a request's head that decide on it.
#[derive(Debug)]
pub struct RequestHead<'a> {
    pub query: &'a str,
    pub headers: Vec<(&'a str, &'a [u8])>,
}

/// The answer to a valid handshake.
#[derive(Debug, PartialEq, Eq)]
pub struct UpgradeResponse {
    key: String,
    subprotocol: bool,
}

impl UpgradeResponse {
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

/// A connection whose upgrade was accepted.
#[derive(Debug)]
pub struct AdmittedConnection {
    pub principal: Arc<Principal>,
    /// Forced by the credential or chosen in the query.
    pub client_id: Option<ClientId>,
    pub format: Format,
    pub echo: bool,
    pub heartbeat_pings: bool,
    pub quota_slot: QuotaSlot,
    /// Permit for a socket or event stream of the node.
    pub socket_permit: ConnectionPermit,
    pub transport: ClientTransport,
    /// The session that the connection resumes.
    pub resumable: Option<ResumableSession>,
}

/// Protocol of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClientTransport {
    WebSocket,
    /// Server-sent events.
    Sse,
}

impl ClientTransport {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::WebSocket => "websocket",
            Self::Sse => "sse",
        }
    }
}

/// Context for the admission of sockets.
#[derive(Clone, Copy)]
pub struct AdmissionContext<'a> {
    pub auth: &'a Authenticator,
    pub connections: &'a TenantConnections,
    /// None: no session can be resumed here.
    pub session_registry: Option<&'a SessionRegistry>,
    pub limits: &'a Limits,
    pub files: &'a ClientFiles,
    /// The client's address.
    pub address: Option<IpAddr>,
}

/// The reason why a socket is refused after its upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketRefusal {
    Credential,
    ConnectionLimit,
}

/// Decision on a socket's credential and query.
#[derive(Debug)]
pub enum AdmissionDecision {
    /// Answer 101, then open the socket.
    Open(AdmittedConnection),
    /// Answer 101, then refuse within the socket, for clients that cannot read a status.
    OpenRefused {
        format: Format,
        refused: SocketRefusal,
    },
    Refuse(HttpRefusal),
}

/// Protocol that the first bytes of a connection show.
pub(super) enum DetectedProtocol<'a> {
    /// An upgrade: its handshake's result, and the length of the head.
    Upgrade(RequestHead<'a>, Result<UpgradeResponse, HttpRefusal>, usize),
    /// A request for the HTTP side, with the length of its head.
    Http(usize),
    /// Incomplete head.
    Partial,
    TooLarge,
    Malformed,
}

/// Detects an upgrade of the socket's path; everything else is HTTP. The first `seen` bytes were checked before, and the head did not end
/// in them.
pub(super) fn detect_protocol(bytes: &[u8], seen: usize, bytes_max: usize) -> DetectedProtocol<'_> {
    let look = if seen > 0 && !ends_behind(bytes, seen) {
        DetectedProtocol::Partial
    } else {
        parse(bytes, &mut [httparse::EMPTY_HEADER; HEADER_SLOTS]).unwrap_or_else(|| {
            let within = &bytes[..bytes.len().min(bytes_max)];
            let lines = within.iter().filter(|byte| **byte == b'\n').count();
            parse(bytes, &mut vec![httparse::EMPTY_HEADER; lines]).unwrap_or(DetectedProtocol::TooLarge)
        })
    };
    match look {
        DetectedProtocol::Partial if bytes.len() > bytes_max => DetectedProtocol::TooLarge,
        DetectedProtocol::Upgrade(.., length) | DetectedProtocol::Http(length) if length > bytes_max => {
            DetectedProtocol::TooLarge
        }
        look => look,
    }
}

/// True if an empty line ends after the first `seen` bytes. Avoids that a head in many pieces is parsed with each of them.
fn ends_behind(bytes: &[u8], seen: usize) -> bool {
    let new = &bytes[seen.saturating_sub(2)..];
    new.windows(2).any(|line| line == b"\n\n") || new.windows(3).any(|line| line == b"\n\r\n")
}

/// Parses a head. None: more headers than slots.
fn parse<'a>(bytes: &'a [u8], slots: &mut [httparse::Header<'a>]) -> Option<DetectedProtocol<'a>> {
    let mut request = httparse::Request::new(slots);
    let length = match request.parse(bytes) {
        Ok(httparse::Status::Partial) => return Some(DetectedProtocol::Partial),
        Err(httparse::Error::TooManyHeaders) => return None,
        Err(_) => return Some(DetectedProtocol::Malformed),
        Ok(httparse::Status::Complete(length)) => length,
    };
    let target = request.path.unwrap_or_default();
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let head = RequestHead {
        query,
        headers: request.headers.iter().map(|header| (header.name, header.value)).collect(),
    };
    let is_upgrade = request.method == Some("GET") && path == PATH && request.version == Some(1);
    match head.handshake().filter(|_| is_upgrade) {
        Some(handshake) => Some(DetectedProtocol::Upgrade(head, handshake, length)),
        None => Some(DetectedProtocol::Http(length)),
    }
}

impl<'a> RequestHead<'a> {
    /// Checks the headers of an upgrade over HTTP/1.1. None: no upgrade, or one to another protocol.
    pub fn handshake(&self) -> Option<Result<UpgradeResponse, HttpRefusal>> {
        let is_asked = self.lists("upgrade", b"websocket") && self.lists("connection", b"upgrade");
        is_asked.then(|| self.accept())
    }

    fn accept(&self) -> Result<UpgradeResponse, HttpRefusal> {
        host::check(self.all("host"), true)?;
        let has_length = self.all("content-length").any(|length| length.iter().any(|digit| *digit != b'0'));
        if has_length || self.all("transfer-encoding").next().is_some() {
            return Err(HttpRefusal::malformed("an upgrade has no body"));
        }
        let versions = self.all("sec-websocket-version").flat_map(|value| value.split(|byte| *byte == b','));
        match one(versions.map(<[u8]>::trim_ascii)) {
            Err(ConflictingValues) => {
                return Err(HttpRefusal::malformed("sec-websocket-version must be given once"));
            }
            Ok(Some(b"13")) => {}
            Ok(_) => {
                return Err(HttpRefusal::new(
                    RefusalKind::UpgradeRequired,
                    "sec-websocket-version must be 13",
                ));
            }
        }
        let key = one(self.all("sec-websocket-key"))
            .map_err(|ConflictingValues| HttpRefusal::malformed("sec-websocket-key must be given once"))?
            .filter(|key| is_key(key))
            .ok_or_else(|| HttpRefusal::malformed("sec-websocket-key must be 16 bytes in base64"))?;
        let mut offered =
            self.all("sec-websocket-protocol").flat_map(|value| value.split(|byte| *byte == b','));
        let subprotocol = offered.any(|own| own.trim_ascii() == SUBPROTOCOL.as_bytes());
        Ok(UpgradeResponse { key: accept_of(key), subprotocol })
    }

    /// Addresses in `x-forwarded-for`, first to last.
    pub(super) fn forwarded_for(&self) -> impl DoubleEndedIterator<Item = &'a [u8]> {
        self.all("x-forwarded-for").collect::<Vec<_>>().into_iter()
    }

    /// Checks the credential, and takes a connection permit of the node and a quota slot of the tenant.
    pub fn decide(&self, gate: AdmissionContext<'_>) -> AdmissionDecision {
        let permit = match gate.files.take_socket() {
            Ok(permit) => permit,
            Err(full) => {
                full.count_refusal();
                return AdmissionDecision::Refuse(HttpRefusal::full());
            }
        };
        let authorization: Vec<&[u8]> = self.all("authorization").collect();
        let address = gate.address;
        let credentials = Credentials { authorization, query: self.query, socket: true, address };
        let parameters = Parameters::read(self.query);
        let (principal, parameters) = match (gate.auth.authenticate(&credentials), parameters) {
            (Err(_), Some(Parameters { errors_in_socket: true, format, .. })) => {
                return AdmissionDecision::OpenRefused { format, refused: SocketRefusal::Credential };
            }
            (Err(_), _) => return AdmissionDecision::Refuse(HttpRefusal::unauthorized()),
            (Ok(_), None) => {
                return AdmissionDecision::Refuse(HttpRefusal::malformed("format must be json or msgpack"));
            }
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
                    return AdmissionDecision::Refuse(HttpRefusal::malformed(format!("clientId {error}")));
                }
            },
        };
        // If the session cannot be resumed, for whatever reason, the connection is a fresh one.
        let resumable = gate
            .session_registry
            .zip(resume)
            .and_then(|(sessions, key)| sessions.find_resumable(&key, &principal, client_id.as_ref()));
        let replaces = resumable.as_ref().is_some_and(|resumable| resumable.is_open);
        let quota_slot = if replaces {
            Some(gate.connections.admit_successor(&principal.account))
        } else {
            gate.connections.admit(&principal.account)
        };
        let Some(quota_slot) = quota_slot else {
            metrics::counter!("fanfare_connection_limit_refusals_total").increment(1);
            if errors_in_socket {
                return AdmissionDecision::OpenRefused { format, refused: SocketRefusal::ConnectionLimit };
            }
            return AdmissionDecision::Refuse(HttpRefusal::connection_limit());
        };
        let transport = ClientTransport::WebSocket;
        let opening = AdmittedConnection {
            principal,
            client_id,
            format,
            echo,
            heartbeat_pings,
            quota_slot,
            socket_permit: permit,
            transport,
            resumable,
        };
        AdmissionDecision::Open(opening)
    }

    /// True if a list header contains the word.
    fn lists(&self, name: &str, word: &[u8]) -> bool {
        let mut words = self.all(name).flat_map(|value| value.split(|byte| *byte == b','));
        words.any(|own| own.trim_ascii().eq_ignore_ascii_case(word))
    }

    fn all(&self, name: &str) -> impl Iterator<Item = &'a [u8]> {
        let matching = self.headers.iter().filter(move |(own, _)| own.eq_ignore_ascii_case(name));
        matching.map(|(_, value)| value.trim_ascii())
    }
}

/// Different values where one is expected.
struct ConflictingValues;

/// The value, if all of them are equal.
fn one<'a>(mut values: impl Iterator<Item = &'a [u8]>) -> Result<Option<&'a [u8]>, ConflictingValues> {
    let first = values.next();
    if values.all(|other| Some(other) == first) { Ok(first) } else { Err(ConflictingValues) }
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

/// Query parameters beside the credential; of repeated ones the first counts.
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

/// Bytes of the 101 answer.
pub(super) fn switching_protocols(accept: &UpgradeResponse) -> Vec<u8> {
    let mut head = "HTTP/1.1 101 Switching Protocols\r\n".to_owned();
    for (name, value) in accept.headers().chain(cors::EVERY) {
        head.extend([name, ": ", value, "\r\n"]);
    }
    head += "\r\n";
    head.into_bytes()
}

/// Value of a `date` header.
pub fn date(epoch_ms: u64) -> String {
    httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_millis(epoch_ms.min(LAST_DATE_MS)))
}

/// Bytes of a refusing answer, after which the connection is closed.
pub fn refusal_bytes(refusal: &HttpRefusal, date: String) -> Vec<u8> {
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
