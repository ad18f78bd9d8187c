//! `fanfare backup` of a running node, and `fanfare restore` into an empty folder.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_client::sign::{self, TokenParams};
use fanfare_cluster_tests::command::RunningCommand;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::presence::{names, present};
use fanfare_cluster_tests::receiver::{Answer, Receiver};
use fanfare_cluster_tests::{
    Directory, Node, NodeOptions, Raw, Response, SOON, Socket, history, http, wait_until,
};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const CHANNEL: &str = "orders";
const DONE: &str = "fanfare_backups_total{outcome=\"done\"}";
const ABORTED: &str = "fanfare_backups_total{outcome=\"aborted\"}";
const LARGE: usize = 400;

async fn post(node: &Node, path: &str, body: &Value) -> Response {
    let authorization = http::basic(KEY);
    http::request(node.addr(), "POST", path, &[("authorization", &authorization)], body.to_string()).await
}

/// Publishes a message, which must be acknowledged, and gives the answer.
async fn publish(node: &Node, message: Value) -> Value {
    let answer = post(node, &format!("/api/channels/{CHANNEL}/publish"), &message).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer.json()
}

/// Gives the data of all messages, oldest first.
async fn stored(node: &Node) -> Vec<Value> {
    let mut items = history::read_all(node.addr(), KEY, CHANNEL, "").await;
    items.reverse();
    items.iter().map(|item| item["data"].clone()).collect()
}

/// Gives the data that the receiver has accepted.
fn delivered(receiver: &Receiver) -> Vec<Value> {
    let taken = receiver.received().into_iter().filter(|request| request.is_taken);
    let envelopes = taken.map(|request| request.envelope()).filter(|envelope| envelope["channel"] == CHANNEL);
    let items = envelopes.flat_map(|envelope| envelope["items"].as_array().cloned().expect("items"));
    items.map(|item| item["data"].clone()).collect()
}

async fn exchange(node: &Node, request: &str) -> Response {
    http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], request.to_owned()).await
}

fn token_request(client_id: &str) -> String {
    let params = TokenParams { client_id: Some(client_id.to_owned()), ..TokenParams::default() };
    let request = sign::token_request(&KEY.parse().expect("a key"), params).expect("a request");
    serde_json::to_string(&request).expect("JSON")
}

async fn status_of(node: &Node, token: &str) -> u16 {
    let bearer = http::bearer(token);
    http::request(node.addr(), "GET", "/time", &[("authorization", &bearer)], "").await.status
}

/// Runs `fanfare` with the data folder; gives its exit code, stdout and stderr.
async fn fanfare(data_dir: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let environment = [("FANFARE_DATA_DIR", data_dir.to_str().expect("a path in UTF-8"))];
    let mut running = RunningCommand::start_with(&environment, arguments);
    let ended = running.ended_within(Duration::from_secs(60)).await;
    (ended.code(), running.stdout().join("\n"), running.stderr().join("\n"))
}

/// Replaces the data of a stopped node by the restored data.
fn replace_data(node: &Node, restored: &Path) {
    let data_dir = node.data_dir();
    for name in ["store", "outbox", "clock.json", "connection-key", "node.json"] {
        let path = data_dir.join(name);
        let _ = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    }
    for entry in fs::read_dir(restored).expect("a folder") {
        let entry = entry.expect("an entry");
        fs::rename(entry.path(), data_dir.join(entry.file_name())).expect("moved");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn restored_node_has_all_that_was_acknowledged_before() {
    let receiver = Receiver::start().await;
    receiver.answer(Answer::Status(500));
    let hook = format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"hush\"", receiver.url());
    let directory = Directory::default().account("acme").integration("hook", &hook);
    let options = NodeOptions::default().directory(directory.key("k1", "secret", ALL), KEY);
    let options = options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1");
    let mut node = Node::start(options.limit("integration_retry_ms", 600_000)).await;

    let mut member = Socket::open(&node, "?clientId=ada").await;
    present(&mut member, "enter", "room", json!({})).await;
    for number in 0..100 {
        publish(&node, json!({"data": number})).await;
    }
    let answered = publish(&node, json!({"data": 100, "id": "given"})).await;
    let used = token_request("eve");
    let token = exchange(&node, &used).await.json()["token"].as_str().expect("a token").to_owned();
    let revoked = post(&node, "/keys/k1/revokeTokens", &json!({"clientId": "eve"})).await;
    assert_eq!((revoked.status, status_of(&node, &token).await), (200, 401));

    let folder = tempfile::tempdir().expect("a folder");
    let (file, restored) = (folder.path().join("node.backup"), folder.path().join("restored"));
    let file = file.to_str().expect("a path in UTF-8");
    let is_enough = Arc::new(AtomicBool::new(false));
    let publishing = async {
        let mut last = 100;
        while !is_enough.load(Ordering::SeqCst) {
            last += 1;
            publish(&node, json!({"data": last})).await;
        }
        last
    };
    let backing_up = async {
        let outcome = fanfare(node.data_dir(), &["backup", file]).await;
        is_enough.store(true, Ordering::SeqCst);
        outcome
    };
    let (last, (code, printed, errors)) = tokio::join!(publishing, backing_up);
    assert_eq!(code, Some(0), "{errors}");
    assert!(printed.starts_with("backup of store and outbox of node "), "{printed}");
    wait_until(SOON, "the counter", async || node.metric(DONE).await == 1.0).await;
    assert!(node.metric("fanfare_last_backup_timestamp_seconds").await > 1.0e9);
    publish(&node, json!({"data": "late"})).await;
    node.kill();

    let (code, whole, errors) = fanfare(&restored, &["restore", "--check", file]).await;
    assert!(code == Some(0) && whole.starts_with("whole: store and outbox"), "{whole} {errors}");
    assert!(!restored.exists(), "a check writes nothing");
    let (code, _, errors) = fanfare(&restored, &["restore", file]).await;
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains("revoke them once more"), "{errors}");
    let (code, _, errors) = fanfare(&restored, &["restore", file]).await;
    assert!(code == Some(1) && errors.contains("is not empty"), "{errors}");
    replace_data(&node, &restored);
    receiver.answer(Answer::Status(200));
    node.restart().await;

    assert_eq!(names(&node, "room").await, ["ada"]);
    let kept = stored(&node).await;
    let all: Vec<Value> = (0..=last).map(Value::from).collect();
    assert!(kept.len() > 100 && all.starts_with(&kept), "{kept:?} of 0 to {last}");
    assert_eq!(publish(&node, json!({"data": 100, "id": "given"})).await, answered);
    assert_eq!(stored(&node).await.len(), kept.len(), "a repeat is stored once");
    // The backup of the outbox is a moment newer than that of the store. So events of a message under way at that
    // moment, without an id of its own, may come after its row.
    let outstanding = kept.len() - 1;
    wait_until(3 * SOON, "what was owed", async || delivered(&receiver).len() >= outstanding).await;
    assert!(all.starts_with(&delivered(&receiver)), "{:?}", delivered(&receiver));

    assert_eq!(status_of(&node, &token).await, 401, "revoked before the backup");
    assert_eq!(exchange(&node, &used).await.status, 401, "used before the backup");
    let unknown = exchange(&node, &token_request("bob")).await;
    assert_eq!(unknown.status, 503, "whether it was used is not known here");
    assert!(node.log().contains("data folder restored from a backup"), "{}", node.log());
    node.assert_well().await;
}

/// Publishes enough for a backup to take a while. Random data cannot be compressed.
async fn fill(node: &Node) {
    for _ in 0..LARGE / 20 {
        let messages: Vec<Value> = (0..20)
            .map(|_| {
                let mut random = vec![0; 45_000];
                getrandom::fill(&mut random).expect("the operating system gives random bytes");
                json!({"data": STANDARD.encode(random)})
            })
            .collect();
        let answer = post(node, "/api/channels/large/publish", &json!(messages)).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
}

/// Finds the file of a backup that is being written.
fn unfinished_in(folder: &Path) -> Option<PathBuf> {
    let files = fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path());
    files.into_iter().find(|path| path.extension().is_some_and(|extension| extension == "new"))
}

#[tokio::test(flavor = "multi_thread")]
async fn backup_that_is_cut_short_is_no_backup() {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    let mut node = Node::start(NodeOptions::default().directory(directory, KEY)).await;
    fill(&node).await;

    let token = fs::read_to_string(node.data_dir().join("admin-token")).expect("a token");
    let mut reader = Raw::connect_slow(node.admin(), 4 * 1024).await;
    let bearer = format!("Bearer {}", token.trim());
    let head = format!("GET /backup HTTP/1.1\r\nhost: localhost\r\nauthorization: {bearer}\r\n\r\n");
    assert!(reader.write(head.as_bytes()).await);
    let (status, head) = reader.head(SOON).await.expect("an answer");
    assert_eq!(status, 200, "{head}");
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("node.backup");
    fs::write(&file, "an earlier one").expect("written");
    let path = file.to_str().expect("a path in UTF-8");
    let other_token = folder.path().join("other-token");
    fs::write(&other_token, "x".repeat(32)).expect("written");
    let other_token = other_token.to_str().expect("a path in UTF-8");
    for (more, reason) in [
        (&[][..], "answered 409: another backup is under way"),
        (&["--admin-token-file", other_token], "answered 401: unauthorized"),
    ] {
        let (code, _, errors) = fanfare(node.data_dir(), &[&["backup", path], more].concat()).await;
        assert!(code == Some(1) && errors.contains(reason), "{errors}");
    }
    assert_eq!(fs::read_to_string(&file).expect("a file"), "an earlier one");
    assert_eq!(unfinished_in(folder.path()), None);
    publish(&node, json!({"data": "meanwhile"})).await;
    drop(reader);
    wait_until(SOON, "the end of the first", async || node.metric(ABORTED).await == 1.0).await;
    let refused = http::request(node.admin(), "GET", "/backup", &[], "").await;
    assert_eq!(refused.status, 401, "without the token");

    let data_dir = node.data_dir().to_str().expect("a path in UTF-8").to_owned();
    let environment = [("FANFARE_DATA_DIR", &*data_dir)];
    let mut running = RunningCommand::start_with(&environment, &["backup", path]);
    wait_until(SOON, "the backup to begin", async || {
        unfinished_in(folder.path()).is_some_and(|file| fs::metadata(file).is_ok_and(|file| file.len() > 0))
    })
    .await;
    node.kill();
    assert_eq!(running.ended().await.code(), Some(1), "{:?}", running.stderr());
    assert_eq!(fs::read_to_string(&file).expect("a file"), "an earlier one");
    assert_eq!(unfinished_in(folder.path()), None);

    let link = folder.path().join("latest");
    std::os::unix::fs::symlink(&file, &link).expect("a link");
    let link = link.to_str().expect("a path in UTF-8");
    let (code, printed, errors) = fanfare(Path::new(&data_dir), &["backup", link]).await;
    assert_eq!(code, Some(0), "of a stopped node: {errors}");
    assert!(printed.starts_with("backup of store of node "), "{printed}");
    assert!(fs::symlink_metadata(link).expect("a link").is_symlink());
    let (code, _, errors) = fanfare(Path::new(&data_dir), &["restore", "--check", path]).await;
    assert_eq!(code, Some(0), "{errors}");
    let pipe = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let reading = pipe.clone();
    let taken = tokio::task::spawn_blocking(move || fs::read(reading).expect("a pipe").len() as u64);
    let (code, _, errors) =
        fanfare(Path::new(&data_dir), &["backup", pipe.to_str().expect("a path in UTF-8")]).await;
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(taken.await.expect("read"), fs::metadata(&file).expect("a file").len());
    node.restart().await;
    assert_eq!(stored(&node).await, [json!("meanwhile")]);
    let large = history::read_all(node.addr(), KEY, "large", "").await;
    assert_eq!(large.len(), LARGE);
}
