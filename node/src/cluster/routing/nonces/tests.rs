//! Claims of nonces, and what nodes tell each other of those meanwhile.

use futures_util::FutureExt as _;

use super::super::fixture::{Node, PEER};
use super::*;
use crate::cluster::inbound::Inbound as _;
use crate::cluster::link::Item;
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

fn told(claim: u64) -> ToldNonce {
    ToldNonce { kept: KeptNonce { nonce: nonce(), age_ms: 0 }, claim: ClaimId::new(claim) }
}

/// Whether the nonce is new to the node, which a peer asks.
async fn is_first((node, local): &(Node, Arc<dyn Local>), claim: u64) -> bool {
    let claimed = Arc::clone(&node.routing).claimed_by_peer(local, told(claim)).await;
    let Some(Answer::Claimed(claimed)) = claimed else { panic!("{claimed:?}") };
    claimed.first
}

/// What the node tells another one.
async fn says((node, local): &(Node, Arc<dyn Local>)) -> Vec<ToldNonce> {
    let known = Arc::clone(&node.routing).nonces_for_peer(local, None).await;
    let Some(Answer::Nonces(known)) = known else { panic!("{known:?}") };
    known.nonces
}

async fn hears((node, local): &(Node, Arc<dyn Local>), told: Vec<ToldNonce>) {
    let kept = Arc::clone(&node.routing).nonces_from_peer(local, PEER, told, false).await;
    assert_eq!(kept, Some(Answer::Done));
}

#[tokio::test]
async fn node_joining_during_nonce_claim_accepts_that_same_claim() {
    let (asked, joining) = (node(), node());
    assert!(is_first(&asked, 1).await);
    hears(&joining, says(&asked).await).await;
    assert_eq!(says(&joining).await, [told(1)]);
    assert!(is_first(&joining, 1).await);
    for other in [2, 0] {
        assert!(!is_first(&joining, other).await, "{other}");
        assert!(!is_first(&asked, other).await, "{other}");
    }
}

#[tokio::test]
async fn of_two_claims_that_are_heard_of_none_is_the_first() {
    for others in [[told(1), told(2)], [told(1), told(0)], [told(0), told(1)]] {
        let joining = node();
        for told in others {
            hears(&joining, vec![told]).await;
        }
        assert_eq!(says(&joining).await, [told(0)]);
        for claim in [1, 2, 0] {
            assert!(!is_first(&joining, claim).await, "{claim}");
        }
    }
}

#[tokio::test]
async fn a_peer_is_told_whose_a_nonce_is_before_it_is_asked() {
    let here = node();
    let (node, local) = &here;
    let mut claimed = Box::pin(node.routing.claim_nonce(nonce()));
    assert!(claimed.as_mut().now_or_never().is_none(), "the peer has not answered");
    assert_eq!(local.claim_nonce(nonce()).await, Some(false), "it is remembered here");
    let told = says(&here).await;
    let [own] = &*told else { panic!("{told:?}") };
    assert!(own.claim.is_some());
    let asked = |number| Item::request(number, &Request::Claim(own.clone()));
    let sent = node.says();
    assert!((0..100).any(|number| sent.contains(&asked(number))), "{sent:?}");
}

#[tokio::test]
async fn a_node_is_asked_for_what_it_remembers_once_it_can_answer() {
    let node = Node::new();
    node.routing.set_local(SharedLocal::new(0, |_| None));
    node.has_a_link();
    node.finds_the_peer();
    node.routing.quorum.lock().begin();
    node.says();
    node.routing.take_nonces_over(Instant::now(), true).await;
    assert_eq!(node.says(), [], "its answer would be lost");
    node.is_told_all(0);
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
    node.routing.noted.write().await.get_mut().heard(&nonce(), ClaimId::new(1), true, long_ago);
    assert_eq!(says(&here).await, [told(0)]);
}
