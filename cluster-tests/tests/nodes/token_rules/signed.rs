//! Service JWTs that were not issued by the node.

use fanfare_cluster_tests::forge::{self, Signature};
use fanfare_cluster_tests::{Node, Response, clock, http};
use serde_json::{Value, json};

use super::{EVERYTHING, KEY, SECRET, options};

/// Builder of a JWT, which is valid unless it is changed.
struct Jwt {
    header: Value,
    claims: Value,
    secret: &'static str,
    signature: Signature,
}

impl Jwt {
    fn new() -> Self {
        let now_s = clock::now_s();
        Self {
            header: json!({"alg": "HS256", "typ": "JWT", "kid": "k1"}),
            claims: json!({"iat": now_s, "exp": now_s + 600, "x-service-capability": EVERYTHING}),
            secret: SECRET,
            signature: Signature::Hs256,
        }
    }

    fn header(mut self, header: Value) -> Self {
        self.header = header;
        self
    }

    fn alg(self, alg: &str, signature: Signature) -> Self {
        Self { signature, ..self.header(json!({"alg": alg, "kid": "k1"})) }
    }

    fn kid(mut self, kid: Value) -> Self {
        self.header["kid"] = kid;
        self
    }

    fn secret(self, secret: &'static str) -> Self {
        Self { secret, ..self }
    }

    fn claim(mut self, name: &str, value: Value) -> Self {
        self.claims[name] = value;
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.claims.as_object_mut().expect("an object").remove(name);
        self
    }

    /// Sets issue and expiry, in seconds from now.
    fn times(self, iat: i64, exp: i64) -> Self {
        let now_s = i64::try_from(clock::now_s()).expect("this century");
        self.claim("iat", json!(now_s + iat)).claim("exp", json!(now_s + exp))
    }

    fn may(self, capability: Value) -> Self {
        self.claim("x-service-capability", capability)
    }

    fn client_id(self, client_id: Value) -> Self {
        self.claim("x-service-client-id", client_id)
    }

    fn narrow(self, capability: &str) -> Self {
        self.kid(json!("narrow")).secret("narrow").may(json!(capability))
    }

    /// Makes a token like those that the console signs for a person.
    fn console() -> Self {
        let claims = json!({"iss": "console", "sub": "u1", "email": "a@b.c", "session_id": "s"});
        Self { claims, ..Self::new().header(json!({"alg": "HS256"})) }.times(0, 600)
    }

    fn sign(&self) -> String {
        forge::jwt(&self.header, &self.claims, self.secret, self.signature)
    }
}

/// Row of the table: name, token, and whether the node accepts it.
type Case = (&'static str, String, bool);

fn signatures() -> Vec<Case> {
    let jwt = Jwt::new;
    let good = jwt().sign();
    let other = jwt().claim("more", json!(1)).sign();
    let parts: Vec<_> = good.split('.').collect();
    let exchanged = format!("{}.{}.{}", parts[0], other.split('.').nth(1).expect("three parts"), parts[2]);
    let console_by_key = Jwt { secret: SECRET, ..Jwt::console() }.sign();
    vec![
        ("a good one", good.clone(), true),
        ("without typ", jwt().header(json!({"alg": "HS256", "kid": "k1"})).sign(), true),
        ("alg none without a signature", jwt().alg("none", Signature::Empty).sign(), false),
        ("alg None", jwt().alg("None", Signature::Empty).sign(), false),
        ("alg none with a signature", jwt().alg("none", Signature::Hs256).sign(), false),
        ("HS256 without a signature", jwt().alg("HS256", Signature::Empty).sign(), false),
        ("HS384", jwt().alg("HS384", Signature::Hs384).sign(), false),
        ("HS512", jwt().alg("HS512", Signature::Hs512).sign(), false),
        ("HS256 signed as HS512", jwt().alg("HS256", Signature::Hs512).sign(), false),
        ("RS256 signed with the secret", jwt().alg("RS256", Signature::Hs256).sign(), false),
        ("another secret", jwt().secret("wrong").sign(), false),
        ("claims exchanged", exchanged, false),
        ("an unknown kid", jwt().kid(json!("nobody")).sign(), false),
        ("another key's kid", jwt().kid(json!("k2")).sign(), false),
        ("a kid that is a number", jwt().kid(json!(1)).sign(), false),
        ("no kid", jwt().header(json!({"alg": "HS256"})).sign(), false),
        ("a revoked key", jwt().kid(json!("gone")).secret("gone").sign(), false),
        ("a console token", Jwt::console().secret("console").sign(), false),
        ("a console token signed with a key", console_by_key, false),
        ("two parts", good.rsplit_once('.').expect("three parts").0.into(), false),
        ("four parts", format!("{good}.x"), false),
        ("over 8 KiB", jwt().claim("more", json!("x".repeat(9_000))).sign(), false),
        ("nonsense", "nonsense".into(), false),
        ("the key itself", KEY.into(), false),
    ]
}

fn times() -> Vec<Case> {
    let jwt = Jwt::new;
    let now_s = clock::now_s();
    let fraction = jwt().claim("iat", json!(now_s as f64 - 0.5)).claim("exp", json!(now_s as f64 + 600.5));
    let (now_ms, later_ms) = (json!(now_s * 1000), json!((now_s + 600) * 1000));
    vec![
        ("iat 110 s ahead", jwt().times(110, 600).sign(), true),
        ("iat 130 s ahead", jwt().times(130, 600).sign(), false),
        ("exactly 48 hours", jwt().times(0, 172_800).sign(), true),
        ("over 48 hours", jwt().times(0, 172_801).sign(), false),
        ("expired", jwt().times(-60, -1).sign(), false),
        ("expires now", jwt().times(-60, 0).sign(), false),
        ("exp not after iat", jwt().times(60, 60).sign(), false),
        ("no iat", jwt().without("iat").sign(), false),
        ("no exp", jwt().without("exp").sign(), false),
        ("exp in milliseconds", jwt().claim("exp", later_ms.clone()).sign(), false),
        ("both in milliseconds", jwt().claim("iat", now_ms).claim("exp", later_ms).sign(), false),
        ("iat as a string", jwt().claim("iat", json!(now_s.to_string())).sign(), false),
        ("exp as a string", jwt().claim("exp", json!((now_s + 600).to_string())).sign(), false),
        ("iat negative", jwt().claim("iat", json!(-1)).sign(), false),
        ("exp beyond every integer", jwt().claim("exp", json!(1e300)).sign(), false),
        ("iat and exp with a fraction", fraction.sign(), true),
        (
            "exp with a fraction in this second",
            jwt().times(-60, 0).claim("exp", json!(now_s as f64 + 0.9)).sign(),
            false,
        ),
        ("nbf in the past", jwt().claim("nbf", json!(now_s - 1)).sign(), true),
        ("nbf in the future", jwt().claim("nbf", json!(now_s + 500)).sign(), false),
        ("nbf as a string", jwt().claim("nbf", json!("0")).sign(), false),
    ]
}

fn nested(depth: usize) -> Value {
    (1..depth).fold(json!([]), |inner, _| json!([inner]))
}

fn contents() -> Vec<Case> {
    let jwt = Jwt::new;
    vec![
        ("with a clientId", jwt().client_id(json!("ann")).sign(), true),
        ("with an unknown claim", jwt().claim("more", json!(1)).sign(), true),
        ("for this service", jwt().claim("aud", json!("chat")).sign(), true),
        ("for this service and others", jwt().claim("aud", json!(["other", "chat"])).sign(), true),
        ("for another service", jwt().claim("aud", json!("other")).sign(), false),
        ("for no service", jwt().claim("aud", json!([])).sign(), false),
        ("a claim nested 62 deep", jwt().claim("more", nested(62)).sign(), true),
        ("a claim nested 64 deep", jwt().claim("more", nested(64)).sign(), false),
        ("no capability", jwt().without("x-service-capability").sign(), false),
        ("capability as an object", jwt().may(json!({"*": ["subscribe"]})).sign(), false),
        ("capability that is no JSON", jwt().may(json!("all")).sign(), false),
        ("an empty capability", jwt().may(json!("")).sign(), false),
        ("an empty map", jwt().may(json!("{}")).sign(), false),
        ("an empty pattern", jwt().may(json!(r#"{"":["subscribe"]}"#)).sign(), false),
        ("an unknown operation", jwt().may(json!(r#"{"*":["fly"]}"#)).sign(), false),
        ("no operations", jwt().may(json!(r#"{"*":[]}"#)).sign(), false),
        ("a pattern twice", jwt().may(json!(r#"{"a":["publish"],"a":["publish"]}"#)).sign(), false),
        ("within its key", jwt().narrow(r#"{"chat:a":["subscribe"]}"#).sign(), true),
        ("beyond its key", jwt().narrow(r#"{"*":["subscribe"]}"#).sign(), false),
        ("an operation beyond its key", jwt().narrow(r#"{"chat:a":["publish"]}"#).sign(), false),
        ("an empty clientId", jwt().client_id(json!("")).sign(), false),
        ("a clientId *", jwt().client_id(json!("*")).sign(), false),
        ("a newline in the clientId", jwt().client_id(json!("ann\n")).sign(), false),
        ("a long clientId", jwt().client_id(json!("c".repeat(257))).sign(), false),
        ("a clientId that is a number", jwt().client_id(json!(5)).sign(), false),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn externally_signed_tokens_are_judged_by_rule() {
    let node = Node::start(options().environment("FANFARE_AUDIENCE", "chat")).await;
    let mut refusal: Option<Response> = None;
    for (what, token, accepted) in [signatures(), times(), contents()].concat() {
        let headers = [("authorization", http::bearer(&token))];
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        let answer = http::request(node.addr(), "GET", "/time", &headers, "").await;
        assert_eq!(answer.status, if accepted { 200 } else { 401 }, "{what}: {:?}", answer.body);
        if accepted {
            continue;
        }
        assert_eq!(answer.json(), json!({"error": "unauthorized"}), "{what}");
        let first = refusal.get_or_insert(answer.clone());
        let names = |response: &Response| response.headers.keys().cloned().collect::<Vec<_>>();
        assert_eq!(
            (names(first), &first.body),
            (names(&answer), &answer.body),
            "{what}: every 401 is the same"
        );
    }
    for limit in ["nesting", "client_id_bytes"] {
        let hits = format!("fanfare_limit_hits_total{{limit=\"{limit}\"}}");
        assert_eq!(node.metric(&hits).await, 1.0, "{limit}");
    }
    node.assert_no_panic();
}
