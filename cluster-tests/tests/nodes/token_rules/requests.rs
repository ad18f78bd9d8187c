//! Valid and invalid TokenRequests.

use fanfare_cluster_tests::clock;
use serde_json::{Value, json};

use super::request::{Request, exchange, nonce};
use super::{MAC_ERROR, SECRET, node};

/// Row of the table: name, key in the path, body, status, and text of the error.
type Case = (&'static str, &'static str, Value, u16, &'static str);

fn signatures() -> Vec<Case> {
    let of = |key_name, secret| Request { key_name, secret, ..Request::new() }.signed();
    let changed_form = with("capability", json!(r#"{"*": ["subscribe"]}"#));
    vec![
        ("signed in another order", "k1", wrong_order(), 401, MAC_ERROR),
        ("no newline at the end", "k1", no_last_newline(), 401, MAC_ERROR),
        ("ttl signed in seconds", "k1", with("ttl", json!(60)), 401, MAC_ERROR),
        ("clientId changed", "k1", with("clientId", json!("bob")), 401, MAC_ERROR),
        ("capability changed in form only", "k1", changed_form, 401, MAC_ERROR),
        ("capability as an object", "k1", with("capability", json!({"*": ["subscribe"]})), 401, MAC_ERROR),
        ("another key's secret", "k1", of("k1", "narrow"), 401, MAC_ERROR),
        ("an unknown key", "nobody", of("nobody", SECRET), 401, MAC_ERROR),
        ("a revoked key", "gone", of("gone", "gone"), 401, MAC_ERROR),
        ("a mac that is no base64", "k1", with("mac", json!("!!!")), 401, MAC_ERROR),
        ("an empty mac", "k1", with("mac", json!("")), 401, MAC_ERROR),
        ("the path names another key", "k2", of("k1", SECRET), 400, ""),
        ("no keyName", "k1", without("keyName"), 400, ""),
        ("no mac and no key", "k1", without("mac"), 401, ""),
        ("not an object", "k1", json!([1]), 400, ""),
    ]
}

fn times() -> Vec<Case> {
    let now_ms = clock::now_ms();
    let at = |timestamp: u64| Request { timestamp: json!(timestamp), ..Request::new() }.signed();
    let lives = |ttl: Value| Request { ttl, ..Request::new() }.signed();
    vec![
        ("115 s old", "k1", at(now_ms - 115_000), 200, ""),
        ("121 s old", "k1", at(now_ms - 121_000), 401, ""),
        ("119 s ahead", "k1", at(now_ms + 119_000), 200, ""),
        ("130 s ahead", "k1", at(now_ms + 130_000), 401, ""),
        ("seconds as timestamp", "k1", at(now_ms / 1000), 401, ""),
        ("no timestamp", "k1", without("timestamp"), 400, ""),
        ("ttl 1", "k1", lives(json!(1)), 200, ""),
        ("ttl of 48 hours", "k1", lives(json!(172_800_000)), 200, ""),
        ("ttl over 48 hours", "k1", lives(json!(172_800_001)), 400, ""),
        ("ttl 0", "k1", lives(json!(0)), 400, ""),
        ("ttl negative", "k1", lives(json!(-1)), 400, ""),
        ("ttl with a point", "k1", lives(json!(60_000.5)), 400, ""),
        ("ttl as a string", "k1", lives(json!("60000")), 400, ""),
        ("ttl null", "k1", with("ttl", Value::Null), 400, ""),
    ]
}

fn contents() -> Vec<Case> {
    let with_capability =
        |capability: &str| Request { capability: json!(capability), ..Request::new() }.signed();
    let is = |client_id: Value| Request { client_id, ..Request::new() }.signed();
    let once = |nonce: String| Request { nonce, ..Request::new() }.signed();
    let narrow = |capability: &str| {
        Request { key_name: "narrow", secret: "narrow", capability: json!(capability), ..Request::new() }
            .signed()
    };
    vec![
        ("an empty capability", "k1", with_capability(""), 200, ""),
        ("an empty clientId", "k1", is(json!("")), 200, ""),
        ("a newline in the clientId", "k1", is(json!("ann\n1")), 400, ""),
        ("a clientId *", "k1", is(json!("*")), 400, ""),
        ("a clientId of 256", "k1", is(json!("c".repeat(256))), 200, ""),
        ("a clientId of 257", "k1", is(json!("c".repeat(257))), 400, ""),
        ("a clientId that is a number", "k1", is(json!(5)), 400, ""),
        ("a capability that is no JSON", "k1", with_capability("all"), 400, ""),
        ("an unknown operation", "k1", with_capability(r#"{"*":["subscribe","fly"]}"#), 400, ""),
        ("no operations", "k1", with_capability(r#"{"*":[]}"#), 400, ""),
        ("an empty map", "k1", with_capability("{}"), 400, ""),
        ("an empty pattern", "k1", with_capability(r#"{"":["subscribe"]}"#), 400, ""),
        ("a pattern twice", "k1", with_capability(r#"{"a":["subscribe"],"a":["publish"]}"#), 400, ""),
        ("an operation that is no list", "k1", with_capability(r#"{"*":"subscribe"}"#), 400, ""),
        ("no nonce", "k1", without("nonce"), 400, ""),
        ("a nonce of 15", "k1", once("n".repeat(15)), 400, ""),
        ("a nonce of 16", "k1", once("n".repeat(16)), 200, ""),
        ("a nonce of 128", "k1", once("n".repeat(128)), 200, ""),
        ("a nonce of 129", "k1", once("n".repeat(129)), 400, ""),
        ("a newline in the nonce", "k1", once(format!("\n{}", nonce())), 400, ""),
        ("beyond the key", "narrow", narrow(r#"{"*":["subscribe"]}"#), 403, "narrow"),
        ("an operation beyond the key", "narrow", narrow(r#"{"chat:a":["publish"]}"#), 403, "narrow"),
        ("within the key", "narrow", narrow(r#"{"chat:a*":["subscribe"]}"#), 200, ""),
        ("what the key has", "narrow", narrow(""), 200, ""),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn token_requests_are_judged_by_rule() {
    let node = node().await;
    for (what, key_name, body, status, error) in [signatures(), times(), contents()].concat() {
        let answer = exchange(&node, key_name, &[], body.to_string()).await;
        assert_eq!(answer.status, status, "{what}: {:?}", answer.body);
        match error {
            MAC_ERROR => assert_eq!(answer.json(), json!({"error": MAC_ERROR}), "{what}"),
            part => assert!(answer.error().contains(part), "{what}: {}", answer.error()),
        }
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"), "{what}");
    }
    let good = || Request::new().signed().to_string();
    for (what, body, status) in [
        ("an exponent", good().replace(":60000", ":6e4"), 400),
        ("a sign", good().replace(":60000", ":+60000"), 400),
        ("a field twice", good().replacen('{', r#"{"ttl":60000,"#, 1), 400),
        ("cut short", good().trim_end_matches('}').into(), 400),
        ("nothing", String::new(), 400),
        ("a body over 16 KiB", format!("{}{}", good(), " ".repeat(17 * 1024)), 413),
    ] {
        let answer = exchange(&node, "k1", &[], body).await;
        assert_eq!(answer.status, status, "{what}: {:?}", answer.body);
    }
    node.assert_no_panic();
}

/// Makes a valid request with one field changed after signing.
fn with(field: &str, value: Value) -> Value {
    let mut request = Request::new().signed();
    request[field] = value;
    request
}

fn without(field: &str) -> Value {
    let mut request = Request::new().signed();
    request.as_object_mut().expect("an object").remove(field);
    request
}

fn wrong_order() -> Value {
    let request = Request::new();
    let [key_name, ttl, capability, client_id, timestamp, nonce] = request.fields();
    let fields = [ttl, key_name, capability, client_id, timestamp, nonce];
    request.signed_over(&fields.map(|field| format!("{field}\n")).concat())
}

fn no_last_newline() -> Value {
    let request = Request::new();
    request.signed_over(&request.fields().join("\n"))
}
