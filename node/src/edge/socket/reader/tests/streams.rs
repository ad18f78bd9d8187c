use super::*;

/// A stream with every kind of frame and length class, and control frames between fragments.
fn stream() -> (Vec<u8>, Vec<ReceivedFrame>) {
    let middle = "m".repeat(126);
    let frames = [
        text("hello"),
        masked(FIN | BINARY, b"\x00\xff", [0, 0, 0, 0]),
        frame(FIN | PING, b"are you there"),
        text(""),
        frame(TEXT, b"one "),
        frame(FIN | PING, b""),
        frame(CONTINUATION, b"two "),
        frame(FIN | PONG, b"x"),
        frame(FIN | CONTINUATION, b"three"),
        masked(FIN | TEXT, middle.as_bytes(), [1, 2, 3, 4]),
        frame(BINARY, b""),
        frame(FIN | CONTINUATION, b"late"),
        frame(FIN | CLOSE, &[3, 232]),
    ];
    let got = vec![
        ReceivedFrame::Text(b"hello".to_vec()),
        ReceivedFrame::Binary(vec![0, 255]),
        ReceivedFrame::Ping(b"are you there".to_vec()),
        ReceivedFrame::Text(Vec::new()),
        ReceivedFrame::Ping(Vec::new()),
        ReceivedFrame::Pong,
        ReceivedFrame::Text(b"one two three".to_vec()),
        ReceivedFrame::Text(middle.into_bytes()),
        ReceivedFrame::Binary(b"late".to_vec()),
        ReceivedFrame::Close(Some(1000)),
    ];
    (frames.concat(), got)
}

#[test]
fn every_split_in_two_and_three_reads_gives_the_same() {
    let limits = Limits::default();
    let (stream, expected) = stream();
    for first in 0..=stream.len() {
        for second in (first..=stream.len()).step_by(7) {
            let mut reader = FrameReader::default();
            let mut got = Vec::new();
            for part in [&stream[..first], &stream[first..second], &stream[second..]] {
                let (some, result) = feed(&mut reader, part, &limits, 0);
                result.unwrap();
                got.extend(some);
            }
            assert_eq!(got, expected, "split at {first} and {second}");
            assert_eq!(reader.begun_ms(), None, "nothing is left");
        }
    }
}

#[test]
fn byte_by_byte_gives_the_same() {
    let (stream, expected) = stream();
    let mut reader = FrameReader::default();
    let mut got = Vec::new();
    for byte in stream {
        let (some, result) = feed(&mut reader, &[byte], &Limits::default(), 0);
        result.unwrap();
        got.extend(some);
    }
    assert_eq!(got, expected);
}

#[test]
fn a_length_of_the_longest_class_is_read() {
    let long = vec![b'l'; 70_000];
    let stream = frame(FIN | BINARY, &long);
    for split in [0, 1, 2, 9, 10, 13, 14, 15, 69_999, stream.len() - 1] {
        let mut reader = FrameReader::default();
        let (none, _) = feed(&mut reader, &stream[..split], &Limits::default(), 0);
        assert_eq!(none, [], "{split}");
        let (got, result) = feed(&mut reader, &stream[split..], &Limits::default(), 0);
        assert_eq!((got, result), (vec![ReceivedFrame::Binary(long.clone())], Ok(())), "{split}");
    }
}

/// Feeds once, with a sink that stops after `count` frames.
fn feed_some(reader: &mut FrameReader, bytes: &[u8], count: usize) -> Vec<ReceivedFrame> {
    let mut got = Vec::new();
    let result = reader.feed(&mut bytes.to_vec(), &Limits::default(), 0, |incoming| {
        got.push(ReceivedFrame::of(&incoming));
        if got.len() == count { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    result.unwrap();
    got
}

#[test]
fn a_sink_that_breaks_gets_the_rest_later_once_and_whole() {
    let (stream, expected) = stream();
    for count in 1..=expected.len() {
        let mut reader = FrameReader::default();
        let mut got = feed_some(&mut reader, &stream, count);
        assert_eq!(got, expected[..count]);
        while reader.is_stopped() {
            let some = feed_some(&mut reader, &[], count);
            assert!(!some.is_empty() && some.len() <= count);
            got.extend(some);
        }
        assert_eq!(got, expected, "{count} at a time");
        assert_eq!(feed_some(&mut reader, &[], 1), []);
    }
}

#[test]
fn reader_stops_only_by_its_sink_with_input_left() {
    let mut reader = FrameReader::default();
    assert_eq!(feed_some(&mut reader, &text("whole"), 1).len(), 1);
    assert!(!reader.is_stopped(), "nothing is left");
    let half = text("half");
    feed_some(&mut reader, &half[..3], 1);
    assert!(!reader.is_stopped(), "more must be read");
    let rest = [&half[3..], &text("next")[..], &text("last")[..4]].concat();
    assert_eq!(feed_some(&mut reader, &rest, 1).len(), 1);
    assert!(reader.is_stopped());
    assert_eq!(feed_some(&mut reader, &[], 2), [ReceivedFrame::Text(b"next".to_vec())]);
    assert!(!reader.is_stopped());
    assert_eq!(feed_some(&mut reader, &text("last")[4..], 2), [ReceivedFrame::Text(b"last".to_vec())]);
}
