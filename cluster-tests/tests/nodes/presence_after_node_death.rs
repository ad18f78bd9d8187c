//! A node fails: its members leave after the presence timeout, once, unless the client has resumed on another node.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, PEER_ALIVE, PEER_DOWN, peer_log_events};
use fanfare_cluster_tests::presence::{attach, event, names, present, read, until_members_on_all};
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket, wait_until};
use serde_json::json;

const PRESENCE_TIMEOUT: Duration = Duration::from_secs(3);
/// Time after which every node would have made the leaves of a failed node by itself.
const QUIET: Duration = Duration::from_secs(7);
const MEMBERS: usize = 8;
/// Less than the time after which each survivor makes leaves by itself, because the responsible node is late.
const IN_TIME: Duration = Duration::from_secs(5);

async fn three() -> Cluster {
    let timeout_ms = u64::try_from(PRESENCE_TIMEOUT.as_millis()).expect("a short time");
    Cluster::linked_with(3, |options: NodeOptions| options.limit("presence_grace_ms", timeout_ms)).await
}

/// Enters a member with a name from the number.
async fn member(node: &Node, number: usize) -> Socket {
    let mut socket = Socket::open(node, "").await;
    let name = format!("member-{number}");
    present(&mut socket, "enter", "room", json!({"clientId": name, "data": number})).await;
    socket
}

async fn watcher(node: &Node, count: usize) -> Socket {
    let mut watcher = Socket::open(node, "").await;
    assert_eq!(attach(&mut watcher, "room").await.len(), count);
    watcher
}

async fn resumed(socket: &Socket, node: &Node) -> Socket {
    let key = socket.connected["connectionKey"].as_str().expect("a key");
    let back = Socket::open(node, &format!("?resume={key}")).await;
    assert_eq!(back.connected["connectionId"], socket.connected["connectionId"]);
    back
}

/// Reads until `count` members have left, each once and with its data.
async fn leaves(watcher: &mut Socket, count: usize) -> Vec<String> {
    let mut left = Vec::new();
    while left.len() < count {
        let (action, name, data) = event(watcher).await;
        assert_eq!((&*action, &name), ("leave", &format!("member-{data}")));
        assert!(!left.contains(&name), "{name} twice");
        left.push(name);
    }
    left.sort();
    left
}

async fn assert_quiet(watchers: &mut [Socket]) {
    let end = tokio::time::Instant::now() + QUIET;
    for watcher in watchers {
        while let Ok(frame) =
            watcher.next_within(end.saturating_duration_since(tokio::time::Instant::now())).await
        {
            assert_ne!(frame["op"], 12, "{:?}", read(&frame));
        }
    }
}

/// Counts the times that the node began to hear the other one: 1 if it has heard it without a break.
fn times_alive(node: &Node, other: &str) -> usize {
    peer_log_events(node).iter().filter(|(of, said)| of == other && said == PEER_ALIVE).count()
}

/// One survivor makes each event. Two make the same one if the responsible node was late, or not heard for a moment.
#[tokio::test(flavor = "multi_thread")]
async fn members_of_a_killed_node_leave_once_after_presence_timeout() {
    let mut cluster = three().await;
    let nodes = cluster.nodes();
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        members.push(member(&nodes[0], number).await);
    }
    let mut stays = member(&nodes[1], MEMBERS).await;
    let mut watchers = [watcher(&nodes[1], MEMBERS + 1).await, watcher(&nodes[2], MEMBERS + 1).await];
    nodes[0].kill();
    let killed = Instant::now();
    for watcher in &mut watchers {
        let left = leaves(watcher, MEMBERS).await;
        assert_eq!(left, (0..MEMBERS).map(|number| format!("member-{number}")).collect::<Vec<_>>());
        assert!(killed.elapsed() >= PRESENCE_TIMEOUT, "{:?}", killed.elapsed());
    }
    let is_in_time = killed.elapsed() < PRESENCE_TIMEOUT + IN_TIME;
    assert_quiet(&mut watchers).await;
    until_members_on_all(&nodes[1..], "room", &["member-8"]).await;
    let mut counted = 0.0;
    for node in &nodes[1..] {
        counted += node.metric("fanfare_presence_events_total").await;
    }
    // The enter of the remaining member, and the leaves.
    let (events, twice) = ((MEMBERS + 1) as f64, (2 * MEMBERS + 1) as f64);
    let is_calm = is_in_time && times_alive(&nodes[1], "n2") == 1 && times_alive(&nodes[2], "n1") == 1;
    assert!(counted == events || !is_calm && (events..=twice).contains(&counted), "{counted} events");
    present(&mut stays, "leave", "room", json!({"clientId": "member-8"})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn member_that_resumes_within_presence_timeout_never_left() {
    let mut cluster = three().await;
    let nodes = cluster.nodes();
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        members.push(member(&nodes[0], number).await);
    }
    let mut watchers = [watcher(&nodes[1], MEMBERS).await, watcher(&nodes[2], MEMBERS).await];
    nodes[0].kill();
    for (number, member) in members.iter_mut().enumerate() {
        *member = resumed(member, &nodes[1 + number % 2]).await;
    }
    assert_quiet(&mut watchers).await;
    for node in &nodes[1..] {
        assert_eq!(names(node, "room").await.len(), MEMBERS);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_come_back_to_the_node_itself_when_it_is_there_again() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    for is_stopped in [false, true] {
        let before = member(&nodes[2], 1).await;
        let mut watchers = [watcher(&nodes[0], 1).await, watcher(&nodes[1], 1).await];
        if is_stopped {
            nodes[2].stop().await;
        }
        nodes[2].restart().await;
        let mut back = resumed(&before, &nodes[2]).await;
        watchers[0].attach("another").await;
        assert_quiet(&mut watchers).await;
        present(&mut back, "leave", "room", json!({"clientId": "member-1"})).await;
        for watcher in &mut watchers {
            assert_eq!(leaves(watcher, 1).await, ["member-1"]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_is_a_loss_of_its_clients() {
    let mut cluster = three().await;
    let nodes = cluster.nodes();
    let _lost = member(&nodes[0], 0).await;
    let back = member(&nodes[0], 1).await;
    let mut watchers = [watcher(&nodes[1], 2).await, watcher(&nodes[2], 2).await];
    nodes[0].terminate();
    let stopped = Instant::now();
    let _back = resumed(&back, &nodes[1]).await;
    for watcher in &mut watchers {
        assert_eq!(leaves(watcher, 1).await, ["member-0"]);
        assert!(stopped.elapsed() >= PRESENCE_TIMEOUT, "{:?}", stopped.elapsed());
    }
    assert_quiet(&mut watchers).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_that_end_one_after_the_other_leave_no_ghost() {
    let mut cluster = three().await;
    let nodes = cluster.nodes();
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        members.push(member(&nodes[number % 2], number).await);
    }
    let mut watchers = [watcher(&nodes[2], MEMBERS).await];
    nodes[0].kill();
    wait_until(SOON, "the first death to be known", async || {
        peer_log_events(&nodes[1]).contains(&("n0".to_owned(), PEER_DOWN.to_owned()))
    })
    .await;
    // The kill comes before the leaves that this node would have made.
    nodes[1].kill();
    leaves(&mut watchers[0], MEMBERS).await;
    assert_quiet(&mut watchers).await;
    assert!(names(&nodes[2], "room").await.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn node_joined_before_down_is_noticed_knows_resuming_members() {
    let mut cluster = Cluster::linked(2).await;
    let nodes = cluster.nodes();
    let before = member(&nodes[1], 1).await;
    until_members_on_all(nodes, "room", &["member-1"]).await;
    nodes[1].kill();
    let fresh = cluster.add(|options| options).await;
    assert_eq!(names(fresh, "room").await, ["member-1"]);
    let mut watcher = watcher(fresh, 1).await;
    let mut back = resumed(&before, fresh).await;
    present(&mut back, "leave", "room", json!({"clientId": "member-1"})).await;
    assert_eq!(leaves(&mut watcher, 1).await, ["member-1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn member_of_killed_node_leaves_though_the_node_restarts() {
    let mut cluster = Cluster::linked(2).await;
    let before = member(&cluster.nodes()[1], 1).await;
    until_members_on_all(cluster.nodes(), "room", &["member-1"]).await;
    cluster.nodes()[1].kill();
    cluster.add(|options| options).await;
    cluster.restart(1).await;
    cluster.until_linked().await;
    let fresh = &cluster.nodes()[2];
    let mut back = resumed(&before, fresh).await;
    assert_eq!(back.connected["resumed"], true);
    let mut watcher = watcher(fresh, 1).await;
    present(&mut back, "leave", "room", json!({"clientId": "member-1"})).await;
    assert_eq!(leaves(&mut watcher, 1).await, ["member-1"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn members_of_a_stalled_node_do_not_reenter_by_themselves() {
    let mut cluster = three().await;
    let nodes = cluster.nodes();
    let mut stays = member(&nodes[0], 0).await;
    let mut watchers = [watcher(&nodes[1], 1).await, watcher(&nodes[2], 1).await];
    nodes[0].pause();
    for watcher in &mut watchers {
        assert_eq!(leaves(watcher, 1).await, ["member-0"]);
    }
    nodes[0].resume_until_restarted(1).await;
    assert_eq!(stays.to_end(SOON).await.1, SocketEnd::Gone, "it ends with the run that it was on");
    assert_quiet(&mut watchers).await;
    until_members_on_all(nodes, "room", &[]).await;
    let mut back = resumed(&stays, &nodes[0]).await;
    present(&mut back, "enter", "room", json!({"clientId": "member-0", "data": 0})).await;
    for watcher in &mut watchers {
        let (action, name, _) = event(watcher).await;
        assert_eq!((&*action, &*name), ("enter", "member-0"));
    }
    present(&mut back, "leave", "room", json!({"clientId": "member-0"})).await;
    for watcher in &mut watchers {
        assert_eq!(leaves(watcher, 1).await, ["member-0"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn member_that_resumes_in_time_after_a_stall_does_not_flicker() {
    let patient = |options: NodeOptions| options.limit("presence_grace_ms", 15_000);
    let mut cluster = Cluster::linked_with(3, patient).await;
    let nodes = cluster.nodes();
    let stays = member(&nodes[0], 0).await;
    let mut watchers = [watcher(&nodes[1], 1).await, watcher(&nodes[2], 1).await];
    nodes[0].pause();
    wait_until(SOON, "its death", async || {
        nodes[1..].iter().all(|node| peer_log_events(node).contains(&("n0".to_owned(), PEER_DOWN.to_owned())))
    })
    .await;
    nodes[0].resume_until_restarted(1).await;
    let mut back = resumed(&stays, &nodes[0]).await;
    assert_eq!(back.connected["resumed"], true);
    until_members_on_all(nodes, "room", &["member-0"]).await;
    assert_quiet(&mut watchers).await;
    present(&mut back, "leave", "room", json!({"clientId": "member-0"})).await;
    for watcher in &mut watchers {
        assert_eq!(leaves(watcher, 1).await, ["member-0"]);
    }
}
