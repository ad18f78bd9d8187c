//! A node is stalled for two seconds or more: it then restarts in place as a new incarnation, whether or not its peers
//! have noticed. On either side no message is missed without a reported loss, and a session that another node has taken
//! over stays there.

use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, PEER_DOWN, peer_log_events};
use fanfare_cluster_tests::presence::{Watcher, present};
use fanfare_cluster_tests::raw::Raw;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::traffic::{LOAD, Numbers, Publishers, Subscriber, assert_converged_with_losses};
use fanfare_cluster_tests::waits::{fault_lasts, pace};
use fanfare_cluster_tests::{Node, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

/// Starts a publisher on each node, which accepts the answer that the outcome is unknown.
async fn publishers(nodes: &[Node]) -> Publishers {
    let mut publishers = Publishers::none().patient();
    for node in nodes {
        publishers.add(node).await;
    }
    publishers
}

/// Parts the acknowledged messages into those of these publishers and those of the others. The incarnations
/// of the others have ended, so theirs may be missing after a reported loss.
fn split_acknowledged(acknowledged: Numbers, publishers: &[u64]) -> (Numbers, Numbers) {
    acknowledged.into_iter().partition(|((from, _), _)| publishers.contains(from))
}

/// Counts the lines of `node` with this message, about any other node.
fn count_logged(node: &Node, message: &str) -> usize {
    peer_log_events(node).iter().filter(|(_, logged)| logged == message).count()
}

/// Gives the present incarnation of a node.
async fn incarnation_of(node: &Node) -> Value {
    let answer = node.operate("GET", "/debug/members").await.json();
    let incarnation = answer["node"]["incarnation"].clone();
    assert_ne!(incarnation, Value::Null, "{answer}");
    incarnation
}

/// Asserts that each subscriber has all acknowledged messages, without a reported loss.
async fn assert_nothing_lost(cluster: &mut Cluster, publishers: Publishers, subscribers: Vec<Subscriber>) {
    let acknowledged = publishers.end().await;
    for subscriber in subscribers {
        let name = subscriber.name.clone();
        assert_eq!(subscriber.settle(&acknowledged).await.losses(), 0, "{name}");
    }
    for node in cluster.nodes() {
        node.assert_well().await;
        assert_eq!(count_logged(node, PEER_DOWN), 0);
        assert_eq!(node.metric("fanfare_runs_begun_anew_total").await, 0.0);
    }
}

async fn until_logged(node: &Node, of: &str, message: &str) {
    let is_logged = || peer_log_events(node).iter().any(|(other, logged)| other == of && logged == message);
    wait_until(SOON, message, async || is_logged()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_delivers_nothing_twice_or_missed_silently() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
    let moving = Subscriber::on_each(nodes, "moves").await;
    let mut publishers = publishers(nodes).await;
    publishers.until_acked(LOAD).await;
    let previous = incarnation_of(&nodes[2]).await;
    nodes[2].pause();
    // Clients of the other nodes, and those that leave the stalled one.
    for (at, subscriber) in moving.into_iter().enumerate() {
        let received = subscriber.leave().await;
        subscribers.push(Subscriber::after(&nodes[at % 2], "moved meanwhile", received).await);
    }
    for node in &nodes[..2] {
        until_logged(node, "n2", PEER_DOWN).await;
    }
    let there = subscribers.remove(2);
    nodes[2].resume_until_restarted(1).await;
    assert_ne!(incarnation_of(&nodes[2]).await, previous, "it is another run");
    subscribers.push(Subscriber::after(&nodes[2], "comes back to where it was", there.leave().await).await);
    cluster.until_linked().await;
    let nodes = cluster.nodes();
    let back = Subscriber::on(&nodes[2], "came when it was over").await;
    publishers.until_acked(LOAD).await;
    publishers.add(&nodes[2]).await;
    subscribers.push(Subscriber::after(&nodes[0], "moved when it was over", back.leave().await).await);
    publishers.until_acked(LOAD).await;
    let (acknowledged, ended) = split_acknowledged(publishers.end().await, &[0, 1, 3]);
    assert_converged_with_losses(&mut cluster, &acknowledged, &ended, subscribers).await;
}

/// Each time peers declare the node down, and another node is stalled before the cluster has fully recovered.
#[tokio::test(flavor = "multi_thread")]
async fn nodes_stalled_in_turn_lose_nothing_silently() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
    let mut places: Vec<_> = subscribers.into_iter().map(|subscriber| vec![subscriber]).collect();
    let mut publishers = publishers(nodes).await;
    let mut restarts = [0; 3];
    for (round, at) in [2, 0, 2, 1].into_iter().enumerate() {
        let paused = &nodes[at];
        // A node that has restarted in place may not have found the stalled one yet.
        let down_counts = || [1, 2].map(|next| count_logged(&nodes[(at + next) % 3], PEER_DOWN));
        let before = down_counts();
        paused.pause();
        wait_until(SOON, "its death", async || down_counts() != before).await;
        restarts[at] += 1;
        paused.resume_until_restarted(restarts[at]).await;
        for previous in std::mem::take(&mut places[at]) {
            let name = format!("{}, back in round {round}", previous.name);
            places[at].push(Subscriber::after(paused, &name, previous.leave().await).await);
        }
        places[at].push(Subscriber::on(paused, &format!("came in round {round}")).await);
        publishers.add(paused).await;
        pace(Duration::from_millis(300) * u32::try_from(round).expect("a few")).await;
    }
    cluster.until_linked().await;
    publishers.until_acked(LOAD).await;
    let subscribers = places.into_iter().flatten().collect();
    let (acknowledged, ended) = split_acknowledged(publishers.end().await, &[4, 5, 6]);
    assert_converged_with_losses(&mut cluster, &acknowledged, &ended, subscribers).await;
}

/// Stalls these nodes at once for two seconds. They are new incarnations then; the other nodes may have
/// noticed or not.
async fn after_two_seconds(paused: &[usize]) {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
    let mut publishers = publishers(nodes).await;
    publishers.until_acked(LOAD).await;
    let mut previous = Vec::new();
    for at in paused {
        previous.push(incarnation_of(&nodes[*at]).await);
    }
    paused.iter().for_each(|at| nodes[*at].pause());
    for at in paused {
        nodes[*at].until_stalled_for_long().await;
    }
    paused.iter().for_each(|at| nodes[*at].resume());
    for (at, previous) in paused.iter().zip(previous) {
        nodes[*at].until_restarted(1).await;
        assert_ne!(incarnation_of(&nodes[*at]).await, previous, "it is another run");
        let there = subscribers.remove(*at);
        let back = Subscriber::after(&nodes[*at], "comes back to where it was", there.leave().await).await;
        subscribers.insert(*at, back);
    }
    cluster.until_linked().await;
    for node in &*cluster.nodes() {
        publishers.add(node).await;
    }
    publishers.until_acked(LOAD).await;
    let has_gone_on = |from: &u64| usize::try_from(*from).is_ok_and(|at| !paused.contains(&at));
    let goes_on: Vec<u64> = (0..6).filter(has_gone_on).collect();
    let (acknowledged, ended) = split_acknowledged(publishers.end().await, &goes_on);
    assert_converged_with_losses(&mut cluster, &acknowledged, &ended, subscribers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_stalled_for_two_seconds_restarts_in_place() {
    after_two_seconds(&[2]).await;
}

/// All nodes are stalled at once, as on a machine that is suspended.
#[tokio::test(flavor = "multi_thread")]
async fn all_nodes_stalled_at_once_restart_without_silent_loss() {
    after_two_seconds(&[0, 1, 2]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_stalled_briefly_is_not_down() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
    let publishers = publishers(nodes).await;
    for node in &*nodes {
        node.pause();
        fault_lasts(Duration::from_secs(1)).await;
        node.resume();
        publishers.until_acked(LOAD).await;
    }
    cluster.until_linked().await;
    assert_nothing_lost(&mut cluster, publishers, subscribers).await;
}

/// The stalled node does not own the session any more. Requests that reach it before it knows so change
/// nothing on other nodes.
#[tokio::test(flavor = "multi_thread")]
async fn session_taken_over_during_a_stall_is_lost_to_the_old_node() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut previous = Socket::open(&nodes[2], "?clientId=ann").await;
    present(&mut previous, "enter", "room", json!({"data": 1})).await;
    let watchers = [Watcher::on(&nodes[0], "room").await, Watcher::on(&nodes[1], "room").await];
    nodes[2].pause();
    until_logged(&nodes[0], "n2", PEER_DOWN).await;
    let key = previous.connected["connectionKey"].as_str().expect("a key");
    let mut back = Socket::open(&nodes[1], &format!("?clientId=ann&resume={key}")).await;
    assert_eq!(back.connected["connectionId"], previous.connected["connectionId"]);
    present(&mut back, "update", "room", json!({"data": 2})).await;
    // The stalled node reads this request before it knows of the takeover.
    previous.send(&json!({"op": 12, "id": "late", "channel": "room", "action": "leave"})).await;
    nodes[2].resume_until_restarted(1).await;
    let ended = previous.to_end(SOON).await.1;
    assert!(matches!(ended, SocketEnd::Closed(4001) | SocketEnd::Gone), "{ended:?}");
    let late = Watcher::on(&nodes[2], "room").await;
    let mut watchers = watchers.into_iter().chain([late]).collect::<Vec<_>>();
    cluster.until_linked().await;
    let expected = [("ann".to_owned(), json!(2))].into();
    for watcher in &mut watchers {
        let end = tokio::time::Instant::now() + SOON;
        assert!(watcher.has_by(&expected, end).await, "{:?}", watcher.events);
        watcher.assert_quiet(Duration::from_secs(3)).await;
        assert_eq!(watcher.list, expected, "{:?}", watcher.events);
    }
    present(&mut back, "leave", "room", json!({})).await;
    for watcher in &mut watchers {
        assert!(watcher.has_by(&[].into(), tokio::time::Instant::now() + SOON).await, "{:?}", watcher.events);
    }
}

/// A node that peers declared down handles no request that came during the stall, and delivers no message.
#[tokio::test(flavor = "multi_thread")]
async fn requests_received_during_a_stall_are_not_handled() {
    let mut cluster = Cluster::linked(2).await;
    let nodes = cluster.nodes();
    let mut on_n0 = Socket::open(&nodes[0], "").await;
    on_n0.attach("room").await;
    let mut here = Vec::new();
    for _ in 0..20 {
        let mut socket = Socket::open(&nodes[1], "").await;
        socket.attach("room").await;
        here.push(socket);
    }
    let mut requests = Vec::new();
    for _ in 0..20 {
        let mut raw = Raw::connect(nodes[1].addr()).await;
        let request = publish_request(&nodes[1].key());
        assert!(raw.write(request.as_bytes()).await);
        assert_eq!(raw.response(SOON).await.expect("an answer").0, 200);
        requests.push((raw, request));
    }
    for socket in here.iter_mut().chain([&mut on_n0]) {
        for _ in 0..requests.len() {
            socket.message("room").await;
        }
    }
    nodes[1].pause();
    for socket in &mut here {
        socket.start(json!({"op": 13, "channel": "room", "messages": [{"data": "late"}]})).await;
    }
    for (raw, request) in &mut requests {
        assert!(raw.write(request.as_bytes()).await);
    }
    // A message of the other node also waits on a peer stream of the stalled node.
    on_n0.publish("room", json!({"data": "elsewhere"})).await;
    assert_eq!(on_n0.message("room").await["messages"][0]["data"], "elsewhere");
    nodes[1].resume_until_restarted(1).await;
    for mut socket in here {
        assert_eq!(socket.to_end(SOON).await, (Vec::new(), SocketEnd::Gone));
    }
    for (mut raw, _) in requests {
        assert_eq!(raw.text_to_end(SOON).await.0, "");
    }
    on_n0.publish("room", json!({"data": "the next"})).await;
    let next = on_n0.find("a message", |frame| frame["op"] == 13).await;
    assert_eq!(next["messages"][0]["data"], "the next");
}

fn publish_request(key: &str) -> String {
    let (authorization, body) = (http::basic(key), json!({"data": "before"}).to_string());
    format!(
        "POST /api/channels/room/publish HTTP/1.1\r\nhost: node\r\nauthorization: {authorization}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// The node was draining, so it begins no new incarnation, and hands off nothing more.
#[tokio::test(flavor = "multi_thread")]
async fn node_stalled_during_its_drain_ends() {
    let mut cluster = Cluster::linked(2).await;
    let nodes = cluster.nodes();
    // So many clients that some are still connected when the stall ends.
    let mut clients = Vec::new();
    for _ in 0..40 {
        clients.push(Socket::open(&nodes[1], "").await);
    }
    nodes[1].terminate();
    for client in &mut clients {
        client.find("to be asked to go", |frame| frame["op"] == 4).await;
    }
    nodes[1].pause();
    nodes[1].until_stalled_for_long().await;
    nodes[1].resume();
    assert_fails_undrained(&mut nodes[1]).await;
}

/// A supervisor asks the stalled process to stop.
#[tokio::test(flavor = "multi_thread")]
async fn node_asked_to_leave_during_a_stall_ends() {
    let mut cluster = Cluster::linked(2).await;
    for node in cluster.nodes() {
        node.pause();
        node.until_stalled_for_long().await;
        node.terminate();
        node.resume();
        assert_fails_undrained(node).await;
    }
}

async fn assert_fails_undrained(node: &mut Node) {
    assert_eq!(node.ended().await.code(), Some(1));
    wait_until(SOON, "why it ended", async || {
        node.log().contains("process stalled before the drain was finished")
    })
    .await;
}
