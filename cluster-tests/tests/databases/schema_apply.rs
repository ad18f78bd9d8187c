//! `fanfare schema apply`, and the errors of a node about an unusable database. The command is idempotent, also if
//! several run at once, and each refusal is a sentence that names the setting.

use std::process::{Command, Stdio};

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Cassandra, Directory, Node, NodeOptions, RunningCommand, history, http};
use scylla::client::session::Session;
use serde_json::json;

const KEY: &str = "secret.k1";
const TABLES: [&str; 13] = [
    "account_queues",
    "days",
    "history",
    "members",
    "message_ids",
    "metrics",
    "nodes",
    "nonces",
    "policies",
    "queue_rules",
    "queues",
    "revocations",
    "schema_version",
];
/// Address without a database.
const NOWHERE: &str = "127.0.0.1:1";

fn apply(points: &str, keyspace: &str) -> RunningCommand {
    RunningCommand::start(&[
        "schema",
        "apply",
        "--store",
        "scylla",
        "--scylla-node",
        points,
        "--scylla-keyspace",
        keyspace,
    ])
}

/// Gives the output of the command, which must end with this code.
async fn output_of(mut command: RunningCommand, code: i32) -> String {
    let ended = command.ended_within(3 * fanfare_cluster_tests::SOON).await;
    let text = [command.stdout(), command.stderr()].concat().join("\n");
    assert_eq!(ended.code(), Some(code), "{text}");
    text
}

/// Gives the output of a node that cannot start.
async fn refusal(points: &str, keyspace: &str, schema: &str) -> String {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let data = folder.path().display().to_string();
    let serve = RunningCommand::start(&[
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--admin-listen",
        "127.0.0.1:0",
        "--data-dir",
        &data,
        "--store",
        "scylla",
        "--scylla-node",
        points,
        "--scylla-keyspace",
        keyspace,
        "--scylla-schema",
        schema,
    ]);
    output_of(serve, 1).await
}

async fn tables(session: &Session, keyspace: &str) -> Vec<(String, String)> {
    let asked = "SELECT table_name, CAST(id AS text) FROM system_schema.tables WHERE keyspace_name = ?";
    let found = session.query_unpaged(asked, (keyspace,)).await.expect("read").into_rows_result();
    let found = found.expect("rows");
    let rows = found.rows::<(String, String)>().expect("the columns are what they are");
    rows.map(|row| row.expect("a row")).collect()
}

async fn set_version(session: &Session, keyspace: &str, version: i32) {
    let set = format!("UPDATE {keyspace}.schema_version SET version = {version} WHERE part = 'all'");
    session.query_unpaged(set, ()).await.expect("set");
}

#[tokio::test(flavor = "multi_thread")]
async fn three_that_apply_at_once_make_one_schema() {
    let Some(cassandra) = Cassandra::shared() else { return };
    make_one_schema(&cassandra).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_applies_over_three_nodes_of_the_database_agree() {
    let Some(cassandra) = Cassandra::of(3) else { return };
    make_one_schema(&cassandra).await;
}

/// Seconds for which a table remembers that a row was deleted.
async fn tombstone_retention_s(session: &Session, keyspace: &str, table: &str) -> i32 {
    let asked =
        "SELECT gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?";
    let found = session.query_unpaged(asked, (keyspace, table)).await.expect("read").into_rows_result();
    found.expect("rows").single_row::<(i32,)>().expect("a table").0
}

async fn make_one_schema(cassandra: &Cassandra) {
    let (points, keyspace) = (cassandra.points().join(","), cassandra.keyspace());
    let missing = refusal(&points, &keyspace, "check").await;
    assert!(missing.contains("has no tables of this program: run `fanfare schema apply`"), "{missing}");
    let commands = [(); 3].map(|()| apply(&points, &keyspace));
    for text in futures_util::future::join_all(commands.map(|command| output_of(command, 0))).await {
        let is_ready = text == format!("the keyspace {keyspace} is ready");
        assert!(is_ready || text == format!("the keyspace {keyspace} has everything already"), "{text}");
    }
    let session = cassandra.session().await;
    let made = tables(&session, &keyspace).await;
    let mut names: Vec<_> = made.iter().map(|(name, _)| name.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, TABLES);
    for table in ["members", "revocations", "message_ids", "nonces", "policies"] {
        let retention_s = tombstone_retention_s(&session, &keyspace, table).await;
        assert_eq!(retention_s, 3_600, "{table}: what was deleted is gone within hours");
    }
    let text = output_of(apply(&points, &keyspace), 0).await;
    assert_eq!(text, format!("the keyspace {keyspace} has everything already"));
    assert_eq!(tables(&session, &keyspace).await, made);

    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    let options = NodeOptions::default()
        .directory(directory, KEY)
        .limit("store_wait_ms", 8_000)
        .environment("FANFARE_SCYLLA_SCHEMA", "check");
    let node = Node::start(cassandra.store(options, &keyspace)).await;
    let headers = [("authorization", &*http::basic(KEY))];
    let body = json!({"data": 1}).to_string();
    let answer = http::request(node.addr(), "POST", "/api/channels/room/publish", &headers, body).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    assert_eq!(history::read_all(node.addr(), KEY, "room", "").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_schema_of_another_version_is_brought_up_and_never_down() {
    let Some(cassandra) = Cassandra::shared() else { return };
    let (points, keyspace) = (cassandra.points().join(","), cassandra.keyspace());
    output_of(apply(&points, &keyspace), 0).await;
    let session = cassandra.session().await;
    set_version(&session, &keyspace, 99).await;
    let newer = "has version 99 of the schema, and this program knows only";
    for text in [
        output_of(apply(&points, &keyspace), 1).await,
        refusal(&points, &keyspace, "auto").await,
        refusal(&points, &keyspace, "check").await,
    ] {
        assert!(text.contains(&keyspace) && text.contains(newer), "{text}");
    }
    set_version(&session, &keyspace, 0).await;
    let text = refusal(&points, &keyspace, "check").await;
    assert!(text.contains("is needed: run `fanfare schema apply`"), "{text}");
    assert_eq!(output_of(apply(&points, &keyspace), 0).await, format!("the keyspace {keyspace} is ready"));
    assert!(output_of(apply(&points, &keyspace), 0).await.contains("has everything already"));

    // A schema of a former version. Nodes that start over it add the missing parts.
    let altered = async |what: String| session.query_unpaged(what, ()).await.expect("altered");
    for table in ["policies", "queues", "queue_rules", "account_queues"] {
        altered(format!("DROP TABLE {keyspace}.{table}")).await;
    }
    altered(format!("ALTER TABLE {keyspace}.history DROP is_continued")).await;
    altered(format!("ALTER TABLE {keyspace}.nonces WITH gc_grace_seconds = 864000")).await;
    altered(format!("DELETE FROM {keyspace}.schema_version WHERE part = 'marked'")).await;
    set_version(&session, &keyspace, 1).await;
    assert!(
        refusal(&points, &keyspace, "check").await.contains("has version 1 of the schema, and 6 is needed")
    );
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    let options = NodeOptions::default().directory(directory, KEY).limit("store_wait_ms", 8_000);
    drop(Node::start(cassandra.store(options, &keyspace)).await);
    assert!(output_of(apply(&points, &keyspace), 0).await.contains("has everything already"));
    assert_eq!(tables(&session, &keyspace).await.len(), TABLES.len());
    assert_eq!(tombstone_retention_s(&session, &keyspace, "nonces").await, 3_600);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_not_there_is_named() {
    let text = output_of(apply(NOWHERE, "chat"), 1).await;
    assert!(text.contains("no node of the database answers at 127.0.0.1:1 (--scylla-node)"), "{text}");
    let text = refusal(NOWHERE, "chat", "auto").await;
    assert!(text.contains("no node of the database answers at 127.0.0.1:1 (--scylla-node)"), "{text}");
    let text = output_of(apply("nowhere.invalid:9042", "chat"), 1).await;
    assert!(text.contains("nowhere.invalid:9042 (--scylla-node)"), "{text}");
}

/// Runs this test program again, for one test that needs a server where none can be started.
fn without_server(ci: Option<&str>) -> (bool, String) {
    let mut command = Command::new(std::env::current_exe().expect("the test executable has a path"));
    command
        .args(["--exact", "schema_apply::three_that_apply_at_once_make_one_schema", "--nocapture"])
        .env_remove("FANFARE_TEST_CQL")
        .env_remove("CI")
        .env("JAVA_HOME", "/nowhere")
        .envs(ci.map(|ci| ("CI", ci)))
        .stdin(Stdio::null());
    let output = command.output().expect("the test executable can be started");
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

#[test]
fn tests_without_a_server_say_so_and_fail_where_ci_is_true() {
    let (passed, text) = without_server(None);
    assert!(passed && text.contains("NOT CHECKED"), "{text}");
    let (passed, text) = without_server(Some("true"));
    assert!(!passed && text.contains("no Cassandra to test with"), "{text}");
}
