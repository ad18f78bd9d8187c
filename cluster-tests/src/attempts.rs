//! Events on their way to targets: the attempts that a target receives, and the time at which a node has sent all.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use serde_json::Value;

use crate::{Node, wait_until};

/// Greatest time until a further attempt, after a few that failed.
const SENT: Duration = Duration::from_secs(60);

/// Waits until no event of the node is in its outbox.
pub async fn until_sent(node: &Node) {
    let waiting = async || {
        let states = node.operate("GET", "/outbox").await.json();
        let targets = states["targets"].as_array().expect("targets").clone();
        targets.iter().map(|target| target["waitingEvents"].as_u64().expect("a count")).sum::<u64>()
    };
    wait_until(SENT, "an empty outbox", async || waiting().await == 0).await;
}

/// Fails the test unless the attempts, each an event id with its body, repeat whole batches: an event id has one body, and an item of
/// a channel is in one batch alone, once. Attempts that the target refused or left without an answer count too.
pub fn assert_whole_batches<'a>(target: &str, attempts: impl IntoIterator<Item = (&'a str, &'a [u8])>) {
    let (mut bodies, mut items) = (HashMap::new(), HashSet::new());
    for (event_id, body) in attempts {
        assert!(!event_id.is_empty(), "{target}: an attempt has no event id");
        if let Some(first) = bodies.insert(event_id, body) {
            assert!(first == body, "{target}: a retry of {event_id} has other bytes");
            continue;
        }
        for (channel, id) in items_of(body) {
            let is_first = items.insert((channel.clone(), id.clone()));
            assert!(is_first, "{target}: {id} of {channel:?} is in two batches, one of them {event_id}");
        }
    }
}

/// Gives channel and id of each item of an envelope. A presence event has no id, so its text stands for it.
fn items_of(body: &[u8]) -> Vec<(String, String)> {
    let envelope: Value = serde_json::from_slice(body).expect("an envelope");
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let channel = text(&envelope["channel"]);
    let items = envelope["items"].as_array().expect("items");
    assert!(!items.is_empty(), "an envelope without items: {envelope}");
    let id = |item: &Value| item["id"].as_str().map_or_else(|| item.to_string(), str::to_owned);
    items.iter().map(|item| (channel.clone(), id(item))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(attempts: &[(&str, &str)]) {
        assert_whole_batches("t", attempts.iter().map(|(id, body)| (*id, body.as_bytes())));
    }

    const ONE: &str = r#"{"channel":"a","items":[{"id":"1"}]}"#;
    const BOTH: &str = r#"{"channel":"a","items":[{"id":"1"},{"id":"2"}]}"#;

    #[test]
    fn repeated_batches_and_other_channels_are_good() {
        check(&[("e1", ONE), ("e1", ONE), ("e2", r#"{"channel":"b","items":[{"id":"1"}]}"#)]);
    }

    #[test]
    #[should_panic(expected = "other bytes")]
    fn other_body_of_an_event_id_fails() {
        check(&[("e1", ONE), ("e1", BOTH)]);
    }

    #[test]
    #[should_panic(expected = "in two batches")]
    fn item_under_two_event_ids_fails() {
        check(&[("e1", ONE), ("e2", BOTH)]);
    }

    #[test]
    #[should_panic(expected = "in two batches")]
    fn item_twice_in_a_batch_fails() {
        check(&[("e1", r#"{"channel":"a","items":[{"id":"1"},{"id":"1"}]}"#)]);
    }
}
