//! The client listener: accepts connections, and serves plain HTTP.

mod idle_timeout;
mod stream;
#[cfg(test)]
mod tests;
mod write_timeout;

use std::convert::Infallible;
use std::fs::File;
use std::io::{self, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
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

use super::errors::HttpRefusal;
use super::files::{CapacityLimit, ClientFiles};
use super::host;
use super::http::{self, cors};
use super::link::ClientLink;
use super::proxies::Proxies;
use super::socket::{
    AdmissionContext, AdmissionDecision, HttpConnection, Input, PATH, RequestHead, SessionRegistry,
    ShardServices, Shards, date, refusal_bytes,
};
use super::{ClientSocket, PeerAddress};
use crate::accounts::TenantConnections;
use crate::auth::Authenticator;
use crate::model::{Clock, Limits};
use crate::stall_detector;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::RATE_LIMITED;
use crate::tls::Certificates;
use stream::{HeaderCapacity, ReadStream};

/// Connections that the kernel completes while this node is busy.
const BACKLOG: i32 = 4096;
/// Kernel limit of the backlog.
const BACKLOG_MAX: &str = "/proc/sys/net/core/somaxconn";
/// Number of headers that hyper accepts by default.
const HEADERS_DEFAULT_MAX: usize = 100;
/// Time that a request under way has when the node stops.
const LAST_REQUEST: Duration = Duration::from_secs(3);
/// Pause of accepting when the system has no file left.
const FULL_PAUSE: Duration = Duration::from_millis(20);
/// Interval of the check whether the node may start accepting.
const OPEN_LOOK: Duration = Duration::from_millis(10);
/// Time after which a node accepts clients even if it could not meet all peers.
const OPEN_MAX: Duration = Duration::from_secs(10);

/// A bound address that refuses connections until it listens.
pub struct BoundAddress(socket2::Socket);

impl BoundAddress {
    /// Binds the address. Fails if another socket listens there. Port 0 lets the system choose.
    pub fn to(address: SocketAddr) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(address);
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, Some(socket2::Protocol::TCP))?;
        socket.set_reuse_address(true)?;
        socket.bind(&address.into())?;
        Ok(Self(socket))
    }

    /// Starts to listen, with a backlog for a connection storm.
    pub fn listen(self) -> io::Result<TcpListener> {
        self.0.listen(BACKLOG)?;
        Ok(self.0.into())
    }
}

/// Message about a backlog that the system shortens; none if it does not.
pub fn short_backlog() -> Option<String> {
    let text = std::fs::read_to_string(BACKLOG_MAX).ok()?;
    short_of(text.trim().parse().ok()?)
}

fn short_of(most: i32) -> Option<String> {
    (most < BACKLOG).then(|| {
        format!("only {most} connections can wait to be accepted, and the node asks for {BACKLOG}: a storm of clients may wait a second and more")
    })
}

/// Accepting thread, which runs until [`Acceptor::stop`].
pub struct Acceptor {
    listener: TcpListener,
    stopping: Arc<AtomicBool>,
}

impl Acceptor {
    /// Starts a thread that gives every connection to a shard, under TLS if there is a certificate. Connections beyond the limit are
    /// refused at once. Until `may_open`, for at most 10 s, new connections wait in the kernel's backlog.
    pub fn start(
        listener: TcpListener,
        shards: Arc<Shards>,
        (tls, proxies): (Option<Arc<Certificates>>, Arc<Proxies>),
        limits: &Limits,
        files: &Arc<ClientFiles>,
        may_open: impl Fn() -> bool + Send + 'static,
        tasks: &Tasks,
    ) -> io::Result<Self> {
        let accepting = listener.try_clone()?;
        let stopping = Arc::new(AtomicBool::new(false));
        let accept = AcceptThread {
            shards,
            tls,
            proxies,
            handshake_bytes: limits.header_bytes,
            files: Arc::clone(files),
            stopping: Arc::clone(&stopping),
        };
        tasks.spawn_thread("accept", move || {
            accept.wait(may_open, OPEN_MAX);
            accept.run(&accepting);
        })?;
        Ok(Self { listener, stopping })
    }

    /// Stops accepting; the thread ends.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // Ends the blocked accept; an error means that it has ended already.
        socket2::SockRef::from(&self.listener).shutdown(std::net::Shutdown::Read).ok();
    }
}

/// State of the accepting thread.
struct AcceptThread {
    shards: Arc<Shards>,
    /// None: connections are plain.
    tls: Option<Arc<Certificates>>,
    proxies: Arc<Proxies>,
    handshake_bytes: usize,
    files: Arc<ClientFiles>,
    stopping: Arc<AtomicBool>,
}

impl AcceptThread {
    /// Waits until the node may accept. Clients wait in the kernel's backlog meanwhile.
    fn wait(&self, may_open: impl Fn() -> bool, at_most: Duration) {
        let begun = Instant::now();
        while !may_open() && !self.stopping.load(Ordering::SeqCst) {
            if begun.elapsed() >= at_most {
                tracing::warn!("serving clients before all peers are connected: resumes may report a loss");
                return;
            }
            std::thread::sleep(OPEN_LOOK);
        }
    }

    fn run(self, listener: &TcpListener) {
        let mut spare = spare_file();
        while !self.stopping.load(Ordering::SeqCst) {
            match listener.accept() {
                Ok((socket, peer)) => self.take(socket, peer),
                Err(error) if self.stopping.load(Ordering::SeqCst) => {
                    tracing::debug!(%error, "accept loop ended");
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if is_out_of_files(&error) => self.accept_with(&mut spare, listener),
                Err(error) => {
                    tracing::warn!(target: RATE_LIMITED, %error, "connection accept failed");
                    std::thread::sleep(FULL_PAUSE);
                }
            }
        }
    }

    /// Accepts while the process has no file left. The connection takes the descriptor of the spare file, and is refused unless another
    /// file is free by then.
    fn accept_with(&self, spare: &mut Option<File>, listener: &TcpListener) {
        drop(spare.take());
        let accepted = listener.accept();
        *spare = spare_file();
        match accepted {
            Ok((socket, peer)) if spare.is_some() => self.take(socket, peer),
            Ok((socket, _)) => {
                self.files.record_out_of_files();
                self.refuse(socket, CapacityLimit::Files);
                *spare = spare_file();
            }
            Err(_) if self.stopping.load(Ordering::SeqCst) => {}
            Err(error) => {
                if is_out_of_files(&error) {
                    self.files.record_out_of_files();
                }
                tracing::warn!(target: RATE_LIMITED, %error, "connection accept failed");
                std::thread::sleep(FULL_PAUSE);
            }
        }
    }

    fn take(&self, socket: std::net::TcpStream, peer: SocketAddr) {
        let Some(permit) = self.files.take_connection() else {
            return self.refuse(socket, CapacityLimit::Connections);
        };
        // Setting options fails if the connection is closed already; then there is no client to serve.
        if socket.set_nonblocking(true).is_err() || socket.set_nodelay(true).is_err() {
            return;
        }
        let tls = self.tls.as_ref().map(|certificates| certificates.accept(self.handshake_bytes)).transpose();
        match tls {
            Ok(tls) => {
                let forwarded = self.proxies.begin(peer);
                self.shards.push_next(Input::Accept(ClientLink { socket, tls, forwarded }, permit));
            }
            Err(error) => {
                tracing::error!(target: RATE_LIMITED, %error, "tls setup failed: connection closed")
            }
        }
    }

    /// Refuses a connection with 503 before reading anything. Under TLS, which would need a handshake first, it is only closed.
    fn refuse(&self, mut socket: std::net::TcpStream, full: CapacityLimit) {
        full.count_refusal();
        if self.tls.is_none() && socket.set_nonblocking(true).is_ok() {
            // The answer fits into a fresh socket, and a closed client needs none.
            socket.write_all(&refusal_bytes(&HttpRefusal::full(), date(Clock::system().now_ms()))).ok();
        }
    }
}

/// Spare file, closed to accept a connection when no other file can be opened.
fn spare_file() -> Option<File> {
    File::open("/dev/null").ok()
}

fn is_out_of_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// Services of the HTTP side.
#[derive(Clone)]
pub struct HttpServices {
    pub router: Router,
    pub auth: Arc<Authenticator>,
    pub connections: Arc<TenantConnections>,
    pub session_registry: Arc<SessionRegistry>,
    pub limits: Arc<Limits>,
    pub files: Arc<ClientFiles>,
    pub proxies: Arc<Proxies>,
    pub shards: Arc<Shards>,
    pub tasks: Arc<Tasks>,
}

impl HttpServices {
    /// Takes over the socket services, and adds those that HTTP needs.
    pub fn new(services: &ShardServices, router: Router, shards: &Arc<Shards>, tasks: &Arc<Tasks>) -> Self {
        Self {
            router,
            auth: Arc::clone(&services.auth),
            connections: Arc::clone(&services.connections),
            session_registry: Arc::clone(&services.session_registry),
            limits: Arc::new(services.limits.clone()),
            files: Arc::clone(&services.files),
            proxies: Arc::clone(&services.proxies),
            shards: Arc::clone(shards),
            tasks: Arc::clone(tasks),
        }
    }
}

/// Serves connections that the shards found to be HTTP, until the shards have ended.
pub async fn serve_http(services: HttpServices, mut connections: mpsc::Receiver<HttpConnection>) {
    while let Some(connection) = connections.recv().await {
        let own = services.clone();
        services.tasks.spawn("http connection", OnStop::Finish, async move {
            if let Err(error) = serve_connection(own, connection).await {
                tracing::debug!(%error, "http connection closed early");
            }
        });
    }
}

async fn serve_connection(services: HttpServices, connection: HttpConnection) -> Result<(), hyper::Error> {
    let Ok(peer) = connection.link.socket.peer_addr() else { return Ok(()) };
    let peer = connection.link.client(peer);
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

/// Serves one stream. Returns the stream if it must be served again with more header slots.
async fn serve_stream(
    services: &HttpServices,
    peer: IpAddr,
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
    let protocol = protocol(&services.limits, *stream.headers());
    let mut serving = protocol.serve_connection(TokioIo::new(stream), service);
    drop(protocol);
    let served = tokio::select! {
        result = &mut serving => Some(result),
        () = stopping.cancelled() => None,
    };
    let result = if let Some(result) = served {
        result
    } else {
        Pin::new(&mut serving).graceful_shutdown();
        // A publish has its answer by then; a body that has still not arrived is not worth waiting for.
        tokio::time::timeout(LAST_REQUEST, &mut serving).await.unwrap_or(Ok(()))
    };
    let parts = serving.into_parts();
    let mut stream = parts.io.into_inner();
    stream.give_back(&parts.read_buf);
    if *stream.headers() == HeaderCapacity::TooMany {
        *stream.headers() = HeaderCapacity::Extended;
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

fn protocol(limits: &Limits, headers: HeaderCapacity) -> http1::Builder {
    let mut http = http1::Builder::new();
    // `ReadStream` times requests, since a connection may be idle for longer than a head may take.
    http.header_read_timeout(None)
        .max_buf_size(limits.header_bytes.max(8192))
        .max_header_size(limits.header_bytes)
        .half_close(true);
    if headers == HeaderCapacity::Extended {
        // As many as fit into the bytes, at three bytes a line at least; a map takes at most 24 576.
        http.max_headers(limits.header_bytes / 3);
    }
    http
}

/// Callback that hands an upgraded connection to a shard once its answer is on its way.
type Adoption = Arc<Mutex<Option<Box<dyn FnOnce(ReadStream) -> Option<Input> + Send>>>>;

/// Drops headers that are never read if there are many: in a map they take many times their bytes, for as long as the request is under way.
fn thin(headers: &mut HeaderMap) {
    if headers.len() <= HEADERS_DEFAULT_MAX {
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
    peer: IpAddr,
    socket: ClientSocket,
    adoption: Adoption,
    mut request: Request<Incoming>,
) -> Response<Body> {
    let forwarded_for: Vec<_> =
        request.headers().get_all("x-forwarded-for").iter().map(HeaderValue::as_bytes).collect();
    let client = services.proxies.client(peer, forwarded_for.into_iter());
    let refused = host::of(&request).err().map(|refusal| (http::NO_ROUTE, refusal));
    let answered = match refused {
        Some(refused) => Some(Err(refused)),
        None => upgrade(&services, (peer, client), &adoption, &request)
            .map(|answered| answered.map_err(|refusal| (PATH, refusal))),
    };
    if let Some(answered) = answered {
        let mut response = answered.unwrap_or_else(|(route, refusal)| {
            http::count_refusal(route, &refusal);
            refusal.into_response()
        });
        cors::on_every(response.headers_mut());
        return response;
    }
    thin(request.headers_mut());
    request.extensions_mut().insert(PeerAddress(client));
    request.extensions_mut().insert(socket);
    stall_detector::halt_if_stalled();
    let Ok(mut response) = services.router.clone().call(request.map(Body::new)).await;
    stall_detector::halt_if_stalled();
    if services.files.is_scarce() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// Upgrades a connection that has served an earlier request, as through a proxy.
fn upgrade(
    services: &HttpServices,
    (peer, client): (IpAddr, IpAddr),
    adoption: &Adoption,
    request: &Request<Incoming>,
) -> Option<Result<Response<Body>, HttpRefusal>> {
    let is_socket = request.method() == Method::GET
        && request.uri().path() == PATH
        && request.version() == Version::HTTP_11;
    if !is_socket {
        return None;
    }
    let headers = request.headers().iter().map(|(name, value)| (name.as_str(), value.as_bytes())).collect();
    let head = RequestHead { query: request.uri().query().unwrap_or_default(), headers };
    let accept = match head.handshake()? {
        Ok(accept) => accept,
        Err(refusal) => return Some(Err(refusal)),
    };
    let HttpServices { auth, connections, session_registry, limits, files, .. } = services;
    let (session_registry, address) = (Some(&**session_registry), Some(client));
    let decision =
        head.decide(AdmissionContext { auth, connections, session_registry, limits, files, address });
    let adopt: Box<dyn FnOnce(ReadStream) -> Option<Input> + Send> = match decision {
        AdmissionDecision::Refuse(refusal) => return Some(Err(refusal)),
        AdmissionDecision::Open(opening) => Box::new(move |stream| {
            let (mut link, permit, read) = stream.into_parts()?;
            if client != peer {
                link.set_client(client);
            }
            Some(Input::Adopt { link, permit, read, opening: Box::new(opening) })
        }),
        AdmissionDecision::OpenRefused { format, refused } => Box::new(move |stream| {
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
    Some(Ok(response))
}
