//! Answers of an application that a client asks for a token.

use std::fmt;

use bytes::Bytes;
use fanfare_proto::token::TokenDetails;
use http_body_util::Full;
use hyper::{Request, header};
use serde::Deserialize;

use crate::sign::TokenRequest;
use crate::{Error, Options, http};

/// Characters of a foreign text that an error repeats.
const TEXT_CHARS_MAX: usize = 200;

/// One of the three answers to a client that needs a token. `Debug` does not show its secrets.
#[derive(Clone)]
pub enum TokenAnswer {
    /// Service JWT.
    Jwt(String),
    /// TokenDetails of an exchange that the application made itself.
    Details(TokenDetails),
    /// Signed TokenRequest, which the client exchanges at its node.
    Request(TokenRequest),
}

impl TokenAnswer {
    /// Reads the body of an auth URL's answer: the text of a JWT, or JSON with any of the three. TokenDetails
    /// need `token` alone.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Kind {
            Text(String),
            Details { token: String },
            Object(serde_json::Map<String, serde_json::Value>),
        }

        let text = std::str::from_utf8(body).map_err(|_| no_token("the answer is not UTF-8"))?.trim();
        if !text.starts_with(['{', '"']) {
            return Ok(Self::Jwt(text.into()));
        }
        let kind = serde_json::from_str(text)
            .map_err(|error| no_token(format!("the answer is not JSON: {error}")))?;
        match kind {
            Kind::Text(token) | Kind::Details { token } => Ok(Self::Jwt(token)),
            Kind::Object(fields) if fields.contains_key("token") => Err(no_token("`token` is not a text")),
            Kind::Object(fields) if fields.contains_key("mac") => serde_json::from_value(fields.into())
                .map(Self::Request)
                .map_err(|error| no_token(format!("the TokenRequest of the answer is malformed: {error}"))),
            Kind::Object(_) => Err(no_token("the answer is neither a JWT, TokenDetails nor a TokenRequest")),
        }
    }

    /// Gives the token of the answer, after the exchange of a TokenRequest at the node of `options`.
    pub(crate) async fn into_token(self, options: &Options) -> Result<String, Error> {
        let token = match self {
            Self::Jwt(token) => token,
            Self::Details(details) => details.token,
            Self::Request(request) => exchange(&request, options).await?,
        };
        // The characters of RFC 6750, 2.1: no others can be sent in the header.
        let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~+/=".contains(&byte);
        if token.is_empty() || !token.bytes().all(is_token) {
            return Err(no_token("the answer is neither a JWT, TokenDetails nor a TokenRequest"));
        }
        Ok(token)
    }
}

async fn exchange(request: &TokenRequest, options: &Options) -> Result<String, Error> {
    #[derive(Deserialize)]
    struct ExchangeAnswer {
        token: String,
    }

    if request.key_name.is_empty() {
        return Err(no_token("`keyName` of the TokenRequest is empty"));
    }
    let target = options.exchange_target(&request.key_name)?;
    let body = serde_json::to_vec(request).map_err(|error| Error::BadValue(error.to_string()))?;
    let request = Request::post(&target.path)
        .header(header::HOST, &target.host)
        .header(header::CONNECTION, "close")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| Error::BadValue(format!("unusable request: {e}")))?;
    let answer = http::call(&target, options.authorities.as_deref(), request).await;
    let answer = answer.map_err(|error| token_error("the exchange of the TokenRequest", error))?;
    let given: ExchangeAnswer = serde_json::from_slice(&answer)
        .map_err(|error| no_token(format!("the node's answer is not TokenDetails: {error}")))?;
    Ok(given.token)
}

/// Makes the error of a client that got no token because of `error`. The error of a wrong setting stays as it
/// is.
pub(crate) fn token_error(place: &str, error: Error) -> Error {
    match error {
        Error::BadUrl(_) | Error::BadValue(_) => error,
        Error::Http { status: 403, error, .. } => Error::TokenDenied(shortened(&error)),
        Error::Http { status, error, .. } => no_token(format!("{place} gave status {status}: {error}")),
        other => match std::error::Error::source(&other) {
            Some(source) => no_token(format!("{place}: {other}: {source}")),
            None => no_token(format!("{place}: {other}")),
        },
    }
}

pub(crate) fn no_token(reason: impl AsRef<str>) -> Error {
    Error::NoToken(shortened(reason.as_ref()))
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(TEXT_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

impl fmt::Debug for TokenAnswer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Jwt(_) => "Jwt(…)",
            Self::Details(_) => "Details(…)",
            Self::Request(_) => "Request(…)",
        })
    }
}

impl From<String> for TokenAnswer {
    fn from(token: String) -> Self {
        Self::Jwt(token)
    }
}

impl From<TokenDetails> for TokenAnswer {
    fn from(details: TokenDetails) -> Self {
        Self::Details(details)
    }
}

impl From<TokenRequest> for TokenAnswer {
    fn from(request: TokenRequest) -> Self {
        Self::Request(request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Credential;

    fn refused(body: &[u8]) -> String {
        TokenAnswer::parse(body).expect_err("refused").to_string()
    }

    #[test]
    fn each_kind_of_token_answer_is_distinguished() {
        for text in
            [" a.b.c\n", r#""a.b.c""#, r#"{"token":"a.b.c"}"#, r#"{"token":"a.b.c","expires":1,"mac":1}"#]
        {
            let answer = TokenAnswer::parse(text.as_bytes()).expect("an answer");
            assert!(matches!(&answer, TokenAnswer::Jwt(token) if token == "a.b.c"), "{text}: {answer:?}");
        }
        let text = r#"{"keyName":"k1","ttl":2000,"timestamp":1,"nonce":"n","mac":"m","more":null}"#;
        let TokenAnswer::Request(request) = TokenAnswer::parse(text.as_bytes()).expect("an answer") else {
            unreachable!("a TokenRequest")
        };
        assert_eq!((&*request.key_name, request.ttl, request.client_id), ("k1", Some(2_000), None));
    }

    #[test]
    fn a_wrong_answer_is_refused_with_its_fault() {
        for (body, fault) in [
            (&b"\xff"[..], "not UTF-8"),
            (b"{", "not JSON"),
            (b"{}", "neither a JWT"),
            (br#"{"token":1}"#, "`token` is not a text"),
            (br#"{"mac":"m","timestamp":1,"nonce":"n"}"#, "missing field `keyName`"),
            (br#"{"mac":"m","keyName":"k","timestamp":-1,"nonce":"n"}"#, "malformed: invalid value"),
        ] {
            assert!(refused(body).contains(fault), "{fault}: {}", refused(body));
        }
        let deep = format!("{{\"a\":{}", "[".repeat(60_000));
        assert!(refused(deep.as_bytes()).contains("not JSON"));
        let long = format!(r#"{{"mac":"m","keyName":"k","timestamp":"{}"}}"#, "9".repeat(60_000));
        assert!(refused(long.as_bytes()).len() < 300);
    }

    #[tokio::test]
    async fn a_text_that_is_no_token_is_refused() {
        let options = Options::new("ws://127.0.0.1:1", Credential::None);
        for text in ["", "<html>", "a b", "a\r\nb", "ä"] {
            let error = TokenAnswer::Jwt(text.into()).into_token(&options).await.expect_err("refused");
            assert!(matches!(error, Error::NoToken(_)), "{text}: {error}");
        }
    }
}
