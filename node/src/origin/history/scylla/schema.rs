//! The keyspace and its tables: made once, whoever comes first, and told by a version.

use std::fmt;
use std::time::{Duration, Instant};

use scylla::client::session::Session;
use scylla::errors::{DbError, ExecutionError, RequestAttemptError};
use scylla::policies::load_balancing::{NodeIdentifier, SingleTargetLoadBalancingPolicy};
use scylla::statement::Statement;

use super::connection::Connection;

/// The tables and columns that each version adds or alters to the one before; a keyspace has the version of the last one that was applied to it.
const MIGRATIONS: &[Migration] = &[
    Migration { tables: FIRST, ..NOTHING },
    Migration { tables: POLICIES, ..NOTHING },
    Migration { columns: MARKS, ..NOTHING },
    Migration { tables: QUEUES, ..NOTHING },
    Migration { short_graces: GRACE, ..NOTHING },
    Migration { tables: ACCOUNT_QUEUES, ..NOTHING },
];
const NOTHING: Migration = Migration { tables: &[], columns: &[], short_graces: &[] };

/// A change of the schema. A new keyspace has the columns and the graces with its tables, so that nothing is altered there: each
/// change of a schema takes a database a moment on every node.
struct Migration {
    /// Statements that make tables.
    tables: &'static [&'static str],
    columns: &'static [Column],
    /// Tables that forget deleted rows after [`GRACE_S`].
    short_graces: &'static [&'static str],
}

/// Of which table, its name, and its type. A table that is made now has it at once, as several may make it at the same time.
type Column = (&'static str, &'static str, &'static str);

const FIRST: &[&str] = &[
    "CREATE TABLE IF NOT EXISTS {}.history (account text, channel text, kind tinyint, day int, bucket int, \
     timestamp_ms bigint, sequence bigint, incarnation bigint, node_id text, id text, record text, \
     is_continued boolean static, \
     PRIMARY KEY ((account, channel, kind, day, bucket), timestamp_ms, sequence, incarnation)) \
     WITH CLUSTERING ORDER BY (timestamp_ms DESC, sequence DESC, incarnation DESC) AND compaction = \
     {'class': 'TimeWindowCompactionStrategy', 'compaction_window_unit': 'DAYS', 'compaction_window_size': '1'}",
    "CREATE TABLE IF NOT EXISTS {}.days (account text, channel text, kind tinyint, day int, bucket int, \
     PRIMARY KEY ((account, channel, kind), day, bucket)) WITH CLUSTERING ORDER BY (day DESC, bucket DESC)",
    "CREATE TABLE IF NOT EXISTS {}.message_ids (account text, channel text, key_name text, client_id text, id text, \
     owner bigint, incarnation bigint, sequence bigint, timestamp_ms bigint, bucket int, \
     PRIMARY KEY ((account, channel, key_name, client_id, id))) \
     WITH gc_grace_seconds = 3600",
    "CREATE TABLE IF NOT EXISTS {}.nonces (key_name text, timestamp_ms bigint, nonce text, \
     PRIMARY KEY ((key_name, timestamp_ms, nonce))) \
     WITH gc_grace_seconds = 3600",
    "CREATE TABLE IF NOT EXISTS {}.revocations (key_name text, client_id text, issued_before_ms bigint, \
     PRIMARY KEY (key_name, client_id)) \
     WITH gc_grace_seconds = 3600",
    "CREATE TABLE IF NOT EXISTS {}.members (node_id text, account text, channel text, connection_id blob, \
     client_id text, epoch bigint, data text, timestamp_ms bigint, \
     PRIMARY KEY (node_id, account, channel, connection_id, client_id)) \
     WITH gc_grace_seconds = 3600",
    "CREATE TABLE IF NOT EXISTS {}.nodes (node_id text PRIMARY KEY, runs blob, highest_ms bigint)",
    "CREATE TABLE IF NOT EXISTS {}.metrics (account text, day int, minute_ms bigint, node_id text, \
     incarnation bigint, kind text, counted bigint, bytes bigint, \
     PRIMARY KEY ((account, day), minute_ms, node_id, incarnation, kind)) WITH compaction = \
     {'class': 'TimeWindowCompactionStrategy', 'compaction_window_unit': 'DAYS', 'compaction_window_size': '1'}",
];
const POLICIES: &[&str] = &[
    "CREATE TABLE IF NOT EXISTS {}.policies (part text, node_id text, incarnation bigint, policies bigint, \
     is_over boolean, marks boolean, PRIMARY KEY (part, node_id, incarnation, policies)) WITH gc_grace_seconds = 3600",
];
/// Nothing reads or writes them: [`ACCOUNT_QUEUES`] has the queues of an account in one row, so that a change of them is one condition.
const QUEUES: &[&str] = &[
    "CREATE TABLE IF NOT EXISTS {}.queues (account text, name text, id uuid, max_length bigint, enabled boolean, \
     PRIMARY KEY (account, name))",
    "CREATE TABLE IF NOT EXISTS {}.queue_rules (account text, queue text, id uuid, source_pattern text, filter text, \
     enabled boolean, PRIMARY KEY (account, queue, id))",
];
const ACCOUNT_QUEUES: &[&str] = &[
    "CREATE TABLE IF NOT EXISTS {}.account_queues (account text PRIMARY KEY, revision bigint, definitions text)",
];
/// What was deleted, or outlived its time, is gone from the disk within hours: a scan over days of it would be refused.
const GRACE: &[&str] = &["members", "revocations", "message_ids", "nonces"];
const GRACE_S: i32 = 3_600;
const MARKS: &[Column] = &[("history", "is_continued", "boolean static"), ("policies", "marks", "boolean")];
const VERSIONS: &str = "CREATE TABLE IF NOT EXISTS {}.schema_version (part text PRIMARY KEY, version int)";
/// A table may take seconds where the database is busy.
const ALTER_WAIT: Duration = Duration::from_secs(20);
const ATTEMPTS: usize = 3;
const ATTEMPT_EACH: Duration = Duration::from_secs(1);
const COPIES_MAX: usize = 3;
/// A node of the database that has just begun is in the list of the others by then.
const NODES_WAIT: Duration = Duration::from_secs(10);
const NODES_LOOK: Duration = Duration::from_millis(250);

/// Why the keyspace cannot be used; the text names it.
#[derive(Debug)]
pub enum SchemaError {
    /// To be made by `fanfare schema apply`.
    Missing(String),
    /// Made by an earlier version of this program.
    Behind {
        keyspace: String,
        found: usize,
    },
    /// Made by a later version of this program.
    Ahead {
        keyspace: String,
        found: usize,
    },
    /// The user may not.
    Forbidden {
        keyspace: String,
        source: Box<ExecutionError>,
    },
    Refused {
        keyspace: String,
        source: Box<ExecutionError>,
    },
}

impl SchemaError {
    fn of(keyspace: &str, error: ExecutionError) -> Self {
        let (keyspace, forbidden) = (keyspace.to_owned(), is_forbidden(&error));
        let source = Box::new(error);
        if forbidden { Self::Forbidden { keyspace, source } } else { Self::Refused { keyspace, source } }
    }
}

fn is_forbidden(error: &ExecutionError) -> bool {
    matches!(error, ExecutionError::LastAttemptError(RequestAttemptError::DbError(DbError::Unauthorized, _)))
}

impl fmt::Display for SchemaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(keyspace) => {
                write!(f, "the keyspace {keyspace} has no tables of this program: run `fanfare schema apply`")
            }
            Self::Behind { keyspace, found } => write!(
                f,
                "the keyspace {keyspace} has version {found} of the schema, and {} is needed: run `fanfare schema apply`",
                MIGRATIONS.len()
            ),
            Self::Ahead { keyspace, found } => write!(
                f,
                "the keyspace {keyspace} has version {found} of the schema, and this program knows only {}",
                MIGRATIONS.len()
            ),
            Self::Forbidden { keyspace, .. } => write!(
                f,
                "this user (--scylla-user) may not make or read the keyspace {keyspace}: \
                 grant it that, or run `fanfare schema apply` as one who may"
            ),
            Self::Refused { keyspace, .. } => {
                write!(f, "the keyspace {keyspace} (--scylla-keyspace) cannot be made or read")
            }
        }
    }
}

impl std::error::Error for SchemaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Forbidden { source, .. } | Self::Refused { source, .. } => Some(&**source),
            _ => None,
        }
    }
}

/// Refuses a keyspace that is not of this version.
pub(super) async fn check(session: &Session, keyspace: &str) -> Result<(), SchemaError> {
    match version(session, keyspace).await? {
        None => Err(SchemaError::Missing(keyspace.to_owned())),
        Some(found) if found < MIGRATIONS.len() => {
            Err(SchemaError::Behind { keyspace: keyspace.to_owned(), found })
        }
        Some(found) if found > MIGRATIONS.len() => {
            Err(SchemaError::Ahead { keyspace: keyspace.to_owned(), found })
        }
        Some(_) => Ok(()),
    }
}

/// Makes what is missing. True when something was.
pub(super) async fn apply(session: &Session, connection: &Connection) -> Result<bool, SchemaError> {
    let keyspace = &*connection.keyspace;
    let found = version(session, keyspace).await?;
    if found.is_some_and(|found| found >= MIGRATIONS.len()) {
        return check(session, keyspace).await.map(|()| false);
    }
    if found.is_none() {
        make_keyspace(session, connection).await?;
        alter(session, connection, &VERSIONS.replace("{}", keyspace)).await?;
        // No version that marks nothing has been here.
        let marked = format!("INSERT INTO {keyspace}.schema_version (part, version) VALUES ('marked', 0)");
        alter(session, connection, &marked).await?;
    }
    for migration in MIGRATIONS.iter().skip(found.unwrap_or(0)) {
        for table in migration.tables {
            alter(session, connection, &table.replace("{}", keyspace)).await?;
        }
        for column in migration.columns {
            add_column(session, connection, *column).await?;
        }
        for table in migration.short_graces {
            shorten_grace(session, connection, table).await?;
        }
    }
    // Once, and no other: whoever is slower is not to say less than who has finished.
    let noted =
        format!("INSERT INTO {keyspace}.schema_version (part, version) VALUES ('all', {})", MIGRATIONS.len());
    alter(session, connection, &noted).await?;
    // The driver sends a row to its replicas once it knows how the keyspace is replicated.
    session.refresh_metadata().await.ok();
    Ok(true)
}

/// None: there is no such keyspace, or nobody has finished making it.
async fn version(session: &Session, keyspace: &str) -> Result<Option<usize>, SchemaError> {
    let refused = |error| SchemaError::of(keyspace, error);
    let tables = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?";
    let found = session.query_unpaged(tables, (keyspace, "schema_version")).await.map_err(refused)?;
    if !found.into_rows_result().is_ok_and(|rows| rows.rows_num() > 0) {
        return Ok(None);
    }
    let asked = format!("SELECT version FROM {keyspace}.schema_version WHERE part = 'all'");
    let mut attempt = 1;
    let found = loop {
        match session.query_unpaged(&*asked, ()).await {
            Ok(found) => break found,
            // The table is in the list a moment before it can be asked, and then Cassandra may know it before it has a place for its rows.
            Err(ExecutionError::LastAttemptError(RequestAttemptError::DbError(DbError::Invalid, _))) => {
                return Ok(None);
            }
            // One of its nodes may not have heard yet what another one has just altered, and fails to read by the schema that it knows.
            Err(error) if attempt < ATTEMPTS && !is_forbidden(&error) => {
                tracing::warn!(%error, "the database did not tell the version of its schema, once more");
                attempt += 1;
                tokio::time::sleep(ATTEMPT_EACH).await;
            }
            Err(error) => return Err(refused(error)),
        }
    };
    let rows = found.into_rows_result().ok();
    let version = rows.and_then(|rows| rows.maybe_first_row::<(i32,)>().ok().flatten());
    Ok(version.and_then(|(version,)| usize::try_from(version).ok()))
}

/// Databases know no `IF NOT EXISTS` for a column, or not all of them do.
async fn add_column(
    session: &Session,
    connection: &Connection,
    (table, name, kind): Column,
) -> Result<(), SchemaError> {
    let keyspace = &*connection.keyspace;
    if has_column(session, keyspace, table, name).await? {
        return Ok(());
    }
    match alter(session, connection, &format!("ALTER TABLE {keyspace}.{table} ADD {name} {kind}")).await {
        // Another node has added it meanwhile.
        Err(_) if has_column(session, keyspace, table, name).await? => Ok(()),
        altered => altered,
    }
}

async fn shorten_grace(session: &Session, connection: &Connection, table: &str) -> Result<(), SchemaError> {
    let keyspace = &*connection.keyspace;
    let asked =
        "SELECT gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?";
    let found = session.query_unpaged(asked, (keyspace, table)).await;
    let found = found.map_err(|error| SchemaError::of(keyspace, error))?.into_rows_result();
    let grace = found.ok().and_then(|rows| rows.maybe_first_row::<(i32,)>().ok().flatten());
    if grace == Some((GRACE_S,)) {
        return Ok(());
    }
    let shortened = format!("ALTER TABLE {keyspace}.{table} WITH gc_grace_seconds = {GRACE_S}");
    alter(session, connection, &shortened).await
}

async fn has_column(session: &Session, keyspace: &str, table: &str, name: &str) -> Result<bool, SchemaError> {
    let columns = "SELECT column_name FROM system_schema.columns WHERE keyspace_name = ? AND table_name = ? \
                   AND column_name = ?";
    let found = session.query_unpaged(columns, (keyspace, table, name)).await;
    let found = found.map_err(|error| SchemaError::of(keyspace, error))?;
    Ok(found.into_rows_result().is_ok_and(|rows| rows.rows_num() > 0))
}

/// Copies are counted once, for good: a list that still lacks a node would be one copy too few.
async fn until_nodes_are_known(session: &Session, connection: &Connection) {
    let named = connection.nodes.len().min(COPIES_MAX);
    let end = Instant::now() + NODES_WAIT;
    while session.get_cluster_state().get_nodes_info().len() < named && Instant::now() < end {
        tokio::time::sleep(NODES_LOOK).await;
        session.refresh_metadata().await.ok();
    }
}

async fn make_keyspace(session: &Session, connection: &Connection) -> Result<(), SchemaError> {
    let keyspace = &*connection.keyspace;
    if connection.replication.is_none() {
        until_nodes_are_known(session, connection).await;
    }
    let state = session.get_cluster_state();
    let nodes = state.get_nodes_info();
    let first = || nodes.first().and_then(|node| node.datacenter.clone());
    let local = connection.datacenter.clone().or_else(first);
    let of_local = nodes.iter().filter(|node| node.datacenter == local).count();
    let copies = connection.replication.unwrap_or(of_local.clamp(1, COPIES_MAX));
    let place = local.unwrap_or_else(|| "replication_factor".to_owned());
    tracing::info!(keyspace, copies, nodes = nodes.len(), "makes the keyspace");
    let made = format!(
        "CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = \
         {{'class': 'NetworkTopologyStrategy', '{place}': {copies}}}"
    );
    // Conditions on rows, by which ids and nonces are claimed, came late to the tablets of ScyllaDB; Cassandra does not know the word.
    if nodes.iter().any(|node| node.sharder().is_some()) {
        let without_tablets = format!("{made} AND tablets = {{'enabled': false}}");
        if alter(session, connection, &without_tablets).await.is_ok() {
            return Ok(());
        }
    }
    alter(session, connection, &made).await
}

/// All that alter at the same time do so through the same node of the database, which takes one after another: through two of
/// them a table could be made twice, with rows lost to one of both. It is one of the data centre that has the rows.
async fn alter(session: &Session, connection: &Connection, text: &str) -> Result<(), SchemaError> {
    let keyspace = &*connection.keyspace;
    let state = session.get_cluster_state();
    let is_local =
        |datacenter: &Option<String>| connection.datacenter.is_none() || *datacenter == connection.datacenter;
    let reachable = state.get_nodes_info().iter().filter(|node| node.is_connected());
    let reachable = reachable.filter(|node| is_local(&node.datacenter));
    let first = reachable.min_by_key(|node| (node.address.ip(), node.address.port()));
    let mut statement = Statement::new(text);
    statement.set_is_idempotent(true);
    statement.set_request_timeout(Some(ALTER_WAIT));
    if let Some(node) = first {
        let target = NodeIdentifier::Node(node.clone());
        statement.set_load_balancing_policy(Some(SingleTargetLoadBalancingPolicy::new(target, None)));
    }
    let mut attempt = 1;
    loop {
        match session.query_unpaged(statement.clone(), ()).await {
            Ok(_) => return Ok(()),
            Err(error) if attempt == ATTEMPTS || is_forbidden(&error) => {
                return Err(SchemaError::of(keyspace, error));
            }
            Err(error) => {
                tracing::warn!(%error, "the database did not alter its schema, once more");
                attempt += 1;
                tokio::time::sleep(ATTEMPT_EACH).await;
            }
        }
    }
}
