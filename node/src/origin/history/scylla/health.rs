//! Whether the database answers; and a new session with it where it does again.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::connection::{Database, ScyllaError};
use super::standing::{self, Standing};
use super::{Shared, failed};
use crate::origin::history::StoreError;
use crate::tasks::OnStop;

/// Between two questions whether it answers.
const LOOK: Duration = Duration::from_secs(1);
/// The same while it does not.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// What a new session may take, with everything that is prepared in it: a node that stands still from then on only is given up after
/// some four seconds.
const SESSION_WAIT: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct Health {
    /// Why it does not answer.
    silent: Mutex<Option<StoreError>>,
    /// Why it did not take the last write.
    refused: Mutex<Option<StoreError>>,
}

impl Health {
    pub(super) fn wrote(&self, result: &Result<(), StoreError>) {
        *self.refused.lock() = result.as_ref().err().cloned();
    }

    pub(super) fn state(&self) -> Result<(), StoreError> {
        for said in [&self.silent, &self.refused] {
            if let Some(error) = said.lock().clone() {
                return Err(error);
            }
        }
        Ok(())
    }

    fn answers(&self, result: Result<(), StoreError>) {
        let mut silent = self.silent.lock();
        match (&*silent, &result) {
            (None, Err(error)) => tracing::error!(%error, "the database does not answer"),
            (Some(_), Ok(())) => tracing::info!("the database answers again"),
            _ => {}
        }
        if result.is_ok() {
            *self.refused.lock() = None;
        }
        *silent = result.err();
    }
}

/// Never returns before the store is dropped. The driver waits ever longer before it connects again to nodes that are all gone; a
/// new session does so at once.
pub(super) async fn watch(shared: Weak<Shared>) {
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let database = shared.database();
        let mut result = probe(&shared, &database).await;
        let was_silent = shared.health.silent.lock().is_some();
        if result.is_err() && was_silent {
            // Where others stand still, the session that was may be the first to have one again that does not.
            tokio::select! {
                renewed = tokio::time::timeout(SESSION_WAIT, renew(&shared, &database)) => {
                    if renewed.is_ok_and(|renewed| renewed) {
                        result = probe(&shared, &shared.database()).await;
                    }
                }
                () = answers_again(&shared, &database) => result = Ok(()),
            }
        }
        let pause = if result.is_ok() { LOOK } else { LOOK_AGAIN };
        shared.health.answers(result);
        drop((shared, database));
        tokio::time::sleep(pause).await;
    }
}

async fn probe(shared: &Shared, database: &Database) -> Result<(), StoreError> {
    let asked = database.session.execute_unpaged(&database.statements.node, (&*shared.options.node_id,));
    match tokio::time::timeout(ANSWER_WAIT, asked).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => Err(failed(format_args!("the database has not answered for {ANSWER_WAIT:?}"))),
    }
}

async fn answers_again(shared: &Shared, database: &Database) {
    while probe(shared, database).await.is_err() {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

async fn renew(shared: &Shared, before: &Database) -> bool {
    let made: Result<_, ScyllaError> = async {
        let told = shared.names.look_up(&shared.tasks);
        let standing = Standing::ask(standing::known(&before.session), told).await;
        if standing.answer.is_empty() {
            return Ok(None);
        }
        let (session, passed) = shared.connection.session_past(&standing).await?;
        Ok(Some((Database::over(session, &shared.connection.keyspace).await?, passed)))
    }
    .await;
    match made {
        Ok(Some((database, passed))) => {
            let database = Arc::new(database);
            *shared.database.write() = Arc::clone(&database);
            let looking = async move { database.connect_to_all(&passed).await };
            shared.tasks.spawn("nodes of the database", OnStop::Cancel, looking);
            true
        }
        Ok(None) => false,
        Err(error) => {
            tracing::debug!(%error, "no new session with the database");
            false
        }
    }
}
