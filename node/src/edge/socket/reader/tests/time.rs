use super::*;

fn at(reader: &mut FrameReader, bytes: &[u8], now_ms: u64) -> Vec<ReceivedFrame> {
    let (got, result) = feed(reader, bytes, &Limits::default(), now_ms);
    result.unwrap();
    got
}

#[test]
fn reader_has_no_begun_time_between_messages() {
    let mut reader = FrameReader::default();
    assert_eq!(reader.begun_ms(), None);
    at(&mut reader, &text("whole"), 1_000);
    assert_eq!(reader.begun_ms(), None);
    at(&mut reader, &frame(FIN | PING, b""), 2_000);
    assert_eq!(reader.begun_ms(), None);
    assert_eq!(reader.kept.capacity(), 0, "an idle reader holds no memory");
}

#[test]
fn a_slow_drip_of_one_frame_stays_begun() {
    let mut reader = FrameReader::default();
    let bytes = text("drip, drop");
    for (number, byte) in bytes[..bytes.len() - 1].iter().enumerate() {
        at(&mut reader, &[*byte], 1_000 + number as u64 * 5_000);
        assert_eq!(reader.begun_ms(), Some(1_000), "byte {number}");
    }
    assert_eq!(at(&mut reader, &bytes[bytes.len() - 1..], 90_000).len(), 1);
    assert_eq!(reader.begun_ms(), None);
}

#[test]
fn a_slow_drip_of_fragments_stays_begun_whatever_stands_between() {
    let mut reader = FrameReader::default();
    at(&mut reader, &frame(TEXT, b"x"), 1_000);
    for turn in 1..60 {
        at(&mut reader, &frame(CONTINUATION, b"x"), 1_000 + turn * 5_000);
        assert_eq!(reader.begun_ms(), Some(1_000), "fragment {turn}");
        at(&mut reader, &frame(FIN | PING, b""), 3_000 + turn * 5_000);
        assert_eq!(reader.begun_ms(), Some(1_000), "ping {turn}");
    }
    assert_eq!(at(&mut reader, &frame(FIN | CONTINUATION, b""), 400_000).len(), 1);
    assert_eq!(reader.begun_ms(), None);
}

#[test]
fn each_message_restarts_its_time_however_reads_are_split() {
    let message = text("a message");
    let (head, tail) = message.split_at(4);
    let mut reader = FrameReader::default();
    at(&mut reader, head, 0);
    for turn in 1..20 {
        let now_ms = turn * 10_000;
        assert_eq!(at(&mut reader, &[tail, head].concat(), now_ms).len(), 1);
        assert_eq!(reader.begun_ms(), Some(now_ms));
    }
}

#[test]
fn each_fragmented_message_restarts_its_time() {
    let mut reader = FrameReader::default();
    at(&mut reader, &frame(TEXT, b"x"), 0);
    for turn in 1..20 {
        let now_ms = turn * 10_000;
        let bytes = [frame(FIN | CONTINUATION, b"x"), frame(TEXT, b"x")].concat();
        assert_eq!(at(&mut reader, &bytes, now_ms).len(), 1);
        assert_eq!(reader.begun_ms(), Some(now_ms));
    }
}
