//! TCP, then the WebSocket upgrade.

use std::io::Cursor;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use fastwebsockets::{FragmentCollectorRead, Role, WebSocketWrite, after_handshake_split, handshake};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use sha1::{Digest as _, Sha1};
use tokio::io::{AsyncReadExt as _, BufWriter, Chain};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

use crate::{Error, Options};

pub(crate) type ReadHalf = FragmentCollectorRead<Chain<Cursor<Bytes>, OwnedReadHalf>>;
pub(crate) type WriteHalf = WebSocketWrite<BufWriter<OwnedWriteHalf>>;

const ERROR_BODY_BYTES_MAX: usize = 64 * 1024;
const WRITE_BUFFER_BYTES: usize = 64 * 1024;

pub(crate) async fn connect(options: &Options) -> Result<(ReadHalf, WriteHalf), Error> {
    let target = options.target()?;
    let nonce = handshake::generate_key();
    let mut request = Request::get(&target.path)
        .header(header::HOST, &target.host)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, &nonce);
    if let Some(credential) = options.credential.header() {
        request = request.header(header::AUTHORIZATION, credential);
    }
    let request =
        request.body(Empty::<Bytes>::new()).map_err(|e| Error::BadValue(format!("unusable request: {e}")))?;

    let stream = TcpStream::connect(&target.address).await?;
    stream.set_nodelay(true)?;
    let upgraded = upgrade(stream, request, &nonce).await?;
    let parts = upgraded
        .downcast::<TokioIo<TcpStream>>()
        .map_err(|_| Error::Protocol("the upgraded stream is not the connection".into()))?;
    let (read, write) = parts.io.into_inner().into_split();
    let read = Cursor::new(parts.read_buf).chain(read);
    let write = BufWriter::with_capacity(WRITE_BUFFER_BYTES, write);
    let (read, mut write) = after_handshake_split(read, write, Role::Client);
    write.set_writev(false);
    Ok((FragmentCollectorRead::new(read), write))
}

async fn upgrade(stream: TcpStream, request: Request<Empty<Bytes>>, nonce: &str) -> Result<Upgraded, Error> {
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|e| Error::Protocol(format!("{e}")))?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|e| Error::Protocol(format!("{e}")))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(refusal(response).await);
        }
        check_accept(&response, nonce)?;
        hyper::upgrade::on(response).await.map_err(|e| Error::Protocol(format!("{e}")))
    };
    let connection = connection.with_upgrades();
    tokio::pin!(exchange, connection);
    tokio::select! {
        upgraded = &mut exchange => upgraded,
        // The connection is done once it has handed its stream over, which may be before `exchange` has seen it.
        _ = &mut connection => exchange.await,
    }
}

fn check_accept(response: &Response<Incoming>, nonce: &str) -> Result<(), Error> {
    let accept = response.headers().get(header::SEC_WEBSOCKET_ACCEPT);
    if accept.is_some_and(|accept| accept.as_bytes() == accept_of(nonce).as_bytes()) {
        return Ok(());
    }
    Err(Error::Protocol("sec-websocket-accept does not answer the key".into()))
}

/// What a server answers to a `sec-websocket-key` (RFC 6455, 4.2.2).
pub(crate) fn accept_of(nonce: &str) -> String {
    const SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    STANDARD.encode(Sha1::new().chain_update(nonce).chain_update(SUFFIX).finalize())
}

async fn refusal(response: Response<Incoming>) -> Error {
    #[derive(Deserialize)]
    struct Refusal {
        error: String,
        reason: Option<String>,
    }

    let status = response.status().as_u16();
    let body = Limited::new(response.into_body(), ERROR_BODY_BYTES_MAX).collect().await;
    let body = body.map(|body| body.to_bytes()).unwrap_or_default();
    match serde_json::from_slice::<Refusal>(&body) {
        Ok(Refusal { error, reason }) => Error::Http { status, error, reason },
        Err(_) => Error::Http { status, error: "no error text".into(), reason: None },
    }
}
