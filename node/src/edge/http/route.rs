//! Routing of paths to resources. Works on the path as it was sent; only channel and key names are decoded.

use fanfare_proto::path::{self, ChannelRoute, PathError};

use crate::accounts::IntegrationKind;
use crate::edge::errors::HttpRefusal;

/// Route of a path, known or not: its name in metrics, its methods and its action.
#[derive(Debug)]
pub(super) struct Route {
    /// Path template for metrics and logs, without account, channel or key.
    pub(super) template: &'static str,
    /// Value of the `allow` header; empty: any method.
    pub(super) allow: &'static str,
    pub(super) action: RouteAction,
}

#[derive(Debug)]
pub(super) enum RouteAction {
    ExchangeToken {
        /// Key name, or the sentence that says why it is invalid; shown without a credential.
        key_name: Result<String, String>,
    },
    RevokeTokens {
        key_name: String,
    },
    /// Path of the socket, requested without an upgrade.
    UpgradeRequired,
    Time,
    EventStream,
    ConnectionCount,
    Channels,
    Channel {
        channel: String,
    },
    Connections,
    CloseClient {
        client_id: String,
    },
    Publish {
        channel: String,
    },
    PublishBatch,
    History {
        channel: String,
    },
    PresenceHistory {
        channel: String,
    },
    Presence {
        channel: String,
    },
    Integrations {
        kind: IntegrationKind,
    },
    Metrics,
    PresenceChannels,
    /// Checks the method itself, since a node without a broker answers every method alike.
    Queues(QueuePath),
    NotFound,
    /// Malformed escape, or a name that is not UTF-8.
    Malformed(String),
}

/// A path under `/api/queues`.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum QueuePath {
    All,
    One { id: String },
    Rules { id: String },
    Rule { id: String, rule_id: String },
    Unknown,
}

impl QueuePath {
    /// Parses a path under `/api/queues`; also returns its template for metrics. Ids are UUIDs, so a segment with escapes is no id.
    fn of(raw_path: &str) -> (&'static str, Self) {
        let rest = raw_path.strip_prefix("/api/queues").unwrap_or_default();
        let parts: Vec<&str> = rest.split('/').skip(1).collect();
        match parts[..] {
            [] => ("/api/queues", Self::All),
            [id] if !id.is_empty() => ("/api/queues/{id}", Self::One { id: id.to_owned() }),
            [id, "rules"] if !id.is_empty() => ("/api/queues/{id}/rules", Self::Rules { id: id.to_owned() }),
            [id, "rules", rule_id] if !id.is_empty() && !rule_id.is_empty() => {
                let path = Self::Rule { id: id.to_owned(), rule_id: rule_id.to_owned() };
                ("/api/queues/{id}/rules/{ruleId}", path)
            }
            _ => ("/api/queues", Self::Unknown),
        }
    }
}

const READ: &str = "GET, HEAD";
const WRITE: &str = "POST";
const ANY: &str = "";

impl Route {
    pub(super) fn of(raw_path: &str) -> Self {
        match path::route(raw_path) {
            Ok(Some(route)) => return Self::of_channel(route),
            Ok(None) => {}
            Err(error) => return Self::malformed(error.to_string()),
        }
        if let Some(route) = Self::of_key(raw_path).or_else(|| Self::of_client(raw_path)) {
            return route;
        }
        let (template, allow, action) = match raw_path {
            "/realtime" => ("/realtime", READ, RouteAction::UpgradeRequired),
            "/realtime/sse" => ("/realtime/sse", READ, RouteAction::EventStream),
            "/time" => ("/time", READ, RouteAction::Time),
            "/api/publish" => ("/api/publish", WRITE, RouteAction::PublishBatch),
            "/api/metrics/series" => ("/api/metrics/series", READ, RouteAction::Metrics),
            "/api/connections/count" => ("/api/connections/count", READ, RouteAction::ConnectionCount),
            "/api/channels" => ("/api/channels", READ, RouteAction::Channels),
            "/api/connections" => ("/api/connections", READ, RouteAction::Connections),
            "/api/presence" => ("/api/presence", READ, RouteAction::PresenceChannels),
            "/api/webhooks" => {
                ("/api/webhooks", READ, RouteAction::Integrations { kind: IntegrationKind::Webhook })
            }
            "/api/amqp" => ("/api/amqp", READ, RouteAction::Integrations { kind: IntegrationKind::Amqp }),
            "/api/lambda" => {
                ("/api/lambda", READ, RouteAction::Integrations { kind: IntegrationKind::Lambda })
            }
            "/api/sns" => ("/api/sns", READ, RouteAction::Integrations { kind: IntegrationKind::Sns }),
            other if other == "/api/queues" || other.starts_with("/api/queues/") => {
                let (template, path) = QueuePath::of(other);
                (template, ANY, RouteAction::Queues(path))
            }
            other => match path::decode(other) {
                Err(error @ PathError::Escape) => return Self::malformed(error.to_string()),
                Ok(_) | Err(PathError::Utf8) => ("unmatched", ANY, RouteAction::NotFound),
            },
        };
        Self { template, allow, action }
    }

    fn of_channel(route: ChannelRoute) -> Self {
        let ChannelRoute { channel, operation } = route;
        let (template, allow, action) = match operation {
            path::Operation::Channel => ("/api/channels/{channel}", READ, RouteAction::Channel { channel }),
            path::Operation::Publish => {
                ("/api/channels/{channel}/publish", WRITE, RouteAction::Publish { channel })
            }
            path::Operation::History => {
                ("/api/channels/{channel}/history", READ, RouteAction::History { channel })
            }
            path::Operation::Presence => {
                ("/api/channels/{channel}/presence", READ, RouteAction::Presence { channel })
            }
            path::Operation::PresenceHistory => {
                ("/api/channels/{channel}/presence/history", READ, RouteAction::PresenceHistory { channel })
            }
        };
        Self { template, allow, action }
    }

    fn of_key(raw_path: &str) -> Option<Self> {
        let (raw_name, operation) = raw_path.strip_prefix("/keys/")?.split_once('/')?;
        if raw_name.is_empty() {
            return None;
        }
        let key_name = decoded("keyName", raw_name);
        let (template, action) = match (operation, key_name) {
            ("requestToken", key_name) => {
                ("/keys/{keyName}/requestToken", RouteAction::ExchangeToken { key_name })
            }
            ("revokeTokens", Ok(key_name)) => {
                ("/keys/{keyName}/revokeTokens", RouteAction::RevokeTokens { key_name })
            }
            ("revokeTokens", Err(error)) => return Some(Self::malformed(error)),
            _ => return None,
        };
        Some(Self { template, allow: WRITE, action })
    }

    fn of_client(raw_path: &str) -> Option<Self> {
        let raw_id = raw_path.strip_prefix("/api/clients/")?.strip_suffix("/connections/close")?;
        if raw_id.is_empty() || raw_id.contains('/') {
            return None;
        }
        let client_id = match decoded("clientId", raw_id) {
            Ok(client_id) => client_id,
            Err(error) => return Some(Self::malformed(error)),
        };
        let template = "/api/clients/{clientId}/connections/close";
        Some(Self { template, allow: WRITE, action: RouteAction::CloseClient { client_id } })
    }

    fn malformed(error: String) -> Self {
        Self { template: "unmatched", allow: ANY, action: RouteAction::Malformed(error) }
    }

    pub(super) fn takes(&self, method: &str) -> Result<(), HttpRefusal> {
        if self.allow == ANY || self.allow.split(", ").any(|allowed| allowed == method) {
            return Ok(());
        }
        Err(HttpRefusal::method_not_allowed(self.allow))
    }
}

/// Decodes a name in a path; the error is the sentence that says what is wrong with it.
fn decoded(what: &str, raw: &str) -> Result<String, String> {
    path::decode(raw).map_err(|error| match error {
        PathError::Escape => error.to_string(),
        PathError::Utf8 => format!("{what} in the path is not valid UTF-8"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_hold_no_names() {
        for (path, template) in [
            ("/api/channels/a%3Ab/publish", "/api/channels/{channel}/publish"),
            ("/api/channels/a/b/history", "/api/channels/{channel}/history"),
            ("/api/channels/a/presence/history", "/api/channels/{channel}/presence/history"),
            ("/api/channels/a/presence", "/api/channels/{channel}/presence"),
            ("/api/channels/a", "/api/channels/{channel}"),
            ("/api/channels/a%2Fpublish", "/api/channels/{channel}"),
            ("/api/channels/a/unknown", "/api/channels/{channel}"),
            ("/api/channels/publish", "/api/channels/{channel}"),
            ("/api/channels", "/api/channels"),
            ("/api/channels/", "unmatched"),
            ("/api/queues", "/api/queues"),
            ("/api/queues/", "/api/queues"),
            ("/api/queues/abc", "/api/queues/{id}"),
            ("/api/queues/abc/rules", "/api/queues/{id}/rules"),
            ("/api/queues/abc/rules/def", "/api/queues/{id}/rules/{ruleId}"),
            ("/api/queues/abc/other", "/api/queues"),
            ("/api/queuesabc", "unmatched"),
            ("/keys/k1/requestToken", "/keys/{keyName}/requestToken"),
            ("/keys//requestToken", "unmatched"),
            ("/keys/k1/revokeTokens", "/keys/{keyName}/revokeTokens"),
            ("/keys/a/b/revokeTokens", "unmatched"),
            ("/keys/k1/other", "unmatched"),
            ("/keys/a/b/requestToken", "unmatched"),
            ("/api/clients/a%2Fb/connections/close", "/api/clients/{clientId}/connections/close"),
            ("/api/clients//connections/close", "unmatched"),
            ("/api/clients/a/b/connections/close", "unmatched"),
            ("/time", "/time"),
            ("/time/", "unmatched"),
            ("/api/status", "unmatched"),
        ] {
            assert_eq!(Route::of(path).template, template, "{path}");
        }
    }

    #[test]
    fn every_documented_path_is_routed_under_its_name() {
        let page = include_str!("../../../../docs/openapi.yaml");
        let documented = page.lines().filter_map(|line| line.strip_prefix("  /")?.strip_suffix(':'));
        let mut count = 0;
        for path in documented.filter(|path| *path != "health") {
            let template = format!("/{path}");
            let sent =
                template.replace("{channel}", "c").replace("{keyName}", "k").replace("{clientId}", "a");
            assert_eq!(Route::of(&sent).template, template);
            count += 1;
        }
        assert!(count > 10, "the page was read");
    }

    #[test]
    fn malformed_escapes_are_no_path_at_all() {
        for path in [
            "/api/channels/a%2/publish",
            "/api/channels/%FF/history",
            "/api/channels/a%2",
            "/api/channels/%FF",
            "/keys/%f/revokeTokens",
            "/keys/%FF/revokeTokens",
            "/api/clients/%zz/connections/close",
            "/api/clients/%FF/connections/close",
            "/x%zz",
        ] {
            assert!(matches!(Route::of(path).action, RouteAction::Malformed(_)), "{path}");
        }
    }
}
