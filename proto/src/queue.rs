//! Bodies of `/api/queues`, in the format of `docs/openapi.yaml`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::http::BodyError;
use crate::json;

/// A queue of an account on the broker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    /// UUID of the queue.
    pub id: String,
    /// Account of the queue.
    pub account_id: String,
    /// Name, unique within the account: 1 to 128 of `A-Z`, `a-z`, `0-9`, `.`, `_` and `-`.
    pub name: String,
    /// Number of messages that the broker keeps; further ones push the oldest to the dead letters. `None`: no
    /// limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u64>,
    /// False if the queue is paused: nothing is fed to it.
    pub enabled: bool,
}

/// A rule that chooses the events that feed a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rule {
    /// UUID of the rule.
    pub id: String,
    /// Account of the queue.
    pub account_id: String,
    /// Name of the queue.
    pub queue_name: String,
    /// Channels of the events, in the syntax of a capability's patterns.
    pub source_pattern: String,
    /// Further conditions; `None`: all events of the channels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<Filter>,
    /// Always `true`: the queue is paused instead.
    pub enabled: bool,
}

/// Conditions on the events of a rule's channels. A field that is absent lets all pass.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// Pattern for a message's name or a presence event's action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Kinds of events, at least one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Vec<FilterSource>>,
}

/// Kinds of events that a rule chooses from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilterSource {
    /// Messages.
    Message,
    /// Presence events.
    Presence,
}

/// The answer of `GET /api/queues`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueList {
    /// Queues in the order in which they were made.
    pub queues: Vec<Queue>,
}

/// The answer of `POST /api/queues`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedQueue {
    /// The new queue, or that of the name after the edit.
    pub queue: Queue,
    /// Name of the queue on the broker: `accountId:name`.
    pub physical: String,
}

/// The answer of `GET /api/queues/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueState {
    /// The queue.
    pub queue: Queue,
    /// Messages that no consumer has been given yet.
    pub ready: u64,
    /// Connected consumers.
    pub consumers: u64,
    /// Messages that consumers were given and have not confirmed, some seconds ago; `None` if the broker has
    /// not counted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unacknowledged: Option<u64>,
    /// Messages in the queue of the dead letters; `None` if the broker has not counted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead_letters: Option<u64>,
}

/// The answer of `PATCH /api/queues/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedQueue {
    /// The queue after the edit.
    pub queue: Queue,
}

/// The answer of `DELETE /api/queues/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedQueue {
    /// Name of the queue.
    pub deleted: String,
}

/// The answer of `GET /api/queues/{id}/rules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleList {
    /// Rules in the order in which they were made.
    pub rules: Vec<Rule>,
}

/// The answer of `POST /api/queues/{id}/rules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedRule {
    /// The new rule.
    pub rule: Rule,
}

/// The answer of `DELETE /api/queues/{id}/rules/{ruleId}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedRule {
    /// Always `true`.
    pub ok: bool,
}

/// The body of `PATCH /api/queues/{id}`. An absent field stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueEdit {
    /// New `maxLength`; `Some(None)` takes the limit away.
    pub max_length: Option<Option<u64>>,
    /// New `enabled`.
    pub enabled: Option<bool>,
}

/// The body of `POST /api/queues`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueRequest {
    /// Name of the queue, not checked.
    pub name: String,
    /// Settings that the queue gets.
    pub edit: QueueEdit,
}

/// The body of `POST /api/queues/{id}/rules`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleRequest {
    /// Channels of the events, a pattern that is not checked.
    pub source_pattern: String,
    /// Further conditions, with patterns that are not checked.
    pub filter: Option<Filter>,
}

impl QueueRequest {
    /// Reads the body. The characters of the name are not checked.
    ///
    /// # Errors
    /// [`BodyError`] names the field that is missing, wrong or unknown.
    pub fn parse(body: &[u8], nesting_max: usize) -> Result<Self, BodyError> {
        let mut fields = Fields::of(body, nesting_max)?;
        let name = fields.text("name")?.ok_or_else(|| malformed("name is missing"))?;
        let edit = fields.edit()?;
        fields.finish()?;
        Ok(Self { name, edit })
    }
}

impl QueueEdit {
    /// Reads the body.
    ///
    /// # Errors
    /// [`BodyError`] names the field that is missing, wrong or unknown.
    pub fn parse(body: &[u8], nesting_max: usize) -> Result<Self, BodyError> {
        let mut fields = Fields::of(body, nesting_max)?;
        let edit = fields.edit()?;
        fields.finish()?;
        Ok(edit)
    }
}

impl RuleRequest {
    /// Reads the body. A `filter` that is a text stands for its `name`. Patterns are not checked.
    ///
    /// # Errors
    /// [`BodyError`] names the field that is missing, wrong or unknown.
    pub fn parse(body: &[u8], nesting_max: usize) -> Result<Self, BodyError> {
        let mut fields = Fields::of(body, nesting_max)?;
        let pattern = fields.text("sourcePattern")?.ok_or_else(|| malformed("sourcePattern is missing"))?;
        let filter = match fields.take("filter") {
            None | Some(Value::Null) => None,
            Some(Value::String(name)) => Some(Filter { name: Some(name), source: None }),
            Some(Value::Object(map)) => Some(Filter::of(map)?),
            Some(_) => return Err(malformed("filter must be an object or a string")),
        };
        fields.finish()?;
        Ok(Self { source_pattern: pattern, filter })
    }
}

impl Filter {
    fn of(map: Map<String, Value>) -> Result<Self, BodyError> {
        let mut fields = Fields { map, prefix: "filter." };
        let name = fields.text("name")?;
        let source = match fields.take("source") {
            None | Some(Value::Null) => None,
            Some(list) => {
                let sources = serde_json::from_value::<Vec<FilterSource>>(list).ok();
                let listed = sources.filter(|sources| !sources.is_empty());
                let expected = || malformed("filter.source must list \"message\", \"presence\" or both");
                Some(listed.ok_or_else(expected)?)
            }
        };
        fields.finish()?;
        Ok(Self { name, source })
    }
}

/// The fields of an object that are yet to be read.
struct Fields {
    map: Map<String, Value>,
    /// Text before the name of a field in an error.
    prefix: &'static str,
}

impl Fields {
    fn of(body: &[u8], nesting_max: usize) -> Result<Self, BodyError> {
        let text = json::tidy(body, nesting_max)?;
        match serde_json::from_str(&text)? {
            Value::Object(map) => Ok(Self { map, prefix: "" }),
            _ => Err(malformed("body must be an object")),
        }
    }

    fn take(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name)
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, BodyError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(malformed(format!("{}{name} must be a string", self.prefix))),
        }
    }

    fn edit(&mut self) -> Result<QueueEdit, BodyError> {
        let max_length = match self.take("maxLength") {
            None => None,
            Some(Value::Null) => Some(None),
            Some(number) => {
                let number = number.as_u64().filter(|number| (1..=MAX_LENGTH_MAX).contains(number));
                let expected = format!("maxLength must be null or an integer from 1 to {MAX_LENGTH_MAX}");
                Some(Some(number.ok_or_else(|| malformed(expected))?))
            }
        };
        let enabled = match self.take("enabled") {
            None => None,
            Some(Value::Bool(enabled)) => Some(enabled),
            Some(_) => return Err(malformed("enabled must be true or false")),
        };
        Ok(QueueEdit { max_length, enabled })
    }

    fn finish(self) -> Result<(), BodyError> {
        match self.map.keys().next() {
            None => Ok(()),
            Some(name) => {
                let name: String = name.chars().filter(|c| !c.is_control()).take(NAME_CHARACTERS).collect();
                Err(malformed(format!("{}{name} is not known here", self.prefix)))
            }
        }
    }
}

/// Greatest value of `maxLength`.
pub const MAX_LENGTH_MAX: u64 = 1_000_000_000;
/// Characters that an error repeats of an unknown field's name.
const NAME_CHARACTERS: usize = 64;

fn malformed(text: impl Into<String>) -> BodyError {
    BodyError::Malformed(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NESTING: usize = 64;

    #[test]
    fn queue_request_distinguishes_null_from_absent() {
        let request = |body: &str| QueueRequest::parse(body.as_bytes(), NESTING).map(|request| request.edit);
        assert_eq!(request(r#"{"name":"q"}"#), Ok(QueueEdit::default()));
        let expected = QueueEdit { max_length: Some(None), enabled: Some(false) };
        assert_eq!(request(r#"{"name":"q","maxLength":null,"enabled":false}"#), Ok(expected));
        let expected = QueueEdit { max_length: Some(Some(5)), enabled: None };
        assert_eq!(request(r#"{"name":"q","maxLength":5}"#), Ok(expected));
    }

    #[test]
    fn malformed_body_is_refused_with_its_field() {
        for (body, expected) in [
            ("[]", "body must be an object"),
            ("{}", "name is missing"),
            (r#"{"name":1}"#, "name must be a string"),
            (r#"{"name":"q","maxLength":0}"#, "maxLength must be null or an integer from 1 to 1000000000"),
            (r#"{"name":"q","maxLength":"5"}"#, "maxLength must be null or an integer from 1 to 1000000000"),
            (r#"{"name":"q","enabled":1}"#, "enabled must be true or false"),
            (r#"{"name":"q","maxlength":1}"#, "maxlength is not known here"),
        ] {
            let refused = QueueRequest::parse(body.as_bytes(), NESTING).map_err(|error| error.to_string());
            assert_eq!(refused, Err(expected.to_owned()), "{body}");
        }
    }

    #[test]
    fn filter_is_an_object_or_a_name() {
        let rule = |filter: &str| {
            let body = format!(r#"{{"sourcePattern":"a*","filter":{filter}}}"#);
            RuleRequest::parse(body.as_bytes(), NESTING)
                .map(|rule| rule.filter)
                .map_err(|error| error.to_string())
        };
        let named = |name: &str| Filter { name: Some(name.to_owned()), source: None };
        assert_eq!(rule(r#""order*""#), Ok(Some(named("order*"))));
        assert_eq!(rule(r#"{"name":"order*"}"#), Ok(Some(named("order*"))));
        let presence = Filter { name: None, source: Some(vec![FilterSource::Presence]) };
        assert_eq!(rule(r#"{"source":["presence"]}"#), Ok(Some(presence)));
        assert_eq!(rule("null"), Ok(None));
        for (filter, expected) in [
            ("7", "filter must be an object or a string"),
            (r#"{"names":"a"}"#, "filter.names is not known here"),
            (r#"{"name":1}"#, "filter.name must be a string"),
            (r#"{"source":[]}"#, "filter.source must list \"message\", \"presence\" or both"),
            (r#"{"source":["audit"]}"#, "filter.source must list \"message\", \"presence\" or both"),
        ] {
            assert_eq!(rule(filter), Err(expected.to_owned()), "{filter}");
        }
    }
}
