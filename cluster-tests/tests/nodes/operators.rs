//! Requests of operators: to stop a node, and to list its members.

use std::collections::BTreeSet;
use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::raw::Raw;
use fanfare_cluster_tests::tls::Tls;
use fanfare_cluster_tests::{Balancer, Node, NodeOptions, SOON, Socket, http, wait_until};
use serde_json::json;

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_is_asked_for_ends_the_node_as_a_signal_does() {
    let mut node = Node::start(NodeOptions::default()).await;
    let mut socket = Socket::open(&node, "").await;
    let refused = http::request(node.admin(), "POST", "/drain", &[], "").await;
    assert_eq!(refused.status, 401);
    let asked = node.operate("POST", "/drain").await;
    assert_eq!((asked.status, asked.json()), (202, json!({"status": "draining"})));
    let ready = http::try_request(node.admin(), "GET", "/ready", &[], "").await;
    assert!(ready.is_err() || ready.is_ok_and(|ready| ready.status == 503));
    let goodbye = socket.find("a goodbye", |frame| frame["op"] == 4).await;
    assert_eq!(goodbye["code"], 50003, "{goodbye}");
    assert_eq!(node.ended().await.code(), Some(0));
}

/// Gives the names in the `# TYPE` lines, and those in the `# HELP` lines.
async fn described(node: &Node) -> [BTreeSet<String>; 2] {
    let page = http::request(node.admin(), "GET", "/metrics", &[], "").await;
    let page = String::from_utf8(page.body.to_vec()).expect("text");
    ["# TYPE ", "# HELP "].map(|kind| {
        let lines = page.lines().filter_map(|line| line.strip_prefix(kind)?.split_once(' '));
        lines.filter(|(_, text)| !text.is_empty()).map(|(name, _)| name.to_owned()).collect()
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn every_metric_has_a_help_line() {
    let tls = Tls::default();
    let mut cluster = Cluster::linked_with(2, |options| {
        options
            .environment("FANFARE_TLS_CERT", &tls.certificate().display().to_string())
            .environment("FANFARE_TLS_KEY", &tls.key().display().to_string())
    })
    .await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    for node in [&*n0, &*n1] {
        let mut client = tls.http(node.addr()).await;
        let basic = http::basic(&node.key());
        let path = "/api/channels/a/publish";
        let answer =
            client.request("POST", path, &[("authorization", &basic)], r#"{"id":"1","data":1}"#).await;
        let answer = answer.expect("an answer");
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
    let [typed, helped] = described(n0).await;
    assert!(typed.contains("fanfare_peers_known") && typed.contains("fanfare_tls_certificate_generation"));
    assert_eq!(typed, helped);
    let [typed, helped] = described(&Node::start(NodeOptions::default()).await).await;
    assert!(typed.contains("fanfare_auth_failures_total") && !typed.contains("fanfare_peers_known"));
    assert_eq!(typed, helped);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_says_whom_it_knows() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let answer = n0.operate("GET", "/debug/members").await.json();
    let (own, other) = (&answer["node"], &answer["members"][0]);
    assert_eq!(
        (&own["nodeId"], &own["ready"], &own["draining"]),
        (&json!("n0"), &json!(true), &json!(false))
    );
    assert_eq!(own["listen"], n0.addr().to_string());
    assert_eq!((&other["nodeId"], &other["listen"]), (&json!("n1"), &json!(n1.addr().to_string())));
    let state = ["state", "linkUp", "interestKnown", "draining"].map(|key| other[key].clone());
    assert_eq!(state, [json!("alive"), json!(true), json!(true), json!(false)], "{other}");
    let ready = async || {
        let answer = n0.operate("GET", "/debug/members").await.json();
        answer["members"][0]["ready"] == true
    };
    wait_until(SOON, "n1 to say that it is ready", ready).await;
    let theirs = n1.operate("GET", "/debug/members").await.json();
    assert_eq!(theirs["node"]["incarnation"], other["incarnation"]);
    assert_eq!(answer["members"].as_array().map(Vec::len), Some(1));
    assert_eq!(http::request(n0.admin(), "GET", "/debug/members", &[], "").await.status, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stops_says_goodbye_to_the_others() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let left = async |node: &Node| {
        let answer = node.operate("GET", "/debug/members").await.json();
        let members = answer["members"].as_array().expect("a list").clone();
        let other = members.into_iter().find(|member| member["nodeId"] == "n0").expect("it is known");
        (other["state"] == "left", other["linkUp"] == true, other["ready"] == true)
    };
    let is_ready = async || left(&nodes[1]).await == (false, true, true);
    wait_until(SOON, "n0 to say that it is ready", is_ready).await;
    assert_eq!(nodes[0].stop().await.code(), Some(0));
    for node in &nodes[1..] {
        assert_eq!(left(node).await, (true, false, false), "it knows at once");
        assert_eq!(node.metric("fanfare_peers_known").await, 1.0);
    }
    cluster.restart(0).await;
    let nodes = cluster.nodes();
    for node in &*nodes {
        let known = async || node.metric("fanfare_peers_known").await == 2.0;
        wait_until(SOON, "the node to be back", known).await;
    }
    let is_back = async || left(&nodes[1]).await == (false, true, true);
    wait_until(SOON, "n0 to be seen as ready again", is_back).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn balancer_sends_no_client_to_a_stopped_node() {
    let mut cluster = Cluster::linked(2).await;
    let nodes = cluster.nodes();
    let Some(balancer) = Balancer::start(nodes).await else { return };
    let key = http::basic(&nodes[0].key());
    let open = async || Socket::over(Raw::connect(balancer.addr()).await, "", &key).await;
    let mut seen = Vec::new();
    for _ in 0..4 {
        let socket = open().await;
        seen.push(socket.connected["nodeId"].clone());
    }
    assert!(seen.contains(&json!("n0")) && seen.contains(&json!("n1")), "{seen:?}");
    nodes[0].stop().await;
    let is_out = async || !balancer.is_ready(0).await;
    wait_until(SOON, "the balancer to leave the node out", is_out).await;
    for _ in 0..4 {
        assert_eq!(open().await.connected["nodeId"], "n1");
    }
    nodes[0].restart().await;
    balancer.follow(0, &nodes[0]).await;
    assert!(tokio::time::timeout(Duration::from_secs(5), open()).await.is_ok());
}
