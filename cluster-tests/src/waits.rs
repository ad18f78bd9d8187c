//! Times that a test lets pass although no state shows when they are over: each says what passes.
//!
//! A test that can see what it waits for uses [`crate::wait_until`].

use std::time::Duration;

use tokio::time::{Instant, sleep};

/// The time from one look of [`throughout`] to the next.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Holds a fault for its length: a cut, a stall or a stopped process that the test has made, and ends itself.
pub async fn fault_lasts(length: Duration) {
    sleep(length).await;
}

/// Lets the think time pass of a client, publisher or test that does something again and again.
pub async fn pace(think_time: Duration) {
    sleep(think_time).await;
}

/// Lets a timeout of the node under test run out, where no state shows that it has.
pub async fn time_passes(timeout: Duration) {
    sleep(timeout).await;
}

/// Checks again and again, for so long and once after it, that something stays as it is; `check` asserts it.
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
