//! Log of a node while its database is away: one line for the outage, and counts of refused requests instead of a line
//! for each.

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Cassandra, Directory, Node, NodeOptions, SOON, http, wait_for, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const REFUSED: usize = 300;
const KINDS: [&str; 3] = ["publish not stored", "message id lookup failed", "history read failed"];
/// Greatest number of lines: about the outage, about each kind of request, and from the driver about its
/// connections.
const LINES_MAX: usize = 25;

async fn request(node: &Node, method: &str, path: &str, body: String) -> u16 {
    http::request(node.addr(), method, path, &[("authorization", &http::basic(KEY))], body).await.status
}

async fn publish(node: &Node, number: usize) -> u16 {
    let mut body = json!({"data": number});
    // Every other publish has an id, which is looked up before.
    if number.is_multiple_of(2) {
        body["id"] = json!(format!("own-{number}"));
    }
    request(node, "POST", &format!("/api/channels/room{}/publish", number % 7), body.to_string()).await
}

fn lines(node: &Node) -> Vec<Value> {
    node.log().lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
}

/// Counts the log lines of a failure, and the failures that later lines count.
fn count_logged(lines: &[Value], what: &str) -> (usize, u64) {
    let by_itself = lines.iter().filter(|line| line["message"] == what).count();
    let again = lines.iter().filter(|line| line["what"] == what);
    (by_itself, again.map(|line| line["times"].as_u64().expect("a number")).sum())
}

#[tokio::test(flavor = "multi_thread")]
async fn database_outage_is_logged_once_and_refusals_are_counted() {
    let Some(cassandra) = Cassandra::to_kill(1) else { return };
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    let options = NodeOptions::default().directory(directory, KEY);
    let node = Node::start(cassandra.store(options, &cassandra.keyspace())).await;
    assert_eq!(publish(&node, 1).await, 200);
    let before = lines(&node).len();
    cassandra.signal("STOP", None);
    let many = (0..REFUSED).map(|number| publish(&node, number));
    let refused = futures_util::future::join_all(many).await.iter().filter(|status| **status == 503).count();
    assert_eq!(refused, REFUSED);
    for path in ["/api/channels/room1/history", "/api/metrics/series"] {
        let asked = (0..10).map(|_| request(&node, "GET", path, String::new()));
        assert_eq!(futures_util::future::join_all(asked).await, [503; 10]);
    }
    cassandra.signal("CONT", None);
    wait_until(SOON, "an acknowledged publish", async || publish(&node, 1).await == 200).await;
    let lines = wait_for(2 * SOON, "the number of what was refused", async || {
        let lines = lines(&node);
        KINDS.iter().all(|kind| count_logged(&lines, kind).1 > 0).then_some(lines)
    })
    .await;
    for kind in KINDS {
        let (by_itself, again) = count_logged(&lines, kind);
        assert_eq!(by_itself, 1, "{kind}");
        let least = if kind.starts_with("history") { 9 } else { REFUSED as u64 / 2 - 1 };
        assert!(again >= least, "{again} times {kind}");
    }
    let written = lines.len() - before;
    assert!(written <= LINES_MAX, "{written} lines:\n{}", node.log());
    let chatter = |line: &&Value| {
        line["level"] == "INFO" && line["target"].as_str().is_some_and(|target| target.starts_with("scylla"))
    };
    assert_eq!(lines.iter().find(chatter), None, "the driver");

    // While connections are refused the driver retries again and again.
    let before = lines.len();
    cassandra.signal("KILL", None);
    let lines = wait_for(6 * SOON, "the numbers of its warnings", async || {
        let lines = self::lines(&node).split_off(before);
        let is_driver =
            |line: &Value| line["what"].as_str().is_some_and(|what| what.contains("control connection"));
        // The first line may be from the phase before.
        (lines.iter().filter(|line| is_driver(line)).count() > 1).then_some(lines)
    })
    .await;
    assert!(lines.len() <= LINES_MAX, "{} lines:\n{}", lines.len(), node.log());
    node.assert_no_panic();
}
