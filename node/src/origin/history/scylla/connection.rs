//! A session with the database, and all statements prepared.

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use scylla::client::PoolSize;
use scylla::client::execution_profile::ExecutionProfile;
use scylla::client::session::Session;
use scylla::client::session_builder::SessionBuilder;
use scylla::errors::{
    ConnectionError, ConnectionPoolError, ConnectionSetupRequestErrorKind, DbError, MetadataError,
    NewSessionError, PrepareError,
};
use scylla::frame::types::{Consistency, SerialConsistency};
use scylla::policies::speculative_execution::SimpleSpeculativeExecutionPolicy;
use scylla::serialize::row::SerializeRow;
use scylla::statement::batch::{Batch, BatchStatement, BatchType};
use scylla::statement::prepared::PreparedStatement;

use super::failed;
use super::reachability::{NodeReachability, SilentNodeFilter};
use super::schema::{self, SchemaError};
use crate::origin::history::StoreError;

/// Connections to each node of the database. A ScyllaDB node gets at least one for each of its shards.
const CONNECTIONS: NonZeroUsize = NonZeroUsize::new(4).expect("it is not 0");
const CONNECT_WAIT: Duration = Duration::from_secs(2);
/// Keepalive interval: a stalled database accepts connections and answers nothing.
const KEEPALIVE: Duration = Duration::from_secs(2);
const KEEPALIVE_WAIT: Duration = Duration::from_secs(2);

/// Interval of checks whether all nodes of the database know a schema change.
const AGREEMENT_LOOK: Duration = Duration::from_millis(50);

/// Addresses and login of the database.
#[derive(Clone)]
pub struct ScyllaConnection {
    /// Host and port of each contact point.
    pub nodes: Vec<String>,
    pub keyspace: String,
    /// Copies of each row, for a keyspace that is to be created.
    pub replication: Option<usize>,
    /// Data centre whose nodes are asked; `None` if the database has only one.
    pub datacenter: Option<String>,
    /// User name and password.
    pub credentials: Option<(String, String)>,
    /// Time limit of one request. After a quarter of it a second node is asked too, if the request is idempotent.
    pub wait: Duration,
}

impl fmt::Debug for ScyllaConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { nodes, keyspace, .. } = self;
        f.debug_struct("Connection").field("nodes", nodes).field("keyspace", keyspace).finish_non_exhaustive()
    }
}

/// Reason why the database cannot be used.
#[derive(Debug)]
pub enum ScyllaError {
    Unreachable {
        nodes: String,
        source: Box<NewSessionError>,
    },
    /// The database asks for a login, and none is configured.
    Unnamed,
    NotLetIn {
        user: String,
        source: Box<NewSessionError>,
    },
    NoSuchDatacenter {
        name: String,
        known: String,
    },
    /// The database has these data centres, and none is configured.
    Datacenters(String),
    Schema(SchemaError),
    Prepare(Box<PrepareError>),
    Read(StoreError),
}

impl fmt::Display for ScyllaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable { nodes, .. } => {
                write!(f, "no node of the database answers at {nodes} (--scylla-node)")
            }
            Self::Unnamed => f.write_str(
                "the database asks for a user: name one with --scylla-user and --scylla-password-file",
            ),
            Self::NotLetIn { user, .. } => write!(
                f,
                "the database does not let {user} in with this password (--scylla-user, --scylla-password-file)"
            ),
            Self::NoSuchDatacenter { name, known } => {
                write!(f, "the database has no data centre {name} (--scylla-datacenter), but {known}")
            }
            Self::Datacenters(known) => {
                write!(f, "the database has the data centres {known}: name one with --scylla-datacenter")
            }
            Self::Schema(error) => error.fmt(f),
            Self::Prepare(_) => f.write_str("the database does not take a statement"),
            Self::Read(_) => f.write_str("the database cannot be read"),
        }
    }
}

impl std::error::Error for ScyllaError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unreachable { source, .. } | Self::NotLetIn { source, .. } => Some(&**source),
            Self::Unnamed | Self::NoSuchDatacenter { .. } | Self::Datacenters(_) => None,
            Self::Schema(error) => error.source(),
            Self::Prepare(error) => Some(&**error),
            Self::Read(error) => Some(error),
        }
    }
}

impl From<SchemaError> for ScyllaError {
    fn from(error: SchemaError) -> Self {
        Self::Schema(error)
    }
}

/// Creates the keyspace and tables that are missing. Returns whether it created any.
pub async fn apply_schema(connection: &ScyllaConnection) -> Result<bool, ScyllaError> {
    let session = connection.first_session().await?;
    Ok(schema::apply(&session, connection).await?)
}

impl ScyllaConnection {
    pub(super) async fn session(&self) -> Result<Session, ScyllaError> {
        self.build(self.builder().known_nodes(&self.nodes)).await
    }

    /// Makes a session to replace one that gets no answers. Skips stalled nodes, since the driver would wait for each of them.
    pub(super) async fn session_avoiding_silent(
        &self,
        reachability: &NodeReachability,
    ) -> Result<(Session, SilentNodeFilter), ScyllaError> {
        let passed = SilentNodeFilter::of_silent(reachability);
        let builder = self.builder().known_nodes_addr(&reachability.answer);
        let session = self.build(builder.host_filter(Arc::new(passed.clone()))).await?;
        Ok((session, passed))
    }

    fn builder(&self) -> SessionBuilder {
        let profile = ExecutionProfile::builder()
            .consistency(Consistency::LocalQuorum)
            .serial_consistency(Some(SerialConsistency::LocalSerial))
            .request_timeout(Some(self.wait))
            .speculative_execution_policy(Some(Arc::new(SimpleSpeculativeExecutionPolicy {
                max_retry_count: 1,
                retry_interval: self.wait / 4,
            })))
            .build();
        let mut builder = SessionBuilder::new()
            .pool_size(PoolSize::PerHost(CONNECTIONS))
            .connection_timeout(CONNECT_WAIT)
            .keepalive_interval(KEEPALIVE)
            .keepalive_timeout(KEEPALIVE_WAIT)
            .keyspaces_to_fetch([&self.keyspace])
            .schema_agreement_interval(AGREEMENT_LOOK)
            .refresh_metadata_on_auto_schema_agreement(false)
            .default_execution_profile_handle(profile.into_handle());
        if let Some((user, password)) = &self.credentials {
            builder = builder.user(user, password);
        }
        if let Some(datacenter) = &self.datacenter {
            builder = builder.prefer_datacenter(datacenter.clone());
        }
        builder
    }

    async fn build(&self, builder: SessionBuilder) -> Result<Session, ScyllaError> {
        builder.build().await.map_err(|error| self.explain(error))
    }

    /// Makes the first session, and refuses a data centre that is missing or unknown. Later sessions are not refused, so that a running
    /// node goes on.
    pub(super) async fn first_session(&self) -> Result<Session, ScyllaError> {
        let session = self.session().await?;
        let state = session.get_cluster_state();
        let named = state.get_nodes_info().iter().filter_map(|node| node.datacenter.clone());
        self.check_datacenter(&named.collect())?;
        Ok(session)
    }

    /// Checks the data centre. A quorum is local to it: with several data centres, each would have id claims of its own.
    fn check_datacenter(&self, known: &BTreeSet<String>) -> Result<(), ScyllaError> {
        let list = || known.iter().map(String::as_str).collect::<Vec<_>>().join(", ");
        match &self.datacenter {
            Some(name) if !known.contains(name) => {
                Err(ScyllaError::NoSuchDatacenter { name: name.clone(), known: list() })
            }
            None if known.len() > 1 => Err(ScyllaError::Datacenters(list())),
            _ => Ok(()),
        }
    }

    fn explain(&self, error: NewSessionError) -> ScyllaError {
        use ConnectionSetupRequestErrorKind as Kind;
        let user = self.credentials.as_ref().map(|(user, _)| user.clone()).unwrap_or_default();
        match setup_error(&error) {
            Some(Kind::MissingAuthentication) => ScyllaError::Unnamed,
            Some(Kind::DbError(DbError::AuthenticationError | DbError::Unauthorized, _)) => {
                ScyllaError::NotLetIn { user, source: Box::new(error) }
            }
            _ => ScyllaError::Unreachable { nodes: self.nodes.join(", "), source: Box::new(error) },
        }
    }
}

/// Returns the reason why an answering node of the database refused the connection.
fn setup_error(error: &NewSessionError) -> Option<&ConnectionSetupRequestErrorKind> {
    let NewSessionError::MetadataError(MetadataError::ConnectionPoolError(error)) = error else {
        return None;
    };
    let ConnectionPoolError::Broken { last_connection_error } = error else { return None };
    match last_connection_error {
        ConnectionError::ConnectionSetupRequestError(error) => Some(error.get_error()),
        _ => None,
    }
}

/// A session with all statements prepared.
pub(super) struct PreparedSession {
    pub(super) session: Session,
    pub(super) statements: Statements,
}

impl PreparedSession {
    /// Prepares all statements; the schema must exist.
    pub(super) async fn from_session(session: Session, keyspace: &str) -> Result<Self, ScyllaError> {
        let statements = Statements::prepare(&session, keyspace).await?;
        Ok(Self { session, statements })
    }

    /// Connects also to the nodes that were skipped: the driver reads the list of nodes only after a change.
    pub(super) async fn connect_to_all(&self, passed: &SilentNodeFilter) {
        if passed.clear()
            && let Err(error) = self.session.refresh_metadata().await
        {
            tracing::debug!(%error, "database topology unknown");
        }
    }

    /// One batch of rows, all of one partition.
    pub(super) async fn write_all<T: SerializeRow>(
        &self,
        statement: &PreparedStatement,
        rows: &[T],
    ) -> Result<(), StoreError> {
        self.session.batch(&batch(statement, rows.len()), rows).await.map(drop).map_err(failed)
    }
}

pub(super) fn batch(statement: &PreparedStatement, rows: usize) -> Batch {
    let each = vec![BatchStatement::from(statement.clone()); rows];
    let mut batch = Batch::new_with_statements(BatchType::Unlogged, each);
    batch.set_is_idempotent(true);
    batch
}

async fn prepare(session: &Session, keyspace: &str, text: &str) -> Result<PreparedStatement, ScyllaError> {
    let prepared = session.prepare(text.replace("{}", keyspace)).await;
    let mut prepared = prepared.map_err(|error| ScyllaError::Prepare(Box::new(error)))?;
    prepared.set_is_idempotent(true);
    Ok(prepared)
}

macro_rules! statements {
    ($($name:ident: $text:expr;)*) => {
        pub(super) struct Statements {
            $(pub(super) $name: PreparedStatement,)*
        }

        impl Statements {
            async fn prepare(session: &Session, keyspace: &str) -> Result<Self, ScyllaError> {
                let ($($name,)*) = tokio::try_join!($(prepare(session, keyspace, $text)),*)?;
                let mut prepared = Self { $($name,)* };
                // If one of these were sent twice, the second would be refused because of the first.
                for once in [&mut prepared.claim_nonce, &mut prepared.insert_queues, &mut prepared.update_queues] {
                    once.set_is_idempotent(false);
                }
                // The database assigns the write time, so an abandoned request that arrives late would undo a later one.
                let once = session.get_default_execution_profile_handle().pointee_to_builder();
                let once = once.speculative_execution_policy(None).build().into_handle();
                prepared.set_incarnations.set_execution_profile_handle(Some(once));
                Ok(prepared)
            }
        }
    };
}

statements! {
    insert_row: "INSERT INTO {}.history (account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation, \
        node_id, id, record) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) USING TTL ? AND TIMESTAMP ?";
    delete_row: "DELETE FROM {}.history USING TIMESTAMP ? WHERE account = ? AND channel = ? AND kind = ? AND day = ? \
        AND bucket = ? AND timestamp_ms = ? AND sequence = ? AND incarnation = ?";
    find_row: "SELECT id FROM {}.history WHERE account = ? AND channel = ? AND kind = ? AND day = ? \
        AND bucket = ? AND timestamp_ms = ? AND sequence = ? AND incarnation = ?";
    backwards: "SELECT timestamp_ms, sequence, incarnation, id, record, is_continued FROM {}.history WHERE account = ? \
        AND channel = ? AND kind = ? AND day = ? AND bucket = ? \
        AND (timestamp_ms, sequence, incarnation) < (?, ?, ?) \
        AND (timestamp_ms, sequence, incarnation) >= (?, ?, ?) LIMIT ?";
    forwards: "SELECT timestamp_ms, sequence, incarnation, id, record, is_continued FROM {}.history WHERE account = ? \
        AND channel = ? AND kind = ? AND day = ? AND bucket = ? \
        AND (timestamp_ms, sequence, incarnation) > (?, ?, ?) \
        AND (timestamp_ms, sequence, incarnation) <= (?, ?, ?) \
        ORDER BY timestamp_ms ASC, sequence ASC, incarnation ASC LIMIT ?";
    set_continued: "UPDATE {}.history USING TTL ? AND TIMESTAMP ? SET is_continued = true WHERE account = ? AND channel = ? \
        AND kind = ? AND day = ? AND bucket = 0";
    now: "SELECT toUnixTimestamp(now()) FROM system.local";
    marked_from: "SELECT version FROM {}.schema_version WHERE part = 'marked'";
    set_marked_from: "INSERT INTO {}.schema_version (part, version) VALUES ('marked', ?)";
    insert_day: "INSERT INTO {}.days (account, channel, kind, day, bucket) VALUES (?, ?, ?, ?, ?) \
        USING TTL ? AND TIMESTAMP ?";
    days_backwards: "SELECT day, bucket FROM {}.days WHERE account = ? AND channel = ? AND kind = ? \
        AND day >= ? AND day <= ? LIMIT ?";
    days_forwards: "SELECT day, bucket FROM {}.days WHERE account = ? AND channel = ? AND kind = ? \
        AND day >= ? AND day <= ? ORDER BY day ASC, bucket ASC LIMIT ?";
    buckets_backwards: "SELECT day, bucket FROM {}.days WHERE account = ? AND channel = ? AND kind = ? AND day = ? \
        AND bucket >= ? AND bucket <= ? LIMIT ?";
    buckets_forwards: "SELECT day, bucket FROM {}.days WHERE account = ? AND channel = ? AND kind = ? AND day = ? \
        AND bucket >= ? AND bucket <= ? ORDER BY day ASC, bucket ASC LIMIT ?";
    claim_id: "INSERT INTO {}.message_ids (account, channel, key_name, client_id, id, owner) \
        VALUES (?, ?, ?, ?, ?, ?) IF NOT EXISTS USING TTL ?";
    take_id: "UPDATE {}.message_ids USING TTL ? SET owner = ?, bucket = ? WHERE account = ? AND channel = ? AND \
        key_name = ? AND client_id = ? AND id = ? IF owner = ? AND incarnation = ? AND sequence = ?";
    stamp_id: "UPDATE {}.message_ids USING TTL ? SET owner = ?, incarnation = ?, sequence = ?, timestamp_ms = ?, \
        bucket = ? WHERE account = ? AND channel = ? AND key_name = ? AND client_id = ? AND id = ? IF owner = ?";
    insert_id: "INSERT INTO {}.message_ids (account, channel, key_name, client_id, id, owner, incarnation, sequence, \
        timestamp_ms, bucket) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) IF NOT EXISTS USING TTL ?";
    claim_nonce: "INSERT INTO {}.nonces (key_name, timestamp_ms, nonce) VALUES (?, ?, ?) IF NOT EXISTS USING TTL ?";
    insert_revocation: "INSERT INTO {}.revocations (key_name, client_id, issued_before_ms) VALUES (?, ?, ?) \
        USING TTL ? AND TIMESTAMP ?";
    revocations: "SELECT key_name, client_id, issued_before_ms FROM {}.revocations";
    insert_queues: "INSERT INTO {}.account_queues (account, revision, definitions) VALUES (?, ?, ?) IF NOT EXISTS";
    update_queues: "UPDATE {}.account_queues SET revision = ?, definitions = ? WHERE account = ? IF revision = ?";
    account_queues: "SELECT account, revision, definitions FROM {}.account_queues";
    queue_revisions: "SELECT account, revision FROM {}.account_queues";
    queues_of: "SELECT revision, definitions FROM {}.account_queues WHERE account = ?";
    insert_member: "INSERT INTO {}.members (node_id, account, channel, connection_id, client_id, epoch, data, \
        timestamp_ms) VALUES (?, ?, ?, ?, ?, ?, ?, ?) USING TIMESTAMP ?";
    delete_member: "DELETE FROM {}.members USING TIMESTAMP ? WHERE node_id = ? AND account = ? AND channel = ? \
        AND connection_id = ? AND client_id = ?";
    members: "SELECT account, channel, connection_id, client_id, epoch, data, timestamp_ms FROM {}.members \
        WHERE node_id = ?";
    node: "SELECT runs, highest_ms FROM {}.nodes WHERE node_id = ?";
    set_incarnations: "INSERT INTO {}.nodes (node_id, runs) VALUES (?, ?)";
    set_highest: "INSERT INTO {}.nodes (node_id, highest_ms) VALUES (?, ?) USING TIMESTAMP ?";
    insert_policies: "INSERT INTO {}.policies (part, node_id, incarnation, policies, is_over, marks) \
        VALUES ('all', ?, ?, ?, ?, true) USING TTL ? AND TIMESTAMP ?";
    policies: "SELECT node_id, incarnation, policies, is_over, marks FROM {}.policies WHERE part = 'all'";
    insert_metric: "INSERT INTO {}.metrics (account, day, minute_ms, node_id, incarnation, kind, counted, bytes) \
        VALUES (?, ?, ?, ?, ?, ?, ?, ?) USING TTL ? AND TIMESTAMP ?";
    metrics: "SELECT minute_ms, node_id, incarnation, kind, counted, bytes FROM {}.metrics WHERE account = ? \
        AND day = ? AND minute_ms >= ?";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_several_data_centres_must_be_named() {
        let connection = |datacenter: Option<&str>| ScyllaConnection {
            nodes: Vec::new(),
            keyspace: "a".to_owned(),
            replication: None,
            datacenter: datacenter.map(str::to_owned),
            credentials: None,
            wait: Duration::ZERO,
        };
        let mistake = |datacenter, known: &[&str]| {
            let known = known.iter().map(|name| (*name).to_owned()).collect();
            connection(datacenter).check_datacenter(&known).err().map(|error| error.to_string())
        };
        let unnamed = "the database has the data centres north, south: name one with --scylla-datacenter";
        assert_eq!(mistake(None, &["south", "north"]).as_deref(), Some(unnamed));
        for (named, known) in [(None, &["north"][..]), (None, &[]), (Some("north"), &["north", "south"])] {
            assert_eq!(mistake(named, known), None, "{named:?} of {known:?}");
        }
    }
}
