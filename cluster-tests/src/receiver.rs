//! A receiver of webhooks, whose answers a test chooses.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

/// Answer to each request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Answer {
    Status(u16),
    /// 200, after this time.
    Slow(Duration),
    /// No answer.
    Hang,
}

/// A request that the receiver got.
#[derive(Debug, Clone)]
pub struct ReceivedRequest {
    /// Headers by lowercase name.
    pub headers: HashMap<String, String>,
    pub body: Vec<u8>,
    /// Whether the receiver answers 200, if the sender waits for it.
    pub is_taken: bool,
}

impl ReceivedRequest {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }

    pub fn envelope(&self) -> Value {
        serde_json::from_slice(&self.body).expect("an envelope")
    }
}

/// Receiver, which listens until it is dropped.
pub struct Receiver {
    addr: SocketAddr,
    state: Arc<State>,
    _serving: JoinSet<()>,
}

struct State {
    answer: Mutex<Answer>,
    received: Mutex<Vec<ReceivedRequest>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Receiver {
    /// Starts a receiver that answers 200.
    pub async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let (answer, received) = (Mutex::new(Answer::Status(200)), Mutex::default());
        let state = Arc::new(State { answer, received });
        let shared = Arc::clone(&state);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                connections.spawn(serve(socket, Arc::clone(&shared)));
            }
        });
        Self { addr, state, _serving: serving }
    }

    pub fn url(&self) -> String {
        format!("http://{}/hook", self.addr)
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    pub fn answer(&self, answer: Answer) {
        *lock(&self.state.answer) = answer;
    }

    /// All requests so far.
    pub fn received(&self) -> Vec<ReceivedRequest> {
        lock(&self.state.received).clone()
    }
}

/// Answers the requests of one connection.
async fn serve(mut socket: TcpStream, state: Arc<State>) {
    let mut bytes = Vec::new();
    while let Some((headers, body)) = read(&mut socket, &mut bytes).await {
        let answer = *lock(&state.answer);
        let is_taken = matches!(answer, Answer::Slow(_) | Answer::Status(200..=299));
        lock(&state.received).push(ReceivedRequest { headers, body, is_taken });
        let status = match answer {
            Answer::Status(status) => status,
            Answer::Slow(time) => {
                sleep(time).await;
                200
            }
            Answer::Hang => return sleep(Duration::from_secs(600)).await,
        };
        let answer = format!("HTTP/1.1 {status} -\r\ncontent-length: 0\r\n\r\n");
        if socket.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// Reads the next request; `None` at the end.
async fn read(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<(HashMap<String, String>, Vec<u8>)> {
    let end = loop {
        if let Some(end) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break end + 4;
        }
        read_more(socket, bytes).await?;
    };
    let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
    let headers: HashMap<_, _> = head
        .lines()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length: usize = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    while bytes.len() < end + length {
        read_more(socket, bytes).await?;
    }
    let body = bytes[end..end + length].to_vec();
    bytes.drain(..end + length);
    Some((headers, body))
}

async fn read_more(socket: &mut TcpStream, bytes: &mut Vec<u8>) -> Option<()> {
    let mut buffer = [0; 16 * 1024];
    let count = socket.read(&mut buffer).await.ok().filter(|count| *count > 0)?;
    bytes.extend_from_slice(&buffer[..count]);
    Some(())
}
