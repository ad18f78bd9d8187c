//! Comparison of `docs/asyncapi.yaml` with the frames that this crate reads and writes.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeSet;

use fanfare_proto::frame::{Format, close, code, encode_request, op, parse, parse_server};
use fanfare_proto::msgpack;

const PAGE: &str = include_str!("../../docs/asyncapi.yaml");

/// The operation of the last `op: {const: N}` above each example, and the example.
fn examples() -> Vec<(i64, &'static str)> {
    let (mut op, mut examples) = (None, Vec::new());
    for line in PAGE.lines().map(str::trim_start) {
        if let Some(number) = line.strip_prefix("op: {const: ") {
            op = Some(number.trim_end_matches('}').parse().unwrap());
        } else if let Some(json) = line.strip_prefix("payload: {") {
            let whole = &line[line.len() - json.len() - 1..];
            examples.push((op.unwrap(), whole));
        }
    }
    examples
}

/// The JSON texts of the frames that are compared with the encoder byte for byte.
fn golden(file: &'static str) -> BTreeSet<&'static str> {
    file.trim_end().split("\n\n").map(|block| block.lines().nth(1).unwrap()).collect()
}

#[test]
fn every_example_is_a_frame_as_it_is_on_the_wire() {
    let (client, server) =
        (golden(include_str!("samples/client.txt")), golden(include_str!("samples/server.txt")));
    let examples = examples();
    assert!(examples.len() > 25, "the page was read");
    for (op, json) in examples {
        let packed = msgpack::from_json(json);
        if server.contains(json) {
            for (format, payload) in [(Format::Json, json.as_bytes()), (Format::MsgPack, &packed)] {
                assert_eq!(parse_server(format, payload).unwrap().op, op, "{json}");
            }
        } else {
            assert!(client.contains(json), "{json} is no golden sample");
        }
        if client.contains(json) {
            for (format, payload) in [(Format::Json, json.as_bytes()), (Format::MsgPack, &packed)] {
                let request = parse(format, payload, 64).unwrap();
                assert_eq!(encode_request(&request, Format::Json), json.as_bytes());
            }
            assert!(json.starts_with(&format!("{{\"op\":{op}")), "{json} stands under op {op}");
        }
    }
}

#[test]
fn every_op_and_code_is_there() {
    let ops: BTreeSet<i64> = PAGE
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("op: {const: ")?.strip_suffix('}')?.parse().ok())
        .collect();
    assert_eq!(ops, (op::HEARTBEAT..=op::OCCUPANCY).collect());
    let codes = PAGE.lines().find_map(|line| line.trim_start().strip_prefix("enum: [40000")).unwrap();
    for code in [
        code::BAD_NAME,
        code::TOO_LARGE,
        code::CREDENTIAL,
        code::TOKEN,
        code::TOKEN_EXPIRED,
        code::CAPABILITY,
        code::TAKEN_OVER,
        code::LIMIT,
        code::INTERNAL,
        code::UNAVAILABLE,
    ] {
        assert!(codes.contains(&code.to_string()), "code {code}");
    }
    for close in [
        close::NORMAL,
        close::PROTOCOL,
        close::BAD_UTF8,
        close::POLICY,
        close::TOO_BIG,
        close::DRAINING,
        close::CREDENTIAL,
        close::CAPABILITY,
        close::SLOW,
        close::RATE,
    ] {
        assert!(PAGE.contains(&format!("\n    | {close} | ")), "close code {close}");
    }
}
