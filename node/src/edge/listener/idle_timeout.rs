//! Timeout of a connection on which no further request arrives, or only part of its head.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Context;
use std::time::Duration;

use tokio::time::{Instant, Sleep, sleep_until};

use crate::model::Limits;
use crate::telemetry::Limit;

/// Request counter of one connection: odd while a request is being answered.
#[derive(Debug, Clone, Default)]
pub(super) struct RequestCounter(Arc<AtomicUsize>);

/// A request under way, until dropped.
pub(super) struct ActiveRequest(RequestCounter);

impl RequestCounter {
    pub(super) fn begin(&self) -> ActiveRequest {
        self.0.fetch_add(1, Ordering::Relaxed);
        ActiveRequest(self.clone())
    }

    fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for ActiveRequest {
    fn drop(&mut self) {
        self.0.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Idle timeout over the reads of one connection. Needs a timer only while waiting for a request.
pub(super) struct IdleTimeout {
    idle: Duration,
    head: Duration,
    turns: RequestCounter,
    waiting: Option<IdlePeriod>,
}

struct IdlePeriod {
    /// Value of the request counter at the beginning of the wait.
    count: usize,
    /// True once part of a head has arrived.
    has_begun: bool,
    end: Pin<Box<Sleep>>,
}

impl IdleTimeout {
    pub(super) fn new(limits: &Limits) -> Self {
        let (idle, head) =
            (Duration::from_millis(limits.http_idle_ms), Duration::from_millis(limits.header_ms));
        Self { idle, head, turns: RequestCounter::default(), waiting: None }
    }

    pub(super) fn turns(&self) -> RequestCounter {
        self.turns.clone()
    }

    /// Called when there is nothing to read. True if the wait has lasted too long. Bodies have a timeout of their own.
    pub(super) fn has_expired(&mut self, cx: &mut Context<'_>) -> bool {
        let idle = self.idle;
        let Some(waiting) = self.waiting(idle, false) else { return false };
        let has_expired = waiting.end.as_mut().poll(cx).is_ready();
        if has_expired {
            let limit = if waiting.has_begun { Limit::HeaderMs } else { Limit::HttpIdleMs };
            limit.hit();
        }
        has_expired
    }

    /// Called when bytes have arrived.
    pub(super) fn record_activity(&mut self) {
        let head = self.head;
        let Some(waiting) = self.waiting(head, true) else { return };
        if !waiting.has_begun {
            waiting.has_begun = true;
            waiting.end.as_mut().reset(Instant::now() + head);
        }
    }

    /// The wait for the next request; none while a request is under way.
    fn waiting(&mut self, time: Duration, has_begun: bool) -> Option<&mut IdlePeriod> {
        let count = self.turns.count();
        let is_answering = count % 2 == 1;
        self.waiting.take_if(|waiting| is_answering || waiting.count != count);
        if is_answering {
            return None;
        }
        let begin = || IdlePeriod { count, has_begun, end: Box::pin(sleep_until(Instant::now() + time)) };
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

    fn silence() -> IdleTimeout {
        IdleTimeout::new(&Limits { http_idle_ms: 75_000, header_ms: 10_000, ..Limits::default() })
    }

    async fn expired(silence: &mut IdleTimeout) {
        poll_fn(|cx| if silence.has_expired(cx) { Poll::Ready(()) } else { Poll::Pending }).await;
    }

    async fn expires_within(silence: &mut IdleTimeout, time: Duration) -> bool {
        tokio::time::timeout(time, expired(silence)).await.is_ok()
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_may_be_idle_for_its_time() {
        let mut silence = silence();
        assert!(!expires_within(&mut silence, IDLE - Duration::from_secs(1)).await);
        assert!(expires_within(&mut silence, Duration::from_secs(2)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_has_its_time_from_its_first_byte() {
        let mut silence = silence();
        assert!(!expires_within(&mut silence, IDLE - Duration::from_secs(1)).await);
        silence.record_activity();
        for _ in 0..9 {
            assert!(!expires_within(&mut silence, Duration::from_secs(1)).await);
            silence.record_activity();
        }
        assert!(expires_within(&mut silence, HEAD - Duration::from_secs(8)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_is_answered_has_no_end_and_the_next_its_own() {
        let mut silence = silence();
        silence.record_activity();
        let turn = silence.turns().begin();
        assert!(!expires_within(&mut silence, IDLE * 9).await);
        silence.record_activity();
        assert!(!expires_within(&mut silence, IDLE * 9).await, "its body");
        drop(turn);
        assert!(!expires_within(&mut silence, IDLE - Duration::from_secs(1)).await);
        // A request whose head and answer came between two reads.
        drop(silence.turns().begin());
        assert!(!expires_within(&mut silence, IDLE - Duration::from_secs(1)).await);
        assert!(expires_within(&mut silence, Duration::from_secs(2)).await);
    }
}
