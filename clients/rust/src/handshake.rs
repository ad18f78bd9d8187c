//! The opening of a connection: TCP, TLS where the address says so, then the WebSocket upgrade.

use std::io::Cursor;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use fastwebsockets::{FragmentCollectorRead, Role, WebSocketWrite, after_handshake_split, handshake};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper::{Request, Response, StatusCode, header};
use hyper_util::rt::TokioIo;
use sha1::{Digest as _, Sha1};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, BufWriter, Chain};

use crate::{Error, Options, http};

pub(crate) type ReadHalf = FragmentCollectorRead<Chain<Cursor<Bytes>, Box<dyn AsyncRead + Send + Unpin>>>;
pub(crate) type WriteHalf = WebSocketWrite<BufWriter<Box<dyn AsyncWrite + Send + Unpin>>>;

const WRITE_BUFFER_BYTES: usize = 64 * 1024;

/// Opens a connection. `authorization` is the value of the header, `resume` the key of the connection to
/// resume.
pub(crate) async fn connect(
    options: &Options,
    authorization: Option<String>,
    resume: Option<&str>,
) -> Result<(ReadHalf, WriteHalf), Error> {
    let target = options.target(resume)?;
    let nonce = handshake::generate_key();
    let mut request = Request::get(&target.path)
        .header(header::HOST, &target.host)
        .header(header::CONNECTION, "Upgrade")
        .header(header::UPGRADE, "websocket")
        .header(header::SEC_WEBSOCKET_VERSION, "13")
        .header(header::SEC_WEBSOCKET_KEY, &nonce);
    if let Some(credential) = authorization {
        request = request.header(header::AUTHORIZATION, credential);
    }
    let request =
        request.body(Empty::<Bytes>::new()).map_err(|e| Error::BadValue(format!("unusable request: {e}")))?;

    let stream = target.connect().await?;
    let (read, write) = match &target.tls {
        #[cfg(feature = "tls")]
        Some(name) => {
            let stream = crate::tls::connect(stream, name, options.authorities.as_deref()).await?;
            let (stream, read) = upgrade(stream, request, &nonce).await?;
            halves(read, tokio::io::split(stream))
        }
        _ => {
            let (stream, read) = upgrade(stream, request, &nonce).await?;
            halves(read, stream.into_split())
        }
    };
    let (read, mut write) = after_handshake_split(read, write, Role::Client);
    write.set_writev(false);
    Ok((FragmentCollectorRead::new(read), write))
}

type Halves =
    (Chain<Cursor<Bytes>, Box<dyn AsyncRead + Send + Unpin>>, BufWriter<Box<dyn AsyncWrite + Send + Unpin>>);

/// Puts the two halves together. `before` was read with the answer to the upgrade.
fn halves<R, W>(before: Bytes, (read, write): (R, W)) -> Halves
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    let read: Box<dyn AsyncRead + Send + Unpin> = Box::new(read);
    (Cursor::new(before).chain(read), BufWriter::with_capacity(WRITE_BUFFER_BYTES, Box::new(write)))
}

/// Upgrades a stream, and gives it with the bytes that were read beyond the answer.
async fn upgrade<S>(stream: S, request: Request<Empty<Bytes>>, nonce: &str) -> Result<(S, Bytes), Error>
where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let (mut sender, connection) =
        http1::handshake(TokioIo::new(stream)).await.map_err(|e| Error::Protocol(format!("{e}")))?;
    let exchange = async {
        let response = sender.send_request(request).await.map_err(|e| Error::Protocol(format!("{e}")))?;
        if response.status() != StatusCode::SWITCHING_PROTOCOLS {
            return Err(http::refusal(response).await);
        }
        check_accept(&response, nonce)?;
        hyper::upgrade::on(response).await.map_err(|e| Error::Protocol(format!("{e}")))
    };
    let connection = connection.with_upgrades();
    tokio::pin!(exchange, connection);
    let upgraded: Upgraded = tokio::select! {
        upgraded = &mut exchange => upgraded?,
        // The connection is done once it has handed its stream over, which may be before `exchange` has seen it.
        _ = &mut connection => exchange.await?,
    };
    let parts = upgraded
        .downcast::<TokioIo<S>>()
        .map_err(|_| Error::Protocol("the upgraded stream is not the connection".into()))?;
    Ok((parts.io.into_inner(), parts.read_buf))
}

fn check_accept(response: &Response<Incoming>, nonce: &str) -> Result<(), Error> {
    let accept = response.headers().get(header::SEC_WEBSOCKET_ACCEPT);
    if accept.is_some_and(|accept| accept.as_bytes() == accept_of(nonce).as_bytes()) {
        return Ok(());
    }
    Err(Error::Protocol("sec-websocket-accept does not answer the key".into()))
}

/// Gives the server's answer to a `sec-websocket-key` (RFC 6455, 4.2.2).
pub(crate) fn accept_of(nonce: &str) -> String {
    const SUFFIX: &str = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11";
    STANDARD.encode(Sha1::new().chain_update(nonce).chain_update(SUFFIX).finalize())
}
