//! Messages of one node reach the subscribers of every other, and cross only the links to nodes with
//! subscribers.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Node, SOON, Socket, wait_until};
use serde_json::{Value, json};

/// Time in which no further frame must come.
const QUIET: Duration = Duration::from_millis(300);

/// Greatest time until a peer acks.
const CONFIRM_WAIT: Duration = Duration::from_secs(1);
/// Time that a busy machine adds to the wait.
const A_WHILE: Duration = Duration::from_secs(5);
/// Number of publishes that take longer than anything else if each waits for a peer.
const PUBLISHES: u32 = 20;

async fn next_message(socket: &mut Socket) -> Value {
    let mut frame = socket.find("a message", |frame| frame["op"] == 13).await;
    frame["messages"][0].take()
}

/// A client on each node publishes `each` messages, and receives those of all.
async fn all_receive_from_all(nodes: &[Node], each: usize) {
    let mut sockets = Vec::new();
    for node in nodes {
        let mut socket = Socket::open(node, "").await;
        socket.attach("room").await;
        sockets.push(socket);
    }
    for number in 0..each {
        for (from, socket) in sockets.iter_mut().enumerate() {
            socket.start(json!({"op": 13, "channel": "room", "data": [from, number]})).await;
        }
    }
    for socket in &mut sockets {
        let mut next = vec![0; nodes.len()];
        for _ in 0..nodes.len() * each {
            let message = next_message(socket).await;
            let part = |at: usize| message["data"][at].as_u64().expect("a number") as usize;
            assert_eq!(part(1), next[part(0)], "{message}");
            next[part(0)] += 1;
        }
        assert!(next.iter().all(|next| *next == each), "{next:?}");
    }
    for socket in &mut sockets {
        while let Ok(frame) = socket.next_within(QUIET).await {
            assert_ne!(frame["op"], 13, "{frame}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_on_all_nodes_get_messages_once_in_order() {
    let mut cluster = Cluster::linked(3).await;
    all_receive_from_all(cluster.nodes(), 50).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_nodes_exchange_messages_also_after_one_is_killed() {
    let mut cluster = Cluster::linked(10).await;
    let nodes = cluster.nodes();
    all_receive_from_all(nodes, 5).await;
    let (killed, others) = nodes.split_last_mut().expect("ten nodes were started");
    killed.kill();
    for node in &*others {
        let is_known = async || node.metric("fanfare_peers_known").await == 8.0;
        wait_until(SOON, "the link to it to be down", is_known).await;
    }
    all_receive_from_all(others, 5).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_is_the_same_on_every_node() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut publisher = Socket::open(n0, "?clientId=ada").await;
    let mut there = Socket::open(n1, "").await;
    let mut packed = Socket::open(n1, "?format=msgpack").await;
    for socket in [&mut publisher, &mut there, &mut packed] {
        socket.attach("room").await;
    }
    let sent =
        json!({"name": "greeting", "data": {"text": "é", "n": [1, null]}, "extras": {"headers": {"a": "b"}}});
    publisher.publish("room", sent).await;
    let here = next_message(&mut publisher).await;
    assert_eq!(here["connectionId"], publisher.connected["connectionId"]);
    assert_eq!(next_message(&mut there).await, here);
    assert_eq!(next_message(&mut packed).await, here);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_publish_crosses_one_link_where_one_node_listens() {
    let mut cluster = Cluster::linked(3).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut listener = Socket::open(n1, "").await;
    listener.attach("room").await;
    for number in 0..20 {
        publisher.publish("room", json!({"data": number})).await;
        assert_eq!(next_message(&mut listener).await["data"], number);
    }
    assert_eq!(n0.metric("fanfare_forwards_sent_total").await, 20.0);
    assert_eq!(n1.metric("fanfare_forwards_taken_total").await, 20.0);
    assert_eq!(n2.metric("fanfare_forwards_taken_total").await, 0.0);
}

/// A thread of shards would do the work of peers between the frames of its clients.
#[tokio::test(flavor = "multi_thread")]
async fn threads_of_their_own_speak_with_peers() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut listener = Socket::open(n1, "").await;
    listener.attach("room").await;
    let before = [n0.woken("links"), n1.woken("links")];
    for number in 0..PUBLISHES {
        publisher.publish("room", json!({"data": number})).await;
        assert_eq!(next_message(&mut listener).await["data"], number);
    }
    // The thread was woken to send and to ack. Another thread may find it awake.
    for (node, before) in [n0, n1].into_iter().zip(before) {
        let woken = node.woken("links") - before;
        assert!(woken >= u64::from(PUBLISHES / 2), "{woken}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_that_is_published_after_attached_is_missed() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut subscriber = Socket::open(n1, "").await;
    for number in 0..100 {
        let channel = format!("room:{number}");
        subscriber.attach(&channel).await;
        publisher.publish(&channel, json!({"data": number})).await;
        assert_eq!(next_message(&mut subscriber).await["data"], number);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn publisher_receives_peer_messages_once_it_subscribes() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut socket = Socket::open(n1, "").await;
    for (modes, resumed) in [("publish", false), ("subscribe", true)] {
        let attached = socket.ask(json!({"op": 8, "channel": "room", "modes": [modes]})).await;
        assert_eq!((&attached["op"], &attached["resumed"]), (&json!(9), &json!(resumed)), "{attached}");
    }
    publisher.publish("room", json!({"data": 1})).await;
    assert_eq!(next_message(&mut socket).await["data"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ack_waits_for_the_other_node_but_not_for_long() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut subscriber = Socket::open(n1, "").await;
    subscriber.attach("room").await;
    n1.pause();
    let published = Instant::now();
    publisher.publish("room", json!({"data": 1})).await;
    let waited = published.elapsed();
    n1.resume();
    let stalled = published.elapsed();
    assert!((CONFIRM_WAIT..CONFIRM_WAIT + A_WHILE).contains(&waited), "{waited:?}");
    if stalled < CONFIRM_WAIT + CONFIRM_WAIT / 2 {
        assert_eq!(next_message(&mut subscriber).await["data"], 1);
    } else {
        // A node that is stalled for more than two seconds restarts in place, and loses the subscriber.
        let (frames, ended) = subscriber.to_end(A_WHILE).await;
        let has_come = frames.iter().any(|frame| frame["messages"][0]["data"] == 1);
        assert!(has_come || ended == SocketEnd::Gone, "{frames:?}, {ended:?} after {stalled:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_was_killed_is_not_waited_for() {
    let mut cluster = Cluster::linked(3).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut subscriber = Socket::open(n1, "").await;
    let mut lost = Socket::open(n2, "").await;
    subscriber.attach("room").await;
    lost.attach("room").await;
    n2.kill();
    publisher.publish("room", json!({"data": 1})).await;
    assert_eq!(next_message(&mut subscriber).await["data"], 1);
    let known = async |count: f64| n0.metric("fanfare_peers_known").await == count;
    wait_until(SOON, "the link to be down", async || known(1.0).await).await;
    let begun = Instant::now();
    for data in 0..PUBLISHES {
        publisher.publish("room", json!({"data": data})).await;
        assert_eq!(next_message(&mut subscriber).await["data"], data);
    }
    let took = begun.elapsed();
    assert!(
        took < CONFIRM_WAIT * PUBLISHES,
        "each would take so long if it waited for the dead node: {took:?}"
    );
    subscriber.attach("another").await;
    n2.restart().await;
    wait_until(SOON, "the link to be up again", async || known(2.0).await).await;
    let mut back = Socket::open(n2, "").await;
    back.attach("room").await;
    publisher.publish("room", json!({"data": 2})).await;
    assert_eq!(next_message(&mut subscriber).await["data"], 2);
    assert_eq!(next_message(&mut back).await["data"], 2);
}
