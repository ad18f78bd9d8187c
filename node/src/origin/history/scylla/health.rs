//! Whether the database answers; and a new session with it where it does again.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::{Database, ScyllaError};
use super::standing::{self, Standing};
use super::{Shared, failed};
use crate::names::Names;
use crate::origin::history::StoreError;
use crate::tasks::OnStop;

/// Between two questions whether it answers.
const LOOK: Duration = Duration::from_secs(1);
/// The same while it does not.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// The most between one new session that did not help and the next.
const RENEW_AGAIN_MAX: Duration = Duration::from_secs(2);
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// What a new session may take, with everything that is prepared in it. A node that stands still since it was asked may hold that up for
/// as long as it takes, and is passed by the next time.
const SESSION_WAIT: Duration = Duration::from_secs(3);
/// The most, where the database is only slow: twice as long each time.
const SESSION_WAIT_MAX: Duration = Duration::from_secs(10);

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

/// When a new session is made, while none that was made has helped.
struct Renewals {
    /// Nodes that answered when that was last asked.
    answer: HashSet<SocketAddr>,
    pause: Duration,
    next: Option<Instant>,
    session_wait: Duration,
}

impl Default for Renewals {
    fn default() -> Self {
        Self { answer: HashSet::new(), pause: LOOK_AGAIN, next: None, session_wait: SESSION_WAIT }
    }
}

impl Renewals {
    /// At once where a node answers again that the session which is there is not connected to, else after the pause.
    fn is_due(
        &mut self,
        answer: &HashSet<SocketAddr>,
        connected: &HashSet<SocketAddr>,
        now: Instant,
    ) -> bool {
        let is_back = answer.iter().any(|node| !self.answer.contains(node) && !connected.contains(node));
        self.answer.clone_from(answer);
        !answer.is_empty() && (is_back || self.next.is_none_or(|next| next <= now))
    }

    fn was_in_vain(&mut self, now: Instant) {
        self.next = Some(now + self.pause);
        self.pause = (2 * self.pause).min(RENEW_AGAIN_MAX);
    }
}

/// Never returns before the store is dropped. The driver waits ever longer before it connects again to nodes that are all gone; a
/// new session does so at once.
pub(super) async fn watch(shared: Weak<Shared>) {
    let (mut renewals, mut names) = (Renewals::default(), Names::new());
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let database = shared.database();
        let mut result = probe(&shared, &database).await;
        let was_silent = shared.health.silent.lock().is_some();
        if result.is_err() && was_silent {
            // Where others stand still, the session that was may be the first to have one again that does not.
            tokio::select! {
                renewed = renew_in_time(&shared, &database, &mut renewals, &mut names) => {
                    if renewed {
                        result = probe(&shared, &shared.database()).await;
                    }
                }
                () = answers_again(&shared, &database) => result = Ok(()),
            }
        }
        let pause = if result.is_ok() { LOOK } else { LOOK_AGAIN };
        if result.is_ok() {
            renewals = Renewals::default();
        }
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

/// Whether there is a new session.
async fn renew_in_time(
    shared: &Shared,
    before: &Database,
    renewals: &mut Renewals,
    names: &mut Names,
) -> bool {
    let points = shared.connection.nodes.iter().map(|point| standing::with_port(point)).collect();
    let standing = Standing::ask(standing::known(&before.session), points, names).await;
    if !renewals.is_due(&standing.answer, &standing::connected(&before.session), Instant::now()) {
        return false;
    }
    let renewed = tokio::time::timeout(renewals.session_wait, renew(shared, &standing)).await;
    if renewed.is_err() {
        renewals.session_wait = (2 * renewals.session_wait).min(SESSION_WAIT_MAX);
    }
    // Unless it is found to help.
    renewals.was_in_vain(Instant::now());
    renewed.is_ok_and(|renewed| renewed)
}

async fn renew(shared: &Shared, standing: &Standing) -> bool {
    let made: Result<_, ScyllaError> = async {
        let (session, passed) = shared.connection.session_past(standing).await?;
        Ok((Database::over(session, &shared.connection.keyspace).await?, passed))
    }
    .await;
    match made {
        Ok((database, passed)) => {
            let database = Arc::new(database);
            *shared.database.write() = Arc::clone(&database);
            let looking = async move { database.connect_to_all(&passed).await };
            shared.tasks.spawn("nodes of the database", OnStop::Cancel, looking);
            true
        }
        Err(error) => {
            tracing::debug!(%error, "no new session with the database");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useless_session_renewal_backs_off_except_for_returning_node() {
        let (begun, mut renewals) = (Instant::now(), Renewals::default());
        let nodes = |ports: &[u16]| {
            ports.iter().map(|port| SocketAddr::from(([127, 0, 0, 1], *port))).collect::<HashSet<_>>()
        };
        let mut renewed = |answer: &[u16], connected: &[u16], after_ms: u64| {
            let now = begun + Duration::from_millis(after_ms);
            let is_due = renewals.is_due(&nodes(answer), &nodes(connected), now);
            if is_due {
                renewals.was_in_vain(now);
            }
            is_due
        };
        assert!(!renewed(&[], &[], 0), "with nobody");
        let at: Vec<_> = (0..10_000).step_by(250).filter(|ms| renewed(&[1], &[1], *ms)).collect();
        assert_eq!(at, [0, 250, 750, 1_750, 3_750, 5_750, 7_750, 9_750]);
        assert!(!renewed(&[1, 2], &[1, 2], 10_000), "there is a connection to it");
        assert!(renewed(&[1, 2, 3], &[1, 2], 10_250));
        assert!(!renewed(&[1, 2, 3], &[1, 2], 10_500), "it was no help");
        assert!(!renewed(&[1, 2], &[1, 2], 10_750));
        assert!(renewed(&[1, 2, 3], &[1, 2], 11_000), "it is back once more");
    }
}
