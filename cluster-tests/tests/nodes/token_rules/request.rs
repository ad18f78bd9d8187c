//! Builder of TokenRequests, and their exchange.

use fanfare_client::sign::{self, TokenParams};
use fanfare_cluster_tests::{Node, Response, clock, forge, http};
use serde_json::{Value, json};

use super::{KEY, SECRET};

/// A TokenRequest as JSON, all seven fields, with its MAC; each field can be replaced before or after signing.
pub(crate) struct Request {
    pub(crate) key_name: &'static str,
    pub(crate) secret: &'static str,
    pub(crate) ttl: Value,
    pub(crate) capability: Value,
    pub(crate) client_id: Value,
    pub(crate) timestamp: Value,
    pub(crate) nonce: String,
}

impl Request {
    pub(crate) fn new() -> Self {
        Self {
            key_name: "k1",
            secret: SECRET,
            ttl: json!(60_000),
            capability: json!(r#"{"*":["subscribe"]}"#),
            client_id: json!("ann"),
            timestamp: json!(clock::now_ms()),
            nonce: nonce(),
        }
    }

    /// Gives the signed fields in their order.
    pub(crate) fn fields(&self) -> [String; 6] {
        let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), Into::into);
        let (ttl, capability) = (text(&self.ttl), text(&self.capability));
        [
            self.key_name.into(),
            ttl,
            capability,
            text(&self.client_id),
            text(&self.timestamp),
            self.nonce.clone(),
        ]
    }

    pub(crate) fn signed(&self) -> Value {
        self.signed_over(&self.fields().map(|field| format!("{field}\n")).concat())
    }

    pub(crate) fn signed_over(&self, text: &str) -> Value {
        json!({
            "keyName": self.key_name, "ttl": self.ttl, "capability": self.capability, "clientId": self.client_id,
            "timestamp": self.timestamp, "nonce": self.nonce, "mac": forge::token_request_mac(self.secret, text),
        })
    }
}

pub(crate) fn nonce() -> String {
    let request =
        sign::token_request(&KEY.parse().expect("a key"), TokenParams::default()).expect("a request");
    request.nonce
}

/// Posts a body to `requestToken`.
pub(crate) async fn exchange(
    node: &Node,
    key_name: &str,
    headers: &[(&str, &str)],
    body: impl Into<bytes::Bytes>,
) -> Response {
    http::request(node.addr(), "POST", &format!("/keys/{key_name}/requestToken"), headers, body).await
}
