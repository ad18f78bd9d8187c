//! Many restarts of a node do not make the serials of clients longer and longer.

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::{SOON, Socket, wait_until};
use serde_json::json;

const INCARNATIONS: usize = 4;

#[tokio::test(flavor = "multi_thread")]
async fn positions_leave_out_long_retired_incarnations() {
    let mut cluster = Cluster::linked_with(2, |options| options.limit("resume_window_ms", 500)).await;
    let mut subscriber = Socket::open(&cluster.nodes()[0], "").await;
    subscriber.attach("room").await;
    for number in 0..INCARNATIONS {
        Socket::open(&cluster.nodes()[1], "").await.publish("room", json!({"data": number})).await;
        assert_eq!(subscriber.message("room").await["messages"][0]["data"], number);
        cluster.nodes()[1].restart().await;
        cluster.until_linked().await;
    }
    let mut publisher = Socket::open(&cluster.nodes()[0], "").await;
    let mut serial = String::new();
    wait_until(SOON, "the former runs to be forgotten", async || {
        publisher.publish("room", json!({"data": "now"})).await;
        let frame = subscriber.message("room").await;
        frame["serial"].as_str().expect("a serial").clone_into(&mut serial);
        serial.split('~').count() <= 2
    })
    .await;
    // The short serial is as good as one with the former incarnations.
    let mut back = Socket::open(&cluster.nodes()[0], "").await;
    let attached = back.ask(json!({"op": 8, "channel": "room", "serial": serial})).await;
    assert_eq!((&attached["op"], &attached["resumed"]), (&json!(9), &json!(true)), "{attached}");
}
