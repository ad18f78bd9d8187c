//! After a node was added, one that has far more connections sends some of them there, if it is asked to.

use std::time::Duration;

use fanfare_client::{Client, Credential, Options, Reconnect};
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::{Node, Proxy, SOON, wait_until};

const CLIENTS: usize = 60;

async fn connections(node: &Node) -> f64 {
    node.metric("fanfare_socket_connections").await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_clients_comes_back_to_the_node_that_was_added() {
    let mut cluster = Cluster::linked(2).await;
    let first = &cluster.nodes()[0];
    let proxy = Proxy::to(first.addr()).await;
    let reconnect = Reconnect { delay_min: Duration::from_millis(10), delay_max: Duration::from_millis(100) };
    let options =
        Options { reconnect: Some(reconnect), ..Options::new(proxy.url(), Credential::Key(first.key())) };
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let mut client = Client::connect(options.clone()).await.expect("connected");
        clients.spawn(async move { while client.next().await.is_some() {} });
    }
    assert_eq!(connections(&cluster.nodes()[0]).await, CLIENTS as f64);
    cluster.grow().await;
    let nodes = cluster.nodes();
    // As a balancer does that sends clients to whoever has fewest.
    proxy.turn_to(nodes[2].addr());
    let said = nodes[0].operate("POST", "/rebalance").await;
    assert_eq!(said.status, 200);
    let said = said.json();
    let number = |key: &str| said[key].as_u64().expect("a number");
    assert_eq!(said, serde_json::json!({"connections": CLIENTS, "mean": CLIENTS / 3, "asked": CLIENTS / 4}));
    let (asked, left) = (number("asked") as f64, (CLIENTS as u64 - number("asked")) as f64);
    wait_until(SOON, "those that were asked to come back there", async || {
        connections(&nodes[0]).await == left && connections(&nodes[2]).await == asked
    })
    .await;
    let few = nodes[2].operate("POST", "/rebalance").await.json();
    assert_eq!(few["asked"], 0, "{few}");
}
