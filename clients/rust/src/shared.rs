//! The state that the handles and the driver of a client share, and that outlives a single connection:
//! requests without an answer, channels and members.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::frame::{self, Body, Draft, Format, Incoming, Request, code, op};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::dial::DialledConnection;
use crate::session_state::SessionState;
use crate::writer::Outgoing;
use crate::{Error, Options, seen};

pub(crate) type Answer = oneshot::Receiver<Result<Incoming, Error>>;

/// Time after its first sending in which a publish is repeated; the node recognises repetitions only a little
/// longer.
const REPEAT_MAX: Duration = Duration::from_millis(seen::WINDOW_MS - 10_000);
/// Memory of an open request beside its frame.
const REQUEST_BYTES: usize = 256;

pub(crate) struct Shared {
    format: Format,
    /// Whether requests outlive the connection on which they were sent.
    keeps: bool,
    next_id: AtomicU64,
    /// Random beginning of the message ids that this client makes.
    id_prefix: String,
    /// Bytes that further requests may take. A request waits for its bytes.
    budget: Arc<Semaphore>,
    budget_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    over: bool,
    closing: bool,
    link: Option<mpsc::Sender<Outgoing>>,
    pending: HashMap<u64, PendingRequest>,
    session: SessionState,
    /// Token that the node accepted since the last [`Shared::take_token`].
    token: Option<String>,
}

/// A request without an answer.
struct PendingRequest {
    /// Request itself, if it may have to be sent again.
    body: Option<Body>,
    /// Time of the first sending.
    sent_at: Option<Instant>,
    is_repeated: bool,
    /// Receiver of the answer; `None` for a request of the library itself.
    answer: Option<oneshot::Sender<Result<Incoming, Error>>>,
    _permit: Option<OwnedSemaphorePermit>,
}

/// The owner of a frame.
pub(crate) enum FrameOwner {
    /// Caller whose request the frame answers, and who has it now.
    Caller,
    /// Library itself, with its request and the answer.
    Library(Body, Incoming),
    /// No request: the frame is an event.
    Unsolicited(Incoming),
}

impl Shared {
    pub(crate) fn new(options: &Options) -> Result<Self, Error> {
        let mut random = [0; 12];
        getrandom::fill(&mut random).map_err(|error| Error::BadValue(format!("no random bytes: {error}")))?;
        let budget_bytes = options.unanswered_bytes_max.clamp(1, u32::MAX as usize >> 1);
        Ok(Self {
            format: options.format,
            keeps: options.reconnect.is_some(),
            next_id: AtomicU64::new(1),
            id_prefix: URL_SAFE_NO_PAD.encode(random),
            budget: Arc::new(Semaphore::new(budget_bytes)),
            budget_bytes,
            state: Mutex::default(),
        })
    }

    /// Sends a request of a caller. Without a connection it is sent on the next one.
    pub(crate) async fn start(&self, body: Body) -> Result<Answer, Error> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (frame, body) = self.encode(id, body);
        let bytes = (frame.len() + REQUEST_BYTES).min(self.budget_bytes);
        let bytes = u32::try_from(bytes).expect("the room is no larger");
        let permit = Arc::clone(&self.budget).acquire_many_owned(bytes).await.map_err(|_| Error::Closed)?;
        let (sender, answer) = oneshot::channel();
        let open = PendingRequest {
            body: self.keeps.then_some(body),
            sent_at: None,
            is_repeated: false,
            answer: Some(sender),
            _permit: Some(permit),
        };
        self.send(id, frame, open).await?;
        Ok(answer)
    }

    /// Sends a request of the library itself, if it is still wanted and there is a connection.
    pub(crate) async fn start_own(&self, body: Body) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let is_needed = matches!(body, Body::Auth { .. }) || self.lock().session.still_needs(&body);
        if is_needed && self.lock().link.is_some() {
            let (frame, body) = self.encode(id, body);
            let _ = self.send(id, frame, own(body)).await;
        }
    }

    /// Puts a request into the table and into the connection's queue under one lock, so that it is never in
    /// one of them alone.
    async fn send(&self, id: u64, frame: Vec<u8>, mut open: PendingRequest) -> Result<(), Error> {
        loop {
            let link = self.lock().link.clone();
            let slot = match &link {
                Some(link) => link.reserve().await.ok(),
                None => None,
            };
            let mut state = self.lock();
            if state.over {
                return Err(Error::Closed);
            }
            match (&link, &state.link) {
                (Some(then), Some(now)) if then.same_channel(now) => {}
                (None, None) if self.keeps => {}
                (None, None) => return Err(Error::Closed),
                _ => continue,
            }
            if slot.is_none() {
                if !self.keeps {
                    return Err(Error::Closed);
                }
                // The connection's queue is closed. The driver notices it.
                state.link = None;
            }
            open.sent_at = slot.is_some().then(Instant::now);
            if let Some(body) = &open.body {
                state.session.request_sent(body);
            }
            state.pending.insert(id, open);
            if let Some(slot) = slot {
                slot.send(Outgoing::Request(frame));
            }
            return Ok(());
        }
    }

    fn encode(&self, id: u64, body: Body) -> (Vec<u8>, Body) {
        let request = Request { id: Some(id.to_string()), body };
        (frame::encode_request(&request, self.format), request.body)
    }

    /// Gives an id to each message without one, if messages may have to be sent again.
    pub(crate) fn name(&self, messages: &mut [Draft]) {
        if !self.keeps {
            return;
        }
        for message in messages.iter_mut().filter(|message| message.id.is_none()) {
            let number = self.next_id.fetch_add(1, Ordering::Relaxed);
            message.id = Some(format!("{}:{number}", self.id_prefix).into());
        }
    }

    /// Notes a new connection, and gives the frames that must be sent on it first.
    pub(crate) fn linked(&self, dialled: &DialledConnection) -> Vec<Outgoing> {
        let mut state = self.lock();
        let state = &mut *state;
        state.session.connected(dialled.connected.client_id.as_deref());
        state.link = Some(dialled.outgoing.clone());
        let now = Instant::now();
        let too_late = |open: &PendingRequest| {
            matches!(open.body, Some(Body::Message { .. }))
                && open.sent_at.is_some_and(|at| now.duration_since(at) > REPEAT_MAX)
        };
        for (_, open) in state.pending.extract_if(|_, open| too_late(open)) {
            reply(open, Err(Error::Unknown("the connection was lost for too long".into())));
        }
        let bodies = state.pending.values().filter_map(|open| open.body.as_ref());
        let mut frames = Vec::new();
        for body in state.session.requests(bodies) {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let (frame, body) = self.encode(id, body);
            state.pending.insert(id, own(body));
            frames.push((0, frame));
        }
        for (id, open) in state.pending.iter_mut().filter(|(_, open)| open.answer.is_some()) {
            let Some(body) = open.body.take() else { continue };
            let (frame, body) = self.encode(*id, body);
            open.body = Some(body);
            open.is_repeated = open.sent_at.is_some();
            open.sent_at.get_or_insert(now);
            frames.push((*id, frame));
        }
        // The sort is stable: attaches and members have 0 and stay in front, and requests come in their order.
        frames.sort_by_key(|(id, _)| *id);
        frames.into_iter().map(|(_, frame)| Outgoing::Request(frame)).collect()
    }

    /// Notes the loss of the connection. Requests of the library itself are dropped, as the next connection
    /// makes new ones.
    pub(crate) fn unlinked(&self) {
        let mut state = self.lock();
        state.link = None;
        state.pending.retain(|_, open| open.answer.is_some());
    }

    /// Gives an answer to the caller that waits for it.
    pub(crate) fn resolve(&self, frame: Incoming) -> FrameOwner {
        if !matches!(frame.op, op::ACK | op::NACK | op::ATTACHED | op::DETACHED) {
            return FrameOwner::Unsolicited(frame);
        }
        let mut state = self.lock();
        let id = frame.id.as_deref().and_then(|id| id.parse().ok());
        let Some(mut open) = id.and_then(|id: u64| state.pending.remove(&id)) else {
            match (frame.op, frame.channel.as_deref()) {
                (op::DETACHED, Some(channel)) => state.session.detached(channel),
                (op::ATTACHED, Some(channel)) => {
                    state.session.set_serial(channel, frame.serial.as_deref().unwrap_or_default());
                }
                _ => {}
            }
            return FrameOwner::Unsolicited(frame);
        };
        let body = open.body.take();
        if let Some(body) = &body {
            match (frame.op, body) {
                (op::NACK, body) => state.session.request_refused(body),
                (_, Body::Auth { access_token }) => state.token = Some(access_token.clone()),
                (_, body) => state.session.request_done(body, &frame),
            }
        }
        drop(state);
        match body {
            Some(body) if open.answer.is_none() => FrameOwner::Library(body, frame),
            body => {
                let is_publish = matches!(body, Some(Body::Message { .. }));
                let is_in_doubt = open.is_repeated && is_publish;
                reply(open, answer(frame, is_in_doubt));
                FrameOwner::Caller
            }
        }
    }

    pub(crate) fn delivered(&self, channel: &str, serial: &str) {
        if self.keeps {
            self.lock().session.set_serial(channel, serial);
        }
    }

    pub(crate) fn forget(&self, body: &Body) {
        self.lock().session.forget(body);
    }

    /// Gives the token that the node accepted on an open connection, once.
    pub(crate) fn take_token(&self) -> Option<String> {
        self.lock().token.take()
    }

    /// Asks the node for a clean end, after which the connection is not resumed.
    pub(crate) async fn close(&self) -> Result<(), Error> {
        let link = {
            let mut state = self.lock();
            state.closing = true;
            state.link.clone().ok_or(Error::Closed)?
        };
        let frame = frame::encode_request(&Request { id: None, body: Body::Close }, self.format);
        link.send(Outgoing::Request(frame)).await.map_err(|_| Error::Closed)
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.lock().closing
    }

    /// Ends all waiting requests, and all later ones, with [`Error::Closed`].
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.over = true;
        state.link = None;
        state.pending.clear();
        self.budget.close();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn own(body: Body) -> PendingRequest {
    PendingRequest { body: Some(body), sent_at: None, is_repeated: false, answer: None, _permit: None }
}

fn reply(open: PendingRequest, result: Result<Incoming, Error>) {
    if let Some(answer) = open.answer {
        // A caller that no longer waits has dropped its end.
        let _ = answer.send(result);
    }
}

/// Makes the outcome of an answer. `is_in_doubt` says that a publish was sent before: a temporary refusal
/// says nothing about the first sending.
fn answer(frame: Incoming, is_in_doubt: bool) -> Result<Incoming, Error> {
    if frame.op != op::NACK {
        return Ok(frame);
    }
    let (code, error) = (frame.code.unwrap_or_default(), frame.error.unwrap_or_default());
    if is_in_doubt && code >= code::CREDENTIAL {
        return Err(Error::Unknown(format!("it was sent again and refused with code {code}: {error}")));
    }
    Err(Error::Refused { code, error })
}
