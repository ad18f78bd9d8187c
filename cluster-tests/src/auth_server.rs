//! The token server of an application, whose answers a test chooses.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

/// Function that gives the body of the next answer.
type Answer = Box<dyn Fn() -> Pin<Box<dyn Future<Output = String> + Send>> + Send + Sync>;

/// Token server, which listens until it is dropped.
pub struct AuthServer {
    addr: SocketAddr,
    state: Arc<State>,
    _serving: JoinSet<()>,
}

struct State {
    /// Status of a refusal, in place of an answer.
    refusal: Mutex<Option<StatusCode>>,
    answer: Answer,
    requests: AtomicUsize,
}

impl AuthServer {
    /// Answers requests with the header `x-user: ann` with 200 and the text that `answer` gives, all others with 401.
    pub async fn start<F, T>(answer: F) -> Self
    where
        F: Fn() -> T + Send + Sync + 'static,
        T: Future<Output = String> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let answer: Answer = Box::new(move || Box::pin(answer()));
        let state = State { refusal: Mutex::default(), answer, requests: AtomicUsize::new(0) };
        let state = Arc::new(state);
        let mut serving = JoinSet::new();
        serving.spawn(serve(listener, Arc::clone(&state)));
        Self { addr, state, _serving: serving }
    }

    pub fn url(&self) -> String {
        format!("http://{}/token", self.addr)
    }

    /// Refuses requests with this status from now on; `None`: answers again.
    pub fn refuse(&self, status: Option<StatusCode>) {
        *self.state.refusal.lock().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// The number of requests so far.
    pub fn requests(&self) -> usize {
        self.state.requests.load(Ordering::Relaxed)
    }
}

async fn serve(listener: TcpListener, state: Arc<State>) {
    let mut connections = JoinSet::new();
    while let Ok((socket, _)) = listener.accept().await {
        let state = Arc::clone(&state);
        connections.spawn(async move {
            let answer = service_fn(async |request| Ok::<_, Infallible>(state.answer(&request).await));
            // A client that closed its connection is no fault of the server.
            let _ = http1::Builder::new().serve_connection(TokioIo::new(socket), answer).await;
        });
    }
}

impl State {
    async fn answer(&self, request: &Request<Incoming>) -> Response<Full<Bytes>> {
        self.requests.fetch_add(1, Ordering::Relaxed);
        let is_ann = request.headers().get("x-user").is_some_and(|user| user == "ann");
        let refusal = *self.refusal.lock().unwrap_or_else(PoisonError::into_inner);
        let (status, body) = match refusal {
            Some(status) => (status, String::new()),
            None if !is_ann => (StatusCode::UNAUTHORIZED, String::new()),
            None => (StatusCode::OK, (self.answer)().await),
        };
        let mut response = Response::new(Full::new(body.into()));
        *response.status_mut() = status;
        response
    }
}
