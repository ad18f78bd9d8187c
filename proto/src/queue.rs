//! Bodies of `/api/queues`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::http::BodyError;
use crate::json;

/// A queue of an account.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Queue {
    /// A UUID.
    pub id: String,
    pub account_id: String,
    /// `[A-Za-z0-9._-]{1,128}`, unique within the account.
    pub name: String,
    /// Messages that the broker keeps; further ones push the oldest to the dead letters. None: no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_length: Option<u64>,
    /// False: nothing is fed to the queue.
    pub enabled: bool,
}

/// A rule that feeds a queue.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Rule {
    /// A UUID.
    pub id: String,
    pub account_id: String,
    pub queue_name: String,
    /// The channels, in the syntax of a capability's patterns.
    pub source_pattern: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub filter: Option<Filter>,
    pub enabled: bool,
}

/// The events of a rule's channels that it feeds; a field that is absent lets all pass.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// A pattern of a message's name, or of a presence event's action.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Vec<FilterSource>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FilterSource {
    Message,
    Presence,
}

/// The answer of `GET /api/queues`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueList {
    pub queues: Vec<Queue>,
}

/// The answer of `POST /api/queues`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedQueue {
    pub queue: Queue,
    /// Its name on the broker: `accountId:name`.
    pub physical: String,
}

/// The answer of `GET /api/queues/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct QueueState {
    pub queue: Queue,
    /// Messages that no consumer has been given yet.
    pub ready: u64,
    pub consumers: u64,
    /// Messages that consumers were given and have not confirmed, as of some seconds ago. None: the broker has not counted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unacknowledged: Option<u64>,
    /// Messages in the queue of its dead letters. None: the broker has not counted them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead_letters: Option<u64>,
}

/// The answer of `PATCH /api/queues/{id}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EditedQueue {
    pub queue: Queue,
}

/// The answer of `DELETE /api/queues/{id}`: the name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedQueue {
    pub deleted: String,
}

/// The answer of `GET /api/queues/{id}/rules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RuleList {
    pub rules: Vec<Rule>,
}

/// The answer of `POST /api/queues/{id}/rules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CreatedRule {
    pub rule: Rule,
}

/// The answer of `DELETE /api/queues/{id}/rules/{ruleId}`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeletedRule {
    /// Always true.
    pub ok: bool,
}

/// A change of a queue; an absent field stays as it is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueueEdit {
    /// `Some(None)` takes the bound away.
    pub max_length: Option<Option<u64>>,
    pub enabled: Option<bool>,
}

/// The body of `POST /api/queues`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueueRequest {
    pub name: String,
    pub edit: QueueEdit,
}

/// The body of `POST /api/queues/{id}/rules`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleRequest {
    pub source_pattern: String,
    pub filter: Option<Filter>,
}

impl QueueRequest {
    /// Names and sizes are not checked.
    pub fn parse(body: &[u8], nesting_max: usize) -> Result<Self, BodyError> {
        let mut fields = Fields::of(body, nesting_max)?;
        let name = fields.text("name")?.ok_or_else(|| malformed("name is missing"))?;
        let edit = fields.edit()?;
        fields.finish()?;
        Ok(Self { name, edit })
    }
}

impl QueueEdit {
    pub fn parse(body: &[u8], nesting_max: usize) -> Result<Self, BodyError> {
        let mut fields = Fields::of(body, nesting_max)?;
        let edit = fields.edit()?;
        fields.finish()?;
        Ok(edit)
    }
}

impl RuleRequest {
    /// Patterns are not checked.
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

/// The fields of an object that were not asked for yet.
struct Fields {
    map: Map<String, Value>,
    /// Before the name of a field in a sentence.
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

/// The greatest `maxLength`.
pub const MAX_LENGTH_MAX: u64 = 1_000_000_000;
/// Of an unknown field in a sentence.
const NAME_CHARACTERS: usize = 64;

fn malformed(text: impl Into<String>) -> BodyError {
    BodyError::Malformed(text.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NESTING: usize = 64;

    #[test]
    fn queue_request_tells_null_from_absent() {
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
