//! Opens one connection, the first or a further one.

use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::frame::{Format, code, op};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::credential::CurrentCredential;
use crate::event::{self, Connected};
use crate::handshake::{self, ReadHalf, WriteHalf};
use crate::reader;
use crate::writer::{self, Outgoing};
use crate::{Error, Options};

const CONNECT_MAX: Duration = Duration::from_secs(15);

/// A connection on which the node has said `connected`.
pub(crate) struct DialledConnection {
    pub(crate) read: ReadHalf,
    pub(crate) write: WriteHalf,
    pub(crate) outgoing: mpsc::Sender<Outgoing>,
    pub(crate) queue: mpsc::Receiver<Outgoing>,
    pub(crate) connected: Connected,
}

pub(crate) struct Dialler {
    pub(crate) options: Arc<Options>,
    pub(crate) credential: CurrentCredential,
    /// Key of the last connection, which the next one resumes.
    pub(crate) connection_key: Option<String>,
    /// Time of the last attempt to resume whose outcome is not known.
    pub(crate) unanswered_since: Option<Instant>,
}

impl Dialler {
    pub(crate) fn new(options: Options) -> Self {
        let options = Arc::new(options);
        let credential = CurrentCredential::new(Arc::clone(&options));
        Self { options, credential, connection_key: None, unanswered_since: None }
    }

    /// Connects, with a token of the source if there is one. If the node refuses the token, one more is
    /// fetched and tried.
    pub(crate) async fn dial(&mut self) -> Result<DialledConnection, Error> {
        self.credential.fill().await?;
        match self.attempt().await {
            Err(error) if is_of_the_token(&error) && self.credential.discard() => {
                self.credential.fill().await?;
                self.attempt().await
            }
            result => result,
        }
    }

    async fn attempt(&mut self) -> Result<DialledConnection, Error> {
        let result = timeout(CONNECT_MAX, self.open()).await.unwrap_or(Err(Error::TimedOut));
        match &result {
            Ok(dialled) => self.connection_key = Some(dialled.connected.connection_key.clone()),
            Err(error) if self.connection_key.is_some() && may_have_arrived(error) => {
                self.unanswered_since = Some(Instant::now());
            }
            Err(_) => {}
        }
        result
    }

    async fn open(&self) -> Result<DialledConnection, Error> {
        let resume = self.connection_key.as_deref();
        let (mut read, write) = handshake::connect(&self.options, self.credential.header(), resume).await?;
        let (outgoing, queue) = mpsc::channel(writer::QUEUE_FRAMES_MAX);
        let connected = first_frame(&mut read, self.options.format, &outgoing).await?;
        Ok(DialledConnection { read, write, outgoing, queue, connected })
    }
}

/// Tells whether the node may have resumed the connection although its answer did not come, also behind a
/// gateway that gave up.
fn may_have_arrived(error: &Error) -> bool {
    match error {
        Error::Io(_) | Error::TimedOut | Error::Protocol(_) => true,
        Error::Http { status, .. } => [408, 502, 504].contains(status),
        _ => false,
    }
}

fn is_of_the_token(error: &Error) -> bool {
    match error {
        Error::Http { status, .. } => *status == 401,
        Error::Refused { code, .. } | Error::Disconnected { code, .. } => {
            [code::CREDENTIAL, code::TOKEN, code::TOKEN_EXPIRED].contains(code)
        }
        _ => false,
    }
}

async fn first_frame(
    read: &mut ReadHalf,
    format: Format,
    outgoing: &mpsc::Sender<Outgoing>,
) -> Result<Connected, Error> {
    let frame = loop {
        match reader::read(read, format, outgoing).await {
            Ok(Some(frame)) if frame.op == op::HEARTBEAT => {}
            Ok(Some(frame)) => break frame,
            Ok(None) => {}
            Err(ending) => return Err(Error::Protocol(format!("ended before connected: {ending:?}"))),
        }
    };
    let (code, error) = (frame.code.unwrap_or_default(), frame.error.clone().unwrap_or_default());
    match frame.op {
        op::CONNECTED => Ok(event::connected(frame)),
        op::ERROR => Err(Error::Refused { code, error }),
        op::DISCONNECTED => Err(Error::Disconnected {
            code,
            error,
            reconnect_after_ms: frame.reconnect_after_ms.unwrap_or_default(),
        }),
        other => Err(Error::Protocol(format!("op {other} before connected"))),
    }
}
