//! A connection and the handles on it.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fanfare_proto::frame::{self, Attach, Body, Draft, Format, Incoming, PresenceRequest, Request, op};
use serde_json::value::RawValue;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::event::{self, Attached, Connected, Event};
use crate::handshake::{self, ReadHalf};
use crate::pending::{Answer, Pending};
use crate::reader::{self, Reader};
use crate::writer::{self, LastSent, Outgoing};
use crate::{Error, Options};

const CONNECT_MAX: Duration = Duration::from_secs(15);
const CLOSE_MAX: Duration = Duration::from_secs(5);

/// One connection. Dropping it ends the connection without a word; the node sees a lost link.
///
/// Requests go through the [`Handle`], to which a client dereferences; only the client itself gets the events.
pub struct Client {
    handle: Handle,
    connected: Connected,
    events: mpsc::Receiver<Event>,
    closed: oneshot::Receiver<()>,
    _tasks: JoinSet<()>,
}

impl Client {
    /// Connects and waits for the node's `connected`. An HTTP refusal is [`Error::Http`], a refusal after the upgrade
    /// [`Error::Refused`].
    pub async fn connect(options: Options) -> Result<Self, Error> {
        timeout(CONNECT_MAX, Self::connect_unbounded(options)).await.map_err(|_| Error::TimedOut)?
    }

    async fn connect_unbounded(options: Options) -> Result<Self, Error> {
        let format = options.format;
        let (mut half, write_half) = handshake::connect(&options).await?;
        let (outgoing, queue) = mpsc::channel(writer::QUEUE_FRAMES_MAX);
        let (event_sender, events) = mpsc::channel(options.events_max.max(1));
        let (closed_sender, closed) = oneshot::channel();
        let last_sent = LastSent::now();
        let pending = Arc::new(Pending::default());
        let mut tasks = JoinSet::new();
        tasks.spawn(writer::run(write_half, queue, format, last_sent.clone()));
        let connected = first_frame(&mut half, format, &outgoing).await?;
        let reader = Reader {
            half,
            format,
            heartbeat_ms: connected.heartbeat_ms,
            outgoing: outgoing.clone(),
            last_sent,
            pending: Arc::clone(&pending),
            events: event_sender,
            closed: Some(closed_sender),
            pages: HashMap::new(),
        };
        tasks.spawn(reader.run());
        let handle = Handle { outgoing, pending, format };
        Ok(Self { handle, connected, events, closed, _tasks: tasks })
    }

    /// What the node said when the connection began.
    pub fn connected(&self) -> &Connected {
        &self.connected
    }

    /// Another hand on the same connection, for publishing from elsewhere.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// The next event; none after [`Event::Ended`]. Cancelling it loses nothing.
    ///
    /// Whoever is attached must keep calling it: see [`Options::events_max`].
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Ends cleanly and at once: a request whose answer has not come may stay without one, so await it first;
    /// events not yet taken are dropped.
    pub async fn close(mut self) -> Result<(), Error> {
        self.handle.send(&Request { id: None, body: Body::Close }).await?;
        // The reader must not wait for room in the events, and tells of the answer before it ends them.
        let ended = timeout(CLOSE_MAX, async { while self.events.recv().await.is_some() {} }).await;
        match self.closed.try_recv() {
            Ok(()) => Ok(()),
            Err(_) if ended.is_ok() => Err(Error::Closed),
            Err(_) => Err(Error::TimedOut),
        }
    }
}

impl std::ops::Deref for Client {
    type Target = Handle;

    fn deref(&self) -> &Handle {
        &self.handle
    }
}

async fn first_frame(
    half: &mut ReadHalf,
    format: Format,
    outgoing: &mpsc::Sender<Outgoing>,
) -> Result<Connected, Error> {
    let frame = loop {
        match reader::read(half, format, outgoing).await {
            Ok(Some(frame)) if frame.op == op::HEARTBEAT => {}
            Ok(Some(frame)) => break frame,
            Ok(None) => {}
            Err(ending) => return Err(Error::Protocol(format!("ended before connected: {ending:?}"))),
        }
    };
    match frame.op {
        op::CONNECTED => Ok(event::connected(frame)),
        op::ERROR | op::DISCONNECTED => Err(Error::Refused {
            code: frame.code.unwrap_or_default(),
            error: frame.error.unwrap_or_default(),
        }),
        other => Err(Error::Protocol(format!("op {other} before connected"))),
    }
}

/// A hand on a connection: cheap to clone, usable from many tasks at once.
#[derive(Clone)]
pub struct Handle {
    outgoing: mpsc::Sender<Outgoing>,
    pending: Arc<Pending>,
    format: Format,
}

impl Handle {
    pub async fn attach(&self, channel: &str) -> Result<Attached, Error> {
        let attach = Attach { channel: channel.into(), ..Attach::default() };
        self.attach_with(attach).await
    }

    /// Attaches with a resume point or modes of the caller's choice.
    pub async fn attach_with(&self, attach: Attach) -> Result<Attached, Error> {
        Ok(event::attached(self.request(Body::Attach(attach)).await?))
    }

    pub async fn detach(&self, channel: &str) -> Result<(), Error> {
        self.request(Body::Detach { channel: channel.into() }).await.map(drop)
    }

    /// Publishes in order and waits until it is stored: one serial for each message.
    pub async fn publish(&self, channel: &str, messages: Vec<Draft>) -> Result<Vec<String>, Error> {
        self.publish_start(channel, messages).await?.await
    }

    /// Sends a publish (waiting only for room in the send queue); the ticket resolves when it is answered.
    pub async fn publish_start(&self, channel: &str, messages: Vec<Draft>) -> Result<Ticket, Error> {
        self.start(Body::Message { channel: channel.into(), messages }).await.map(Ticket)
    }

    /// Becomes present on a channel under the connection's client id, with `data`; resolves when that is stored.
    pub async fn enter(&self, channel: &str, data: Option<Box<RawValue>>) -> Result<(), Error> {
        self.present(presence("enter", channel, data)).await
    }

    /// Changes the data of the member; one that is absent enters.
    pub async fn update(&self, channel: &str, data: Option<Box<RawValue>>) -> Result<(), Error> {
        self.present(presence("update", channel, data)).await
    }

    /// Without data the leave has what the member had last.
    pub async fn leave(&self, channel: &str, data: Option<Box<RawValue>>) -> Result<(), Error> {
        self.present(presence("leave", channel, data)).await
    }

    /// Enters, updates or leaves, under a client id of the caller's choice if the credential leaves it open.
    pub async fn present(&self, request: PresenceRequest) -> Result<(), Error> {
        self.request(Body::Presence(request)).await.map(drop)
    }

    /// Gives the node a newer token, so that the connection outlives the former one.
    pub async fn refresh(&self, token: &str) -> Result<(), Error> {
        self.request(Body::Auth { access_token: token.into() }).await.map(drop)
    }

    async fn request(&self, body: Body) -> Result<Incoming, Error> {
        self.start(body).await?.await.unwrap_or(Err(Error::Closed))
    }

    async fn start(&self, body: Body) -> Result<Answer, Error> {
        let (id, answer) = self.pending.register()?;
        let sent = self.send(&Request { id: Some(id.to_string()), body }).await;
        if sent.is_err() {
            self.pending.forget(id);
        }
        sent.map(|()| answer)
    }

    async fn send(&self, request: &Request) -> Result<(), Error> {
        let bytes = frame::encode_request(request, self.format);
        self.outgoing.send(Outgoing::Request(bytes)).await.map_err(|_| Error::Closed)
    }
}

fn presence(action: &str, channel: &str, data: Option<Box<RawValue>>) -> PresenceRequest {
    PresenceRequest { channel: channel.into(), action: action.into(), client_id: None, data }
}

/// A publish on its way. Resolves to one serial for each message once they are stored.
#[must_use = "a publish that nobody waits for may have been refused"]
pub struct Ticket(Answer);

impl Future for Ticket {
    type Output = Result<Vec<String>, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.0).poll(context)).unwrap_or(Err(Error::Closed));
        Poll::Ready(answer.map(|frame| frame.serials))
    }
}
