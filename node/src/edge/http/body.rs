//! Bodies in: read whole, bounded in bytes and time. Bodies out: JSON, refusals included.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use serde::Serialize;

use crate::edge::errors::{Kind, Refusal};

/// From the end of the headers to the end of the body.
const BODY_TIME_MAX: Duration = Duration::from_secs(30);

const DISCARD_TIME_MAX: Duration = Duration::from_secs(2);

/// A body that nothing has been read of; a refusal before `read` costs none of it.
pub(super) struct Unread {
    bytes_announced: u64,
    /// The client waits for a word before it sends, so an early answer saves it the work.
    waits: bool,
    body: Body,
}

impl Unread {
    pub(super) fn new(headers: &HeaderMap, body: Body) -> Self {
        let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        Self { bytes_announced: announced.unwrap_or(0), waits: headers.contains_key(EXPECT), body }
    }

    /// The whole body; 413 over `bytes_max`.
    pub(super) async fn read(mut self, bytes_max: usize) -> Result<Bytes, Refusal> {
        let too_large = Refusal::body_too_large(bytes_max);
        if self.bytes_announced > bytes_max as u64 {
            if !self.waits {
                self.discard(bytes_max).await;
            }
            return Err(too_large);
        }
        let read =
            tokio::time::timeout(BODY_TIME_MAX, Limited::new(&mut self.body, bytes_max).collect()).await;
        match read {
            Ok(Ok(collected)) => Ok(collected.to_bytes()),
            Ok(Err(error)) if error.is::<LengthLimitError>() => {
                self.discard(bytes_max).await;
                Err(too_large)
            }
            Ok(Err(_)) => Err(Refusal::malformed("the body ended early or could not be read")),
            Err(_) => Err(Refusal::new(Kind::TimedOut, "the body did not arrive in time")),
        }
    }

    /// Takes in a little more than was allowed: closing on unread bytes resets the connection, and a client
    /// that is still writing would then never see the answer.
    async fn discard(&mut self, bytes_max: usize) {
        let read = async {
            let mut bytes_left = bytes_max.saturating_mul(4);
            while let Some(Ok(frame)) = self.body.frame().await {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                let Some(left) = bytes_left.checked_sub(bytes) else { return };
                bytes_left = left;
            }
        };
        let _ = tokio::time::timeout(DISCARD_TIME_MAX, read).await;
    }
}

pub(super) fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => json_text(text),
        Err(_) => Refusal::internal().into_response(),
    }
}

/// Text that is JSON already.
pub(super) fn json_text(text: impl Into<Body>) -> Response {
    ([(CONTENT_TYPE, "application/json")], text.into()).into_response()
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = json_text(self.body());
        *response.status_mut() =
            StatusCode::from_u16(self.kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        for (name, value) in self.headers() {
            if let Ok(value) = HeaderValue::try_from(value) {
                response.headers_mut().insert(HeaderName::from_static(name), value);
            }
        }
        response
    }
}
