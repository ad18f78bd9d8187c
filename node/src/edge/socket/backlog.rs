//! Store backfill: messages that a client missed, or asks for in a rewind. A query finds the start once; pages are then read as the socket
//! drains.
//!
//! The rows of a channel are in the order of publication, over all incarnations of the node, and a read always returns a prefix of them. So
//! no message is missing if the sequences of one incarnation are consecutive. From one incarnation to the next they are not: there no
//! message is missing if every incarnation since has stored whatever it delivered.

mod find;
mod page;
mod queue;
mod shared_store;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fanfare_proto::frame::Format;
use fanfare_proto::serial::Serial;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use super::{Input, ShardHandle};
use crate::accounts::{Accounts, ChannelPolicy};
use crate::hub::{Channel, Hub, LocalOffset, RewindStart};
use crate::model::{Amount, Clock, ConnectionId, ForwardedMessages, Limits, Stamp};
use crate::origin::history::{HistoryPosition, HistoryStore, PreviousIncarnation};
use crate::publish::Publisher;
use crate::session::Rewind;
use crate::telemetry::RATE_LIMITED;
use queue::BacklogQueue;
pub(super) use shared_store::SharedStoreCursor;

/// Queries that wait for their turn; above this a query is answered with nothing.
const ASKED_MAX: usize = 262_144;
/// Capacity of the channel from the shards to the reader.
const QUEUE_MAX: usize = 65_536;
/// Store queries that run concurrently.
const UNDER_WAY_MAX: usize = 64;
/// Further concurrent queries that ask peers first, since a peer may not answer.
const PEER_QUERIES_MAX: usize = 256;
/// Timeout of a store query, which then counts as without result.
const ANSWER_WAIT: Duration = Duration::from_secs(5);
/// Timeout of a query that asks peers first.
const PEER_QUERY_WAIT: Duration = Duration::from_secs(15);
/// Time that a query which needs all nodes waits during a partition. By then unreachable nodes are known to be down or not.
const PARTITION_WAIT: Duration = Duration::from_secs(5);
const PARTITION_LOOK: Duration = Duration::from_millis(50);

/// Handle with which shards query the store.
#[derive(Clone)]
pub struct Backlog {
    shared: Arc<BacklogContext>,
    sender: mpsc::Sender<BacklogRequest>,
}

struct BacklogContext {
    hub: Arc<Hub>,
    store: Arc<dyn HistoryStore>,
    publisher: Publisher,
    accounts: Arc<Accounts>,
    /// Clock of the store's timestamps.
    clock: Clock,
    earlier_incarnations: Vec<FollowedIncarnation>,
    /// Time at which the node became ready. The next fields are the same time by `clock`, and the number of changes of
    /// history policies by then.
    ready: Instant,
    ready_ms: u64,
    policy_changes: u64,
    /// Greatest age of missed messages: `keep_ms` as in replay buffers, and `window_ms` without the capability to read history.
    keep_ms: u64,
    window_ms: u64,
}

/// An earlier incarnation from which a client can resume: the store has all of its messages after any position of a client.
struct FollowedIncarnation {
    incarnation: u64,
    /// Time of its last row.
    last_ms: u64,
    /// Part of the resume window of its clients that had passed when the node became ready.
    passed_ms: u64,
}

/// A query of a shard.
pub(super) struct BacklogRequest {
    pub(super) channel: Arc<Channel>,
    pub(super) policy: ChannelPolicy,
    pub(super) question: BacklogQuery,
    pub(super) reply: BacklogResponder,
}

pub(super) enum BacklogQuery {
    /// Messages after this stamp, up to the sequence `until_sequence` of this incarnation, after which deliveries reach the client. Of the
    /// stamp's incarnation, no message that is `back_ms` older than that incarnation's end, or than now.
    After { after: Stamp, until_sequence: u64, back_ms: Option<u64> },
    /// The last messages up to the sequence `until_sequence` of this incarnation.
    Rewind { rewind: Rewind, until_sequence: u64 },
    /// Messages after this position in a channel of several nodes. `attach_position` is the channel position from which deliveries reach
    /// the client. `back_ms` is the greatest age of a message; none if the client had access to all of them before.
    ClusterAfter { position: Serial, attach_position: Serial, back_ms: Option<u64> },
    /// The last messages before the attach in a channel of several nodes.
    ClusterRewind { rewind: Rewind, attach_position: Serial },
    /// No messages: a client with this position is told a continuity loss.
    ContinuityLost { position: Serial },
    /// The next page of a shared store read.
    SharedPage { reading: Box<SharedStoreCursor>, format: Format, without: Option<ConnectionId> },
    /// Messages after a cursor in this format, without those that this connection has published.
    Page { cursor: BacklogCursor, format: Format, without: Option<ConnectionId> },
}

impl BacklogQuery {
    /// True if peers are asked before the store.
    fn asks_peers(&self) -> bool {
        matches!(self, Self::ClusterAfter { .. } | Self::ClusterRewind { .. } | Self::ContinuityLost { .. })
    }
}

/// Recipient of the answer. Dropped without an answer it reports that nothing was found.
pub(super) struct BacklogResponder {
    shard: Arc<ShardHandle>,
    slot: u32,
    generation: u32,
    ticket: u64,
    is_given: bool,
}

pub enum BacklogResponse {
    /// Following messages unknown.
    Nothing,
    Begin {
        cursor: BacklogCursor,
        /// True if a rewind found fewer messages than asked for, and there may be more.
        is_cut: bool,
    },
    Page(BacklogPage),
    /// The replay buffer has the messages after this offset. Unless `is_exact`, the client has some of them already.
    Recent {
        after: LocalOffset,
        is_exact: bool,
    },
    /// The replay buffer's part of a rewind.
    RecentRewind {
        recent: RewindStart,
        is_cut: bool,
        /// True if the store may have more.
        is_stored: bool,
    },
    /// All missed messages up to now, from the replay buffers of peers.
    FromPeers(Vec<ForwardedMessages>),
    /// The shared store has the messages.
    SharedBegin {
        reading: Box<SharedStoreCursor>,
        is_cut: bool,
    },
    /// Next page; the read continues unless `is_end`.
    SharedPage {
        frames: Vec<Bytes>,
        amount: Amount,
        reading: Box<SharedStoreCursor>,
        is_end: bool,
    },
}

impl BacklogResponse {
    /// Memory that the answer holds until the shard takes it.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Page(BacklogPage { frames, .. }) | Self::SharedPage { frames, .. } => {
                frames.iter().map(Bytes::len).sum()
            }
            Self::FromPeers(missed) => missed.iter().map(|one| one.bytes as usize + 512).sum(),
            Self::Nothing
            | Self::Recent { .. }
            | Self::RecentRewind { .. }
            | Self::Begin { .. }
            | Self::SharedBegin { .. } => 0,
        }
    }
}

/// A page of messages after a cursor, in order and without a gap.
pub struct BacklogPage {
    pub(super) frames: Vec<Bytes>,
    pub(super) amount: Amount,
    pub(super) cursor: BacklogCursor,
}

/// Progress of a reader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BacklogCursor {
    /// The reader has all messages up to this stamp.
    pub(super) after: Stamp,
    /// Position in the store after which the next row is read.
    cursor: HistoryPosition,
    order: StampOrder,
}

/// Rule by which the stamps of consecutive rows must follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StampOrder {
    /// Consecutive sequences of one incarnation.
    Strict,
    /// Consecutive sequences in the incarnation `from`. Then all rows of later incarnations, and consecutive sequences of this one from
    /// `until_sequence` on.
    IntoThisIncarnation { from: u64, until_sequence: u64 },
    /// Any order, and consecutive sequences of this incarnation from `until_sequence` on.
    Any { until_sequence: u64 },
}

impl Backlog {
    /// Creates the handle and its reader. Must be called when the node is ready.
    pub fn new(
        publisher: &Publisher,
        accounts: &Arc<Accounts>,
        clock: &Clock,
        earlier: &[PreviousIncarnation],
        limits: &Limits,
    ) -> (Self, BacklogReader) {
        let policy_changes = accounts.policy_changes();
        let earlier = FollowedIncarnation::followed(earlier, accounts.current().history_policies());
        let (keep_ms, window_ms) = (2 * limits.resume_window_ms, limits.resume_window_ms);
        let (ready, ready_ms) = (Instant::now(), clock.expiry_ms());
        let (hub, store) = (Arc::clone(publisher.hub()), Arc::clone(publisher.store()));
        let (publisher, accounts, clock) = (publisher.clone(), Arc::clone(accounts), clock.clone());
        let shared = BacklogContext {
            hub,
            store,
            publisher,
            accounts,
            clock,
            earlier_incarnations: earlier,
            ready,
            ready_ms,
            policy_changes,
            keep_ms,
            window_ms,
        };
        let shared = Arc::new(shared);
        let (sender, requests) = mpsc::channel(QUEUE_MAX);
        (
            Self { shared: Arc::clone(&shared), sender },
            BacklogReader {
                shared,
                requests,
                deferred: VecDeque::new(),
                store_queue: BacklogQueue::default(),
                peer_queue: BacklogQueue::default(),
            },
        )
    }

    /// The stamp after which the store may have the messages missed since this position.
    pub(super) fn follows(&self, position: &Serial, policy: ChannelPolicy) -> Option<Stamp> {
        let stamp =
            |incarnation| position.sequence_of(incarnation).map(|sequence| Stamp { incarnation, sequence });
        let shared = &self.shared;
        let earlier = || {
            let found = shared
                .earlier_incarnations
                .iter()
                .find_map(|followed| Some((followed, stamp(followed.incarnation)?)));
            found.filter(|(followed, _)| shared.follows(followed, shared.keep_ms)).map(|(_, stamp)| stamp)
        };
        policy.history.then(|| stamp(shared.hub.incarnation()))?.or_else(earlier)
    }

    /// Greatest age of messages missed since an unknown position, which a client could have made up. Clients that may read the history gain
    /// nothing by that; others are limited to the resume window.
    pub(super) fn back_ms(&self, history: bool) -> u64 {
        if history { self.shared.keep_ms } else { self.shared.window_ms }
    }

    /// Sends a query. Above the limits it is answered with nothing at once.
    pub(super) fn ask(&self, request: BacklogRequest) {
        // A query that does not fit is dropped here, which answers it.
        self.sender.try_send(request).ok();
    }
}

impl BacklogContext {
    /// True if clients of the earlier incarnation may resume within this time, and this one has stored all that they may have missed of it.
    fn follows(&self, earlier: &FollowedIncarnation, within_ms: u64) -> bool {
        let is_soon = self.ready.elapsed() + Duration::from_millis(earlier.passed_ms)
            <= Duration::from_millis(within_ms);
        is_soon && self.publisher.stores_all() && self.accounts.policy_changes() == self.policy_changes
    }

    fn earlier_incarnation(&self, incarnation: u64) -> Option<&FollowedIncarnation> {
        self.earlier_incarnations.iter().find(|followed| followed.incarnation == incarnation)
    }

    /// Number of incarnations that have begun since, this one included.
    fn incarnations_since(&self, incarnation: u64) -> Option<usize> {
        if incarnation == self.hub.incarnation() {
            return Some(0);
        }
        self.earlier_incarnations
            .iter()
            .position(|followed| followed.incarnation == incarnation)
            .map(|index| index + 1)
    }

    fn own(&self, sequence: u64) -> Stamp {
        Stamp { incarnation: self.hub.incarnation(), sequence }
    }

    async fn answer(self: Arc<Self>, request: BacklogRequest) {
        let BacklogRequest { channel, policy, question, reply } = request;
        let oldest_ms = policy.oldest_ms(self.clock.expiry_ms());
        let wait = if question.asks_peers() { PEER_QUERY_WAIT } else { ANSWER_WAIT };
        let rows = ChannelBacklog { shared: &self, channel: &channel, oldest_ms };
        let rewind = match &question {
            BacklogQuery::ClusterRewind { rewind, .. } => Some(*rewind),
            _ => None,
        };
        let found = async {
            match question {
                BacklogQuery::After { after, until_sequence, back_ms } => {
                    rows.find_after(after, until_sequence, back_ms).await
                }
                BacklogQuery::Rewind { rewind, until_sequence } => {
                    rows.find_back(rewind, until_sequence).await
                }
                BacklogQuery::Page { cursor, format, without } => rows.page(cursor, format, without).await,
                BacklogQuery::ClusterAfter { position, attach_position, back_ms } => {
                    rows.find_in_cluster(position, attach_position, back_ms, policy.history).await
                }
                BacklogQuery::ClusterRewind { rewind, attach_position } => {
                    Some(rows.rewind_in_cluster(rewind, attach_position, policy).await)
                }
                BacklogQuery::SharedPage { reading, format, without } => {
                    let position = reading.position.clone();
                    let found = rows.next_shared_page(reading, format, without).await;
                    if found.is_none() {
                        rows.record_loss_position(&position).await;
                    }
                    found
                }
                BacklogQuery::ContinuityLost { position } => {
                    rows.record_loss_position(&position).await;
                    None
                }
            }
        };
        let found = tokio::time::timeout(wait, found).await.unwrap_or(None);
        // Peers are not needed for the recent messages of this node.
        let here = || rewind.map(|rewind| rows.rewind_local(rewind, rows.is_stored_by_all(policy)));
        reply.give(found.or_else(here).unwrap_or(BacklogResponse::Nothing));
    }
}

impl FollowedIncarnation {
    /// Selects the incarnations that can be followed, latest first. All of them must have had the present history policies to their end,
    /// since other channels were stored in part only. Those in between must have stored every message, since their sequences do not show
    /// gaps.
    fn followed(previous: &[PreviousIncarnation], policies: u64) -> Vec<Self> {
        let mut followed = Vec::new();
        for (one, passed_ms) in PreviousIncarnation::with_passed_ms(previous) {
            if one.coverage.policies != policies {
                break;
            }
            followed.push(Self { incarnation: one.incarnation, last_ms: one.last_ms, passed_ms });
            if !one.coverage.is_complete {
                break;
            }
        }
        followed
    }
}

/// The stored messages of one channel.
struct ChannelBacklog<'a> {
    shared: &'a BacklogContext,
    channel: &'a Arc<Channel>,
    oldest_ms: u64,
}

/// Background task that answers queries.
pub struct BacklogReader {
    shared: Arc<BacklogContext>,
    requests: mpsc::Receiver<BacklogRequest>,
    /// Queries deferred until the liveness of unreachable nodes is known, or until the given time.
    deferred: VecDeque<(Instant, BacklogRequest)>,
    store_queue: BacklogQueue,
    peer_queue: BacklogQueue,
}

impl BacklogReader {
    /// Answers queries until all handles are dropped.
    pub async fn run(mut self) {
        let (mut under_way, mut peer_tasks) = (JoinSet::new(), JoinSet::new());
        loop {
            self.release_deferred();
            let Self { shared, store_queue: waiting, peer_queue: others, .. } = &mut self;
            for (tasks, turns, max) in
                [(&mut under_way, waiting, UNDER_WAY_MAX), (&mut peer_tasks, others, PEER_QUERIES_MAX)]
            {
                while tasks.len() < max
                    && let Some(request) = turns.next()
                {
                    tasks.spawn(Arc::clone(shared).answer(request));
                }
            }
            tokio::select! {
                request = self.requests.recv() => match request {
                    Some(request) => self.take(request),
                    None => return,
                },
                () = tokio::time::sleep(PARTITION_LOOK), if !self.deferred.is_empty() => {}
                Some(ended) = under_way.join_next() => report(ended),
                Some(ended) = peer_tasks.join_next() => report(ended),
            }
        }
    }
}

fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(target: RATE_LIMITED, %error, "backfill query task failed");
    }
}

impl BacklogReader {
    /// True if a peer is unreachable and may soon be declared down.
    fn is_partitioned(&self) -> bool {
        self.shared.publisher.routing().is_some_and(|routing| routing.has_recently_unreachable())
    }

    fn take(&mut self, request: BacklogRequest) {
        let asks_peers = request.question.asks_peers();
        if asks_peers && self.deferred.len() < ASKED_MAX && self.is_partitioned() {
            self.deferred.push_back((Instant::now() + PARTITION_WAIT, request));
        } else if asks_peers {
            self.peer_queue.push(request);
        } else {
            self.store_queue.push(request);
        }
    }

    fn release_deferred(&mut self) {
        let is_known = !self.deferred.is_empty() && !self.is_partitioned();
        let now = Instant::now();
        while self.deferred.front().is_some_and(|(until, _)| is_known || *until <= now)
            && let Some((_, request)) = self.deferred.pop_front()
        {
            self.peer_queue.push(request);
        }
    }
}

impl BacklogResponder {
    pub(super) fn new(shard: Arc<ShardHandle>, slot: u32, generation: u32, ticket: u64) -> Self {
        Self { shard, slot, generation, ticket, is_given: false }
    }

    fn give(mut self, found: BacklogResponse) {
        self.push(found);
    }

    fn push(&mut self, found: BacklogResponse) {
        self.is_given = true;
        let Self { slot, generation, ticket, .. } = *self;
        self.shard.push(Input::BacklogResponse { slot, generation, ticket, response: Box::new(found) });
    }
}

impl Drop for BacklogResponder {
    fn drop(&mut self) {
        if !self.is_given {
            self.push(BacklogResponse::Nothing);
        }
    }
}
