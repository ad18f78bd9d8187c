//! Single flight: many callers share one run of a piece of work.

use std::future::Future;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// Single flight. A caller that asks during a run shares the next run, which begins afterwards: no answer is older than
/// its question.
#[derive(Debug)]
pub struct SingleFlight<T> {
    /// Callers that wait for the next run; none while no run is in progress.
    next: Mutex<Option<Vec<oneshot::Sender<T>>>>,
}

impl<T> Default for SingleFlight<T> {
    fn default() -> Self {
        Self { next: Mutex::default() }
    }
}

impl<T: Clone> SingleFlight<T> {
    /// The receiver of the answer, and whether the caller has to `SingleFlight::run` the work.
    pub fn ask(&self) -> (oneshot::Receiver<T>, bool) {
        let (answer, answered) = oneshot::channel();
        let mut next = self.next.lock();
        let is_first = next.is_none();
        next.get_or_insert_default().push(answer);
        (answered, is_first)
    }

    /// Runs the work until no caller waits. If dropped before, the waiting callers get no answer.
    pub async fn run<F: Future<Output = T>>(&self, work: impl Fn() -> F) {
        let mut running = FlightGuard { flight: self, is_complete: false };
        while let Some(answers) = running.next() {
            let done = work().await;
            for answer in answers {
                // A caller that has gone needs no answer.
                answer.send(done.clone()).ok();
            }
        }
    }
}

struct FlightGuard<'a, T> {
    flight: &'a SingleFlight<T>,
    is_complete: bool,
}

impl<T> FlightGuard<'_, T> {
    fn next(&mut self) -> Option<Vec<oneshot::Sender<T>>> {
        let mut next = self.flight.next.lock();
        let answers = next.take().filter(|answers| !answers.is_empty());
        self.is_complete = answers.is_none();
        *next = answers.is_some().then(Vec::new);
        answers
    }
}

impl<T> Drop for FlightGuard<'_, T> {
    fn drop(&mut self) {
        if !self.is_complete {
            *self.flight.next.lock() = None;
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
        let (flight, begun, gate) = (SingleFlight::default(), AtomicU64::new(0), Semaphore::new(0));
        let work = || async {
            let number = begun.fetch_add(1, Ordering::SeqCst) + 1;
            gate.acquire().await.expect("never closed").forget();
            number
        };
        let (first, is_first) = flight.ask();
        let (beside, is_beside) = flight.ask();
        assert!(is_first && !is_beside);
        let callers = async {
            while begun.load(Ordering::SeqCst) == 0 {
                tokio::task::yield_now().await;
            }
            let later: Vec<_> = (0..9).map(|_| flight.ask()).collect();
            assert!(later.iter().all(|(_, is_first)| !is_first));
            gate.add_permits(2);
            assert_eq!((first.await, beside.await), (Ok(1), Ok(1)));
            for (answered, _) in later {
                assert_eq!(answered.await, Ok(2), "begun after it was asked for");
            }
        };
        tokio::join!(flight.run(work), callers);
        let (last, is_first) = flight.ask();
        assert!(is_first, "nothing is under way");
        gate.add_permits(1);
        flight.run(work).await;
        assert_eq!(last.await, Ok(3));
    }

    #[tokio::test]
    async fn dropped_single_flight_fails_all_waiting_callers() {
        let flight = SingleFlight::<()>::default();
        let (first, _) = flight.ask();
        let mut run = Box::pin(flight.run(std::future::pending));
        assert!(futures_util::poll!(&mut run).is_pending());
        let (second, is_first) = flight.ask();
        assert!(!is_first);
        drop(run);
        assert!(first.await.is_err() && second.await.is_err());
        assert!(flight.ask().1);
    }
}
