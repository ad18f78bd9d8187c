//! Waiting for a state, never for a time to pass.

use std::time::Duration;

use tokio::time::{Instant, sleep};

const STEP: Duration = Duration::from_millis(20);

/// Asks until there is an answer, and fails the test when there is none in time.
pub async fn wait_for<T>(deadline: Duration, what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let end = Instant::now() + deadline;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < end, "waited {deadline:?} in vain for {what}");
        sleep(STEP).await;
    }
}

/// Asks until the answer is yes, and fails the test when it is not in time.
pub async fn wait_until(deadline: Duration, what: &str, mut ask: impl AsyncFnMut() -> bool) {
    wait_for(deadline, what, async || ask().await.then_some(())).await;
}
