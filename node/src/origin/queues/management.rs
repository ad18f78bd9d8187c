//! RabbitMQ's management API: queues, policies, and the consumers of queues.

use std::time::Duration;

use fanfare_proto::path::encode_channel;
use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, Method, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use url::Url;

use super::BrokerError;

const ANSWER: Duration = Duration::from_secs(10);
/// Largest response: all consumers or users of one broker.
const ANSWER_BYTES_MAX: usize = 64 * 1024 * 1024;
const REASON_CHARACTERS: usize = 200;
/// Hint for an address at which another service answers, such as AMQP.
const EXPECTED: &str =
    "--amqp-management-url must name the management API, by default on port 15672, not the port of AMQP";
/// Priority of the policies. The broker ignores policies with a lower one for the same queues.
const PRIORITY: i64 = 10;

/// The management API of a broker, for one vhost.
pub(super) struct ManagementApi {
    client: Client,
    /// URL with user and password; its path ends in a slash.
    base: Url,
    vhost: String,
}

/// A consumer of a queue. The list leaves out a consumer whose connection the broker does not know yet.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Consumer {
    pub(super) queue: ConsumedQueue,
    pub(super) channel_details: ChannelDetails,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct ConsumedQueue {
    pub(super) name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct ChannelDetails {
    pub(super) connection_name: String,
    pub(super) user: String,
}

/// A connection to the broker.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct ConsumerConnection {
    pub(super) name: String,
    pub(super) user: String,
}

/// A policy of queues whose names match the pattern.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct QueuePolicy {
    #[serde(skip_serializing)]
    pub(super) name: String,
    pattern: String,
    definition: Value,
    #[serde(rename = "apply-to")]
    apply_to: String,
    priority: i64,
}

impl QueuePolicy {
    pub(super) fn new(name: String, pattern: String, definition: Value) -> Self {
        Self { name, pattern, definition, apply_to: "queues".to_owned(), priority: PRIORITY }
    }
}

#[derive(Deserialize)]
struct NamedItem {
    name: String,
}

impl ManagementApi {
    /// Creates the client; `base` is `http(s)://user:password@host:15672`.
    pub(super) fn new(client: Client, base: &Url, vhost: &str) -> Self {
        let mut base = base.clone();
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        Self { client, base, vhost: encode_channel(vhost) }
    }

    /// Creates the queue, unless it exists.
    pub(super) async fn put_queue(&self, name: &str, arguments: Value) -> Result<(), BrokerError> {
        let body = json!({ "durable": true, "auto_delete": false, "arguments": arguments });
        self.call(Method::PUT, &self.of_vhost("queues", name), Some(&body)).await.map(drop)
    }

    pub(super) async fn delete_queue(&self, name: &str) -> Result<(), BrokerError> {
        self.delete(&self.of_vhost("queues", name)).await
    }

    /// Reads from the broker's statistics how many messages consumers have received and not confirmed; `None` if the broker cannot be
    /// asked or has no statistics yet.
    pub(super) async fn unacknowledged(&self, queue: &str) -> Option<u64> {
        #[derive(Deserialize)]
        struct UnackedCount {
            messages_unacknowledged: Option<u64>,
        }
        let path = format!("{}?columns=messages_unacknowledged", self.of_vhost("queues", queue));
        let answer = self.call(Method::GET, &path, None::<&()>).await.ok()?;
        let counted: UnackedCount = serde_json::from_slice(&body(answer).await.ok()?).ok()?;
        counted.messages_unacknowledged
    }

    /// The names of all queues.
    pub(super) async fn queues(&self) -> Result<Vec<String>, BrokerError> {
        self.names(&format!("api/queues/{}?columns=name&disable_stats=true", self.vhost)).await
    }

    /// Sets the policy, and replaces an earlier one of its name.
    pub(super) async fn put_policy(&self, policy: &QueuePolicy) -> Result<(), BrokerError> {
        self.call(Method::PUT, &self.of_vhost("policies", &policy.name), Some(policy)).await.map(drop)
    }

    pub(super) async fn policies(&self) -> Result<Vec<QueuePolicy>, BrokerError> {
        self.list(&format!("api/policies/{}", self.vhost)).await
    }

    pub(super) async fn delete_policy(&self, name: &str) -> Result<(), BrokerError> {
        self.delete(&self.of_vhost("policies", name)).await
    }

    pub(super) async fn consumers(&self) -> Result<Vec<Consumer>, BrokerError> {
        self.list(&format!("api/consumers/{}", self.vhost)).await
    }

    pub(super) async fn connections(&self) -> Result<Vec<ConsumerConnection>, BrokerError> {
        self.list(&format!("api/vhosts/{}/connections?columns=name,user", self.vhost)).await
    }

    /// Returns the users that the broker itself has.
    pub(super) async fn users(&self) -> Result<Vec<String>, BrokerError> {
        self.names("api/users").await
    }

    pub(super) async fn close_connection(&self, name: &str) -> Result<(), BrokerError> {
        self.delete(&format!("api/connections/{}", encode_channel(name))).await
    }

    async fn names(&self, path: &str) -> Result<Vec<String>, BrokerError> {
        let rows: Vec<NamedItem> = self.list(path).await?;
        Ok(rows.into_iter().map(|row| row.name).collect())
    }

    fn of_vhost(&self, kind: &str, name: &str) -> String {
        format!("api/{kind}/{}/{}", self.vhost, encode_channel(name))
    }

    /// Deletes an object; a missing one counts as deleted.
    async fn delete(&self, path: &str) -> Result<(), BrokerError> {
        self.call(Method::DELETE, path, None::<&()>).await.map(drop)
    }

    /// Reads a list row by row, since the row of something that has just started may be incomplete.
    async fn list<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>, BrokerError> {
        let answer = self.call(Method::GET, path, None::<&()>).await?;
        let rows: Vec<Value> = serde_json::from_slice(&body(answer).await?)
            .map_err(|_| BrokerError(format!("its answer to {path} cannot be read: {EXPECTED}")))?;
        Ok(rows.into_iter().filter_map(|row| serde_json::from_value(row).ok()).collect())
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<Response, BrokerError> {
        let url = self.base.join(path).map_err(|error| BrokerError(error.to_string()))?;
        let deletes = method == Method::DELETE;
        let mut request = self.client.request(method, url).timeout(ANSWER);
        if let Some(body) = body {
            let text = serde_json::to_vec(body).map_err(|error| BrokerError(error.to_string()))?;
            request = request.header(CONTENT_TYPE, "application/json").body(text);
        }
        let answer = request.send().await.map_err(|error| failed(&error))?;
        let status = answer.status();
        if status.is_success() || (deletes && status.as_u16() == 404) {
            return Ok(answer);
        }
        let text = match status.as_u16() {
            401 => ": its user is unknown, has another password, or is no administrator".to_owned(),
            _ => reason(answer).await,
        };
        Err(BrokerError(format!("the management API answered {status} {text}").trim_end().to_owned()))
    }
}

async fn body(mut answer: Response) -> Result<Vec<u8>, BrokerError> {
    let mut body = Vec::new();
    while let Some(part) = answer.chunk().await.map_err(|error| failed(&error))? {
        if body.len() + part.len() > ANSWER_BYTES_MAX {
            return Err(BrokerError("its answer is too long".to_owned()));
        }
        body.extend_from_slice(&part);
    }
    Ok(body)
}

/// Reads RabbitMQ's reason, which holds no credential.
async fn reason(mut answer: Response) -> String {
    #[derive(Default, Deserialize)]
    struct ManagementRefusal {
        #[serde(default)]
        reason: Value,
    }
    let body = answer.chunk().await.ok().flatten().unwrap_or_default();
    let refusal: ManagementRefusal = serde_json::from_slice(&body).unwrap_or_default();
    let text = refusal.reason.as_str().unwrap_or_default().to_owned();
    text.chars().filter(|character| !character.is_control()).take(REASON_CHARACTERS).collect()
}

/// Describes the error without the URL, which holds the password.
fn failed(error: &reqwest::Error) -> BrokerError {
    let mut innermost: &dyn std::error::Error = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text =
        if std::ptr::addr_eq(innermost, error) { "no answer".to_owned() } else { innermost.to_string() };
    if error.is_connect() || error.is_timeout() {
        return BrokerError(format!("the management API (--amqp-management-url) cannot be reached: {text}"));
    }
    BrokerError(format!("the management API did not answer in HTTP ({text}): {EXPECTED}"))
}
