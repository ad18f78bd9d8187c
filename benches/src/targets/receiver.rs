//! A receiver of webhooks that counts: a thread for each connection, and no more work than the protocol needs.
//!
//! `/ok` answers at once, `/hang` never, and `/huge` with a gigabyte. `GET /tally` tells what `/ok` has taken.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fanfare::model::Clock;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::histogram::Histogram;

/// Stands once in each record, and nowhere else in an envelope.
const TIMESTAMP: &[u8] = b"\"timestamp\":";
const HUGE_BYTES: u64 = 1 << 30;

/// The events that the receiver has taken since the last call.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Tally {
    pub events: u64,
    pub requests: u64,
    /// From the message's timestamp to its arrival.
    pub p99_ms: f64,
}

#[derive(Default)]
struct State {
    events: u64,
    requests: u64,
    latency: Histogram,
}

/// Says where it listens, and serves until stdin ends.
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
    let now_ms = Clock::system().now_ms();
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    state.requests += 1;
    let mut rest = body;
    while let Some(at) = rest.windows(TIMESTAMP.len()).position(|window| window == TIMESTAMP) {
        rest = &rest[at + TIMESTAMP.len()..];
        let digits = rest.iter().take_while(|byte| byte.is_ascii_digit());
        let sent_ms = digits.fold(0, |number, digit| number * 10 + u64::from(digit - b'0'));
        state.events += 1;
        state.latency.record(now_ms.saturating_sub(sent_ms) * 1_000_000);
    }
}

fn tally(state: &Mutex<State>) -> Tally {
    let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
    let State { events, requests, latency } = std::mem::take(&mut *state);
    Tally { events, requests, p99_ms: latency.quantile_ms(0.99) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_an_envelope_are_counted() {
        let state = Mutex::default();
        take(&state, br#"{"source":"channel.message","items":[{"data":1,"timestamp":5},{"timestamp":6}]}"#);
        let taken = tally(&state);
        assert_eq!((taken.events, taken.requests), (2, 1));
        assert!(taken.p99_ms > 1e9);
        assert_eq!(tally(&state).events, 0);
    }
}
