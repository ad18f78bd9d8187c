//! Bounds in bytes and time of the frames that wait for a client that does not read.

use std::time::Instant;

use super::*;

const DELIVERED: &str = "fanfare_deliveries_total";
const ENDED: &str = "fanfare_slow_consumers_total";
/// Size of the data of each message; its frame is a little longer.
const BYTES: usize = 65_000;

async fn count(node: &Node, name: &str) -> usize {
    node.metric(name).await as usize
}

/// Attaches to the channel, over a connection with the smallest buffers of the kernel.
async fn attached(node: &Node) -> Socket {
    let mut socket =
        Socket::over(Raw::connect_slow(node.addr(), 4 * 1024).await, "", &http::basic(KEY)).await;
    socket.attach("c").await;
    socket
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mebibyte_may_wait_and_one_message_more_ends_the_connection() {
    const OUTBOX: usize = 1024 * 1024;
    let node = Node::start(options().limit("publishes_per_second", 0)).await;
    let mut silent = attached(&node).await;
    let mut publisher = Socket::open(&node, "").await;
    let mut published = 0;
    while count(&node, ENDED).await == 0 {
        published += 1;
        publisher.publish("c", json!({"data": "x".repeat(BYTES)})).await;
        wait_until(SOON, "the delivery", async || {
            count(&node, DELIVERED).await == published || count(&node, ENDED).await == 1
        })
        .await;
    }
    assert_eq!(count(&node, "fanfare_limit_hits_total{limit=\"outbox_bytes\"}").await, 1);
    let delivered = count(&node, DELIVERED).await;
    let (frames, _) = silent.to_end(SOON).await;
    let taken = frames.iter().filter(|frame| frame["op"] == 13).count();
    // The kernel may have a part of one more message, and the last message is the one that exceeded the bound.
    let waited = (delivered - taken) * BYTES;
    assert!((OUTBOX - BYTES..OUTBOX + 2 * BYTES).contains(&waited), "{waited} of {delivered} less {taken}");
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_that_reads_nothing_for_outbox_stall_ms_is_ended() {
    const STALL_MS: u64 = 2_000;
    let limits = |stall_ms: u64| {
        let limits = options().limit("publishes_per_second", 0).limit("outbox_stall_ms", stall_ms);
        limits.limit("outbox_bytes", 256 * 1024 * 1024)
    };
    let (patient, node) = (Node::start(limits(600_000)).await, Node::start(limits(STALL_MS)).await);
    let _silent = (attached(&patient).await, attached(&node).await);
    let mut began = Instant::now();
    for node in [&patient, &node] {
        let mut publisher = Socket::open(node, "").await;
        began = Instant::now();
        // More than the kernel's buffers hold.
        for _ in 0..20 {
            publisher.start(json!({"op": 13, "channel": "c", "messages": vec![json!({"data": "x".repeat(BYTES)}); 7]})).await;
        }
        for _ in 0..20 {
            assert_eq!(publisher.next().await["op"], 1);
        }
    }
    wait_until(SOON, "the end", async || count(&node, ENDED).await == 1).await;
    assert!(began.elapsed().as_millis() >= u128::from(STALL_MS), "{:?}", began.elapsed());
    assert_eq!(count(&node, "fanfare_limit_hits_total{limit=\"outbox_stall_ms\"}").await, 1);
    assert_eq!(count(&patient, ENDED).await, 0, "where more time is set it lives on");
}
