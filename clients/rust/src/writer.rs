//! The task that owns the writing half of a connection.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use fanfare_proto::frame::Format;
use fastwebsockets::{Frame, OpCode, Payload, WebSocketError};
use tokio::sync::mpsc;

use crate::handshake::WriteHalf;

/// Greatest number of frames that wait to be written. Beyond it a request waits; pongs and heartbeats are
/// left out.
pub(crate) const QUEUE_FRAMES_MAX: usize = 1024;
const BATCH_FRAMES_MAX: usize = 256;

pub(crate) enum Outgoing {
    Request(Vec<u8>),
    Pong(Vec<u8>),
    Close,
}

/// The time at which the last frame was sent.
#[derive(Clone)]
pub(crate) struct LastSent {
    start: Instant,
    at_ms: Arc<AtomicU64>,
}

impl LastSent {
    pub(crate) fn now() -> Self {
        Self { start: Instant::now(), at_ms: Arc::default() }
    }

    pub(crate) fn ago_ms(&self) -> u64 {
        self.elapsed_ms().saturating_sub(self.at_ms.load(Ordering::Relaxed))
    }

    fn touch(&self) {
        self.at_ms.store(self.elapsed_ms(), Ordering::Relaxed);
    }

    fn elapsed_ms(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// Writes the frames of `first`, then those of the queue, until a write fails or the queue has no sender any
/// more.
pub(crate) async fn run(
    mut half: WriteHalf,
    first: Vec<Outgoing>,
    mut queue: mpsc::Receiver<Outgoing>,
    format: Format,
    last_sent: LastSent,
) {
    let mut batch = first;
    if !batch.is_empty() && write(&mut half, &mut batch, format).await.is_err() {
        return;
    }
    while queue.recv_many(&mut batch, BATCH_FRAMES_MAX).await > 0 {
        if write(&mut half, &mut batch, format).await.is_err() {
            return;
        }
        last_sent.touch();
    }
}

async fn write(
    half: &mut WriteHalf,
    batch: &mut Vec<Outgoing>,
    format: Format,
) -> Result<(), WebSocketError> {
    for outgoing in batch.drain(..) {
        half.write_frame(frame(outgoing, format)).await?;
    }
    half.flush().await
}

fn frame(outgoing: Outgoing, format: Format) -> Frame<'static> {
    match outgoing {
        Outgoing::Request(bytes) => {
            let opcode = match format {
                Format::Json => OpCode::Text,
                Format::MsgPack => OpCode::Binary,
            };
            Frame::new(true, opcode, None, Payload::Owned(bytes))
        }
        Outgoing::Pong(bytes) => Frame::pong(Payload::Owned(bytes)),
        Outgoing::Close => Frame::close(1000, b""),
    }
}
