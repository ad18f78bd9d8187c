use fanfare_proto::token::{TokenDetails, mac};

use super::*;

/// The fields as a client sends them, so that a test can spell them as no library would.
#[derive(Clone)]
struct Sent {
    key: &'static str,
    /// JSON texts.
    ttl: Option<String>,
    capability: Option<String>,
    client_id: Option<String>,
    timestamp: String,
    nonce: String,
}

impl Sent {
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

impl Fixture {
    async fn exchange(&self, key: &str, headers: &[&str], body: &str) -> Result<TokenDetails, ExchangeError> {
        let headers: Vec<&[u8]> = headers.iter().map(|value| value.as_bytes()).collect();
        self.auth.exchange(None, key, &headers, body.as_bytes()).await
    }

    async fn signed(&self, sent: &Sent) -> Result<TokenDetails, ExchangeError> {
        self.exchange(sent.key, &[], &sent.signed()).await
    }
}

/// What an answer is, without its text.
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
    let node = Fixture::new();
    let sent = Sent {
        client_id: Some("\"ada\"".into()),
        ..Sent::capability(r#"{"b":["publish"],"a*":["history"]}"#)
    };
    let details = node.signed(&Sent { ttl: Some("1".into()), ..sent }).await.unwrap();
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
        let node = Fixture::new();
        let text = |text: Option<&str>| text.map(str::to_owned);
        let sent =
            Sent { ttl, capability: text(capability), client_id: text(client_id), ..Sent::of("narrow") };
        let details = node.signed(&sent).await.unwrap();
        assert_eq!(details.capability, r#"{"chat:*":["publish","subscribe"]}"#, "narrowed to the key");
        assert_eq!((details.expires - details.issued, details.client_id), (3_600_000, None));
    }
}

#[tokio::test]
async fn well_signed_requests_are_held_to_the_rules() {
    let control = |sent: Sent| Sent { capability: Some(r#""{\"*\":\n[\"publish\"]}""#.into()), ..sent };
    let cases = [
        ("as it should be", Sent::new(), "token"),
        ("unknown key", Sent::of("nobody"), "mac"),
        ("revoked key", Sent::of("gone"), "mac"),
        ("ttl zero", Sent::ttl("0"), "malformed"),
        ("ttl of 48 hours", Sent::ttl("172800000"), "token"),
        ("ttl beyond 48 hours", Sent::ttl("172800001"), "malformed"),
        ("ttl with a fraction", Sent::ttl("60000.0"), "malformed"),
        ("ttl with an exponent", Sent::ttl("6e4"), "malformed"),
        ("ttl with a sign", Sent::ttl("-60000"), "malformed"),
        ("ttl as a string", Sent::ttl("\"60000\""), "malformed"),
        ("timestamp with a fraction", Sent { timestamp: format!("{NOW_MS}.0"), ..Sent::new() }, "malformed"),
        ("capability as an object", Sent { capability: Some(PUBLISH.into()), ..Sent::new() }, "mac"),
        ("capability null", Sent { capability: Some("null".into()), ..Sent::new() }, "mac"),
        (
            "capability as an object of an unknown key",
            Sent { capability: Some("{}".into()), ..Sent::of("nobody") },
            "mac",
        ),
        ("capability that is no map", Sent::capability("publish"), "malformed"),
        ("capability empty map", Sent::capability("{}"), "malformed"),
        ("capability unknown operation", Sent::capability(r#"{"*":["admin"]}"#), "malformed"),
        ("capability repeated key", Sent::capability(r#"{"a":["publish"],"a":["publish"]}"#), "malformed"),
        ("capability with a newline", control(Sent::new()), "malformed"),
        ("capability beyond the key", Sent::capability(r#"{"*":["presence"]}"#), "capability"),
        ("clientId with a newline", Sent::client_id("a\nb"), "malformed"),
        ("clientId wildcard", Sent::client_id("*"), "malformed"),
        ("clientId too long", Sent::client_id(&"a".repeat(257)), "malformed"),
        ("clientId null", Sent { client_id: Some("null".into()), ..Sent::new() }, "malformed"),
        ("nonce of 15", Sent::nonce(15), "malformed"),
        ("nonce of 16", Sent::nonce(16), "token"),
        ("nonce of 128", Sent::nonce(128), "token"),
        ("nonce of 129", Sent::nonce(129), "malformed"),
        ("two minutes ago", Sent::at(NOW_MS - 120_000), "token"),
        ("a millisecond more", Sent::at(NOW_MS - 120_001), "timestamp"),
        ("two minutes ahead", Sent::at(NOW_MS + 120_000), "token"),
        ("a millisecond further", Sent::at(NOW_MS + 120_001), "timestamp"),
        ("timestamp in seconds", Sent::at(NOW_S), "timestamp"),
        ("timestamp zero", Sent::at(0), "timestamp"),
        ("malformed before the key", Sent { ttl: Some("0".into()), ..Sent::of("nobody") }, "malformed"),
        ("the key before the timestamp", Sent { timestamp: "0".into(), ..Sent::of("gone") }, "mac"),
        (
            "the timestamp before the capability",
            Sent { timestamp: "0".into(), ..Sent::capability(r#"{"*":["presence"]}"#) },
            "timestamp",
        ),
    ];
    for (name, sent, expected) in cases {
        let outcome = Fixture::new().signed(&sent).await;
        assert_eq!(kind(&outcome), expected, "{name}: {outcome:?}");
    }
}

#[tokio::test]
async fn whatever_is_signed_otherwise_has_an_invalid_mac() {
    let node = Fixture::new();
    let sent = Sent { client_id: Some("\"ada\"".into()), ..Sent::capability(PUBLISH) };
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
    let node = Fixture::new();
    let good = Sent::new().signed();
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
    let node = Fixture::new();
    let beyond = Sent::capability(r#"{"*":["presence"]}"#);
    let refused = node.signed(&beyond).await;
    assert_eq!(kind(&refused), "capability");
    assert!(refused.unwrap_err().to_string().contains("key k1"));
    assert_eq!(kind(&node.signed(&Sent::at(NOW_MS)).await), "token", "the 403 left it unused");
    assert_eq!(kind(&node.signed(&Sent::at(NOW_MS)).await), "nonce");
    assert_eq!(kind(&node.signed(&beyond).await), "capability", "what is asked goes before the nonce");
    assert_eq!(kind(&node.signed(&Sent::at(NOW_MS + 1)).await), "token", "unique per key and timestamp");
    assert_eq!(kind(&node.signed(&Sent::of("narrow")).await), "token");
    node.tokens.down.store(true, Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&Sent::nonce(20)).await), "unavailable");
}

#[tokio::test]
async fn repeats_of_a_request_ask_the_store_once() {
    let node = Fixture::new();
    let asked = || node.tokens.asked.load(Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&Sent::new()).await), "token");
    for _ in 0..50 {
        assert_eq!(kind(&node.signed(&Sent::new()).await), "nonce");
    }
    assert_eq!(asked(), 1);
    // Its nonce was used at another node.
    let used = Nonce { key_name: "k1".into(), timestamp_ms: NOW_MS, nonce: "n".repeat(20).into() };
    node.tokens.claimed.lock().insert(used);
    for _ in 0..50 {
        assert_eq!(kind(&node.signed(&Sent::nonce(20)).await), "nonce");
    }
    assert_eq!(asked(), 2);
    // The client may try again while the outcome is not known.
    node.tokens.down.store(true, Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&Sent::nonce(21)).await), "unavailable");
    node.tokens.down.store(false, Ordering::Relaxed);
    assert_eq!(kind(&node.signed(&Sent::nonce(21)).await), "token");
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
        let sent = Sent::new();
        let body = if signed { sent.signed() } else { sent.body(None) };
        let outcome = Fixture::new().exchange("k1", headers, &body).await;
        assert_eq!(kind(&outcome), expected, "{headers:?}, signed: {signed}");
    }
    let revoked = Sent::of("gone").body(None);
    assert_eq!(kind(&Fixture::new().exchange("gone", &[&basic("gone-secret.gone")], &revoked).await), "mac");
}

#[tokio::test]
async fn a_token_that_would_be_too_long_is_not_issued() {
    let node = Fixture::new();
    let patterns: Vec<String> = (0..600).map(|index| format!(r#""channel-{index}":["publish"]"#)).collect();
    let outcome = node.signed(&Sent::capability(&format!("{{{}}}", patterns.join(",")))).await;
    assert_eq!(kind(&outcome), "malformed");
    assert!(node.tokens.claimed.lock().is_empty());
}

#[tokio::test]
async fn failures_are_limited_by_address_and_key() {
    let node = Fixture::new();
    let here = Some("192.0.2.1".parse().unwrap());
    let there = Some("192.0.2.2".parse().unwrap());
    let forged = Sent::new().body(Some("forged"));
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
    let node = Fixture::new();
    let here = Some("192.0.2.1".parse().unwrap());
    let forged = Sent::new().body(Some("forged"));
    let mut outcomes = Vec::new();
    for round in 0..100 {
        for _ in 0..3 {
            node.auth.exchange(here, "k1", &[], forged.as_bytes()).await.unwrap_err();
        }
        let good = Sent { nonce: format!("a-nonce-of-round-{round}"), ..Sent::new() }.signed();
        outcomes.push(kind(&node.auth.exchange(here, "k1", &[], good.as_bytes()).await));
    }
    assert_eq!(outcomes, ["token"; 100]);
    let again = Sent { nonce: "a-nonce-of-round-0".to_owned(), ..Sent::new() }.signed();
    let repeated = node.auth.exchange(here, "k1", &[], again.as_bytes()).await;
    assert_eq!(kind(&repeated), "too many", "what has failed is not told why");
}
