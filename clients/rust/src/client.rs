//! The client, as the application owns it.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::dial::Dialler;
use crate::driver::Driver;
use crate::event::{Connected, Event};
use crate::shared::Shared;
use crate::{Error, Handle, Options, queue};

const CLOSE_MAX: Duration = Duration::from_secs(5);

/// One connection, or with [`Options::reconnect`] one after another. Dropping the client ends the connection
/// at once; the node sees a lost link.
///
/// Requests go through the [`Handle`], to which a client dereferences. Only the client itself gets the
/// events.
///
/// A client that reconnects attaches its channels again from their last positions, lets its members enter
/// again, and sends again the requests without an answer. It gives messages ids of its own, so that a publish
/// that is sent twice is stored once. It drops a message whose id came within the last two minutes (of the
/// last 65 536 messages).
pub struct Client {
    handle: Handle,
    connected: Connected,
    events: queue::Receiver,
    closed: oneshot::Receiver<()>,
    _driver: JoinSet<()>,
}

impl Client {
    /// Connects and waits for the node's `connected`. This first attempt is not repeated, whatever the
    /// options say.
    ///
    /// # Errors
    /// [`Error::Http`] for a refusal before the upgrade, [`Error::Refused`] or [`Error::Disconnected`] for
    /// one after it, and others as [`Error`] says.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let (event_sender, events) = queue::bounded(&options);
        let (closed_sender, closed) = oneshot::channel();
        let shared = Arc::new(Shared::new(&options)?);
        let mut dialler = Dialler::new(options);
        let dialled = dialler.dial().await?;
        let connected = dialled.connected.clone();
        // A new client has nothing to send again, so what `linked` gives is empty.
        shared.linked(&dialled);
        let driver = Driver::new(dialler, Arc::clone(&shared), event_sender, closed_sender);
        let mut tasks = JoinSet::new();
        tasks.spawn(driver.run(dialled));
        Ok(Self { handle: Handle::new(shared), connected, events, closed, _driver: tasks })
    }

    /// Gives what the node said at the beginning of the connection, or in the latest [`Event::Connected`]
    /// that was taken.
    pub fn connected(&self) -> &Connected {
        &self.connected
    }

    /// Gives another handle of the same connection, for requests from other tasks.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// Gives the next event, or `None` after [`Event::Ended`]. Cancelling the call loses nothing.
    ///
    /// An application with attached channels must keep calling: see [`Options::events_max`] and
    /// [`Options::events_bytes_max`].
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv().await;
        if let Some(Event::Connected(connected)) = &event {
            self.connected.clone_from(connected);
        }
        event
    }

    /// Ends the connection cleanly and at once. A request without an answer may stay without one, so await it
    /// first. Events that are not yet taken are dropped.
    ///
    /// # Errors
    /// [`Error::Closed`] if there is no connection to close, [`Error::TimedOut`] if the node does not confirm
    /// within 5 s.
    pub async fn close(mut self) -> Result<(), Error> {
        self.handle.close().await?;
        // Taking the events keeps the driver from waiting for room. It signals `closed` before it ends them.
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
