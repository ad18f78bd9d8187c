//! Request signatures, Signature Version 4.

use std::time::{Duration, UNIX_EPOCH};

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{SignableBody, SignableRequest, SigningSettings, sign};
use aws_sigv4::sign::v4::SigningParams;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use crate::accounts::AwsKeys;

/// Service name in a signature.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SigningService {
    Lambda,
    Sns,
    Sts,
}

impl SigningService {
    fn as_str(self) -> &'static str {
        match self {
            Self::Lambda => "lambda",
            Self::Sns => "sns",
            Self::Sts => "sts",
        }
    }
}

/// Signed parts of a request beside time and region.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnsignedRequest<'a> {
    pub(super) method: &'a str,
    /// URL as it is sent, so already encoded.
    pub(super) url: &'a str,
    /// Headers with lowercase names; the host is taken from the URL.
    pub(super) headers: &'a [(&'a str, &'a str)],
    pub(super) body: &'a [u8],
}

/// Returns the headers that sign a request, all marked as sensitive.
///
/// # Errors
/// A part of the request cannot be signed.
pub(super) fn signature(
    request: UnsignedRequest<'_>,
    keys: &AwsKeys,
    service: SigningService,
    region: &str,
    now_ms: u64,
) -> Result<HeaderMap, String> {
    signed_for(request, keys, service.as_str(), region, now_ms)
}

fn signed_for(
    request: UnsignedRequest<'_>,
    keys: &AwsKeys,
    service: &str,
    region: &str,
    now_ms: u64,
) -> Result<HeaderMap, String> {
    let token = keys.session_token.as_ref().map(|token| token.as_str().to_owned());
    let identity = Credentials::new(keys.id.as_str(), keys.secret.as_str(), token, None, "directory").into();
    let params = SigningParams::builder()
        .identity(&identity)
        .region(region)
        .name(service)
        .time(UNIX_EPOCH + Duration::from_millis(now_ms))
        .settings(SigningSettings::default())
        .build()
        .map_err(|error| error.to_string())?
        .into();
    let UnsignedRequest { method, url, headers, body } = request;
    let signable = SignableRequest::new(method, url, headers.iter().copied(), SignableBody::Bytes(body));
    let signed = signable.and_then(|signable| sign(signable, &params)).map_err(|error| error.to_string())?;
    let (instructions, _signature) = signed.into_parts();
    let mut signature = HeaderMap::new();
    for (name, value) in instructions.headers() {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|error| error.to_string())?;
        let mut value = HeaderValue::from_str(value).map_err(|error| error.to_string())?;
        value.set_sensitive(true);
        signature.insert(name, value);
    }
    Ok(signature)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::accounts::Secret;

    /// Keys, region, service and time of the test suite that AWS publishes.
    const KEY_ID: &str = "AKIDEXAMPLE";
    const SECRET_KEY: &str = "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY";
    const TOKEN: &str = "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267";
    const NOW_MS: u64 = 1_440_938_160_000;

    fn keys(token: Option<&str>) -> AwsKeys {
        let secret = |text| Secret::new(text).expect("a good secret");
        AwsKeys { id: secret(KEY_ID), secret: secret(SECRET_KEY), session_token: token.map(secret) }
    }

    fn signed(request: UnsignedRequest<'_>, token: Option<&str>) -> HeaderMap {
        signed_for(request, &keys(token), "service", "us-east-1", NOW_MS).expect("a signature")
    }

    #[test]
    fn the_published_requests_have_their_published_signatures() {
        let form = &[("content-type", "application/x-www-form-urlencoded")][..];
        let get = |url| UnsignedRequest { method: "GET", url, headers: &[], body: b"" };
        let post = |headers, body| UnsignedRequest {
            method: "POST",
            url: "https://example.amazonaws.com/",
            headers,
            body,
        };
        for (name, request, token, headers, signature) in [
            (
                "get-vanilla",
                get("https://example.amazonaws.com/"),
                None,
                "host;x-amz-date",
                "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31",
            ),
            (
                "get-utf8",
                get("https://example.amazonaws.com/\u{1234}"),
                None,
                "host;x-amz-date",
                "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85",
            ),
            (
                "get-vanilla-query-order-encoded",
                get("https://example.amazonaws.com/?Param-3=Value3&Param=Value2&%E1%88%B4=Value1"),
                None,
                "host;x-amz-date",
                "371d3713e185cc334048618a97f809c9ffe339c62934c032af5a0e595648fcac",
            ),
            (
                "get-vanilla-with-session-token",
                get("https://example.amazonaws.com/"),
                Some(TOKEN),
                "host;x-amz-date;x-amz-security-token",
                "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8",
            ),
            (
                "post-vanilla",
                post(&[], b""),
                None,
                "host;x-amz-date",
                "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b",
            ),
            (
                "post-x-www-form-urlencoded",
                post(form, b"Param1=value1"),
                None,
                "content-type;host;x-amz-date",
                "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a",
            ),
        ] {
            let headers_of = signed(request, token);
            let expected = format!(
                "AWS4-HMAC-SHA256 Credential={KEY_ID}/20150830/us-east-1/service/aws4_request, \
                 SignedHeaders={headers}, Signature={signature}"
            );
            assert_eq!(headers_of["authorization"], expected, "{name}");
            assert_eq!(headers_of["x-amz-date"], "20150830T123600Z", "{name}");
            let token_of = headers_of.get("x-amz-security-token").and_then(|value| value.to_str().ok());
            assert_eq!(token_of, token, "{name}");
        }
    }

    #[test]
    fn a_signature_shows_nothing_to_what_prints() {
        let request = UnsignedRequest { method: "GET", url: "https://example.com/", headers: &[], body: b"" };
        let headers = signed(request, Some(TOKEN));
        let printed = format!("{headers:?} {:?}", keys(Some(TOKEN)));
        for secret in [KEY_ID, SECRET_KEY, TOKEN] {
            assert!(!printed.contains(secret), "{printed}");
        }
    }
}
