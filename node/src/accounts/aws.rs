//! AWS Lambda and SNS: their settings, and how these are read.

mod names;
#[cfg(test)]
mod tests;

use std::fmt;
use std::time::Duration;

use url::Url;

use super::reader::{DirectoryMistakes, DirectoryValue, TableReader};
use super::secret::Secret;
use crate::model::bare_secret;
use names::{Arn, AwsService};

/// Field names of the secret's text, of its file and of its variable.
pub(super) const SECRET_KEY: [&str; 3] =
    ["secret_access_key", "secret_access_key_file", "secret_access_key_env"];
pub(super) const SESSION_TOKEN: [&str; 3] = ["session_token", "session_token_file", "session_token_env"];

/// Bound of an envelope's head, with the attributes of SNS, beside the records.
const HEAD_BYTES: usize = 8 * 1024;
const ENDPOINT_BYTES_MAX: usize = 2048;
const SESSION_NAME: &str = "fanfare";

/// A function that is invoked with each envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LambdaTarget {
    /// Name or complete ARN of the function, without a qualifier.
    pub function: Box<str>,
    /// Version or alias.
    pub qualifier: Option<Box<str>>,
    pub access: AwsAccess,
    pub batching: AwsBatching,
}

/// A topic to which each envelope is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnsTarget {
    pub topic_arn: Box<str>,
    pub access: AwsAccess,
    pub batching: AwsBatching,
}

/// Address and credentials of an AWS service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwsAccess {
    pub region: Box<str>,
    pub endpoint: AwsEndpoint,
    pub credentials: AwsCredentials,
}

/// An address without path, query and user.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AwsEndpoint {
    /// The address of AWS in the region.
    OfRegion(Url),
    /// An address from the directory, to which the guard of webhooks applies.
    Given(Url),
}

impl AwsEndpoint {
    pub fn url(&self) -> &Url {
        match self {
            Self::OfRegion(url) | Self::Given(url) => url,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwsCredentials {
    pub keys: AwsKeys,
    /// Role that is assumed with the keys.
    pub role: Option<AwsRole>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AwsKeys {
    pub id: Secret,
    pub secret: Secret,
    /// Session token of temporary credentials.
    pub session_token: Option<Secret>,
}

#[derive(Clone, PartialEq, Eq)]
pub struct AwsRole {
    pub arn: Box<str>,
    pub external_id: Option<Box<str>>,
    pub session_name: Box<str>,
    /// Address of STS.
    pub endpoint: AwsEndpoint,
}

/// Written by hand, so that no external id reaches a log.
impl fmt::Debug for AwsRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AwsRole").field("arn", &self.arn).finish_non_exhaustive()
    }
}

/// Batching, with the meaning of a webhook's fields of the same names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AwsBatching {
    pub events: usize,
    /// Bytes of the records.
    pub bytes: usize,
    pub linger: Duration,
    pub timeout: Duration,
    pub parallel: usize,
}

impl LambdaTarget {
    /// Size limit of AWS for an asynchronous invocation, since October 2025 and not yet in all regions.
    pub const ENVELOPE_BYTES_MAX: usize = 1024 * 1024;

    /// The region of the ARN; none if the function is given by name.
    pub(super) fn arn_region(&self) -> Option<&str> {
        Arn::of(&self.function, "lambda").map(|arn| arn.region)
    }
}

impl SnsTarget {
    /// Size limit of AWS for a message, including the names, types and values of its attributes.
    pub const MESSAGE_BYTES_MAX: usize = 256 * 1024;

    pub(super) fn arn_region(&self) -> Option<&str> {
        Arn::of(&self.topic_arn, "sns").map(|arn| arn.region)
    }

    /// Whether the topic keeps the order of the messages of a group.
    pub fn is_fifo(&self) -> bool {
        self.topic_arn.ends_with(".fifo")
    }
}

/// Both secrets of the table; the inner `None` is one that was reported.
pub(super) struct AwsSecrets {
    pub(super) key: Option<Option<Secret>>,
    pub(super) token: Option<Option<Secret>>,
}

/// Reads the rest of an integration's table and reports its mistakes.
pub(super) fn read_lambda(
    mut table: TableReader<'_, '_>,
    secrets: AwsSecrets,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<LambdaTarget> {
    let function = table.required("function", mistakes);
    let rule = "must be the name of a function, or its ARN without a version or alias";
    let function = function.and_then(|found| checked(&found, names::is_function, rule, mistakes));
    let rule = "must be a version or an alias: 1 to 128 of A-Z, a-z, 0-9, _, - and $";
    let qualifier = optional(&mut table, "qualifier", names::is_qualifier, rule, mistakes);
    let arn = function.and_then(|function| Arn::of(function, "lambda"));
    let from_arn = function.map(|_| arn.map(|arn| arn.region));
    let access = read_access(&mut table, AwsService::Lambda, from_arn, secrets, mistakes);
    let largest = LambdaTarget::ENVELOPE_BYTES_MAX - HEAD_BYTES;
    let batching = read_batching(&mut table, largest, mistakes);
    table.finish(mistakes);
    Some(LambdaTarget {
        function: function?.into(),
        qualifier: qualifier.map(Into::into),
        access: access?,
        batching: batching?,
    })
}

/// Reads the rest of an integration's table and reports its mistakes.
pub(super) fn read_sns(
    mut table: TableReader<'_, '_>,
    secrets: AwsSecrets,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<SnsTarget> {
    let topic = table.required("topic_arn", mistakes);
    let rule = "must be the ARN of a topic, such as arn:aws:sns:eu-west-1:123456789012:orders";
    let topic_arn = topic.and_then(|found| checked(&found, names::is_topic, rule, mistakes));
    let arn = topic_arn.and_then(|topic_arn| Arn::of(topic_arn, "sns"));
    let from_arn = arn.map(|arn| Some(arn.region));
    let access = read_access(&mut table, AwsService::Sns, from_arn, secrets, mistakes);
    let largest = SnsTarget::MESSAGE_BYTES_MAX - HEAD_BYTES;
    let batching = read_batching(&mut table, largest, mistakes);
    table.finish(mistakes);
    Some(SnsTarget { topic_arn: topic_arn?.into(), access: access?, batching: batching? })
}

/// Reads region, endpoint and credentials. `from_arn` is none if the name was reported, and contains none if the name
/// has no region.
fn read_access(
    table: &mut TableReader<'_, '_>,
    service: AwsService,
    from_arn: Option<Option<&str>>,
    secrets: AwsSecrets,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<AwsAccess> {
    let region = match table.get("region") {
        Some(found) => checked(&found, names::is_region, "must be a region, such as eu-west-1", mistakes),
        None => match from_arn {
            Some(None) => {
                mistakes.add(
                    &table.span,
                    &table.key("region"),
                    "is missing, and function is not an ARN with one",
                );
                None
            }
            from_arn => from_arn.flatten(),
        },
    };
    let endpoint = read_endpoint(table, "endpoint", service, region, mistakes);
    let credentials = read_credentials(table, region, secrets, mistakes);
    Some(AwsAccess { region: region?.into(), endpoint: endpoint?, credentials: credentials? })
}

fn read_endpoint(
    table: &mut TableReader<'_, '_>,
    name: &'static str,
    service: AwsService,
    region: Option<&str>,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<AwsEndpoint> {
    let Some(found) = table.get(name) else {
        return Url::parse(&service.endpoint(region?)).ok().map(AwsEndpoint::OfRegion);
    };
    let text = found.text(mistakes)?;
    let checked = match Url::parse(text) {
        _ if text.len() > ENDPOINT_BYTES_MAX => {
            Err(format!("must not be longer than {ENDPOINT_BYTES_MAX} bytes"))
        }
        Err(error) => Err(format!("must be a URL such as https://sns.eu-west-1.amazonaws.com: {error}")),
        Ok(url) if !matches!(url.scheme(), "http" | "https") => {
            Err("must begin with https:// or http://".to_owned())
        }
        Ok(url) if url.host_str().is_none_or(str::is_empty) => Err("must name a host".to_owned()),
        Ok(url) if url.port() == Some(0) => Err("must not have port 0".to_owned()),
        Ok(url) if !is_bare(&url) => Err("must have no user, path, query and fragment".to_owned()),
        Ok(url) => Ok(AwsEndpoint::Given(url)),
    };
    checked.map_err(|reason| mistakes.add(&found.span, &found.key, reason)).ok()
}

fn is_bare(url: &Url) -> bool {
    let has_user = !url.username().is_empty() || url.password().is_some();
    !has_user && url.path() == "/" && url.query().is_none() && url.fragment().is_none()
}

fn read_credentials(
    table: &mut TableReader<'_, '_>,
    region: Option<&str>,
    secrets: AwsSecrets,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<AwsCredentials> {
    let keys = read_keys(table, secrets, mistakes);
    let role = match table.get("role_arn") {
        Some(found) => Some(read_role(table, &found, region, mistakes)),
        None => {
            for name in ["external_id", "role_session_name", "sts_endpoint"] {
                if let Some(found) = table.get(name) {
                    mistakes.add(&found.span, &found.key, "is for an assumed role, and role_arn is missing");
                }
            }
            None
        }
    };
    // A role with a mistake must not lead to sending without the role.
    let role = match role {
        Some(role) => Some(role?),
        None => None,
    };
    Some(AwsCredentials { keys: keys?, role })
}

fn read_keys(
    table: &mut TableReader<'_, '_>,
    secrets: AwsSecrets,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<AwsKeys> {
    let id = table.get("access_key_id");
    let AwsSecrets { key, token } = secrets;
    if id.is_none() && key.is_none() && token.is_none() {
        return keys_of_environment(table, mistakes);
    }
    let Some(found) = id else {
        mistakes.add(&table.span, &table.key("access_key_id"), "is missing beside a secret or a token");
        return None;
    };
    let id = found.text(mistakes).and_then(|text| {
        Secret::new(text).map_err(|reason| mistakes.add(&found.span, &found.key, reason)).ok()
    });
    if key.is_none() {
        let [text, file, variable] = SECRET_KEY;
        let reason = format!("one of {text}, {file} and {variable} is needed beside access_key_id");
        mistakes.add(&table.span, &table.key(text), reason);
    }
    let session_token = match token {
        Some(token) => Some(token?),
        None => None,
    };
    Some(AwsKeys { id: id?, secret: key??, session_token })
}

/// The keys of the environment variables that all AWS tools read.
fn keys_of_environment(table: &TableReader<'_, '_>, mistakes: &mut DirectoryMistakes<'_>) -> Option<AwsKeys> {
    let mut variable = |name: &str| {
        let text = std::env::var(name).ok().filter(|text| !text.is_empty())?;
        let secret = bare_secret(&text).and_then(Secret::new);
        let reason = |reason| format!("the variable {name} {reason}");
        Some(
            secret
                .map_err(|error| mistakes.add(&table.span, &table.key("access_key_id"), reason(error)))
                .ok(),
        )
    };
    let [id, secret, token] =
        ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"].map(&mut variable);
    if id.is_none() || secret.is_none() {
        let reason = "is missing, and AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not both set";
        mistakes.add(&table.span, &table.key("access_key_id"), reason);
    }
    let session_token = match token {
        Some(token) => Some(token?),
        None => None,
    };
    Some(AwsKeys { id: id??, secret: secret??, session_token })
}

fn read_role(
    table: &mut TableReader<'_, '_>,
    arn: &DirectoryValue<'_, '_>,
    region: Option<&str>,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<AwsRole> {
    let rule = "must be the ARN of a role, such as arn:aws:iam::123456789012:role/events";
    let arn = checked(arn, names::is_role, rule, mistakes);
    let rule = "must be 2 to 1224 of A-Z, a-z, 0-9 and _+=,.@:/-";
    let external_id = optional(table, "external_id", names::is_external_id, rule, mistakes);
    let rule = "must be 2 to 64 of A-Z, a-z, 0-9 and _+=,.@-";
    let session_name = optional(table, "role_session_name", names::is_session_name, rule, mistakes);
    let endpoint = read_endpoint(table, "sts_endpoint", AwsService::Sts, region, mistakes);
    Some(AwsRole {
        arn: arn?.into(),
        external_id: external_id.map(Into::into),
        session_name: session_name.unwrap_or(SESSION_NAME).into(),
        endpoint: endpoint?,
    })
}

fn read_batching(
    table: &mut TableReader<'_, '_>,
    largest: usize,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<AwsBatching> {
    let mut number = |name, range, default: u64| table.integer(name, range, mistakes).unwrap_or(default);
    let events = number("batch_events", 1..=1000, 100);
    let bytes = number("batch_bytes", 1024..=largest as u64, 192 * 1024);
    let linger = Duration::from_millis(number("linger_ms", 0..=60_000, 0));
    let timeout = Duration::from_millis(number("timeout_ms", 100..=60_000, 10_000));
    let parallel = number("parallel", 1..=64, 8);
    let size = |number: u64| usize::try_from(number).ok();
    Some(AwsBatching {
        events: size(events)?,
        bytes: size(bytes)?,
        linger,
        timeout,
        parallel: size(parallel)?,
    })
}

/// The text of a field; none if it is absent or was reported.
fn optional<'t>(
    table: &mut TableReader<'t, '_>,
    name: &'static str,
    is_valid: fn(&str) -> bool,
    rule: &str,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<&'t str> {
    table.get(name).and_then(|found| checked(&found, is_valid, rule, mistakes))
}

fn checked<'t>(
    found: &DirectoryValue<'t, '_>,
    is_valid: fn(&str) -> bool,
    rule: &str,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<&'t str> {
    let text = found.text(mistakes)?;
    if is_valid(text) {
        return Some(text);
    }
    mistakes.add(&found.span, &found.key, rule);
    None
}
