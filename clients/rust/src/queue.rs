//! The events that wait for the application, bounded in number and in bytes.

use std::sync::Arc;

use fanfare_proto::frame::{MemberIn, MessageIn, PresenceIn};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};

use crate::{Event, Options};

/// Memory of an event, or of one message or member of an event, beside its texts.
const ENTRY_BYTES: usize = 256;

/// Sending end of the queue. A sender waits while there is no room.
#[derive(Clone)]
pub(crate) struct Sender {
    events: mpsc::Sender<QueuedEvent>,
    budget: Arc<Semaphore>,
    budget_bytes: usize,
}

pub(crate) struct Receiver(mpsc::Receiver<QueuedEvent>);

/// Error of a queue whose receiver is dropped.
pub(crate) struct ReceiverClosed;

struct QueuedEvent {
    event: Event,
    _permit: OwnedSemaphorePermit,
}

pub(crate) fn bounded(options: &Options) -> (Sender, Receiver) {
    let (events, receiver) = mpsc::channel(options.events_max.max(1));
    let budget_bytes = options.events_bytes_max.clamp(1, u32::MAX as usize >> 1);
    (Sender { events, budget: Arc::new(Semaphore::new(budget_bytes)), budget_bytes }, Receiver(receiver))
}

impl Sender {
    pub(crate) async fn send(&self, event: Event) -> Result<(), ReceiverClosed> {
        // An event that is larger than all the room takes all of it.
        let bytes = u32::try_from(bytes(&event).min(self.budget_bytes)).expect("the room is no larger");
        let permit = tokio::select! {
        permit = Arc::clone(&self.budget).acquire_many_owned(bytes) => permit.map_err(|_| ReceiverClosed)?,
            () = self.events.closed() => return Err(ReceiverClosed),
        };
        self.events.send(QueuedEvent { event, _permit: permit }).await.map_err(|_| ReceiverClosed)
    }
}

impl Receiver {
    /// Gives the next event, whose room is free from then on.
    pub(crate) async fn recv(&mut self) -> Option<Event> {
        self.0.recv().await.map(|waiting| waiting.event)
    }
}

/// Estimates the memory of an event.
fn bytes(event: &Event) -> usize {
    let texts = match event {
        Event::Messages(delivery) => delivery.messages.iter().map(of_message).sum(),
        Event::Members(list) => list.members.iter().map(of_member).sum(),
        Event::Presence(presence) => presence.events.iter().map(of_presence).sum(),
        _ => 0,
    };
    ENTRY_BYTES + texts
}

fn of_message(message: &MessageIn) -> usize {
    let MessageIn { id, name, data, extras, client_id, connection_id, timestamp: _ } = message;
    let named = [name, client_id].map(|text| text.as_ref().map_or(0, String::len));
    let json = [data, extras].map(|json| json.as_ref().map_or(0, |json| json.get().len()));
    ENTRY_BYTES + id.len() + connection_id.len() + named.iter().sum::<usize>() + json.iter().sum::<usize>()
}

fn of_member(member: &MemberIn) -> usize {
    let MemberIn { client_id, connection_id, data, timestamp: _ } = member;
    ENTRY_BYTES + client_id.len() + connection_id.len() + data.as_ref().map_or(0, |data| data.get().len())
}

fn of_presence(event: &PresenceIn) -> usize {
    let PresenceIn { action: _, client_id, connection_id, data, timestamp: _ } = event;
    ENTRY_BYTES + client_id.len() + connection_id.len() + data.as_ref().map_or(0, |data| data.get().len())
}
