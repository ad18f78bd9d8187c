//! A node drains, and its members resume on other nodes within the presence timeout: no leave or enter is delivered.

use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::presence::{Watcher, present, until_members_on_all};
use fanfare_cluster_tests::waits::pace;
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket};
use serde_json::json;
use tokio::time::Instant;

const ROOM: &str = "room";
const MEMBERS: usize = 8;
const PRESENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time until a late client reconnects, after the end of the node.
const LATE: Duration = Duration::from_millis(3_500);
/// Time after the end of a node in which every other one would have made its leaves by itself.
const QUIET: Duration = Duration::from_secs(17);

async fn three() -> Cluster {
    let timeout_ms = u64::try_from(PRESENCE_TIMEOUT.as_millis()).expect("a short time");
    Cluster::linked_with(3, |options: NodeOptions| options.limit("presence_grace_ms", timeout_ms)).await
}

fn name(number: usize) -> String {
    format!("member-{number}")
}

fn names() -> Vec<String> {
    (0..MEMBERS).map(name).collect()
}

async fn members_on(node: &Node) -> Vec<Socket> {
    let mut members = Vec::new();
    for number in 0..MEMBERS {
        let mut socket = Socket::open(node, &format!("?clientId={}", name(number))).await;
        present(&mut socket, "enter", ROOM, json!({"data": number})).await;
        members.push(socket);
    }
    members
}

/// Waits for the request to reconnect, and resumes at `to`, late or as soon as allowed.
async fn moves(mut member: Socket, number: usize, to: &Node, is_late: bool) -> Socket {
    let asked = member.find("to be asked to go", |frame| frame["op"] == 4).await;
    assert_eq!(asked["code"], 50003, "{asked}");
    let key = member.connected["connectionKey"].as_str().expect("a key").to_owned();
    let previous = member.connected["connectionId"].clone();
    drop(member);
    let after_ms = asked["reconnectAfterMs"].as_u64().expect("a time");
    assert!(after_ms <= 5_000, "{asked}");
    pace(if is_late { LATE } else { Duration::from_millis(after_ms) }).await;
    let mut back = Socket::open(to, &format!("?clientId={}&resume={key}", name(number))).await;
    assert_eq!((&back.connected["resumed"], &back.connected["connectionId"]), (&json!(true), &previous));
    if number.is_multiple_of(3) {
        // Clients that do not know whether they are still present enter again.
        present(&mut back, "enter", ROOM, json!({"data": number})).await;
    }
    back
}

/// Moves all members at the same time, to these nodes in turn.
async fn move_all(members: Vec<Socket>, to: &[&Node], late: impl Fn(usize) -> bool) -> Vec<Socket> {
    let moving = members.into_iter().enumerate();
    let moving = moving.map(|(number, member)| moves(member, number, to[number % to.len()], late(number)));
    futures_util::future::join_all(moving).await
}

async fn assert_quiet(watchers: &mut [Watcher]) {
    let end = Instant::now() + QUIET;
    for watcher in watchers {
        watcher.assert_quiet(end.saturating_duration_since(Instant::now())).await;
        assert!(watcher.list.keys().eq(&names()), "{:?}", watcher.list);
    }
}

async fn leave_one_by_one(members: &mut [Socket], watchers: &mut [Watcher]) {
    for member in &mut *members {
        present(member, "leave", ROOM, json!({})).await;
    }
    for watcher in watchers {
        for number in 0..MEMBERS {
            assert!(watcher.take_until(Instant::now() + SOON).await);
            assert_eq!(watcher.events.len(), number + 1);
        }
        assert!(watcher.list.is_empty(), "{:?}", watcher.list);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn member_that_resumes_in_presence_timeout_of_drain_never_left() {
    let mut cluster = three().await;
    let nodes = cluster.nodes();
    let members = members_on(&nodes[0]).await;
    let mut watchers = vec![Watcher::on(&nodes[1], ROOM).await, Watcher::on(&nodes[2], ROOM).await];
    let mut watching = Watcher::on(&nodes[0], ROOM).await;
    nodes[0].terminate();
    let to = [&nodes[1], &nodes[2]];
    let mut members = move_all(members, &to, |number| number % 4 >= 2).await;
    assert!(!watching.take_until(Instant::now() + SOON).await, "{:?}", watching.events);
    assert_eq!(nodes[0].ended().await.code(), Some(0));
    watchers.push(Watcher::on(&nodes[1], ROOM).await);
    assert_quiet(&mut watchers).await;
    leave_one_by_one(&mut members, &mut watchers).await;
    until_members_on_all(&nodes[1..], ROOM, &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn watchers_see_no_change_over_two_drains_in_turn() {
    let mut cluster = three().await;
    let nodes = cluster.nodes();
    let members = members_on(&nodes[0]).await;
    let mut watchers = [Watcher::on(&nodes[2], ROOM).await];
    assert_eq!(nodes[0].operate("POST", "/drain").await.status, 202);
    let members = move_all(members, &[&nodes[1]], |number| number == 5).await;
    nodes[1].terminate();
    let mut members = move_all(members, &[&nodes[2]], |number| number == 1).await;
    for node in &mut nodes[..2] {
        assert_eq!(node.ended().await.code(), Some(0));
    }
    assert_quiet(&mut watchers).await;
    leave_one_by_one(&mut members, &mut watchers).await;
}
