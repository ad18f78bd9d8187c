//! Writer of compact JSON objects, field by field.

use serde_json::value::RawValue;

use crate::json;

/// An object that is being written. Fields whose value is `None` are left out.
pub(crate) struct Object<'a> {
    out: &'a mut Vec<u8>,
    first: bool,
}

impl<'a> Object<'a> {
    pub(crate) fn begin(out: &'a mut Vec<u8>) -> Self {
        out.push(b'{');
        Self { out, first: true }
    }

    /// Writes the name, which must need no escapes, and gives the buffer for the value.
    pub(crate) fn field(&mut self, name: &str) -> &mut Vec<u8> {
        self.out.extend_from_slice(if std::mem::take(&mut self.first) { b"\"" } else { b",\"" });
        self.out.extend_from_slice(name.as_bytes());
        self.out.extend_from_slice(b"\":");
        self.out
    }

    pub(crate) fn text(&mut self, name: &str, value: &str) -> &mut Self {
        json::write_string(self.field(name), value);
        self
    }

    pub(crate) fn text_if(&mut self, name: &str, value: Option<&str>) -> &mut Self {
        if let Some(value) = value {
            self.text(name, value);
        }
        self
    }

    pub(crate) fn raw_if(&mut self, name: &str, value: Option<&RawValue>) -> &mut Self {
        if let Some(value) = value {
            self.field(name).extend_from_slice(value.get().as_bytes());
        }
        self
    }

    pub(crate) fn number(&mut self, name: &str, value: impl serde::Serialize) -> &mut Self {
        serde_json::to_writer(self.field(name), &value).expect("a vector takes every byte");
        self
    }

    pub(crate) fn number_if(&mut self, name: &str, value: Option<impl serde::Serialize>) -> &mut Self {
        if let Some(value) = value {
            self.number(name, value);
        }
        self
    }

    pub(crate) fn flag(&mut self, name: &str, value: bool) -> &mut Self {
        self.field(name).extend_from_slice(if value { b"true" } else { b"false" });
        self
    }

    pub(crate) fn texts<T: AsRef<str>>(&mut self, name: &str, values: &[T]) -> &mut Self {
        write_array(self.field(name), values, |out, value| json::write_string(out, value.as_ref()));
        self
    }

    pub(crate) fn end(&mut self) {
        self.out.push(b'}');
    }
}

pub(crate) fn write_array<T>(
    out: &mut Vec<u8>,
    items: impl IntoIterator<Item = T>,
    mut write: impl FnMut(&mut Vec<u8>, T),
) {
    out.push(b'[');
    for (index, item) in items.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write(out, item);
    }
    out.push(b']');
}
