//! What one node revokes no node takes: it is told all at once, and whoever is linked to anew is told what is in force.

use std::time::Duration;

use futures_util::future::join_all;

use super::super::inbound::{Answer, Request};
use super::Routing;
use super::nonces::PART_WAIT;
use crate::model::Revocation;
use crate::tasks::OnStop;

/// Who revokes waits no longer for a node that does not answer.
const REVOKE_WAIT: Duration = Duration::from_millis(1_500);
/// Revocations in one request.
const PART: usize = 1_000;
/// Parts that go before a peer is told all that is wanted here, and so before it serves. Further ones wait for each other, so
/// that they fit into the lane.
const PARTS_AT_ONCE: usize = 32;

impl Routing {
    /// Tells every node that can be reached, also while gossip is silent about it: its link stays, so it would not be told later. False when one of them can, and does not remember it in time: it may be in force there.
    pub async fn revoke(&self, revocation: Revocation) -> bool {
        let request = &Request::Revoke(vec![revocation]);
        let told = self.linked().into_iter().map(|peer| async move {
            let answer = self.ask_one(peer, 0, request, REVOKE_WAIT).await;
            // Whose link is down by now is told when it is up again.
            answer == Some(Answer::Done) || !self.is_up(peer)
        });
        join_all(told).await.into_iter().all(|is_told| is_told)
    }

    /// The link to the peer is up.
    pub(super) fn say_revocations(&self, to: u64) {
        let Some(local) = self.local.get() else { return };
        let in_force = local.revocations();
        let mut parts: Vec<Request> =
            in_force.chunks(PART).map(|part| Request::Revoke(part.to_vec())).collect();
        let rest = parts.split_off(parts.len().min(PARTS_AT_ONCE));
        for part in parts {
            drop(self.ask(vec![to], 0, &part));
        }
        let Some(routing) = self.this.upgrade().filter(|_| !rest.is_empty()) else { return };
        self.tasks.spawn("revocations", OnStop::Cancel, async move {
            for part in rest {
                if routing.ask_one(to, 0, &part, PART_WAIT).await.is_none() {
                    // It is told all when its link is up again.
                    return;
                }
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::PeerAddr;
    use super::super::fixture::Node;
    use super::*;

    #[tokio::test]
    async fn linked_peer_is_asked_to_revoke_though_gossip_is_silent() {
        let node = Node::new();
        let revocation = || Revocation { key_name: "k1".into(), client_id: None, issued_before_ms: 1 };
        for (has_link, is_everywhere) in [(false, true), (true, false)] {
            let addr = ([127, 0, 0, 1], 1).into();
            node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
            if has_link {
                node.has_a_link();
            }
            let revoked = node.routing.revoke(revocation()).await;
            assert_eq!(revoked, is_everywhere, "it answers nothing, if it is asked");
        }
    }
}
