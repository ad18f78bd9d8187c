//! CORS headers, which let a browser of any origin read every answer, refusals included.

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};

/// Headers of every response, also of those that never reach the router.
pub const EVERY: [(&str, &str); 2] = [
    ("access-control-allow-origin", "*"),
    ("access-control-expose-headers", "link, retry-after, x-service-node-id"),
];

const PREFLIGHT: [(&str, &str); 3] = [
    ("access-control-allow-methods", "GET, HEAD, POST, PATCH, DELETE, OPTIONS"),
    (
        "access-control-allow-headers",
        "authorization, cache-control, content-encoding, content-type, last-event-id",
    ),
    ("access-control-max-age", "7200"),
];

/// Outermost layer: answers OPTIONS before any other check.
pub(super) async fn outermost(request: Request, next: Next) -> Response {
    let mut response = if request.method() == Method::OPTIONS {
        let mut response = StatusCode::NO_CONTENT.into_response();
        insert(response.headers_mut(), &PREFLIGHT);
        response
    } else {
        next.run(request).await
    };
    on_every(response.headers_mut());
    response
}

/// Adds the headers to an answer that does not pass the router.
pub fn on_every(headers: &mut HeaderMap) {
    insert(headers, &EVERY);
}

fn insert(headers: &mut HeaderMap, pairs: &[(&'static str, &'static str)]) {
    for (name, value) in pairs {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
}
