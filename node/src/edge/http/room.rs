//! The bytes that the requests and answers of all connections may hold together.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::edge::errors::Refusal;
use crate::model::AccountId;

/// What is not larger counts as nothing and so is never refused: the buffers of a connection hold as much.
pub(super) const SMALL_BYTES: usize = 16 * 1024;
/// For a request that finds no room; it holds nothing while it waits.
const TURN_WAIT: Duration = Duration::from_secs(2);
const UNIT_BYTES: usize = 1024;

pub(super) struct Room {
    units: Arc<Semaphore>,
    account_units_max: u32,
    accounts: Mutex<HashMap<AccountId, Weak<Semaphore>>>,
}

/// A part of a room, which is free again when all that hold it are gone.
#[derive(Clone)]
pub(super) struct Share(Arc<Units>);

struct Units {
    all: OwnedSemaphorePermit,
    of_account: OwnedSemaphorePermit,
}

impl Share {
    /// Gives back what is beyond it.
    pub(super) fn at_most(mut self, bytes: usize) -> Self {
        if let Some(Units { all, of_account }) = Arc::get_mut(&mut self.0) {
            let beyond = all.num_permits().saturating_sub(units(bytes) as usize);
            drop((all.split(beyond), of_account.split(beyond)));
        }
        self
    }
}

impl Room {
    pub(super) fn new(bytes: usize) -> Self {
        let units = u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX);
        Self {
            units: Arc::new(Semaphore::new(units as usize)),
            account_units_max: units / 4 * 3,
            accounts: Mutex::default(),
        }
    }

    /// In its turn, which comes soon or not at all. An account has at most three quarters of the room, so that it leaves
    /// something to the others; what is larger has all of these.
    pub(super) async fn take(&self, account: &AccountId, bytes: usize) -> Result<Share, Refusal> {
        let (all, of_account, units) = self.semaphores(account, bytes);
        let turn = async {
            let of_account = of_account.acquire_many_owned(units).await.ok()?;
            let all = all.acquire_many_owned(units).await.ok()?;
            Some(Share(Arc::new(Units { all, of_account })))
        };
        tokio::time::timeout(TURN_WAIT, turn).await.ok().flatten().ok_or_else(Refusal::unanswered)
    }

    /// For what is in memory already, and must not wait there.
    pub(super) fn take_now(&self, account: &AccountId, bytes: usize) -> Result<Share, Refusal> {
        let (all, of_account, units) = self.semaphores(account, bytes);
        let of_account = of_account.try_acquire_many_owned(units).map_err(|_| Refusal::unanswered())?;
        let all = all.try_acquire_many_owned(units).map_err(|_| Refusal::unanswered())?;
        Ok(Share(Arc::new(Units { all, of_account })))
    }

    fn semaphores(&self, account: &AccountId, bytes: usize) -> (Arc<Semaphore>, Arc<Semaphore>, u32) {
        let mut accounts = self.accounts.lock();
        let of_account = accounts.get(account).and_then(Weak::upgrade).unwrap_or_else(|| {
            accounts.retain(|_, semaphore| semaphore.strong_count() > 0);
            let semaphore = Arc::new(Semaphore::new(self.account_units_max as usize));
            accounts.insert(account.clone(), Arc::downgrade(&semaphore));
            semaphore
        });
        (Arc::clone(&self.units), of_account, units(bytes).min(self.account_units_max))
    }

    /// The answer, counted until the socket has all of it. One that has a share among its extensions is not refused.
    pub(super) fn hold(&self, account: &AccountId, mut response: Response) -> Response {
        let share = response.extensions_mut().remove::<Share>();
        let share = match (share, response.body().size_hint().exact()) {
            (_, Some(bytes)) if bytes <= SMALL_BYTES as u64 => return response,
            (Some(share), _) => share,
            (None, Some(bytes)) => match self.take_now(account, usize::try_from(bytes).unwrap_or(usize::MAX))
            {
                Ok(share) => share,
                Err(refusal) => return refusal.into_response(),
            },
            // It is made as the client takes it.
            (None, None) => return response,
        };
        response.map(|body| Body::new(Held { body, share }))
    }
}

fn units(bytes: usize) -> u32 {
    if bytes <= SMALL_BYTES {
        return 0;
    }
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// A body of which every part has the share: hyper lets go of the body before the last part is written.
struct Held {
    body: Body,
    share: Share,
}

struct Part {
    bytes: Bytes,
    _share: Share,
}

impl AsRef<[u8]> for Part {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl HttpBody for Held {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        let part = |bytes| Bytes::from_owner(Part { bytes, _share: self.share.clone() });
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

    use super::*;

    const KIB: usize = 1024;

    fn answer(bytes: usize) -> Response {
        vec![b'x'; bytes].into_response()
    }

    #[tokio::test]
    async fn an_answer_counts_until_its_last_byte_is_gone() {
        let (room, account) = (Room::new(100 * KIB), AccountId::new("acme"));
        let hold = |bytes| room.hold(&account, answer(bytes));
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
        let (room, account) = (Room::new(100 * KIB), AccountId::new("acme"));
        let mut first = answer(60 * KIB);
        let share = room.take(&account, 70 * KIB).await.expect("an empty room");
        first.extensions_mut().insert(share.at_most(50 * KIB));
        let first = room.hold(&account, first);
        assert_eq!(first.status(), 200);
        assert!(room.take_now(&account, 30 * KIB).is_err(), "it is counted");
        assert!(room.take_now(&account, 25 * KIB).is_ok(), "and no more than it");
        drop(first);
        assert!(room.take_now(&account, 75 * KIB).is_ok(), "and given back");
    }

    #[tokio::test]
    async fn an_account_leaves_room_to_the_others() {
        let room = Room::new(100 * KIB);
        let (large, other) = (AccountId::new("large"), AccountId::new("other"));
        let all = room.take(&large, 1024 * KIB).await.expect("an empty room");
        assert!(room.take_now(&large, SMALL_BYTES + 1).is_err());
        assert!(room.take_now(&large, SMALL_BYTES).is_ok(), "what is small needs no room");
        let beside = room.take_now(&other, 25 * KIB).expect("a quarter is left");
        assert!(room.take_now(&other, SMALL_BYTES + 1).is_err(), "and no more than that");
        drop((all, beside));
        assert!(room.take_now(&large, 75 * KIB).is_ok());
        assert_eq!(room.accounts.lock().len(), 1, "who holds nothing is forgotten");
    }
}
