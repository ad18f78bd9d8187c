//! What the handles and the driver of a client share, and what outlives a single connection: the requests without an
//! answer, and what is to be asked for again.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::frame::{self, Body, Draft, Format, Incoming, Request, code, op};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::dial::Dialled;
use crate::standing::Standing;
use crate::writer::Outgoing;
use crate::{Error, Options, seen};

pub(crate) type Answer = oneshot::Receiver<Result<Incoming, Error>>;

/// A publish is repeated this long after it was first sent; the node tells repetitions apart only a little longer.
const REPEAT_MAX: Duration = Duration::from_millis(seen::WINDOW_MS - 10_000);
/// What an open request costs beside its bytes.
const REQUEST_BYTES: usize = 256;

pub(crate) struct Shared {
    format: Format,
    /// Requests outlive the connection that they were sent on.
    keeps: bool,
    next_id: AtomicU64,
    /// Of message ids that the library makes: no other client has it.
    id_prefix: String,
    /// Bytes for further requests. When there are none a request waits for the answer to an earlier one.
    room: Arc<Semaphore>,
    room_bytes: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    over: bool,
    closing: bool,
    link: Option<mpsc::Sender<Outgoing>>,
    open: HashMap<u64, Open>,
    standing: Standing,
    /// Accepted by the node since it was last asked for.
    token: Option<String>,
}

/// A request without an answer.
struct Open {
    /// Kept where it can be sent again.
    body: Option<Body>,
    /// When it was first sent.
    sent_at: Option<Instant>,
    is_repeated: bool,
    /// None: it is the library's own.
    answer: Option<oneshot::Sender<Result<Incoming, Error>>>,
    _room: Option<OwnedSemaphorePermit>,
}

/// Whose a frame is.
pub(crate) enum Owner {
    /// It answers a caller's request, and the caller has it now.
    Caller,
    /// It answers what the library asked of itself.
    Library(Body, Incoming),
    Nobody(Incoming),
}

impl Shared {
    pub(crate) fn new(options: &Options) -> Result<Self, Error> {
        let mut random = [0; 12];
        getrandom::fill(&mut random).map_err(|error| Error::BadValue(format!("no random bytes: {error}")))?;
        let room_bytes = options.unanswered_bytes_max.clamp(1, u32::MAX as usize >> 1);
        Ok(Self {
            format: options.format,
            keeps: options.reconnect.is_some(),
            next_id: AtomicU64::new(1),
            id_prefix: URL_SAFE_NO_PAD.encode(random),
            room: Arc::new(Semaphore::new(room_bytes)),
            room_bytes,
            state: Mutex::default(),
        })
    }

    /// Sends a request of a caller; without a connection it is sent on the next one.
    pub(crate) async fn start(&self, body: Body) -> Result<Answer, Error> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (frame, body) = self.encode(id, body);
        let bytes = (frame.len() + REQUEST_BYTES).min(self.room_bytes);
        let bytes = u32::try_from(bytes).expect("the room is no larger");
        let room = Arc::clone(&self.room).acquire_many_owned(bytes).await.map_err(|_| Error::Closed)?;
        let (sender, answer) = oneshot::channel();
        let open = Open {
            body: self.keeps.then_some(body),
            sent_at: None,
            is_repeated: false,
            answer: Some(sender),
            _room: Some(room),
        };
        self.send(id, frame, open).await?;
        Ok(answer)
    }

    /// Asks for what the library itself wants, if it still does and the connection is there.
    pub(crate) async fn start_own(&self, body: Body) {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let wanted = matches!(body, Body::Auth { .. }) || self.lock().standing.wants(&body);
        if wanted && self.lock().link.is_some() {
            let (frame, body) = self.encode(id, body);
            let _ = self.send(id, frame, own(body)).await;
        }
    }

    /// Puts the request into the table and into the connection's queue at once, so that neither is without the other.
    async fn send(&self, id: u64, frame: Vec<u8>, mut open: Open) -> Result<(), Error> {
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
                // The writer is gone, and the driver will notice.
                state.link = None;
            }
            open.sent_at = slot.is_some().then(Instant::now);
            if let Some(body) = &open.body {
                state.standing.asked(body);
            }
            state.open.insert(id, open);
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

    /// Gives messages without an id one, where they may have to be sent again.
    pub(crate) fn name(&self, messages: &mut [Draft]) {
        if !self.keeps {
            return;
        }
        for message in messages.iter_mut().filter(|message| message.id.is_none()) {
            let number = self.next_id.fetch_add(1, Ordering::Relaxed);
            message.id = Some(format!("{}:{number}", self.id_prefix).into());
        }
    }

    /// A connection is there. Gives what must be sent on it before anything else.
    pub(crate) fn linked(&self, dialled: &Dialled) -> Vec<Outgoing> {
        let mut state = self.lock();
        let state = &mut *state;
        state.standing.connected(dialled.connected.client_id.as_deref());
        state.link = Some(dialled.outgoing.clone());
        let now = Instant::now();
        let too_late = |open: &Open| {
            matches!(open.body, Some(Body::Message { .. }))
                && open.sent_at.is_some_and(|at| now.duration_since(at) > REPEAT_MAX)
        };
        for (_, open) in state.open.extract_if(|_, open| too_late(open)) {
            reply(open, Err(Error::Unknown("the connection was lost for too long".into())));
        }
        let bodies = state.open.values().filter_map(|open| open.body.as_ref());
        let mut frames = Vec::new();
        for body in state.standing.requests(bodies) {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let (frame, body) = self.encode(id, body);
            state.open.insert(id, own(body));
            frames.push((0, frame));
        }
        for (id, open) in state.open.iter_mut().filter(|(_, open)| open.answer.is_some()) {
            let Some(body) = open.body.take() else { continue };
            let (frame, body) = self.encode(*id, body);
            open.body = Some(body);
            open.is_repeated = open.sent_at.is_some();
            open.sent_at.get_or_insert(now);
            frames.push((*id, frame));
        }
        // Stable: what stands keeps its place at the front, the requests come in their order.
        frames.sort_by_key(|(id, _)| *id);
        frames.into_iter().map(|(_, frame)| Outgoing::Request(frame)).collect()
    }

    /// The connection is lost; what the library asked on it is asked again by the next one.
    pub(crate) fn unlinked(&self) {
        let mut state = self.lock();
        state.link = None;
        state.open.retain(|_, open| open.answer.is_some());
    }

    /// Gives an answer to the caller who waits for it.
    pub(crate) fn resolve(&self, frame: Incoming) -> Owner {
        if !matches!(frame.op, op::ACK | op::NACK | op::ATTACHED | op::DETACHED) {
            return Owner::Nobody(frame);
        }
        let mut state = self.lock();
        let id = frame.id.as_deref().and_then(|id| id.parse().ok());
        let Some(mut open) = id.and_then(|id: u64| state.open.remove(&id)) else {
            match (frame.op, frame.channel.as_deref()) {
                (op::DETACHED, Some(channel)) => state.standing.detached(channel),
                (op::ATTACHED, Some(channel)) => {
                    state.standing.moved(channel, frame.serial.as_deref().unwrap_or_default());
                }
                _ => {}
            }
            return Owner::Nobody(frame);
        };
        let body = open.body.take();
        if let Some(body) = &body {
            match (frame.op, body) {
                (op::NACK, body) => state.standing.refused(body),
                (_, Body::Auth { access_token }) => state.token = Some(access_token.clone()),
                (_, body) => state.standing.done(body, &frame),
            }
        }
        drop(state);
        match body {
            Some(body) if open.answer.is_none() => Owner::Library(body, frame),
            body => {
                let is_publish = matches!(body, Some(Body::Message { .. }));
                let is_unsure = open.is_repeated && is_publish;
                reply(open, answer(frame, is_unsure));
                Owner::Caller
            }
        }
    }

    pub(crate) fn delivered(&self, channel: &str, serial: &str) {
        if self.keeps {
            self.lock().standing.moved(channel, serial);
        }
    }

    pub(crate) fn forget(&self, body: &Body) {
        self.lock().standing.forget(body);
    }

    /// The token that the node accepted on an open connection, once.
    pub(crate) fn take_token(&self) -> Option<String> {
        self.lock().token.take()
    }

    /// Asks for a clean end; the connection is not taken up again.
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

    /// Whoever waits, or asks from now on, is told that the connection is closed.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.over = true;
        state.link = None;
        state.open.clear();
        self.room.close();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn own(body: Body) -> Open {
    Open { body: Some(body), sent_at: None, is_repeated: false, answer: None, _room: None }
}

fn reply(open: Open, result: Result<Incoming, Error>) {
    if let Some(answer) = open.answer {
        // A caller that gave up has dropped its end.
        let _ = answer.send(result);
    }
}

/// `is_unsure`: a publish that was sent before, so that a refusal which depends on the moment says nothing of the
/// first time.
fn answer(frame: Incoming, is_unsure: bool) -> Result<Incoming, Error> {
    if frame.op != op::NACK {
        return Ok(frame);
    }
    let (code, error) = (frame.code.unwrap_or_default(), frame.error.unwrap_or_default());
    if is_unsure && code >= code::CREDENTIAL {
        return Err(Error::Unknown(format!("it was sent again and refused with code {code}: {error}")));
    }
    Err(Error::Refused { code, error })
}
