//! Rebalancing: after a node was added, one with far more connections sends some of them there, on request or at an
//! interval.

use std::time::Duration;

use fanfare_client::{Client, Credential, Options, Reconnect};
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::{Balancer, Node, Proxy, SOON, wait_until};
use tokio::task::JoinSet;
use tokio::time::Instant;

const CLIENTS: usize = 60;
/// Interval of rebalancing, longer than a client takes to reconnect.
const EVERY: Duration = Duration::from_secs(2);

/// Connects clients that reconnect whenever they are asked to.
async fn clients(url: String, key: String) -> JoinSet<()> {
    let reconnect = Reconnect { delay_min: Duration::from_millis(10), delay_max: Duration::from_millis(100) };
    let options = Options { reconnect: Some(reconnect), ..Options::new(url, Credential::Key(key)) };
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let mut client = Client::connect(options.clone()).await.expect("connected");
        clients.spawn(async move { while client.next().await.is_some() {} });
    }
    clients
}

async fn connections(node: &Node) -> f64 {
    node.metric("fanfare_socket_connections").await
}

async fn until_others_are_ready(node: &Node) {
    let are_ready = async || {
        let answer = node.operate("GET", "/debug/members").await.json();
        answer["members"].as_array().expect("a list").iter().all(|member| member["ready"] == true)
    };
    wait_until(SOON, "the others to be heard of as ready", are_ready).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_of_the_clients_comes_back_to_the_node_that_was_added() {
    let mut cluster = Cluster::linked(2).await;
    let first = &cluster.nodes()[0];
    let proxy = Proxy::to(first.addr()).await;
    let _clients = clients(proxy.url(), first.key()).await;
    assert_eq!(connections(&cluster.nodes()[0]).await, CLIENTS as f64);
    cluster.grow().await;
    let nodes = cluster.nodes();
    until_others_are_ready(&nodes[0]).await;
    // A balancer sends clients to the node with the fewest connections.
    proxy.turn_to(nodes[2].addr());
    let answer = nodes[0].operate("POST", "/rebalance").await;
    assert_eq!(answer.status, 200);
    let answer = answer.json();
    let number = |key: &str| answer[key].as_u64().expect("a number");
    assert_eq!(
        answer,
        serde_json::json!({"connections": CLIENTS, "mean": CLIENTS / 3, "asked": CLIENTS / 4})
    );
    let (asked, left) = (number("asked") as f64, (CLIENTS as u64 - number("asked")) as f64);
    wait_until(SOON, "those that were asked to come back there", async || {
        connections(&nodes[0]).await == left && connections(&nodes[2]).await == asked
    })
    .await;
    let below_threshold = nodes[2].operate("POST", "/rebalance").await.json();
    assert_eq!(below_threshold["asked"], 0, "{below_threshold}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_memory_for_more_gets_no_client() {
    let mut cluster = Cluster::linked(1).await;
    let full = cluster.add(|options| options.limit("memory_bytes", 1 << 20)).await;
    let is_full = async || full.metric("fanfare_degraded{reason=\"memory\"}").await == 1.0;
    wait_until(SOON, "the node to be full", is_full).await;
    cluster.until_linked().await;
    let node = &cluster.nodes()[0];
    let proxy = Proxy::to(node.addr()).await;
    let _clients = clients(proxy.url(), node.key()).await;
    until_others_are_ready(node).await;
    let answer = node.operate("POST", "/rebalance").await.json();
    assert_eq!(answer, serde_json::json!({"connections": CLIENTS, "mean": CLIENTS, "asked": 0}));
}

/// All clients are on the first of two nodes behind a balancer when the second one restarts. Gives the connections of
/// each in the end.
async fn after_a_restart(every: Option<Duration>) -> Option<[f64; 2]> {
    let every_ms = every.map(|every| u64::try_from(every.as_millis()).expect("a short time"));
    let mut cluster = Cluster::linked_with(2, |options| match every_ms {
        Some(every_ms) => options.limit("rebalance_ms", every_ms),
        None => options,
    })
    .await;
    let balancer = Balancer::start(cluster.nodes()).await?;
    cluster.nodes()[1].kill();
    let mut clients = clients(balancer.url(), cluster.nodes()[0].key()).await;
    assert_eq!(connections(&cluster.nodes()[0]).await, CLIENTS as f64);
    cluster.restart(1).await;
    cluster.until_linked().await;
    balancer.follow(1, &cluster.nodes()[1]).await;
    let nodes = cluster.nodes();
    let counted = async || [connections(&nodes[0]).await, connections(&nodes[1]).await];
    // Until the counts have been constant for longer than the interval.
    let (mut last, mut since) = (counted().await, Instant::now());
    wait_until(3 * SOON, "the connections to come to rest", async || {
        let now = counted().await;
        if now != last {
            (last, since) = (now, Instant::now());
        }
        since.elapsed() >= 2 * EVERY
    })
    .await;
    assert!(clients.try_join_next().is_none(), "every client has come back");
    Some(last)
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_an_interval_rebalances_by_itself_and_settles() {
    let Some([here, there]) = after_a_restart(Some(EVERY)).await else { return };
    assert_eq!(here + there, CLIENTS as f64);
    // A difference of less than a tenth of the mean is not rebalanced.
    assert!((here - there).abs() <= CLIENTS as f64 / 10.0, "{here} and {there}");
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_an_interval_sends_no_client_away() {
    let Some(counted) = after_a_restart(None).await else { return };
    assert_eq!(counted, [CLIENTS as f64, 0.0]);
}
