//! Conversion of an AWS response to the outcome of the batch.

use std::time::Duration;

use reqwest::header::{HeaderMap, RETRY_AFTER};

use super::super::{DeliveryOutcome, answer};

/// Error codes of a wrong request, for which a further attempt would be refused too.
const REFUSED: &[&str] = &[
    "InvalidParameter",
    "InvalidParameterException",
    "InvalidParameterValue",
    "InvalidParameterValueException",
    "InvalidRequestContentException",
    "ParameterValueInvalid",
    "RequestTooLargeException",
    "RequestEntityTooLargeException",
    "UnsupportedMediaTypeException",
];

/// Error codes of keys that are no longer valid; other keys may be.
const BAD_KEYS: &[&str] = &[
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidClientTokenId",
    "InvalidSecurity",
    "UnrecognizedClientException",
];

const CODE_BYTES_MAX: usize = 64;

#[derive(Debug)]
pub(super) struct AwsAnswer {
    status: u16,
    /// Error code of AWS.
    code: Option<String>,
    after: Option<Duration>,
    text: String,
}

impl AwsAnswer {
    pub(super) fn of(status: u16, headers: &HeaderMap, text: String, now_ms: u64) -> Self {
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let retry_after = header(RETRY_AFTER.as_str());
        let code = || header("x-amzn-errortype").and_then(code).or_else(|| code_in(&text));
        let code = if (200..=299).contains(&status) { None } else { code() };
        Self { status, code, after: retry_after.and_then(|after| answer::after(after, now_ms)), text }
    }

    pub(super) fn is_good(&self) -> bool {
        (200..=299).contains(&self.status)
    }

    pub(super) fn is_of_bad_keys(&self) -> bool {
        self.code.as_deref().is_some_and(|code| BAD_KEYS.contains(&code))
    }

    /// Converts the response. A fault that an operator can fix (permission, name, keys, clock) is retried, so that it loses no event.
    pub(super) fn outcome(&self) -> DeliveryOutcome {
        if self.is_good() {
            return DeliveryOutcome::Delivered;
        }
        let is_refused = match self.code.as_deref() {
            // A topic that is missing or in another region has this code too.
            Some("InvalidParameter") if self.text.contains("TopicArn") => false,
            Some(code) => REFUSED.contains(&code),
            None => false,
        };
        if is_refused || matches!(self.status, 413 | 415) {
            return DeliveryOutcome::Rejected { reason: self.reason() };
        }
        DeliveryOutcome::Retry { reason: self.reason(), after: self.after }
    }

    /// Describes the response without its text: after a wrong signature the text holds the signed content.
    pub(super) fn reason(&self) -> String {
        match &self.code {
            Some(code) => format!("status {} {code}", self.status),
            None => format!("status {}", self.status),
        }
    }

    /// Returns the text of the first element of this name, in the format of STS.
    pub(super) fn element(&self, name: &str) -> Option<&str> {
        element(&self.text, name)
    }
}

fn element<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(&format!("<{name}>"))?;
    let (inside, _) = rest.split_once(&format!("</{name}>"))?;
    Some(inside.trim())
}

/// Returns the error code in a body of XML or JSON.
fn code_in(text: &str) -> Option<String> {
    if let Some(found) = element(text, "Code") {
        return code(found);
    }
    let body: serde_json::Value = serde_json::from_str(text).ok()?;
    let found = ["__type", "code", "Code"].into_iter().find_map(|name| body[name].as_str());
    found.and_then(code)
}

/// Strips the namespace before the code and the address after it.
fn code(text: &str) -> Option<String> {
    let (text, _) = text.split_once(':').unwrap_or((text, ""));
    let name = text.rsplit('#').next()?.trim();
    let is_code = !name.is_empty()
        && name.len() <= CODE_BYTES_MAX
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_'));
    is_code.then(|| name.to_owned())
}

#[cfg(test)]
mod tests {
    use reqwest::header::HeaderValue;

    use super::*;

    fn answer(status: u16, error_type: &'static str, text: &str) -> AwsAnswer {
        let mut headers = HeaderMap::new();
        if !error_type.is_empty() {
            headers.insert("x-amzn-errortype", HeaderValue::from_static(error_type));
        }
        headers.insert(RETRY_AFTER, HeaderValue::from_static("7"));
        AwsAnswer::of(status, &headers, text.to_owned(), 0)
    }

    fn xml(code: &str, message: &str) -> String {
        format!(
            "<ErrorResponse><Error><Type>Sender</Type><Code>{code}</Code><Message>{message}</Message></Error></ErrorResponse>"
        )
    }

    #[test]
    fn aws_errors_an_operator_can_fix_are_retried() {
        for (status, error_type, text, reason) in [
            (403, "AccessDeniedException", "{}".into(), "status 403 AccessDeniedException"),
            (
                404,
                "ResourceNotFoundException:http://a/b",
                "{}".into(),
                "status 404 ResourceNotFoundException",
            ),
            (429, "TooManyRequestsException", "{}".into(), "status 429 TooManyRequestsException"),
            (
                400,
                "",
                r#"{"__type":"com.amazon#ThrottlingException"}"#.into(),
                "status 400 ThrottlingException",
            ),
            (403, "", xml("ExpiredToken", "hush"), "status 403 ExpiredToken"),
            (403, "", xml("SignatureDoesNotMatch", "hush"), "status 403 SignatureDoesNotMatch"),
            (404, "", xml("NotFound", "hush"), "status 404 NotFound"),
            (400, "", xml("InvalidParameter", "Invalid parameter: TopicArn"), "status 400 InvalidParameter"),
            (400, "", xml("hush hush", "hush"), "status 400"),
            (400, "", "no code".into(), "status 400"),
            (500, "ServiceException", "{}".into(), "status 500 ServiceException"),
            (503, "", "<html>".into(), "status 503"),
            (302, "", String::new(), "status 302"),
        ] {
            let after = Some(Duration::from_secs(7));
            let expected = DeliveryOutcome::Retry { reason: reason.to_owned(), after };
            assert_eq!(answer(status, error_type, &text).outcome(), expected, "{text}");
        }
    }

    #[test]
    fn a_wrong_or_too_large_request_is_rejected() {
        for (status, error_type, text, reason) in [
            (400, "InvalidRequestContentException", "{}".into(), "status 400 InvalidRequestContentException"),
            (413, "RequestTooLargeException", "{}".into(), "status 413 RequestTooLargeException"),
            (413, "", "<html>".into(), "status 413"),
            (415, "UnsupportedMediaTypeException", "{}".into(), "status 415 UnsupportedMediaTypeException"),
            (
                400,
                "",
                xml("InvalidParameter", "Invalid parameter: Message too long"),
                "status 400 InvalidParameter",
            ),
        ] {
            let expected = DeliveryOutcome::Rejected { reason: reason.to_owned() };
            assert_eq!(answer(status, error_type, &text).outcome(), expected, "{text}");
        }
    }

    #[test]
    fn good_answers_are_delivered_and_bad_keys_are_known() {
        for status in [200, 202, 204] {
            assert_eq!(answer(status, "", "").outcome(), DeliveryOutcome::Delivered, "{status}");
        }
        assert!(answer(403, "", &xml("ExpiredToken", "")).is_of_bad_keys());
        assert!(answer(403, "UnrecognizedClientException", "").is_of_bad_keys());
        assert!(!answer(403, "AccessDeniedException", "").is_of_bad_keys());
    }
}
