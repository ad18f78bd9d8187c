//! Query strings: `application/x-www-form-urlencoded`. Of repeated parameters the first counts.

use std::borrow::Cow;

use crate::model::Limits;

#[derive(Debug, Clone, Copy)]
pub(super) struct QueryString<'a>(&'a str);

impl<'a> QueryString<'a> {
    /// Parses a query; `None` is a request without one.
    pub(super) fn new(raw: Option<&'a str>) -> Self {
        Self(raw.unwrap_or_default())
    }

    pub(super) fn first(&self, name: &str) -> Option<Cow<'a, str>> {
        form_urlencoded::parse(self.0.as_bytes()).find(|(key, _)| key == name).map(|(_, value)| value)
    }

    /// Number of entries of a page; clamped, and never an error.
    pub(super) fn limit(&self, limits: &Limits) -> usize {
        let most = limits.page_limit_max;
        let requested = self.integer("limit", 1, most as u64);
        requested.map_or(limits.page_limit, |limit| usize::try_from(limit).unwrap_or(most))
    }

    /// Parses a decimal integer of any size, with or without a sign, and clamps it to `least..=most`; `None` for anything else.
    pub(super) fn integer(&self, name: &str, least: u64, most: u64) -> Option<u64> {
        let text = self.first(name)?;
        let digits = text.strip_prefix(['+', '-']).unwrap_or(&text);
        if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        if text.starts_with('-') {
            return Some(least);
        }
        // Digits that do not fit are far above the maximum.
        Some(digits.parse().unwrap_or(most).clamp(least, most))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_of_repeated_parameters_counts() {
        let query = QueryString::new(Some("a=1&b=2&a=3&c&%64=x+y%2Bz"));
        assert_eq!(query.first("a").as_deref(), Some("1"));
        assert_eq!(query.first("c").as_deref(), Some(""));
        assert_eq!(query.first("d").as_deref(), Some("x y+z"));
        assert_eq!(query.first("e"), None);
        assert_eq!(QueryString::new(None).first("a"), None);
    }

    #[test]
    fn limits_are_clamped_and_never_an_error() {
        for (query, limit) in [
            ("", 100),
            ("limit=", 100),
            ("limit=7", 7),
            ("limit=%2B7", 7),
            ("limit=+7", 100),
            ("limit=007", 7),
            ("limit=0", 1),
            ("limit=-0", 1),
            ("limit=-5", 1),
            ("limit=1000", 1000),
            ("limit=1001", 1000),
            ("limit=99999999999999999999999999999999", 1000),
            ("limit=-99999999999999999999999999999999", 1),
            ("limit=1.5", 100),
            ("limit=1e3", 100),
            ("limit=ten", 100),
            ("limit=--1", 100),
            ("limit=5&limit=9", 5),
        ] {
            assert_eq!(QueryString::new(Some(query)).limit(&Limits::default()), limit, "{query}");
        }
    }
}
