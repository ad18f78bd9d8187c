//! Drain of a node that leaves a cluster: a peer takes over the messages that its clients may have missed, and the clients reconnect
//! elsewhere.

use std::time::{Duration, Instant};

use crate::cluster::routing::Routing;
use crate::edge::socket::Shards;

/// Time left for the last of the asked clients, out of the time for all.
const LAST: Duration = Duration::from_millis(1_500);
/// Interval of the check for clients that have left.
const LOOK: Duration = Duration::from_millis(20);

/// Steps after the clients: nonces, leaves, the outbox, counts, the store, the goodbye, and the last tasks.
const STEPS: u32 = 7;
/// Minimal time of each step, even after others have hung.
const STEP_MIN: Duration = Duration::from_millis(200);
/// Maximal time reserved for the steps. The reserve is a tenth of the stop time, at least what the steps need, and at most this or half of
/// the stop time.
const STEPS_MAX: Duration = Duration::from_secs(3);

/// The time that a stop may take.
pub(super) struct StopTime {
    begun: Instant,
    timeout: Duration,
    /// Number of steps to come.
    steps: u32,
}

impl StopTime {
    pub(super) fn begin(timeout: Duration) -> Self {
        Self { begun: Instant::now(), timeout, steps: STEPS }
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.begun.elapsed())
    }

    /// Time left until so many fifths of the stop time are over.
    fn until_fifths(&self, fifths: u32) -> Duration {
        (self.timeout / 5 * fifths).saturating_sub(self.begun.elapsed())
    }

    /// Time left for clients.
    pub(super) fn for_clients(&self) -> Duration {
        let of_steps = (self.timeout / 10).clamp(STEP_MIN * STEPS, STEPS_MAX).min(self.timeout / 2);
        self.left().saturating_sub(of_steps)
    }

    /// Time for the next step: half of the rest, so that a step that hangs leaves time to the others.
    pub(super) fn for_step(&mut self) -> Duration {
        self.steps = self.steps.saturating_sub(1);
        let left = self.left();
        (left / 2).min(left.saturating_sub(STEP_MIN * self.steps)).max(STEP_MIN)
    }
}

/// Asks all clients to reconnect elsewhere, over three fifths of the stop time, while a peer takes over the messages that they may have
/// missed. Does nothing without peers.
pub(super) async fn move_clients(routing: &Routing, shards: &Shards, time: &StopTime) {
    if !routing.begin_to_leave() {
        return;
    }
    let left = time.until_fifths(3);
    shards.ask_all_to_reconnect(left.saturating_sub(LAST));
    let disconnected = async {
        while shards.connection_count() > 0 {
            tokio::time::sleep(LOOK).await;
        }
    };
    if tokio::time::timeout(left, async { tokio::join!(routing.hand_off_channels(), disconnected) })
        .await
        .is_err()
    {
        tracing::warn!(
            connections = shards.connection_count(),
            "drain deadline passed: clients still connected"
        );
    }
    // Channels attached to since, and those taken over from a node that has ended since.
    if tokio::time::timeout(time.until_fifths(4), routing.hand_off_channels()).await.is_err() {
        tracing::warn!("drain deadline passed: channel handoff incomplete");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tolerance of the tests for delays.
    const SLACK: Duration = Duration::from_millis(900);

    fn begin(timeout_ms: u64) -> StopTime {
        StopTime::begin(Duration::from_millis(timeout_ms))
    }

    /// Simulates the passing of time.
    fn pass(time: &mut StopTime, passed: Duration) -> Duration {
        time.begun -= passed;
        passed
    }

    #[track_caller]
    fn assert_is(what: Duration, ms: u64) {
        let expected = Duration::from_millis(ms);
        assert!(what <= expected && what + SLACK >= expected, "{what:?} and not {expected:?}");
    }

    #[test]
    fn clients_have_what_is_not_kept_for_the_steps_behind_them() {
        for (timeout_ms, clients_ms) in
            [(100_000, 97_000), (25_000, 22_500), (5_000, 3_600), (2_400, 1_200), (1_000, 500), (0, 0)]
        {
            assert_is(begin(timeout_ms).for_clients(), clients_ms);
        }
        let mut time = begin(25_000);
        assert_is(time.until_fifths(3), 15_000);
        pass(&mut time, Duration::from_secs(16));
        assert_is(time.until_fifths(3), 0);
        assert_is(time.until_fifths(4), 4_000);
        assert_is(time.for_clients(), 6_500);
    }

    #[test]
    fn drain_step_gets_half_of_the_rest_and_spares_later_steps() {
        assert_is(begin(25_000).for_step(), 12_500);
        let mut time = begin(25_000);
        for (passed, step_ms) in [(22_500, 1_250), (1_250, 450), (450, 200), (200, 200)] {
            pass(&mut time, Duration::from_millis(passed));
            assert_is(time.for_step(), step_ms);
        }
    }

    #[test]
    fn a_stop_at_which_everything_hangs_keeps_to_its_time() {
        for timeout_ms in [2_800, 5_000, 25_000, 100_000] {
            let (mut time, mut passed) = (begin(timeout_ms), Duration::ZERO);
            let clients = time.for_clients();
            passed += pass(&mut time, clients);
            for _ in 0..STEPS {
                let step = time.for_step();
                assert!(step >= STEP_MIN);
                passed += pass(&mut time, step);
            }
            assert!(passed <= time.timeout, "{passed:?} of {timeout_ms} ms");
        }
    }
}
