//! MessagePack to JSON.

use rmp::Marker;

use super::Error;
use crate::json;

/// Converts one MessagePack value to compact JSON text of at most `json_bytes_max` bytes.
///
/// Memory grows with the bytes that are there, never with a length that they claim, and stays within a small
/// multiple of `bytes` and `json_bytes_max`.
///
/// # Errors
/// [`Error`] says what is wrong.
pub fn to_json(bytes: &[u8], nesting_max: usize, json_bytes_max: usize) -> Result<String, Error> {
    Reader {
        rest: bytes,
        out: Vec::new(),
        open: Vec::new(),
        nesting_max,
        json_bytes_max,
        unsupported_as_null: false,
    }
    .run()
}

/// Converts as [`to_json`] does, with `null` for values that JSON has not, so that the id of a refused
/// request can be read.
pub(crate) fn to_json_with_gaps(
    bytes: &[u8],
    nesting_max: usize,
    json_bytes_max: usize,
) -> Result<String, Error> {
    Reader {
        rest: bytes,
        out: Vec::new(),
        open: Vec::new(),
        nesting_max,
        json_bytes_max,
        unsupported_as_null: true,
    }
    .run()
}

struct OpenContainer {
    map: bool,
    /// Elements, or pairs of a map, still to come.
    left: u32,
    first: bool,
}

struct Reader<'a> {
    rest: &'a [u8],
    out: Vec<u8>,
    open: Vec<OpenContainer>,
    nesting_max: usize,
    json_bytes_max: usize,
    unsupported_as_null: bool,
}

impl<'a> Reader<'a> {
    fn run(mut self) -> Result<String, Error> {
        loop {
            self.value()?;
            let more = self.advance()?;
            if self.out.len() > self.json_bytes_max {
                return Err(Error::TooLarge { json_bytes_max: self.json_bytes_max });
            }
            if !more {
                break;
            }
        }
        if !self.rest.is_empty() {
            return Err(Error::Trailing);
        }
        Ok(String::from_utf8(self.out).expect("only UTF-8 is written"))
    }

    /// Closes the containers that are complete after a value, and writes the text before the next value.
    /// Gives `false` at the end.
    fn advance(&mut self) -> Result<bool, Error> {
        while let Some(open) = self.open.last_mut() {
            if open.left == 0 {
                self.out.push(if open.map { b'}' } else { b']' });
                self.open.pop();
                continue;
            }
            open.left -= 1;
            if !std::mem::take(&mut open.first) {
                self.out.push(b',');
            }
            if open.map {
                self.key()?;
                self.out.push(b':');
            }
            return Ok(true);
        }
        Ok(false)
    }

    fn key(&mut self) -> Result<(), Error> {
        let length = match self.marker()? {
            Marker::FixStr(length) => usize::from(length),
            Marker::Str8 => self.length(1)?,
            Marker::Str16 => self.length(2)?,
            Marker::Str32 => self.length(4)?,
            _ => return Err(Error::Malformed("a map key is not a string")),
        };
        self.string(length)
    }

    fn value(&mut self) -> Result<(), Error> {
        match self.marker()? {
            Marker::Null => self.out.extend_from_slice(b"null"),
            Marker::True => self.out.extend_from_slice(b"true"),
            Marker::False => self.out.extend_from_slice(b"false"),
            Marker::FixPos(value) => self.number(value),
            Marker::FixNeg(value) => self.number(value),
            Marker::U8 => self.take().map(|bytes| self.number(u8::from_be_bytes(bytes)))?,
            Marker::U16 => self.take().map(|bytes| self.number(u16::from_be_bytes(bytes)))?,
            Marker::U32 => self.take().map(|bytes| self.number(u32::from_be_bytes(bytes)))?,
            Marker::U64 => self.take().map(|bytes| self.number(u64::from_be_bytes(bytes)))?,
            Marker::I8 => self.take().map(|bytes| self.number(i8::from_be_bytes(bytes)))?,
            Marker::I16 => self.take().map(|bytes| self.number(i16::from_be_bytes(bytes)))?,
            Marker::I32 => self.take().map(|bytes| self.number(i32::from_be_bytes(bytes)))?,
            Marker::I64 => self.take().map(|bytes| self.number(i64::from_be_bytes(bytes)))?,
            Marker::F32 => self.take().map(f32::from_be_bytes).and_then(|value| self.float(value.into()))?,
            Marker::F64 => self.take().map(f64::from_be_bytes).and_then(|value| self.float(value))?,
            Marker::FixStr(length) => self.string(length.into())?,
            Marker::Str8 => self.length(1).and_then(|length| self.string(length))?,
            Marker::Str16 => self.length(2).and_then(|length| self.string(length))?,
            Marker::Str32 => self.length(4).and_then(|length| self.string(length))?,
            Marker::FixArray(count) => self.container(false, count.into())?,
            Marker::Array16 => self.length(2).and_then(|count| self.container(false, count))?,
            Marker::Array32 => self.length(4).and_then(|count| self.container(false, count))?,
            Marker::FixMap(count) => self.container(true, count.into())?,
            Marker::Map16 => self.length(2).and_then(|count| self.container(true, count))?,
            Marker::Map32 => self.length(4).and_then(|count| self.container(true, count))?,
            Marker::Reserved => return Err(Error::Malformed("a reserved byte")),
            other => self.binary(other)?,
        }
        Ok(())
    }

    fn binary(&mut self, marker: Marker) -> Result<(), Error> {
        let (what, length) = match marker {
            Marker::Bin8 => ("binary data", self.length(1)?),
            Marker::Bin16 => ("binary data", self.length(2)?),
            Marker::Bin32 => ("binary data", self.length(4)?),
            Marker::FixExt1 => ("an extension type", 2),
            Marker::FixExt2 => ("an extension type", 3),
            Marker::FixExt4 => ("an extension type", 5),
            Marker::FixExt8 => ("an extension type", 9),
            Marker::FixExt16 => ("an extension type", 17),
            Marker::Ext8 => ("an extension type", self.length(1)?.saturating_add(1)),
            Marker::Ext16 => ("an extension type", self.length(2)?.saturating_add(1)),
            _ => ("an extension type", self.length(4)?.saturating_add(1)),
        };
        self.bytes(length)?;
        self.unsupported(what)
    }

    fn unsupported(&mut self, what: &'static str) -> Result<(), Error> {
        if !self.unsupported_as_null {
            return Err(Error::Unsupported(what));
        }
        self.out.extend_from_slice(b"null");
        Ok(())
    }

    fn number(&mut self, value: impl serde::Serialize) {
        serde_json::to_writer(&mut self.out, &value).expect("a vector takes every byte");
    }

    fn float(&mut self, value: f64) -> Result<(), Error> {
        if !value.is_finite() {
            return self.unsupported("a number that is not finite");
        }
        self.number(value);
        Ok(())
    }

    fn string(&mut self, length: usize) -> Result<(), Error> {
        let text = std::str::from_utf8(self.bytes(length)?)
            .map_err(|_| Error::Malformed("a string is not UTF-8"))?;
        json::write_string(&mut self.out, text);
        Ok(())
    }

    fn container(&mut self, map: bool, count: usize) -> Result<(), Error> {
        if self.open.len() >= self.nesting_max {
            return Err(Error::Nesting { nesting_max: self.nesting_max });
        }
        self.out.push(if map { b'{' } else { b'[' });
        let left = u32::try_from(count).map_err(|_| Error::Truncated)?;
        self.open.push(OpenContainer { map, left, first: true });
        Ok(())
    }

    fn marker(&mut self) -> Result<Marker, Error> {
        self.take::<1>().map(|[byte]| Marker::from_u8(byte))
    }

    fn length(&mut self, width: usize) -> Result<usize, Error> {
        let bytes = self.bytes(width)?;
        Ok(bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)))
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (taken, rest) = self.rest.split_first_chunk().ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(*taken)
    }

    fn bytes(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(Error::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }
}
