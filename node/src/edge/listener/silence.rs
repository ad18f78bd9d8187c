//! The end of a connection on which no further request comes, or not the whole of its head.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::model::Limits;
use crate::telemetry::Limit;

/// The requests of one connection: odd while one is answered.
#[derive(Debug, Clone, Default)]
pub(super) struct Turns(Arc<AtomicUsize>);

/// One request, until it is dropped.
pub(super) struct Turn(Turns);

impl Turns {
    pub(super) fn begin(&self) -> Turn {
        self.0.fetch_add(1, Ordering::Relaxed);
        Turn(self.clone())
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Watches the reads of one connection. It costs a timer while a request is waited for, and nothing else.
pub(super) struct Silence {
    idle: Duration,
    head: Duration,
    turns: Turns,
    waiting: Option<Waiting>,
}

struct Waiting {
    /// Of the turns, when it began.
    count: usize,
    /// Something of the head has come.
    has_begun: bool,
    end: Pin<Box<Sleep>>,
}

impl Silence {
    pub(super) fn new(limits: &Limits) -> Self {
        let (idle, head) =
            (Duration::from_millis(limits.http_idle_ms), Duration::from_millis(limits.header_ms));
        Self { idle, head, turns: Turns::default(), waiting: None }
    }

    pub(super) fn turns(&self) -> Turns {
        self.turns.clone()
    }

    /// Nothing is there to be read: whether that has lasted too long. A body has a time of its own.
    pub(super) fn is_over(&mut self, cx: &mut Context<'_>) -> bool {
        let idle = self.idle;
        let Some(waiting) = self.waiting(idle, false) else { return false };
        let is_over = waiting.end.as_mut().poll(cx).is_ready();
        if is_over {
            let limit = if waiting.has_begun { Limit::HeaderMs } else { Limit::HttpIdleMs };
            limit.hit();
        }
        is_over
    }

    /// Something came.
    pub(super) fn broken(&mut self) {
        let head = self.head;
        let Some(waiting) = self.waiting(head, true) else { return };
        if !waiting.has_begun {
            waiting.has_begun = true;
            waiting.end.as_mut().reset(Instant::now() + head);
        }
    }

    /// The request that the connection waits for, if any.
    fn waiting(&mut self, time: Duration, has_begun: bool) -> Option<&mut Waiting> {
        let count = self.turns.count();
        let is_answering = count % 2 == 1;
        self.waiting.take_if(|waiting| is_answering || waiting.count != count);
        if is_answering {
            return None;
        }
        let begin = || Waiting { count, has_begun, end: Box::pin(sleep_until(Instant::now() + time)) };
        Some(self.waiting.get_or_insert_with(begin))
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;
    use std::task::Poll;

    use super::*;

    const IDLE: Duration = Duration::from_secs(75);
    const HEAD: Duration = Duration::from_secs(10);

    fn silence() -> Silence {
        Silence::new(&Limits { http_idle_ms: 75_000, header_ms: 10_000, ..Limits::default() })
    }

    async fn over(silence: &mut Silence) {
        poll_fn(|cx| if silence.is_over(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    async fn is_over_after(silence: &mut Silence, time: Duration) -> bool {
        tokio::time::timeout(time, over(silence)).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_may_be_idle_for_its_time() {
        let mut silence = silence();
        assert!(!is_over_after(&mut silence, IDLE - Duration::from_secs(1)).await);
        assert!(is_over_after(&mut silence, Duration::from_secs(2)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_its_time_from_its_first_byte() {
        let mut silence = silence();
        assert!(!is_over_after(&mut silence, IDLE - Duration::from_secs(1)).await);
        silence.broken();
        for _ in 0..9 {
            assert!(!is_over_after(&mut silence, Duration::from_secs(1)).await);
            silence.broken();
        }
        assert!(is_over_after(&mut silence, HEAD - Duration::from_secs(8)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_answered_has_no_end_and_the_next_its_own() {
        let mut silence = silence();
        silence.broken();
        let turn = silence.turns().begin();
        assert!(!is_over_after(&mut silence, IDLE * 9).await);
        silence.broken();
        assert!(!is_over_after(&mut silence, IDLE * 9).await, "its body");
        drop(turn);
        assert!(!is_over_after(&mut silence, IDLE - Duration::from_secs(1)).await);
        // One whose head and answer came between two reads.
        drop(silence.turns().begin());
        assert!(!is_over_after(&mut silence, IDLE - Duration::from_secs(1)).await);
        assert!(is_over_after(&mut silence, Duration::from_secs(2)).await);
    }
}
