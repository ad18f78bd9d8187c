//! The requests of a client.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use fanfare_proto::frame::{Attach, Body, Draft, Incoming, PresenceRequest};
use serde_json::value::RawValue;

use crate::Error;
use crate::event::{self, Attached};
use crate::shared::{Answer, Shared};

/// A handle of a connection, cheap to clone and usable from many tasks at once.
///
/// A request resolves when the node has answered it; a refusal is [`Error::Refused`]. While a client that
/// reconnects has no connection, requests wait for the next one.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

impl Handle {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self(shared)
    }

    /// Begins delivery of all that is published from now on.
    pub async fn attach(&self, channel: &str) -> Result<Attached, Error> {
        let attach = Attach { channel: channel.into(), ..Attach::default() };
        self.attach_with(attach).await
    }

    /// Attaches as [`Handle::attach`] does, and asks for [`crate::Event::Occupancy`]: at once, and after
    /// changes at most once a second.
    pub async fn attach_with_occupancy(&self, channel: &str) -> Result<Attached, Error> {
        let attach = Attach { channel: channel.into(), occupancy: true, ..Attach::default() };
        self.attach_with(attach).await
    }

    /// Attaches with a serial, a rewind or modes of the caller's choice.
    pub async fn attach_with(&self, attach: Attach) -> Result<Attached, Error> {
        Ok(event::attached(self.request(Body::Attach(attach)).await?))
    }

    /// Ends delivery of a channel.
    pub async fn detach(&self, channel: &str) -> Result<(), Error> {
        self.request(Body::Detach { channel: channel.into() }).await.map(drop)
    }

    /// Publishes messages in their order, and waits until they are stored. Gives one serial for each message.
    pub async fn publish(&self, channel: &str, messages: Vec<Draft>) -> Result<Vec<String>, Error> {
        self.publish_start(channel, messages).await?.await
    }

    /// Sends a publish, and waits only for room (see [`crate::Options::unanswered_bytes_max`]). The ticket
    /// resolves with the answer.
    pub async fn publish_start(&self, channel: &str, mut messages: Vec<Draft>) -> Result<Ticket, Error> {
        self.0.name(&mut messages);
        self.0.start(Body::Message { channel: channel.into(), messages }).await.map(Ticket)
    }

    /// Enters a channel as a member, under the connection's client id and with `data`. Resolves when the
    /// event is stored.
    pub async fn enter(&self, channel: &str, data: Option<Box<RawValue>>) -> Result<(), Error> {
        self.present(presence("enter", channel, data)).await
    }

    /// Changes the data of the member. A member that is absent enters.
    pub async fn update(&self, channel: &str, data: Option<Box<RawValue>>) -> Result<(), Error> {
        self.present(presence("update", channel, data)).await
    }

    /// Leaves a channel. A leave without data carries the last data of the member.
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

    pub(crate) async fn close(&self) -> Result<(), Error> {
        self.0.close().await
    }

    async fn request(&self, body: Body) -> Result<Incoming, Error> {
        self.0.start(body).await?.await.unwrap_or(Err(Error::Closed))
    }
}

fn presence(action: &str, channel: &str, data: Option<Box<RawValue>>) -> PresenceRequest {
    PresenceRequest { channel: channel.into(), action: action.into(), client_id: None, data }
}

/// A publish under way. Resolves to one serial for each message once they are stored.
#[must_use = "a publish that nobody waits for may have been refused"]
pub struct Ticket(Answer);

impl Future for Ticket {
    type Output = Result<Vec<String>, Error>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = ready!(Pin::new(&mut self.0).poll(context)).unwrap_or(Err(Error::Closed));
        Poll::Ready(answer.map(|frame| frame.serials))
    }
}
