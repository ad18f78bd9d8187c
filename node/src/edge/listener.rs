//! The client listener: accepts, and serves as HTTP what is not a socket.

mod silence;
mod stall;
mod stream;
#[cfg(test)]
mod tests;

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Version, header,
};
use axum::response::IntoResponse as _;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tower_service::Service as _;

use super::errors::Refusal;
use super::host;
use super::http::cors;
use super::link::Link;
use super::socket::{Decision, Gate, Head, HttpConnection, Identities, Input, PATH, Permit, Shards};
use super::{ClientSocket, PeerAddress};
use crate::accounts::TenantConnections;
use crate::auth::Authenticator;
use crate::model::Limits;
use crate::pulse;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::{Limit, OFTEN};
use crate::tls::Certificates;
use stream::{Headers, ReadStream};

/// Connections that the kernel completes while this node is busy.
const BACKLOG: i32 = 4096;
/// Files kept for everything but client connections.
const RESERVED_FILES: u64 = 512;
/// What the kernel's table of open files takes for so many is half a MB.
const ROOM_MAX: u64 = 1 << 16;
/// Of an event stream, beside that of its connection.
const STREAM_FILES: usize = 2;
/// One in so many connections may be an event stream, where files are scarce.
const STREAMS_SHARE: usize = 8;
/// hyper takes as many headers of a request unless it is told otherwise.
const HEADERS_FEW: usize = 100;
/// What a request under way is given when the node stops.
const LAST_REQUEST: Duration = Duration::from_secs(3);
/// How long accepting pauses when no more connections may be held.
const FULL_PAUSE: Duration = Duration::from_millis(20);
/// How often it is looked whether the node may open.
const OPEN_LOOK: Duration = Duration::from_millis(10);
/// A node that could not meet all others by then serves all the same.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// An address that is ours, and refuses connections until it listens.
pub struct Bound(socket2::Socket);

impl Bound {
    /// Fails where somebody listens. Port 0 lets the system choose.
    pub fn to(address: SocketAddr) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, Some(socket2::Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        Ok(Self(socket))
    }

    /// With a backlog that takes a herd.
    pub fn listen(self) -> io::Result<TcpListener> {
        self.0.listen(BACKLOG)?;
        Ok(self.0.into())
    }
}

/// Accepts on a thread of its own until [`Acceptor::stop`].
pub struct Acceptor {
    listener: TcpListener,
    stopping: Arc<AtomicBool>,
}

impl Acceptor {
    /// Gives every connection to a shard, under TLS when there is a certificate. At the bound it leaves new ones in the kernel's
    /// backlog, and before `may_open` for at most 10 s.
    pub fn start(
        listener: TcpListener,
        shards: Arc<Shards>,
        tls: Option<Arc<Certificates>>,
        limits: &Limits,
        may_open: impl Fn() -> bool + Send + 'static,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let accepting = listener.try_clone()?;
        let stopping = Arc::new(AtomicBool::new(false));
        let accept = Accept {
            shards,
            tls,
            handshake_bytes: limits.header_bytes,
            open: Arc::new(AtomicUsize::new(0)),
            open_max: limits.connections,
            stopping: Arc::clone(&stopping),
        };
        tasks.spawn_thread("accept", move || {
            accept.wait(may_open, OPEN_MAX);
            accept.run(&accepting);
        })?;
        Ok(Self { listener, stopping })
    }

    /// Takes no further connection; the thread ends.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // The blocked accept returns; an error means that it has ended already.
        socket2::SockRef::from(&self.listener).shutdown(std::net::Shutdown::Read).ok();
    }
}

/// The limits with as many connections and event streams as there are open files for, which is lifted as far as it goes.
pub fn within_open_files(limits: Limits) -> Limits {
    let files = open_files_max();
    make_room(files);
    within(files, limits)
}

/// Lets the kernel's table of open files be as large as it may get at once. It grows to twice its size, and since threads share it whoever
/// opens a file waits each time until none of them can be looking at the old one.
#[expect(unsafe_code, reason = "there is no safe call that says which number a file is to have")]
fn make_room(files: u64) {
    let highest = files.clamp(1, ROOM_MAX) - 1;
    // SAFETY: both calls take numbers only, and the second one that of a file that nobody else knows.
    unsafe {
        let file = libc::fcntl(libc::STDERR_FILENO, libc::F_DUPFD_CLOEXEC, highest);
        if file >= 0 {
            libc::close(file);
        }
    }
}

/// No client may take the files that the store needs.
fn within(files: u64, mut limits: Limits) -> Limits {
    let files = files.saturating_sub(RESERVED_FILES).max(RESERVED_FILES);
    let files = usize::try_from(files).unwrap_or(usize::MAX);
    limits.sse_streams = limits.sse_streams.min(files / STREAMS_SHARE);
    if limits.connections == 0 {
        limits.connections = files - STREAM_FILES * limits.sse_streams;
    }
    limits
}

#[expect(unsafe_code, reason = "there is no safe call for the limit of open files")]
fn open_files_max() -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: both calls get a valid pointer to a limit that lives here.
    unsafe {
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) != 0 {
            return 1024;
        }
        limit.rlim_cur = limit.rlim_max;
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit);
    }
    limit.rlim_cur
}

/// The accepting thread.
struct Accept {
    shards: Arc<Shards>,
    /// Without it connections are plain.
    tls: Option<Arc<Certificates>>,
    handshake_bytes: usize,
    open: Arc<AtomicUsize>,
    open_max: usize,
    stopping: Arc<AtomicBool>,
}

impl Accept {
    /// Who comes meanwhile waits in the kernel's backlog.
    fn wait(&self, may_open: impl Fn() -> bool, at_most: Duration) {
        let begun = Instant::now();
        while !may_open() && !self.stopping.load(Ordering::SeqCst) {
            if begun.elapsed() >= at_most {
                tracing::warn!(
                    "clients are served though not all other nodes were met: who resumes here may be told that it missed something"
                );
                return;
            }
            std::thread::sleep(OPEN_LOOK);
        }
    }

    fn run(self, listener: &TcpListener) {
        let mut is_full = false;
        while !self.stopping.load(Ordering::SeqCst) {
            if self.open.load(Ordering::Relaxed) >= self.open_max {
                if !std::mem::replace(&mut is_full, true) {
                    Limit::Connections.hit();
                    tracing::warn!(target: OFTEN, open = self.open_max, "no further connection is accepted for now");
                }
                std::thread::sleep(FULL_PAUSE);
                continue;
            }
            is_full = false;
            match listener.accept() {
                Ok((socket, _)) => self.take(socket),
                Err(error) if self.stopping.load(Ordering::SeqCst) => {
                    tracing::debug!(%error, "accepting has ended");
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    tracing::warn!(%error, "a connection could not be accepted");
                    std::thread::sleep(FULL_PAUSE);
                }
            }
        }
    }

    fn take(&self, socket: std::net::TcpStream) {
        let permit = Permit::take(&self.open);
        // A connection that is gone already fails here, and then there is nobody to serve.
        if socket.set_nonblocking(true).is_err() || socket.set_nodelay(true).is_err() {
            return;
        }
        let tls = self.tls.as_ref().map(|certificates| certificates.accept(self.handshake_bytes)).transpose();
        match tls {
            Ok(tls) => self.shards.push_next(Input::Accept(Link { socket, tls }, permit)),
            Err(error) => tracing::error!(%error, "tls cannot begin, a connection is closed"),
        }
    }
}

/// What the HTTP side serves with.
#[derive(Clone)]
pub struct HttpServices {
    pub router: Router,
    pub auth: Arc<Authenticator>,
    pub connections: Arc<TenantConnections>,
    pub identities: Arc<Identities>,
    pub limits: Arc<Limits>,
    pub shards: Arc<Shards>,
    pub tasks: Arc<Tasks>,
}

/// Serves what the shards found to be HTTP, until they are gone.
pub async fn serve_http(services: HttpServices, mut connections: mpsc::Receiver<HttpConnection>) {
    while let Some(connection) = connections.recv().await {
        let own = services.clone();
        services.tasks.spawn("http connection", OnStop::Finish, async move {
            if let Err(error) = serve_connection(own, connection).await {
                tracing::debug!(%error, "an http connection ended early");
            }
        });
    }
}

async fn serve_connection(services: HttpServices, connection: HttpConnection) -> Result<(), hyper::Error> {
    let Ok(peer) = connection.link.socket.peer_addr() else { return Ok(()) };
    let Ok(mut stream) = ReadStream::new(connection, &services.limits) else { return Ok(()) };
    if stream.writable().await.is_err() {
        return Ok(());
    }
    loop {
        let (result, back) = serve_stream(&services, peer, stream).await;
        let Some(back) = back else { return result };
        stream = back;
    }
}

/// Gives the stream back when it is to be served with more headers.
async fn serve_stream(
    services: &HttpServices,
    peer: SocketAddr,
    mut stream: ReadStream,
) -> (Result<(), hyper::Error>, Option<ReadStream>) {
    let stopping = services.tasks.stopping();
    let adoption = Adoption::default();
    let (socket, turns) = (stream.client_socket(), stream.turns());
    let service = hyper::service::service_fn(|request| {
        let (services, socket, adoption) = (services.clone(), socket.clone(), Arc::clone(&adoption));
        let turn = turns.begin();
        async move {
            let response = respond(services, peer, socket, adoption, request).await;
            drop(turn);
            Ok::<_, Infallible>(response)
        }
    });
    let http = protocol(&services.limits, *stream.headers());
    let mut serving = http.serve_connection(TokioIo::new(stream), service);
    drop(http);
    let served = tokio::select! {
        result = &mut serving => Some(result),
        () = stopping.cancelled() => None,
    };
    let result = if let Some(result) = served {
        result
    } else {
        Pin::new(&mut serving).graceful_shutdown();
        // A publish has its answer by then; a body that is still not there is not worth waiting for.
        tokio::time::timeout(LAST_REQUEST, &mut serving).await.unwrap_or(Ok(()))
    };
    let parts = serving.into_parts();
    let mut stream = parts.io.into_inner();
    stream.give_back(&parts.read_buf);
    if *stream.headers() == Headers::TooMany {
        *stream.headers() = Headers::Many;
        return (Ok(()), Some(stream));
    }
    if let Some(adopt) = adoption.lock().take()
        && result.is_ok()
        && let Some(input) = adopt(stream)
    {
        services.shards.push_next(input);
    }
    (result, None)
}

fn protocol(limits: &Limits, headers: Headers) -> http1::Builder {
    let mut http = http1::Builder::new();
    // The stream looks at the time, since a connection may be idle for longer than a head may take.
    http.header_read_timeout(None)
        .max_buf_size(limits.header_bytes.max(8192))
        .max_header_size(limits.header_bytes)
        .half_close(true);
    if headers == Headers::Many {
        // As many as the bytes can hold, of which a line takes at least three; a map takes 24 576.
        http.max_headers(limits.header_bytes / 3);
    }
    http
}

/// What becomes of a connection that was upgraded, once its answer is on its way.
type Adoption = Arc<Mutex<Option<Box<dyn FnOnce(ReadStream) -> Option<Input> + Send>>>>;

/// Of many headers only those that are looked at stay: in a map they take many times their bytes, for as long as the
/// request is under way.
fn thin(headers: &mut HeaderMap) {
    if headers.len() <= HEADERS_FEW {
        return;
    }
    let mut thin = HeaderMap::new();
    for value in headers.get_all(header::AUTHORIZATION) {
        thin.append(header::AUTHORIZATION, value.clone());
    }
    for value in headers.get_all(header::CONTENT_ENCODING) {
        thin.append(header::CONTENT_ENCODING, value.clone());
    }
    for name in [header::CONTENT_LENGTH, header::EXPECT, HeaderName::from_static("last-event-id")] {
        if let Some(value) = headers.remove(&name) {
            thin.insert(name, value);
        }
    }
    *headers = thin;
}

async fn respond(
    services: HttpServices,
    peer: SocketAddr,
    socket: ClientSocket,
    adoption: Adoption,
    mut request: Request<Incoming>,
) -> Response<Body> {
    let refused = host::of(&request).err().map(Refusal::into_response);
    if let Some(mut response) = refused.or_else(|| upgrade(&services, peer.ip(), &adoption, &request)) {
        cors::on_every(response.headers_mut());
        return response;
    }
    thin(request.headers_mut());
    request.extensions_mut().insert(PeerAddress(peer.ip()));
    request.extensions_mut().insert(socket);
    pulse::pass();
    let Ok(response) = services.router.clone().call(request.map(Body::new)).await;
    pulse::pass();
    response
}

/// An upgrade that comes here followed another request on its connection, as through a proxy.
fn upgrade(
    services: &HttpServices,
    peer: IpAddr,
    adoption: &Adoption,
    request: &Request<Incoming>,
) -> Option<Response<Body>> {
    let is_socket = request.method() == Method::GET
        && request.uri().path() == PATH
        && request.version() == Version::HTTP_11;
    if !is_socket {
        return None;
    }
    let headers = request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let head = Head { query: request.uri().query().unwrap_or_default(), headers };
    let accept = match head.handshake()? {
        Ok(accept) => accept,
        Err(refusal) => return Some(refusal.into_response()),
    };
    let HttpServices { auth, connections, identities, limits, .. } = services;
    let (identities, address) = (Some(&**identities), Some(peer));
    let decision = head.decide(Gate { auth, connections, identities, limits, address });
    let adopt: Box<dyn FnOnce(ReadStream) -> Option<Input> + Send> = match decision {
        Decision::Refuse(refusal) => return Some(refusal.into_response()),
        Decision::Open(opening) => Box::new(|stream| {
            let (link, permit, read) = stream.into_parts()?;
            Some(Input::Adopt { link, permit, read, opening: Box::new(opening) })
        }),
        Decision::OpenRefused { format, refused } => Box::new(move |stream| {
            let (link, permit, _) = stream.into_parts()?;
            Some(Input::AdoptRefused { link, permit, format, refused })
        }),
    };
    *adoption.lock() = Some(adopt);
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    for (name, value) in accept.headers() {
        response.headers_mut().insert(HeaderName::from_static(name), HeaderValue::from_str(value).ok()?);
    }
    Some(response)
}
