//! Capabilities of credentials: patterns of channel names, each with operations.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, Visitor};

/// The closed set of operations. The order is the alphabetical one of the names, which the canonical text needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Operation {
    AmqpSubscribe,
    History,
    Presence,
    Publish,
    Subscribe,
}

impl Operation {
    pub const ALL: [Self; 5] =
        [Self::AmqpSubscribe, Self::History, Self::Presence, Self::Publish, Self::Subscribe];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::AmqpSubscribe => "amqp-subscribe",
            Self::History => "history",
            Self::Presence => "presence",
            Self::Publish => "publish",
            Self::Subscribe => "subscribe",
        }
    }

    fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|operation| operation.as_str() == name)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Reason for which a capability map was refused, as one sentence for its author.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CapabilityError(String);

impl fmt::Display for CapabilityError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for CapabilityError {}

/// Patterns with operations; never empty, and no pattern without an operation.
///
/// A pattern is a channel name; with `*` as its last character it matches every name with that prefix.
#[derive(Clone, PartialEq, Eq)]
pub struct Capability {
    /// Operations by pattern, in code point order, each pattern once.
    entries: Box<[(Box<str>, Operations)]>,
    /// Operations that the pattern `*` grants: the answer to most checks.
    all_channels: Operations,
}

impl Capability {
    /// Reads `{"pattern": ["operation", …], …}`.
    ///
    /// Refuses any other shape, an unknown operation, a repeated pattern, and an empty map, list or pattern.
    pub fn parse_json(text: &str) -> Result<Self, CapabilityError> {
        let Entries(entries) = serde_json::from_str(text).map_err(|error| {
            CapabilityError(match error.classify() {
                serde_json::error::Category::Data => explained(&error.to_string()),
                _ => "capability is not JSON".into(),
            })
        })?;
        Self::from_map(entries)
    }

    /// A capability from a parsed file; repeated patterns are merged, as they cannot be seen here any more.
    pub fn from_map(map: impl IntoIterator<Item = (String, Vec<String>)>) -> Result<Self, CapabilityError> {
        let mut entries = BTreeMap::<Box<str>, Operations>::new();
        for (pattern, names) in map {
            let operations = Operations::parse(&pattern, &names)?;
            entries.entry(pattern.into()).or_default().add(operations);
        }
        if entries.is_empty() {
            return Err(CapabilityError("capability grants nothing".into()));
        }
        Ok(Self::from_entries(entries))
    }

    /// Every operation on every channel.
    pub fn everything() -> Self {
        let mut all = Operations::default();
        Operation::ALL.into_iter().for_each(|operation| all.add(Operations::one(operation)));
        Self::from_entries(BTreeMap::from([("*".into(), all)]))
    }

    /// The default capability of a request that names none: `*`, narrowed to the key's own.
    pub fn all_channels_of(key: &Self) -> Self {
        key.clone()
    }

    fn from_entries(entries: BTreeMap<Box<str>, Operations>) -> Self {
        let all_channels = entries.get("*").copied().unwrap_or_default();
        Self { entries: entries.into_iter().collect(), all_channels }
    }

    pub fn allows(&self, channel: &str, operation: Operation) -> bool {
        self.all_channels.contains(operation)
            || self.entries.iter().any(|(pattern, operations)| {
                operations.contains(operation) && pattern_matches(pattern, channel)
            })
    }

    /// Whether the operation is allowed on every channel there can be, by `*` alone.
    pub fn grants_on_all_channels(&self, operation: Operation) -> bool {
        self.all_channels.contains(operation)
    }

    /// Whether some channel exists on which the operation is allowed.
    pub fn grants_anywhere(&self, operation: Operation) -> bool {
        self.entries.iter().any(|(_, operations)| operations.contains(operation))
    }

    /// Whether `other` allows whatever `self` allows, decided on patterns.
    pub fn is_subset_of(&self, other: &Self) -> bool {
        self.entries
            .iter()
            .all(|(pattern, operations)| operations.iter().all(|operation| other.covers(pattern, operation)))
    }

    /// Whether the operation is allowed on every channel that the pattern matches. A prefix is covered only by an equal or shorter prefix,
    /// since exact names never add up to one.
    pub fn covers(&self, pattern: &str, operation: Operation) -> bool {
        let Some(prefix) = pattern.strip_suffix('*') else {
            return self.allows(pattern, operation);
        };
        self.all_channels.contains(operation)
            || self.entries.iter().any(|(own, operations)| {
                let covered = own.strip_suffix('*').is_some_and(|own| prefix.starts_with(own));
                covered && operations.contains(operation)
            })
    }

    /// The one text of this capability: patterns and operations sorted, compact JSON, non-ASCII unescaped.
    pub fn canonical(&self) -> String {
        let mut out = String::from("{");
        for (index, (pattern, operations)) in self.entries.iter().enumerate() {
            if index > 0 {
                out.push(',');
            }
            out.push_str(&serde_json::Value::from(&**pattern).to_string());
            let names: Vec<String> = operations.iter().map(|operation| format!("\"{operation}\"")).collect();
            out.push_str(":[");
            out.push_str(&names.join(","));
            out.push(']');
        }
        out.push('}');
        out
    }
}

impl fmt::Debug for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.canonical())
    }
}

/// Whether a channel's decoded name equals the pattern, or begins with the pattern up to its last `*`.
pub(crate) fn pattern_matches(pattern: &str, channel: &str) -> bool {
    match pattern.strip_suffix('*') {
        Some(prefix) => channel.starts_with(prefix),
        None => pattern == channel,
    }
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Operations(u8);

impl Operations {
    fn parse(pattern: &str, names: &[String]) -> Result<Self, CapabilityError> {
        if pattern.is_empty() {
            return Err(CapabilityError("capability holds an empty pattern".into()));
        }
        if names.is_empty() {
            return Err(CapabilityError(format!("capability lists no operation for {pattern:?}")));
        }
        let mut operations = Self::default();
        for name in names {
            let operation = Operation::parse(name)
                .ok_or_else(|| CapabilityError(format!("capability names an unknown operation {name:?}")))?;
            operations.add(Self::one(operation));
        }
        Ok(operations)
    }

    fn one(operation: Operation) -> Self {
        Self(1 << operation as u8)
    }

    fn add(&mut self, other: Self) {
        self.0 |= other.0;
    }

    fn contains(self, operation: Operation) -> bool {
        self.0 & Self::one(operation).0 != 0
    }

    fn iter(self) -> impl Iterator<Item = Operation> {
        Operation::ALL.into_iter().filter(move |operation| self.contains(*operation))
    }
}

const FORM: &str = "an object of patterns with lists of operations";

/// The entries in the order of the text, where a repeated key can still be seen.
struct Entries(BTreeMap<String, Vec<String>>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MapVisitor;

        impl<'de> Visitor<'de> for MapVisitor {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(FORM)
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some((pattern, operations)) = map.next_entry::<String, Vec<String>>()? {
                    if entries.contains_key(&pattern) {
                        return Err(A::Error::custom(format_args!("capability repeats {pattern:?}")));
                    }
                    entries.insert(pattern, operations);
                }
                Ok(Entries(entries))
            }
        }

        deserializer.deserialize_map(MapVisitor)
    }
}

/// The parser's message without the position, which is useless for a string inside JSON, and without a value of the wrong type.
fn explained(message: &str) -> String {
    if message.starts_with("invalid type") {
        return format!("capability must be {FORM}");
    }
    message.rsplit_once(" at line ").map_or(message, |(text, _)| text).to_owned()
}
