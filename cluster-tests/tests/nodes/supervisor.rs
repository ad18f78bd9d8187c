//! Health of a node for its supervisor, and for readers of its process metrics.

use std::os::unix::net::UnixDatagram;

use fanfare_cluster_tests::{Node, NodeOptions, SOON};

#[tokio::test(flavor = "multi_thread")]
async fn systemd_is_notified_that_a_node_is_ready_and_stops() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(SOON)).expect("a time");
    let next = || {
        let mut bytes = [0; 256];
        let count = socket.recv(&mut bytes).expect("a datagram in time");
        String::from_utf8_lossy(&bytes[..count]).trim_end().to_owned()
    };
    let options = NodeOptions::default().environment("NOTIFY_SOCKET", path.to_str().expect("a path"));
    let mut node = Node::start(options).await;
    assert_eq!(next(), "READY=1");
    assert!(node.stop().await.success());
    assert_eq!(next(), "STOPPING=1");
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_have_the_process_and_its_version() {
    let node = Node::start(NodeOptions::default()).await;
    let version = format!("fanfare_build_info{{version=\"{}\"}}", env!("CARGO_PKG_VERSION"));
    assert_eq!(node.metric(&version).await, 1.0);
    assert!(node.metric("process_resident_memory_bytes").await > 1_000_000.0);
    let cpu = node.metric("process_cpu_seconds_total").await;
    // CPU time is counted in whole seconds, so the node works for one.
    let is_counted = async || {
        for _ in 0..100 {
            node.metric("fanfare_open_files").await;
        }
        node.metric("process_cpu_seconds_total").await > cpu
    };
    fanfare_cluster_tests::wait_until(3 * SOON, "CPU to be counted", is_counted).await;
}
