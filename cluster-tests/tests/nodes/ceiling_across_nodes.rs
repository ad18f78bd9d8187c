//! A tenant's connections are counted over all nodes, and its limit holds for the sum.
//!
//! The time until they are counted is a test of `alone`.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, PEER_DOWN, cut_off, peer_log_events, until_peers_down};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::waits::throughout;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

/// Key of the first account of a tenant with a limit of connections. The next ones are of its second account,
/// and of a tenant without a limit.
const KEY: &str = "secret-one.k1";
const SECOND: &str = "secret-two.k2";
const OTHER: &str = "secret-other.k3";
/// Least time between two reports of changes.
const TELL_EVERY: Duration = Duration::from_millis(200);
/// Time too short for a node failure to be noticed: a peer is declared down at the earliest 2.3 s after its last sign
/// of life.
const NO_DEATH: Duration = Duration::from_secs(1);
/// Time in which the node has checked the quota slots of resumed connections.
const SLOTS_SETTLED: Duration = Duration::from_secs(1);

fn directory(ceiling: u64) -> Directory {
    Directory::default()
        .tenant("acme", Some(ceiling))
        .account_of_tenant("acme-one")
        .key("k1", "secret-one", ALL)
        .account_of_tenant("acme-two")
        .key("k2", "secret-two", ALL)
        .account("other")
        .key("k3", "secret-other", ALL)
}

async fn cluster(ceiling: u64) -> Cluster {
    let directory = directory(ceiling);
    Cluster::linked_with(3, |options| options.directory(directory.clone(), KEY)).await
}

async fn count_of(node: &Node, key: &str) -> Value {
    let (path, authorization) = ("/api/connections/count", http::basic(key));
    let answer = http::request(node.addr(), "GET", path, &[("authorization", &authorization)], "").await;
    assert_eq!(answer.status, 200);
    answer.json()
}

async fn count(node: &Node) -> u64 {
    count_of(node, KEY).await["connections"].as_u64().expect("a count")
}

async fn until_counted(nodes: &[Node], open: u64) {
    for node in nodes {
        wait_until(SOON, &format!("{open} connections"), async || count(node).await == open).await;
    }
}

/// Connects; `None` if the connection is refused for the tenant's limit.
async fn try_open(node: &Node, query: &str, key: &str) -> Option<Socket> {
    let mut raw = Raw::connect(node.addr()).await;
    let authorization = http::basic(key);
    let (status, head) =
        raw.upgrade(&format!("/realtime{query}"), &[("authorization", &authorization)]).await;
    if status == 101 {
        return Some(Socket::upgraded(raw, false).await);
    }
    assert_eq!(status, 429, "{head}");
    None
}

#[tokio::test(flavor = "multi_thread")]
async fn every_node_counts_what_is_open_on_all() {
    let mut cluster = cluster(100).await;
    let nodes = cluster.nodes();
    let (mut open, mut others) = (Vec::new(), Vec::new());
    for (number, node) in nodes.iter().enumerate() {
        for _ in 0..=number {
            open.push(Socket::open_as(node, "", &http::basic(KEY)).await);
            open.push(Socket::open_as(node, "", &http::basic(SECOND)).await);
        }
        others.push(Socket::open_as(node, "", &http::basic(OTHER)).await);
    }
    until_counted(nodes, 12).await;
    for node in &*nodes {
        for (key, expected) in [
            (SECOND, json!({"connections": 12, "limit": 100})),
            (OTHER, json!({"connections": 3, "limit": null})),
        ] {
            wait_until(SOON, &expected.to_string(), async || count_of(node, key).await == expected).await;
        }
    }
    while let Some(socket) = open.pop() {
        drop(socket);
        if open.len() % 4 == 0 {
            until_counted(nodes, open.len() as u64).await;
        }
    }
    assert_eq!(count_of(&nodes[0], OTHER).await["connections"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn ceiling_filled_in_turn_holds_exactly_on_every_node() {
    const CEILING: usize = 5;
    let mut cluster = cluster(CEILING as u64).await;
    let nodes = cluster.nodes();
    let mut open = Vec::new();
    for number in 0..CEILING {
        let key = [KEY, SECOND][number % 2];
        open.push(try_open(&nodes[number % 3], "", key).await.expect("below the ceiling"));
        until_counted(nodes, open.len() as u64).await;
    }
    for node in &*nodes {
        for key in [KEY, SECOND] {
            let authorization = http::basic(key);
            let upgrade = http::upgrade(&authorization);
            let refused = http::request(node.addr(), "GET", "/realtime", &upgrade, "").await;
            assert_eq!((refused.status, &refused.json()["reason"]), (429, &json!("connection_limit")));
        }
        drop(try_open(node, "", OTHER).await.expect("another tenant"));
    }
    until_counted(nodes, CEILING as u64).await;
    // A quota slot that is free on one node is free on all.
    drop(open.remove(0));
    until_counted(nodes, CEILING as u64 - 1).await;
    open.push(try_open(&nodes[2], "", KEY).await.expect("there is a seat"));
    until_counted(nodes, CEILING as u64).await;
    assert!(try_open(&nodes[0], "", KEY).await.is_none());
}

/// Each node enforces the limit for its own connections at once. It admits none once it knows of enough connections on
/// its peers.
#[tokio::test(flavor = "multi_thread")]
async fn connection_storm_gets_at_most_one_ceiling_per_node() {
    const CEILING: usize = 30;
    let mut cluster = cluster(CEILING as u64).await;
    let nodes = cluster.nodes();
    let mut storm = tokio::task::JoinSet::new();
    for number in 0..6 * CEILING {
        let (addr, key) = (nodes[number % 3].addr(), http::basic(KEY));
        storm.spawn(async move {
            let mut raw = Raw::connect(addr).await;
            let (status, _) = raw.upgrade("/realtime", &[("authorization", &key)]).await;
            assert!([101, 429].contains(&status), "{status}");
            (status == 101).then_some(raw)
        });
    }
    let mut admitted: Vec<Raw> = storm.join_all().await.into_iter().flatten().collect();
    assert!((CEILING..=3 * CEILING).contains(&admitted.len()), "{}", admitted.len());
    until_counted(nodes, admitted.len() as u64).await;
    for node in &*nodes {
        assert!(try_open(node, "", KEY).await.is_none(), "at or over the ceiling");
    }
    admitted.truncate(CEILING - 1);
    until_counted(nodes, CEILING as u64 - 1).await;
    let _last = try_open(&nodes[1], "", KEY).await.expect("below the ceiling again");
    until_counted(nodes, CEILING as u64).await;
}

/// One quota slot is left. Each node admits one connection before it knows of the others; then the limit is exceeded.
#[tokio::test(flavor = "multi_thread")]
async fn last_quota_slot_is_given_at_most_once_by_each_node() {
    const CEILING: usize = 10;
    let mut cluster = cluster(CEILING as u64).await;
    let nodes = cluster.nodes();
    let mut open: Vec<Socket> = Vec::new();
    for wave in 0..6 {
        let (one, two, three) = tokio::join!(
            try_open(&nodes[0], "", KEY),
            try_open(&nodes[1], "", SECOND),
            try_open(&nodes[2], "", KEY)
        );
        let admitted: Vec<Socket> = [one, two, three].into_iter().flatten().collect();
        match wave {
            0..3 => assert_eq!(admitted.len(), 3, "wave {wave}"),
            3 => assert!(!admitted.is_empty()),
            _ => assert!(admitted.is_empty(), "wave {wave} after {}", open.len()),
        }
        open.extend(admitted);
        until_counted(nodes, open.len() as u64).await;
    }
    assert!((CEILING..CEILING + nodes.len()).contains(&open.len()));
}

/// Nodes admit connections beyond a limit only until they know of each other's connections.
#[tokio::test(flavor = "multi_thread")]
async fn ceiling_filled_by_one_node_at_once_holds_on_the_others() {
    const CEILING: usize = 10;
    let mut cluster = cluster(CEILING as u64).await;
    let nodes = cluster.nodes();
    for at in 0..nodes.len() {
        until_counted(nodes, 0).await;
        let opening = (0..CEILING).map(|_| try_open(&nodes[at], "", KEY));
        let open: Vec<_> = futures_util::future::join_all(opening).await;
        assert!(open.iter().all(Option::is_some), "below the ceiling");
        until_counted(nodes, CEILING as u64).await;
        let [one, two] = [1, 2].map(|further| &nodes[(at + further) % 3]);
        let (one, two) = tokio::join!(try_open(one, "", KEY), try_open(two, "", SECOND));
        assert!(one.is_none() && two.is_none(), "beyond the ceiling");
    }
}

/// Changes are reported in batches: not one item for each connection, and none if nothing changes.
#[tokio::test(flavor = "multi_thread")]
async fn count_changes_are_sent_in_batches_and_none_when_unchanged() {
    const MANY: usize = 200;
    let mut cluster = cluster(1000).await;
    let nodes = cluster.nodes();
    until_counted(nodes, 0).await;
    let items = async || nodes[0].metric("fanfare_tenant_counts_told_total").await;
    let (begun, before) = (Instant::now(), items().await);
    let mut open = Vec::new();
    for _ in 0..MANY {
        open.push(Socket::open(&nodes[0], "").await);
    }
    until_counted(nodes, MANY as u64).await;
    let after = items().await;
    let rounds = begun.elapsed().div_duration_f64(TELL_EVERY) + 2.0;
    let peers = (nodes.len() - 1) as f64;
    assert!(after > before && after - before <= peers * rounds, "{before} {after} {rounds}");
    throughout(5 * TELL_EVERY, async || assert_eq!(items().await, after, "nothing has changed")).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn quota_slots_of_a_killed_node_are_free_once_it_is_down() {
    const CEILING: usize = 4;
    let mut cluster = cluster(CEILING as u64).await;
    let nodes = cluster.nodes();
    let mut open = Vec::new();
    for node in [0, 2, 2, 2] {
        open.push(Socket::open(&nodes[node], "").await);
    }
    until_counted(nodes, 4).await;
    nodes[2].kill();
    let early = try_open(&nodes[1], "", KEY).await;
    let is_down = peer_log_events(&nodes[1]).contains(&("n2".to_owned(), PEER_DOWN.to_owned()));
    assert!(early.is_none() || is_down, "a silence is no death");
    drop(early);
    until_counted(&nodes[..2], 1).await;
    for node in [0, 1, 0] {
        open.push(try_open(&nodes[node], "", KEY).await.expect("its seats are free"));
        until_counted(&nodes[..2], open.len() as u64 - 3).await;
    }
    nodes[2].restart().await;
    until_counted(nodes, CEILING as u64).await;
    assert!(try_open(&nodes[2], "", KEY).await.is_none(), "it has heard of the others");
}

/// The first node has no seeds, and learns of the others from their gossip.
#[tokio::test(flavor = "multi_thread")]
async fn sum_is_right_again_after_a_stall_of_the_first_node() {
    check_count_after_stall_of(0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sum_is_right_again_after_a_stall_of_a_later_node() {
    check_count_after_stall_of(2).await;
}

async fn check_count_after_stall_of(at: usize) {
    const CEILING: usize = 6;
    let mut cluster = cluster(CEILING as u64).await;
    let nodes = &*cluster.nodes();
    let (paused, others) = (&nodes[at], if at == 0 { &nodes[1..] } else { &nodes[..2] });
    let mut open = Vec::new();
    for node in [&others[0], &others[1], paused, paused] {
        open.push(Socket::open(node, "").await);
    }
    until_counted(nodes, 4).await;
    paused.pause();
    until_counted(others, 2).await;
    // The remaining nodes can fill the limit by themselves.
    for _ in 0..4 {
        open.push(try_open(&others[0], "", KEY).await.expect("the rest is not there"));
    }
    until_counted(others, 6).await;
    paused.resume_until_restarted(1).await;
    assert!(try_open(paused, "", KEY).await.is_none(), "it knows of the others when it is ready");
    // The connections of the stalled incarnation have ended with it.
    until_counted(nodes, 6).await;
    for node in nodes {
        assert!(try_open(node, "", KEY).await.is_none(), "over the ceiling");
    }
    open.drain(..2);
    until_counted(nodes, 4).await;
    open.push(try_open(paused, "", KEY).await.expect("below the ceiling again"));
    until_counted(nodes, 5).await;
}

fn resume(socket: &Socket) -> String {
    format!("?resume={}", socket.connected["connectionKey"].as_str().expect("a key"))
}

#[tokio::test(flavor = "multi_thread")]
async fn session_takeover_by_another_node_keeps_the_quota_slot() {
    let mut cluster = cluster(1).await;
    let nodes = cluster.nodes();
    let mut previous = Socket::open(&nodes[0], "").await;
    for to in [1, 2, 0] {
        until_counted(nodes, 1).await;
        let socket = try_open(&nodes[to], &resume(&previous), KEY).await.expect("it has a seat already");
        assert_eq!(socket.connected["resumed"], true);
        let (frames, _) = previous.to_end(SOON).await;
        assert_eq!(frames.last().map(|frame| &frame["code"]), Some(&json!(40800)), "{frames:?}");
        previous = socket;
    }
    until_counted(nodes, 1).await;
    for node in &*nodes {
        assert!(try_open(node, "", KEY).await.is_none());
    }
    // No other client has the quota slot of the lost connection, whose loss this node may not know yet.
    let query = resume(&previous);
    drop(previous);
    let mut back = try_open(&nodes[1], &query, KEY).await.expect("it has a seat");
    assert_eq!(back.connected["resumed"], true);
    assert_eq!(back.next_within(SLOTS_SETTLED).await, Err(SocketEnd::Silence));
    until_counted(nodes, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_a_stopping_node_keep_their_quota_slots() {
    const CEILING: usize = 5;
    let mut cluster = cluster(CEILING as u64).await;
    let nodes = cluster.nodes();
    let mut open = Vec::new();
    for _ in 0..CEILING {
        open.push(Socket::open(&nodes[2], "").await);
    }
    until_counted(nodes, CEILING as u64).await;
    nodes[2].terminate();
    let mut back = Vec::new();
    for (at, mut socket) in open.into_iter().enumerate() {
        socket.find("to be asked to leave", |frame| frame["op"] == 4).await;
        let query = resume(&socket);
        drop(socket);
        back.push(try_open(&nodes[at % 2], &query, KEY).await.expect("it has a seat"));
    }
    for socket in &mut back {
        assert_eq!(socket.connected["resumed"], true);
        assert_eq!(socket.next_within(SLOTS_SETTLED).await, Err(SocketEnd::Silence));
    }
    assert_eq!(nodes[2].ended().await.code(), Some(0));
    until_counted(&nodes[..2], CEILING as u64).await;
    assert!(try_open(&nodes[0], "", KEY).await.is_none());
}

/// Loses a connection of the first node, and gives the only quota slot to another client. Returns the query of the lost
/// connection's resume, and the new connection.
async fn lose_and_take_slot(nodes: &[Node], by: &Node) -> (String, Socket) {
    let lost = Socket::open(&nodes[0], "").await;
    let query = resume(&lost);
    drop(lost);
    until_counted(nodes, 0).await;
    let taken = try_open(by, "", KEY).await.expect("the seat is free");
    until_counted(nodes, 1).await;
    (query, taken)
}

#[tokio::test(flavor = "multi_thread")]
async fn resuming_client_is_closed_when_its_quota_slot_was_taken() {
    let mut cluster = cluster(1).await;
    let nodes = cluster.nodes();
    let (query, mut taken) = lose_and_take_slot(nodes, &nodes[2]).await;
    assert!(try_open(&nodes[0], &query, KEY).await.is_none(), "where it was it is known to be lost");
    let mut back = try_open(&nodes[1], &query, KEY).await.expect("nobody knows there");
    let frame = back.find("the end", |frame| frame["op"] == 4).await;
    assert_eq!((&frame["code"], &frame["reason"]), (&json!(42900), &json!("connection_limit")));
    assert!(frame["reconnectAfterMs"].as_u64().is_some_and(|ms| ms > 0), "{frame}");
    until_counted(nodes, 1).await;
    assert_eq!(back.to_end(SOON).await.1, SocketEnd::Closed(4029));
    assert_eq!(taken.ask(json!({"op": 0})).await["op"], 0);
    assert!(try_open(&nodes[1], &query, KEY).await.is_none(), "it was lost here now");
}

/// The client is refused at once if the node failure was noticed before, which takes more than a second.
#[tokio::test(flavor = "multi_thread")]
async fn client_of_a_just_killed_node_is_closed_over_a_taken_slot() {
    let mut cluster = cluster(1).await;
    let nodes = cluster.nodes();
    let (query, mut taken) = lose_and_take_slot(nodes, &nodes[2]).await;
    let killed = Instant::now();
    nodes[0].kill();
    match try_open(&nodes[1], &query, KEY).await {
        Some(mut back) => {
            assert_eq!(back.connected["resumed"], true);
            let frame = back.find("the end", |frame| frame["op"] == 4).await;
            assert_eq!(frame["reason"], "connection_limit");
        }
        None => assert!(killed.elapsed() > NO_DEATH, "no death is known after {:?}", killed.elapsed()),
    }
    until_counted(&nodes[1..], 1).await;
    assert_eq!(taken.ask(json!({"op": 0})).await["op"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn going_on_to_a_third_node_at_once_does_not_help() {
    let mut cluster = cluster(1).await;
    let nodes = cluster.nodes();
    let (query, mut taken) = lose_and_take_slot(nodes, &nodes[0]).await;
    let second = try_open(&nodes[1], &query, KEY).await.expect("nobody knows there");
    let mut third = try_open(&nodes[2], &resume(&second), KEY).await.expect("nobody knows there either");
    let frame = third.find("the end", |frame| frame["op"] == 4).await;
    assert_eq!(frame["reason"], "connection_limit");
    until_counted(nodes, 1).await;
    assert_eq!(taken.ask(json!({"op": 0})).await["op"], 0);
}

#[test]
fn partition_sides_fill_the_ceiling_and_admit_none_after_heal() {
    const CEILING: usize = 4;
    isolated(async |network| {
        let directory = directory(CEILING as u64);
        let with_ceiling = |options: NodeOptions| options.directory(directory.clone(), KEY);
        let mut cluster = Cluster::apart_with(&network, 3, with_ceiling).await;
        let nodes = cluster.nodes();
        let mut open = Vec::new();
        for node in &*nodes {
            open.push(Socket::open(node, "").await);
        }
        until_counted(nodes, 3).await;
        let cuts = cut_off(&network, nodes);
        until_peers_down(nodes).await;
        until_counted(&nodes[..1], 1).await;
        until_counted(&nodes[1..], 2).await;
        for (node, free, side, counted) in [(0, 3, 0..1, 4), (1, 1, 1..3, 3), (2, 1, 1..3, 4)] {
            for _ in 0..free {
                open.push(try_open(&nodes[node], "", KEY).await.expect("below the ceiling on this side"));
            }
            // The other node of this side knows of them.
            until_counted(&nodes[side], counted).await;
        }
        for node in &*nodes {
            assert!(try_open(node, "", SECOND).await.is_none(), "at the ceiling of this side");
        }
        drop(cuts);
        until_counted(nodes, 2 * CEILING as u64).await;
        for node in &*nodes {
            assert!(try_open(node, "", KEY).await.is_none(), "over the ceiling");
        }
        // No client of this side is closed.
        for socket in &mut open {
            assert_eq!(socket.ask(json!({"op": 0})).await["op"], 0);
        }
        open.truncate(CEILING - 1);
        until_counted(nodes, CEILING as u64 - 1).await;
        let _last = try_open(&nodes[0], "", KEY).await.expect("below the ceiling again");
    });
}
