//! How many connections of other nodes are attached to channels: asked when somebody wants to know, and kept nowhere.

use std::time::Duration;

use super::super::inbound::{Answer, Request};
use super::Routing;
use crate::model::{AttachedCount, ChannelKey};

/// A node that has not answered by then does not count.
const WAIT: Duration = Duration::from_secs(1);

impl Routing {
    /// The connections that are attached to each of these channels on all other nodes together. None when one of them has not answered
    /// within a second, or is of a version that cannot.
    pub async fn attached(&self, keys: &[ChannelKey]) -> Option<Vec<AttachedCount>> {
        let request = Request::Attached(keys.to_vec());
        let answers = tokio::time::timeout(WAIT, self.ask_everyone(&request)).await.ok().flatten()?;
        let mut all = vec![AttachedCount::default(); keys.len()];
        for answer in answers {
            let Answer::Attached(counts) = answer else { return None };
            if counts.len() != all.len() {
                return None;
            }
            all.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        Some(all)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::Inbound as _;
    use super::super::super::link::Item;
    use super::super::fixture::Node;
    use super::*;

    const COUNT: AttachedCount =
        AttachedCount { connections: 3, publishers: 2, subscribers: 1, is_told: true };

    /// The node's count from the answer of its only peer.
    async fn answered(answer: Answer) -> Option<Vec<AttachedCount>> {
        let node = Node::new();
        node.has_a_link();
        node.finds_the_peer();
        node.says();
        let keys = [node.key.clone()];
        let asking = node.routing.attached(&keys);
        let answering = async {
            let asked = node.says();
            let request = Request::Attached(keys.to_vec());
            let number = (0..99).find(|number| asked.contains(&Item::request(*number, &request)));
            node.routing.answered(&node.peer, number.expect("it is asked"), answer);
        };
        tokio::join!(asking, answering).0
    }

    #[tokio::test]
    async fn the_sum_needs_an_answer_of_the_peer() {
        assert_eq!(answered(Answer::Attached(vec![COUNT])).await, Some(vec![COUNT]));
        assert_eq!(answered(Answer::Attached(Vec::new())).await, None);
        assert_eq!(answered(Answer::Unknown).await, None, "the peer is of an earlier version");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_ends_the_wait_after_a_second() {
        let node = Node::new();
        let keys = [node.key.clone()];
        assert_eq!(node.routing.attached(&keys).await, Some(vec![AttachedCount::default()]), "it is alone");
        node.has_a_link();
        node.finds_the_peer();
        let begun = tokio::time::Instant::now();
        assert_eq!(node.routing.attached(&keys).await, None);
        assert_eq!(begun.elapsed(), WAIT);
        node.loses_its_links();
        assert_eq!(node.routing.attached(&keys).await, None);
        assert_eq!(begun.elapsed(), WAIT, "nobody waits for one without a link");
    }
}
