//! A node that is not ready in time fails its test at once, and is killed.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions};
use futures_util::FutureExt as _;

/// Time too short for a start: with a seed that does not answer a node is not ready before three seconds.
const TOO_SHORT: Duration = Duration::from_millis(500);

/// Whether a process with this environment variable runs.
fn is_running(variable: &str) -> bool {
    let processes = std::fs::read_dir("/proc").expect("the processes of this machine").filter_map(Result::ok);
    processes
        .map(|process| std::fs::read(process.path().join("environ")).unwrap_or_default())
        .any(|environment| environment.split(|byte| *byte == 0).any(|one| one == variable.as_bytes()))
}

#[tokio::test]
async fn a_node_that_is_not_ready_in_time_is_ended() {
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(key.path(), "A".repeat(43) + "=").expect("it is writable");
    let node_id = format!("late-{}", std::process::id());
    let options = NodeOptions::default()
        .directory(Directory::default().account("acme").key("k1", "secret", ALL), "secret.k1")
        .environment("FANFARE_NODE_ID", &node_id)
        .environment("FANFARE_STORE", "none")
        .environment("FANFARE_GOSSIP_LISTEN", "127.0.0.1:0")
        .environment("FANFARE_PEER_LISTEN", "127.0.0.1:0")
        .environment("FANFARE_CLUSTER_KEY_FILE", &key.path().to_string_lossy())
        .environment("FANFARE_SEED", "127.0.0.1:1");
    let started = AssertUnwindSafe(Node::start_within(TOO_SHORT, options)).catch_unwind().await;
    let message = started.err().expect("it is not ready").downcast::<String>().expect("a text");
    assert!(message.ends_with("in vain for the node to be ready"), "{message}");
    assert!(!is_running(&format!("FANFARE_NODE_ID={node_id}")), "it still runs");
}
