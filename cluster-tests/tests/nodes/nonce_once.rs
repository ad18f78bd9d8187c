//! A token request is good for one token in the whole cluster, at any node, over failures, restarts, joins and drains.
//! If that cannot be known, no token is issued.

use fanfare_client::sign::{self, TokenParams};
use fanfare_cluster_tests::clock::{self, ShiftedClock};
use fanfare_cluster_tests::cluster::{Cluster, cut_off, until_peers_down};
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::{Node, Response, SOON, http, wait_for, wait_until};

const KEY: &str = "secret.k1";
const USED: &str = "token request nonce has been used";
const UNAVAILABLE: &str = "token requests cannot be recorded at present";

/// Makes a signed TokenRequest in the form of its POST body.
fn request() -> String {
    let params = TokenParams { timestamp_ms: Some(clock::now_ms()), ..TokenParams::default() };
    let request = sign::token_request(&KEY.parse().expect("a key"), params).expect("a request");
    serde_json::to_string(&request).expect("JSON")
}

async fn exchange(node: &Node, request: &str) -> Response {
    http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], request.to_owned()).await
}

/// Exchanges a request that is granted, perhaps after others that too few nodes have remembered in time.
async fn assert_granted(node: &Node, what: &str) -> String {
    wait_for(SOON, what, async || {
        let request = request();
        let answer = exchange(node, &request).await;
        if answer.status == 200 {
            return Some(request);
        }
        assert_eq!((answer.status, answer.error().as_str()), (503, UNAVAILABLE), "{what}");
        None
    })
    .await
}

async fn assert_refused(node: &Node, request: &str, status: u16, sentence: &str, what: &str) {
    let answer = exchange(node, request).await;
    assert_eq!((answer.status, answer.error().as_str()), (status, sentence), "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_issue_at_most_one_token_for_a_request() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    const ROUNDS: usize = 40;
    let mut granted = 0;
    for round in 0..ROUNDS {
        let request = request();
        let [a, b, c] = &*nodes else { panic!("three nodes were started") };
        let (a, b, c) = tokio::join!(exchange(a, &request), exchange(b, &request), exchange(c, &request));
        let answers = [a, b, c];
        let tokens = answers.iter().filter(|answer| answer.status == 200).count();
        assert!(tokens <= 1, "{round}: {answers:?}");
        granted += tokens;
        for answer in answers.iter().filter(|answer| answer.status != 200) {
            // A machine that is too busy to answer in time issues no token either.
            let refused = (answer.status, answer.error());
            assert!(refused == (401, USED.into()) || refused == (503, UNAVAILABLE.into()), "{refused:?}");
        }
        for node in &*nodes {
            assert_refused(node, &request, 401, USED, "later").await;
        }
    }
    assert!(2 * granted > ROUNDS, "{granted}");
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_remember_nonces_of_a_killed_node() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut used = Vec::new();
    for node in &*nodes {
        used.push(assert_granted(node, "all are there").await);
    }
    nodes[1].kill();
    used.push(assert_granted(&nodes[0], "two of three are a majority").await);
    for node in [&nodes[0], &nodes[2]] {
        for request in &used {
            assert_refused(node, request, 401, USED, "beside the killed").await;
        }
    }
    nodes[1].restart().await;
    for request in &used {
        assert_refused(&nodes[1], request, 401, USED, "started again").await;
    }
    assert_granted(&nodes[1], "started again").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn joining_node_knows_nonces_used_before() {
    let mut cluster = Cluster::linked(2).await;
    let mut used = Vec::new();
    for node in cluster.nodes() {
        used.push(assert_granted(node, "two nodes").await);
    }
    cluster.add(|options| options).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    used.push(assert_granted(n2, "as soon as it is ready").await);
    // No other node is left to ask.
    n0.kill();
    n1.kill();
    for request in &used {
        assert_refused(n2, request, 401, USED, "left alone").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_minority_issues_nothing_not_even_after_a_restart() {
    let mut cluster = Cluster::linked(3).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let used = assert_granted(n1, "three nodes").await;
    // The node has stored the peers that it has seen.
    wait_until(SOON, "both to be kept", async || {
        let kept = std::fs::read_to_string(n2.data_dir().join("peers.json")).unwrap_or_default();
        kept.contains("n0") && kept.contains("n1")
    })
    .await;
    n0.kill();
    n1.kill();
    assert_refused(n2, &request(), 503, UNAVAILABLE, "one of three").await;
    n2.restart().await;
    assert_refused(n2, &request(), 503, UNAVAILABLE, "started again").await;
    assert_refused(n2, &used, 401, USED, "what it knows it says").await;
    // The address of the former seed has no node any more.
    n1.set_environment("FANFARE_SEED", &n2.gossip().expect("a node of a cluster").to_string());
    n1.restart().await;
    wait_until(SOON, "two of three to be a majority", async || {
        exchange(n1, &request()).await.status == 200 || exchange(n2, &request()).await.status == 200
    })
    .await;
    assert_refused(n1, &used, 401, USED, "together").await;
}

/// A node that was down while this one stopped did not get its nonces, so this one cannot learn them there.
#[tokio::test(flavor = "multi_thread")]
async fn node_restarted_beside_a_down_one_learns_nonces_from_peers() {
    let mut cluster = Cluster::linked(3).await;
    let mut used = vec![assert_granted(&cluster.nodes()[1], "three nodes").await];
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    n2.kill();
    let is_down =
        async || n0.operate("GET", "/debug/members").await.json().to_string().contains(r#""state":"dead""#);
    wait_until(SOON, "the death to be known", is_down).await;
    assert_eq!(n1.stop().await.code(), Some(0));
    n1.restart().await;
    for node in [&*n0, n1] {
        used.push(assert_granted(node, "two of three").await);
    }
    for node in [&*n0, n1] {
        for request in &used {
            assert_refused(node, request, 401, USED, "used before").await;
        }
    }
    // The node that stops last has no peer to hand over to.
    assert_eq!(n0.stop().await.code(), Some(0));
    assert_eq!(n1.stop().await.code(), Some(0));
    n1.restart().await;
    for request in &used {
        assert_refused(n1, request, 401, USED, "alone").await;
    }
    assert_refused(n1, &request(), 503, UNAVAILABLE, "one of two").await;
}

/// The node that stopped last may have issued tokens since, also if the other nodes have restarted more than
/// once.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_have_not_learned_nonces_issue_no_token() {
    let mut cluster = Cluster::linked(3).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    assert_eq!(n1.stop().await.code(), Some(0));
    assert_eq!(n2.stop().await.code(), Some(0));
    let used = assert_granted(n0, "alone").await;
    assert_eq!(n0.stop().await.code(), Some(0));
    for node in [&mut *n1, &mut *n2] {
        // The address of the seed has no node.
        node.set_environment("FANFARE_SEED", "127.0.0.1:1");
    }
    for is_killed in [true, false] {
        n1.restart().await;
        n2.set_environment("FANFARE_SEED", &n1.gossip().expect("a node of a cluster").to_string());
        n2.restart().await;
        for node in [&*n1, &*n2] {
            assert_refused(node, &used, 503, UNAVAILABLE, "who has granted it is away").await;
        }
        for node in [&mut *n1, &mut *n2] {
            if is_killed {
                node.kill();
            } else {
                assert_eq!(node.stop().await.code(), Some(0));
            }
        }
    }
    n1.restart().await;
    assert_refused(n1, &used, 503, UNAVAILABLE, "who has granted it is away").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn last_node_issues_tokens_after_the_others_left_cleanly() {
    let mut cluster = Cluster::linked(3).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut used = vec![assert_granted(n2, "three nodes").await];
    assert_eq!(n2.stop().await.code(), Some(0));
    used.push(assert_granted(n1, "two nodes").await);
    assert_eq!(n1.stop().await.code(), Some(0));
    used.push(assert_granted(n0, "one node").await);
    for request in &used {
        assert_refused(n0, request, 401, USED, "what the others were asked").await;
    }
    n1.restart().await;
    for request in &used {
        assert_refused(n1, request, 401, USED, "back again").await;
    }
    assert_granted(n1, "back again").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_a_wrong_clock_issues_no_tokens() {
    let shifted = ShiftedClock::default();
    let mut cluster = Cluster::linked(1).await;
    cluster.add(|options| shifted.under(options)).await;
    cluster.add(|options| options).await;
    cluster.until_linked().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    assert_granted(n1, "its clock is right").await;
    // Less than the greatest age of a request.
    shifted.ahead(90);
    assert_refused(n1, &request(), 503, UNAVAILABLE, "its clock is wrong").await;
    for node in [n0, n2] {
        assert_granted(node, "the others'").await;
    }
}

#[test]
fn majority_side_of_a_partition_alone_issues_tokens() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut used = vec![assert_granted(&nodes[0], "three nodes").await];
        let cuts = cut_off(&network, nodes);
        // No node has been declared down yet.
        let both = request();
        let (alone, together) = tokio::join!(exchange(&nodes[0], &both), exchange(&nodes[1], &both));
        assert_eq!((alone.status, alone.error().as_str()), (503, UNAVAILABLE));
        assert!([200, 503].contains(&together.status), "{together:?}");
        until_peers_down(nodes).await;
        for node in &nodes[1..] {
            used.push(assert_granted(node, "two of three").await);
        }
        // The first node learns of this nonce only after the partition.
        let unknown = assert_granted(&nodes[1], "two of three").await;
        assert_refused(&nodes[0], &request(), 503, UNAVAILABLE, "one of three").await;
        assert_refused(&nodes[0], &used[0], 401, USED, "what it knows it says").await;
        for request in &used[1..] {
            assert_refused(&nodes[0], request, 503, UNAVAILABLE, "used on the other side").await;
        }
        drop(cuts);
        cluster.until_linked().await;
        used.push(unknown);
        for node in cluster.nodes() {
            assert_granted(node, "three nodes again").await;
            for request in &used {
                assert_refused(node, request, 401, USED, "it is healed").await;
            }
        }
    });
}
