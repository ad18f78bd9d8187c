//! The task that owns a client's connections, one after another.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::frame::code;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

use crate::backoff::Backoff;
use crate::dial::{DialledConnection, Dialler};
use crate::event::{Ending, Event};
use crate::reader::Reader;
use crate::seen::SeenMessages;
use crate::shared::Shared;
use crate::writer::{self, LastSent, Outgoing};
use crate::{Error, queue};

/// Time after a failed write in which the node's last frames are still read.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);

pub(crate) struct Driver {
    pub(crate) dialler: Dialler,
    pub(crate) shared: Arc<Shared>,
    pub(crate) events: queue::Sender,
    pub(crate) closed: Option<oneshot::Sender<()>>,
    pub(crate) seen: SeenMessages,
}

/// The end of one connection.
pub(crate) struct End {
    pub(crate) ending: Ending,
    /// Earliest time at which the node accepts the client again; `None`: any.
    pub(crate) not_before: Option<Instant>,
}

impl Driver {
    pub(crate) fn new(
        dialler: Dialler,
        shared: Arc<Shared>,
        events: queue::Sender,
        closed: oneshot::Sender<()>,
    ) -> Self {
        Self { dialler, shared, events, closed: Some(closed), seen: SeenMessages::default() }
    }

    /// Runs until the last connection ends, which is the last event. The first one is linked already.
    pub(crate) async fn run(mut self, mut dialled: DialledConnection) {
        let mut backoff = self.dialler.options.reconnect.map(Backoff::new);
        let mut first = Vec::new();
        let ending = loop {
            let began = Instant::now();
            let resume_window = Duration::from_millis(dialled.connected.resume_window_ms);
            let mut end = self.serve(dialled, first).await;
            self.shared.unlinked();
            let again = match &end.ending {
                Ending::Refused { code, .. } => *code == code::TAKEN_OVER && self.may_be_own(resume_window),
                _ => true,
            };
            let again = again && !self.shared.is_closing();
            let Some(backoff) = backoff.as_mut().filter(|_| again) else { break end.ending };
            if !backoff.has_held(began.elapsed()) {
                // The client's own delay applies, too: a node may ask again and again to reconnect at once.
                let after = Instant::now() + wait(backoff);
                end.not_before = Some(end.not_before.map_or(after, |at| at.max(after)));
            }
            match self.come_back(end, backoff).await {
                Ok(next) => {
                    // The link is set before the event, so that an application that gets the event can use
                    // it.
                    first = self.shared.linked(&next);
                    if self.events.send(Event::Connected(next.connected.clone())).await.is_err() {
                        break Ending::Lost("nobody wants the events".into());
                    }
                    dialled = next;
                }
                Err(ending) => break ending,
            }
        };
        self.shared.end();
        // Sending fails if the client is dropped, and then the event has no reader.
        let _ = self.events.send(Event::Ended(ending)).await;
    }

    /// Tells whether the node may have resumed the connection for an earlier attempt that was given up: the
    /// node sees attempts in any order.
    fn may_be_own(&self, resume_window: Duration) -> bool {
        self.dialler.unanswered_since.is_some_and(|at| at.elapsed() <= resume_window)
    }

    /// Runs one connection to its end. The frames of `first` go before those of the queue.
    async fn serve(&mut self, dialled: DialledConnection, first: Vec<Outgoing>) -> End {
        let DialledConnection { read, write, outgoing, queue, connected } = dialled;
        let format = self.dialler.options.format;
        let last_sent = LastSent::now();
        let mut writing = JoinSet::new();
        writing.spawn(writer::run(write, first, queue, format, last_sent.clone()));
        let reader = Reader {
            half: read,
            format,
            heartbeat_ms: connected.heartbeat_ms,
            clock: (connected.server_time, Instant::now()),
            outgoing,
            last_sent,
            pages: HashMap::new(),
            last_word: None,
            errands: JoinSet::new(),
            driver: self,
        };
        let reading = reader.run();
        tokio::pin!(reading);
        tokio::select! {
            end = &mut reading => end,
            _ = writing.join_next() => timeout(LAST_WORDS_MAX, reading).await.unwrap_or_else(|_| End {
                ending: Ending::Lost("nothing could be sent".into()),
                not_before: None,
            }),
        }
    }

    /// Connects again, as often as it takes. The error is the reason for which no further attempt is made.
    async fn come_back(&mut self, end: End, backoff: &mut Backoff) -> Result<DialledConnection, Ending> {
        let mut at = end.not_before.unwrap_or_else(|| Instant::now() + wait(backoff));
        let retry_in = at.saturating_duration_since(Instant::now());
        // Sending fails if the client is dropped, and then nothing is left to connect for.
        let sent = self.events.send(Event::Disconnected { ending: end.ending.clone(), retry_in }).await;
        sent.map_err(|_| end.ending)?;
        self.dialler.credential.renew(self.shared.take_token());
        loop {
            sleep_until(at).await;
            let pause = match self.dialler.dial().await {
                Ok(dialled) => return Ok(dialled),
                Err(error) if error.is_final() => return Err(refusal(error)),
                Err(Error::Disconnected { reconnect_after_ms, .. }) => {
                    Duration::from_millis(reconnect_after_ms).max(wait(backoff))
                }
                Err(_) => wait(backoff),
            };
            at = Instant::now() + pause;
        }
    }
}

/// Answers all waiting requests with an error, also when the client is dropped.
impl Drop for Driver {
    fn drop(&mut self) {
        self.shared.end();
    }
}

fn wait(backoff: &mut Backoff) -> Duration {
    let mut random = [0; 2];
    // Without random bytes the delay is the shortest of its kind.
    let _ = getrandom::fill(&mut random);
    backoff.wait(u16::from_be_bytes(random))
}

fn refusal(error: Error) -> Ending {
    match error {
        Error::Refused { code, error } => Ending::Refused { code, error },
        Error::TokenDenied(error) => Ending::Refused { code: 40_300, error },
        Error::Http { status, error, .. } => Ending::Refused { code: u32::from(status) * 100, error },
        other => Ending::Refused { code: 40_000, error: other.to_string() },
    }
}
