//! One thread that owns a part of the connections: it waits, reads, runs sessions and writes, and shares none of it.

mod attach;
mod everywhere;
mod gauges;
mod lifecycle;
mod losing;
mod moving;
mod occupancy;
mod pace;
mod presence;
mod reading;
mod replay;
mod rounds;
mod tenure;
mod writing;

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, ServerFrame};
use fastwebsockets::OpCode;
use gauges::{Backlogged, Metrics};
use mio::{Events, Poll, Token};
use moving::Moving;
use occupancy::{Silent, Watching};
use pace::Pace;
use rounds::Round;

use super::connection::{Connection, Stage};
use super::ring::Ring;
use super::timers::Timers;
use super::{Input, Services, ShardHandle};
use crate::hub::{Subscribers, wire};
use crate::model::Tenure;
use crate::pulse;
use crate::session::{Context, Output, PublishResult};
pub(super) use attach::Attaching;
pub(super) use replay::Replay;
pub(super) use writing::payload_frame;

pub(super) const WAKE: Token = Token(usize::MAX);

/// What one read takes at most.
const READ_BYTES: usize = 64 * 1024;
/// How long one part of a turn may hold up the others.
const SLICE: Duration = Duration::from_millis(1);
/// How often a change of the directory is looked for.
const DIRECTORY_LOOK_MS: u64 = 500;

pub struct Shard {
    index: usize,
    handle: Arc<ShardHandle>,
    poll: Poll,
    services: Services,
    slots: Vec<Option<Box<Connection>>>,
    free: Vec<u32>,
    next_generation: u32,
    subscribers: Subscribers,
    silent: Silent,
    watching: Watching,
    timers: Timers,
    /// Slots with something to read, to flush, or to be given of what was missed; each stands in its list once.
    ready: VecDeque<u32>,
    dirty: VecDeque<u32>,
    replaying: VecDeque<u32>,
    /// Taken from the inbox and not done yet.
    inputs: VecDeque<Input>,
    taken: Vec<Input>,
    /// Walks over all connections that are under way. Bounded by what the HTTP side asks at once, and one review.
    rounds: VecDeque<Round>,
    /// Publishes by their deadline. Bounded by what sessions may have in flight within the wait.
    unanswered: VecDeque<Unanswered>,
    /// Who was let in for a socket that went meanwhile, and when each is looked at. Bounded by who comes until then.
    unseated: VecDeque<(u64, Tenure)>,
    /// Of the questions to the store.
    next_question: u64,
    buffer: Box<[u8]>,
    started: Instant,
    /// Since `started`, read once a turn.
    now_ms: u64,
    epoch_ms: u64,
    stop_ms: Option<u64>,
    moving: Moving,
    backlogged: Backlogged,
    /// Of the directory that every credential here was last held against, or is just being held against.
    generation: u64,
    directory_look_ms: u64,
    heartbeat_json: Bytes,
    heartbeat_msgpack: Bytes,
    pace: Pace,
    /// None: each socket is written to by a call of its own.
    ring: Option<Ring>,
    metrics: Metrics,
}

struct Unanswered {
    deadline_ms: u64,
    slot: u32,
    generation: u32,
    ticket: u64,
}

impl Shard {
    pub fn new(index: usize, handle: Arc<ShardHandle>, poll: Poll, services: Services) -> Self {
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
            silent: Silent::default(),
            watching: Watching::default(),
            timers: Timers::default(),
            ready: VecDeque::new(),
            dirty: VecDeque::new(),
            replaying: VecDeque::new(),
            inputs: VecDeque::new(),
            taken: Vec::new(),
            rounds: VecDeque::new(),
            unanswered: VecDeque::new(),
            unseated: VecDeque::new(),
            next_question: 0,
            buffer: vec![0; READ_BYTES].into_boxed_slice(),
            started: Instant::now(),
            now_ms: 0,
            epoch_ms: services.clock.now_ms(),
            stop_ms: None,
            moving: Moving::default(),
            backlogged: Backlogged::default(),
            generation: services.auth.generation(),
            directory_look_ms: DIRECTORY_LOOK_MS,
            heartbeat_json: heartbeat(Format::Json),
            heartbeat_msgpack: heartbeat(Format::MsgPack),
            pace: Pace::new(Duration::from_millis(services.limits.delivery_window_ms)),
            ring: None,
            metrics: Metrics::new(),
            services,
        }
    }

    /// Serves until it is told to stop and its clients are gone, or have had their time. With `io_uring` many sockets are
    /// written to by one call, where the system has that.
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
                let rest = self.rest(&events, Instant::now());
                if !rest.is_zero() {
                    // Whoever leaves something for it meanwhile need not wake it.
                    self.handle.inbox.woke();
                    self.note_all(&events);
                    std::thread::sleep(rest);
                    polled = self.poll.poll(&mut events, Some(Duration::ZERO));
                }
            }
            self.handle.inbox.woke();
            pulse::pass();
            match polled {
                Ok(()) => {}
                // What came meanwhile is seen before any time is taken for over.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "a shard cannot poll and ends");
                    return;
                }
            }
            self.now_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
            self.epoch_ms = self.services.clock.now_ms();
            self.note_all(&events);
            self.read_turn();
            // After reading, so that what was published here goes out in the same turn.
            self.input_turn();
            self.replay_turn();
            self.flush_turn();
            self.timer_turn();
            self.look_at_backlogged();
            self.rounds_turn();
            self.moving_turn();
            if self.now_ms >= self.directory_look_ms {
                self.directory_look_ms = self.now_ms + DIRECTORY_LOOK_MS;
                self.look_at_directory();
            }
            if !self.has_work() {
                self.pace.written(Instant::now());
            }
        }
        // What time has put out in the last turn.
        self.flush_turn();
    }

    /// How long to let more gather of what has come. A batch of a peer has gathered on its way.
    fn rest(&mut self, events: &Events, now: Instant) -> Duration {
        let rest = self.pace.rest(now);
        let is_batch = || {
            let is_all = self.ready.is_empty() && events.iter().all(|event| event.token() == WAKE);
            is_all && self.handle.holds_forwarded_only()
        };
        let is_served_at_once =
            !rest.is_zero() && is_batch() && self.pace.is_alone(self.services.hub.batches_apart());
        if is_served_at_once { Duration::ZERO } else { rest }
    }

    fn is_done(&self) -> bool {
        // Who has been told all is not waited for.
        let is_over =
            |slot: &Option<Box<Connection>>| slot.as_ref().is_none_or(|connection| connection.has_said_all());
        self.stop_ms.is_some_and(|stop_ms| self.now_ms >= stop_ms || self.slots.iter().all(is_over))
    }

    /// Something was begun that this thread can go on with, apart from reading.
    fn has_work(&self) -> bool {
        let unfinished = [&self.dirty, &self.replaying].into_iter().any(|slots| !slots.is_empty());
        unfinished || !self.inputs.is_empty() || !self.rounds.is_empty()
    }

    /// How long nothing needs this thread.
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
        let moving = self.moving.next_ms(self.now_ms);
        let looks = [look, self.seat_look_ms(), self.backlogged.next_ms()];
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
            Input::Lose(channel, mark) => self.lose_all(channel, &mark),
            Input::Joined { slot, generation, key, attaching } => {
                self.joined(slot, generation, &key, *attaching);
            }
            Input::Answered { slot, generation, ticket, result } => {
                self.answered(slot, generation, ticket, result)
            }
            Input::Found { slot, generation, ticket, found } => self.found(slot, generation, ticket, *found),
            Input::TakenUp { slot, generation } => self.taken_up(slot, generation),
            Input::NotOpen { slot, generation } => self.keep_if_seated(slot, generation),
            Input::Accept(link, permit) => self.accept(link, permit),
            Input::Adopt { link, permit, read, opening } => self.adopt(link, permit, read, *opening),
            Input::AdoptRefused { link, permit, format, refused } => {
                self.adopt_refused(link, permit, format, refused);
            }
            Input::Survey(survey) => self.begin_survey(*survey),
            Input::CountAttached { keys, reply } => self.count_attached(&keys, reply),
            Input::TellOccupancy(told) => self.tell_occupancy(told),
            Input::AskToLeave { count, within } => self.begin_moving(count, within),
            Input::Stop { within } => self.stop(within),
        }
    }

    /// Whether the slot has the connection that something was begun for.
    fn is_still(&self, slot: u32, generation: u32) -> bool {
        let connection = self.slots.get(slot as usize).and_then(Option::as_deref);
        connection.is_some_and(|connection| connection.generation == generation)
    }

    fn answered(&mut self, slot: u32, generation: u32, ticket: u64, result: PublishResult) {
        if !self.is_still(slot, generation) {
            return;
        }
        self.with_session(slot, |session, cx, out| session.answered(cx, ticket, result, out));
    }

    /// Runs one step of a session and does what it puts out.
    fn with_session(
        &mut self,
        slot: u32,
        step: impl FnOnce(&mut crate::session::Session, Context<'_>, &mut Vec<Output>),
    ) {
        let Some(mut connection) = self.slots[slot as usize].take() else { return };
        if let Stage::Open(open) = &mut connection.stage {
            let mut outputs = Vec::new();
            step(&mut open.session, context(&self.services, self.epoch_ms), &mut outputs);
            self.run_outputs(&mut connection, slot, outputs);
            self.unpause(&mut connection, slot);
        }
        self.slots[slot as usize] = Some(connection);
    }

    fn run_outputs(&mut self, connection: &mut Connection, slot: u32, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Frame(payload) => self.send_payload(connection, slot, &payload),
                Output::Pong(payload) => {
                    self.send(connection, slot, wire::frame(OpCode::Pong, &payload));
                }
                Output::Publish { ticket, request, queued } => {
                    let answer = self.owe_answer(connection, slot, ticket);
                    self.services.publisher.publish(*request, queued, answer);
                }
                Output::Present { ticket, request } => self.present(connection, slot, ticket, *request),
                Output::Leave(leaving) => self.leave_presence(connection, leaving),
                Output::NoteRefused(refused) => self.services.auth.note(&refused, connection.address()),
                Output::Attach { delivers, begin, reply } => {
                    self.attach(connection, slot, Attaching { reply, delivers, begin });
                }
                Output::Detach { channel } => {
                    self.unsubscribe(connection, slot, &channel);
                    self.note_attachment(connection, slot, &channel);
                    self.watch_occupancy(connection, slot, &channel);
                }
                Output::Recount { channel } => {
                    self.recount(connection, slot, &channel);
                    self.watch_occupancy(connection, slot, &channel);
                }
                Output::End { code, after_ms } => self.end(connection, slot, code, after_ms),
            }
        }
    }

    /// What brings the outcome back to the connection, whose client is told at the latest after the wait for an answer.
    fn owe_answer<T, E>(
        &mut self,
        connection: &Connection,
        slot: u32,
        ticket: u64,
    ) -> Box<dyn FnOnce(Result<T, E>) + Send>
    where
        PublishResult: From<Result<T, E>>,
    {
        let generation = connection.generation;
        let deadline_ms = self.now_ms + self.services.limits.store_wait_ms;
        self.unanswered.push_back(Unanswered { deadline_ms, slot, generation, ticket });
        let handle = Arc::clone(&self.handle);
        Box::new(move |result| {
            handle.push(Input::Answered { slot, generation, ticket, result: result.into() });
        })
    }
}

/// What sessions decide with.
fn context(services: &Services, epoch_ms: u64) -> Context<'_> {
    let Services { limits, auth, node_id, hub, .. } = services;
    let (keys, is_clustered) = (services.identities.keys(), hub.is_clustered());
    Context { limits, auth, keys, node_id, is_clustered, now_ms: epoch_ms }
}

#[cfg(test)]
mod tests {
    use super::super::tests::Node;
    use super::*;
    use crate::hub::Delivery;
    use crate::model::{AccountId, ChannelKey, ChannelName, ConnectionId, Forwarded, ForwardedParts};

    /// As if a peer's batch had brought it.
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
        Input::Deliver(Arc::new(Delivery::refilled(Forwarded::new(key, parts))))
    }

    /// How long it rests right after a busy turn, when these wait and the poll has an event of that token.
    fn rest(shard: &mut Shard, waiting: Vec<Input>, token: Token) -> Duration {
        let mut poll = Poll::new().expect("a poll");
        let mut events = Events::with_capacity(4);
        let waker = mio::Waker::new(poll.registry(), token).expect("a waker");
        waker.wake().expect("it is open");
        poll.poll(&mut events, Some(Duration::ZERO)).expect("polled");
        waiting.into_iter().for_each(|input| shard.handle.push(input));
        let now = Instant::now();
        shard.pace.handed(1_000);
        shard.pace.written(now);
        let rest = shard.rest(&events, now);
        shard.handle.inbox.take(&mut shard.taken);
        shard.taken.clear();
        rest
    }

    #[test]
    fn shard_serves_lone_peer_batch_without_delivery_window() {
        let (_node, mut shards) = Node::at_rest();
        let shard = &mut shards[0];
        let window = Duration::from_millis(shard.services.limits.delivery_window_ms);
        let other = || Input::NotOpen { slot: 0, generation: 0 };
        assert_eq!(rest(shard, vec![brought(), brought()], WAKE), Duration::ZERO);
        assert_eq!(rest(shard, vec![brought(), other()], WAKE), window, "something else waits");
        assert_eq!(rest(shard, Vec::new(), WAKE), window, "nothing of a peer waits");
        assert_eq!(rest(shard, vec![brought()], Token(0)), window, "a socket has something");
        shard.ready.push_back(0);
        assert_eq!(rest(shard, vec![brought()], WAKE), window, "a socket had something");
        shard.ready.clear();
        assert_eq!(rest(shard, vec![brought()], WAKE), Duration::ZERO);
        // Long ones count as if they came at once.
        (0..40).for_each(|_| shard.services.hub.batch_came(usize::MAX));
        assert_eq!(rest(shard, vec![brought()], WAKE), window, "more comes meanwhile");
    }
}
