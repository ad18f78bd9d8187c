//! `GET /api/metrics/series`: what was counted for the caller's account.

use std::time::Duration;

use axum::response::Response;
use fanfare_proto::http::{MetricRow, MetricSeries};

use super::query::Query;
use super::{Api, body};
use crate::auth::Principal;
use crate::edge::errors::Refusal;
use crate::origin::history::StoreError;
use crate::origin::metering::{KEPT_MS, MINUTE_MS, sum_nodes};

const HOUR_MS: u64 = 60 * MINUTE_MS;
/// A store that has not read the rows by then is taken for gone.
const READ_WAIT: Duration = Duration::from_secs(10);

/// One row for each minute, node and kind, the running minute included; with `aggregate=sum` over all nodes.
pub(super) async fn series(
    api: &Api,
    principal: &Principal,
    query: Option<&str>,
) -> Result<Response, Refusal> {
    let query = Query::new(query);
    let window_ms = window_ms(&query);
    let sum = match query.first("aggregate").as_deref() {
        None => false,
        Some("sum") => true,
        Some(_) => return Err(Refusal::malformed("aggregate must be sum")),
    };
    let account = &principal.account.id;
    let read = tokio::time::timeout(READ_WAIT, api.services.meter.series(account, window_ms)).await;
    let read = read.unwrap_or_else(|_| Err(StoreError::Failed("no answer in time".to_owned())));
    let points = read.inspect_err(|error| tracing::error!(%error, "metric rows could not be read"))?;
    let points = if sum { sum_nodes(points) } else { points };
    let rows = points.iter().map(|point| MetricRow {
        account_id: account.as_str(),
        minute: point.minute_ms,
        node_id: &point.node_id,
        kind: point.kind.as_str(),
        count: point.amount.count,
        bytes: point.amount.bytes,
    });
    Ok(body::json(&MetricSeries { series: rows.collect(), window_ms }))
}

/// What cannot be read is an hour, never an error.
fn window_ms(query: &Query<'_>) -> u64 {
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
            assert_eq!(window_ms(&Query::new(Some(query))), expected_ms, "{query}");
        }
    }
}
