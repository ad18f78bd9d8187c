use fanfare_proto::token::{TokenDetails, mac};

use super::*;

/// Fields of a token request, so that a test can spell them as no library would.
#[derive(Clone)]
struct TestTokenRequest {
    key: &'static str,
    /// JSON texts.
    ttl: Option<String>,
    capability: Option<String>,
    client_id: Option<String>,
    timestamp: String,
    nonce: String,
}

impl TestTokenRequest {
    fn new() -> Self {
        let (ttl, nonce) = (Some("60000".into()), "0123456789abcdef".into());
        Self { key: "k1", ttl, capability: None, client_id: None, timestamp: NOW_MS.to_string(), nonce }
    }

    fn capability(capability: &str) -> Self {
        Self { capability: Some(json!(capability).to_string()), ..Self::new() }
    }

    fn client_id(client_id: &str) -> Self {
        Self { client_id: Some(json!(client_id).to_string()), ..Self::new() }
    }

    fn at(timestamp_ms: u64) -> Self {
        Self { timestamp: timestamp_ms.to_string(), ..Self::new() }
    }

    fn ttl(text: &str) -> Self {
        Self { ttl: Some(text.into()), ..Self::new() }
    }

    fn nonce(length: usize) -> Self {
        Self { nonce: "n".repeat(length), ..Self::new() }
    }

    fn of(key: &'static str) -> Self {
        Self { key, ..Self::new() }
    }

    /// The six values in their order.
    fn values(&self) -> [String; 6] {
        let text = |json: &Option<String>| {
            json.as_ref()
                .map_or(String::new(), |json| serde_json::from_str(json).unwrap_or_else(|_| json.clone()))
        };
        [
            self.key.into(),
            self.ttl.clone().unwrap_or_default(),
            text(&self.capability),
            text(&self.client_id),
            self.timestamp.clone(),
            self.nonce.clone(),
        ]
    }

    fn body(&self, mac: Option<&str>) -> String {
        let mut body =
            format!(r#"{{"keyName":"{}","timestamp":{},"nonce":"{}""#, self.key, self.timestamp, self.nonce);
        let optional = [("ttl", &self.ttl), ("capability", &self.capability), ("clientId", &self.client_id)];
        for (name, value) in optional {
            if let Some(value) = value {
                body.push_str(&format!(r#","{name}":{value}"#));
            }
        }
        if let Some(mac) = mac {
            body.push_str(&format!(r#","mac":"{mac}""#));
        }
        body + "}"
    }

    fn signed(&self) -> String {
        let text: String = self.values().iter().map(|value| format!("{value}\n")).collect();
        self.body(Some(&mac(secret_of(self.key).as_bytes(), &text)))
    }
}

impl AuthFixture {
    async fn exchange(&self, key: &str, headers: &[&str], body: &str) -> Result<TokenDetails, ExchangeError> {
        let headers: Vec<&[u8]> = headers.iter().map(|value| value.as_bytes()).collect();
        self.auth.exchange(None, key, &headers, body.as_bytes()).await
    }

    async fn signed(&self, sent: &TestTokenRequest) -> Result<TokenDetails, ExchangeError> {
        self.exchange(sent.key, &[], &sent.signed()).await
    }
}

/// The kind of an answer, without its text.
fn kind<T>(outcome: &Result<T, ExchangeError>) -> &'static str {
    match outcome {
        Ok(_) => "token",
        Err(ExchangeError::TooMany) => "too many",
        Err(ExchangeError::Malformed(_)) => "malformed",
        Err(ExchangeError::Mac(_)) => "mac",
        Err(ExchangeError::Timestamp { .. }) => "timestamp",
        Err(ExchangeError::Capability { .. }) => "capability",
        Err(ExchangeError::NonceUsed) => "nonce",
        Err(ExchangeError::Unavailable) => "unavailable",
    }
}

#[tokio::test]
async fn a_signed_request_becomes_a_token_that_works() {
    let node = AuthFixture::new();
    let sent = TestTokenRequest {
        client_id: Some("\"ada\"".into()),
        ..TestTokenRequest::capability(r#"{"b":["publish"],"a*":["history"]}"#)
    };
    let details = node.signed(&TestTokenRequest { ttl: Some("1".into()), ..sent }).await.unwrap();
    assert_eq!((details.issued, details.expires), (NOW_S * 1000, (NOW_S + 1) * 1000), "a ttl is rounded up");
    assert_eq!(details.capability, r#"{"a*":["history"],"b":["publish"]}"#);
    assert_eq!((&*details.key_name, details.client_id.as_deref()), ("k1", Some("ada")));
    let principal = node.auth.authenticate_token(&details.token).unwrap();
    assert_eq!(
        (principal.expires_ms, principal.capability.canonical()),
        (Some(details.expires), details.capability)
    );
    assert_eq!(principal.client_id.as_ref().map(|id| id.as_str()), Some("ada"));
}

#[tokio::test]
async fn absent_or_empty_token_fields_get_their_defaults() {
    for (ttl, capability, client_id) in [(None, None, None), (None, Some("\"\""), Some("\"\""))] {
        let node = AuthFixture::new();
        let text = |text: Option<&str>| text.map(str::to_owned);
        let sent = TestTokenRequest {
            ttl,
            capability: text(capability),
            client_id: text(client_id),
            ..TestTokenRequest::of("narrow")
        };
        let details = node.signed(&sent).await.unwrap();
        assert_eq!(details.capability, r#"{"chat:*":["publish","subscribe"]}"#, "narrowed to the key");
        assert_eq!((details.expires - details.issued, details.client_id), (3_600_000, None));
    }
}

#[tokio::test]
async fn well_signed_requests_are_held_to_the_rules() {
    let control = |sent: TestTokenRequest| TestTokenRequest {
        capability: Some(r#""{\"*\":\n[\"publish\"]}""#.into()),
        ..sent
    };
    let cases = [
        ("as it should be", TestTokenRequest::new(), "token"),
        ("unknown key", TestTokenRequest::of("nobody"), "mac"),
        ("revoked key", TestTokenRequest::of("gone"), "mac"),
        ("ttl zero", TestTokenRequest::ttl("0"), "malformed"),
        ("ttl of 48 hours", TestTokenRequest::ttl("172800000"), "token"),
        ("ttl beyond 48 hours", TestTokenRequest::ttl("172800001"), "malformed"),
        ("ttl with a fraction", TestTokenRequest::ttl("60000.0"), "malformed"),
        ("ttl with an exponent", TestTokenRequest::ttl("6e4"), "malformed"),
        ("ttl with a sign", TestTokenRequest::ttl("-60000"), "malformed"),
        ("ttl as a string", TestTokenRequest::ttl("\"60000\""), "malformed"),
        (
            "timestamp with a fraction",
            TestTokenRequest { timestamp: format!("{NOW_MS}.0"), ..TestTokenRequest::new() },
            "malformed",
        ),
        (
            "capability as an object",
            TestTokenRequest { capability: Some(PUBLISH.into()), ..TestTokenRequest::new() },
            "mac",
        ),
        (
            "capability null",
            TestTokenRequest { capability: Some("null".into()), ..TestTokenRequest::new() },
            "mac",
        ),
        (
            "capability as an object of an unknown key",
            TestTokenRequest { capability: Some("{}".into()), ..TestTokenRequest::of("nobody") },
            "mac",
        ),
        ("capability that is no map", TestTokenRequest::capability("publish"), "malformed"),
        ("capability empty map", TestTokenRequest::capability("{}"), "malformed"),
        ("capability unknown operation", TestTokenRequest::capability(r#"{"*":["admin"]}"#), "malformed"),
        (
            "capability repeated key",
            TestTokenRequest::capability(r#"{"a":["publish"],"a":["publish"]}"#),
            "malformed",
        ),
        ("capability with a newline", control(TestTokenRequest::new()), "malformed"),
        ("capability beyond the key", TestTokenRequest::capability(r#"{"*":["presence"]}"#), "capability"),
        ("clientId with a newline", TestTokenRequest::client_id("a\nb"), "malformed"),
        ("clientId wildcard", TestTokenRequest::client_id("*"), "malformed"),
        ("clientId too long", TestTokenRequest::client_id(&"a".repeat(257)), "malformed"),
        (
            "clientId null",
            TestTokenRequest { client_id: Some("null".into()), ..TestTokenRequest::new() },
            "malformed",
        ),
        ("nonce of 15", TestTokenRequest::nonce(15), "malformed"),
        ("nonce of 16", TestTokenRequest::nonce(16), "token"),
        ("nonce of 128", TestTokenRequest::nonce(128), "token"),
        ("nonce of 129", TestTokenRequest::nonce(129), "malformed"),
        ("two minutes ago", TestTokenRequest::at(NOW_MS - 120_000), "token"),
        ("a millisecond more", TestTokenRequest::at(NOW_MS - 120_001), "timestamp"),
        ("two minutes ahead", TestTokenRequest::at(NOW_MS + 120_000), "token"),
        ("a millisecond further", TestTokenRequest::at(NOW_MS + 120_001), "timestamp"),
        ("timestamp in seconds", TestTokenRequest::at(NOW_S), "timestamp"),
        ("timestamp zero", TestTokenRequest::at(0), "timestamp"),
        (
            "malformed before the key",
            TestTokenRequest { ttl: Some("0".into()), ..TestTokenRequest::of("nobody") },
            "malformed",
        ),
        (
            "the key before the timestamp",
            TestTokenRequest { timestamp: "0".into(), ..TestTokenRequest::of("gone") },
            "mac",
        ),
        (
            "the timestamp before the capability",
            TestTokenRequest {
                timestamp: "0".into(),
                ..TestTokenRequest::capability(r#"{"*":["presence"]}"#)
            },
            "timestamp",
        ),
    ];
    for (name, sent, expected) in cases {
        let outcome = AuthFixture::new().signed(&sent).await;
        assert_eq!(kind(&outcome), expected, "{name}: {outcome:?}");
    }
}

#[tokio::test]
async fn whatever_is_signed_otherwise_has_an_invalid_mac() {
    let node = AuthFixture::new();
    let sent =
        TestTokenRequest { client_id: Some("\"ada\"".into()), ..TestTokenRequest::capability(PUBLISH) };
    let text = |values: &[&str]| values.iter().map(|value| format!("{value}\n")).collect::<String>();
    let values = sent.values();
    let [key, ttl, capability, client_id, timestamp, nonce] =
        [0, 1, 2, 3, 4, 5].map(|index| values[index].as_str());
    let right = text(&[key, ttl, capability, client_id, timestamp, nonce]);
    let cases = [
        ("field order", text(&[key, ttl, client_id, capability, timestamp, nonce])),
        ("ttl in seconds", text(&[key, "60", capability, client_id, timestamp, nonce])),
        ("ttl spelled otherwise", text(&[key, "060000", capability, client_id, timestamp, nonce])),
        ("capability with a space", text(&[key, ttl, r#"{"*": ["publish"]}"#, client_id, timestamp, nonce])),
        ("capability as an object", text(&[key, ttl, "[object Object]", client_id, timestamp, nonce])),
        ("without the empty lines", text(&[key, ttl, timestamp, nonce])),
        ("without the last newline", right.trim_end().to_owned()),
        ("carriage returns", right.replace('\n', "\r\n")),
        ("timestamp in seconds", text(&[key, ttl, capability, client_id, "1767225600", nonce])),
    ];
    for (name, text) in cases {
        let outcome = node.exchange("k1", &[], &sent.body(Some(&mac(b"s.e.c", &text)))).await;
        assert_eq!(kind(&outcome), "mac", "{name}");
        assert_eq!(outcome.unwrap_err().to_string(), "invalid token request mac");
    }
    let right = mac(b"s.e.c", &right);
    let others = [
        String::new(),
        right.trim_end_matches('=').to_owned(),
        right.to_lowercase(),
        mac(b"narrow-secret", &text(&[key, ttl, capability, client_id, timestamp, nonce])),
        mac(b"s.e.c.k1", &text(&[key, ttl, capability, client_id, timestamp, nonce])),
    ];
    for other in others {
        assert_eq!(kind(&node.exchange("k1", &[], &sent.body(Some(&other))).await), "mac", "{other}");
    }
    assert_eq!(kind(&node.exchange("k1", &[], &sent.body(Some(&right))).await), "token");
}

#[tokio::test]
async fn bodies_that_are_no_request_are_malformed() {
    let node = AuthFixture::new();
    let good = TestTokenRequest::new().signed();
    let cases = [
        String::new(),
        "{".into(),
        "null".into(),
        "[]".into(),
        "{}".into(),
        format!("{good}x"),
        good.replacen('{', r#"{"nonce":"0123456789abcdeg","#, 1),
        good.replace("\"keyName\":\"k1\"", "\"keyName\":1"),
        good.replace("\"keyName\":\"k1\",", ""),
        good.replace("\"keyName\":\"k1\"", "\"keyName\":\"narrow\""),
        good.replace("\"timestamp\"", "\"time\""),
        good.replace("\"nonce\"", "\"once\""),
        good.replace("\"mac\":\"", "\"mac\":null,\"x\":\""),
        format!("{}{}", "[".repeat(100), "]".repeat(100)),
    ];
    for body in cases {
        let outcome = node.exchange("k1", &[], &body).await;
        assert_eq!(kind(&outcome), "malformed", "{body}: {outcome:?}");
    }
    assert!(node.tokens.claimed.lock().is_empty());
}

#[tokio::test]
async fn a_nonce_is_used_once_and_only_by_what_becomes_a_token() {
    let node = AuthFixture::new();
    let beyond = TestTokenRequest::capability(r#"{"*":["presence"]}"#);
    let refused = node.signed(&beyond).await;
    assert_eq!(kind(&refused), "capability");
    assert!(refused.unwrap_err().to_string().contains("key k1"));
    assert_eq!(kind(&node.signed(&TestTokenRequest::at(NOW_MS)).await), "token", "the 403 left it unused");
    assert_eq!(kind(&node.signed(&TestTokenRequest::at(NOW_MS)).await), "nonce");
    assert_eq!(kind(&node.signed(&beyond).await), "capability", "what is asked goes before the nonce");
    assert_eq!(
        kind(&node.signed(&TestTokenRequest::at(NOW_MS + 1)).await),
        "token",
        "unique per key and timestamp"
    );
    assert_eq!(kind(&node.signed(&TestTokenRequest::of("narrow")).await), "token");
    node.tokens.down.store(true, Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&TestTokenRequest::nonce(20)).await), "unavailable");
}

#[tokio::test]
async fn repeats_of_a_request_ask_the_store_once() {
    let node = AuthFixture::new();
    let requests = || node.tokens.requests.load(Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&TestTokenRequest::new()).await), "token");
    for _ in 0..50 {
        assert_eq!(kind(&node.signed(&TestTokenRequest::new()).await), "nonce");
    }
    assert_eq!(requests(), 1);
    // The nonce was used at another node.
    let used = Nonce { key_name: "k1".into(), timestamp_ms: NOW_MS, nonce: "n".repeat(20).into() };
    node.tokens.claimed.lock().insert(used);
    for _ in 0..50 {
        assert_eq!(kind(&node.signed(&TestTokenRequest::nonce(20)).await), "nonce");
    }
    assert_eq!(requests(), 2);
    // The client may retry while the outcome is unknown.
    node.tokens.down.store(true, Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&TestTokenRequest::nonce(21)).await), "unavailable");
    node.tokens.down.store(false, Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&TestTokenRequest::nonce(21)).await), "token");
}

#[tokio::test]
async fn an_unsigned_request_needs_the_key_itself() {
    let (own, other) = (basic("s.e.c.k1"), basic("narrow-secret.narrow"));
    let token = format!("Bearer {}", sign("k1", &claims()));
    let (wrong, colon) = (basic("x.k1"), basic("k1:s.e.c"));
    let cases: [(&[&str], bool, &str); 12] = [
        (&[&own], false, "token"),
        (&[&own, &own], false, "token"),
        (&[], false, "mac"),
        (&[&other], false, "mac"),
        (&[&wrong], false, "mac"),
        (&[&colon], false, "mac"),
        (&[&token], false, "mac"),
        (&[&own, &token], false, "mac"),
        (&[&own], true, "token"),
        (&[&token], true, "token"),
        (&[&other], true, "mac"),
        (&["Digest x"], true, "mac"),
    ];
    for (headers, signed, expected) in cases {
        let sent = TestTokenRequest::new();
        let body = if signed { sent.signed() } else { sent.body(None) };
        let outcome = AuthFixture::new().exchange("k1", headers, &body).await;
        assert_eq!(kind(&outcome), expected, "{headers:?}, signed: {signed}");
    }
    let revoked = TestTokenRequest::of("gone").body(None);
    assert_eq!(
        kind(&AuthFixture::new().exchange("gone", &[&basic("gone-secret.gone")], &revoked).await),
        "mac"
    );
}

#[tokio::test]
async fn a_token_that_would_be_too_long_is_not_issued() {
    let node = AuthFixture::new();
    let patterns: Vec<String> = (0..600).map(|index| format!(r#""channel-{index}":["publish"]"#)).collect();
    let outcome = node.signed(&TestTokenRequest::capability(&format!("{{{}}}", patterns.join(",")))).await;
    assert_eq!(kind(&outcome), "malformed");
    assert!(node.tokens.claimed.lock().is_empty());
}

#[tokio::test]
async fn failures_are_limited_by_address_and_key() {
    let node = AuthFixture::new();
    let here = Some("192.0.2.1".parse().unwrap());
    let there = Some("192.0.2.2".parse().unwrap());
    let forged = TestTokenRequest::new().body(Some("forged"));
    for _ in 0..50 {
        assert_eq!(kind(&node.auth.exchange(here, "k1", &[], b"{").await), "malformed");
        assert_eq!(kind(&node.auth.exchange(here, "k1", &[], forged.as_bytes()).await), "mac");
    }
    for beyond in [b"{", forged.as_bytes()] {
        assert_eq!(kind(&node.auth.exchange(here, "k1", &[], beyond).await), "too many");
    }
    let others = [node.auth.exchange(here, "narrow", &[], b"{"), node.auth.exchange(there, "k1", &[], b"{")];
    for other in others {
        assert_eq!(kind(&other.await), "malformed", "another key, another address");
    }
    node.clock.pass_to(NOW_MS + 1000);
    assert_eq!(kind(&node.auth.exchange(here, "k1", &[], b"{").await), "malformed", "a second later");
}

#[tokio::test]
async fn a_good_request_passes_whatever_fails_beside_it() {
    let node = AuthFixture::new();
    let here = Some("192.0.2.1".parse().unwrap());
    let forged = TestTokenRequest::new().body(Some("forged"));
    let mut outcomes = Vec::new();
    for round in 0..100 {
        for _ in 0..3 {
            node.auth.exchange(here, "k1", &[], forged.as_bytes()).await.unwrap_err();
        }
        let good = TestTokenRequest { nonce: format!("a-nonce-of-round-{round}"), ..TestTokenRequest::new() }
            .signed();
        outcomes.push(kind(&node.auth.exchange(here, "k1", &[], good.as_bytes()).await));
    }
    assert_eq!(outcomes, ["token"; 100]);
    let again =
        TestTokenRequest { nonce: "a-nonce-of-round-0".to_owned(), ..TestTokenRequest::new() }.signed();
    let repeated = node.auth.exchange(here, "k1", &[], again.as_bytes()).await;
    assert_eq!(kind(&repeated), "too many", "what has failed is not told why");
}
