//! Memory budgets for the request and answer bodies of all connections.

mod ledger;

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use self::ledger::PermitLedger;
use crate::edge::errors::HttpRefusal;
use crate::model::AccountId;
use crate::telemetry::Limit;

/// Size up to which a body needs no permit and so is never refused: the buffers of a connection hold as much anyway.
pub(super) const SMALL_BYTES: usize = 16 * 1024;
/// Time that a request waits for a permit; it holds nothing meanwhile.
const TURN_WAIT: Duration = Duration::from_secs(2);

/// A bounded number of bytes, shared by all accounts. Cheap to clone.
#[derive(Clone)]
pub(super) struct MemoryBudget(Arc<Mutex<PermitLedger<oneshot::Sender<PermitGrant>>>>);

/// A part of the budget, returned when all of its clones are dropped. None: permit for something small.
#[derive(Clone)]
pub(super) struct MemoryPermit(Option<Arc<PermitGrant>>);

struct PermitGrant {
    budget: MemoryBudget,
    account: AccountId,
    bytes: usize,
}

impl Drop for PermitGrant {
    fn drop(&mut self) {
        self.give_back(self.bytes);
    }
}

impl PermitGrant {
    fn give_back(&mut self, bytes: usize) {
        if bytes > 0 {
            self.bytes -= bytes;
            self.budget.0.lock().give_back(&self.account, bytes);
            self.budget.grant_waiting();
        }
    }
}

impl MemoryPermit {
    /// Returns the bytes above this number.
    pub(super) fn at_most(mut self, bytes: usize) -> Self {
        let bytes = if bytes > SMALL_BYTES { bytes } else { 0 };
        if let Some(taken) = self.0.as_mut().and_then(Arc::get_mut) {
            taken.give_back(taken.bytes.saturating_sub(bytes));
        }
        self
    }
}

/// A waiting claim, which leaves the queue when dropped.
struct PermitWaiter<'a> {
    budget: &'a MemoryBudget,
    account: &'a AccountId,
    ticket: u64,
}

impl Drop for PermitWaiter<'_> {
    fn drop(&mut self) {
        let waited = self.budget.0.lock().leave(self.account, self.ticket);
        if waited {
            self.budget.grant_waiting();
        }
    }
}

impl MemoryBudget {
    /// Creates the budget. `portion` is the number of bytes that every account gets, whatever the others take.
    pub(super) fn new(bytes_max: usize, portion: usize) -> Self {
        Self(Arc::new(Mutex::new(PermitLedger::new(bytes_max, portion))))
    }

    /// Takes a permit in its turn, or fails after [`TURN_WAIT`].
    pub(super) async fn take(&self, account: &AccountId, bytes: usize) -> Result<MemoryPermit, HttpRefusal> {
        if bytes <= SMALL_BYTES {
            return Ok(MemoryPermit(None));
        }
        let (turn, met) = {
            let mut ledger = self.0.lock();
            let bytes = ledger.claim(bytes);
            if ledger.take_in_turn(account, bytes) {
                return Ok(self.permit(account, bytes));
            }
            let (waiter, met) = oneshot::channel();
            let ticket = ledger.wait(account, bytes, waiter);
            (PermitWaiter { budget: self, account, ticket }, met)
        };
        let met = tokio::time::timeout(TURN_WAIT, met).await;
        drop(turn);
        let taken = met.ok().and_then(Result::ok).ok_or_else(HttpRefusal::unanswered)?;
        Ok(MemoryPermit(Some(Arc::new(taken))))
    }

    /// Takes a permit for bytes that are in memory already, and so must not wait.
    pub(super) fn take_now(&self, account: &AccountId, bytes: usize) -> Result<MemoryPermit, HttpRefusal> {
        if bytes <= SMALL_BYTES {
            return Ok(MemoryPermit(None));
        }
        let mut ledger = self.0.lock();
        let bytes = ledger.claim(bytes);
        let taken = ledger.take(account, bytes);
        drop(ledger);
        if taken { Ok(self.permit(account, bytes)) } else { Err(HttpRefusal::unanswered()) }
    }

    fn permit(&self, account: &AccountId, bytes: usize) -> MemoryPermit {
        MemoryPermit(Some(Arc::new(PermitGrant { budget: self.clone(), account: account.clone(), bytes })))
    }

    /// Gives free bytes to waiting claims, the next one first.
    fn grant_waiting(&self) {
        loop {
            let Some((account, bytes, waiter)) = self.0.lock().next() else { return };
            let taken = PermitGrant { budget: self.clone(), account, bytes };
            if let Err(mut unwanted) = waiter.send(taken) {
                // Not by its drop, which would call this function again.
                let bytes = std::mem::take(&mut unwanted.bytes);
                self.0.lock().give_back(&unwanted.account, bytes);
            }
        }
    }

    /// Counts an answer in this budget until the socket has taken all of it, or refuses it. An answer that carries a permit in its
    /// extensions is not refused.
    pub(super) fn hold(&self, account: &AccountId, mut response: Response) -> Response {
        let permit = response.extensions_mut().remove::<MemoryPermit>();
        let permit = match (permit, response.body().size_hint().exact()) {
            (_, Some(bytes)) if bytes <= SMALL_BYTES as u64 => return response,
            (Some(permit), _) => permit,
            (None, Some(bytes)) => match self.take_now(account, usize::try_from(bytes).unwrap_or(usize::MAX))
            {
                Ok(permit) => permit,
                Err(refusal) => {
                    Limit::HttpAnswersBytes.hit();
                    return refusal.into_response();
                }
            },
            // A body of unknown size is produced as the client takes it.
            (None, None) => return response,
        };
        response.map(|body| Body::new(PermittedBody { body, permit }))
    }
}

/// Body of which every part holds the permit: hyper drops the body before the last part is written.
struct PermittedBody {
    body: Body,
    permit: MemoryPermit,
}

struct PermittedBytes {
    bytes: Bytes,
    _permit: MemoryPermit,
}

impl AsRef<[u8]> for PermittedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for PermittedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        let part = |bytes| Bytes::from_owner(PermittedBytes { bytes, _permit: self.permit.clone() });
        frame.map_ok(|frame| frame.map_data(part))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use tokio::task::JoinSet;

    use super::*;

    const KIB: usize = 1024;

    /// Budget of 200 KiB, of which one account can have 75 KiB.
    fn budget() -> MemoryBudget {
        MemoryBudget::new(200 * KIB, 25 * KIB)
    }

    fn answer(bytes: usize) -> Response {
        vec![b'x'; bytes].into_response()
    }

    #[tokio::test]
    async fn an_answer_counts_until_its_last_byte_is_gone() {
        let (budget, account) = (budget(), AccountId::new("acme"));
        let hold = |bytes| budget.hold(&account, answer(bytes));
        let mut held = hold(40 * KIB);
        assert_eq!(held.body().size_hint().exact(), Some(40 * 1024));
        assert_eq!(hold(40 * KIB).status(), 503, "there is no room for both");
        assert_eq!(hold(SMALL_BYTES).status(), 200, "a small one needs none");
        let frame = held.body_mut().frame().await.expect("a part").expect("no error");
        let bytes = frame.into_data().expect("bytes");
        drop(held);
        assert_eq!(hold(40 * KIB).status(), 503, "the part is still there");
        drop(bytes);
        assert_eq!(hold(40 * KIB).status(), 200);
    }

    #[tokio::test]
    async fn an_answer_with_its_share_is_not_refused() {
        let (budget, account) = (budget(), AccountId::new("acme"));
        let mut first = answer(50 * KIB);
        let permit = budget.take(&account, 70 * KIB).await.expect("an empty room");
        first.extensions_mut().insert(permit.at_most(50 * KIB));
        let first = budget.hold(&account, first);
        assert_eq!(first.status(), 200);
        assert!(budget.take_now(&account, 26 * KIB).is_err(), "it is counted");
        assert!(budget.take_now(&account, 25 * KIB).is_ok(), "and no more than it");
        drop(first);
        assert!(budget.take_now(&account, 75 * KIB).is_ok(), "and given back");
        let permit = budget.take(&account, 70 * KIB).await.expect("an empty room").at_most(SMALL_BYTES);
        assert!(budget.take_now(&account, 75 * KIB).is_ok(), "what turned out to be small is not counted");
        drop(permit);
        assert!(budget.0.lock().is_empty());
    }

    #[tokio::test]
    async fn an_account_leaves_room_to_the_others() {
        let budget = budget();
        let (large, other) = (AccountId::new("large"), AccountId::new("other"));
        let all = budget.take(&large, 1024 * KIB).await.expect("an empty room");
        assert!(budget.take_now(&large, SMALL_BYTES + 1).is_err());
        assert!(budget.take_now(&large, SMALL_BYTES).is_ok(), "what is small needs no room");
        let beside = budget.take_now(&other, 50 * KIB).expect("its portion, and half of what the first left");
        assert!(budget.take_now(&other, SMALL_BYTES + 1).is_err(), "and no more than that");
        drop((all, beside));
        assert!(budget.0.lock().is_empty(), "who holds nothing is forgotten");
    }

    #[tokio::test]
    async fn waiter_gets_returned_permit_and_departed_waiter_does_not() {
        let (budget, account) = (budget(), AccountId::new("acme"));
        let all = budget.take(&account, 75 * KIB).await.expect("an empty room");
        let [mut given, mut last] = [60, 20].map(|kib| Box::pin(budget.take(&account, kib * KIB)));
        assert!(one_poll(&mut given).await.is_none());
        // A waiter that has gone by the time its permit is granted.
        let (abandoned, _) = oneshot::channel();
        budget.0.lock().wait(&account, 30 * KIB, abandoned);
        assert!(one_poll(&mut last).await.is_none());
        drop(all);
        assert!(one_poll(&mut last).await.is_none(), "it was given to the first, which has not looked");
        drop(given);
        assert!(one_poll(&mut last).await.is_some_and(|taken| taken.is_ok()));
        assert!(budget.0.lock().is_empty());
    }

    #[tokio::test]
    async fn waiter_that_departs_lets_smaller_request_through() {
        let (budget, account) = (budget(), AccountId::new("acme"));
        let held = budget.take(&account, 55 * KIB).await.expect("an empty room");
        let [mut large, mut small] = [60, 20].map(|kib| Box::pin(budget.take(&account, kib * KIB)));
        assert!(one_poll(&mut large).await.is_none());
        assert!(one_poll(&mut small).await.is_none(), "it waits behind the other");
        drop(large);
        assert!(one_poll(&mut small).await.is_some_and(|taken| taken.is_ok()));
        drop(held);
        assert!(budget.0.lock().is_empty());
    }

    /// Result of polling a future once.
    async fn one_poll<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
        std::future::poll_fn(|cx| match Pin::new(&mut *future).poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn request_never_waits_for_free_memory_under_contention() {
        let budget = budget();
        let mut tasks = JoinSet::new();
        for number in 0..24_usize {
            let budget = budget.clone();
            tasks.spawn(async move {
                let account = AccountId::new(&format!("account-{}", number % 3));
                for round in 0..300 {
                    let bytes = (17 + (number * 7 + round * 5) % 58) * KIB;
                    if (number + round) % 5 == 0 {
                        // Polled once, then dropped.
                        let _ = one_poll(&mut Box::pin(budget.take(&account, bytes))).await;
                        continue;
                    }
                    let permit =
                        budget.take(&account, bytes).await.expect("all others give theirs back at once");
                    tokio::task::yield_now().await;
                    drop(permit.at_most(bytes / 2));
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("no panic");
        }
        assert!(budget.0.lock().is_empty());
    }
}
