//! `GET /api/channels/{channel}/history` and `…/presence/history`.

use std::time::Duration;

use axum::body::HttpBody as _;
use axum::http::HeaderValue;
use axum::http::header::LINK;
use axum::response::Response;
use fanfare_proto::http::{history_body, presence_history_body};
use fanfare_proto::path::encode_channel;
use fanfare_proto::serial::Serial;

use super::query::QueryString;
use super::{Api, body};
use crate::auth::Principal;
use crate::edge::errors::HttpRefusal;
use crate::model::{Limits, Operation, Usage, UsageKind};
use crate::origin::history::{Direction, HistoryPage, HistoryPosition, HistoryQuery, RowKind, StoreError};
use crate::telemetry::{Limit, RATE_LIMITED};

/// A store that has not read a page within this time counts as unavailable.
const READ_WAIT: Duration = Duration::from_secs(10);

/// Upper bound of one record's bytes beside its message and the names and ids that clients give: field names, times and the like.
const RECORD_BYTES_MAX: usize = 4 * 1024;

/// Upper bound of a page. A page ends with the record that fills it.
pub(super) fn page_bytes_max(limits: &Limits) -> usize {
    limits.history_page_bytes + record_bytes_max(limits)
}

/// Parameters of a page, without its channel.
#[derive(Debug, Clone, PartialEq)]
struct HistoryPageRequest {
    limit: usize,
    start_ms: Option<u64>,
    end_ms: Option<u64>,
    cursor: Option<HistoryPosition>,
    direction: Option<Direction>,
    until: Option<Serial>,
}

/// Lists messages: newest first unless asked otherwise, no older than the channel's retention.
pub(super) async fn messages(
    api: &Api,
    principal: &Principal,
    channel: &str,
    query: Option<&str>,
) -> Result<Response, HttpRefusal> {
    rows(api, principal, channel, query, RowKind::Messages).await
}

/// Lists presence events. Empty on a node that keeps none.
pub(super) async fn presence(
    api: &Api,
    principal: &Principal,
    channel: &str,
    query: Option<&str>,
) -> Result<Response, HttpRefusal> {
    rows(api, principal, channel, query, RowKind::Presence).await
}

async fn rows(
    api: &Api,
    principal: &Principal,
    channel: &str,
    query: Option<&str>,
    kind: RowKind,
) -> Result<Response, HttpRefusal> {
    let key = api.allowed_channel(principal, channel, Operation::History)?;
    let page = HistoryPageRequest::parse(query, &api.services.limits)?;
    let policy = principal.account.policy(channel);
    if !policy.history {
        return Ok(body::json_text(list(kind, [])));
    }
    let now_ms = api.services.clock.expiry_ms();
    let query = HistoryQuery {
        key,
        kind,
        limit: page.limit,
        bytes_max: api.services.limits.history_page_bytes,
        start_ms: page.start_ms,
        end_ms: page.end_ms,
        oldest_ms: policy.oldest_ms(now_ms),
        cursor: page.cursor,
        direction: page.direction.unwrap_or_default(),
        // A serial is a position in messages.
        until: page.until.clone().filter(|_| kind == RowKind::Messages).map(|serial| until(api, serial)),
    };
    let limits = &api.services.limits;
    let bytes_max = page_bytes_max(limits).min(query.limit.saturating_mul(record_bytes_max(limits)));
    let permit = api.answers.take(&principal.account.id, bytes_max).await;
    let permit = permit.inspect_err(|_| Limit::HttpAnswersBytes.hit())?;
    let found = match read_full(api, query).await {
        Err(StoreError::Off) if kind == RowKind::Presence => HistoryPage::default(),
        found => found?,
    };
    let mut response = page.answer(kind, channel, &found);
    let bytes = usize::try_from(response.body().size_hint().lower()).unwrap_or(usize::MAX);
    response.extensions_mut().insert(permit.at_most(bytes));
    Ok(response)
}

/// Upper bound of one record. Names may be twice as long as JSON texts.
fn record_bytes_max(limits: &Limits) -> usize {
    let names = limits.channel_name_bytes + limits.message_id_bytes + limits.client_id_bytes;
    limits.message_bytes.max(limits.presence_data_bytes) + 2 * names + RECORD_BYTES_MAX
}

/// Completes a position of an earlier incarnation: all messages of later incarnations come after it. A position of an unknown incarnation
/// comes before the messages of all known ones.
fn until(api: &Api, mut serial: Serial) -> Serial {
    let own = api.services.hub.incarnation();
    for incarnation in std::iter::once(&own).chain(&api.services.earlier_incarnations) {
        if serial.sequence_of(*incarnation).is_some() {
            break;
        }
        serial.advance(*incarnation, 0);
    }
    serial
}

/// Reads a full page. A store may return less, if further rows are far away or filtered out; a few further reads fill the page then, so
/// that a client that follows no links still gets what it asked for.
async fn read_full(api: &Api, mut query: HistoryQuery) -> Result<HistoryPage, StoreError> {
    const READS_MAX: usize = 8;
    let mut page = HistoryPage::default();
    for _ in 0..READS_MAX {
        let read = tokio::time::timeout(READ_WAIT, read_settled(api, &query)).await;
        let read = read.unwrap_or_else(|_| Err(StoreError::Failed("no answer in time".to_owned())));
        let more = read.inspect_err(|error| {
            if let StoreError::Failed(reason) = error {
                tracing::error!(target: RATE_LIMITED, reason, "history read failed");
            }
        })?;
        let bytes = more.rows.iter().map(|row| row.json.len()).sum();
        query.bytes_max = query.bytes_max.saturating_sub(bytes);
        query.limit = query.limit.saturating_sub(more.rows.len());
        query.cursor.clone_from(&more.next);
        page.rows.extend(more.rows);
        page.next = more.next;
        if page.next.is_none() || query.limit == 0 || query.bytes_max == 0 {
            break;
        }
    }
    Ok(page)
}

/// Reads after pending writes if the page ends at an attach position. Otherwise a message that was published before the attach, and is
/// still being written, would be missing both here and in the deliveries.
async fn read_settled(api: &Api, query: &HistoryQuery) -> Result<HistoryPage, StoreError> {
    if query.until.is_some() {
        api.services.store.flush().await?;
    }
    api.services.store.read(query.clone()).await
}

fn list<'a>(kind: RowKind, rows: impl IntoIterator<Item = &'a str, IntoIter: Clone>) -> Vec<u8> {
    match kind {
        RowKind::Messages => history_body(rows),
        RowKind::Presence => presence_history_body(rows),
    }
}

/// Counts the usage of a page that is about to be sent.
pub(super) fn counted(usage: &Usage, page: Response) -> Response {
    usage.count(UsageKind::HistoryRead, 1, page.body().size_hint().lower());
    page
}

impl HistoryPageRequest {
    fn parse(query: Option<&str>, limits: &Limits) -> Result<Self, HttpRefusal> {
        let query = QueryString::new(query);
        Ok(Self {
            limit: query.limit(limits),
            start_ms: field(&query, "start", "epoch milliseconds", epoch_ms)?,
            end_ms: field(&query, "end", "epoch milliseconds", epoch_ms)?,
            cursor: field(&query, "cursor", "a cursor from a link", |text| text.parse().ok())?,
            direction: field(&query, "direction", "backwards or forwards", direction)?,
            until: field(&query, "until", "a serial", |text| text.parse().ok())?,
        })
    }

    fn answer(&self, kind: RowKind, channel: &str, found: &HistoryPage) -> Response {
        let mut response = body::json_text(list(kind, found.rows.iter().map(|row| &*row.json)));
        if let Some(next) = &found.next
            && let Ok(link) = HeaderValue::try_from(self.link(kind, channel, next))
        {
            response.headers_mut().insert(LINK, link);
        }
        response
    }

    /// Link to the next page, with the same parameters.
    fn link(&self, kind: RowKind, channel: &str, next: &HistoryPosition) -> String {
        let mut query = form_urlencoded::Serializer::new(String::new());
        query.append_pair("limit", &self.limit.to_string());
        if let Some(start_ms) = self.start_ms {
            query.append_pair("start", &start_ms.to_string());
        }
        if let Some(end_ms) = self.end_ms {
            query.append_pair("end", &end_ms.to_string());
        }
        if let Some(direction) = self.direction {
            query.append_pair("direction", direction_name(direction));
        }
        if let Some(until) = &self.until {
            query.append_pair("until", &until.to_string());
        }
        query.append_pair("cursor", &next.to_string());
        let (channel, query) = (encode_channel(channel), query.finish());
        let operation = match kind {
            RowKind::Messages => "history",
            RowKind::Presence => "presence/history",
        };
        format!("</api/channels/{channel}/{operation}?{query}>; rel=\"next\"")
    }
}

fn field<T>(
    query: &QueryString<'_>,
    name: &str,
    shape: &str,
    read: impl FnOnce(&str) -> Option<T>,
) -> Result<Option<T>, HttpRefusal> {
    let Some(text) = query.first(name) else { return Ok(None) };
    read(&text).map(Some).ok_or_else(|| HttpRefusal::malformed(format!("{name} must be {shape}")))
}

fn epoch_ms(text: &str) -> Option<u64> {
    if text.starts_with('+') {
        return None;
    }
    text.parse().ok()
}

fn direction(text: &str) -> Option<Direction> {
    [Direction::Backwards, Direction::Forwards]
        .into_iter()
        .find(|direction| direction_name(*direction) == text)
}

fn direction_name(direction: Direction) -> &'static str {
    match direction {
        Direction::Backwards => "backwards",
        Direction::Forwards => "forwards",
    }
}
