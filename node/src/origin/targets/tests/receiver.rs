//! An HTTP server on threads, with the answers that a test sets.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver as Inbox, Sender, channel};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

pub(super) struct ReceivedRequest {
    pub(super) line: String,
    pub(super) headers: HashMap<String, String>,
    pub(super) body: Vec<u8>,
}

impl ReceivedRequest {
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

pub(super) enum ReceiverAnswer {
    Complete(String),
    /// Sends these bytes, and then nothing until the client disconnects.
    Partial(String),
    /// Sends a body without an end.
    Flood {
        head: String,
        chunked: bool,
    },
    Close,
}

impl ReceiverAnswer {
    pub(super) fn status(status: u16) -> Self {
        Self::Complete(format!("HTTP/1.1 {status} Status\r\n{}\r\n", length(status)))
    }

    /// Builds a response from its head without the version.
    pub(super) fn head(head: &str) -> Self {
        Self::Complete(format!("HTTP/1.1 {head}\r\n{}\r\n", length(0)))
    }
}

fn length(status: u16) -> &'static str {
    if status == 204 { "" } else { "content-length: 0\r\n" }
}

pub(super) struct HttpTestReceiver {
    address: SocketAddr,
    requests: Inbox<ReceivedRequest>,
    flooded: Inbox<usize>,
    connections: Arc<AtomicUsize>,
}

struct ReceiverServer<F> {
    answer: F,
    requests: Sender<ReceivedRequest>,
    flooded: Sender<usize>,
    answered: AtomicUsize,
}

impl HttpTestReceiver {
    /// Starts a receiver; `answer` gets the number of the request, from 0.
    pub(super) fn start(answer: impl Fn(usize) -> ReceiverAnswer + Send + Sync + 'static) -> Self {
        Self::at(SocketAddr::new(super::LOOPBACK, 0), answer).expect("a free port")
    }

    pub(super) fn at(
        address: SocketAddr,
        answer: impl Fn(usize) -> ReceiverAnswer + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let ((give_request, requests), (give_flooded, flooded)) = (channel(), channel());
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        let (requests_to, flooded_to, answered) = (give_request, give_flooded, AtomicUsize::new(0));
        let server =
            Arc::new(ReceiverServer { answer, requests: requests_to, flooded: flooded_to, answered });
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                counted.fetch_add(1, Ordering::SeqCst);
                let server = Arc::clone(&server);
                std::thread::spawn(move || server.serve(stream));
            }
        });
        Ok(Self { address, requests, flooded, connections })
    }

    pub(super) fn port(&self) -> u16 {
        self.address.port()
    }

    pub(super) fn ip(&self) -> IpAddr {
        self.address.ip()
    }

    pub(super) fn request(&self) -> ReceivedRequest {
        self.requests.recv_timeout(PATIENCE).expect("a request")
    }

    /// Returns how many bytes of an endless response the client has read.
    pub(super) fn flooded(&self) -> usize {
        self.flooded.recv_timeout(PATIENCE).expect("the client goes")
    }

    /// Number of connections until now. A connection of this test itself is accepted after all earlier ones.
    pub(super) fn connections(&self) -> usize {
        let before = self.connections.load(Ordering::SeqCst);
        let _own = TcpStream::connect(self.address).expect("it listens");
        let begun = std::time::Instant::now();
        while self.connections.load(Ordering::SeqCst) == before {
            assert!(begun.elapsed() < PATIENCE, "the connection is accepted");
            std::thread::yield_now();
        }
        self.connections.fetch_sub(1, Ordering::SeqCst) - 1
    }
}

impl<F: Fn(usize) -> ReceiverAnswer> ReceiverServer<F> {
    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream);
        while let Some(request) = read(&mut reader) {
            self.requests.send(request).ok();
            let stream = reader.get_mut();
            match (self.answer)(self.answered.fetch_add(1, Ordering::SeqCst)) {
                ReceiverAnswer::Complete(text) => stream.write_all(text.as_bytes()).ok(),
                ReceiverAnswer::Partial(text) => {
                    stream.write_all(text.as_bytes()).ok();
                    std::io::copy(stream, &mut std::io::sink()).ok();
                    return;
                }
                ReceiverAnswer::Flood { head, chunked } => {
                    self.flooded.send(flood(stream, &head, chunked)).ok();
                    return;
                }
                ReceiverAnswer::Close => return,
            };
        }
    }
}

/// Writes until the client disconnects, at most a gigabyte.
fn flood(stream: &mut TcpStream, head: &str, chunked: bool) -> usize {
    let mut part = vec![b'x'; 64 * 1024];
    if chunked {
        part.splice(0..0, *b"10000\r\n");
        part.extend(b"\r\n");
    }
    write!(stream, "HTTP/1.1 {head}\r\n\r\n").ok();
    let mut taken = 0;
    while taken < 1 << 30 && stream.write_all(&part).is_ok() {
        taken += part.len();
    }
    taken
}

/// Reads a request; `None` if the client has disconnected.
fn read(reader: &mut BufReader<TcpStream>) -> Option<ReceivedRequest> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let headers: HashMap<_, _> = lines[1..]
        .iter()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .collect();
    let length = headers.get("content-length").and_then(|length| length.parse().ok()).unwrap_or(0);
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(ReceivedRequest { line: lines.swap_remove(0), headers, body })
}
