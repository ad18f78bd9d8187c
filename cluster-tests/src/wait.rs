//! Waits for a state, never for a time.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout_at};

const STEP: Duration = Duration::from_millis(20);

/// Asks until there is an answer, and fails the test without one in time.
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

/// Asks until the answer is true, and fails the test otherwise.
pub async fn wait_until(deadline: Duration, what: &str, mut ask: impl AsyncFnMut() -> bool) {
    wait_for(deadline, what, async || ask().await.then_some(())).await;
}

/// Waits until each of these counts has grown by `by`. One whose sender is dropped is not waited for.
pub(crate) async fn until_each_grows(deadline: Duration, counts: &[watch::Receiver<u64>], by: u64) {
    let end = Instant::now() + deadline;
    let goals: Vec<u64> = counts.iter().map(|count| *count.borrow() + by).collect();
    for (count, goal) in counts.iter().zip(goals) {
        let mut count = count.clone();
        let is_in_time = timeout_at(end, count.wait_for(|count| *count >= goal)).await.is_ok();
        assert!(is_in_time, "waited {deadline:?} in vain for {goal}, it is {}", *count.borrow());
    }
}
