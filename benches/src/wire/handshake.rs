//! Both sides of the WebSocket upgrade.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use sha1::{Digest as _, Sha1};

/// Nonce of every connection: nothing depends on it here, and the answer is not checked.
const NONCE: &str = "ZmFuZmFyZS1iZW5jaG1hcg==";
/// Path of Fanfare's socket. Of the peers only Sockudo checks the path.
pub const PATH: &str = "/realtime";
const END: &[u8] = b"\r\n\r\n";

/// Makes the upgrade request of a client; `authorization` and `subprotocol` are whole header values.
pub fn request(host: &str, path: &str, authorization: Option<&str>, subprotocol: Option<&str>) -> Vec<u8> {
    let header = |name: &str, value: Option<&str>| {
        value.map_or_else(String::new, |value| format!("{name}: {value}\r\n"))
    };
    let offered = header("Authorization", authorization) + &header("Sec-WebSocket-Protocol", subprotocol);
    format!(
        "GET {path} HTTP/1.1\r\nHost: {host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\
         Sec-WebSocket-Key: {NONCE}\r\nSec-WebSocket-Version: 13\r\n{offered}\r\n"
    )
    .into_bytes()
}

/// Gives the Authorization value for an API key.
pub fn basic(key: &str) -> String {
    format!("Basic {}", STANDARD.encode(key))
}

/// Gives the length of the head of a request or answer, once it is complete.
pub fn head_bytes(text: &[u8]) -> Option<usize> {
    text.windows(END.len()).position(|window| window == END).map(|at| at + END.len())
}

/// Gives the answer to an upgrade request as [`request`] makes it; `None` without a WebSocket nonce.
pub fn answer(head: &[u8]) -> Option<Vec<u8>> {
    let head = std::str::from_utf8(head).ok()?;
    let nonce = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        name.eq_ignore_ascii_case("sec-websocket-key").then(|| value.trim())
    })?;
    let mut hash = Sha1::new();
    hash.update(nonce);
    hash.update("258EAFA5-E914-47DA-95CA-C5AB0DC85B11");
    let accept = STANDARD.encode(hash.finalize());
    let text = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n";
    Some(format!("{text}Sec-WebSocket-Accept: {accept}\r\n\r\n").into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_is_the_one_of_rfc_6455() {
        let head = b"GET / HTTP/1.1\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
        let answer = String::from_utf8(answer(head).unwrap()).unwrap();
        assert!(answer.contains("Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n"), "{answer}");
    }

    #[test]
    fn a_request_is_answered() {
        let request = request("127.0.0.1:1", PATH, Some(&basic("s.k")), None);
        assert_eq!(head_bytes(&request), Some(request.len()));
        assert!(answer(&request).is_some());
    }
}
