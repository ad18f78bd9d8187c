//! A small HTTP client that sends paths exactly as they are given.

use std::net::SocketAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{HeaderMap, Request};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::raw::Stream;

/// Error of a request without an answer.
pub type Error = Box<dyn std::error::Error + Send + Sync>;

/// Gives the headers of a WebSocket upgrade.
pub fn upgrade(authorization: &str) -> [(&str, &str); 5] {
    [
        ("authorization", authorization),
        ("connection", "upgrade"),
        ("upgrade", "websocket"),
        ("sec-websocket-version", "13"),
        ("sec-websocket-key", "AAAAAAAAAAAAAAAAAAAAAA=="),
    ]
}

#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Response {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }

    /// Parses the body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| {
            assert!(self.body.is_empty(), "status {}, not JSON ({e}): {:?}", self.status, self.body);
            Value::Null
        })
    }

    /// Gives the `error` of the body; empty without one.
    pub fn error(&self) -> String {
        self.json()["error"].as_str().unwrap_or_default().into()
    }
}

/// Sends one request on a connection of its own. Fails the test without an answer.
pub async fn request(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Response {
    let answer = try_request(addr, method, path, headers, body).await;
    answer.unwrap_or_else(|e| unreachable!("no answer to {method} {path}: {e}"))
}

/// Sends one request on a connection of its own.
pub async fn try_request(
    addr: SocketAddr,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: impl Into<Bytes>,
) -> Result<Response, Error> {
    Connection::open(addr).await?.request(method, path, headers, body).await
}

/// A connection for many requests, one after another.
pub struct Connection {
    sender: SendRequest<Full<Bytes>>,
    host: String,
    _driver: JoinSet<()>,
}

impl Connection {
    pub async fn open(addr: SocketAddr) -> Result<Self, Error> {
        let stream = TcpStream::connect(addr).await?;
        stream.set_nodelay(true)?;
        Self::over(stream, addr).await
    }

    /// Makes a connection over a stream of the caller.
    pub async fn over(stream: impl Stream + 'static, addr: SocketAddr) -> Result<Self, Error> {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let mut driver = JoinSet::new();
        driver.spawn(async move { drop(connection.await) });
        Ok(Self { sender, host: addr.to_string(), _driver: driver })
    }

    pub async fn request(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: impl Into<Bytes>,
    ) -> Result<Response, Error> {
        let mut request = Request::builder().method(method).uri(path).header("host", &self.host);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(body.into()))?;
        let exchange = async {
            self.sender.ready().await?;
            let response = self.sender.send_request(request).await?;
            let (parts, body) = response.into_parts();
            let body = body.collect().await?.to_bytes();
            Ok::<_, hyper::Error>(Response { status: parts.status.as_u16(), headers: parts.headers, body })
        };
        Ok(timeout(crate::SOON, exchange).await??)
    }
}

/// Gives the value of an `authorization` header for a key.
pub fn basic(key: &str) -> String {
    format!("Basic {}", STANDARD.encode(key))
}

/// Gives the value of an `authorization` header for a token.
pub fn bearer(token: &str) -> String {
    format!("Bearer {token}")
}
