//! Tests of tokens: the MAC, times, audiences, and errors that quote nothing.

use super::*;

/// RFC 4231, case 2.
#[test]
fn a_mac_is_padded_base64_of_hmac_sha256() {
    let expected = "W9zBRr9gdU5qBCQmCJV1x1oAPwidJzmDnexYuWTsOEM=";
    assert_eq!(mac(b"Jefe", "what do ya want for nothing?"), expected);
}

#[test]
fn a_numeric_date_is_floored() {
    for (text, seconds) in [
        ("1767225600", Some(1_767_225_600)),
        ("1767225600.5", Some(1_767_225_600)),
        ("1767225600.99999999999999999", Some(1_767_225_600)),
        ("1.7672256005e9", Some(1_767_225_600)),
        ("17672256005E-1", Some(1_767_225_600)),
        ("0.9", Some(0)),
        ("18446744073709551616", None),
        ("1e30", None),
        ("-1", None),
        ("-0.5", None),
        ("\"1767225600\"", None),
        ("null", None),
        ("[1]", None),
    ] {
        assert_eq!(floored(text), seconds, "{text}");
    }
}

#[test]
fn an_audience_is_a_name_or_several() {
    let names = |text: &str| serde_json::from_str::<Audience>(text).map(|aud| aud.names("chat"));
    for (text, expected) in [
        (r#""chat""#, Some(true)),
        (r#"["other","chat"]"#, Some(true)),
        (r#""chat2""#, Some(false)),
        ("[]", Some(false)),
        ("null", None),
        ("{}", None),
        (r#"["chat",1]"#, None),
    ] {
        assert_eq!(names(text).ok(), expected, "{text}");
    }
}

#[test]
fn an_error_repeats_nothing_of_the_body() {
    let bounds = TokenRequestBounds { nesting_max: 64, ttl_ms_max: 172_800_000, nonce_characters: 16..=128 };
    for body in [
        r#""k:hush""#,
        r#"["hush"]"#,
        r#"{"keyName":"k","nonce":"hush\n","timestamp":1}"#,
        r#"{"keyName":"k","nonce":"0123456789abcdef","timestamp":"hush"}"#,
        r#"{"hush":1,"hush":2}"#,
        r#"{"mac":hush}"#,
    ] {
        let error = TokenRequest::parse(body.as_bytes(), &bounds).expect_err(body);
        assert!(!error.to_string().contains("hush"), "{body}: {error}");
    }
}
