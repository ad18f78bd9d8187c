//! Revocations of tokens: sent to all nodes at once, and in full to each peer with a new link.

use std::time::Duration;

use futures_util::future::join_all;

use super::super::inbound::{PeerAnswer, PeerRequest};
use super::Routing;
use super::nonces::PART_WAIT;
use crate::model::Revocation;
use crate::tasks::OnStop;

/// Longest time for which a revocation waits for the answer of a node.
const REVOKE_WAIT: Duration = Duration::from_millis(1_500);
/// Revocations in one request.
const PART: usize = 1_000;
/// Parts that are sent before the interest snapshot, and so before the peer serves. Further ones are sent one by one, so that they fit
/// into the peer queue.
const PARTS_AT_ONCE: usize = 32;

impl Routing {
    /// Sends a revocation to every node with a link, also to one that gossip does not see: while its link stays up, it would not learn of
    /// the revocation later. False if such a node does not confirm in time, as it may still accept the tokens.
    pub async fn revoke(&self, revocation: Revocation) -> bool {
        let request = &PeerRequest::Revoke(vec![revocation]);
        let confirmations = self.linked().into_iter().map(|peer| async move {
            let answer = self.ask_one(peer, 0, request, REVOKE_WAIT).await;
            // A peer whose link is down by now gets all revocations when the link is up again.
            answer == Some(PeerAnswer::Done) || !self.is_up(peer)
        });
        join_all(confirmations).await.into_iter().all(|is_confirmed| is_confirmed)
    }

    /// Sends all revocations in force to a peer whose link is up.
    pub(super) fn send_revocations(&self, to: u64) {
        let Some(local) = self.local.get() else { return };
        let in_force = local.revocations();
        let mut parts: Vec<PeerRequest> =
            in_force.chunks(PART).map(|part| PeerRequest::Revoke(part.to_vec())).collect();
        let rest = parts.split_off(parts.len().min(PARTS_AT_ONCE));
        for part in parts {
            drop(self.ask(vec![to], 0, &part));
        }
        let Some(routing) = self.this.upgrade().filter(|_| !rest.is_empty()) else { return };
        self.tasks.spawn("revocations", OnStop::Cancel, async move {
            for part in rest {
                if routing.ask_one(to, 0, &part, PART_WAIT).await.is_none() {
                    // The peer gets all parts again when its link is back.
                    return;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::PeerAddr;
    use super::super::fixture::RoutingTestNode;
    use super::*;

    #[tokio::test]
    async fn linked_peer_is_asked_to_revoke_though_gossip_is_silent() {
        let node = RoutingTestNode::new();
        let revocation = || Revocation { key_name: "k1".into(), client_id: None, issued_before_ms: 1 };
        for (has_link, is_confirmed) in [(false, true), (true, false)] {
            let addr = ([127, 0, 0, 1], 1).into();
            node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
            if has_link {
                node.has_a_link();
            }
            let revoked = node.routing.revoke(revocation()).await;
            assert_eq!(revoked, is_confirmed, "it answers nothing, if it is asked");
        }
    }
}
