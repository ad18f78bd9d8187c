//! The settings of traces.

use std::fmt;

use url::Url;

const BYTES_MAX: usize = 2048;
/// Path for traces below the collector's base URL.
const PATH: &str = "v1/traces";

/// The base URL of a collector: `http://` or `https://` with a host, and without user and query, which would be
/// secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CollectorUrl(Url);

impl CollectorUrl {
    /// Parses a URL. The error shows nothing of the text.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.len() > BYTES_MAX {
            return Err(format!("must not be longer than {BYTES_MAX} bytes"));
        }
        let url = Url::parse(text)
            .map_err(|error| format!("must be a URL such as http://collector:4318: {error}"))?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err("must begin with http:// or https://".to_owned());
        }
        if url.host_str().is_none_or(str::is_empty) || url.port() == Some(0) {
            return Err("must name a host and a port".to_owned());
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(
                "must not hold a user; give the headers of a collector with OTEL_EXPORTER_OTLP_HEADERS"
                    .to_owned(),
            );
        }
        if url.query().is_some() || url.fragment().is_some() {
            return Err("must have neither a query nor a fragment".to_owned());
        }
        Ok(Self(url))
    }

    /// The URL that traces are posted to.
    pub(super) fn traces(&self) -> String {
        format!("{}/{PATH}", self.0.as_str().trim_end_matches('/'))
    }
}

impl fmt::Display for CollectorUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The share, from 0 to 1, of requests without a sampled parent that begin a trace.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleRatio(f64);

/// Total equality, as the value is never NaN.
impl Eq for SampleRatio {}

impl SampleRatio {
    pub fn parse(text: &str) -> Result<Self, String> {
        let ratio = text.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
        ratio.map(Self).ok_or_else(|| format!("expected a number from 0 to 1 such as 0.05, got `{text}`"))
    }

    pub(super) fn get(self) -> f64 {
        self.0
    }
}

impl Default for SampleRatio {
    fn default() -> Self {
        Self(0.01)
    }
}

impl fmt::Display for SampleRatio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collector_is_posted_to_below_its_base() {
        for (base, traces) in [
            ("http://collector:4318", "http://collector:4318/v1/traces"),
            ("https://otlp.example/", "https://otlp.example/v1/traces"),
            ("http://[::1]:4318/otlp", "http://[::1]:4318/otlp/v1/traces"),
        ] {
            assert_eq!(CollectorUrl::parse(base).expect(base).traces(), traces);
        }
    }

    #[test]
    fn a_collector_of_another_form_is_refused_without_its_text() {
        for bad in [
            "collector:4318",
            "grpc://collector:4317",
            "http://:4318",
            "http://collector:0",
            "http://user:hush@collector",
            "http://collector?token=hush",
            "http://collector#hush",
        ] {
            let error = CollectorUrl::parse(bad).expect_err(bad);
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn a_ratio_is_from_0_to_1() {
        for (text, shown) in [("0", "0"), ("1", "1"), ("0.25", "0.25"), ("1e-3", "0.001")] {
            assert_eq!(SampleRatio::parse(text).expect(text).to_string(), shown);
        }
        for bad in ["", "-0.1", "1.01", "NaN", "inf", "half", "50%"] {
            assert!(SampleRatio::parse(bad).is_err(), "{bad}");
        }
    }
}
