//! The head of a request: its limit is a number of bytes, whatever the number of headers, for HTTP and for sockets.

use super::*;

const HEAD_BYTES: usize = 16 * 1024;
const UPGRADE: &str = "GET /realtime HTTP/1.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                       sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
const HTTP: &str = "GET /time HTTP/1.1\r\n";

/// Makes a head of `bytes` bytes, filled with `filling` and one longer header for the rest.
fn head(request: &str, filling: &str, bytes: usize) -> String {
    let mut head = format!("{request}host: localhost\r\nauthorization: {}\r\n", http::basic(KEY));
    while !filling.is_empty() && head.len() + 2 * filling.len() + "x-pad: \r\n\r\n".len() <= bytes {
        head += filling;
    }
    head += "x-pad: ";
    let head = format!("{head}{}\r\n\r\n", "x".repeat(bytes - head.len() - 4));
    assert_eq!(head.len(), bytes);
    head
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_of_exactly_16_kib_pass_in_any_number() {
    pass_up_to(HEAD_BYTES, &node().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_are_held_to_fewer_bytes_where_that_is_set() {
    pass_up_to(2_000, &Node::start(options().limit("header_bytes", 2_000).limit("token_bytes", 2_000)).await)
        .await;
}

async fn pass_up_to(bytes_max: usize, node: &Node) {
    for (request, passed) in [(UPGRADE, 101), (HTTP, 200)] {
        // One header, some hundred, over a thousand, and the greatest number, with the shortest name.
        for filling in ["", &format!("x-filling: {}\r\n", "y".repeat(60)), "x-a: 1\r\n", "a:\r\n"] {
            for (bytes, status) in [(bytes_max, passed), (bytes_max + 1, 431)] {
                let head = head(request, filling, bytes);
                for pieces in [1, 3] {
                    // First on a connection, and after another request.
                    for follows in [false, true] {
                        let mut raw = Raw::connect(node.addr()).await;
                        if follows {
                            raw.write(self::head(HTTP, "", 400).as_bytes()).await;
                            assert_eq!(raw.response(SOON).await.expect("an answer").0, 200);
                        }
                        for piece in head.as_bytes().chunks(head.len().div_ceil(pieces)) {
                            raw.write(piece).await;
                        }
                        let (answered, text) = raw.head(SOON).await.expect("an answer");
                        assert_eq!(
                            answered, status,
                            "{bytes} bytes of {filling:?}, {pieces}, {follows}: {text}"
                        );
                        assert!(text.contains("access-control-allow-origin: *\r\n"), "{text}");
                    }
                }
            }
        }
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_headers_of_pending_requests_take_bounded_memory() {
    const REQUESTS: u64 = 600;
    let ten_minutes_ms = 600_000;
    let options = options().limit("http_body_ms", ten_minutes_ms).limit("http_stall_ms", ten_minutes_ms);
    let node = Node::start(options).await;
    let mut filling: String = (0..2_000).map(|number| format!("{number:x}:\r\n")).collect();
    filling += "expect: 100-continue\r\ncontent-length: 9\r\n";
    let head = head(&format!("POST /api/channels/c/publish HTTP/1.1\r\n{filling}"), "", HEAD_BYTES);
    let mut waiting = Vec::new();
    let mut before = 0;
    for number in 0..REQUESTS + 20 {
        if number == 20 {
            before = node.resident_bytes();
        }
        let mut raw = Raw::connect(node.addr()).await;
        raw.write(head.as_bytes()).await;
        assert_eq!(raw.head(SOON).await.expect("an answer").0, 100, "the body is waited for");
        waiting.push(raw);
    }
    let each = node.resident_bytes().saturating_sub(before) / REQUESTS;
    // A map of all the headers would take over 400 KiB.
    assert!(each < 200 * 1024, "{each} bytes for each request");
    for mut raw in waiting {
        raw.write(br#"{"data":1}"#.get(..9).expect("nine bytes")).await;
        assert_eq!(raw.head(SOON).await.expect("an answer").0, 400, "the body was read");
    }
    node.assert_well().await;
}
