use super::*;
use crate::auth::inspect;

use crate::model::{Limits, Operation};

fn changed(change: impl FnOnce(&mut serde_json::Map<String, Value>)) -> Value {
    let mut claims = claims();
    change(claims.as_object_mut().unwrap());
    claims
}

fn with(name: &str, value: Value) -> Value {
    changed(|claims| drop(claims.insert(name.to_owned(), value)))
}

fn without(name: &str) -> Value {
    changed(|claims| drop(claims.remove(name)))
}

fn times(iat: u64, exp: u64) -> Value {
    changed(|claims| {
        claims.insert("iat".into(), json!(iat));
        claims.insert("exp".into(), json!(exp));
    })
}

/// Lists within lists.
fn nested(depth: usize) -> Value {
    (1..depth).fold(json!([]), |inner, _| json!([inner]))
}

/// A token with any claims, a valid header and a valid signature.
fn sign_raw(claims: &[u8]) -> String {
    let header = URL_SAFE_NO_PAD.encode(json!({ "alg": "HS256", "kid": "k1" }).to_string());
    let signed = format!("{header}.{}", URL_SAFE_NO_PAD.encode(claims));
    let key = EncodingKey::from_secret(secret_of("k1").as_bytes());
    let signature = jsonwebtoken::crypto::sign(signed.as_bytes(), &key, Algorithm::HS256).unwrap();
    format!("{signed}.{signature}")
}

#[test]
fn claims_that_are_no_json_text_are_refused() {
    let node = AuthFixture::new();
    let good = claims().to_string();
    let refused = |claims: &[u8]| node.auth.authenticate_token(&sign_raw(claims)).err().map(|no| no.reason);
    assert_eq!(refused(good.as_bytes()), None);
    let with = |bytes: &[u8]| [b"{\"x\":\"", bytes, b"\",", &good.as_bytes()[1..]].concat();
    assert_eq!(refused(&with("\u{e9}".as_bytes())), None);
    for (name, claims) in [
        ("a byte that is not UTF-8", with(b"\xff")),
        ("half a character", with(b"\xc3")),
        ("a lone surrogate", with(br"\ud800")),
        ("twice the same claim", [b"{\"iat\":1,", &good.as_bytes()[1..]].concat()),
        ("something behind", [good.as_bytes(), b"x"].concat()),
        ("nothing", Vec::new()),
        ("null", b"null".to_vec()),
    ] {
        assert_eq!(refused(&claims), Some(Reason::BadClaims), "{name}");
    }
}

#[test]
fn a_bad_claim_is_named_with_its_fault() {
    let capability = "x-service-capability";
    let client_id = "x-service-client-id";
    let time = "must be a number of seconds since 1970";
    for (claims, fault) in [
        (without("iat"), "iat is missing".to_owned()),
        (without("exp"), "exp is missing".to_owned()),
        (without(capability), format!("{capability} is missing")),
        (with("iat", json!("1767225600")), format!("iat {time}")),
        (with("exp", Value::Null), format!("exp {time}")),
        (with("nbf", json!("0")), format!("nbf {time}")),
        (times(u64::MAX - 1, u64::MAX), "iat: is no time in seconds".to_owned()),
        (with("aud", json!(1)), "aud must be a name or a list of names".to_owned()),
        (
            with(capability, json!({"*": ["publish"]})),
            format!("{capability} must be a string that holds JSON text, not an object"),
        ),
        (with(capability, json!("x")), format!("{capability}: capability is not JSON")),
        (with(capability, json!("{}")), format!("{capability}: capability grants nothing")),
        (with(client_id, json!(1)), format!("{client_id} must be a string")),
        (with(client_id, json!("*")), format!("{client_id}: ")),
    ] {
        let limits = Limits::default();
        let inspection = inspect(&sign("k1", &claims), None, &limits, None, NOW_MS);
        assert_eq!(inspection.refused, Some(Reason::BadClaims), "{fault}");
        let detail = inspection.detail.unwrap_or_default();
        assert!(detail.starts_with(&fault), "{detail} and not {fault}");
    }
    let twice = [b"{\"iat\":1,", &claims().to_string().as_bytes()[1..]].concat();
    let inspection = inspect(&sign_raw(&twice), None, &Limits::default(), None, NOW_MS);
    assert_eq!(inspection.detail.as_deref(), Some("a claim is given twice"));
}

#[test]
fn an_audience_must_name_the_service() {
    let mut node = AuthFixture::new();
    node.auth = node.auth.for_audience(Some("chat"));
    for (aud, accepted) in [
        (json!("chat"), true),
        (json!(["other", "chat"]), true),
        (json!("Chat"), false),
        (json!(["other"]), false),
        (json!([]), false),
    ] {
        let outcome = node.auth.authenticate_token(&sign("k1", &with("aud", aud.clone())));
        let expected = (!accepted).then_some(Reason::WrongAudience);
        assert_eq!(outcome.err().map(|refused| refused.reason), expected, "{aud}");
    }
    assert!(node.auth.authenticate_token(&sign("k1", &claims())).is_ok(), "without aud");
}

#[test]
fn a_token_grants_what_its_claims_say() {
    let node = AuthFixture::new();
    let token = sign("k1", &with("x-service-client-id", json!("ada")));
    let principal = node.auth.authenticate_token(&token).unwrap();
    assert_eq!(principal.kind, PrincipalKind::Token);
    assert_eq!(principal.client_id.as_ref().map(|id| id.as_str()), Some("ada"));
    assert_eq!((principal.issued_s, principal.expires_ms), (NOW_S, Some((NOW_S + 3600) * 1000)));
    assert!(principal.allows("x", Operation::Publish) && !principal.allows("x", Operation::History));
}

#[test]
fn claims_are_held_to_the_rules() {
    let node = AuthFixture::new();
    let capability = "x-service-capability";
    let client_id = "x-service-client-id";
    let cases = [
        ("as it should be", claims(), true),
        ("missing iat", without("iat"), false),
        ("missing exp", without("exp"), false),
        ("missing capability", without(capability), false),
        ("iat null", with("iat", Value::Null), false),
        ("iat text", with("iat", json!("1767225600")), false),
        ("iat negative", with("iat", json!(-1)), false),
        ("exp with a fraction", with("exp", json!(NOW_S as f64 + 60.5)), true),
        ("exp with a fraction in this very second", with("exp", json!(NOW_S as f64 + 0.9)), false),
        ("iat with a fraction", with("iat", json!(NOW_S as f64 - 0.5)), true),
        ("iat 120.9 s ahead", with("iat", json!(NOW_S as f64 + 120.9)), true),
        (
            "both in one second",
            changed(|claims| {
                claims.insert("iat".into(), json!(NOW_S as f64 + 1.1));
                claims.insert("exp".into(), json!(NOW_S as f64 + 1.9));
            }),
            false,
        ),
        ("iat negative with a fraction", with("iat", json!(-0.5)), false),
        ("nbf now", with("nbf", json!(NOW_S)), true),
        ("nbf in this second", with("nbf", json!(NOW_S as f64 + 0.9)), true),
        ("nbf in the next second", with("nbf", json!(NOW_S + 1)), false),
        ("nbf of the largest number", with("nbf", json!(u64::MAX)), false),
        ("nbf null", with("nbf", Value::Null), false),
        ("nbf text", with("nbf", json!("0")), false),
        ("aud of nobody in particular", with("aud", json!("x")), false),
        ("aud empty list", with("aud", json!([])), false),
        ("aud null", with("aud", Value::Null), false),
        ("aud number", with("aud", json!(1)), false),
        ("nesting of 64", with("x", nested(63)), true),
        ("nesting of 65", with("x", nested(64)), false),
        ("exp in milliseconds", with("exp", json!(NOW_MS + 3_600_000)), false),
        ("both in milliseconds", times(NOW_MS, NOW_MS + 3_600_000), false),
        ("the largest numbers", times(u64::MAX - 1, u64::MAX), false),
        ("exp of the largest number", times(NOW_S, u64::MAX), false),
        ("expired", times(NOW_S - 100, NOW_S - 1), false),
        ("expires in this very second, which has begun", times(NOW_S - 100, NOW_S), false),
        ("half a second left", times(NOW_S - 100, NOW_S + 1), true),
        ("exp equal to iat", times(NOW_S + 60, NOW_S + 60), false),
        ("exp before iat", times(NOW_S + 100, NOW_S + 60), false),
        ("iat 120 s ahead", times(NOW_S + 120, NOW_S + 300), true),
        ("iat 121 s ahead", times(NOW_S + 121, NOW_S + 300), false),
        ("48 hours", times(NOW_S, NOW_S + 172_800), true),
        ("48 hours and a second", times(NOW_S, NOW_S + 172_801), false),
        ("48 hours, begun a day ago", times(NOW_S - 86_400, NOW_S + 86_400), true),
        ("long ago until now", times(0, NOW_S + 60), false),
        ("capability as an object", with(capability, json!({ "*": ["publish"] })), false),
        ("capability empty", with(capability, json!("")), false),
        ("capability without patterns", with(capability, json!("{}")), false),
        ("capability without operations", with(capability, json!(r#"{"*":[]}"#)), false),
        ("capability with an unknown operation", with(capability, json!(r#"{"*":["admin"]}"#)), false),
        (
            "capability with a repeated key",
            with(capability, json!(r#"{"a":["publish"],"a":["publish"]}"#)),
            false,
        ),
        (
            "capability of the key",
            with(capability, json!(r#"{"*":["history","publish","subscribe"]}"#)),
            true,
        ),
        ("capability beyond the key", with(capability, json!(r#"{"*":["presence"]}"#)), false),
        ("clientId", with(client_id, json!("ada")), true),
        ("clientId empty", with(client_id, json!("")), false),
        ("clientId wildcard", with(client_id, json!("*")), false),
        ("clientId with a newline", with(client_id, json!("a\nb")), false),
        ("clientId too long", with(client_id, json!("a".repeat(257))), false),
        ("clientId null", with(client_id, Value::Null), false),
        ("clientId number", with(client_id, json!(7)), false),
        (
            "iss and sub beside a kid",
            changed(|claims| {
                claims.insert("iss".into(), json!("x"));
                claims.insert("sub".into(), json!("x"));
            }),
            true,
        ),
        ("claims that are no object", json!([1]), false),
        ("claims as a list in their order", json!([NOW_S, NOW_S + 60, null, null, PUBLISH, "ada"]), false),
    ];
    for (name, claims, accepted) in cases {
        assert_eq!(node.auth.authenticate_token(&sign("k1", &claims)).is_ok(), accepted, "{name}");
    }
}

#[test]
fn a_capability_beyond_a_narrow_key_is_refused() {
    let node = AuthFixture::new();
    for (capability, accepted) in [
        (r#"{"chat:*":["publish"]}"#, true),
        (r#"{"chat:a":["subscribe"],"chat:b*":["publish"]}"#, true),
        (r#"{"chat*":["publish"]}"#, false),
        (r#"{"*":["publish"]}"#, false),
        (r#"{"chat:*":["history"]}"#, false),
    ] {
        let token = sign("narrow", &with("x-service-capability", json!(capability)));
        assert_eq!(node.auth.authenticate_token(&token).is_ok(), accepted, "{capability}");
    }
}

#[test]
fn headers_and_signatures_are_held_to_the_rules() {
    let node = AuthFixture::new();
    let good = sign("k1", &claims());
    let parts: Vec<&str> = good.split('.').collect();
    let raw = |header: Value, signature: &str| {
        format!("{}.{}.{signature}", URL_SAFE_NO_PAD.encode(header.to_string()), parts[1])
    };
    let algorithm = |algorithm| Header { alg: algorithm, ..header("k1") };
    let console = json!({ "iss": "console", "sub": "u1", "email": "a@b.c", "session_id": "s", "iat": NOW_S, "exp": NOW_S + 60 });
    let mut console_like = claims();
    console_like["iss"] = json!("console");
    let cases = [
        ("alg none", raw(json!({ "alg": "none", "kid": "k1" }), "")),
        ("alg none with the signature", raw(json!({ "alg": "none", "kid": "k1" }), parts[2])),
        ("alg missing", raw(json!({ "kid": "k1" }), parts[2])),
        ("alg RS256", raw(json!({ "alg": "RS256", "kid": "k1" }), parts[2])),
        ("HS384", sign_with(&algorithm(Algorithm::HS384), &claims(), "s.e.c")),
        ("HS512", sign_with(&algorithm(Algorithm::HS512), &claims(), "s.e.c")),
        ("no kid", sign_with(&Header::new(Algorithm::HS256), &claims(), "s.e.c")),
        ("unknown kid", sign("nobody", &claims())),
        ("kid of another key", sign_with(&header("narrow"), &claims(), "s.e.c")),
        ("revoked key", sign("gone", &claims())),
        ("wrong secret", sign_with(&header("k1"), &claims(), "other")),
        ("empty secret", sign_with(&header("k1"), &claims(), "")),
        (
            "critical extension",
            sign_with(&Header { crit: Some(vec!["x".into()]), ..header("k1") }, &claims(), "s.e.c"),
        ),
        ("console token", sign_with(&Header::new(Algorithm::HS256), &console, "console-secret")),
        (
            "console token signed with a key",
            sign_with(&Header::new(Algorithm::HS256), &console_like, "s.e.c"),
        ),
        ("no signature", format!("{}.{}.", parts[0], parts[1])),
        ("two parts", format!("{}.{}", parts[0], parts[1])),
        ("four parts", format!("{good}.x")),
        ("cut signature", good[..good.len() - 2].to_owned()),
        ("changed claims", format!("{}.{}.{}", parts[0], parts[1].replacen('e', "f", 1), parts[2])),
        ("padding", format!("{good}=")),
        ("a space", format!("{good} ")),
        ("empty", String::new()),
        ("dots", "..".to_owned()),
        ("a key", "s.e.c.k1".to_owned()),
    ];
    assert!(node.auth.authenticate_token(&good).is_ok());
    for (name, token) in cases {
        assert!(node.auth.authenticate_token(&token).is_err(), "{name}");
    }
}

#[test]
fn a_token_of_more_than_8_kib_is_refused() {
    let node = AuthFixture::new();
    let padded = |length: usize| sign("k1", &with("padding", json!("x".repeat(length))));
    let base = padded(0).len();
    let fitting = (8192 - base) / 4 * 3;
    assert!(padded(fitting).len() <= 8192 && node.auth.authenticate_token(&padded(fitting)).is_ok());
    let long = padded(fitting + 8);
    assert!(long.len() > 8192 && node.auth.authenticate_token(&long).is_err());
}

#[test]
fn a_token_ends_to_the_millisecond() {
    let node = AuthFixture::new();
    let token = sign("k1", &times(NOW_S, NOW_S + 2));
    node.clock.pass_to((NOW_S + 2) * 1000 - 1);
    assert!(node.auth.authenticate_token(&token).is_ok());
    node.clock.pass_to((NOW_S + 2) * 1000);
    assert!(node.auth.authenticate_token(&token).is_err());
}
