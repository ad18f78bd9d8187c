//! A client: what its owner holds.

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

/// One connection, or with [`Options::reconnect`] one after another. Dropping it ends the connection without a word; the node
/// sees a lost link.
///
/// Requests go through the [`Handle`], to which a client dereferences; only the client itself gets the events.
///
/// A client that reconnects attaches its channels again from where they stood, lets its members enter again, and sends again
/// what was not answered. It gives messages ids of its own, so that a publish sent twice is stored once, and
/// drops a message whose id came within the last two minutes (of the last 65 536 messages).
pub struct Client {
    handle: Handle,
    connected: Connected,
    events: queue::Receiver,
    closed: oneshot::Receiver<()>,
    _driver: JoinSet<()>,
}

impl Client {
    /// Connects and waits for the node's `connected`. An HTTP refusal is [`Error::Http`], a refusal after the upgrade
    /// [`Error::Refused`]. This first time is not tried again, whatever the options say.
    pub async fn connect(options: Options) -> Result<Self, Error> {
        let (event_sender, events) = queue::bounded(&options);
        let (closed_sender, closed) = oneshot::channel();
        let shared = Arc::new(Shared::new(&options)?);
        let mut dialler = Dialler::new(options);
        let dialled = dialler.dial().await?;
        let connected = dialled.connected.clone();
        // Nothing is to be sent yet.
        shared.linked(&dialled);
        let driver = Driver::new(dialler, Arc::clone(&shared), event_sender, closed_sender);
        let mut tasks = JoinSet::new();
        tasks.spawn(driver.run(dialled));
        Ok(Self { handle: Handle::new(shared), connected, events, closed, _driver: tasks })
    }

    /// What the node said when the connection began, or in the latest [`Event::Connected`] that was taken.
    pub fn connected(&self) -> &Connected {
        &self.connected
    }

    /// Another hand on the same connection, for publishing from elsewhere.
    pub fn handle(&self) -> Handle {
        self.handle.clone()
    }

    /// The next event; none after [`Event::Ended`]. Cancelling it loses nothing.
    ///
    /// Whoever is attached must keep calling it: see [`Options::events_max`] and [`Options::events_bytes_max`].
    pub async fn next(&mut self) -> Option<Event> {
        let event = self.events.recv().await;
        if let Some(Event::Connected(connected)) = &event {
            self.connected.clone_from(connected);
        }
        event
    }

    /// Ends cleanly and at once: a request whose answer has not come may stay without one, so await it first;
    /// events not yet taken are dropped. [`Error::Closed`] if there is no connection to be closed.
    pub async fn close(mut self) -> Result<(), Error> {
        self.handle.close().await?;
        // The driver must not wait for room in the events, and tells of the answer before it ends them.
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
