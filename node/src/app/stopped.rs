//! The outbox of a stopped node: inspected, and sent.

use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::outbox::{EventPage, EventState, Retried, TargetState};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::{StartError, files, outbox, queues, store};
use crate::accounts::{Accounts, Directory};
use crate::config::Config;
use crate::model::{AccountId, Clock};
use crate::origin::history::HistoryStore;
use crate::origin::outbox::{EventOutbox, EventQuery, TargetId};
use crate::origin::queues::Queues;
use crate::tasks::Tasks;

/// Interval of a drain's progress reports.
const TELL: Duration = Duration::from_secs(1);
const STOP: Duration = Duration::from_secs(5);

/// The outbox in the data folder of a stopped node. The node cannot start while it is open.
pub struct StoppedOutbox {
    outbox: EventOutbox,
    tasks: Arc<Tasks>,
    store: Option<Arc<dyn HistoryStore>>,
}

impl StoppedOutbox {
    /// Opens the outbox for inspection; sends nothing. If the directory cannot be read, the kinds of targets are unknown.
    ///
    /// # Errors
    /// The folder has no outbox, or another process has it open.
    pub async fn open(config: &Config) -> Result<Self, StartError> {
        let accounts = Accounts::open(&config.directory_file(), config.limits.history_retention_hours);
        let accounts = accounts.unwrap_or_else(|_| Accounts::fixed(Directory::default()));
        Self::open_with(config, &accounts, (None, None), Arc::new(Tasks::new(Handle::current()))).await
    }

    /// Sends the waiting events as the node would; to queues only if the configuration names their broker.
    ///
    /// # Errors
    /// As for `open`; also if the directory or the store of the queues cannot be read.
    pub async fn begin(config: &Config) -> Result<Self, StartError> {
        exists(config)?;
        let (clock, tasks) = (Clock::system(), Arc::new(Tasks::new(Handle::current())));
        // Not created if missing, unlike at the start of a node: there would be no target.
        let accounts = Accounts::open(&config.directory_file(), config.limits.history_retention_hours)
            .map_err(StartError::at("cannot use the directory (--directory)"))?;
        let (mut of_queues, mut kept) = (None, None);
        if config.amqp_url.is_some() {
            let node_id = files::node_id(config)?;
            let store = store::open(config, None, &node_id, &clock).await?;
            of_queues = queues::open(config, &node_id, &store, &accounts, &tasks).await?;
            kept = Some(store);
        }
        let own = Self::open_with(config, &accounts, (of_queues, kept), tasks).await?;
        own.outbox.begin(&own.tasks);
        Ok(own)
    }

    async fn open_with(
        config: &Config,
        accounts: &Arc<Accounts>,
        (queues, store): (Option<Queues>, Option<Arc<dyn HistoryStore>>),
        tasks: Arc<Tasks>,
    ) -> Result<Self, StartError> {
        exists(config)?;
        let (config, node_id, accounts) = (config.clone(), files::node_id(config)?, Arc::clone(accounts));
        let opened = tokio::task::spawn_blocking(move || {
            let transport = outbox::transport(&config.webhook_allow, &node_id, queues.as_ref())?;
            let catalog = queues.as_ref().map(|queues| queues.catalog().clone());
            let (folder, limits, of) = (outbox::folder(&config), &config.limits, (&accounts, catalog));
            EventOutbox::open(&folder, limits, &Clock::system(), &node_id, of, transport)
        });
        let opened = opened.await.map_err(StartError::at("cannot open the outbox (--data-dir)"))?;
        let outbox =
            opened.map_err(StartError::at("cannot open the outbox (--data-dir); its node must not run"))?;
        Ok(Self { outbox, tasks, store })
    }

    /// All targets with events, and the disabled ones.
    pub async fn targets(&self) -> Vec<TargetState> {
        self.outbox.targets().await
    }

    /// Reads a page of events. `after` is the `next` of the previous page.
    ///
    /// # Errors
    /// The outbox cannot be read, or `after` is invalid.
    pub async fn events(
        &self,
        (account, target): (&str, &str),
        state: EventState,
        after: Option<&str>,
        limit: usize,
    ) -> Result<EventPage, StartError> {
        let doing = "cannot read the outbox";
        let after = match after.map(|after| EventQuery::cursor(after).ok_or("after is no next of a page")) {
            Some(cursor) => Some(cursor.map_err(StartError::at(doing))?),
            None => None,
        };
        let target = TargetId::new(&AccountId::new(account), target);
        let page = self.outbox.events(&target, EventQuery { state, after, limit }).await;
        page.map_err(StartError::at(doing))
    }

    /// Moves these dead letters, or all of the target, back to the outbox.
    ///
    /// # Errors
    /// The outbox cannot be read or written.
    pub async fn retry(
        &self,
        (account, target): (&str, &str),
        events: Option<Vec<u64>>,
    ) -> Result<Retried, StartError> {
        let target = TargetId::new(&AccountId::new(account), target);
        self.outbox.retry(&target, events).await.map_err(StartError::at("cannot write to the outbox"))
    }

    /// Waits until nothing is left that can be sent, or nothing was sent for `patience`. `on_progress` gets the number of waiting events of known
    /// targets once a second.
    pub async fn drain(&self, patience: Duration, mut on_progress: impl FnMut(u64)) {
        let (mut before, mut since) = (None, Instant::now());
        loop {
            let targets = self.outbox.targets().await;
            let known = targets.iter().filter(|target| target.kind.is_some());
            let left: u64 = known.map(|target| target.waiting_events).sum();
            on_progress(left);
            if before.is_none_or(|before| left < before) {
                (before, since) = (Some(left), Instant::now());
            }
            if left == 0 || since.elapsed() >= patience {
                return;
            }
            tokio::time::sleep(TELL).await;
        }
    }

    /// Writes the outcomes of the answered attempts, and closes the folder.
    pub async fn close(self) {
        let Self { outbox, tasks, store } = self;
        tasks.stop(STOP).await;
        let closed = tokio::task::spawn_blocking(move || {
            outbox.shutdown();
            store.map(|store| store.shutdown())
        });
        if closed.await.is_err() {
            tracing::error!("outbox shutdown incomplete");
        }
    }
}

fn exists(config: &Config) -> Result<(), StartError> {
    let folder = outbox::folder(config);
    std::fs::metadata(&folder).map(|_| ()).map_err(StartError::in_data(&folder))
}
