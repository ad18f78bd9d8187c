//! `GET /api/metrics/series`: usage of the caller's account.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use fanfare_proto::http::MetricRow;
use hyper::body::Frame;

use super::memory_budget::SMALL_BYTES;
use super::query::QueryString;
use super::{Api, body};
use crate::auth::Principal;
use crate::edge::errors::HttpRefusal;
use crate::model::AccountId;
use crate::origin::history::{BoxFuture, StoreError};
use crate::origin::metering::{KEPT_MS, MINUTE_MS, Meter, SeriesPoint, sum_nodes};
use crate::telemetry::RATE_LIMITED;

const HOUR_MS: u64 = 60 * MINUTE_MS;
/// A store that has not read the rows within this time counts as unavailable.
const READ_WAIT: Duration = Duration::from_secs(10);

/// One row for each minute, node and kind, the current minute included; with `aggregate=sum` summed over all nodes.
pub(super) async fn series(
    api: &Api,
    principal: &Principal,
    query: Option<&str>,
) -> Result<Response, HttpRefusal> {
    let query = QueryString::new(query);
    let window_ms = window_ms(&query);
    let sum = match query.first("aggregate").as_deref() {
        None => false,
        Some("sum") => true,
        Some(_) => return Err(HttpRefusal::malformed("aggregate must be sum")),
    };
    let meter = Arc::clone(&api.services.meter);
    let minutes = meter.window(window_ms);
    let account = principal.account.id.clone();
    let series = SeriesReader { account, meter, sum, window_ms, begun: false, rest: Some(minutes) };
    let first = series.piece(b"{\"series\":[".to_vec()).await?;
    if first.rest.is_none() && first.text.len() <= SMALL_BYTES {
        return Ok(body::json_text(first.text));
    }
    let mut response = Response::new(Body::new(SeriesBody(Some(Box::pin(std::future::ready(Ok(first)))))));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

/// Reader of the minutes that are not sent yet.
struct SeriesReader {
    meter: Arc<Meter>,
    account: AccountId,
    sum: bool,
    window_ms: u64,
    /// True once a row was written.
    begun: bool,
    /// The minutes that are not read yet.
    rest: Option<Range<u64>>,
}

struct SeriesPiece {
    text: Vec<u8>,
    rest: Option<SeriesReader>,
}

impl SeriesReader {
    /// The next piece of the body, appended to `text`: small enough to need no memory permit, or larger by one page of rows.
    async fn piece(mut self, mut text: Vec<u8>) -> Result<SeriesPiece, StoreError> {
        while let Some(minutes) = self.rest.take() {
            let read = tokio::time::timeout(READ_WAIT, self.meter.series(&self.account, minutes)).await;
            let read = read.unwrap_or_else(|_| Err(StoreError::Failed("no answer in time".to_owned())));
            let page = read.inspect_err(|error| {
                tracing::error!(target: RATE_LIMITED, %error, "usage counts read failed");
            })?;
            self.write(&mut text, page.points);
            self.rest = page.rest;
            if text.len() > SMALL_BYTES / 2 && self.rest.is_some() {
                return Ok(SeriesPiece { text, rest: Some(self) });
            }
        }
        text.extend_from_slice(format!("],\"windowMs\":{}}}", self.window_ms).as_bytes());
        Ok(SeriesPiece { text, rest: None })
    }

    fn write(&mut self, text: &mut Vec<u8>, points: Vec<SeriesPoint>) {
        let points = if self.sum { sum_nodes(points) } else { points };
        for point in points {
            if std::mem::replace(&mut self.begun, true) {
                text.push(b',');
            }
            let row = MetricRow {
                account_id: self.account.as_str(),
                minute: point.minute_ms,
                node_id: &point.node_id,
                kind: point.kind.as_str(),
                count: point.amount.count,
                bytes: point.amount.bytes,
            };
            // Serializing texts and numbers cannot fail.
            let _ = serde_json::to_writer(&mut *text, &row);
        }
    }
}

/// Body that is read and serialized as the client takes it: a week of a node is many megabytes.
struct SeriesBody(Option<BoxFuture<'static, Result<SeriesPiece, StoreError>>>);

impl HttpBody for SeriesBody {
    type Data = Bytes;
    type Error = StoreError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, StoreError>>> {
        let Some(next) = &mut self.0 else { return Poll::Ready(None) };
        let piece = ready!(next.as_mut().poll(cx));
        self.0 = None;
        let SeriesPiece { text, rest } = piece?;
        self.0 = rest.map(|rest| Box::pin(rest.piece(Vec::new())) as BoxFuture<'static, _>);
        Poll::Ready(Some(Ok(Frame::data(text.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

/// Window of the query, in milliseconds. An invalid value means one hour, never an error.
fn window_ms(query: &QueryString<'_>) -> u64 {
    match query.first("window").as_deref() {
        Some("6h") => 6 * HOUR_MS,
        Some("24h") => 24 * HOUR_MS,
        Some("7d") => KEPT_MS,
        _ => query.integer("window", MINUTE_MS, KEPT_MS).unwrap_or(HOUR_MS),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_named_or_clamped_and_never_an_error() {
        for (query, expected_ms) in [
            ("", HOUR_MS),
            ("window=", HOUR_MS),
            ("window=1h", HOUR_MS),
            ("window=6h", 21_600_000),
            ("window=24h", 86_400_000),
            ("window=7d", 604_800_000),
            ("window=90000", 90_000),
            ("window=%2B90000", 90_000),
            ("window=59999", 60_000),
            ("window=60000", 60_000),
            ("window=0", 60_000),
            ("window=-90000", 60_000),
            ("window=604800000", 604_800_000),
            ("window=604800001", 604_800_000),
            ("window=99999999999999999999999999", 604_800_000),
            ("window=-99999999999999999999999999", 60_000),
            ("window=90000.5", HOUR_MS),
            ("window=9e4", HOUR_MS),
            ("window=2h", HOUR_MS),
            ("window=24H", HOUR_MS),
            ("window=%2024h", HOUR_MS),
            ("window=--90000", HOUR_MS),
            ("window=6h&window=7d", 21_600_000),
        ] {
            assert_eq!(window_ms(&QueryString::new(Some(query))), expected_ms, "{query}");
        }
    }
}
