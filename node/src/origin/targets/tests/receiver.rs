//! An HTTP server of threads that answers as a test says.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver as Inbox, Sender, channel};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(20);

pub(super) struct Request {
    pub(super) line: String,
    pub(super) headers: HashMap<String, String>,
    pub(super) body: Vec<u8>,
}

impl Request {
    pub(super) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", String::as_str)
    }
}

pub(super) enum Answer {
    Whole(String),
    /// These bytes, and then nothing until the client goes.
    Part(String),
    /// A body without an end.
    Flood {
        head: String,
        chunked: bool,
    },
    Close,
}

impl Answer {
    pub(super) fn status(status: u16) -> Self {
        Self::Whole(format!("HTTP/1.1 {status} Status\r\n{}\r\n", length(status)))
    }

    /// Without the first word, the version.
    pub(super) fn head(head: &str) -> Self {
        Self::Whole(format!("HTTP/1.1 {head}\r\n{}\r\n", length(0)))
    }
}

fn length(status: u16) -> &'static str {
    if status == 204 { "" } else { "content-length: 0\r\n" }
}

pub(super) struct Receiver {
    address: SocketAddr,
    requests: Inbox<Request>,
    flooded: Inbox<usize>,
    connections: Arc<AtomicUsize>,
}

struct Server<F> {
    answer: F,
    requests: Sender<Request>,
    flooded: Sender<usize>,
    answered: AtomicUsize,
}

impl Receiver {
    /// `answer` has the number of the request, from 0.
    pub(super) fn start(answer: impl Fn(usize) -> Answer + Send + Sync + 'static) -> Self {
        Self::at(SocketAddr::new(super::LOOPBACK, 0), answer).expect("a free port")
    }

    pub(super) fn at(
        address: SocketAddr,
        answer: impl Fn(usize) -> Answer + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        let address = listener.local_addr()?;
        let ((give_request, requests), (give_flooded, flooded)) = (channel(), channel());
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        let (requests_to, flooded_to, answered) = (give_request, give_flooded, AtomicUsize::new(0));
        let server = Arc::new(Server { answer, requests: requests_to, flooded: flooded_to, answered });
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

    /// The next one.
    pub(super) fn request(&self) -> Request {
        self.requests.recv_timeout(PATIENCE).expect("a request")
    }

    /// How many bytes the client took of an answer without an end.
    pub(super) fn flooded(&self) -> usize {
        self.flooded.recv_timeout(PATIENCE).expect("the client goes")
    }

    /// Connections until now; a connection of this test's own comes after any that was opened before.
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

impl<F: Fn(usize) -> Answer> Server<F> {
    fn serve(&self, stream: TcpStream) {
        let mut reader = BufReader::new(stream);
        while let Some(request) = read(&mut reader) {
            self.requests.send(request).ok();
            let stream = reader.get_mut();
            match (self.answer)(self.answered.fetch_add(1, Ordering::SeqCst)) {
                Answer::Whole(text) => stream.write_all(text.as_bytes()).ok(),
                Answer::Part(text) => {
                    stream.write_all(text.as_bytes()).ok();
                    std::io::copy(stream, &mut std::io::sink()).ok();
                    return;
                }
                Answer::Flood { head, chunked } => {
                    self.flooded.send(flood(stream, &head, chunked)).ok();
                    return;
                }
                Answer::Close => return,
            };
        }
    }
}

/// Writes until the client goes, and no more than a gigabyte.
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

/// None: the client is gone.
fn read(reader: &mut BufReader<TcpStream>) -> Option<Request> {
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
    Some(Request { line: lines.swap_remove(0), headers, body })
}
