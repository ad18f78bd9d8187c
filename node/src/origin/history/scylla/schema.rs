//! The keyspace and its tables: created once by the first node, and identified by a version.

use std::fmt;
use std::time::{Duration, Instant};

use scylla::client::session::Session;
use scylla::errors::{DbError, ExecutionError, RequestAttemptError};
use scylla::policies::load_balancing::{NodeIdentifier, SingleTargetLoadBalancingPolicy};
use scylla::statement::Statement;

use super::connection::ScyllaConnection;

/// The tables and columns that each version adds or alters. The version of a keyspace is that of the last migration that was applied to
/// it.
const MIGRATIONS: &[Migration] = &[
    Migration { tables: FIRST, ..NOTHING },
    Migration { tables: POLICIES, ..NOTHING },
    Migration { columns: CONTINUATION_COLUMNS, ..NOTHING },
    Migration { tables: QUEUES, ..NOTHING },
    Migration { short_gc_tables: SHORT_GC_TABLES, ..NOTHING },
    Migration { tables: ACCOUNT_QUEUES, ..NOTHING },
];
const NOTHING: Migration = Migration { tables: &[], columns: &[], short_gc_tables: &[] };

/// A change of the schema. A new keyspace gets columns and GC times together with its tables, since every further schema change takes each
/// node of the database a moment.
struct Migration {
    /// Statements that create tables.
    tables: &'static [&'static str],
    columns: &'static [SchemaColumn],
    /// Tables that drop tombstones after [`SHORT_GC_S`].
    short_gc_tables: &'static [&'static str],
}

/// Table, name and type of a column. A table that is created now has the column from the start, since several nodes may create it at once.
type SchemaColumn = (&'static str, &'static str, &'static str);

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
/// Unused tables: [`ACCOUNT_QUEUES`] has the queues of an account in one row, so that a change of them is one conditional write.
const QUEUES: &[&str] = &[
    "CREATE TABLE IF NOT EXISTS {}.queues (account text, name text, id uuid, max_length bigint, enabled boolean, \
     PRIMARY KEY (account, name))",
    "CREATE TABLE IF NOT EXISTS {}.queue_rules (account text, queue text, id uuid, source_pattern text, filter text, \
     enabled boolean, PRIMARY KEY (account, queue, id))",
];
const ACCOUNT_QUEUES: &[&str] = &[
    "CREATE TABLE IF NOT EXISTS {}.account_queues (account text PRIMARY KEY, revision bigint, definitions text)",
];
/// Tables whose deleted and expired rows leave the disk within hours; a scan over days of tombstones would be refused.
const SHORT_GC_TABLES: &[&str] = &["members", "revocations", "message_ids", "nonces"];
const SHORT_GC_S: i32 = 3_600;
const CONTINUATION_COLUMNS: &[SchemaColumn] =
    &[("history", "is_continued", "boolean static"), ("policies", "marks", "boolean")];
const VERSIONS: &str = "CREATE TABLE IF NOT EXISTS {}.schema_version (part text PRIMARY KEY, version int)";
/// Time limit of a schema change, which may take seconds while the database is busy.
const ALTER_WAIT: Duration = Duration::from_secs(20);
const ATTEMPTS: usize = 3;
const ATTEMPT_EACH: Duration = Duration::from_secs(1);
const COPIES_MAX: usize = 3;
/// Time after which a node of the database that has just started is in the other nodes' lists.
const NODES_WAIT: Duration = Duration::from_secs(10);
const NODES_LOOK: Duration = Duration::from_millis(250);

/// Reason why the keyspace cannot be used; the text names it.
#[derive(Debug)]
pub enum SchemaError {
    /// The keyspace is missing; `fanfare schema apply` creates it.
    Missing(String),
    /// An earlier version of this program made the keyspace.
    Behind {
        keyspace: String,
        found: usize,
    },
    /// A later version of this program made the keyspace.
    Ahead {
        keyspace: String,
        found: usize,
    },
    /// The user lacks the permission.
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

/// Creates what is missing. Returns whether anything was.
pub(super) async fn apply(session: &Session, connection: &ScyllaConnection) -> Result<bool, SchemaError> {
    let keyspace = &*connection.keyspace;
    let found = version(session, keyspace).await?;
    if found.is_some_and(|found| found >= MIGRATIONS.len()) {
        return check(session, keyspace).await.map(|()| false);
    }
    if found.is_none() {
        make_keyspace(session, connection).await?;
        alter(session, connection, &VERSIONS.replace("{}", keyspace)).await?;
        // A new keyspace: no version without continuation marks has written here.
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
        for table in migration.short_gc_tables {
            shorten_gc(session, connection, table).await?;
        }
    }
    // Only the final version is written, so that a slower node cannot lower what a faster one has set.
    let statement =
        format!("INSERT INTO {keyspace}.schema_version (part, version) VALUES ('all', {})", MIGRATIONS.len());
    alter(session, connection, &statement).await?;
    // The driver routes rows to their replicas only once it knows the replication of the keyspace.
    session.refresh_metadata().await.ok();
    Ok(true)
}

/// Reads the version. `None` if the keyspace does not exist, or its creation has not finished.
async fn version(session: &Session, keyspace: &str) -> Result<Option<usize>, SchemaError> {
    let refused = |error| SchemaError::of(keyspace, error);
    let tables = "SELECT table_name FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?";
    let found = session.query_unpaged(tables, (keyspace, "schema_version")).await.map_err(refused)?;
    if !found.into_rows_result().is_ok_and(|rows| rows.rows_num() > 0) {
        return Ok(None);
    }
    let statement = format!("SELECT version FROM {keyspace}.schema_version WHERE part = 'all'");
    let mut attempt = 1;
    let found = loop {
        match session.query_unpaged(&*statement, ()).await {
            Ok(found) => break found,
            // The table is listed a moment before it can be queried; Cassandra may then know it before it can store its rows.
            Err(ExecutionError::LastAttemptError(RequestAttemptError::DbError(DbError::Invalid, _))) => {
                return Ok(None);
            }
            // A node of the database that has not yet received another node's schema change fails to read.
            Err(error) if attempt < ATTEMPTS && !is_forbidden(&error) => {
                tracing::warn!(%error, "schema version read failed, retrying");
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

/// Adds a column, if it is missing. Not every database supports `IF NOT EXISTS` for a column.
async fn add_column(
    session: &Session,
    connection: &ScyllaConnection,
    (table, name, kind): SchemaColumn,
) -> Result<(), SchemaError> {
    let keyspace = &*connection.keyspace;
    if has_column(session, keyspace, table, name).await? {
        return Ok(());
    }
    match alter(session, connection, &format!("ALTER TABLE {keyspace}.{table} ADD {name} {kind}")).await {
        // Another node has added the column meanwhile.
        Err(_) if has_column(session, keyspace, table, name).await? => Ok(()),
        altered => altered,
    }
}

async fn shorten_gc(
    session: &Session,
    connection: &ScyllaConnection,
    table: &str,
) -> Result<(), SchemaError> {
    let keyspace = &*connection.keyspace;
    let statement =
        "SELECT gc_grace_seconds FROM system_schema.tables WHERE keyspace_name = ? AND table_name = ?";
    let found = session.query_unpaged(statement, (keyspace, table)).await;
    let found = found.map_err(|error| SchemaError::of(keyspace, error))?.into_rows_result();
    let gc_s = found.ok().and_then(|rows| rows.maybe_first_row::<(i32,)>().ok().flatten());
    if gc_s == Some((SHORT_GC_S,)) {
        return Ok(());
    }
    let shortened = format!("ALTER TABLE {keyspace}.{table} WITH gc_grace_seconds = {SHORT_GC_S}");
    alter(session, connection, &shortened).await
}

async fn has_column(session: &Session, keyspace: &str, table: &str, name: &str) -> Result<bool, SchemaError> {
    let columns = "SELECT column_name FROM system_schema.columns WHERE keyspace_name = ? AND table_name = ? \
                   AND column_name = ?";
    let found = session.query_unpaged(columns, (keyspace, table, name)).await;
    let found = found.map_err(|error| SchemaError::of(keyspace, error))?;
    Ok(found.into_rows_result().is_ok_and(|rows| rows.rows_num() > 0))
}

/// Waits until the database lists all its nodes. The number of copies is fixed for good, so a missing node would mean one copy too few.
async fn until_nodes_are_known(session: &Session, connection: &ScyllaConnection) {
    let named = connection.nodes.len().min(COPIES_MAX);
    let end = Instant::now() + NODES_WAIT;
    while session.get_cluster_state().get_nodes_info().len() < named && Instant::now() < end {
        tokio::time::sleep(NODES_LOOK).await;
        session.refresh_metadata().await.ok();
    }
}

async fn make_keyspace(session: &Session, connection: &ScyllaConnection) -> Result<(), SchemaError> {
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
    let option = local.unwrap_or_else(|| "replication_factor".to_owned());
    tracing::info!(keyspace, copies, nodes = nodes.len(), "creating the keyspace");
    let made = format!(
        "CREATE KEYSPACE IF NOT EXISTS {keyspace} WITH replication = \
         {{'class': 'NetworkTopologyStrategy', '{option}': {copies}}}"
    );
    // Older ScyllaDB versions do not support conditional writes, which ids and nonces need, on tablets. Cassandra does not know the
    // option.
    if nodes.iter().any(|node| node.sharder().is_some()) {
        let without_tablets = format!("{made} AND tablets = {{'enabled': false}}");
        if alter(session, connection, &without_tablets).await.is_ok() {
            return Ok(());
        }
    }
    alter(session, connection, &made).await
}

/// Changes the schema, always through the same node of the local data centre. That node makes concurrent changes one after another;
/// through two nodes a table could be created twice, and one of them would lose its rows.
async fn alter(session: &Session, connection: &ScyllaConnection, text: &str) -> Result<(), SchemaError> {
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
                tracing::warn!(%error, "schema change failed, retrying");
                attempt += 1;
                tokio::time::sleep(ATTEMPT_EACH).await;
            }
        }
    }
}
