//! MessagePack that no client sends by mistake, and numbers at the edges of their ranges.

use fanfare_proto::frame::{Format, FrameError, parse, parse_within};
use fanfare_proto::msgpack;

fn is_fatal(result: Result<fanfare_proto::frame::Request, FrameError>) -> bool {
    matches!(result, Err(FrameError::Fatal(_) | FrameError::TooDeep { .. }))
}

#[test]
fn truncated_messagepack_is_an_error_at_every_length() {
    let whole = msgpack::from_json(
        r#"{"op":13,"channel":"c","messages":[{"data":[1.5,300,-300,true,"long enough to need a longer header byte"]}]}"#,
    );
    assert!(parse(Format::MsgPack, &whole, 64).is_ok());
    for length in 0..whole.len() {
        assert_eq!(msgpack::to_json(&whole[..length], 64, 1000), Err(msgpack::Error::Truncated), "{length}");
    }
    let longer = [whole.as_slice(), &[0xc0]].concat();
    assert_eq!(msgpack::to_json(&longer, 64, 1000), Err(msgpack::Error::Trailing));
    assert!(is_fatal(parse(Format::MsgPack, &longer, 64)));
}

#[test]
fn claimed_lengths_cost_nothing() {
    for header in [
        [0xdb, 255, 255, 255, 255],
        [0xdd, 255, 255, 255, 255],
        [0xdf, 255, 255, 255, 255],
        [0xc6, 255, 255, 255, 255],
    ] {
        assert_eq!(msgpack::to_json(&header, 64, 1000), Err(msgpack::Error::Truncated));
        let nested = header.repeat(60);
        assert!(msgpack::to_json(&nested, 64, 100_000).is_err());
    }
}

#[test]
fn messagepack_does_not_amplify() {
    let controls = [&[0xda, 0xff, 0xff][..], &[1; 65_535]].concat();
    assert_eq!(
        msgpack::to_json(&controls, 64, 300_000),
        Err(msgpack::Error::TooLarge { json_bytes_max: 300_000 })
    );
    assert_eq!(msgpack::to_json(&controls, 64, 400_000).unwrap().len(), 65_535 * 6 + 2);
    let nulls = [&[0xdc, 0xff, 0xff][..], &[0xc0; 65_535]].concat();
    assert!(msgpack::to_json(&nulls, 64, 100_000).is_err());
    let frame = msgpack::from_json(r#"{"op":0,"id":"0123456789"}"#);
    let too_big = parse_within(Format::MsgPack, &frame, 64, 25).unwrap_err();
    assert_eq!(too_big, FrameError::TooBig { json_bytes_max: 25 });
    assert!(parse_within(Format::MsgPack, &frame, 64, 26).is_ok());
}

#[test]
fn msgpack_value_without_json_form_is_refused_with_frame_id() {
    // {"op": 13, "channel": "c", "data": …, "id": "7"}
    let frame = |data: &[u8]| [b"\x84\xa2op\x0d\xa7channel\xa1c\xa4data", data, b"\xa2id\xa17"].concat();
    for data in [
        &b"\xc4\x01x"[..],
        b"\xc5\x00\x01x",
        b"\xd4\x01x",
        b"\xc7\x01\x01x",
        b"\xca\x7f\x80\x00\x00",
        b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
        b"\xcb\xff\xf0\x00\x00\x00\x00\x00\x00",
    ] {
        let refused = parse(Format::MsgPack, &frame(data), 64);
        assert!(
            matches!(refused, Err(FrameError::Refused { id: Some(ref id), .. }) if id == "7"),
            "{data:x?}"
        );
    }
    for data in [&b"\xc1"[..], b"\x81\x01\x01", b"\xa1\xff", b"\xc4\x7fx"] {
        assert!(is_fatal(parse(Format::MsgPack, &frame(data), 64)), "{data:x?}");
    }
    assert!(is_fatal(parse(Format::MsgPack, b"\x01", 64)));
    assert!(is_fatal(parse(Format::MsgPack, b"", 64)));
}

#[test]
fn numbers_in_messagepack() {
    for (json, hex) in [
        ("0", "00"),
        ("-0", "cb8000000000000000"),
        ("-32", "e0"),
        ("-33", "d0df"),
        ("18446744073709551615", "cfffffffffffffffff"),
        ("-9223372036854775808", "d38000000000000000"),
        ("18446744073709551616", "cb43f0000000000000"),
        ("1.0", "cb3ff0000000000000"),
        ("1e400", "cb7fefffffffffffff"),
        ("-1e400", "cbffefffffffffffff"),
        ("1e-400", "cb0000000000000000"),
    ] {
        let bytes = msgpack::from_json(json);
        let written: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(written, hex, "{json}");
        let back = msgpack::to_json(&bytes, 64, 1000).unwrap();
        assert_eq!(msgpack::from_json(&back), bytes, "{json}");
    }
    assert_eq!(msgpack::to_json(b"\xca\x3f\xc0\x00\x00", 64, 1000).unwrap(), "1.5");
    assert_eq!(msgpack::to_json(b"\xcb\x3f\xf0\x00\x00\x00\x00\x00\x00", 64, 1000).unwrap(), "1.0");
}

#[test]
fn any_text_comes_back_from_messagepack() {
    let long = format!("\"{}\"", "é".repeat(40_000));
    for json in [
        r#"{"":[],"a":{},"b":[[],{}],"c":"\"\\\n\u0000é😀"}"#,
        r#"[1,[2,[3]],{"x":{"y":[4,5]}},"a,b]}"]"#,
        long.as_str(),
        "true",
    ] {
        assert_eq!(msgpack::to_json(&msgpack::from_json(json), 64, usize::MAX).unwrap(), json);
    }
    let spaced = r#" [ 1 , { "a" : [ ] } ] "#;
    assert_eq!(msgpack::to_json(&msgpack::from_json(spaced), 64, 100).unwrap(), r#"[1,{"a":[]}]"#);
    for broken in ["", "\"", "\"\\", "[", "[,", "]", "{\"a\"", ",,", "\"\\ud800\"", "é", "1é,\"é"] {
        let _ = msgpack::from_json(broken);
    }
}
