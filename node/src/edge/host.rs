//! Check of the Host header.

use axum::extract::Request;
use axum::http::uri::Authority;
use axum::http::{Version, header};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

use super::errors::HttpRefusal;

/// Checks a request's Host headers by RFC 9112 §3.2: exactly one that is a valid host, or none in HTTP/1.0.
///
/// # Errors
/// The refusal with 400.
pub fn check<'a>(mut hosts: impl Iterator<Item = &'a [u8]>, is_required: bool) -> Result<(), HttpRefusal> {
    match (hosts.next(), hosts.next()) {
        (None, _) if is_required => Err(HttpRefusal::malformed("the host header is missing")),
        (None, _) => Ok(()),
        (Some(_), Some(_)) => Err(HttpRefusal::malformed("the host header is given more than once")),
        (Some(host), None) if is_host(host.trim_ascii()) => Ok(()),
        (Some(_), None) => Err(HttpRefusal::malformed("the host header is no host")),
    }
}

/// The same check as a router layer.
pub async fn checked(request: Request, next: Next) -> Response {
    match of(&request) {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

/// Checks a request that hyper has parsed.
pub fn of<B>(request: &axum::http::Request<B>) -> Result<(), HttpRefusal> {
    let hosts = request.headers().get_all(header::HOST).iter();
    check(hosts.map(|host| host.as_bytes()), request.version() >= Version::HTTP_11)
}

/// True for `host [":" port]` of RFC 3986. An empty host is invalid (RFC 9110 §4.2.1).
fn is_host(value: &[u8]) -> bool {
    let Ok(authority) = Authority::try_from(value) else { return false };
    let port = &authority.as_str()[authority.host().len()..];
    let is_port = |port: &str| port.bytes().all(|digit| digit.is_ascii_digit());
    !value.contains(&b'@')
        && !authority.host().is_empty()
        && (port.is_empty() || port.strip_prefix(':').is_some_and(is_port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_a_name_or_an_address_with_or_without_a_port() {
        for host in
            ["a", "a.example", "A-b_c.example:8080", "127.0.0.1:1", "[::1]", "[::1]:8080", "xn--4ca", "a:"]
        {
            assert!(is_host(host.as_bytes()), "{host}");
        }
        for host in [
            "", ":80", "a b", "a/b", "http://a", "a?b", "a#b", "user@a", "a:b", "a:80:80", "a,b c", "[::1",
            "::1]", "a\\b", "a\"b", "<a>", "a\u{e9}", "[::1]x",
        ] {
            assert!(!is_host(host.as_bytes()), "{host}");
        }
    }

    #[test]
    fn host_header_may_be_missing_over_http_1_0_alone() {
        let check = |hosts: &[&str], is_required| {
            check(hosts.iter().map(|host| host.as_bytes()), is_required).is_ok()
        };
        assert!(check(&["a"], true) && check(&[" a "], true) && check(&["a"], false) && check(&[], false));
        assert!(!check(&[], true));
        for required in [false, true] {
            assert!(
                !check(&["a", "a"], required) && !check(&["a", "b"], required) && !check(&["a b"], required)
            );
        }
    }
}
