//! A database with authentication: each missing permission is reported with its setting, and a user that may only read
//! and write is enough for a node.

use std::path::Path;

use fanfare_client::sign::{self, TokenParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Cassandra, Directory, Node, NodeOptions, RunningCommand, SOON, history, http};
use serde_json::json;

const KEY: &str = "secret.k1";
const USER: (&str, &str) = ("fanfare", "correct horse battery");
const WRONG: &str = "not the password of anybody";

fn password_file(folder: &Path, password: &str) -> String {
    let file = folder.join("password");
    std::fs::write(&file, format!("{password}\n")).expect("the folder is writable");
    file.display().to_string()
}

/// Gives the output of `schema apply`, which must end with this code and hold no password.
async fn apply(cassandra: &Cassandra, keyspace: &str, user: Option<(&str, &str)>, code: i32) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let points = cassandra.points().join(",");
    let mut arguments =
        vec!["schema", "apply", "--store", "scylla", "--scylla-node", &points, "--scylla-keyspace", keyspace];
    let file = password_file(folder.path(), user.map_or("", |(_, password)| password));
    if let Some((name, _)) = user {
        arguments.extend(["--scylla-user", name, "--scylla-password-file", &file]);
    }
    let mut command = RunningCommand::start(&arguments);
    let ended = command.ended_within(3 * SOON).await;
    let text = [command.stdout(), command.stderr()].concat().join("\n");
    assert_eq!(ended.code(), Some(code), "{text}");
    assert!(!text.contains(USER.1) && !text.contains(WRONG), "{text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_user_error_names_setting_and_select_modify_suffice() {
    let Some(cassandra) = Cassandra::start_with_users() else { return };
    let admin = cassandra.session_as(Cassandra::ADMIN).await;
    let made = format!("CREATE ROLE {} WITH PASSWORD = '{}' AND LOGIN = true", USER.0, USER.1);
    admin.query_unpaged(made, ()).await.expect("a role");

    let unnamed = apply(&cassandra, "chat", None, 1).await;
    assert!(
        unnamed.contains("asks for a user: name one with --scylla-user and --scylla-password-file"),
        "{unnamed}"
    );
    for (user, password) in [(USER.0, WRONG), ("nobody", USER.1)] {
        let refused = apply(&cassandra, "chat", Some((user, password)), 1).await;
        let sentence =
            format!("does not let {user} in with this password (--scylla-user, --scylla-password-file)");
        assert!(refused.contains(&sentence), "{refused}");
    }
    let forbidden = apply(&cassandra, "chat", Some(USER), 1).await;
    assert!(
        forbidden.contains("this user (--scylla-user) may not make or read the keyspace chat"),
        "{forbidden}"
    );

    let text = apply(&cassandra, "chat", Some(Cassandra::ADMIN), 0).await;
    assert_eq!(text, "the keyspace chat is ready");
    for right in ["SELECT", "MODIFY"] {
        let granted = format!("GRANT {right} ON KEYSPACE chat TO {}", USER.0);
        admin.query_unpaged(granted, ()).await.expect("granted");
    }

    let folder = tempfile::tempdir().expect("a temporary folder");
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    let options = NodeOptions::default()
        .directory(directory, KEY)
        .limit("store_wait_ms", 8_000)
        .environment("FANFARE_SCYLLA_SCHEMA", "check")
        .environment("FANFARE_SCYLLA_USER", USER.0)
        .environment("FANFARE_SCYLLA_PASSWORD_FILE", &password_file(folder.path(), USER.1));
    let node = Node::start(cassandra.store(options, "chat")).await;
    let headers = [("authorization", &*http::basic(KEY))];
    for body in [json!({"data": 1}), json!({"data": 2, "id": "own"}), json!({"data": 2, "id": "own"})] {
        let path = "/api/channels/room/publish";
        let answer = http::request(node.addr(), "POST", path, &headers, body.to_string()).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
    assert_eq!(history::read_all(node.addr(), KEY, "room", "").await.len(), 2);
    let request = sign::token_request(&KEY.parse().expect("a key"), TokenParams::default());
    let request = serde_json::to_string(&request.expect("a request")).expect("it is JSON");
    let answer = http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], request).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    assert!(!node.log().contains(USER.1), "no password in the log");
    node.assert_well().await;
}
