//! What the store holds of what a client missed, or asks to begin with: found once, then read page by page as its socket drains.
//!
//! The rows of a channel stand in the order in which they were published, over all runs of the node, and what can be read of
//! them is always a beginning. So nothing is missing where the numbers of a run follow each other by one. From one run to
//! the next they do not: there nothing is missing if the node has stored whatever it delivered since, in each run.

mod everywhere;
mod find;
mod page;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fanfare_proto::frame::Format;
use fanfare_proto::serial::Serial;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use super::{Input, ShardHandle};
use crate::accounts::{Accounts, ChannelPolicy};
use crate::hub::{Channel, Hub, Recent, Spot};
use crate::model::{AccountId, Amount, Clock, ConnectionId, Forwarded, Limits, Stamp};
use crate::origin::history::{FormerRun, HistoryStore, Position};
use crate::publish::Publisher;
use crate::session::Rewind;
use crate::telemetry::OFTEN;
pub(super) use everywhere::Reading;

/// Questions that wait for their turn; beyond it nothing is found.
const ASKED_MAX: usize = 262_144;
/// Those of them that are on their way to where they wait.
const QUEUE_MAX: usize = 65_536;
/// Questions that the store has at a time.
const UNDER_WAY_MAX: usize = 64;
/// Those beside them of which other nodes are asked first, who may not answer.
const ELSEWHERE_MAX: usize = 256;
/// A question that the store has not answered by then is answered without it.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// The same where other nodes are asked first.
const ELSEWHERE_WAIT: Duration = Duration::from_secs(15);
/// A question that needs all nodes waits for so long that those that are dead are known to be.
const WHOLE_WAIT: Duration = Duration::from_secs(5);
const WHOLE_LOOK: Duration = Duration::from_millis(50);

/// The shards' way to what is stored.
#[derive(Clone)]
pub struct Backlog {
    shared: Arc<Shared>,
    asked: mpsc::Sender<Ask>,
}

struct Shared {
    hub: Arc<Hub>,
    store: Arc<dyn HistoryStore>,
    publisher: Publisher,
    accounts: Arc<Accounts>,
    /// Of what the store stamps.
    clock: Clock,
    former: Vec<Former>,
    /// When the node was ready, and the changes of what channels keep by then.
    ready: Instant,
    ready_ms: u64,
    policy_changes: u64,
    /// How old may be what is missed, as what a ring keeps, and without the capability to read the history.
    keep_ms: u64,
    window_ms: u64,
}

/// A run before the present one that can be followed into it: all of what it left, from any place that a client may have.
struct Former {
    incarnation: u64,
    /// The time of its last row.
    last_ms: u64,
    /// What of the time in which its clients may come back was over when the node was ready.
    passed_ms: u64,
}

/// A question of a shard.
pub(super) struct Ask {
    pub(super) channel: Arc<Channel>,
    pub(super) policy: ChannelPolicy,
    pub(super) question: Question,
    pub(super) reply: Reply,
}

pub(super) enum Question {
    /// What follows this stamp, up to the number `mark` of this run, after which the asker takes part in deliveries.
    /// Of the run of the stamp, nothing that is `back_ms` older than the end of that run, or than now.
    After { after: Stamp, mark: u64, back_ms: Option<u64> },
    /// The last messages up to the number `mark` of this run.
    Back { rewind: Rewind, mark: u64 },
    /// What follows this position in a channel of several nodes, which stood at `stands` when the asker began to take part in
    /// deliveries. None where it was let in to all of it, else nothing that is `back_ms` old.
    Elsewhere { position: Serial, stands: Serial, back_ms: Option<u64> },
    /// The last messages up to there.
    BackElsewhere { rewind: Rewind, stands: Serial },
    /// Nothing: a client with this position was told a loss.
    Lost { position: Serial },
    /// What follows in a reading.
    Read { reading: Box<Reading>, format: Format, without: Option<ConnectionId> },
    /// The messages after a place, in this format, but for those that this connection has published.
    Page { place: Place, format: Format, without: Option<ConnectionId> },
}

impl Question {
    /// Other nodes are asked before the store.
    fn is_elsewhere(&self) -> bool {
        matches!(self, Self::Elsewhere { .. } | Self::BackElsewhere { .. } | Self::Lost { .. })
    }
}

/// Where the answer goes. Dropped without one it says that nothing was found.
pub(super) struct Reply {
    shard: Arc<ShardHandle>,
    slot: u32,
    generation: u32,
    ticket: u64,
    is_given: bool,
}

pub enum Found {
    /// What follows cannot be told.
    Nothing,
    Begin {
        place: Place,
        /// Of a rewind: fewer were found than asked for, and there may be more.
        is_cut: bool,
    },
    Page(Page),
    /// The recent messages of the channel, after this place; unless that is exact, the client has some of it already.
    Recent {
        after: Spot,
        is_exact: bool,
    },
    /// As many of the recent messages as there are of those that a rewind asks for.
    Back {
        recent: Recent,
        is_cut: bool,
        /// More may be stored.
        is_stored: bool,
    },
    /// What other nodes have: everything, up to now.
    Elsewhere(Vec<Forwarded>),
    /// The store that nodes share has it.
    Reading {
        reading: Box<Reading>,
        is_cut: bool,
    },
    /// Some of it; without an end the reading goes on.
    Read {
        frames: Vec<Bytes>,
        amount: Amount,
        reading: Box<Reading>,
        is_end: bool,
    },
}

impl Found {
    /// Memory that it holds until it is taken.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Page(Page { frames, .. }) | Self::Read { frames, .. } => {
                frames.iter().map(Bytes::len).sum()
            }
            Self::Elsewhere(missed) => missed.iter().map(|one| one.bytes as usize + 512).sum(),
            Self::Nothing
            | Self::Recent { .. }
            | Self::Back { .. }
            | Self::Begin { .. }
            | Self::Reading { .. } => 0,
        }
    }
}

/// Some of what follows a place, in order and without a gap.
pub struct Page {
    pub(super) frames: Vec<Bytes>,
    pub(super) amount: Amount,
    pub(super) place: Place,
}

/// How far a reader has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// It has all up to here.
    pub(super) after: Stamp,
    /// Its next row is behind this one.
    cursor: Position,
    order: Order,
}

/// How the stamps of rows follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// In one run, by one.
    Strict,
    /// By one in the run `from`; then all rows of those after it, and from `mark` of this one on by one.
    IntoThisRun { from: u64, mark: u64 },
    /// As they stand, and from `mark` of this run on by one.
    Any { mark: u64 },
}

impl Backlog {
    /// To be made when the node is ready, with the one that answers.
    pub fn new(
        publisher: &Publisher,
        accounts: &Arc<Accounts>,
        clock: &Clock,
        former: &[FormerRun],
        limits: &Limits,
    ) -> (Self, BacklogReader) {
        let policy_changes = accounts.policy_changes();
        let former = Former::followed(former, accounts.current().history_policies());
        let (keep_ms, window_ms) = (2 * limits.resume_window_ms, limits.resume_window_ms);
        let (ready, ready_ms) = (Instant::now(), clock.expiry_ms());
        let (hub, store) = (Arc::clone(publisher.hub()), Arc::clone(publisher.store()));
        let (publisher, accounts, clock) = (publisher.clone(), Arc::clone(accounts), clock.clone());
        let shared = Shared {
            hub,
            store,
            publisher,
            accounts,
            clock,
            former,
            ready,
            ready_ms,
            policy_changes,
            keep_ms,
            window_ms,
        };
        let shared = Arc::new(shared);
        let (asked, asks) = mpsc::channel(QUEUE_MAX);
        (
            Self { shared: Arc::clone(&shared), asked },
            BacklogReader {
                shared,
                asks,
                held: VecDeque::new(),
                waiting: Turns::default(),
                elsewhere: Turns::default(),
            },
        )
    }

    /// From where the store may tell what follows the position.
    pub(super) fn follows(&self, position: &Serial, policy: ChannelPolicy) -> Option<Stamp> {
        let stamp =
            |incarnation| position.sequence_of(incarnation).map(|sequence| Stamp { incarnation, sequence });
        let shared = &self.shared;
        let former = || {
            let found = shared.former.iter().find_map(|run| Some((run, stamp(run.incarnation)?)));
            found.filter(|(run, _)| shared.follows(run, shared.keep_ms)).map(|(_, stamp)| stamp)
        };
        policy.history.then(|| stamp(shared.hub.incarnation()))?.or_else(former)
    }

    /// How old may be what is missed after a position that nothing is known of: a client could have made it up. Who may read
    /// the history gains nothing by that; others are held to the window.
    pub(super) fn back_ms(&self, history: bool) -> u64 {
        if history { self.shared.keep_ms } else { self.shared.window_ms }
    }

    /// Answers with nothing at once where too much is asked.
    pub(super) fn ask(&self, ask: Ask) {
        // What does not fit is dropped here, which answers it.
        self.asked.try_send(ask).ok();
    }
}

impl Shared {
    /// Clients of the former run may come back within this time, and this run has kept all that they may have missed of it.
    fn follows(&self, former: &Former, within_ms: u64) -> bool {
        let is_soon = self.ready.elapsed() + Duration::from_millis(former.passed_ms)
            <= Duration::from_millis(within_ms);
        is_soon && self.publisher.stores_all() && self.accounts.policy_changes() == self.policy_changes
    }

    fn former(&self, incarnation: u64) -> Option<&Former> {
        self.former.iter().find(|run| run.incarnation == incarnation)
    }

    /// How many runs have begun since, this one included.
    fn runs_since(&self, incarnation: u64) -> Option<usize> {
        if incarnation == self.hub.incarnation() {
            return Some(0);
        }
        self.former.iter().position(|run| run.incarnation == incarnation).map(|place| place + 1)
    }

    fn own(&self, sequence: u64) -> Stamp {
        Stamp { incarnation: self.hub.incarnation(), sequence }
    }

    async fn answer(self: Arc<Self>, ask: Ask) {
        let Ask { channel, policy, question, reply } = ask;
        let oldest_ms = policy.oldest_ms(self.clock.expiry_ms());
        let wait = if question.is_elsewhere() { ELSEWHERE_WAIT } else { ANSWER_WAIT };
        let rows = Rows { shared: &self, channel: &channel, oldest_ms };
        let rewind = match &question {
            Question::BackElsewhere { rewind, .. } => Some(*rewind),
            _ => None,
        };
        let found = async {
            match question {
                Question::After { after, mark, back_ms } => rows.find_after(after, mark, back_ms).await,
                Question::Back { rewind, mark } => rows.find_back(rewind, mark).await,
                Question::Page { place, format, without } => rows.page(place, format, without).await,
                Question::Elsewhere { position, stands, back_ms } => {
                    rows.find_elsewhere(position, stands, back_ms, policy.history).await
                }
                Question::BackElsewhere { rewind, stands } => {
                    Some(rows.back_of_all(rewind, stands, policy).await)
                }
                Question::Read { reading, format, without } => {
                    let has = reading.has.clone();
                    let found = rows.read_on(reading, format, without).await;
                    if found.is_none() {
                        rows.begin_anew(&has).await;
                    }
                    found
                }
                Question::Lost { position } => {
                    rows.begin_anew(&position).await;
                    None
                }
            }
        };
        let found = tokio::time::timeout(wait, found).await.unwrap_or(None);
        // What is recent here is had without the others.
        let here = || rewind.map(|rewind| rows.back_here(rewind, rows.is_stored_by_all(policy)));
        reply.give(found.or_else(here).unwrap_or(Found::Nothing));
    }
}

impl Former {
    /// Of the runs, latest first, those that can be followed. All must have had the policies of the present one to their end,
    /// since of other channels not all that was published is known; and those in between must have stored it all, since their
    /// numbers do not tell what is missing.
    fn followed(runs: &[FormerRun], policies: u64) -> Vec<Self> {
        let mut followed = Vec::new();
        for (run, passed_ms) in FormerRun::with_passed_ms(runs) {
            if run.kept.policies != policies {
                break;
            }
            followed.push(Self { incarnation: run.incarnation, last_ms: run.last_ms, passed_ms });
            if !run.kept.is_all {
                break;
            }
        }
        followed
    }
}

/// The stored messages of one channel.
struct Rows<'a> {
    shared: &'a Shared,
    channel: &'a Arc<Channel>,
    oldest_ms: u64,
}

/// Answers what is asked, as a task of its own.
pub struct BacklogReader {
    shared: Arc<Shared>,
    asks: mpsc::Receiver<Ask>,
    /// Until it is known which nodes are alive, or then.
    held: VecDeque<(Instant, Ask)>,
    waiting: Turns,
    elsewhere: Turns,
}

impl BacklogReader {
    /// Until nobody can ask any more.
    pub async fn run(mut self) {
        let (mut under_way, mut elsewhere) = (JoinSet::new(), JoinSet::new());
        loop {
            self.let_go();
            let Self { shared, waiting, elsewhere: others, .. } = &mut self;
            for (tasks, turns, max) in
                [(&mut under_way, waiting, UNDER_WAY_MAX), (&mut elsewhere, others, ELSEWHERE_MAX)]
            {
                while tasks.len() < max
                    && let Some(ask) = turns.next()
                {
                    tasks.spawn(Arc::clone(shared).answer(ask));
                }
            }
            tokio::select! {
                ask = self.asks.recv() => match ask {
                    Some(ask) => self.take(ask),
                    None => return,
                },
                () = tokio::time::sleep(WHOLE_LOOK), if !self.held.is_empty() => {}
                Some(ended) = under_way.join_next() => report(ended),
                Some(ended) = elsewhere.join_next() => report(ended),
            }
        }
    }
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(target: OFTEN, %error, "a question to the store ended without an answer");
    }
}

impl BacklogReader {
    /// A node may be about to be held for dead.
    fn is_torn(&self) -> bool {
        self.shared.publisher.routing().is_some_and(|routing| routing.is_torn_lately())
    }

    fn take(&mut self, ask: Ask) {
        let is_elsewhere = ask.question.is_elsewhere();
        if is_elsewhere && self.held.len() < ASKED_MAX && self.is_torn() {
            self.held.push_back((Instant::now() + WHOLE_WAIT, ask));
        } else if is_elsewhere {
            self.elsewhere.push(ask);
        } else {
            self.waiting.push(ask);
        }
    }

    fn let_go(&mut self) {
        let is_known = !self.held.is_empty() && !self.is_torn();
        let now = Instant::now();
        while self.held.front().is_some_and(|(until, _)| is_known || *until <= now)
            && let Some((_, ask)) = self.held.pop_front()
        {
            self.elsewhere.push(ask);
        }
    }
}

/// Questions that wait, of each account in its turn. What does not fit is dropped, which answers it.
#[derive(Default)]
struct Turns {
    accounts: HashMap<AccountId, VecDeque<Ask>>,
    /// Each account that has one waiting, once.
    order: VecDeque<AccountId>,
    count: usize,
}

impl Turns {
    fn push(&mut self, ask: Ask) {
        let account = ask.channel.key().account();
        let asks = self.accounts.entry(account.clone()).or_default();
        if self.count >= ASKED_MAX || asks.len() >= ASKED_MAX / 2 {
            return;
        }
        if asks.is_empty() {
            self.order.push_back(account.clone());
        }
        asks.push_back(ask);
        self.count += 1;
    }

    fn next(&mut self) -> Option<Ask> {
        let account = self.order.pop_front()?;
        let asks = self.accounts.get_mut(&account)?;
        let ask = asks.pop_front();
        if asks.is_empty() {
            self.accounts.remove(&account);
        } else {
            self.order.push_back(account);
        }
        self.count -= usize::from(ask.is_some());
        ask
    }
}

impl Reply {
    pub(super) fn new(shard: Arc<ShardHandle>, slot: u32, generation: u32, ticket: u64) -> Self {
        Self { shard, slot, generation, ticket, is_given: false }
    }

    fn give(mut self, found: Found) {
        self.push(found);
    }

    fn push(&mut self, found: Found) {
        self.is_given = true;
        let Self { slot, generation, ticket, .. } = *self;
        self.shard.push(Input::Found { slot, generation, ticket, found: Box::new(found) });
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.is_given {
            self.push(Found::Nothing);
        }
    }
}
