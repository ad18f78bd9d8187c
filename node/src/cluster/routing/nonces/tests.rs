//! Claims of nonces, with exchanges of nonces between nodes meanwhile.

use futures_util::FutureExt as _;

use super::super::fixture::{PEER, RoutingTestNode};
use super::*;
use crate::cluster::inbound::Inbound as _;
use crate::cluster::link::PeerItem;
use crate::testing::SharedLocal;

fn nonce() -> Nonce {
    Nonce { key_name: "k1".into(), timestamp_ms: 5, nonce: "n".into() }
}

/// A node that remembers nonces together with a peer, and asks the peer after itself.
fn node() -> (RoutingTestNode, Arc<dyn LocalNode>) {
    let (node, local) = (RoutingTestNode::new(), SharedLocal::new(0, |_| None) as Arc<dyn LocalNode>);
    node.routing.set_local(Arc::clone(&local));
    node.has_a_link();
    node.finds_the_peer();
    node.routing.link(&node.peer, true);
    let mut quorum = node.routing.quorum.lock();
    quorum.begin();
    quorum.taken(PEER, true, &[], Instant::now());
    assert!(quorum.decide(true, Instant::now()));
    drop(quorum);
    (node, local)
}

fn peer_nonce(claim: u64) -> PeerNonce {
    PeerNonce { kept: ClaimedNonce { nonce: nonce(), age_ms: 0 }, claim: ClaimId::new(claim) }
}

/// True if the node answers to a peer that the nonce is new.
async fn is_first((node, local): &(RoutingTestNode, Arc<dyn LocalNode>), claim: u64) -> bool {
    let claimed = Arc::clone(&node.routing).claimed_by_peer(local, peer_nonce(claim)).await;
    let Some(PeerAnswer::Claimed(claimed)) = claimed else { panic!("{claimed:?}") };
    claimed.first
}

/// Returns the nonces that the node sends to another one.
async fn says((node, local): &(RoutingTestNode, Arc<dyn LocalNode>)) -> Vec<PeerNonce> {
    let known = Arc::clone(&node.routing).nonces_for_peer(local, None).await;
    let Some(PeerAnswer::Nonces(known)) = known else { panic!("{known:?}") };
    known.nonces
}

async fn hears((node, local): &(RoutingTestNode, Arc<dyn LocalNode>), nonces: Vec<PeerNonce>) {
    let kept = Arc::clone(&node.routing).nonces_from_peer(local, PEER, nonces, false).await;
    assert_eq!(kept, Some(PeerAnswer::Done));
}

#[tokio::test]
async fn node_joining_during_nonce_claim_accepts_that_same_claim() {
    let (responder, joining) = (node(), node());
    assert!(is_first(&responder, 1).await);
    hears(&joining, says(&responder).await).await;
    assert_eq!(says(&joining).await, [peer_nonce(1)]);
    assert!(is_first(&joining, 1).await);
    for other in [2, 0] {
        assert!(!is_first(&joining, other).await, "{other}");
        assert!(!is_first(&responder, other).await, "{other}");
    }
}

#[tokio::test]
async fn neither_of_two_received_claims_is_the_first() {
    for others in
        [[peer_nonce(1), peer_nonce(2)], [peer_nonce(1), peer_nonce(0)], [peer_nonce(0), peer_nonce(1)]]
    {
        let joining = node();
        for one in others {
            hears(&joining, vec![one]).await;
        }
        assert_eq!(says(&joining).await, [peer_nonce(0)]);
        for claim in [1, 2, 0] {
            assert!(!is_first(&joining, claim).await, "{claim}");
        }
    }
}

#[tokio::test]
async fn unanswered_nonce_claim_is_already_shared_with_peers() {
    let here = node();
    let (node, local) = &here;
    let mut claimed = Box::pin(node.routing.claim_nonce(nonce()));
    assert!(claimed.as_mut().now_or_never().is_none(), "the peer has not answered");
    assert_eq!(local.claim_nonce(nonce()).await, Some(false), "it is remembered here");
    let nonces = says(&here).await;
    let [own] = &*nonces else { panic!("{nonces:?}") };
    assert!(own.claim.is_some());
    let request = |number| PeerItem::request(number, &PeerRequest::Claim(own.clone()));
    let sent = node.says();
    assert!((0..100).any(|number| sent.contains(&request(number))), "{sent:?}");
}

#[tokio::test]
async fn a_node_is_asked_for_what_it_remembers_once_it_can_answer() {
    let node = RoutingTestNode::new();
    node.routing.set_local(SharedLocal::new(0, |_| None));
    node.has_a_link();
    node.finds_the_peer();
    node.routing.quorum.lock().begin();
    node.says();
    node.routing.take_nonces_over(Instant::now(), true).await;
    assert_eq!(node.says(), [], "its answer would be lost");
    node.receives_snapshot_end(0);
    node.says();
    assert!(node.routing.take_nonces_over(Instant::now(), true).now_or_never().is_none());
    assert_eq!(node.says().len(), 1);
}

#[tokio::test]
async fn node_joining_after_nonce_claim_hears_that_nonce_is_used() {
    let here = node();
    let (node, local) = &here;
    assert_eq!(local.claim_nonce(nonce()).await, Some(true));
    let long_ago = Instant::now() - Duration::from_secs(60);
    node.routing.nonce_claims.write().await.get_mut().record_remote(
        &nonce(),
        ClaimId::new(1),
        true,
        long_ago,
    );
    assert_eq!(says(&here).await, [peer_nonce(0)]);
}
