//! Measurements of the database behind its driver alone, with the session settings and statements of a node.

pub mod insert;
pub mod select;

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;
use scylla::client::PoolSize;
use scylla::client::execution_profile::ExecutionProfile;
use scylla::client::session::Session;
use scylla::client::session_builder::SessionBuilder;
use scylla::frame::types::Consistency;
use scylla::statement::prepared::PreparedStatement;

use crate::Result;

/// Connections to each node of the database, as a node of Fanfare opens them.
const CONNECTIONS: NonZeroUsize = NonZeroUsize::new(4).expect("it is not 0");
const WAIT: Duration = Duration::from_secs(2);

#[derive(Args, Clone)]
pub struct Database {
    /// Nodes of the database, `host:port`, with commas between them.
    #[arg(long, value_delimiter = ',', required = true)]
    pub points: Vec<String>,
    /// Keyspace with the tables of a node.
    #[arg(long)]
    pub keyspace: String,
}

impl Database {
    async fn session(&self) -> Result<Session> {
        let profile =
            ExecutionProfile::builder().consistency(Consistency::LocalQuorum).request_timeout(Some(WAIT));
        let builder = SessionBuilder::new()
            .known_nodes(&self.points)
            .pool_size(PoolSize::PerHost(CONNECTIONS))
            .keyspaces_to_fetch([&self.keyspace])
            .default_execution_profile_handle(profile.build().into_handle());
        Ok(builder.build().await?)
    }

    /// Prepares a statement; `{}` stands for the keyspace.
    async fn prepare(&self, session: &Session, text: &str) -> Result<PreparedStatement> {
        let mut prepared = session.prepare(text.replace("{}", &self.keyspace)).await?;
        prepared.set_is_idempotent(true);
        Ok(prepared)
    }
}
