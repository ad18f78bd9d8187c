//! Requests that wait for their answer.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fanfare_proto::frame::{Incoming, op};
use tokio::sync::oneshot;

use crate::Error;

pub(crate) type Answer = oneshot::Receiver<Result<Incoming, Error>>;

/// By request id. Its size is bounded by what the callers keep waiting for: one entry for each open request.
#[derive(Default)]
pub(crate) struct Pending(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    next_id: u64,
    over: bool,
    by_id: HashMap<u64, oneshot::Sender<Result<Incoming, Error>>>,
}

impl Pending {
    /// A fresh request id, and its answer to come.
    pub(crate) fn register(&self) -> Result<(u64, Answer), Error> {
        let mut waiting = self.lock();
        if waiting.over {
            return Err(Error::Closed);
        }
        waiting.next_id += 1;
        let id = waiting.next_id;
        let (sender, answer) = oneshot::channel();
        waiting.by_id.insert(id, sender);
        Ok((id, answer))
    }

    pub(crate) fn forget(&self, id: u64) {
        self.lock().by_id.remove(&id);
    }

    /// Gives the frame to the request that it answers, or back.
    pub(crate) fn resolve(&self, frame: Incoming) -> Option<Incoming> {
        if !matches!(frame.op, op::ACK | op::NACK | op::ATTACHED | op::DETACHED) {
            return Some(frame);
        }
        let id = frame.id.as_deref().and_then(|id| id.parse().ok());
        let Some(sender) = id.and_then(|id: u64| self.lock().by_id.remove(&id)) else {
            return Some(frame);
        };
        let answer = if frame.op == op::NACK {
            Err(Error::Refused {
                code: frame.code.unwrap_or_default(),
                error: frame.error.unwrap_or_default(),
            })
        } else {
            Ok(frame)
        };
        // A caller that gave up has dropped its end.
        let _ = sender.send(answer);
        None
    }

    /// Whoever waits, or asks from now on, is told that the connection is closed.
    pub(crate) fn end(&self) {
        let mut waiting = self.lock();
        waiting.over = true;
        waiting.by_id.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
