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
use super::room::{SMALL_BYTES, Share};
use crate::edge::errors::{Kind, Refusal};
use crate::model::AccountId;
use crate::telemetry::Limit;

const DISCARD_TIME_MAX: Duration = Duration::from_secs(2);

/// A body that nothing has been read of; a refusal before `read` costs none of it.
pub(super) struct Unread {
    bytes_announced: u64,
    /// The client waits for a word before it sends, so an early answer saves it the work.
    waits: bool,
    coding: Option<Coding>,
    body: Body,
}

impl Unread {
    pub(super) fn new(headers: &HeaderMap, body: Body) -> Self {
        let announced = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse().ok());
        let (waits, coding) = (headers.contains_key(EXPECT), Coding::of(headers));
        Self { bytes_announced: announced.unwrap_or(0), waits, coding, body }
    }

    /// The whole body, as it was before it was encoded; 413 over `bytes_max`, 415 for a coding that is not known, 408 when it does not come, and 503 when there is no room for it.
    pub(super) async fn read(
        mut self,
        api: &Api,
        account: &AccountId,
        bytes_max: usize,
    ) -> Result<Text, Refusal> {
        let read = self.read_decoded(api, account, bytes_max).await;
        match read.as_ref().err().map(|refusal| refusal.kind) {
            Some(Kind::TooLarge) if bytes_max == api.services.limits.http_body_bytes => {
                Limit::HttpBodyBytes.hit();
            }
            Some(Kind::TooLarge) => Limit::TokenRequestBytes.hit(),
            Some(Kind::Unavailable) => Limit::HttpBodiesBytes.hit(),
            _ => {}
        }
        if let Err(refusal) = &read
            && matches!(refusal.kind, Kind::TooLarge | Kind::UnsupportedCoding | Kind::Unavailable)
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
    ) -> Result<Text, Refusal> {
        let Some(coding) = self.coding else {
            let error = "content-encoding must be gzip, deflate or identity";
            return Err(Refusal::new(Kind::UnsupportedCoding, error));
        };
        let sent = self.read_within(api, account, bytes_max).await?;
        if coding == Coding::Identity {
            return Ok(sent);
        }
        // Inflated twice, so that a body for which there is no room is nowhere in memory.
        let bytes = coding.count(&sent, bytes_max)?.ok_or_else(|| Refusal::body_too_large(bytes_max))?;
        let mut text = Text::default();
        if bytes > SMALL_BYTES {
            text.make_room(api, account, bytes).await?;
        }
        coding.inflate(&sent, bytes, &mut text.bytes)?;
        Ok(text)
    }

    /// As it is sent.
    async fn read_within(
        &mut self,
        api: &Api,
        account: &AccountId,
        bytes_max: usize,
    ) -> Result<Text, Refusal> {
        let too_large = || Refusal::body_too_large(bytes_max);
        let announced = usize::try_from(self.bytes_announced).unwrap_or(usize::MAX);
        if announced > bytes_max {
            return Err(too_large());
        }
        let mut text = Text::default();
        if announced > SMALL_BYTES {
            text.make_room(api, account, announced).await?;
        }
        // The client is told to send when the body is asked for.
        self.waits = false;
        let limits = &api.services.limits;
        let stall = Duration::from_millis(limits.http_stall_ms);
        let end = Instant::now() + Duration::from_millis(limits.http_body_ms);
        let late = || {
            let limit = if Instant::now() < end { Limit::HttpStallMs } else { Limit::HttpBodyMs };
            limit.hit();
            Refusal::new(Kind::TimedOut, "the body did not arrive in time")
        };
        loop {
            let next = (Instant::now() + stall).min(end);
            let frame = tokio::time::timeout_at(next, self.body.frame()).await.map_err(|_| late())?;
            let Some(frame) = frame else { return Ok(text) };
            let frame = frame.map_err(|_| Refusal::malformed("the body ended early or could not be read"))?;
            let Ok(data) = frame.into_data() else { continue };
            let bytes = text.bytes.len() + data.len();
            if bytes > bytes_max {
                return Err(too_large());
            }
            if text.share.is_none() && bytes > SMALL_BYTES {
                text.make_room(api, account, bytes_max).await?;
            }
            text.bytes.extend_from_slice(&data);
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

/// What a client sent. It may not be kept as it came: hyper gives a part for each packet or chunk, however small.
#[derive(Default)]
pub(super) struct Text {
    bytes: Vec<u8>,
    share: Option<Share>,
}

impl Text {
    async fn make_room(&mut self, api: &Api, account: &AccountId, bytes: usize) -> Result<(), Refusal> {
        self.share = Some(api.bodies.take(account, bytes).await?);
        self.bytes.reserve_exact(bytes - self.bytes.len());
        Ok(())
    }

    /// For what was read of it, and takes its place.
    pub(super) fn into_share(self) -> Option<Share> {
        self.share
    }
}

impl Deref for Text {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

/// The refusal of a body that cannot be read.
pub(super) fn refused(error: BodyError) -> Refusal {
    Limit::Nesting.hit_if(matches!(error, BodyError::TooDeep { .. }));
    Refusal::malformed(error.to_string())
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
