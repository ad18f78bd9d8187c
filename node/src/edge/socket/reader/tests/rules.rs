use super::*;

fn small() -> Limits {
    Limits { socket_message_bytes: 300, ..Limits::default() }
}

#[test]
fn a_message_at_the_limit_and_one_past() {
    let limits = Limits::default();
    let most = vec![b'x'; 524_288];
    assert_eq!(read(&frame(FIN | TEXT, &most), &limits), (vec![ReceivedFrame::Text(most.clone())], Ok(())));
    let over = frame(FIN | TEXT, &[&most[..], b"x"].concat());
    assert_eq!(read(&over, &limits), (vec![], Err(close::TOO_BIG)));
    assert_eq!(
        read(&over[..10], &limits).1,
        Err(close::TOO_BIG),
        "by its length, before its payload is there"
    );
    let huge = [FIN | TEXT, 0xff, 127, 255, 255, 255, 255, 255, 255, 255];
    assert_eq!(read(&huge, &limits).1, Err(close::TOO_BIG));
}

#[test]
fn fragments_together_at_the_limit_and_one_past() {
    let parts = |last: usize| {
        [frame(TEXT, &[b'x'; 200]), frame(CONTINUATION, b""), frame(FIN | CONTINUATION, &vec![b'y'; last])]
            .concat()
    };
    let (got, result) = read(&parts(100), &small());
    assert_eq!((got.len(), result), (1, Ok(())));
    assert_eq!(read(&parts(101), &small()), (vec![], Err(close::TOO_BIG)));
}

#[test]
fn fragments_at_the_number_and_one_past() {
    let message = |fragments: usize| {
        let middle = frame(CONTINUATION, b"x").repeat(fragments - 2);
        [frame(TEXT, b"x"), middle, frame(FIN | CONTINUATION, b"x")].concat()
    };
    assert_eq!(read(&message(64), &Limits::default()), (vec![ReceivedFrame::Text(vec![b'x'; 64])], Ok(())));
    assert_eq!(read(&message(65), &Limits::default()), (vec![], Err(close::TOO_BIG)));
    let pings = [frame(TEXT, b"x"), frame(FIN | PING, b"").repeat(100), frame(FIN | CONTINUATION, b"x")];
    assert_eq!(read(&pings.concat(), &Limits::default()).1, Ok(()), "control frames are no fragments");
    let twice = message(64).repeat(2);
    assert_eq!(read(&twice, &Limits::default()).1, Ok(()), "each message has its own");
}

/// A header with a length field of two or eight bytes.
fn lengthened(first: u8, length: &[u8]) -> Vec<u8> {
    [&[first, if length.len() == 2 { 0xfe } else { 0xff }], length, &[0; 4]].concat()
}

#[test]
fn lengths_at_the_edge_of_each_form_are_taken() {
    for bytes in [125, 126, 65_535, 65_536] {
        let payload = vec![b'x'; bytes];
        assert_eq!(
            read(&frame(FIN | TEXT, &payload), &Limits::default()),
            (vec![ReceivedFrame::Text(payload)], Ok(()))
        );
    }
}

#[test]
fn reader_rejects_frames_that_break_the_protocol() {
    let unmasked = [FIN | TEXT, 1, b'x'];
    let cases: [(&str, Vec<u8>); 25] = [
        ("unmasked", unmasked.to_vec()),
        ("unmasked and empty", vec![FIN | PING, 0]),
        ("the first reserved bit", frame(FIN | 0x40 | TEXT, b"x")),
        ("the second", frame(FIN | 0x20 | TEXT, b"x")),
        ("the third", frame(FIN | 0x10 | PING, b"x")),
        ("opcode 3", frame(FIN | 3, b"")),
        ("opcode 7", frame(FIN | 7, b"")),
        ("opcode 11", frame(FIN | 11, b"")),
        ("opcode 15", frame(FIN | 15, b"")),
        ("a fragmented ping", frame(PING, b"x")),
        ("a fragmented close", frame(CLOSE, b"")),
        ("a ping of 126 bytes", frame(FIN | PING, &[0; 126])),
        ("a pong of 126 bytes", frame(FIN | PONG, &[0; 126])),
        ("a long close", frame(FIN | CLOSE, &[3; 126])),
        ("a continuation of nothing", frame(FIN | CONTINUATION, b"x")),
        ("one after a whole message", [text("a"), frame(CONTINUATION, b"x")].concat()),
        ("text within text", [frame(TEXT, b"a"), text("b")].concat()),
        ("binary within text", [frame(TEXT, b"a"), frame(BINARY, b"b")].concat()),
        ("a close of one byte", frame(FIN | CLOSE, &[3])),
        ("125 bytes in the middle form of length", lengthened(FIN | TEXT, &[0, 125])),
        ("none in it", lengthened(FIN | BINARY, &[0, 0])),
        ("a ping in it", lengthened(FIN | PING, &[0, 1])),
        ("65535 bytes in the longest form", lengthened(FIN | TEXT, &[0, 0, 0, 0, 0, 0, 255, 255])),
        ("none in it", lengthened(TEXT, &[0; 8])),
        ("the first bit of the longest form", lengthened(FIN | TEXT, &[128, 0, 0, 0, 0, 0, 0, 1])),
    ];
    for (case, bytes) in cases {
        assert_eq!(read(&bytes, &Limits::default()).1, Err(close::PROTOCOL), "{case}");
    }
}

#[test]
fn reader_delivers_messages_before_a_protocol_break() {
    let bytes = [text("good"), vec![FIN | TEXT, 1, b'x'], text("never")].concat();
    assert_eq!(
        read(&bytes, &Limits::default()),
        (vec![ReceivedFrame::Text(b"good".to_vec())], Err(close::PROTOCOL))
    );
}

#[test]
fn control_frames_at_the_limit() {
    let most = [7; 125];
    assert_eq!(
        read(&frame(FIN | PING, &most), &Limits::default()),
        (vec![ReceivedFrame::Ping(most.to_vec())], Ok(()))
    );
    let small_limits = Limits { socket_message_bytes: 125, ..Limits::default() };
    assert_eq!(read(&frame(FIN | PONG, &most), &small_limits), (vec![ReceivedFrame::Pong], Ok(())));
}

#[test]
fn codes_of_a_close() {
    let close_frame =
        |code: u16, reason: &[u8]| frame(FIN | CLOSE, &[&code.to_be_bytes()[..], reason].concat());
    for code in [1000, 1001, 1003, 1007, 1011, 1014, 3000, 4001, 4999] {
        assert_eq!(
            read(&close_frame(code, b"why"), &Limits::default()),
            (vec![ReceivedFrame::Close(Some(code))], Ok(())),
            "{code}"
        );
    }
    for code in [0, 999, 1004, 1005, 1006, 1015, 2000, 2999, 5000, 65535] {
        assert_eq!(read(&close_frame(code, b""), &Limits::default()).1, Err(close::PROTOCOL), "{code}");
    }
    assert_eq!(
        read(&frame(FIN | CLOSE, b""), &Limits::default()),
        (vec![ReceivedFrame::Close(None)], Ok(()))
    );
    assert_eq!(read(&close_frame(1000, b"\xff"), &Limits::default()).1, Err(close::BAD_UTF8));
    assert_eq!(read(&close_frame(1000, "é".as_bytes()), &Limits::default()).1, Ok(()));
}

/// Feeds the parts. Returns the part after which invalid UTF-8 was found.
fn refused_after(parts: &[Vec<u8>]) -> Option<usize> {
    let mut reader = FrameReader::default();
    parts.iter().position(|part| {
        let (_, result) = feed(&mut reader, part, &Limits::default(), 0);
        result.is_err_and(|broken| broken.code == close::BAD_UTF8)
    })
}

#[test]
fn bad_utf8_fails_with_the_fragment_that_has_it() {
    let parts = |second: &[u8]| {
        [frame(TEXT, "κόσμε".as_bytes()), frame(CONTINUATION, second), frame(FIN | CONTINUATION, b"edited")]
    };
    assert_eq!(refused_after(&parts(b"\xf4\x90\x80\x80")), Some(1));
    assert_eq!(refused_after(&parts(b"good")), None);
    let surrogate = [frame(TEXT, b"\xed"), frame(FIN | PING, b""), frame(CONTINUATION, b"\xa0")];
    assert_eq!(refused_after(&surrogate), Some(2), "it begins in one fragment and fails in another");
    let cut = [frame(TEXT, b"a\xce"), frame(CONTINUATION, b""), frame(FIN | CONTINUATION, b"")];
    assert_eq!(refused_after(&cut), Some(2), "the last character ends too early");
    let characters = ["κ", "€", "𐍈"].concat().into_bytes();
    let mut bytes: Vec<Vec<u8>> = characters.iter().map(|byte| frame(CONTINUATION, &[*byte])).collect();
    bytes.insert(0, frame(TEXT, b""));
    bytes.push(frame(FIN | CONTINUATION, b""));
    assert_eq!(refused_after(&bytes), None, "characters over fragments");
    let binary = [frame(BINARY, b"\xff"), frame(FIN | CONTINUATION, b"\xff")];
    assert_eq!(refused_after(&binary), None);
}

#[test]
fn bad_utf8_fails_with_its_byte_before_the_frame_is_whole() {
    let payload = [&[b'x'; 200][..], b"\xce\xba\xf4\x90", &[b'y'; 200]].concat();
    for frame in [frame(FIN | TEXT, &payload), frame(TEXT, &payload)] {
        let head = frame.len() - payload.len();
        let bytes: Vec<Vec<u8>> = frame.iter().map(|byte| vec![*byte]).collect();
        assert_eq!(refused_after(&bytes), Some(head + 203), "byte by byte");
        for cut in [1, 3, head, head + 100, head + 201, head + 203] {
            let parts = [frame[..cut].to_vec(), frame[cut..head + 204].to_vec()];
            assert_eq!(refused_after(&parts), Some(1), "in two reads, cut at {cut}");
        }
    }
}

#[test]
fn bytes_over_the_limit_fail_before_they_are_there() {
    let parts = [frame(TEXT, &[b'x'; 200]), frame(CONTINUATION, &[b'y'; 101])].concat();
    let head = parts.len() - 101;
    assert_eq!(read(&parts[..head - 1], &small()).1, Ok(()));
    assert_eq!(read(&parts[..head], &small()).1, Err(close::TOO_BIG));
}
