//! A receiver of webhooks that counts events, with a thread for each connection and no more work than the protocol
//! needs.
//!
//! `/ok` answers at once, `/hang` never, and `/huge` with a gigabyte. `GET /tally` gives the count of `/ok`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::histogram::Histogram;
use crate::os;
use crate::wire::stamp::Finder;

const HUGE_BYTES: u64 = 1 << 30;

/// Events that the receiver has taken since the last call.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    pub events: u64,
    pub requests: u64,
    /// Time from the sending of a message to the arrival of its event, in milliseconds.
    pub p99_ms: f64,
}

#[derive(Default)]
struct State {
    events: u64,
    requests: u64,
    latency: Histogram,
    stamps: Finder,
}

/// Prints the address, and serves until stdin ends.
pub fn serve() -> Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    println!("{}", listener.local_addr()?);
    let state = Arc::new(Mutex::new(State::default()));
    thread::spawn(move || {
        for socket in listener.incoming().flatten() {
            let state = Arc::clone(&state);
            thread::spawn(move || drop(answer_all(&socket, &state)));
        }
    });
    std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    Ok(())
}

fn answer_all(mut socket: &TcpStream, state: &Mutex<State>) -> Result<()> {
    socket.set_nodelay(true)?;
    let mut reader = BufReader::with_capacity(256 * 1024, socket);
    let (mut line, mut body) = (String::new(), Vec::new());
    loop {
        line.clear();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut length = 0;
        loop {
            line.clear();
            reader.read_line(&mut line)?;
            let Some((name, value)) = line.split_once(':') else { break };
            if name.eq_ignore_ascii_case("content-length") {
                length = value.trim().parse()?;
            }
        }
        body.resize(length, 0);
        reader.read_exact(&mut body)?;
        match path.as_str() {
            "/hang" => loop {
                thread::sleep(Duration::from_secs(600));
            },
            "/huge" => {
                write!(socket, "HTTP/1.1 200 OK\r\ncontent-length: {HUGE_BYTES}\r\n\r\n")?;
                std::io::copy(&mut std::io::repeat(0).take(HUGE_BYTES), &mut socket)?;
            }
            "/tally" => {
                let text = serde_json::to_string(&tally(state))?;
                write!(socket, "HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len())?;
            }
            _ => {
                take(state, &body);
                socket.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")?;
            }
        }
    }
}

fn take(state: &Mutex<State>, body: &[u8]) {
    let now_ns = os::monotonic_ns();
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    state.requests += 1;
    let State { events, latency, stamps, .. } = &mut *state;
    stamps.each(body, |stamp| {
        *events += 1;
        latency.record(now_ns.saturating_sub(stamp.sent_ns));
    });
}

fn tally(state: &Mutex<State>) -> Tally {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    let State { events, requests, latency, .. } = std::mem::take(&mut *state);
    Tally { events, requests, p99_ms: latency.quantile_ms(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::stamp::Stamp;

    #[test]
    fn events_of_an_envelope_are_counted() {
        let state = Mutex::default();
        let [one, two] = [7, 8].map(|sequence| Stamp { sent_ns: 1, sequence }.data(64));
        let body = format!(r#"{{"source":"channel.message","items":[{{"data":{one}}},{{"data":{two}}}]}}"#);
        take(&state, body.as_bytes());
        let taken = tally(&state);
        assert_eq!(taken.events, 2);
        assert!(taken.p99_ms > 0.0);
        assert_eq!(tally(&state).events, 0);
    }
}
