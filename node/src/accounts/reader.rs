//! Walks a TOML document and collects every mistake with its line, instead of stopping at the first.

use std::collections::HashSet;
use std::fmt;
use std::ops::{Range, RangeInclusive};
use std::path::PathBuf;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// One thing wrong or odd in the directory file. It never holds a value of the file that could be a secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectoryMistake {
    /// Line in the file, from 1.
    pub line: usize,
    /// Full key such as `tenants[0].accounts[1].id`; empty for mistakes of no key.
    pub key: String,
    pub reason: String,
}

impl fmt::Display for DirectoryMistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: ", self.line)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.reason)
    }
}

/// Reason for which a directory file was refused.
#[derive(Debug)]
pub enum DirectoryError {
    Unreadable { path: PathBuf, source: std::io::Error },
    Mistakes { path: PathBuf, mistakes: Vec<DirectoryMistake> },
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
pub(super) struct DirectoryMistakes<'i> {
    text: &'i str,
    pub(super) list: Vec<DirectoryMistake>,
    /// Odd entries that are accepted nevertheless.
    pub(super) warnings: Vec<DirectoryMistake>,
}

impl<'i> DirectoryMistakes<'i> {
    pub(super) fn of(text: &'i str) -> Self {
        Self { text, list: Vec::new(), warnings: Vec::new() }
    }

    pub(super) fn add(&mut self, span: &Range<usize>, key: &str, reason: impl Into<String>) {
        self.list.push(self.at(span, key, reason.into()));
    }

    pub(super) fn warn(&mut self, span: &Range<usize>, key: &str, reason: impl Into<String>) {
        self.warnings.push(self.at(span, key, reason.into()));
    }

    fn at(&self, span: &Range<usize>, key: &str, reason: String) -> DirectoryMistake {
        let before = &self.text.as_bytes()[..span.start.min(self.text.len())];
        let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
        DirectoryMistake { line, key: key.to_owned(), reason }
    }
}

/// A value with its full key and its place in the file.
pub(super) struct DirectoryValue<'t, 'i> {
    pub(super) value: &'t DeValue<'i>,
    pub(super) span: Range<usize>,
    pub(super) key: String,
}

impl<'t> DirectoryValue<'t, '_> {
    pub(super) fn text(&self, mistakes: &mut DirectoryMistakes<'_>) -> Option<&'t str> {
        let text = self.value.as_str();
        if text.is_none() {
            mistakes.add(&self.span, &self.key, "must be a string");
        }
        text
    }

    /// The strings of a list; other values are reported and left out.
    pub(super) fn texts(&self, mistakes: &mut DirectoryMistakes<'_>) -> Vec<&'t str> {
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

/// One table, with a record of the keys that were read.
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

    pub(super) fn get(&mut self, name: &'static str) -> Option<DirectoryValue<'t, 'i>> {
        self.known.insert(name);
        self.peek(name)
    }

    /// The value of a key, without marking the key as read.
    pub(super) fn peek(&self, name: &str) -> Option<DirectoryValue<'t, 'i>> {
        let value = self.table.get(name)?;
        Some(DirectoryValue { value: value.get_ref(), span: value.span(), key: self.key(name) })
    }

    /// The value of a key; reports its absence.
    pub(super) fn required(
        &mut self,
        name: &'static str,
        mistakes: &mut DirectoryMistakes<'_>,
    ) -> Option<DirectoryValue<'t, 'i>> {
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
        mistakes: &mut DirectoryMistakes<'_>,
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

    pub(super) fn boolean(
        &mut self,
        name: &'static str,
        mistakes: &mut DirectoryMistakes<'_>,
    ) -> Option<bool> {
        let found = self.get(name)?;
        let flag = found.value.as_bool();
        if flag.is_none() {
            mistakes.add(&found.span, &found.key, "must be true or false");
        }
        flag
    }

    /// The tables of `[[name]]`; empty if absent.
    pub(super) fn tables(
        &mut self,
        name: &'static str,
        mistakes: &mut DirectoryMistakes<'_>,
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

    /// Reports every key that was not read.
    pub(super) fn finish(self, mistakes: &mut DirectoryMistakes<'_>) {
        for (name, _) in self.rest() {
            mistakes.add(&name.span(), &self.key(name.get_ref()), "is not known here");
        }
    }

    /// The entries that were not read.
    pub(super) fn rest(
        &self,
    ) -> impl Iterator<Item = (&'t Spanned<std::borrow::Cow<'i, str>>, &'t Spanned<DeValue<'i>>)> {
        self.table.iter().filter(|(name, _)| !self.known.contains(name.get_ref().as_ref()))
    }
}
