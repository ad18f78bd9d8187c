//! Claims of nonces, and what nodes tell each other of those meanwhile.

use futures_util::FutureExt as _;

use super::super::fixture::{Node, PEER};
use super::*;
use crate::cluster::inbound::Inbound as _;
use crate::testing::SharedLocal;

fn nonce() -> Nonce {
    Nonce { key_name: "k1".into(), timestamp_ms: 5, nonce: "n".into() }
}

/// A node that remembers nonces together with a peer, which is asked after it.
fn node() -> (Node, Arc<dyn Local>) {
    let (node, local) = (Node::new(), SharedLocal::new(0, |_| None) as Arc<dyn Local>);
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

#[tokio::test]
async fn a_peer_is_not_told_of_a_claim_before_it_is_asked() {
    let (node, local) = node();
    let mut claimed = Box::pin(node.routing.claim_nonce(nonce()));
    assert!(claimed.as_mut().now_or_never().is_none(), "the peer has not answered");
    assert_eq!(local.claim_nonce(nonce()).await, Some(false), "it is remembered here");
    let mut told = Arc::clone(&node.routing).nonces_for_peer(&local, None);
    assert!(told.as_mut().now_or_never().is_none());
    drop(claimed);
    let Some(Answer::Nonces(known)) = told.await else { panic!("nothing is told") };
    assert_eq!(known.page.nonces.first().map(|kept| &kept.nonce), Some(&nonce()));
}

#[tokio::test]
async fn what_a_peer_tells_does_not_overtake_a_claim() {
    let (node, local) = node();
    let mut claimed = Box::pin(node.routing.claim_nonce(nonce()));
    assert!(claimed.as_mut().now_or_never().is_none(), "the peer has not answered");
    let told = vec![KeptNonce { nonce: Nonce { nonce: "m".into(), ..nonce() }, age_ms: 1 }];
    let mut kept = Arc::clone(&node.routing).nonces_from_peer(&local, PEER, told, false);
    assert!(kept.as_mut().now_or_never().is_none());
    drop(claimed);
    assert_eq!(kept.await, Some(Answer::Done));
}
