//! The client listener: accepts, and serves as HTTP what is not a socket.

mod silence;
mod stall;
mod stream;
#[cfg(test)]
mod tests;

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

use super::errors::Refusal;
use super::files::{ClientFiles, Full};
use super::host;
use super::http::{self, cors};
use super::link::Link;
use super::proxies::Proxies;
use super::socket::{
    Decision, Gate, Head, HttpConnection, Identities, Input, PATH, Services, Shards, date, refusal_bytes,
};
use super::{ClientSocket, PeerAddress};
use crate::accounts::TenantConnections;
use crate::auth::Authenticator;
use crate::model::{Clock, Limits};
use crate::pulse;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::OFTEN;
use crate::tls::Certificates;
use stream::{Headers, ReadStream};

/// Connections that the kernel completes while this node is busy.
const BACKLOG: i32 = 4096;
/// What the system allows of that.
const BACKLOG_MAX: &str = "/proc/sys/net/core/somaxconn";
/// hyper takes as many headers of a request unless it is told otherwise.
const HEADERS_FEW: usize = 100;
/// What a request under way is given when the node stops.
const LAST_REQUEST: Duration = Duration::from_secs(3);
/// How long accepting pauses when the system has no file left.
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

/// Says what the system makes of the backlog; none: all of it.
pub fn short_backlog() -> Option<String> {
    let text = std::fs::read_to_string(BACKLOG_MAX).ok()?;
    short_of(text.trim().parse().ok()?)
}

fn short_of(most: i32) -> Option<String> {
    (most < BACKLOG).then(|| {
        format!("only {most} connections can wait to be accepted, and the node asks for {BACKLOG}: a storm of clients may wait a second and more")
    })
}

/// Accepts on a thread of its own until [`Acceptor::stop`].
pub struct Acceptor {
    listener: TcpListener,
    stopping: Arc<AtomicBool>,
}

impl Acceptor {
    /// Gives every connection to a shard, under TLS when there is a certificate. One beyond those that there are files for is refused
    /// at once. Before `may_open` new ones wait in the kernel's backlog, for at most 10 s.
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
        let accept = Accept {
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

    /// Takes no further connection; the thread ends.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::SeqCst);
        // The blocked accept returns; an error means that it has ended already.
        socket2::SockRef::from(&self.listener).shutdown(std::net::Shutdown::Read).ok();
    }
}

/// The accepting thread.
struct Accept {
    shards: Arc<Shards>,
    /// Without it connections are plain.
    tls: Option<Arc<Certificates>>,
    proxies: Arc<Proxies>,
    handshake_bytes: usize,
    files: Arc<ClientFiles>,
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
        let mut spare = spare_file();
        while !self.stopping.load(Ordering::SeqCst) {
            match listener.accept() {
                Ok((socket, peer)) => self.take(socket, peer),
                Err(error) if self.stopping.load(Ordering::SeqCst) => {
                    tracing::debug!(%error, "accepting has ended");
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if is_out_of_files(&error) => self.accept_with(&mut spare, listener),
                Err(error) => {
                    tracing::warn!(target: OFTEN, %error, "a connection could not be accepted");
                    std::thread::sleep(FULL_PAUSE);
                }
            }
        }
    }

    /// The process has no file left, which the system says before anybody comes. The connection that comes takes the place of the
    /// spare file, and is refused unless there is another file by then.
    fn accept_with(&self, spare: &mut Option<File>, listener: &TcpListener) {
        drop(spare.take());
        let accepted = listener.accept();
        *spare = spare_file();
        match accepted {
            Ok((socket, peer)) if spare.is_some() => self.take(socket, peer),
            Ok((socket, _)) => {
                self.files.is_out_of_files();
                self.refuse(socket, Full::Files);
                *spare = spare_file();
            }
            Err(_) if self.stopping.load(Ordering::SeqCst) => {}
            Err(error) => {
                if is_out_of_files(&error) {
                    self.files.is_out_of_files();
                }
                tracing::warn!(target: OFTEN, %error, "a connection could not be accepted");
                std::thread::sleep(FULL_PAUSE);
            }
        }
    }

    fn take(&self, socket: std::net::TcpStream, peer: SocketAddr) {
        let Some(permit) = self.files.take_connection() else {
            return self.refuse(socket, Full::Connections);
        };
        // A connection that is gone already fails here, and then there is nobody to serve.
        if socket.set_nonblocking(true).is_err() || socket.set_nodelay(true).is_err() {
            return;
        }
        let tls = self.tls.as_ref().map(|certificates| certificates.accept(self.handshake_bytes)).transpose();
        match tls {
            Ok(tls) => {
                let forwarded = self.proxies.begin(peer);
                self.shards.push_next(Input::Accept(Link { socket, tls, forwarded }, permit));
            }
            Err(error) => tracing::error!(target: OFTEN, %error, "tls cannot begin, a connection is closed"),
        }
    }

    /// Answers 503 before anything is read; under TLS, where that would be a handshake, closes.
    fn refuse(&self, mut socket: std::net::TcpStream, full: Full) {
        full.refused();
        if self.tls.is_none() && socket.set_nonblocking(true).is_ok() {
            // A fresh socket has room for it, and a client that is gone needs no answer.
            socket.write_all(&refusal_bytes(&Refusal::full(), date(Clock::system().now_ms()))).ok();
        }
    }
}

/// A file that can be given up when a connection comes and the process may open no other.
fn spare_file() -> Option<File> {
    File::open("/dev/null").ok()
}

fn is_out_of_files(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE))
}

/// What the HTTP side serves with.
#[derive(Clone)]
pub struct HttpServices {
    pub router: Router,
    pub auth: Arc<Authenticator>,
    pub connections: Arc<TenantConnections>,
    pub identities: Arc<Identities>,
    pub limits: Arc<Limits>,
    pub files: Arc<ClientFiles>,
    pub proxies: Arc<Proxies>,
    pub shards: Arc<Shards>,
    pub tasks: Arc<Tasks>,
}

impl HttpServices {
    /// The services of the sockets, and those that HTTP needs beside them.
    pub fn new(services: &Services, router: Router, shards: &Arc<Shards>, tasks: &Arc<Tasks>) -> Self {
        Self {
            router,
            auth: Arc::clone(&services.auth),
            connections: Arc::clone(&services.connections),
            identities: Arc::clone(&services.identities),
            limits: Arc::new(services.limits.clone()),
            files: Arc::clone(&services.files),
            proxies: Arc::clone(&services.proxies),
            shards: Arc::clone(shards),
            tasks: Arc::clone(tasks),
        }
    }
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

/// Gives the stream back when it is to be served with more headers.
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
            http::refused(route, &refusal);
            refusal.into_response()
        });
        cors::on_every(response.headers_mut());
        return response;
    }
    thin(request.headers_mut());
    request.extensions_mut().insert(PeerAddress(client));
    request.extensions_mut().insert(socket);
    pulse::pass();
    let Ok(mut response) = services.router.clone().call(request.map(Body::new)).await;
    pulse::pass();
    if services.files.is_scarce() {
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

/// An upgrade that comes here followed another request on its connection, as through a proxy.
fn upgrade(
    services: &HttpServices,
    (peer, client): (IpAddr, IpAddr),
    adoption: &Adoption,
    request: &Request<Incoming>,
) -> Option<Result<Response<Body>, Refusal>> {
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
        Err(refusal) => return Some(Err(refusal)),
    };
    let HttpServices { auth, connections, identities, limits, files, .. } = services;
    let (identities, address) = (Some(&**identities), Some(client));
    let decision = head.decide(Gate { auth, connections, identities, limits, files, address });
    let adopt: Box<dyn FnOnce(ReadStream) -> Option<Input> + Send> = match decision {
        Decision::Refuse(refusal) => return Some(Err(refusal)),
        Decision::Open(opening) => Box::new(move |stream| {
            let (mut link, permit, read) = stream.into_parts()?;
            if client != peer {
                link.set_client(client);
            }
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
    Some(Ok(response))
}
