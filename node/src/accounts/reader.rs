//! Walks a TOML document and collects every mistake with its line, instead of stopping at the first.

use std::collections::HashSet;
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One thing wrong or odd in the directory file. It never holds a value of the file that could be a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// From 1.
    pub line: usize,
    /// As in `tenants[0].accounts[1].id`; empty for what belongs to no key.
    pub key: String,
    pub reason: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: ", self.line)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.reason)
    }
}

/// Why a directory file was not taken.
#[derive(Debug)]
pub enum DirectoryError {
    Unreadable { path: PathBuf, source: std::io::Error },
    Mistakes { path: PathBuf, mistakes: Vec<Mistake> },
}

impl fmt::Display for DirectoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreadable { path, .. } => write!(f, "cannot read the directory {}", path.display()),
            Self::Mistakes { path, mistakes } => {
                write!(f, "the directory {} cannot be used", path.display())?;
                mistakes.iter().try_for_each(|mistake| write!(f, "\n  {mistake}"))
            }
        }
    }
}

impl std::error::Error for DirectoryError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreadable { source, .. } => Some(source),
            Self::Mistakes { .. } => None,
        }
    }
}

/// Collects the mistakes of one text.
pub(super) struct Mistakes<'i> {
    text: &'i str,
    pub(super) list: Vec<Mistake>,
    /// Odd entries that the reader accepts all the same.
    pub(super) warnings: Vec<Mistake>,
}

impl<'i> Mistakes<'i> {
    pub(super) fn of(text: &'i str) -> Self {
        Self { text, list: Vec::new(), warnings: Vec::new() }
    }

    pub(super) fn add(&mut self, span: &Range<usize>, key: &str, reason: impl Into<String>) {
        self.list.push(self.at(span, key, reason.into()));
    }

    pub(super) fn warn(&mut self, span: &Range<usize>, key: &str, reason: impl Into<String>) {
        self.warnings.push(self.at(span, key, reason.into()));
    }

    fn at(&self, span: &Range<usize>, key: &str, reason: String) -> Mistake {
        let before = &self.text.as_bytes()[..span.start.min(self.text.len())];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        Mistake { line, key: key.to_owned(), reason }
    }
}

/// A value with its full key and place.
pub(super) struct Found<'t, 'i> {
    pub(super) value: &'t DeValue<'i>,
    pub(super) span: Range<usize>,
    pub(super) key: String,
}

impl<'t> Found<'t, '_> {
    pub(super) fn text(&self, mistakes: &mut Mistakes<'_>) -> Option<&'t str> {
        let text = self.value.as_str();
        if text.is_none() {
            mistakes.add(&self.span, &self.key, "must be a string");
        }
        text
    }

    /// The strings of a list; what is not a string is reported and left out.
    pub(super) fn texts(&self, mistakes: &mut Mistakes<'_>) -> Vec<&'t str> {
        let Some(list) = self.value.as_array() else {
            mistakes.add(&self.span, &self.key, "must be a list of strings");
            return Vec::new();
        };
        let mut texts = Vec::new();
        for (index, item) in list.iter().enumerate() {
            match item.get_ref().as_str() {
                Some(text) => texts.push(text),
                None => mistakes.add(&item.span(), &format!("{}[{index}]", self.key), "must be a string"),
            }
        }
        texts
    }
}

/// One table, which knows which of its keys were asked for.
pub(super) struct TableReader<'t, 'i> {
    table: &'t DeTable<'i>,
    pub(super) span: Range<usize>,
    path: String,
    known: HashSet<&'static str>,
}

impl<'t, 'i> TableReader<'t, 'i> {
    pub(super) fn root(table: &'t DeTable<'i>) -> Self {
        Self { table, span: 0..0, path: String::new(), known: HashSet::new() }
    }

    /// The full name of one of its keys.
    pub(super) fn key(&self, name: &str) -> String {
        if self.path.is_empty() { name.to_owned() } else { format!("{}.{name}", self.path) }
    }

    pub(super) fn get(&mut self, name: &'static str) -> Option<Found<'t, 'i>> {
        self.known.insert(name);
        self.peek(name)
    }

    /// The same without asking for it.
    pub(super) fn peek(&self, name: &str) -> Option<Found<'t, 'i>> {
        let value = self.table.get(name)?;
        Some(Found { value: value.get_ref(), span: value.span(), key: self.key(name) })
    }

    /// Also reports that it is absent.
    pub(super) fn required(
        &mut self,
        name: &'static str,
        mistakes: &mut Mistakes<'_>,
    ) -> Option<Found<'t, 'i>> {
        let found = self.get(name);
        if found.is_none() {
            mistakes.add(&self.span, &self.key(name), "is missing");
        }
        found
    }

    pub(super) fn integer(
        &mut self,
        name: &'static str,
        range: RangeInclusive<u64>,
        mistakes: &mut Mistakes<'_>,
    ) -> Option<u64> {
        let found = self.get(name)?;
        let parsed = found.value.as_integer().and_then(|i| u64::from_str_radix(i.as_str(), i.radix()).ok());
        let number = parsed.filter(|number| range.contains(number));
        if number.is_none() {
            let (low, high) = range.into_inner();
            mistakes.add(&found.span, &found.key, format!("must be an integer from {low} to {high}"));
        }
        number
    }

    pub(super) fn boolean(&mut self, name: &'static str, mistakes: &mut Mistakes<'_>) -> Option<bool> {
        let found = self.get(name)?;
        let flag = found.value.as_bool();
        if flag.is_none() {
            mistakes.add(&found.span, &found.key, "must be true or false");
        }
        flag
    }

    /// The tables of `[[name]]`; absent is none.
    pub(super) fn tables(
        &mut self,
        name: &'static str,
        mistakes: &mut Mistakes<'_>,
    ) -> Vec<TableReader<'t, 'i>> {
        let Some(found) = self.get(name) else { return Vec::new() };
        let Some(list) = found.value.as_array() else {
            mistakes.add(&found.span, &found.key, format!("must be tables, as in [[{name}]]"));
            return Vec::new();
        };
        let mut tables = Vec::new();
        for (index, item) in list.iter().enumerate() {
            let path = format!("{}[{index}]", found.key);
            match item.get_ref().as_table() {
                Some(table) => {
                    tables.push(TableReader { table, span: item.span(), path, known: HashSet::new() });
                }
                None => mistakes.add(&item.span(), &path, "must be a table"),
            }
        }
        tables
    }

    /// Reports every key that nobody asked for.
    pub(super) fn finish(self, mistakes: &mut Mistakes<'_>) {
        for (name, _) in self.rest() {
            mistakes.add(&name.span(), &self.key(name.get_ref()), "is not known here");
        }
    }

    /// What nobody asked for.
    pub(super) fn rest(
        &self,
    ) -> impl Iterator<Item = (&'t Spanned<std::borrow::Cow<'i, str>>, &'t Spanned<DeValue<'i>>)> {
        self.table.iter().filter(|(name, _)| !self.known.contains(name.get_ref().as_ref()))
    }
}
