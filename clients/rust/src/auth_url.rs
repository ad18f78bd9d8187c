//! Requests to an address of the application that answers with tokens.

use std::fmt;

use bytes::Bytes;
use http_body_util::Full;
use hyper::{HeaderMap, Request, header};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::answer::{TokenAnswer, token_error};
use crate::target::Target;
use crate::{Error, http};

/// A request to an address of the application that answers with a token. [`AuthUrl::new`] has the defaults.
///
/// The answer is the text of a JWT, or as JSON a JWT, TokenDetails or a TokenRequest. It may have 64 KiB and
/// take 10 s. Redirects are not followed. `Debug` shows the method alone.
#[derive(Clone)]
pub struct AuthUrl {
    /// `http://…` or `https://…`; the latter needs the feature `tls`.
    pub url: String,
    /// GET by default.
    pub method: AuthMethod,
    /// Headers of the request, such as a cookie of the user.
    pub headers: Vec<(String, String)>,
    /// Parameters behind the `clientId` of the options, if there is one: in the query, or with POST in a JSON
    /// object.
    pub params: Vec<(String, String)>,
    /// PEM certificates of the authorities that are trusted to sign the address's certificate, in place of
    /// the platform's.
    pub authorities: Option<Vec<u8>>,
}

/// The method of the request to an auth URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AuthMethod {
    /// GET with the parameters in the query.
    #[default]
    Get,
    /// POST with the parameters in a JSON object.
    Post,
}

impl AuthUrl {
    /// Makes a GET request without headers or parameters.
    pub fn new(url: impl Into<String>) -> Self {
        Self {
            url: url.into(),
            method: AuthMethod::Get,
            headers: Vec::new(),
            params: Vec::new(),
            authorities: None,
        }
    }

    pub(crate) async fn ask(&self, client_id: Option<&str>) -> Result<TokenAnswer, Error> {
        let target = Target::of(&self.url, None)?;
        let request = self.request(&target, client_id)?;
        let answer = http::call(&target, self.authorities.as_deref(), request).await;
        TokenAnswer::parse(&answer.map_err(|error| token_error("the auth URL", error))?)
    }

    fn request(&self, target: &Target, client_id: Option<&str>) -> Result<Request<Full<Bytes>>, Error> {
        let own = self.params.iter().map(|(name, value)| (name.as_str(), value.as_str()));
        let params = client_id.map(|id| ("clientId", id)).into_iter().chain(own);
        let request = match self.method {
            AuthMethod::Get => Request::get(with_query(&target.path, params)).body(Full::default()),
            AuthMethod::Post => {
                let object = params.map(|(name, value)| (name.to_owned(), value.into()));
                let body = serde_json::Value::Object(object.collect()).to_string();
                Request::post(&target.path).body(Full::new(body.into()))
            }
        };
        let unusable =
            |e: hyper::http::Error| Error::BadValue(format!("unusable request to the auth URL: {e}"));
        let mut request = request.map_err(unusable)?;
        let headers = request.headers_mut();
        for (name, value) in &self.headers {
            let name = header::HeaderName::try_from(name).map_err(|e| unusable(e.into()))?;
            let value = header::HeaderValue::try_from(value).map_err(|e| unusable(e.into()))?;
            headers.append(name, value);
        }
        let host = header::HeaderValue::try_from(&target.host).map_err(|e| unusable(e.into()))?;
        headers.entry(header::HOST).or_insert(host);
        headers.insert(header::CONNECTION, header::HeaderValue::from_static("close"));
        self.describe_body(headers);
        Ok(request)
    }

    fn describe_body(&self, headers: &mut HeaderMap) {
        if self.method == AuthMethod::Post {
            let json = header::HeaderValue::from_static("application/json");
            headers.entry(header::CONTENT_TYPE).or_insert(json);
        }
    }
}

fn with_query<'a>(path: &str, params: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut path = path.to_owned();
    for (name, value) in params {
        path.push(if path.contains('?') { '&' } else { '?' });
        path.extend(utf8_percent_encode(name, NON_ALPHANUMERIC));
        path.push('=');
        path.extend(utf8_percent_encode(value, NON_ALPHANUMERIC));
    }
    path
}

impl fmt::Debug for AuthUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AuthUrl").field("method", &self.method).finish_non_exhaustive()
    }
}
