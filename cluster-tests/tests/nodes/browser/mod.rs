//! A real browser against a real node: event stream, socket, CORS, and the stream over a restart.

use std::collections::HashSet;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use fanfare_cluster_tests::{Node, NodeOptions, Proxy, Socket};
use serde_json::{Value, json};
use tempfile::TempDir;

const PAGE: &str = include_str!("page.html");
/// Timeout of a step. The first start of a browser reads hundreds of megabytes from a disk that all other tests read
/// from, too.
const PATIENCE: Duration = Duration::from_secs(60);
const BROWSERS: [&str; 3] = ["chromium", "chromium-browser", "google-chrome"];

/// A browser with one page. Dropping it ends it.
struct Browser {
    process: Child,
    _folder: TempDir,
}

impl Browser {
    /// Opens the page; `None` without a browser, which is a failure in CI.
    fn open(fragment: &str) -> Option<Self> {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let page = folder.path().join("page.html");
        std::fs::write(&page, PAGE).expect("the folder is writable");
        let begin = |browser: &&str| {
            Command::new(browser)
                // Root can only run the browser without a sandbox, and the page is the test's own.
                .args([
                    "--headless",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--disable-dev-shm-usage",
                    "--no-first-run",
                ])
                .arg(format!("--user-data-dir={}", folder.path().join("profile").display()))
                .arg(format!("file://{}#{fragment}", page.display()))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .ok()
        };
        let Some(process) = BROWSERS.iter().find_map(begin) else {
            fanfare_cluster_tests::not_run(&format!("none of {BROWSERS:?} is here"));
            return None;
        };
        Some(Self { process, _folder: folder })
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Reports of the page, by name. The page repeats a report under its id if the answer is lost in the restart.
#[derive(Default)]
struct Reports {
    reports: Vec<(String, Value)>,
    ids: HashSet<String>,
}

impl Reports {
    /// Reads until these values were reported under the name, in this order.
    async fn wait_for(&mut self, socket: &mut Socket, name: &str, expected: &[Value]) {
        let end = tokio::time::Instant::now() + PATIENCE;
        while self.of(name).len() < expected.len() {
            let left = end.saturating_duration_since(tokio::time::Instant::now());
            let frame = socket.next_within(left).await;
            let frame = frame.unwrap_or_else(|end| unreachable!("{name}: {end:?} after {:?}", self.reports));
            for message in frame["messages"].as_array().into_iter().flatten() {
                let text =
                    |field: &str| message[field].as_str().expect("a report has a name and an id").to_owned();
                if self.ids.insert(text("id")) {
                    self.reports.push((text("name"), message["data"].clone()));
                }
            }
        }
        assert_eq!(self.of(name), expected, "{name}");
    }

    fn of(&self, name: &str) -> Vec<Value> {
        self.reports.iter().filter(|(own, _)| own == name).map(|(_, data)| data.clone()).collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn browser_subscribes_publishes_and_misses_nothing_over_restart() {
    let mut node = Node::start(NodeOptions::default()).await;
    let (proxy, door) = (Proxy::to(node.addr()).await, Proxy::to(node.addr()).await);
    let mut socket = Socket::open(&node, "").await;
    socket.attach("report").await;
    socket.publish("news", json!({"data": "before"})).await;
    let fragment = format!("{},{},{}", proxy.addr(), door.addr(), node.key());
    let Some(_browser) = Browser::open(&fragment) else { return };
    let mut reports = Reports::default();
    reports.wait_for(&mut socket, "stream attached", &[json!(false), json!(false)]).await;
    reports.wait_for(&mut socket, "socket attached", &[json!("1")]).await;
    reports.wait_for(&mut socket, "refused", &[json!(40100)]).await;
    reports.wait_for(&mut socket, "closed", &[json!(4001)]).await;
    let unauthorized = json!([401, {"error": "unauthorized"}]);
    reports.wait_for(&mut socket, "unauthorized", &[unauthorized]).await;

    let mut publisher = Socket::open(&node, "").await;
    publisher.publish("news", json!({"data": {"text": "é"}})).await;
    publisher.publish("sport: ball/é", json!({"data": 1})).await;
    // Messages of different channels have no order.
    let (news, mut expected) = ("stream message on news", vec![json!({"text": "é"})]);
    reports.wait_for(&mut socket, news, &expected).await;
    reports.wait_for(&mut socket, "stream message on sport: ball/é", &[json!(1)]).await;
    reports.wait_for(&mut socket, "socket message", &[json!("before"), json!({"text": "é"})]).await;

    // Only the link of the stream is cut, and the browser reconnects by itself.
    proxy.cut();
    publisher.publish("news", json!({"data": "while cut"})).await;
    expected.push(json!("while cut"));
    reports.wait_for(&mut socket, news, &expected).await;
    let attached = [false, false, true, true].map(|resumed| json!(resumed));
    reports.wait_for(&mut socket, "stream attached", &attached).await;
    node.assert_well().await;

    publisher.publish("news", json!({"data": "before the end"})).await;
    expected.push(json!("before the end"));
    reports.wait_for(&mut socket, news, &expected).await;
    proxy.turn_away();
    door.turn_away();
    node.kill();
    node.restart().await;
    let mut publisher = Socket::open(&node, "").await;
    publisher.publish("news", json!({"data": "after a restart"})).await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("report").await;
    proxy.turn_to(node.addr());
    door.turn_to(node.addr());
    expected.push(json!("after a restart"));
    reports.wait_for(&mut socket, news, &expected).await;
    let attached = [false, false, true, true, true, true].map(|resumed| json!(resumed));
    reports.wait_for(&mut socket, "stream attached", &attached).await;
}
