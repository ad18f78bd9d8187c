//! Bodies in: read whole, bounded in bytes and time, and inflated. Bodies out: JSON, refusals included.

use std::ops::Deref;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use fanfare_proto::http::BodyError;
use http_body_util::BodyExt as _;
use serde::Serialize;
use tokio::time::Instant;

use super::Api;
use super::coding::Coding;
use super::memory_budget::{MemoryPermit, SMALL_BYTES};
use crate::edge::errors::{HttpRefusal, RefusalKind};
use crate::model::AccountId;
use crate::telemetry::Limit;

const DISCARD_TIME_MAX: Duration = Duration::from_secs(2);

/// A request body of which nothing has been read; a refusal before `read` costs none of it.
pub(super) struct UnreadBody {
    bytes_announced: u64,
    /// True if the client waits for `100 Continue`, so that an early refusal saves it the upload.
    waits: bool,
    coding: Option<Coding>,
    body: Body,
}

impl UnreadBody {
    pub(super) fn new(headers: &HeaderMap, body: Body) -> Self {
        let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let (waits, coding) = (headers.contains_key(EXPECT), Coding::of(headers));
        Self { bytes_announced: announced.unwrap_or(0), waits, coding, body }
    }

    /// Reads and decodes the whole body. Refuses with 413 over `bytes_max`, 415 for an unknown coding, 408 when the body does not arrive in
    /// time, and 503 without memory for it.
    pub(super) async fn read(
        mut self,
        api: &Api,
        account: &AccountId,
        bytes_max: usize,
    ) -> Result<BodyText, HttpRefusal> {
        let read = self.read_decoded(api, account, bytes_max).await;
        match read.as_ref().err().map(|refusal| refusal.kind) {
            Some(RefusalKind::TooLarge) if bytes_max == api.services.limits.http_body_bytes => {
                Limit::HttpBodyBytes.hit();
            }
            Some(RefusalKind::TooLarge) => Limit::TokenRequestBytes.hit(),
            Some(RefusalKind::Unavailable) => Limit::HttpBodiesBytes.hit(),
            _ => {}
        }
        if let Err(refusal) = &read
            && matches!(
                refusal.kind,
                RefusalKind::TooLarge | RefusalKind::UnsupportedCoding | RefusalKind::Unavailable
            )
            && !self.waits
        {
            self.discard(bytes_max).await;
        }
        read
    }

    async fn read_decoded(
        &mut self,
        api: &Api,
        account: &AccountId,
        bytes_max: usize,
    ) -> Result<BodyText, HttpRefusal> {
        let Some(coding) = self.coding else {
            let error = "content-encoding must be gzip, deflate or identity";
            return Err(HttpRefusal::new(RefusalKind::UnsupportedCoding, error));
        };
        let sent = self.read_within(api, account, bytes_max).await?;
        if coding == Coding::Identity {
            return Ok(sent);
        }
        // Inflated twice, so that a body for which there is no permit is never in memory.
        let bytes = coding.count(&sent, bytes_max)?.ok_or_else(|| HttpRefusal::body_too_large(bytes_max))?;
        let mut text = BodyText::default();
        if bytes > SMALL_BYTES {
            text.reserve_memory(api, account, bytes).await?;
        }
        coding.inflate(&sent, bytes, &mut text.bytes)?;
        Ok(text)
    }

    /// Reads the body as it is sent, still encoded.
    async fn read_within(
        &mut self,
        api: &Api,
        account: &AccountId,
        bytes_max: usize,
    ) -> Result<BodyText, HttpRefusal> {
        let too_large = || HttpRefusal::body_too_large(bytes_max);
        let announced = usize::try_from(self.bytes_announced).unwrap_or(usize::MAX);
        if announced > bytes_max {
            return Err(too_large());
        }
        let mut text = BodyText::default();
        if announced > SMALL_BYTES {
            text.reserve_memory(api, account, announced).await?;
        }
        // Reading the body makes hyper send `100 Continue`.
        self.waits = false;
        let limits = &api.services.limits;
        let stall = Duration::from_millis(limits.http_stall_ms);
        let end = Instant::now() + Duration::from_millis(limits.http_body_ms);
        let late = || {
            let limit = if Instant::now() < end { Limit::HttpStallMs } else { Limit::HttpBodyMs };
            limit.hit();
            HttpRefusal::new(RefusalKind::TimedOut, "the body did not arrive in time")
        };
        loop {
            let next = (Instant::now() + stall).min(end);
            let frame = tokio::time::timeout_at(next, self.body.frame()).await.map_err(|_| late())?;
            let Some(frame) = frame else { return Ok(text) };
            let frame =
                frame.map_err(|_| HttpRefusal::malformed("the body ended early or could not be read"))?;
            let Ok(data) = frame.into_data() else { continue };
            let bytes = text.bytes.len() + data.len();
            if bytes > bytes_max {
                return Err(too_large());
            }
            if text.permit.is_none() && bytes > SMALL_BYTES {
                text.reserve_memory(api, account, bytes_max).await?;
            }
            text.bytes.extend_from_slice(&data);
        }
    }

    /// Reads and drops a little more than is allowed: closing on unread bytes resets the connection, and a client that is still writing
    /// would then never see the answer.
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

/// Bytes of a body, copied into one buffer: hyper yields a part for each packet or chunk, however small.
#[derive(Default)]
pub(super) struct BodyText {
    bytes: Vec<u8>,
    permit: Option<MemoryPermit>,
}

impl BodyText {
    async fn reserve_memory(
        &mut self,
        api: &Api,
        account: &AccountId,
        bytes: usize,
    ) -> Result<(), HttpRefusal> {
        self.permit = Some(api.bodies.take(account, bytes).await?);
        self.bytes.reserve_exact(bytes - self.bytes.len());
        Ok(())
    }

    /// Releases the bytes, and passes the permit on to values parsed from them.
    pub(super) fn into_permit(self) -> Option<MemoryPermit> {
        self.permit
    }
}

impl Deref for BodyText {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// Refusal of a body that cannot be parsed.
pub(super) fn refused(error: BodyError) -> HttpRefusal {
    Limit::Nesting.hit_if(matches!(error, BodyError::TooDeep { .. }));
    HttpRefusal::malformed(error.to_string())
}

pub(super) fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(text) => json_text(text),
        Err(_) => HttpRefusal::internal().into_response(),
    }
}

/// Response with text that is JSON already.
pub(super) fn json_text(text: impl Into<Body>) -> Response {
    ([(CONTENT_TYPE, "application/json")], text.into()).into_response()
}

impl IntoResponse for HttpRefusal {
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
