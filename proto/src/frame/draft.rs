//! One message as its publisher gives it, in a frame and in an HTTP body alike.

use std::fmt;

use serde::Deserialize;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

/// A message as its publisher gives it. Lengths and characters of its texts are not checked.
#[derive(Debug, Clone, Default)]
pub struct Draft {
    /// Message id of the publisher's choice; `None`: the node makes one.
    pub id: Option<Box<str>>,
    /// Kind of event.
    pub name: Option<Box<str>>,
    /// JSON text, kept as it came but for insignificant white space. `null` is a value.
    pub data: Option<Box<RawValue>>,
    /// JSON object, kept in the same way.
    pub extras: Option<Box<RawValue>>,
}

/// Reads objects alone, with errors that name the field. A derived implementation would take an array, too.
impl<'de> Deserialize<'de> for Draft {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not `deserialize_map`, which would quote a string in its error.
        deserializer.deserialize_any(DraftVisitor)
    }
}

struct DraftVisitor;

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum Field {
    Id,
    Name,
    Data,
    Extras,
    #[serde(other)]
    Other,
}

impl<'de> Visitor<'de> for DraftVisitor {
    type Value = Draft;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object for a message")
    }

    /// Refuses a text without quoting it, as it may be a key or a token in the wrong place.
    fn visit_str<E: de::Error>(self, _: &str) -> Result<Draft, E> {
        Err(E::custom("a message must be an object"))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Draft, A::Error> {
        let mut draft = Draft::default();
        while let Some(field) = map.next_key()? {
            match field {
                Field::Id => once("id", &mut draft.id, map.next_value_seed(Text("id"))?)?,
                Field::Name => once("name", &mut draft.name, map.next_value_seed(Text("name"))?)?,
                Field::Data => once("data", &mut draft.data, map.next_value()?)?,
                Field::Extras => {
                    let extras: Box<RawValue> = map.next_value()?;
                    if !extras.get().starts_with('{') {
                        return Err(de::Error::custom("extras must be an object"));
                    }
                    once("extras", &mut draft.extras, extras)?;
                }
                Field::Other => drop(map.next_value::<IgnoredAny>()?),
            }
        }
        Ok(draft)
    }
}

fn once<T, E: de::Error>(field: &'static str, place: &mut Option<T>, value: T) -> Result<(), E> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(E::duplicate_field(field)),
    }
}

/// A string that belongs to the named field.
struct Text(&'static str);

impl<'de> DeserializeSeed<'de> for Text {
    type Value = Box<str>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Box<str>, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for Text {
    type Value = Box<str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to be a string", self.0)
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Box<str>, E> {
        Ok(text.into())
    }
}
