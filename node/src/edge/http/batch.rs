//! `POST /api/publish`: the same messages to several channels, each with its own result.

use std::future::poll_fn;
use std::task::Poll;

use axum::response::Response;
use fanfare_proto::http::{BatchRequest, BatchResponse, BatchResult, parse_batch};

use super::Api;
use super::body::{self, UnreadBody};
use super::publish::publish_and_store;
use crate::auth::Principal;
use crate::edge::errors::{HttpRefusal, RefusalKind};
use crate::model::{ChannelKey, Draft, DraftError, Operation, draft_bytes};
use crate::telemetry::{Limit, TraceSpan};

/// Upper bound of one result's bytes beside the name of its channel.
const RESULT_BYTES_MAX: usize = 256;

/// Channels that are published to concurrently, so that they share a sync of the store; fewer if their copies are large.
const TOGETHER_MAX: usize = 32;
const TOGETHER_BYTES_MAX: usize = 1024 * 1024;

/// Publishes to each channel. Answers 200 with one result per channel, in the order of the request, refusals included.
pub(super) async fn publish(
    api: &Api,
    principal: &Principal,
    body: UnreadBody,
    span: &TraceSpan,
) -> Result<Response, HttpRefusal> {
    let text = body.read(api, &principal.account.id, api.services.limits.http_body_bytes).await?;
    let limits = &api.services.limits;
    let BatchRequest { channels, messages } =
        parse_batch(&text, limits.nesting, limits.publish_messages).map_err(body::refused)?;
    let results_bytes = text.len() + channels.len() * RESULT_BYTES_MAX;
    let _share = text.into_permit();
    if channels.len() > limits.batch_channels {
        Limit::BatchChannels.hit();
        let error = format!("channels holds more than {} names", limits.batch_channels);
        return Err(HttpRefusal::malformed(error));
    }
    let target = |channel: &String| api.allowed_channel(principal, channel, Operation::Publish);
    let targets: Vec<_> = channels.iter().map(target).collect();
    let permitted = targets.iter().filter(|target| target.is_ok()).count();
    let messages_max = api.services.limits.publish_messages;
    if permitted * messages.len() > messages_max {
        Limit::PublishMessages.hit();
        return Err(DraftError::TooMany { messages_max }.into());
    }
    let copy_bytes: usize =
        messages.iter().map(|draft| draft_bytes(draft, principal.client_id.as_ref())).sum();
    let bytes_max = limits.batch_bytes;
    if permitted.saturating_mul(copy_bytes) > bytes_max {
        Limit::BatchBytes.hit();
        let error = format!("the messages to all channels together are over {bytes_max} bytes");
        return Err(HttpRefusal::new(RefusalKind::TooLarge, error));
    }
    api.take_rate(principal, permitted * messages.len())?;
    // Before anything is published, so that the results can be reported in any case.
    let permit = api.answers.take(&principal.account.id, results_bytes).await;
    let permit = permit.inspect_err(|_| Limit::HttpAnswersBytes.hit())?;
    let together = (TOGETHER_BYTES_MAX / copy_bytes.max(1)).clamp(1, TOGETHER_MAX);
    let results = publish_each(api, (principal, span), targets, &messages, together).await;
    let results = channels.into_iter().zip(results).map(|(channel, published)| result(channel, published));
    let mut response = body::json(&BatchResponse { results: results.collect() });
    response.extensions_mut().insert(permit);
    Ok(response)
}

async fn publish_each(
    api: &Api,
    (principal, span): (&Principal, &TraceSpan),
    targets: Vec<Result<ChannelKey, HttpRefusal>>,
    messages: &[Draft],
    together: usize,
) -> Vec<Result<(), HttpRefusal>> {
    let mut results = Vec::with_capacity(targets.len());
    let mut targets = targets.into_iter().peekable();
    while targets.peek().is_some() {
        let next = targets.by_ref().take(together);
        let published = next.map(|target| async {
            publish_and_store(api, principal, target?, messages.to_vec(), span).await
        });
        results.extend(join(published).await);
    }
    results
}

/// Runs all futures. Returns their outputs in order.
async fn join<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    poll_fn(|context| {
        let mut waiting = false;
        for (future, output) in &mut running {
            if output.is_none() {
                match future.as_mut().poll(context) {
                    Poll::Ready(value) => *output = Some(value),
                    Poll::Pending => waiting = true,
                }
            }
        }
        if waiting { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    running.into_iter().filter_map(|(_, output)| output).collect()
}

fn result(channel: String, published: Result<(), HttpRefusal>) -> BatchResult {
    match published {
        Ok(()) => BatchResult::Published { channel, published: true },
        Err(refusal) => {
            BatchResult::Refused { channel, error: refusal.error.into_owned(), status: refusal.kind.status() }
        }
    }
}
