//! Nodes find each other by one seed, and notice within three seconds who is dead and who stands still.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, told, write_key};
use fanfare_cluster_tests::{Node, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

const ALIVE: &str = "a node is alive";
const DEAD: &str = "a node is dead";
const LEFT: &str = "a node has left";
const NOTICED_MAX: Duration = Duration::from_secs(3);
/// Who gets no time himself waits longer before he holds others for dead, as on a busy machine.
const TRIES: usize = 5;
const ALONE: &str = "no seed has answered, so this node serves alone until one does: a seed is where another node has its gossip, and --cluster-key-file is the same on all";
const READABLE: &str = "everybody on this machine can read the cluster key";

fn times(node: &Node, other: &str, message: &str) -> usize {
    told(node).iter().filter(|(of, said)| of == other && said == message).count()
}

async fn until_told(nodes: &[&Node], other: &str, message: &str, count: usize) {
    let what = format!("{count} times `{message}` of {other}");
    wait_until(SOON, &what, async || nodes.iter().all(|node| times(node, other, message) >= count)).await;
}

async fn three() -> Cluster {
    let mut cluster = Cluster::start(3).await;
    let nodes = cluster.nodes();
    let (n0, n1, n2) = (&nodes[0], &nodes[1], &nodes[2]);
    until_told(&[n1, n2], "n0", ALIVE, 1).await;
    until_told(&[n0, n2], "n1", ALIVE, 1).await;
    until_told(&[n0, n1], "n2", ALIVE, 1).await;
    cluster
}

/// Each says of itself where it is, what it speaks and how it stands, and all others say the same of it.
#[tokio::test(flavor = "multi_thread")]
async fn node_facts_are_the_same_on_all_members() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let facts = |told: &Value| {
        let names =
            ["incarnation", "listen", "gossip", "peer", "version", "protocolMinor", "ready", "draining"];
        names.map(|name| told[name].clone())
    };
    for (at, node) in nodes.iter().enumerate() {
        let own = node.operate("GET", "/debug/members").await.json()["node"].clone();
        assert_eq!(own["listen"], node.addr().to_string());
        assert_eq!(own["gossip"], node.gossip().expect("a node of a cluster").to_string());
        assert_eq!((&own["ready"], &own["draining"]), (&json!(true), &json!(false)), "{own}");
        assert!(facts(&own).iter().all(|fact| !fact.is_null()), "{own}");
        for other in nodes.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| other) {
            let is_told = async || {
                let told = other.operate("GET", "/debug/members").await.json()["members"].clone();
                let told =
                    told.as_array().expect("members").iter().find(|one| one["nodeId"] == own["nodeId"]);
                told.is_some_and(|told| facts(told) == facts(&own) && told["state"] == "alive")
            };
            wait_until(SOON, "the same to be told of it", is_told).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_whose_seed_is_silent_serves_alone_and_says_so() {
    let cluster = Cluster::start(1).await;
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let seed = silent.local_addr().expect("it is bound").to_string();
    let alone = Node::start(cluster.one_more("alone").environment("FANFARE_SEED", &seed)).await;
    until_told(&[&alone], "", ALONE, 1).await;
    assert_eq!(times(&alone, "", READABLE), 0);
    alone.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_key_that_everybody_can_read_is_warned_of() {
    let cluster = Cluster::start(1).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("cluster.key");
    write_key(&file, [7; 32], 0o644);
    let file = file.to_str().expect("a path in UTF-8");
    let node = Node::start(cluster.one_more("open").environment("FANFARE_CLUSTER_KEY_FILE", file)).await;
    until_told(&[&node], "", READABLE, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_seed_that_has_a_name_is_found_beside_one_that_nobody_knows() {
    let mut cluster = Cluster::start(1).await;
    let port = cluster.nodes()[0].gossip().expect("a node of a cluster").port();
    let seeds = format!("nowhere.invalid:{port},localhost:{port}");
    let named = Node::start(cluster.one_more("named").environment("FANFARE_SEED", &seeds)).await;
    until_told(&[&named], "n0", ALIVE, 1).await;
    until_told(&[&cluster.nodes()[0]], "named", ALIVE, 1).await;
    until_told(&[&named], "", "a seed cannot be looked up", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_node_is_down_within_three_seconds_and_rejoins() {
    let mut cluster = three().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    for attempt in 1.. {
        n2.kill();
        let killed = Instant::now();
        until_told(&[n0, n1], "n2", DEAD, attempt).await;
        let noticed = killed.elapsed();
        let said = n0.operate("GET", "/debug/members").await.json();
        let members = said["members"].as_array().expect("a list").clone();
        let dead = members.iter().find(|member| member["nodeId"] == "n2").expect("it is known");
        assert_eq!((&dead["state"], &dead["ready"]), (&json!("dead"), &json!(false)), "{dead}");
        n2.restart().await;
        until_told(&[n0, n1], "n2", ALIVE, attempt + 1).await;
        until_told(&[n2], "n0", ALIVE, attempt + 1).await;
        if noticed < NOTICED_MAX {
            break;
        }
        assert!(attempt < TRIES, "{noticed:?}");
    }
    assert_eq!(times(n0, "n1", DEAD) + times(n1, "n0", DEAD), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicate_node_id_stops_the_new_node_and_the_first_serves_on() {
    let mut cluster = Cluster::linked(3).await;
    let mut listening = Socket::open(&cluster.nodes()[1], "").await;
    listening.attach("room").await;
    let other = Node::start_in_vain(cluster.one_more("n1"));
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut publishing = Socket::open(n0, "").await;
    let publish = async |publishing: &mut Socket, listening: &mut Socket, number: u32| {
        publishing.publish("room", json!({ "data": number })).await;
        assert_eq!(listening.message("room").await["messages"][0]["data"], number);
    };
    let mut published = 0;
    tokio::pin!(other);
    let (ended, log) = loop {
        publish(&mut publishing, &mut listening, published).await;
        published += 1;
        tokio::select! {
            biased;
            ended = &mut other => break ended,
            () = tokio::time::sleep(Duration::from_millis(5)) => {}
        }
    };
    assert_eq!(ended.code(), Some(1), "{log}");
    assert!(log.contains("another node has the same id and goes on, so this one stops"), "{log}");
    assert!(!log.contains("thread"), "{log}");
    let told = "another node has the same id: give each one its own with --node-id";
    until_told(&[n1], "n1", told, 1).await;
    let ready = http::request(n1.admin(), "GET", "/ready", &[], "").await;
    assert_eq!(ready.status, 200);
    publish(&mut publishing, &mut listening, published).await;
    for node in [n0, n2] {
        assert_eq!(times(node, "n1", DEAD), 0);
        assert_eq!(node.metric("fanfare_peers_known").await, 2.0);
    }
    // The other one, which never served, has not left for it.
    n1.kill();
    let later = cluster.add(|options| options).await;
    let state = async || {
        let members = later.operate("GET", "/debug/members").await.json()["members"].clone();
        let members = members.as_array().expect("members").iter();
        members.filter(|member| member["nodeId"] == "n1").map(|member| member["state"].clone()).next()
    };
    wait_until(SOON, "it to be dead", async || state().await == Some(json!("dead"))).await;
}

/// Also where one of the two has been linked to before they hear of each other.
#[tokio::test(flavor = "multi_thread")]
async fn of_two_nodes_with_one_id_that_start_at_once_one_stays() {
    let mut cluster = Cluster::linked(1).await;
    for _ in 0..3 {
        let options = [cluster.one_more("twin"), cluster.one_more("twin")];
        let (stays, ended, log) = Node::start_one_of(options).await;
        assert_eq!(ended.code(), Some(1), "{log}");
        assert!(log.contains("another node has the same id and goes on, so this one stops"), "{log}");
        // As long as the one that ended was heard by it.
        tokio::time::sleep(Duration::from_secs(2)).await;
        let ready = http::request(stays.admin(), "GET", "/ready", &[], "").await;
        assert_eq!(ready.status, 200, "{}", stays.log());
        let n0 = &cluster.nodes()[0];
        wait_until(SOON, "the link to it", async || n0.metric("fanfare_peers_known").await == 1.0).await;
    }
}

/// A stop in good order is nothing to be warned of, at whichever node, and told of before the links are left.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_is_stopped_has_left_and_nobody_is_warned() {
    let mut cluster = Cluster::linked(3).await;
    for stops in 1..=3 {
        for index in 0..3 {
            assert_eq!(cluster.nodes()[index].stop().await.code(), Some(0));
            until_told(&[&cluster.nodes()[index]], "", "stopped", stops).await;
            cluster.restart(index).await;
            cluster.until_linked().await;
        }
    }
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    assert_eq!(n2.stop().await.code(), Some(0));
    until_told(&[n2], "", "stopped", 4).await;
    let warnings = |node: &Node| {
        let log = node.log();
        let is_warning = |line: &&str| line.contains("WARN") || line.contains("ERROR");
        log.lines().filter(is_warning).map(str::to_owned).collect::<Vec<_>>()
    };
    for node in [&*n0, n1, n2] {
        assert_eq!(warnings(node), [""; 0]);
    }
    n1.kill();
    // By then the silence of the other one was noticed as well.
    until_told(&[n0], "n1", DEAD, 1).await;
    assert_eq!(warnings(n0).iter().find(|line| line.contains("\"n2\"")), None);
    assert_eq!(times(n0, "n2", LEFT), 4);
    // Two threads tell of it.
    let last = |text: &str| {
        let log = n0.log();
        let line = log.lines().rfind(|line| line.contains(text)).expect("it was told");
        serde_json::from_str::<Value>(line).expect("JSON")["timestamp"].as_str().map(str::to_owned)
    };
    assert!(last(LEFT) <= last("link to a peer is left"), "{}", n0.log());
}

/// Who comes later hears of it from others alone.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_has_left_has_left_for_those_who_come_later_too() {
    let mut cluster = Cluster::linked(2).await;
    assert_eq!(cluster.nodes()[1].stop().await.code(), Some(0));
    let later = cluster.add(|options| options).await;
    let standing = async || {
        let members = later.operate("GET", "/debug/members").await.json()["members"].clone();
        let members = members.as_array().expect("members").iter();
        let standing = |member: &Value| (member["nodeId"].clone(), member["state"].clone());
        members.map(standing).collect::<Vec<_>>()
    };
    let expected = [(json!("n0"), json!("alive")), (json!("n1"), json!("left"))];
    wait_until(SOON, "both to stand as they are", async || standing().await == expected).await;
    // It was asked, and does not answer.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(standing().await, expected);
    let warnings =
        later.log().lines().filter(|line| line.contains("WARN")).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(warnings, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_dies_while_it_is_leaving_is_told_of() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    // They are asked to go one after the other.
    let _clients = futures_util::future::join_all((0..300).map(|_| Socket::open(n1, ""))).await;
    n1.terminate();
    wait_until(SOON, "the other one to leave", async || {
        n0.operate("GET", "/debug/members").await.json()["members"][0]["draining"] == true
    })
    .await;
    n1.kill();
    until_told(&[n0], "n1", "a node has died while it was leaving", 1).await;
    assert_eq!(times(n0, "n1", LEFT) + times(n0, "n1", DEAD), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_is_down_until_it_returns_as_new_incarnation() {
    let mut cluster = three().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    for attempt in 1.. {
        let run = async |of: &Node| {
            let seen = of.operate("GET", "/debug/members").await.json();
            let members = seen["members"].as_array().expect("members").clone();
            let n2 = members.into_iter().find(|member| member["nodeId"] == "n2").expect("it is a member");
            (n2["incarnation"].clone(), n2["state"] == "alive")
        };
        let former = run(n0).await.0;
        n2.pause();
        let paused = Instant::now();
        until_told(&[n0, n1], "n2", DEAD, attempt).await;
        let noticed = paused.elapsed();
        n2.resume_anew(attempt as u64).await;
        for node in [&*n0, &*n1] {
            wait_until(SOON, "the other run to be alive", async || {
                let (run, is_alive) = run(node).await;
                run != former && is_alive
            })
            .await;
        }
        if noticed < NOTICED_MAX {
            break;
        }
        assert!(attempt < TRIES, "{noticed:?}");
    }
    assert_eq!(times(n2, "n0", DEAD) + times(n2, "n1", DEAD), 0, "its own pause is no silence of others");
}
