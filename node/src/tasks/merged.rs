//! What many ask for at a time, done once for all of them.

use std::future::Future;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Who asks while it is being done shares the next time, which begins after that: no answer is older than its question.
#[derive(Debug)]
pub struct Merged<T> {
    /// Who waits for the next time; none while nothing is under way.
    next: Mutex<Option<Vec<oneshot::Sender<T>>>>,
}

impl<T> Default for Merged<T> {
    fn default() -> Self {
        Self { next: Mutex::default() }
    }
}

impl<T: Clone> Merged<T> {
    /// Where the answer comes, and whether the one who asked has to [`Merged::run`] for it.
    pub fn ask(&self) -> (oneshot::Receiver<T>, bool) {
        let (answer, answered) = oneshot::channel();
        let mut next = self.next.lock();
        let is_first = next.is_none();
        next.get_or_insert_default().push(answer);
        (answered, is_first)
    }

    /// Does it until nobody asks any more. Where it is dropped before, nobody who waits has an answer.
    pub async fn run<F: Future<Output = T>>(&self, work: impl Fn() -> F) {
        let mut running = Running { merged: self, is_over: false };
        while let Some(answers) = running.next() {
            let done = work().await;
            for answer in answers {
                // Who has gone needs no answer.
                answer.send(done.clone()).ok();
            }
        }
    }
}

struct Running<'a, T> {
    merged: &'a Merged<T>,
    is_over: bool,
}

impl<T> Running<'_, T> {
    fn next(&mut self) -> Option<Vec<oneshot::Sender<T>>> {
        let mut next = self.merged.next.lock();
        let answers = next.take().filter(|answers| !answers.is_empty());
        self.is_over = answers.is_none();
        *next = answers.is_some().then(Vec::new);
        answers
    }
}

impl<T> Drop for Running<'_, T> {
    fn drop(&mut self) {
        if !self.is_over {
            *self.merged.next.lock() = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tokio::sync::Semaphore;

    use super::*;

    #[tokio::test]
    async fn callers_during_single_flight_share_the_next_request() {
        let (merged, begun, gate) = (Merged::default(), AtomicU64::new(0), Semaphore::new(0));
        let work = || async {
            let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
            gate.acquire().await.expect("never closed").forget();
            number
        };
        let (first, is_first) = merged.ask();
        let (beside, is_beside) = merged.ask();
        assert!(is_first && !is_beside);
        let asked = async {
            while begun.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
            let later: Vec<_> = (0..9).map(|_| merged.ask()).collect();
            assert!(later.iter().all(|(_, is_first)| !is_first));
            gate.add_permits(2);
            assert_eq!((first.await, beside.await), (Ok(1), Ok(1)));
            for (answered, _) in later {
                assert_eq!(answered.await, Ok(2), "begun after it was asked for");
            }
        };
        tokio::join!(merged.run(work), asked);
        let (last, is_first) = merged.ask();
        assert!(is_first, "nothing is under way");
        gate.add_permits(1);
        merged.run(work).await;
        assert_eq!(last.await, Ok(3));
    }

    #[tokio::test]
    async fn dropped_single_flight_fails_all_waiting_callers() {
        let merged = Merged::<()>::default();
        let (first, _) = merged.ask();
        let mut run = Box::pin(merged.run(std::future::pending));
        assert!(futures_util::poll!(&mut run).is_pending());
        let (second, is_first) = merged.ask();
        assert!(!is_first);
        drop(run);
        assert!(first.await.is_err() && second.await.is_err());
        assert!(merged.ask().1);
    }
}
