//! A real CQL server: one that the tests of a process share, or one of a test's own that it may kill.

use std::io::{BufRead as _, BufReader};
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};

use scylla::client::session::Session;
use scylla::client::session_builder::SessionBuilder;
use scylla::policies::host_filter::AllowListHostFilter;

use crate::network::Host;
use crate::script::Script;
use crate::{NodeOptions, SOON, wait_for};

/// Variable with the address of the server that all tests of a run share; `cassandra/with` sets it.
const SHARED: &str = "FANFARE_TEST_CQL";

/// Greatest number of nodes of one server.
const NODES_MAX: usize = 3;

/// Beginning of a test keyspace's name; the id of the process follows.
const KEYSPACE: &str = "t_";

/// A server of one or several nodes.
#[derive(Clone)]
pub struct Cassandra {
    /// Contact points, each `address:port`.
    points: Arc<[String]>,
    /// Script of a server that ends with the test.
    own: Option<Arc<Script>>,
}

/// A server that a test may kill, while no other test uses it.
pub struct ExclusiveCassandra(MutexGuard<'static, Option<Cassandra>>);

impl Deref for ExclusiveCassandra {
    type Target = Cassandra;

    fn deref(&self) -> &Cassandra {
        self.0.as_ref().expect("a turn begins with a server")
    }
}

impl Cassandra {
    /// User and password of the superuser of [`Cassandra::start_with_users`].
    pub const ADMIN: (&str, &str) = ("cassandra", "cassandra");

    /// Gives the server of this run, which no test may disturb; `None` if it cannot be started, which `CI=true`
    /// forbids.
    pub fn shared() -> Option<Self> {
        static STARTED: OnceLock<Option<Cassandra>> = OnceLock::new();
        let started = STARTED.get_or_init(|| {
            let named = std::env::var(SHARED).ok().filter(|points| !points.is_empty());
            let points = split(&named.or_else(beside_this_process)?);
            drop_what_was_left(&points);
            Some(Self { points, own: None })
        });
        if started.is_none() {
            crate::not_run("there is no Cassandra to test with");
        }
        started.clone()
    }

    /// Gives the server of this run, which no test may disturb, if it has at least `nodes` nodes; else a server of the
    /// test's own.
    pub fn of(nodes: usize) -> Option<Self> {
        let named = std::env::var(SHARED).unwrap_or_default();
        if split(&named).len() >= nodes { Self::shared() } else { Self::start(nodes) }
    }

    /// Starts a server of `nodes` nodes for one test. It acknowledges a write when that is on the disk. `None` if it
    /// cannot be started, which `CI=true` forbids.
    pub fn start(nodes: usize) -> Option<Self> {
        Self::start_with(&["--nodes", &nodes.to_string()])
    }

    /// Gives a server of `nodes` nodes that a test may stop, stall and kill, and that no other test uses meanwhile. The
    /// tests of a process share one such server, since a start takes longer than most tests; after a failed test the
    /// next one gets a new server. `None` if it cannot be started, which `CI=true` forbids. Blocks.
    pub fn to_kill(nodes: usize) -> Option<ExclusiveCassandra> {
        static SERVERS: [Mutex<Option<Cassandra>>; NODES_MAX + 1] =
            [const { Mutex::new(None) }; NODES_MAX + 1];
        let mut kept = SERVERS[nodes].lock().unwrap_or_else(|poisoned| {
            let mut kept = poisoned.into_inner();
            *kept = None;
            SERVERS[nodes].clear_poison();
            kept
        });
        match &*kept {
            None => *kept = Some(Self::start(nodes)?),
            // The former test may have left nodes stalled or stopped.
            Some(server) => server.recover(),
        }
        Some(ExclusiveCassandra(kept))
    }

    /// Starts a server of one node with authentication, whose superuser is [`Cassandra::ADMIN`].
    pub fn start_with_users() -> Option<Self> {
        Self::start_with(&["--access", "users"])
    }

    /// Starts a server of one node on that host. [`Cassandra::fetch`] must have been called before, with a network.
    pub fn start_on(host: &Host) -> Option<Self> {
        let address = host.address().to_string();
        Self::start_by(|own| host.within(|| own.run(&["start", "--address", &address])))
    }

    /// Starts a server of one node at an address of this thread's network.
    pub fn start_at(address: &str) -> Option<Self> {
        Self::start_by(|own| own.run(&["start", "--address", address]))
    }

    /// Downloads the files that a start needs, if possible.
    pub fn fetch() {
        let fetched = Command::new(script("cassandra")).arg("fetch").stdout(Stdio::null()).status();
        assert!(fetched.is_ok(), "the script can be started: {fetched:?}");
    }

    fn start_with(options: &[&str]) -> Option<Self> {
        Self::start_by(|own| own.run(&[&["start", "--address", "auto"], options].concat()))
    }

    /// Makes a server from the output of the script, which `start` gives.
    fn start_by(start: impl FnOnce(&Script) -> Option<String>) -> Option<Self> {
        let own = Script::new("cassandra/cassandra", &["signal", "KILL"]);
        let points = start(&own);
        if points.is_none() {
            crate::not_run("Cassandra cannot be started");
        }
        points.map(|points| Self { points: split(&points), own: Some(Arc::new(own)) })
    }

    pub fn points(&self) -> &[String] {
        &self.points
    }

    /// Sends a signal to a node, counted from 1, or to all.
    pub fn signal(&self, signal: &str, node: Option<usize>) {
        let own = self.own.as_ref().expect("a server of the test's own");
        let node = node.map(|node| node.to_string());
        let mut arguments = vec!["signal", signal];
        arguments.extend(node.iter().flat_map(|node| ["--node", node]));
        assert!(own.run(&arguments).is_some(), "the server takes the signal {signal}");
    }

    /// Starts the nodes that do not run, and waits until all answer. Blocks.
    pub fn restart(&self) {
        let own = self.own.as_ref().expect("a server of the test's own");
        assert!(own.run(&["start"]).is_some(), "the server starts again");
    }

    /// Starts a node, counted from 1, and waits until it answers, whether or not the others do. Blocks.
    pub fn restart_only(&self, node: usize) {
        let own = self.own.as_ref().expect("a server of the test's own");
        assert!(own.run(&["start", "--node", &node.to_string()]).is_some(), "node {node} starts again");
    }

    /// Sets a node to use this server as its store, with a keyspace of [`Cassandra::keyspace`].
    pub fn store(&self, options: NodeOptions, keyspace: &str) -> NodeOptions {
        options
            .environment("FANFARE_STORE", "scylla")
            .environment("FANFARE_SCYLLA_NODE", &self.points.join(","))
            .environment("FANFARE_SCYLLA_KEYSPACE", keyspace)
    }

    /// Ends every stall, starts the nodes that do not run, and waits until all answer.
    fn recover(&self) {
        let own = self.own.as_ref().expect("a server of the test's own");
        for node in 1..=self.points.len() {
            // The signal fails for a node that does not run.
            let _ = own.run(&["signal", "CONT", "--node", &node.to_string()]);
        }
        self.restart();
    }

    /// Opens a session with the server, without a Fanfare node between.
    pub async fn session(&self) -> Session {
        wait_for(SOON, "a session with the server", async || {
            SessionBuilder::new().known_nodes(&*self.points).build().await.ok()
        })
        .await
    }

    /// Opens a session with one node alone, counted from 1.
    pub async fn session_by(&self, node: usize) -> Session {
        let node = &self.points[node - 1];
        let only = Arc::new(AllowListHostFilter::new([node]).expect("an address"));
        wait_for(6 * SOON, "a session with one node", async || {
            SessionBuilder::new().known_node(node).host_filter(only.clone()).build().await.ok()
        })
        .await
    }

    /// Opens a session as a user. The superuser exists only a moment after the server's start.
    pub async fn session_as(&self, (user, password): (&str, &str)) -> Session {
        wait_for(2 * SOON, "a session with the server", async || {
            SessionBuilder::new().known_nodes(&*self.points).user(user, password).build().await.ok()
        })
        .await
    }

    /// Gives the name of a keyspace of the test's own, which does not exist yet.
    pub fn keyspace(&self) -> String {
        let mut random = [0; 8];
        getrandom::fill(&mut random).expect("the operating system gives random bytes");
        format!("{KEYSPACE}{}_{:016x}", std::process::id(), u64::from_be_bytes(random))
    }
}

/// Drops the keyspaces of test processes that have ended: each table takes memory, and a small server fails with some
/// hundreds.
fn drop_what_was_left(points: &Arc<[String]>) {
    let server = Cassandra { points: Arc::clone(points), own: None };
    let dropping = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        runtime.expect("a runtime").block_on(async {
            let session = server.session().await;
            let asked = session.query_unpaged("SELECT keyspace_name FROM system_schema.keyspaces", ()).await;
            let rows = asked.expect("the server answers").into_rows_result().expect("rows");
            for name in rows.rows::<(String,)>().expect("names") {
                let (name,) = name.expect("a name");
                let process = name.strip_prefix(KEYSPACE).and_then(|rest| rest.split_once('_'));
                if process.is_some_and(|(process, _)| !Path::new("/proc").join(process).exists()) {
                    // The next process tries it again.
                    session.query_unpaged(format!("DROP KEYSPACE IF EXISTS {name}"), ()).await.ok();
                }
            }
        });
    });
    dropping.join().expect("what was left is dropped");
}

fn split(points: &str) -> Arc<[String]> {
    points.split(',').map(str::to_owned).collect()
}

fn script(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("cassandra").join(name)
}

/// Starts a server that ends with this process, when its input closes.
fn beside_this_process() -> Option<String> {
    use std::os::unix::process::CommandExt as _;
    let mut child = Command::new(script("with"))
        .args(["sh", "-c", "echo \"${FANFARE_TEST_CQL:-}\"; cat >/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .ok()?;
    let mut points = String::new();
    BufReader::new(child.stdout.take()?).read_line(&mut points).ok()?;
    // The child is leaked, so that its pipe stays open as long as this process runs.
    std::mem::forget(child);
    let points = points.trim();
    (!points.is_empty()).then(|| points.to_owned())
}
