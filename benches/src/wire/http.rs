//! HTTP client for measurements: one request after another on one connection.

use std::fmt::Write as _;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use super::handshake;
use crate::Result;

const PATIENCE: Duration = Duration::from_secs(30);

pub struct Http {
    stream: TcpStream,
    host: String,
    authorization: Option<String>,
    /// Bytes that were read after the end of the last answer.
    read: Vec<u8>,
}

pub struct Answer {
    pub status: u16,
    pub body: Vec<u8>,
}

impl Answer {
    /// Gives the body. An error names `what`, the request.
    pub fn success(self, what: &str) -> Result<Vec<u8>> {
        if (200..300).contains(&self.status) {
            return Ok(self.body);
        }
        let text = String::from_utf8_lossy(&self.body);
        Err(format!("{what} was answered with {}: {text}", self.status).into())
    }
}

impl Http {
    /// Connects. `authorization` is the whole value of the header, sent with each request.
    pub fn connect(address: SocketAddr, authorization: Option<String>) -> io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Self { stream, host: address.to_string(), authorization, read: Vec::new() })
    }

    pub fn get(&mut self, path: &str) -> Result<Answer> {
        self.request("GET", path, "")
    }

    /// Sends a POST request with `body`, which is JSON.
    pub fn post(&mut self, path: &str, body: &str) -> Result<Answer> {
        self.request("POST", path, body)
    }

    fn request(&mut self, method: &str, path: &str, body: &str) -> Result<Answer> {
        let mut text = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\n", self.host);
        if let Some(authorization) = &self.authorization {
            let _ = write!(text, "Authorization: {authorization}\r\n");
        }
        if !body.is_empty() {
            let _ = write!(text, "Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
        }
        let _ = write!(text, "\r\n{body}");
        self.stream.write_all(text.as_bytes())?;
        loop {
            if let Some((answer, end)) = first_answer(&self.read)? {
                self.read.drain(..end);
                return Ok(answer);
            }
            let mut buffer = [0; 64 * 1024];
            match self.stream.read(&mut buffer)? {
                0 => return Err("the server ended the connection".into()),
                read => self.read.extend_from_slice(&buffer[..read]),
            }
        }
    }
}

/// Parses the first answer of `bytes`, and gives it with its length; `None` while it is incomplete.
fn first_answer(bytes: &[u8]) -> Result<Option<(Answer, usize)>> {
    let Some(head_bytes) = handshake::head_bytes(bytes) else { return Ok(None) };
    let head = std::str::from_utf8(&bytes[..head_bytes])?;
    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.ok_or_else(|| format!("an answer begins with {head:?}"))?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>())
    });
    let length = length.ok_or("an answer without a length")??;
    let body = bytes.get(head_bytes..head_bytes + length);
    Ok(body.map(|body| (Answer { status, body: body.to_vec() }, head_bytes + length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_read_when_it_is_all_there() {
        let text = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhelloHTTP/1.1 404";
        for end in 0..text.len() - 12 {
            assert!(first_answer(&text[..end]).unwrap().is_none(), "{end}");
        }
        let (answer, end) = first_answer(text).unwrap().unwrap();
        assert_eq!(
            (answer.status, &answer.body[..], &text[end..]),
            (200, &b"hello"[..], &b"HTTP/1.1 404"[..])
        );
    }

    #[test]
    fn non_success_status_is_an_error_with_status_and_body() {
        let answer = Answer { status: 503, body: b"busy".to_vec() };
        let error = answer.success("a page").err().unwrap().to_string();
        assert_eq!(error, "a page was answered with 503: busy");
    }
}
