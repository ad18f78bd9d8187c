//! Waits for a time, where no state shows that it is over. Each function says what the time is.
//!
//! A test that can see the state that it waits for uses [`crate::wait_until`].

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// Interval of the checks of [`throughout`].
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Waits for the length of a fault that the test has made and ends itself: a cut, a stall or a stopped process.
pub async fn fault_lasts(length: Duration) {
    sleep(length).await;
}

/// Waits for the think time of a client, publisher or test that repeats something.
pub async fn pace(think_time: Duration) {
    sleep(think_time).await;
}

/// Waits for a timeout of the node under test, if no state shows its end.
pub async fn time_passes(timeout: Duration) {
    sleep(timeout).await;
}

/// Calls `check` again and again for this time, and once after it; `check` asserts the state.
pub async fn throughout(time: Duration, mut check: impl AsyncFnMut()) {
    let end = Instant::now() + time;
    loop {
        let is_last = Instant::now() >= end;
        check().await;
        if is_last {
            return;
        }
        sleep(LOOK_EVERY).await;
    }
}
