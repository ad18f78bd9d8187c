//! Closing a client ends its connections on every node, or reports that some may remain.

use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, PEER_DOWN, cut_off, peer_log_events};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Directory, Node, Response, SOON, Socket, http, wait_for, wait_until};
use serde_json::{Value, json};

/// Key of the account whose client is closed. The next one is of another account.
const KEY: &str = "secret.k1";
const OTHER: &str = "secret.k2";
/// Time for the log of a node to be read.
const LOGGED_WITHIN: Duration = Duration::from_millis(500);

async fn cluster() -> Cluster {
    let directory = Directory::default()
        .account("acme")
        .key("k1", "secret", ALL)
        .account("other")
        .key("k2", "secret", ALL);
    Cluster::linked_with(3, |options| options.directory(directory.clone(), KEY)).await
}

async fn close(node: &Node, client_id: &str) -> Response {
    let path = format!("/api/clients/{client_id}/connections/close");
    http::request(node.addr(), "POST", &path, &[("authorization", &http::basic(KEY))], "").await
}

async fn assert_closed(socket: &mut Socket) {
    let (frames, ended) = socket.to_end(SOON).await;
    let [frame] = &frames[..] else { unreachable!("one frame: {frames:?}") };
    assert_eq!((&frame["op"], &frame["code"]), (&json!(7), &json!(40160)));
    assert_eq!(ended, SocketEnd::Closed(4003));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_connection_of_the_client_is_closed_and_no_other() {
    let mut cluster = cluster().await;
    let nodes = cluster.nodes();
    for asked in 0..nodes.len() {
        let (mut closed, mut kept) = (Vec::new(), Vec::new());
        for node in &*nodes {
            for query in ["?clientId=a%2Fb", "?clientId=a%2Fb&format=msgpack"] {
                closed.push(Socket::open(node, query).await);
            }
            for query in ["?clientId=a", ""] {
                kept.push(Socket::open(node, query).await);
            }
            kept.push(Socket::open_as(node, "?clientId=a%2Fb", &http::basic(OTHER)).await);
        }
        let answer = close(&nodes[asked], "a%2Fb").await;
        assert_eq!((answer.status, answer.json()), (200, json!({"closed": 6})), "asked n{asked}");
        for socket in &mut closed {
            assert_closed(socket).await;
        }
        for socket in &mut kept {
            assert_eq!(socket.ask(json!({"op": 0})).await["op"], 0);
        }
        assert_eq!(close(&nodes[asked], "a%2Fb").await.json(), json!({"closed": 0}));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_closed_through_another_node_cannot_be_resumed() {
    let mut cluster = cluster().await;
    let [n0, n1, _] = cluster.nodes() else { panic!("three nodes were started") };
    let mut socket = Socket::open(n0, "?clientId=ann").await;
    let text = |connected: &Value, name: &str| connected[name].as_str().expect("a text").to_owned();
    let previous = text(&socket.connected, "connectionId");
    let query = format!("?clientId=ann&resume={}", text(&socket.connected, "connectionKey"));
    assert_eq!(close(n1, "ann").await.json(), json!({"closed": 1}));
    assert_closed(&mut socket).await;
    let fresh = Socket::open(n0, &query).await;
    assert_ne!(text(&fresh.connected, "connectionId"), previous);
}

/// The caller gets 503 and asks again: a node that is declared down has no connections.
#[tokio::test(flavor = "multi_thread")]
async fn close_with_a_stalled_node_is_503_and_other_nodes_close() {
    let mut cluster = cluster().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut reached = [Socket::open(n0, "?clientId=ann").await, Socket::open(n1, "?clientId=ann").await];
    let mut partitioned = Socket::open(n2, "?clientId=ann").await;
    n2.pause();
    assert_eq!(close(n0, "ann").await.status, 503);
    for socket in &mut reached {
        assert_closed(socket).await;
    }
    let without_node = wait_for(SOON, "an answer without the node", async || {
        let answer = close(n0, "ann").await;
        (answer.status == 200).then_some(answer)
    });
    assert_eq!(without_node.await.json(), json!({"closed": 0}));
    n2.resume_until_restarted(1).await;
    // The request of before the stall may still be handled, if the node reads it before its restart in place.
    let ended = partitioned.to_end(SOON).await.1;
    assert!(matches!(ended, SocketEnd::Gone | SocketEnd::Closed(_)), "{ended:?}");
    wait_until(SOON, "all to be asked", async || close(n0, "ann").await.json() == json!({"closed": 0})).await;
}

#[test]
fn close_over_a_partition_is_503_until_down_and_done_after_heal() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut partitioned = Socket::open(&nodes[0], "?clientId=ann").await;
        let mut reached = Socket::open(&nodes[2], "?clientId=ann").await;
        let cuts = cut_off(&network, nodes);
        assert_eq!(close(&nodes[1], "ann").await.status, 503);
        assert_closed(&mut reached).await;
        let without_node = wait_for(SOON, "an answer without the node", async || {
            let answer = close(&nodes[1], "ann").await;
            (answer.status == 200).then_some(answer)
        });
        assert_eq!(without_node.await.json(), json!({"closed": 0}));
        let down_event = ("n0".to_owned(), PEER_DOWN.to_owned());
        let is_down = async || peer_log_events(&nodes[1]).contains(&down_event);
        wait_until(
            LOGGED_WITHIN,
            "what was told before: it is asked for as long as it may be alive",
            is_down,
        )
        .await;
        assert_eq!(partitioned.ask(json!({"op": 0})).await["op"], 0, "it is reached by its own side alone");
        drop(cuts);
        cluster.until_linked().await;
        // The first request may have waited for the peer stream, and have closed the connection by now.
        let answer = close(&cluster.nodes()[1], "ann").await;
        assert_eq!(answer.status, 200);
        let closed = answer.json()["closed"].as_u64().expect("a count");
        assert!(closed <= 1, "{closed}");
        assert_closed(&mut partitioned).await;
    });
}
