//! Frames and bodies that no client sends by mistake.
#![expect(clippy::panic, reason = "a test fails by panicking")]

use fanfare_proto::frame::{Body, Format, FrameError, parse};
use fanfare_proto::http::{parse_batch, parse_publish};
use fanfare_proto::{json, msgpack};

fn parse_json(text: impl AsRef<[u8]>) -> Result<fanfare_proto::frame::Request, FrameError> {
    parse(Format::Json, text.as_ref(), 64)
}

fn refusal(text: &str) -> (Option<String>, String) {
    match parse_json(text) {
        Err(FrameError::Refused { id, error }) => (id, error),
        other => panic!("{text} gave {other:?}"),
    }
}

fn is_fatal(result: Result<fanfare_proto::frame::Request, FrameError>) -> bool {
    matches!(result, Err(FrameError::Fatal(_) | FrameError::TooDeep { .. }))
}

/// An array in an array …, `depth` of them.
fn nested(depth: usize) -> String {
    "[".repeat(depth) + &"]".repeat(depth)
}

#[test]
fn nesting_is_bounded() {
    assert!(json::tidy(nested(64).as_bytes(), 64).is_ok());
    assert_eq!(json::tidy(nested(65).as_bytes(), 64), Err(json::Error::Nesting { nesting_max: 64 }));
    assert!(json::tidy(br#"{"a":"[[[[","b":[{}]}"#, 3).is_ok());

    let publish = |depth| format!(r#"{{"op":13,"channel":"c","data":{}}}"#, nested(depth));
    assert!(parse_json(publish(63)).is_ok());
    assert!(is_fatal(parse_json(publish(64))));
    assert!(is_fatal(parse_json("[".repeat(500_000))));
    assert!(parse_publish(format!(r#"{{"data":{}}}"#, nested(64)).as_bytes(), 64, 1_000).is_err());

    assert_eq!(msgpack::to_json(&[vec![0x91; 63], vec![0x90]].concat(), 64, 1000).unwrap(), nested(64));
    let deep = [vec![0x91; 64], vec![0x90]].concat();
    assert_eq!(msgpack::to_json(&deep, 64, 1000), Err(msgpack::Error::Nesting { nesting_max: 64 }));
    // A server may have wrapped what a client nested as deep as it could.
    let text = nested(100_000);
    assert_eq!(msgpack::to_json(&msgpack::from_json(&text), usize::MAX, usize::MAX).unwrap(), text);
}

#[test]
fn lone_surrogates_are_refused() {
    for text in [
        r#""\ud800""#,
        r#""\udc00""#,
        r#""\ud800\ud800""#,
        r#""\ud800x""#,
        r#""\uD83D\u0041""#,
        r#""\\\ud800""#,
    ] {
        assert_eq!(json::tidy(text.as_bytes(), 64), Err(json::Error::LoneSurrogate), "{text}");
    }
    for text in [r#""\ud83d\ude00""#, r#""\\ud800""#, r#""\u00e9\"""#] {
        assert_eq!(json::tidy(text.as_bytes(), 64).as_deref(), Ok(text));
    }
    let (id, error) = refusal(r#"{"op":13,"id":"7","channel":"c","data":"\ud800"}"#);
    assert_eq!((id.as_deref(), error.as_str()), (Some("7"), "text holds a lone surrogate"));
    assert!(parse_publish(br#"{"data":{"\udfff":1}}"#, 64, 1_000).is_err());
}

#[test]
fn data_keeps_its_text() {
    for data in [
        "1e400",
        "1.0",
        "-0",
        "123456789012345678901234567890",
        "null",
        "false",
        "\"\"",
        "0",
        r#""\u0041\/""#,
    ] {
        let [draft] = parse_publish(format!("{{ \"data\" : {data} }}").as_bytes(), 64, 1_000)
            .unwrap()
            .try_into()
            .unwrap();
        assert_eq!(draft.data.unwrap().get(), data);
        let request =
            parse_json(format!(r#"{{"op":13,"channel":"c","messages":[{{"data":{data}}}]}}"#)).unwrap();
        let Body::Message { messages, .. } = request.body else { panic!("{data}") };
        assert_eq!(messages[0].data.as_ref().unwrap().get(), data);
        let request = parse_json(format!(r#"{{"op":13,"channel":"c","data":{data}}}"#)).unwrap();
        let Body::Message { messages, .. } = request.body else { panic!("{data}") };
        assert_eq!(messages[0].data.as_ref().unwrap().get(), data);
    }
}

#[test]
fn white_space_goes_and_tokens_stay_apart() {
    let tidy = |text: &'static str| json::tidy(text.as_bytes(), 64).unwrap();
    assert_eq!(tidy(" {\"a b\" :\t[ 1 ,\r\n2 ] } \n"), r#"{"a b":[1,2]}"#);
    assert!(matches!(tidy("\n{\"a\":1}\n"), std::borrow::Cow::Borrowed(r#"{"a":1}"#)));
    for broken in ["1 2", "[1 2]", "tru e", "\"a\" \"b\"", "[- 1]"] {
        assert!(serde_json::from_str::<serde_json::Value>(&tidy(broken)).is_err(), "{broken}");
    }
    assert!(parse_publish(b"{\"data\":1 2}", 64, 1_000).is_err());
}

#[test]
fn bad_text() {
    assert_eq!(parse_json(b"{\"op\":0,\"id\":\"\xff\"}").unwrap_err(), FrameError::BadUtf8);
    assert!(is_fatal(parse_json("\u{feff}{\"op\":0}")));
    assert!(parse_publish("\u{feff}{}".as_bytes(), 64, 1_000).is_err());
    for text in
        ["", " ", "[]", "1", "null", "\"x\"", "{", "{\"op\":0", "{\"op\":0}}", "{\"op\":0}{}", "{\"op\":0,}"]
    {
        assert!(is_fatal(parse_json(text)), "{text}");
    }
    assert!(is_fatal(parse_json("{\"op\":0,\"x\":\"\u{1}\"}")));
    assert!(is_fatal(parse_json(r#"{"op":0,"x":"\u12"}"#)));
    assert!(is_fatal(parse_json("{\"op\":0,\"x\":\"\\")));
    assert!(is_fatal(parse_json(r#"{"op":0,"x":01}"#)));
}

#[test]
fn duplicate_keys_are_refused_with_the_id() {
    assert_eq!(refusal(r#"{"op":13,"op":5,"id":"1"}"#).0.as_deref(), Some("1"));
    assert_eq!(refusal(r#"{"op":13,"id":"1","id":"2"}"#).0.as_deref(), Some("1"));
    assert_eq!(refusal(r#"{"op":13,"id":"1","channel":"a","\u0063hannel":"b"}"#).0.as_deref(), Some("1"));
    let (id, error) = refusal(r#"{"op":13,"id":"1","channel":"a","messages":[{"data":1,"data":2}]}"#);
    assert_eq!((id.as_deref(), error.as_str()), (Some("1"), "duplicate field `data`"));
    assert!(is_fatal(parse_json(r#"{"op":13,"op":5,"id":"1""#)));
    assert!(parse_publish(br#"{"name":"a","name":"b"}"#, 64, 1_000).is_err());
    assert!(parse_json(r#"{"op":0,"x":1,"x":2}"#).is_ok());
}

#[test]
fn ids_that_are_no_strings_count_as_none() {
    for id in ["1", "null", "[]", "true"] {
        assert_eq!(parse_json(format!(r#"{{"op":0,"id":{id}}}"#)).unwrap().id, None);
    }
    assert_eq!(parse_json(r#"{"op":0,"id":"\u0061"}"#).unwrap().id.as_deref(), Some("a"));
}

#[test]
fn requests_name_the_field_they_are_refused_for() {
    for (text, expected) in [
        (r#"{"id":"1"}"#, "op is missing"),
        (r#"{"id":"1","op":"0"}"#, "op must be an integer"),
        (r#"{"id":"1","op":0.0}"#, "op must be an integer"),
        (r#"{"id":"1","op":99999999999999999999}"#, "op must be an integer"),
        (r#"{"id":"1","op":8}"#, "channel is missing"),
        (r#"{"id":"1","op":8,"channel":null}"#, "channel must be a string"),
        (r#"{"id":"1","op":8,"channel":"c","rewind":10}"#, "rewind must be a string"),
        (r#"{"id":"1","op":8,"channel":"c","modes":"subscribe"}"#, "modes must be an array of strings"),
        (r#"{"id":"1","op":12,"channel":"c"}"#, "action is missing"),
        (r#"{"id":"1","op":13,"channel":"c","messages":{}}"#, "messages must be an array"),
        (r#"{"id":"1","op":13,"channel":"c","messages":null}"#, "messages must be an array"),
        (r#"{"id":"1","op":13,"channel":"c","messages":[[]]}"#, "expected an object for a message"),
        (
            r#"{"id":"1","op":13,"channel":"c","messages":[{}],"name":"n"}"#,
            "messages excludes name and data beside it",
        ),
        (r#"{"id":"1","op":13,"channel":"c","name":null}"#, "name must be a string"),
        (r#"{"id":"1","op":13,"channel":"c","messages":[{"name":null}]}"#, "expected name to be a string"),
        (r#"{"id":"1","op":13,"channel":"c","messages":[{"id":null}]}"#, "expected id to be a string"),
        (r#"{"id":"1","op":13,"channel":"c","messages":[{"extras":null}]}"#, "extras must be an object"),
        (r#"{"id":"1","op":15,"accessToken":1}"#, "accessToken must be a string"),
    ] {
        assert_eq!(refusal(text), (Some("1".to_owned()), expected.to_owned()), "{text}");
    }
    // A field of another operation is unknown to this one.
    assert!(parse_json(r#"{"op":0,"channel":1,"messages":2,"modes":3}"#).is_ok());
}

#[test]
fn publish_bodies_that_are_refused() {
    for (body, expected) in [
        ("", "body is empty"),
        (" \n", "body is empty"),
        ("[]", "array holds no message"),
        (r#"{"name":null}"#, "expected name to be a string"),
        (r#"{"name":1}"#, "expected name to be a string"),
        (r#"{"id":"a, expected b","name":true}"#, "expected name to be a string"),
        (r#"[{},null]"#, "expected an object for a message"),
        (r#""text""#, "a message must be an object"),
        (r#"{"extras":[]}"#, "extras must be an object"),
    ] {
        assert_eq!(parse_publish(body.as_bytes(), 64, 1_000).unwrap_err().to_string(), expected, "{body}");
    }
    assert!(parse_publish(b"{\"data\":\"\xc3\"}", 64, 1_000).is_err());
    let quoted = parse_publish(format!("\"{}\"", "é".repeat(1000)).as_bytes(), 64, 1_000).unwrap_err();
    assert!(quoted.to_string().len() <= 200);
}

#[test]
fn secrets_do_not_reach_debug_output() {
    let request = parse_json(r#"{"op":15,"accessToken":"s3cret"}"#).unwrap();
    assert!(!format!("{request:?}").contains("s3cret"));
}

#[test]
fn refused_publish_does_not_quote_text_in_place_of_message() {
    for body in [r#""hush""#, r#"["hush"]"#, r#"[{}, "hush"]"#, r#" "hu\u0073h" "#] {
        let error = parse_publish(body.as_bytes(), 64, 1_000).expect_err(body).to_string();
        assert!(!error.contains("hush") && error.contains("object"), "{body}: {error}");
    }
    for (batch, field) in [
        (r#"{"channels":["a"],"messages":["hush"]}"#, "message"),
        (r#"{"channels":["a"],"messages":"hush"}"#, "messages"),
        (r#"{"channels":["a"],"messages":[{"name":7531}]}"#, "name"),
        (r#"{"channels":["a"],"messages":[{},7531]}"#, "message"),
        (r#"{"channels":["a"]}"#, "messages"),
        (r#"{"channels":"hush","messages":[{}]}"#, "channels"),
        (r#"{"channels":7531,"messages":[{}]}"#, "channels"),
        (r#"{"channels":[["hush"]],"messages":[{}]}"#, "channels"),
        (r#"{"channels":["a",7531],"messages":[{}]}"#, "channels"),
        (r#"{"messages":[{}]}"#, "channels"),
    ] {
        let error = parse_batch(batch.as_bytes(), 64, 1_000).expect_err(batch).to_string();
        assert!(error.contains(field), "{batch}: {error}");
        assert!(!error.contains("hush") && !error.contains("7531"), "{batch}: {error}");
    }
}
