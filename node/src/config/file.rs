//! The configuration file: TOML → settings with their lines.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::error::ConfigMistake;
use super::field::Form;
use super::nearest::nearest;
use super::settings::{Setting, settings};

/// The parser's message for a repeated key; the first occurrence counts.
const DUPLICATE: &str = "duplicate key";

/// A setting of the file, with its value in the form of a variable.
#[derive(Debug)]
pub(super) struct FileSetting {
    pub(super) setting: &'static Setting,
    pub(super) text: String,
    /// `fanfare.toml:7: limits.nesting`
    pub(super) location: String,
}

/// Parses the settings of the file, in order. `name` is the file's name in the mistakes.
pub(super) fn parse(name: &str, text: &str) -> Vec<Result<FileSetting, ConfigMistake>> {
    let (document, errors) = DeTable::parse_recoverable(text);
    let mut reader = ConfigFileReader { name, text, found: Vec::new() };
    let mut is_readable = true;
    for error in &errors {
        let span = error.span().unwrap_or_default();
        let line = reader.line(span.start);
        let location = if error.message() == DUPLICATE {
            format!("{name}:{line}: {}", &text[span])
        } else {
            is_readable = false;
            format!("{name}:{line}")
        };
        reader.mistake(location, error.message().to_owned());
    }
    // A line that could not be parsed says little about its keys.
    if is_readable {
        reader.table(None, document.get_ref());
    }
    reader.found
}

struct ConfigFileReader<'a> {
    name: &'a str,
    text: &'a str,
    found: Vec<Result<FileSetting, ConfigMistake>>,
}

impl ConfigFileReader<'_> {
    fn table(&mut self, table: Option<&'static str>, content: &DeTable<'_>) {
        let mut keys: Vec<_> = content.iter().collect();
        keys.sort_by_key(|(key, _)| key.span().start);
        for (key, value) in keys {
            self.key(table, key.get_ref(), key.span().start, value);
        }
    }

    fn key(&mut self, table: Option<&'static str>, key: &str, at: usize, value: &Spanned<DeValue<'_>>) {
        if let (None, "limits", DeValue::Table(limits)) = (table, key, value.get_ref()) {
            return self.table(Some("limits"), limits);
        }
        let known = || settings().filter(|s| s.table == table && s.in_file());
        let location = format!("{}:{}: {}", self.name, self.line(at), full_key(table, key));
        let Some(setting) = known().find(|s| s.name == key) else {
            let meant = nearest(key, known().map(|s| s.name));
            let hint = meant.map(|name| format!(", did you mean {}?", full_key(table, name)));
            return self.mistake(location, format!("is not known{}", hint.unwrap_or_default()));
        };
        if value.get_ref().as_array().is_some_and(|list| setting.form == Form::List && list.is_empty()) {
            return;
        }
        match text_of(setting.form, value.get_ref()) {
            Ok(text) => self.found.push(Ok(FileSetting { setting, text, location })),
            Err(problem) => self.mistake(location, problem),
        }
    }

    fn mistake(&mut self, location: String, problem: String) {
        self.found.push(Err(ConfigMistake { location, problem }));
    }

    fn line(&self, at: usize) -> usize {
        1 + self.text.as_bytes().iter().take(at).filter(|b| **b == b'\n').count()
    }
}

fn full_key(table: Option<&str>, key: &str) -> String {
    table.map_or_else(|| key.to_owned(), |table| format!("{table}.{key}"))
}

fn text_of(form: Form, value: &DeValue<'_>) -> Result<String, String> {
    match (form, value) {
        (Form::Text | Form::Number | Form::Fraction | Form::List, DeValue::String(text)) => {
            Ok(text.to_string())
        }
        (Form::List, DeValue::Array(parts)) => {
            let parts: Result<Vec<_>, _> =
                parts.iter().map(|part| text_of(Form::Text, part.get_ref())).collect();
            Ok(parts?.join(","))
        }
        (Form::Boolean, DeValue::Boolean(on)) => Ok(on.to_string()),
        (Form::Fraction, DeValue::Float(number)) => Ok(number.as_str().to_owned()),
        (Form::Number | Form::Fraction, DeValue::Integer(number)) => {
            i128::from_str_radix(number.as_str(), number.radix())
                .map(|number| number.to_string())
                .map_err(|_| "is too large".to_owned())
        }
        _ => {
            let expected = match form {
                Form::Text => "a string",
                Form::Boolean => "true or false",
                Form::Number => "a whole number",
                Form::Fraction => "a number",
                Form::List => "a list of strings",
            };
            Err(format!("expected {expected}, got {} {}", article(value.type_str()), value.type_str()))
        }
    }
}

fn article(noun: &str) -> &'static str {
    if noun.starts_with(['a', 'i']) { "an" } else { "a" }
}
