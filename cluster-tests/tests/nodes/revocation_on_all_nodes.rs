//! A token that is revoked on one node is refused on all, and its connections are closed, also on nodes that were down
//! or join later.

use std::time::Duration;

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::cluster::{Cluster, PEER_DOWN, peer_log_events};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::{Directory, Node, SOON, clock, http, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
/// Greatest time until a connection of a revoked token is closed.
const CLOSED_WITHIN: Duration = Duration::from_secs(5);

/// Signs a token of some age, so that the revocation is clearly later.
fn token(client_id: &str) -> String {
    let params = JwtParams {
        capability: r#"{"*":["subscribe","history"]}"#.into(),
        client_id: Some(client_id.into()),
        issued_s: Some(clock::now_s() - 10),
        ttl_s: 3600,
    };
    sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token")
}

async fn try_revoke(node: &Node, client_id: &str) -> u16 {
    let headers = [("authorization", &*http::basic(KEY))];
    let body = json!({"clientId": client_id}).to_string();
    http::request(node.addr(), "POST", "/keys/k1/revokeTokens", &headers, body).await.status
}

async fn revoke(node: &Node, client_id: &str) {
    // A machine that is too busy to answer in time reports that, and is asked again.
    wait_until(SOON, "a revocation to be recorded", async || try_revoke(node, client_id).await == 200).await;
}

async fn status(node: &Node, token: &str) -> u16 {
    let bearer = http::bearer(token);
    http::request(node.addr(), "GET", "/time", &[("authorization", &bearer)], "").await.status
}

async fn assert_closed(what: &str, socket: &mut Socket) {
    let (frames, ended) = socket.to_end(CLOSED_WITHIN).await;
    assert_eq!(ended, SocketEnd::Closed(4001), "{what}: {frames:?}");
    let is_refusal = |frame: &Value| frame["op"] == 7 && frame["code"] == 40100;
    assert!(frames.last().is_some_and(is_refusal), "{what}: {frames:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_revoked_client_is_shut_out_of_every_node() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let (ann, bob) = (token("ann"), token("bob"));
    let (mut of_ann, mut of_bob) = (Vec::new(), Vec::new());
    for node in &*nodes {
        of_ann.push(Socket::open_as(node, "", &http::bearer(&ann)).await);
        of_bob.push(Socket::open_as(node, "", &http::bearer(&bob)).await);
    }
    revoke(&nodes[1], "ann").await;
    for node in &*nodes {
        assert_eq!((status(node, &ann).await, status(node, &bob).await), (401, 200), "at once");
    }
    for socket in &mut of_ann {
        assert_closed("on every node", socket).await;
    }
    for socket in &mut of_bob {
        socket.attach("still here").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn starting_node_knows_earlier_revocations() {
    let mut cluster = Cluster::linked(2).await;
    let (ann, bob, eve) = (token("ann"), token("bob"), token("eve"));
    revoke(&cluster.nodes()[1], "ann").await;
    let joined = cluster.add(|options| options).await;
    assert_eq!((status(joined, &ann).await, status(joined, &bob).await), (401, 200), "who joins");
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    n2.kill();
    revoke(n0, "bob").await;
    n2.restart().await;
    assert_eq!((status(n2, &ann).await, status(n2, &bob).await), (401, 401), "who was killed");
    // No other node is left to ask.
    n0.kill();
    n1.kill();
    n2.kill();
    n2.restart().await;
    let known = (status(n2, &ann).await, status(n2, &bob).await, status(n2, &eve).await);
    assert_eq!(known, (401, 401, 200), "every node remembers it");
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_knows_a_missed_revocation_soon_after() {
    check_revocation_after_stall(2, 0).await;
}

/// The first node has no seeds, and learns of the others from their gossip.
#[tokio::test(flavor = "multi_thread")]
async fn first_node_knows_a_revocation_right_after_a_stall() {
    check_revocation_after_stall(0, 2).await;
}

async fn check_revocation_after_stall(paused: usize, other: usize) {
    let mut cluster = Cluster::linked(3).await;
    let nodes = &*cluster.nodes();
    let (name, paused, other) = (format!("n{paused}"), &nodes[paused], &nodes[other]);
    let ann = token("ann");
    let mut socket = Socket::open_as(paused, "", &http::bearer(&ann)).await;
    paused.pause();
    wait_until(SOON, "its death to be noticed", async || {
        peer_log_events(other).contains(&(name.clone(), PEER_DOWN.into()))
    })
    .await;
    revoke(other, "ann").await;
    paused.resume_until_restarted(1).await;
    assert_eq!(status(paused, &ann).await, 401, "it is let in when it has heard of it");
    let ended = socket.to_end(SOON).await.1;
    assert!(matches!(ended, SocketEnd::Gone | SocketEnd::Closed(_)), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_that_is_revoked_in_the_directory_needs_no_other_node() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let ann = token("ann");
    let mut here = Socket::open_as(n0, "", &http::bearer(&ann)).await;
    let mut there = Socket::open_as(n1, "", &http::bearer(&ann)).await;
    let directory = Directory::default().account("acme").revoked_key("k1", "secret").key("k2", "other", ALL);
    n0.replace_directory(&directory);
    assert_closed("where the file has changed", &mut here).await;
    wait_until(SOON, "the key to be revoked", async || status(n0, &ann).await == 401).await;
    assert_eq!(status(n1, &ann).await, 200, "where it has not");
    n1.replace_directory(&directory);
    assert_closed("where it has changed by now", &mut there).await;
}
