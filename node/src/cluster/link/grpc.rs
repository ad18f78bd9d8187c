//! gRPC over one connection: HTTP/2 with its limits, and the only method of the service.

use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use fanfare_proto::peer::{STREAM_PATH, v1};
use futures_util::Stream;
use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self as client, SendRequest};
use hyper::rt::Executor;
use hyper::server::conn::http2 as server;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;

use super::FRAME_BYTES_MAX;
use super::certificates::SERVER_NAME;
use crate::tasks::{OnStop, Tasks};

/// Flow control window: bytes that a peer may send before they are read.
const WINDOW_BYTES: u32 = 2 * 1024 * 1024;
const HTTP_FRAME_BYTES: u32 = 64 * 1024;
const SEND_BYTES: usize = 512 * 1024;
const HEAD_BYTES: u32 = 8 * 1024;
/// Interval of HTTP/2 pings, which detect a silent socket even without an open stream. The timeout is later than that of an open stream
/// ([`super::SILENCE`]), because only the latter records that the peer may still run.
const KEEP_ALIVE: Duration = Duration::from_millis(500);
const KEEP_ALIVE_TIMEOUT: Duration = Duration::from_secs(3);

pub(super) type Codec = ProstCodec<v1::Frame, v1::Frame>;

/// Executor for the background tasks of HTTP/2: they belong to the node's tasks and end with the connection.
#[derive(Clone)]
pub(super) struct PeerConnectionExecutor {
    pub(super) tasks: Arc<Tasks>,
    pub(super) end: CancellationToken,
}

impl<F> Executor<F> for PeerConnectionExecutor
where
    F: Future + Send + 'static,
    F::Output: Send,
{
    fn execute(&self, future: F) {
        let end = self.end.clone();
        self.tasks.spawn("peer connection", OnStop::Cancel, async move {
            end.run_until_cancelled(future).await;
        });
    }
}

/// Serves one connection until either side ends it. A connection has at most one peer stream.
pub(super) async fn serve<I, H, S>(io: I, connections: PeerConnectionExecutor, handler: H)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    H: Fn(Streaming<v1::Frame>) -> S + Clone + Send + Sync + 'static,
    S: Stream<Item = Result<v1::Frame, Status>> + Send + 'static,
{
    let _end = connections.end.clone().drop_guard();
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let handler = handler.clone();
        async move { Ok::<_, Infallible>(answer(request, handler).await) }
    });
    let served = server::Builder::new(connections)
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(HTTP_FRAME_BYTES)
        .max_send_buf_size(SEND_BYTES)
        .max_header_list_size(HEAD_BYTES)
        .max_concurrent_streams(1)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .serve_connection(TokioIo::new(io), service)
        .await;
    if let Err(error) = served {
        tracing::debug!(%error, "incoming peer connection closed");
    }
}

async fn answer<H, S>(request: Request<Incoming>, handler: H) -> Response<Body>
where
    H: Fn(Streaming<v1::Frame>) -> S + Send,
    S: Stream<Item = Result<v1::Frame, Status>> + Send + 'static,
{
    if request.uri().path() != STREAM_PATH {
        return Status::unimplemented("a peer has lanes and nothing else").into_http();
    }
    tonic::server::Grpc::new(Codec::default())
        .max_decoding_message_size(FRAME_BYTES_MAX)
        .streaming(PeerStreamService(handler), request)
        .await
}

struct PeerStreamService<H>(H);

impl<H, S> tonic::server::StreamingService<v1::Frame> for PeerStreamService<H>
where
    H: Fn(Streaming<v1::Frame>) -> S,
    S: Stream<Item = Result<v1::Frame, Status>>,
{
    type Response = v1::Frame;
    type ResponseStream = S;
    type Future = std::future::Ready<Result<tonic::Response<S>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<v1::Frame>>) -> Self::Future {
        std::future::ready(Ok(tonic::Response::new((self.0)(request.into_inner()))))
    }
}

/// Opens the stream of a fresh connection.
pub(super) async fn open<I, S>(
    io: I,
    connections: PeerConnectionExecutor,
    frames: S,
) -> Result<Streaming<v1::Frame>, Status>
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Stream<Item = v1::Frame> + Send + 'static,
{
    let failed = |error: hyper::Error| Status::unavailable(error.to_string());
    let (requests, connection) = client::Builder::new(connections.clone())
        .timer(TokioTimer::new())
        .initial_stream_window_size(WINDOW_BYTES)
        .initial_connection_window_size(WINDOW_BYTES)
        .max_frame_size(HTTP_FRAME_BYTES)
        .max_send_buf_size(SEND_BYTES)
        .max_header_list_size(HEAD_BYTES)
        .keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE_TIMEOUT)
        .handshake(TokioIo::new(io))
        .await
        .map_err(failed)?;
    connections.execute(async move {
        if let Err(error) = connection.await {
            tracing::debug!(%error, "outgoing peer connection closed");
        }
    });
    let origin = Uri::builder()
        .scheme("https")
        .authority(SERVER_NAME)
        .path_and_query("/")
        .build()
        .map_err(|_| Status::internal("the name of peers makes no address"))?;
    let stream = tonic::client::Grpc::with_origin(HttpRequestSender(requests), origin)
        .max_decoding_message_size(FRAME_BYTES_MAX)
        .streaming(tonic::Request::new(frames), PathAndQuery::from_static(STREAM_PATH), Codec::default())
        .await?;
    Ok(stream.into_inner())
}

struct HttpRequestSender(SendRequest<Body>);

impl tower_service::Service<Request<Body>> for HttpRequestSender {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;
    use tokio::io::{copy_bidirectional, duplex};
    use tokio::runtime::Handle;
    use tokio::time::Instant;

    use super::*;

    /// Far above the time that a busy machine needs.
    const LATE: Duration = Duration::from_secs(20);

    /// Neither side hears that the other one is gone: nothing arrives any more, and no connection ends.
    #[tokio::test]
    async fn each_side_gives_up_one_that_says_nothing_any_more() {
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let connections =
            || PeerConnectionExecutor { tasks: Arc::clone(&tasks), end: CancellationToken::new() };
        let ((dialled, mut near), (mut far, accepted)) = (duplex(1 << 16), duplex(1 << 16));
        let silent = CancellationToken::new();
        let carried = silent.run_until_cancelled(copy_bidirectional(&mut near, &mut far));
        let dialling = async {
            let mut stream = open(dialled, connections(), stream::pending()).await.expect("a lane opens");
            // Both sides answer each other as long as packets pass.
            let quiet = tokio::time::timeout(KEEP_ALIVE_TIMEOUT + 2 * KEEP_ALIVE, stream.message()).await;
            assert!(quiet.is_err(), "{quiet:?}");
            let begun = Instant::now();
            silent.cancel();
            assert!(tokio::time::timeout(LATE, stream.message()).await.expect("it ends").is_err());
            (begun, Instant::now())
        };
        let accepting = async {
            let served = serve(accepted, connections(), |frames| frames);
            tokio::time::timeout(2 * LATE, served).await.expect("it ends");
            Instant::now()
        };
        let ((begun, dialler), acceptor, _) = tokio::join!(dialling, accepting, carried);
        for (side, ended) in [("who dials", dialler), ("who serves", acceptor)] {
            assert!(ended >= begun + KEEP_ALIVE_TIMEOUT - KEEP_ALIVE, "{side}: {:?}", ended - begun);
        }
    }
}
