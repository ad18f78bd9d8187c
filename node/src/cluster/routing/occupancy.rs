//! Attached connections of channels at other nodes: requested when they are needed, and not stored.

use std::time::Duration;

use super::super::inbound::{PeerAnswer, PeerRequest};
use super::Routing;
use crate::model::{AttachedCount, ChannelKey};

/// Time for the answers of all nodes.
const WAIT: Duration = Duration::from_secs(1);

impl Routing {
    /// Sums the connections that are attached to each of these channels on all other nodes. None if a node has not answered within a
    /// second, or is of an older version.
    pub async fn attached(&self, keys: &[ChannelKey]) -> Option<Vec<AttachedCount>> {
        let request = PeerRequest::Attached(keys.to_vec());
        let answers = tokio::time::timeout(WAIT, self.ask_all_peers(&request)).await.ok().flatten()?;
        let mut all = vec![AttachedCount::default(); keys.len()];
        for answer in answers {
            let PeerAnswer::Attached(counts) = answer else { return None };
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
    use super::super::super::link::PeerItem;
    use super::super::fixture::RoutingTestNode;
    use super::*;

    const COUNT: AttachedCount =
        AttachedCount { connections: 3, publishers: 2, subscribers: 1, is_announced: true };

    /// The node's count from the answer of its only peer.
    async fn answered(answer: PeerAnswer) -> Option<Vec<AttachedCount>> {
        let node = RoutingTestNode::new();
        node.has_a_link();
        node.finds_the_peer();
        node.says();
        let keys = [node.key.clone()];
        let query = node.routing.attached(&keys);
        let answering = async {
            let requests = node.says();
            let request = PeerRequest::Attached(keys.to_vec());
            let number = (0..99).find(|number| requests.contains(&PeerItem::request(*number, &request)));
            node.routing.answer_received(&node.peer, number.expect("it is asked"), answer);
        };
        tokio::join!(query, answering).0
    }

    #[tokio::test]
    async fn the_sum_needs_an_answer_of_the_peer() {
        assert_eq!(answered(PeerAnswer::Attached(vec![COUNT])).await, Some(vec![COUNT]));
        assert_eq!(answered(PeerAnswer::Attached(Vec::new())).await, None);
        assert_eq!(answered(PeerAnswer::Unknown).await, None, "the peer is of an earlier version");
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_peer_ends_the_wait_after_a_second() {
        let node = RoutingTestNode::new();
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
