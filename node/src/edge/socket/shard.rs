//! Shard: one thread that owns a part of the connections. It waits, reads, runs sessions and writes, and shares no connection.

mod attach;
mod cluster_backfill;
mod coalescing;
mod connection_scan;
mod continuity_loss;
mod gauges;
mod lifecycle;
mod occupancy;
mod presence;
mod reading;
mod rebalancing;
mod replay;
mod takeover;
mod writing;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use coalescing::CoalescingPolicy;
use connection_scan::ConnectionScan;
use fanfare_proto::frame::{self, Format, ServerFrame};
use fastwebsockets::OpCode;
use gauges::{BlockedScan, ShardMetrics};
use mio::{Events, Poll, Token};
use occupancy::{OccupancyWatchers, SilentAttachments};
use rebalancing::Rebalancing;

use super::connection::{ConnectionStage, SocketConnection};
use super::ring::IoUringWriter;
use super::timers::Timers;
use super::{Input, ShardHandle, ShardServices};
use crate::hub::{Subscribers, wire};
use crate::model::SessionOwnership;
use crate::session::{Context, Output, PublishResult};
use crate::stall_detector;
pub(super) use attach::PendingAttach;
pub(super) use replay::Replay;
pub(super) use writing::payload_frame;

pub(super) const WAKE: Token = Token(usize::MAX);

/// Largest single read.
const READ_BYTES: usize = 64 * 1024;
/// Time that one part of a turn may take before the others get theirs.
const SLICE: Duration = Duration::from_millis(1);
/// Interval of the check for a changed directory.
const DIRECTORY_LOOK_MS: u64 = 500;

pub struct Shard {
    index: usize,
    handle: Arc<ShardHandle>,
    poll: Poll,
    services: ShardServices,
    slots: Vec<Option<Box<SocketConnection>>>,
    free: Vec<u32>,
    next_generation: u32,
    subscribers: Subscribers,
    silent: SilentAttachments,
    watching: OccupancyWatchers,
    timers: Timers,
    /// Slots to read, to flush, and to replay to. Each slot is at most once in each list.
    ready: VecDeque<u32>,
    dirty: VecDeque<u32>,
    replaying: VecDeque<u32>,
    /// Inputs taken from the inbox and not handled yet.
    inputs: VecDeque<Input>,
    taken: Vec<Input>,
    /// Connection scans under way. Bounded by the concurrent scans of the HTTP side, and one review.
    scans: VecDeque<ConnectionScan>,
    /// Unanswered publishes by deadline. Bounded by the publishes that sessions may have in flight within the wait.
    unanswered: VecDeque<PendingAnswer>,
    /// Sessions that were admitted in place of a socket that has ended meanwhile, and when each is checked for a quota slot. Bounded by the
    /// connections that arrive until then.
    quota_slot_checks: VecDeque<(u64, SessionOwnership)>,
    /// Ticket of the next backlog query.
    next_question: u64,
    buffer: Box<[u8]>,
    started: Instant,
    /// Milliseconds since `started`, read once a turn.
    now_ms: u64,
    epoch_ms: u64,
    stop_ms: Option<u64>,
    rebalancing: Rebalancing,
    blocked_scan: BlockedScan,
    /// Generation of the directory against which the credentials here were last reviewed, or are being reviewed.
    generation: u64,
    directory_look_ms: u64,
    heartbeat_json: Bytes,
    heartbeat_msgpack: Bytes,
    coalescing: CoalescingPolicy,
    /// None: each socket is written to by its own system call.
    ring: Option<IoUringWriter>,
    metrics: ShardMetrics,
}

struct PendingAnswer {
    deadline_ms: u64,
    slot: u32,
    generation: u32,
    ticket: u64,
}

impl Shard {
    pub fn new(index: usize, handle: Arc<ShardHandle>, poll: Poll, services: ShardServices) -> Self {
        let heartbeat = |format| {
            super::shard::writing::payload_frame(
                format,
                &frame::encode(&ServerFrame::Heartbeat { id: None }, format),
            )
        };
        Self {
            index,
            handle,
            poll,
            slots: Vec::new(),
            free: Vec::new(),
            next_generation: 0,
            subscribers: Subscribers::default(),
            silent: SilentAttachments::default(),
            watching: OccupancyWatchers::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            dirty: VecDeque::new(),
            replaying: VecDeque::new(),
            inputs: VecDeque::new(),
            taken: Vec::new(),
            scans: VecDeque::new(),
            unanswered: VecDeque::new(),
            quota_slot_checks: VecDeque::new(),
            next_question: 0,
            buffer: vec![0; READ_BYTES].into_boxed_slice(),
            started: Instant::now(),
            now_ms: 0,
            epoch_ms: services.clock.now_ms(),
            stop_ms: None,
            rebalancing: Rebalancing::default(),
            blocked_scan: BlockedScan::default(),
            generation: services.auth.generation(),
            directory_look_ms: DIRECTORY_LOOK_MS,
            heartbeat_json: heartbeat(Format::Json),
            heartbeat_msgpack: heartbeat(Format::MsgPack),
            coalescing: CoalescingPolicy::new(Duration::from_millis(services.limits.delivery_window_ms)),
            ring: None,
            metrics: ShardMetrics::new(),
            services,
        }
    }

    /// Serves until told to stop and all clients have gone or their time is over. With `io_uring` many sockets are written to by one call,
    /// if the system can.
    pub fn run(mut self, io_uring: bool) {
        if io_uring {
            self.open_ring();
        }
        self.serve();
        self.close_ring();
    }

    fn serve(&mut self) {
        let mut events = Events::with_capacity(1024);
        while !self.is_done() {
            let timeout = self.timeout();
            let mut polled = self.poll.poll(&mut events, timeout);
            if polled.is_ok() && !self.has_work() {
                let rest = self.coalescing_delay(&events, Instant::now());
                if !rest.is_zero() {
                    // Other threads need not wake this one while it runs.
                    self.handle.inbox.woke();
                    self.note_all(&events);
                    std::thread::sleep(rest);
                    polled = self.poll.poll(&mut events, Some(Duration::ZERO));
                }
            }
            self.handle.inbox.woke();
            stall_detector::halt_if_stalled();
            match polled {
                Ok(()) => {}
                // Pending events are read before any timer expires.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "shard poll failed: shard ends");
                    return;
                }
            }
            self.now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.epoch_ms = self.services.clock.now_ms();
            self.note_all(&events);
            self.read_turn();
            // After reading, so that messages published here go out in the same turn.
            self.input_turn();
            self.replay_turn();
            self.flush_turn();
            self.timer_turn();
            self.start_blocked_scan();
            self.scan_turn();
            self.rebalancing_turn();
            if self.now_ms >= self.directory_look_ms {
                self.directory_look_ms = self.now_ms + DIRECTORY_LOOK_MS;
                self.look_at_directory();
            }
            if !self.has_work() {
                self.coalescing.written(Instant::now());
            }
        }
        // Frames that timers of the last turn have queued.
        self.flush_turn();
    }

    /// Time to wait for more input to coalesce. A batch from a peer has been coalesced already.
    fn coalescing_delay(&mut self, events: &Events, now: Instant) -> Duration {
        let rest = self.coalescing.delay(now);
        let is_batch = || {
            let is_all = self.ready.is_empty() && events.iter().all(|event| event.token() == WAKE);
            is_all && self.handle.holds_forwarded_only()
        };
        let is_served_at_once = !rest.is_zero()
            && is_batch()
            && self.coalescing.is_alone(self.services.hub.peer_batch_interval());
        if is_served_at_once { Duration::ZERO } else { rest }
    }

    fn is_done(&self) -> bool {
        // A connection whose last frames are sent is not waited for.
        let is_closed = |slot: &Option<Box<SocketConnection>>| {
            slot.as_ref().is_none_or(|connection| connection.has_sent_all())
        };
        self.stop_ms.is_some_and(|stop_ms| self.now_ms >= stop_ms || self.slots.iter().all(is_closed))
    }

    /// True if there is work that this thread can continue, apart from reading.
    fn has_work(&self) -> bool {
        let unfinished = [&self.dirty, &self.replaying].into_iter().any(|slots| !slots.is_empty());
        unfinished || !self.inputs.is_empty() || !self.scans.is_empty()
    }

    /// Time until this thread has work.
    fn timeout(&self) -> Option<Duration> {
        if self.has_work() {
            return Some(Duration::ZERO);
        }
        if !self.ready.is_empty() {
            let congested = self.services.hub.congested();
            return Some(if congested { Duration::from_millis(1) } else { Duration::ZERO });
        }
        if !self.handle.inbox.may_sleep() {
            return Some(Duration::ZERO);
        }
        let unanswered = self.unanswered.front().map(|unanswered| unanswered.deadline_ms);
        let look = Some(self.directory_look_ms).filter(|_| self.slots.len() > self.free.len());
        let moving = self.rebalancing.next_ms(self.now_ms);
        let looks = [look, self.quota_check_ms(), self.blocked_scan.next_ms()];
        let due_ms = [self.timers.next_ms(), unanswered, self.stop_ms, moving];
        let due_ms = due_ms.into_iter().chain(looks).flatten().min()?;
        let now = self.started.elapsed();
        Some((Duration::from_millis(due_ms) + Duration::from_micros(500)).saturating_sub(now))
    }

    fn note_all(&mut self, events: &Events) {
        for event in events {
            if event.token() != WAKE {
                self.note(event);
            }
        }
    }

    fn note(&mut self, event: &mio::event::Event) {
        let slot = u32::try_from(event.token().0).unwrap_or(u32::MAX);
        let Some(Some(connection)) = self.slots.get_mut(slot as usize) else { return };
        if event.is_readable() || event.is_read_closed() || event.is_error() {
            connection.readable = true;
            connection.read_closed |= event.is_read_closed() || event.is_error();
            if !connection.in_ready {
                connection.in_ready = true;
                self.ready.push_back(slot);
            }
        }
        let waits = connection.blocked_ms.is_some() || connection.link.wants_write();
        if event.is_writable() && waits && !connection.in_dirty {
            connection.in_dirty = true;
            self.dirty.push_back(slot);
        }
    }

    fn input_turn(&mut self) {
        if self.inputs.is_empty() {
            self.handle.inbox.take(&mut self.taken);
            self.inputs.extend(self.taken.drain(..));
        }
        let until = Instant::now() + SLICE;
        while let Some(input) = self.inputs.pop_front() {
            self.input(input);
            if Instant::now() >= until {
                break;
            }
        }
    }

    fn input(&mut self, input: Input) {
        match input {
            Input::Deliver(delivery) => self.deliver(&delivery),
            Input::DeliverPresence(delivery) => self.deliver_presence(&delivery),
            Input::ContinuityLost(channel, position) => self.signal_loss_to_all(channel, &position),
            Input::AttachReady { slot, generation, key, attaching } => {
                self.continue_attach(slot, generation, &key, *attaching);
            }
            Input::Answered { slot, generation, ticket, result } => {
                self.answered(slot, generation, ticket, result)
            }
            Input::BacklogResponse { slot, generation, ticket, response: found } => {
                self.handle_backlog_response(slot, generation, ticket, *found)
            }
            Input::TakenOver { slot, generation } => self.end_for_takeover(slot, generation),
            Input::TakeoverMiss { slot, generation } => self.close_if_over_quota(slot, generation),
            Input::Accept(link, permit) => self.accept(link, permit),
            Input::Adopt { link, permit, read, opening } => self.adopt(link, permit, read, *opening),
            Input::AdoptRefused { link, permit, format, refused } => {
                self.adopt_refused(link, permit, format, refused);
            }
            Input::AccountQuery(query) => self.begin_account_query(*query),
            Input::CountAttached { keys, reply } => self.count_attached(&keys, reply),
            Input::SendOccupancy(notice) => self.send_occupancy(notice),
            Input::AskToReconnect { count, within } => self.begin_rebalancing(count, within),
            Input::Stop { within } => self.stop(within),
        }
    }

    /// True if the slot still has the connection with this generation.
    fn is_current(&self, slot: u32, generation: u32) -> bool {
        let connection = self.slots.get(slot as usize).and_then(Option::as_deref);
        connection.is_some_and(|connection| connection.generation == generation)
    }

    fn answered(&mut self, slot: u32, generation: u32, ticket: u64, result: PublishResult) {
        if !self.is_current(slot, generation) {
            return;
        }
        self.with_session(slot, |session, cx, out| session.answered(cx, ticket, result, out));
    }

    /// Runs one step of a session and handles its outputs.
    fn with_session(
        &mut self,
        slot: u32,
        step: impl FnOnce(&mut crate::session::Session, Context<'_>, &mut Vec<Output>),
    ) {
        let Some(mut connection) = self.slots[slot as usize].take() else { return };
        if let ConnectionStage::Open(open) = &mut connection.stage {
            let mut outputs = Vec::new();
            step(&mut open.session, context(&self.services, self.epoch_ms), &mut outputs);
            self.run_outputs(&mut connection, slot, outputs);
            self.unpause(&mut connection, slot);
        }
        self.slots[slot as usize] = Some(connection);
    }

    fn run_outputs(&mut self, connection: &mut SocketConnection, slot: u32, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Frame(payload) => self.send_payload(connection, slot, &payload),
                Output::Pong(payload) => {
                    self.send(connection, slot, wire::frame(OpCode::Pong, &payload));
                }
                Output::Publish { ticket, request, queued } => {
                    let answer = self.answer_callback(connection, slot, ticket);
                    self.services.publisher.publish(*request, queued, answer);
                }
                Output::Present { ticket, request } => self.present(connection, slot, ticket, *request),
                Output::Leave(leaving) => self.leave_presence(connection, leaving),
                Output::NoteRefused(refused) => self.services.auth.note(&refused, connection.address()),
                Output::Attach { delivers, begin, reply } => {
                    self.attach(connection, slot, PendingAttach { reply, delivers, begin });
                }
                Output::Detach { channel } => {
                    self.unsubscribe(connection, slot, &channel);
                    self.note_attachment(connection, slot, &channel);
                    self.watch_occupancy(connection, slot, &channel);
                }
                Output::Recount { channel } => {
                    self.refresh_publishes(connection, slot, &channel);
                    self.watch_occupancy(connection, slot, &channel);
                }
                Output::End { code, after_ms } => self.end(connection, slot, code, after_ms),
            }
        }
    }

    /// Callback that brings an outcome back to the connection. Without an outcome the client is answered when the wait is over.
    fn answer_callback<T, E>(
        &mut self,
        connection: &SocketConnection,
        slot: u32,
        ticket: u64,
    ) -> Box<dyn FnOnce(Result<T, E>) + Send>
    where
        PublishResult: From<Result<T, E>>,
    {
        let generation = connection.generation;
        let deadline_ms = self.now_ms + self.services.limits.store_wait_ms;
        self.unanswered.push_back(PendingAnswer { deadline_ms, slot, generation, ticket });
        let handle = Arc::clone(&self.handle);
        Box::new(move |result| {
            handle.push(Input::Answered { slot, generation, ticket, result: result.into() });
        })
    }
}

/// Context that sessions need for decisions.
fn context(services: &ShardServices, epoch_ms: u64) -> Context<'_> {
    let ShardServices { limits, auth, node_id, hub, .. } = services;
    let (keys, is_clustered) = (services.session_registry.keys(), hub.is_clustered());
    Context { limits, auth, keys, node_id, is_clustered, now_ms: epoch_ms }
}

#[cfg(test)]
mod tests {
    use super::super::tests::SocketTestNode;
    use super::*;
    use crate::hub::MessageDelivery;
    use crate::model::{AccountId, ChannelKey, ChannelName, ConnectionId, ForwardedMessages, ForwardedParts};

    /// A delivery as from a peer's batch.
    fn brought() -> Input {
        let key = ChannelKey::new(AccountId::new("acme"), ChannelName::of("room"));
        let parts = ForwardedParts {
            incarnation: 77,
            first: 1,
            last: 1,
            timestamp_ms: 1,
            connection_id: ConnectionId::from_bytes([2; 16]),
            client_id: None,
            messages: vec![Bytes::from_static(b"{}")],
            bytes: 2,
        };
        Input::Deliver(Arc::new(MessageDelivery::backfilled(ForwardedMessages::new(key, parts))))
    }

    /// Coalescing delay right after a busy turn, with these inputs waiting and an event of that token in the poll.
    fn coalescing_delay(shard: &mut Shard, waiting: Vec<Input>, token: Token) -> Duration {
        let mut poll = Poll::new().expect("a poll");
        let mut events = Events::with_capacity(4);
        let waker = mio::Waker::new(poll.registry(), token).expect("a waker");
        waker.wake().expect("it is open");
        poll.poll(&mut events, Some(Duration::ZERO)).expect("polled");
        waiting.into_iter().for_each(|input| shard.handle.push(input));
        let now = Instant::now();
        shard.coalescing.handed(1_000);
        shard.coalescing.written(now);
        let rest = shard.coalescing_delay(&events, now);
        shard.handle.inbox.take(&mut shard.taken);
        shard.taken.clear();
        rest
    }

    #[test]
    fn shard_serves_lone_peer_batch_without_delivery_window() {
        let (_node, mut shards) = SocketTestNode::at_rest();
        let shard = &mut shards[0];
        let window = Duration::from_millis(shard.services.limits.delivery_window_ms);
        let other = || Input::TakeoverMiss { slot: 0, generation: 0 };
        assert_eq!(coalescing_delay(shard, vec![brought(), brought()], WAKE), Duration::ZERO);
        assert_eq!(coalescing_delay(shard, vec![brought(), other()], WAKE), window, "something else waits");
        assert_eq!(coalescing_delay(shard, Vec::new(), WAKE), window, "nothing of a peer waits");
        assert_eq!(coalescing_delay(shard, vec![brought()], Token(0)), window, "a socket has something");
        shard.ready.push_back(0);
        assert_eq!(coalescing_delay(shard, vec![brought()], WAKE), window, "a socket had something");
        shard.ready.clear();
        assert_eq!(coalescing_delay(shard, vec![brought()], WAKE), Duration::ZERO);
        // Long batches count as if they came at once.
        (0..40).for_each(|_| shard.services.hub.record_peer_batch(usize::MAX));
        assert_eq!(coalescing_delay(shard, vec![brought()], WAKE), window, "more comes meanwhile");
    }
}
