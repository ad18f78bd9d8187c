//! Refusals: the operator learns the reason, and the client does not.

use std::collections::BTreeMap;
use std::io;

use futures_util::FutureExt as _;
use metrics_exporter_prometheus::PrometheusBuilder;

use super::*;

/// Refusals of `run` by reason, and its log.
fn watched(run: impl FnOnce(&AuthFixture)) -> (BTreeMap<String, u64>, String) {
    let recorder = PrometheusBuilder::new().build_recorder();
    let log = RefusalTestLog::default();
    // A second dispatcher, so that a callsite first reached by another test asks both instead of caching that test's
    // answer.
    let _other = tracing::Dispatch::new(tracing::subscriber::NoSubscriber::default());
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(log.clone()).finish();
    tracing::subscriber::with_default(subscriber, || {
        metrics::with_local_recorder(&recorder, || run(&AuthFixture::new()));
    });
    let rendered = recorder.handle().render();
    let counts = rendered.lines().filter_map(|line| {
        let (reason, count) =
            line.strip_prefix("fanfare_auth_failures_total{reason=\"")?.split_once("\"} ")?;
        Some((reason.to_owned(), count.parse().unwrap()))
    });
    let counts = counts.filter(|(_, count)| *count > 0).collect();
    let log = String::from_utf8(log.0.lock().clone()).unwrap();
    (counts, log)
}

#[derive(Clone, Default)]
struct RefusalTestLog(Arc<Mutex<Vec<u8>>>);

impl io::Write for RefusalTestLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl tracing_subscriber::fmt::MakeWriter<'_> for RefusalTestLog {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}

fn token(change: impl FnOnce(&mut Value)) -> String {
    let mut claims = claims();
    change(&mut claims);
    format!("token={}", sign("k1", &claims))
}

fn set(name: &str, value: impl Into<Value>) -> String {
    token(|claims| claims[name] = value.into())
}

/// Queries, each with the reason of its refusal and the key that the log names.
fn queries() -> Vec<(String, Reason, Option<&'static str>)> {
    let with_header = |header: &Header| format!("token={}", sign_with(header, &claims(), secret_of("k1")));
    let hs384 = Header { alg: Algorithm::HS384, ..header("k1") };
    let times =
        |iat: u64, exp: u64| token(|claims| (claims["iat"], claims["exp"]) = (json!(iat), json!(exp)));
    let forced = token(|claims| claims["x-service-client-id"] = json!("ada"));
    let k1 = Some("k1");
    vec![
        (String::new(), Reason::Missing, None),
        ("key=s.e.c.k1&key=narrow-secret.narrow".into(), Reason::Conflicting, None),
        ("token=x".into(), Reason::Malformed, None),
        ("key=nodots".into(), Reason::Malformed, None),
        (format!("token={}", "x".repeat(8193)), Reason::TooLong, None),
        (with_header(&hs384), Reason::Unsupported, None),
        (with_header(&Header::new(Algorithm::HS256)), Reason::NoKid, None),
        (format!("token={}", sign("nobody", &claims())), Reason::UnknownKey, Some("nobody")),
        ("key=secret.nobody".into(), Reason::UnknownKey, None),
        (format!("token={}", sign("gone", &claims())), Reason::RevokedKey, Some("gone")),
        ("key=gone-secret.gone".into(), Reason::RevokedKey, Some("gone")),
        ("key=x.k1".into(), Reason::BadSecret, k1),
        (format!("token={}", sign_with(&header("k1"), &claims(), "x")), Reason::BadSignature, k1),
        (set("x-service-capability", "{}"), Reason::BadClaims, k1),
        (set("exp", NOW_MS), Reason::Lifetime, k1),
        (times(NOW_S, NOW_S), Reason::Lifetime, k1),
        (times(NOW_S - 9, NOW_S - 1), Reason::Expired, k1),
        (times(NOW_S + 121, NOW_S + 300), Reason::IssuedInFuture, k1),
        (set("nbf", NOW_S + 1), Reason::NotYetValid, k1),
        (set("aud", "x"), Reason::WrongAudience, k1),
        (set("x-service-capability", r#"{"*":["presence"]}"#), Reason::CapabilityExceedsKey, k1),
        (format!("{forced}&clientId=bob"), Reason::OtherClientId, k1),
    ]
}

#[test]
fn each_refusal_is_counted_and_logged_by_its_reason() {
    for (query, reason, kid) in queries() {
        let address = Some("192.0.2.7".parse().unwrap());
        let (counts, log) = watched(|node| {
            let credentials = Credentials { authorization: Vec::new(), query: &query, socket: true, address };
            assert_eq!(node.auth.authenticate(&credentials).err(), Some(Unauthorized), "{query}");
        });
        assert_eq!(counts, BTreeMap::from([(reason.name().to_owned(), 1)]), "{query}");
        let named = kid.map_or(String::new(), |kid| format!(" kid=\"{kid}\""));
        let detail = match reason {
            Reason::BadClaims => " detail=\"x-service-capability: capability grants nothing\"",
            _ => "",
        };
        let reason = reason.name();
        let line =
            format!("credential refused reason=\"{reason}\"{detail}{named} address=192.0.2.7 held_back=0\n");
        assert!(log.contains(" INFO ") && log.ends_with(&line), "{line}{log}");
    }
}

#[test]
fn revoked_token_is_counted_as_revoked() {
    let (counts, _) = watched(|node| {
        node.auth.restore_revocations(&[Revocation {
            key_name: "k1".into(),
            client_id: None,
            issued_before_ms: NOW_MS,
        }]);
        node.socket(&[], &token(|_| ())).unwrap_err();
    });
    assert_eq!(counts, BTreeMap::from([("revoked".to_owned(), 1)]));
}

#[test]
fn each_refused_token_request_is_counted() {
    let body = |fields: &str| format!(r#"{{"nonce":"0123456789abcdef","timestamp":{NOW_MS}{fields}}}"#);
    let key = basic("narrow-secret.narrow");
    let cases = [
        ("k1", body(""), None, "malformed"),
        ("nobody", body(r#","keyName":"nobody","mac":"x""#), None, "unknown_key"),
        ("k1", body(r#","keyName":"k1","mac":"x""#), None, "bad_mac"),
        ("k1", body(r#","keyName":"k1""#), None, "bad_mac"),
        ("k1", body(r#","keyName":"k1""#), Some(&key), "other_key"),
    ];
    for (name, body, header, reason) in cases {
        let (counts, log) = watched(|node| {
            let headers: Vec<&[u8]> = header.iter().map(|value| value.as_bytes()).collect();
            let exchange = node.auth.exchange(None, name, &headers, body.as_bytes());
            exchange.now_or_never().expect("the store answers at once").unwrap_err();
        });
        assert_eq!(counts, BTreeMap::from([(reason.to_owned(), 1)]), "{body}");
        assert!(log.contains(&format!("reason=\"{reason}\" kid=\"{name}\"")), "{log}");
    }
}

#[test]
fn the_log_of_refusals_is_bounded_and_holds_no_credential() {
    let (counts, log) = watched(|node| {
        for (query, ..) in queries() {
            node.socket(&[], &query).unwrap_err();
        }
        for round in 0..10_000 {
            node.socket(&[], &format!("token={}", sign(&format!("invented-{round}"), &claims())))
                .unwrap_err();
            node.socket(&[], &format!("key=x{round}.k1")).unwrap_err();
        }
        // The parts of a key in the wrong order.
        node.socket(&[], "key=k1.narrow-secret").unwrap_err();
    });
    assert_eq!((counts["unknown_key"], counts["bad_secret"]), (10_003, 10_001));
    assert!(log.lines().count() <= Reason::ALL.len() + 4, "{log}");
    for secret in ["s.e.c", "narrow-secret", "gone-secret", "eyJ"] {
        assert!(!log.contains(secret), "{secret} in {log}");
    }
}

#[test]
fn a_secret_in_place_of_a_key_name_is_not_logged() {
    for kid in ["narrow-secret", "gone-secret", "s.e.c.k1", "k1\nforged line", "k1 reason=\"x\""] {
        let (counts, log) = watched(|node| {
            node.socket(&[], &format!("token={}", sign(kid, &claims()))).unwrap_err();
        });
        assert_eq!(counts, BTreeMap::from([("unknown_key".to_owned(), 1)]), "{kid:?}");
        assert!(log.ends_with("credential refused reason=\"unknown_key\" held_back=0\n"), "{kid:?}: {log}");
        assert_eq!(log.lines().count(), 1, "{kid:?}");
    }
}
