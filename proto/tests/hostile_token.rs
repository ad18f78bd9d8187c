//! TokenRequests that must not become tokens.

use fanfare_proto::token::{TokenRequest, TokenRequestBounds, TokenRequestError};

#[test]
fn token_requests_that_are_malformed() {
    let parse = |body: &str| TokenRequest::parse(body.as_bytes(), &bounds());
    let body =
        |fields: &str| format!(r#"{{"keyName":"k","nonce":"0123456789abcdef","timestamp":1{fields}}}"#);
    assert!(parse(&body("")).is_ok());
    assert_eq!(parse(&body(r#","ttl":0001"#)).ok(), None);
    for fields in [
        r#","ttl":1.0"#,
        r#","ttl":1e3"#,
        r#","ttl":-1"#,
        r#","ttl":"1""#,
        r#","ttl":null"#,
        r#","ttl":0"#,
        r#","ttl":172800001"#,
        r#","ttl":99999999999999999999"#,
        r#","clientId":null"#,
        r#","clientId":"a\nb""#,
        r#","capability":"a\u0000""#,
        r#","mac":5"#,
        r#","timestamp":1"#,
        r#","x":1,"x":2"#,
        r#","\u006eonce":"0123456789abcdef""#,
        r#","x":"\ud800""#,
        r#","capability":{},"ttl":0"#,
    ] {
        assert!(
            matches!(
                parse(&body(fields)),
                Err(TokenRequestError::Malformed(_) | TokenRequestError::Beyond { .. })
            ),
            "{fields}"
        );
    }
    for capability in ["{}", "null", "1", r#"{"*":["subscribe"]}"#] {
        let refused = parse(&body(&format!(r#","capability":{capability}"#)));
        assert_eq!(
            refused,
            Err(TokenRequestError::CapabilityNotText { key_name: "k".into() }),
            "{capability}"
        );
    }
    for body in [
        "",
        "[]",
        "null",
        r#"["k"]"#,
        r#"{"keyName":"k","nonce":"0123456789abcdef"}"#,
        r#"{"keyName":"k","nonce":"0123456789abcde","timestamp":1}"#,
        r#"{"nonce":"0123456789abcdef","timestamp":1}"#,
    ] {
        assert!(
            matches!(parse(body), Err(TokenRequestError::Malformed(_) | TokenRequestError::Beyond { .. })),
            "{body}"
        );
    }
}

#[test]
fn a_nonce_is_counted_in_characters() {
    let body = |nonce: String| format!(r#"{{"keyName":"k","nonce":"{nonce}","timestamp":1}}"#);
    assert!(TokenRequest::parse(body("é".repeat(128)).as_bytes(), &bounds()).is_ok());
    assert!(TokenRequest::parse(body("é".repeat(129)).as_bytes(), &bounds()).is_err());
    assert!(TokenRequest::parse(body("é".repeat(15)).as_bytes(), &bounds()).is_err());
}

fn bounds() -> TokenRequestBounds {
    TokenRequestBounds { nesting_max: 64, ttl_ms_max: 172_800_000, nonce_characters: 16..=128 }
}
