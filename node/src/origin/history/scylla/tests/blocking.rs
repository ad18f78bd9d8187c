//! Stores do not block other work on their runtime.

use std::future::poll_fn;
use std::task::Poll;

use futures_util::future::join_all;
use tokio::sync::oneshot;

use super::*;

const ROWS: u64 = 1_000;

/// The driver runs on the same thread, so a read that blocked it would never get an answer.
#[test]
fn reads_leave_the_thread_that_they_are_on_to_others() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let alone = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let clock = Clock::system();
    let store = alone.block_on(ScyllaStore::open(
        fixture.connection.clone(),
        KeyspaceFixture::options(),
        clock.clone(),
    ));
    let store = store.expect("the store opens");
    let key = channel("acme", "a");
    alone.block_on(async move {
        let (send, stored) = oneshot::channel();
        let done = Box::new(move |result| send.send(result).expect("it waits"));
        store.append(messages(&key, clock.now_ms(), 1..=ROWS), Some(72), done);
        stored.await.expect("answered").expect("stored");
        // No two queries are equal, so each is a read of its own.
        let limits = 101..=120;
        let queries = limits.clone().map(|limit| HistoryQuery { limit, ..query(&key) });
        let mut reads = std::pin::pin!(join_all(queries.map(|query| store.read(query))));
        let mut turns_of_others = 0;
        let pages = poll_fn(|context| match reads.as_mut().poll(context) {
            Poll::Ready(pages) => Poll::Ready(pages),
            Poll::Pending => {
                turns_of_others += 1;
                context.waker().wake_by_ref();
                Poll::Pending
            }
        });
        let pages = tokio::time::timeout(PATIENCE, pages).await.expect("answered");
        for (limit, page) in limits.zip(pages) {
            let seen = sequences(&page.expect("read"));
            assert!(seen.into_iter().eq((1..=ROWS).rev().take(limit)), "{limit}");
        }
        assert!(turns_of_others > 0);
        // On another thread, since the shutdown waits for work on this one.
        tokio::task::spawn_blocking(move || store.shutdown()).await.expect("it shuts down");
    });
}
