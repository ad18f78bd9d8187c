//! Frames with a few changed bytes: the reader reads or refuses each, and never panics.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fanfare_proto::frame::{Format, encode_request, parse, parse_server};
use fanfare_proto::http::parse_publish;
use fanfare_proto::token::{TokenRequest, TokenRequestBounds};
use fanfare_proto::{json, msgpack};

const ROUNDS: usize = 2000;

/// A xorshift generator: the same bytes in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % bound as u64) as usize
    }

    fn mutate(&mut self, payload: &[u8]) -> Vec<u8> {
        const SIGNIFICANT_BYTES: &[u8] = b"\"\\{}[]:, u0d\xc0\xc1\xc4\xdd\xdf\xff\x00";
        let mut mutated = payload.to_vec();
        for _ in 0..=self.below(3) {
            let at = self.below(mutated.len());
            match self.below(4) {
                0 => mutated.truncate(at + 1),
                1 => mutated.insert(at, SIGNIFICANT_BYTES[self.below(SIGNIFICANT_BYTES.len())]),
                2 => mutated[at] = SIGNIFICANT_BYTES[self.below(SIGNIFICANT_BYTES.len())],
                _ => mutated[at] = self.below(256) as u8,
            }
        }
        mutated
    }
}

#[test]
fn mutated_input_is_read_or_refused() {
    let mut random = Random(0x5EED);
    let files = [include_str!("samples/client.txt"), include_str!("samples/server.txt")];
    let frames = files.iter().flat_map(|file| file.lines()).filter(|line| line.starts_with('{'));
    for text in frames.chain([include_str!("samples/token-request.json")]) {
        let packed = msgpack::from_json(text);
        for _ in 0..ROUNDS {
            read_json(&random.mutate(text.as_bytes()));
            read_msgpack(&random.mutate(&packed));
        }
    }
}

fn read_json(payload: &[u8]) {
    if let Ok(request) = parse(Format::Json, payload, 64) {
        let again = parse(Format::Json, &encode_request(&request, Format::Json), 64);
        assert_eq!(format!("{:?}", again.unwrap()), format!("{request:?}"));
    }
    // Tidying changes no meaning: what was broken stays broken.
    if let Ok(tidied) = json::tidy(payload, 64) {
        let before = serde_json::from_slice::<serde_json::Value>(payload).ok();
        assert_eq!(serde_json::from_str::<serde_json::Value>(&tidied).ok(), before);
        msgpack::from_json(&tidied);
    }
    let _ = (
        parse_server(Format::Json, payload),
        parse_publish(payload, 64, 1_000),
        TokenRequest::parse(payload, &bounds()),
    );
}

fn read_msgpack(payload: &[u8]) {
    let _ = (parse(Format::MsgPack, payload, 64), parse_server(Format::MsgPack, payload));
    if let Ok(text) = msgpack::to_json(payload, 64, 100_000) {
        assert!(serde_json::from_str::<serde_json::Value>(&text).is_ok(), "{text}");
    }
}

fn bounds() -> TokenRequestBounds {
    TokenRequestBounds { nesting_max: 64, ttl_ms_max: 172_800_000, nonce_characters: 16..=128 }
}
