//! `GET /api/{webhooks,amqp,lambda,sns}`: the account's integrations as the directory has them, without secrets.

use std::borrow::Cow;

use axum::response::Response;
use serde_json::{Map, Value, json};

use super::body;
use crate::accounts::{Integration, IntegrationKind};
use crate::auth::Principal;

const REDACTED: &str = "[redacted]";

/// Fields whose texts are shown, except for secret parts of addresses. Any other text counts as a secret, since the directory keeps
/// arbitrary fields.
const SHOWN: &[&str] = &[
    "arn",
    "endpoint",
    "exchange",
    "function",
    "function_arn",
    "function_name",
    "invocation_type",
    "method",
    "qualifier",
    "queue",
    "region",
    "role_arn",
    "role_session_name",
    "routing_key",
    "sts_endpoint",
    "topic",
    "topic_arn",
    "url",
    "vhost",
];

/// Table whose keys the receiver chooses, so that no text in it is known to be harmless.
const FREE_TABLE: &str = "headers";

/// Parts of a name under which a number may be a secret too.
const SECRET_PARTS: &[&str] = &["secret", "password", "token", "key", "credential", "auth", "pin"];

/// Lists the targets in the order of the file.
pub(super) fn targets(principal: &Principal, kind: IntegrationKind) -> Response {
    let of_kind = principal.account.integrations.iter().filter(|integration| integration.kind == kind);
    body::json(&json!({ "targets": of_kind.map(|integration| target(integration)).collect::<Vec<_>>() }))
}

fn target(integration: &Integration) -> Value {
    let Integration { messages, presence, occupancy, .. } = *integration;
    let events = [(messages, "message"), (presence, "presence"), (occupancy, "occupancy")];
    let events: Vec<_> =
        events.into_iter().filter_map(|(is_enabled, name)| is_enabled.then_some(name)).collect();
    let mut target = Map::new();
    target.insert("id".into(), json!(integration.id));
    target.insert("kind".into(), json!(integration.kind.as_str()));
    target.insert("channels".into(), json!(integration.channels));
    target.insert("events".into(), json!(events));
    for (name, value) in &integration.fields {
        target.insert(name.clone(), shown(name, value));
    }
    Value::Object(target)
}

fn shown(name: &str, value: &toml::Value) -> Value {
    match value {
        toml::Value::Table(fields) if name == FREE_TABLE => {
            fields.keys().map(|name| (name.clone(), json!(REDACTED))).collect()
        }
        toml::Value::Table(fields) => {
            fields.iter().map(|(name, value)| (name.clone(), shown(name, value))).collect()
        }
        toml::Value::Array(items) => items.iter().map(|item| shown(name, item)).collect(),
        toml::Value::String(text) if SHOWN.contains(&name) => json!(redacted_address(text)),
        toml::Value::Boolean(flag) => json!(flag),
        toml::Value::Integer(number) if is_harmless(name) => json!(number),
        toml::Value::Float(number) if is_harmless(name) => json!(number),
        _ => json!(REDACTED),
    }
}

fn is_harmless(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    !SECRET_PARTS.iter().any(|part| name.contains(part))
}

/// Hides the user, the query values and the fragment of an address. An address that cannot be parsed with certainty is hidden as a whole.
fn redacted_address(text: &str) -> Cow<'_, str> {
    if !text.contains(['@', '?', '#']) {
        return text.into();
    }
    redacted_parts(text).map_or(REDACTED.into(), Cow::Owned)
}

fn redacted_parts(text: &str) -> Option<String> {
    let (scheme, rest) = text.split_once("://")?;
    let (rest, fragment) = split_before(rest, '#');
    let (rest, query) = split_before(rest, '?');
    let (authority, path) = split_before(rest, '/');
    let host = match authority.rsplit_once('@') {
        Some((_, host)) => format!("{REDACTED}@{host}"),
        // A password with one of these characters looks like a port, a path or a query.
        None if authority.contains(':') && text.contains('@') => return None,
        None => authority.to_owned(),
    };
    if path.contains('@') && authority.contains('@') {
        return None;
    }
    let query = query.get(1..).map_or(String::new(), |query| format!("?{}", redacted_query(query)));
    let fragment = if fragment.is_empty() { String::new() } else { format!("#{REDACTED}") };
    Some(format!("{scheme}://{host}{path}{query}{fragment}"))
}

/// Splits the text before the mark. The second part begins with the mark, or is empty.
fn split_before(text: &str, mark: char) -> (&str, &str) {
    text.split_at(text.find(mark).unwrap_or(text.len()))
}

fn redacted_query(query: &str) -> String {
    let parameter = |parameter: &str| match parameter.split_once('=') {
        Some((name, _)) => format!("{name}={REDACTED}"),
        None => REDACTED.to_owned(),
    };
    query.split('&').map(parameter).collect::<Vec<_>>().join("&")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_secret_of_an_address_is_shown() {
        for (text, expected) in [
            ("https://example.com/hook", "https://example.com/hook"),
            ("https://example.com:8443/a:b", "https://example.com:8443/a:b"),
            ("https://example.com/@team/hook", "https://example.com/@team/hook"),
            ("amqp://user:hush@broker:5672/%2f", "amqp://[redacted]@broker:5672/%2f"),
            ("amqp://hush@broker", "amqp://[redacted]@broker"),
            ("amqp://user:hu@sh@broker/v", "amqp://[redacted]@broker/v"),
            ("https://e.com/h?a=hush&b=hush&hush", "https://e.com/h?a=[redacted]&b=[redacted]&[redacted]"),
            ("https://u:hush@e.com?a=hu@sh#hush", "https://[redacted]@e.com?a=[redacted]#[redacted]"),
            ("https://e.com/?a=b=hush", "https://e.com/?a=[redacted]"),
            ("amqp://user:hu/sh@broker", "[redacted]"),
            ("amqp://user:1/sh@broker:5672", "[redacted]"),
            ("amqp://user:hu?sh@broker", "[redacted]"),
            ("amqp://user:hu#sh@broker", "[redacted]"),
            ("amqp://us@er:hu/sh@broker", "[redacted]"),
            ("user:hush@broker", "[redacted]"),
            ("e.com?hush", "[redacted]"),
            ("arn:aws:sns:eu-west-1:1:orders", "arn:aws:sns:eu-west-1:1:orders"),
            ("", ""),
        ] {
            assert_eq!(redacted_address(text), expected, "{text}");
        }
    }

    #[test]
    fn a_field_is_a_secret_unless_it_is_known_not_to_be() {
        let fields: toml::Table = toml::from_str(
            r#"
            secret = "hush"
            future_field = "hush"
            access_key_id = "hush"
            pin = 1234
            api_key = [1, 2]
            url = ["https://u:hush@e.com/", "https://e.com/"]
            timeout_ms = 500
            ratio = 0.5
            verify = true
            since = 2026-01-01
            [headers]
            authorization = "hush"
            url = "https://e.com/hush"
            region = "hush"
            retries = 1234
            [more]
            url = "https://e.com/?a=hush"
            "#,
        )
        .expect("fields of TOML");
        let shown: Map<_, _> =
            fields.iter().map(|(name, value)| (name.clone(), shown(name, value))).collect();
        let expected = json!({
            "secret": REDACTED, "future_field": REDACTED, "access_key_id": REDACTED, "pin": REDACTED,
            "api_key": [REDACTED, REDACTED], "url": ["https://[redacted]@e.com/", "https://e.com/"],
            "timeout_ms": 500, "ratio": 0.5, "verify": true, "since": REDACTED,
            "headers": {"authorization": REDACTED, "url": REDACTED, "region": REDACTED, "retries": REDACTED},
            "more": {"url": "https://e.com/?a=[redacted]"},
        });
        assert_eq!(Value::Object(shown), expected);
    }
}
