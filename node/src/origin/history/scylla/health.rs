//! Health of the database: whether it answers, and a new session once it answers again.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::{PreparedSession, ScyllaError};
use super::reachability::{self, NodeReachability};
use super::{ScyllaShared, failed};
use crate::dns_cache::DnsCache;
use crate::origin::history::StoreError;
use crate::tasks::OnStop;

/// Interval of health checks while the database answers.
const LOOK: Duration = Duration::from_secs(1);
/// Interval of health checks while database unavailable.
const LOOK_AGAIN: Duration = Duration::from_millis(250);
/// Longest pause after a new session that did not help.
const RENEW_AGAIN_MAX: Duration = Duration::from_secs(2);
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// Time limit for a new session and its prepared statements. A node that has stalled since it was checked may use up this time; the next
/// attempt skips it.
const SESSION_WAIT: Duration = Duration::from_secs(3);
/// Longest time limit if the database is only slow; the limit doubles each time.
const SESSION_WAIT_MAX: Duration = Duration::from_secs(10);

#[derive(Default)]
pub(super) struct DatabaseHealth {
    /// Reason why database unavailable.
    silent: Mutex<Option<StoreError>>,
    /// Reason why the database refused the last write.
    refused: Mutex<Option<StoreError>>,
}

impl DatabaseHealth {
    pub(super) fn wrote(&self, result: &Result<(), StoreError>) {
        *self.refused.lock() = result.as_ref().err().cloned();
    }

    pub(super) fn state(&self) -> Result<(), StoreError> {
        for failure in [&self.silent, &self.refused] {
            if let Some(error) = failure.lock().clone() {
                return Err(error);
            }
        }
        Ok(())
    }

    fn answers(&self, result: Result<(), StoreError>) {
        let mut silent = self.silent.lock();
        match (&*silent, &result) {
            (None, Err(error)) => tracing::error!(%error, "database unavailable"),
            (Some(_), Ok(())) => tracing::info!("database available again"),
            _ => {}
        }
        if result.is_ok() {
            *self.refused.lock() = None;
        }
        *silent = result.err();
    }
}

/// Schedule of new sessions, while none of them has helped.
struct SessionRenewals {
    /// Nodes that answered at the last check.
    answer: HashSet<SocketAddr>,
    pause: Duration,
    next: Option<Instant>,
    session_wait: Duration,
}

impl Default for SessionRenewals {
    fn default() -> Self {
        Self { answer: HashSet::new(), pause: LOOK_AGAIN, next: None, session_wait: SESSION_WAIT }
    }
}

impl SessionRenewals {
    /// Returns whether a new session is due: at once if a node answers again to which the present session has no connection, else after
    /// the pause.
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

    fn back_off(&mut self, now: Instant) {
        self.next = Some(now + self.pause);
        self.pause = (2 * self.pause).min(RENEW_AGAIN_MAX);
    }
}

/// Checks the database until the store is dropped. The driver waits ever longer before it reconnects to nodes that are all down; a new
/// session reconnects at once.
pub(super) async fn watch(shared: Weak<ScyllaShared>) {
    let (mut renewals, mut names) = (SessionRenewals::default(), DnsCache::new());
    loop {
        let Some(shared) = shared.upgrade() else { return };
        let database = shared.database();
        let mut result = probe(&shared, &database).await;
        let was_silent = shared.health.silent.lock().is_some();
        if result.is_err() && was_silent {
            // If other nodes stall, the old session may be the first to reach a node that answers.
            tokio::select! {
                renewed = renew_in_time(&shared, &database, &mut renewals, &mut names) => {
                    if renewed {
                        result = probe(&shared, &shared.database()).await;
                    }
                }
                () = wait_until_answering(&shared, &database) => result = Ok(()),
            }
        }
        let pause = if result.is_ok() { LOOK } else { LOOK_AGAIN };
        if result.is_ok() {
            renewals = SessionRenewals::default();
        }
        shared.health.answers(result);
        drop((shared, database));
        tokio::time::sleep(pause).await;
    }
}

async fn probe(shared: &ScyllaShared, database: &PreparedSession) -> Result<(), StoreError> {
    let request = database.session.execute_unpaged(&database.statements.node, (&*shared.options.node_id,));
    match tokio::time::timeout(ANSWER_WAIT, request).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(error)) => Err(failed(error)),
        Err(_) => Err(failed(format_args!("the database has not answered for {ANSWER_WAIT:?}"))),
    }
}

async fn wait_until_answering(shared: &ScyllaShared, database: &PreparedSession) {
    while probe(shared, database).await.is_err() {
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Makes a new session within the time limit; returns whether there is one.
async fn renew_in_time(
    shared: &ScyllaShared,
    before: &PreparedSession,
    renewals: &mut SessionRenewals,
    names: &mut DnsCache,
) -> bool {
    let points = shared.connection.nodes.iter().map(|point| reachability::with_port(point)).collect();
    let reachability = NodeReachability::ask(reachability::known(&before.session), points, names).await;
    if !renewals.is_due(&reachability.answer, &reachability::connected(&before.session), Instant::now()) {
        return false;
    }
    let renewed = tokio::time::timeout(renewals.session_wait, renew(shared, &reachability)).await;
    if renewed.is_err() {
        renewals.session_wait = (2 * renewals.session_wait).min(SESSION_WAIT_MAX);
    }
    // Counts as failed until the session is found to help.
    renewals.back_off(Instant::now());
    renewed.is_ok_and(|renewed| renewed)
}

async fn renew(shared: &ScyllaShared, reachability: &NodeReachability) -> bool {
    let made: Result<_, ScyllaError> = async {
        let (session, passed) = shared.connection.session_avoiding_silent(reachability).await?;
        Ok((PreparedSession::from_session(session, &shared.connection.keyspace).await?, passed))
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
            tracing::debug!(%error, "new database session failed");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn useless_session_renewal_backs_off_except_for_returning_node() {
        let (begun, mut renewals) = (Instant::now(), SessionRenewals::default());
        let nodes = |ports: &[u16]| {
            ports.iter().map(|port| SocketAddr::from(([127, 0, 0, 1], *port))).collect::<HashSet<_>>()
        };
        let mut renewed = |answer: &[u16], connected: &[u16], after_ms: u64| {
            let now = begun + Duration::from_millis(after_ms);
            let is_due = renewals.is_due(&nodes(answer), &nodes(connected), now);
            if is_due {
                renewals.back_off(now);
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
