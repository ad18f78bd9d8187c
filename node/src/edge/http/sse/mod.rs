//! `GET /realtime/sse`: a session that only listens, for clients without WebSocket.
//!
//! Behind each stream is an ordinary connection of a shard over a socket pair within the process, so attach, replay, capability, expiry,
//! limits and slow consumers work as for the realtime socket. Frames that a slow client leaves unread stay in the pair's buffers and in the
//! connection's outbox, which is bounded; at the bound the stream ends.

mod stream;

use std::borrow::Cow;
use std::convert::Infallible;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;

use axum::body::{Body, Bytes};
use axum::http::header::{CACHE_CONTROL, CONNECTION, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method};
use axum::response::Response;
use fanfare_proto::frame::Format;
use futures_util::stream::empty;
use serde_json::json;

use self::stream::{SseStream, client_frame};
use super::{Api, address, authorization};
use crate::auth::Credentials;
use crate::edge::ClientSocket;
use crate::edge::errors::HttpRefusal;
use crate::edge::http::route::Route;
use crate::edge::link::ClientLink;
use crate::edge::socket::{
    AdmissionContext, AdmissionDecision, AdmittedConnection, ClientTransport, ConnectionPermit, Input,
    RequestHead, SocketRefusal,
};
use crate::model::{ChannelName, Limits, Operation};
use crate::telemetry::{Limit, RATE_LIMITED};

pub(super) fn open(api: &Api, route: &Route, head: &Parts) -> Result<Response, HttpRefusal> {
    let query = head.uri.query().unwrap_or_default();
    let authorization = authorization(&head.headers);
    let address = address(&head.extensions);
    let credentials = Credentials { authorization: authorization.clone(), query, socket: true, address };
    let principal = api.services.auth.authenticate(&credentials)?;
    route.takes(head.method.as_str())?;
    let channels = channels(query, &api.services.limits)?;
    if !channels.iter().all(|channel| principal.allows(channel.as_str(), Operation::Subscribe)) {
        return Err(HttpRefusal::forbidden(Operation::Subscribe.as_str()));
    }
    if head.method == Method::HEAD {
        // Like a stream, a HEAD answer has no known length.
        return Ok(answer(Body::from_stream(empty::<Result<Bytes, Infallible>>())));
    }
    let opening = admit(api, query, &authorization, address)?;
    let permit = ConnectionPermit::take(&api.streams);
    if api.streams.load(Ordering::SeqCst) > api.services.limits.sse_streams {
        Limit::SseStreams.hit();
        return Err(HttpRefusal::unanswered());
    }
    // A browser that reconnects by itself still sends the query of its first request.
    let header = head.headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let last = header.map(Cow::from).or_else(|| parameter(query, "lastEventId"));
    let serials = serials(last.as_deref(), channels.len());
    let comment_ms = api.services.limits.heartbeat_ms;
    let client = head.extensions.get::<ClientSocket>().cloned();
    let (stream, theirs) = begin(channels.clone(), serials.clone(), comment_ms, client).map_err(|error| {
        tracing::warn!(target: RATE_LIMITED, %error, "event stream open failed");
        HttpRefusal::unanswered()
    })?;
    let mut read = Vec::new();
    for (channel, serial) in channels.iter().zip(&serials) {
        let mut attach = json!({"op": 8, "channel": channel.as_str()});
        if !serial.is_empty() {
            attach["serial"] = json!(serial);
        }
        read.extend(client_frame(&attach.to_string()));
    }
    let socket = std::net::TcpStream::from(OwnedFd::from(theirs));
    api.services.shards.push_next(Input::Adopt {
        link: ClientLink::plain(socket),
        permit,
        read,
        opening: Box::new(opening),
    });

    Ok(answer(Body::new(stream)))
}

fn answer(body: Body) -> Response {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    // hyper reads no further request, so the connection must close.
    headers.insert(CONNECTION, HeaderValue::from_static("close"));
    // A proxy that buffers the answer would hold back every event.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

fn parameter<'a>(query: &'a str, name: &str) -> Option<Cow<'a, str>> {
    form_urlencoded::parse(query.as_bytes()).find(|(own, _)| own == name).map(|(_, value)| value)
}

/// The names of all `channel` parameters, in their order.
fn channels(query: &str, limits: &Limits) -> Result<Vec<ChannelName>, HttpRefusal> {
    let mut channels = Vec::new();
    for (_, value) in form_urlencoded::parse(query.as_bytes()).filter(|(name, _)| name == "channel") {
        let channel = ChannelName::new(&value, limits)
            .inspect_err(|error| Limit::ChannelNameBytes.hit_if(error.is_too_long()))?;
        if channels.contains(&channel) {
            return Err(HttpRefusal::malformed("channel is repeated"));
        }
        channels.push(channel);
        if channels.len() > limits.sse_channels {
            Limit::SseChannels.hit();
            let error = format!("more than {} channels on one stream", limits.sse_channels);
            return Err(HttpRefusal::malformed(error));
        }
    }
    if channels.is_empty() {
        return Err(HttpRefusal::malformed("channel is missing"));
    }
    Ok(channels)
}

/// Positions of the client in each channel. A foreign id yields no valid position, and the client is told a continuity loss.
fn serials(last_event_id: Option<&str>, channels: usize) -> Vec<String> {
    let Some(last) = last_event_id.filter(|last| !last.is_empty()) else {
        return vec![String::new(); channels];
    };
    let serials: Vec<String> = last.split(',').map(str::to_owned).collect();
    if serials.len() == channels { serials } else { vec!["?".to_owned(); channels] }
}

fn admit(
    api: &Api,
    query: &str,
    authorization: &[&[u8]],
    address: Option<IpAddr>,
) -> Result<AdmittedConnection, HttpRefusal> {
    let headers = authorization.iter().map(|value| ("authorization", *value)).collect();
    let head = RequestHead { query, headers };
    let services = &api.services;
    let gate = AdmissionContext {
        auth: &services.auth,
        connections: &services.connections,
        session_registry: None,
        limits: &services.limits,
        files: &services.files,
        address,
    };
    match head.decide(gate) {
        AdmissionDecision::Open(opening) => Ok(AdmittedConnection {
            format: Format::Json,
            heartbeat_pings: false,
            transport: ClientTransport::Sse,
            ..opening
        }),
        AdmissionDecision::Refuse(refusal) => Err(refusal),
        AdmissionDecision::OpenRefused { refused: SocketRefusal::Credential, .. } => {
            Err(HttpRefusal::unauthorized())
        }
        AdmissionDecision::OpenRefused { refused: SocketRefusal::ConnectionLimit, .. } => {
            Err(HttpRefusal::connection_limit())
        }
    }
}

/// Creates the stream, and the shard's end of its socket pair.
fn begin(
    channels: Vec<ChannelName>,
    serials: Vec<String>,
    comment_ms: u64,
    client: Option<ClientSocket>,
) -> std::io::Result<(SseStream, UnixStream)> {
    let (ours, theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    Ok((SseStream::new(ours, channels, serials, comment_ms, client)?, theirs))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn up_to_twenty_channels_each_once() {
        let query =
            |count: usize| -> String { (0..count).map(|number| format!("&channel=c{number}")).collect() };
        assert_eq!(channels(&query(20), &Limits::default()).expect("the limit itself").len(), 20);
        for query in
            [query(21), String::new(), "channel=a&channel=a".into(), "channel=".into(), "channel=[x".into()]
        {
            assert!(channels(&query, &Limits::default()).is_err(), "{query}");
        }
        let names = channels("channel=b%3A1&key=x&channel=a", &Limits::default()).expect("two good names");
        assert_eq!(names.iter().map(ChannelName::as_str).collect::<Vec<_>>(), ["b:1", "a"]);
    }

    #[test]
    fn an_id_holds_a_serial_for_each_channel_or_no_position() {
        assert_eq!(serials(None, 2), ["", ""]);
        assert_eq!(serials(Some(""), 2), ["", ""]);
        assert_eq!(serials(Some("a,b"), 2), ["a", "b"]);
        assert_eq!(serials(Some("a,"), 2), ["a", ""]);
        assert_eq!(serials(Some("a"), 2), ["?", "?"]);
        assert_eq!(serials(Some("a,b,c"), 2), ["?", "?"]);
    }
}
