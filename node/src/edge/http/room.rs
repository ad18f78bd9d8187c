//! The bytes that the requests and answers of all connections may hold together.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody};
use axum::response::{IntoResponse as _, Response};
use hyper::body::{Frame, SizeHint};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::edge::errors::Refusal;

/// What is not larger counts as nothing and so is never refused: the buffers of a connection hold as much.
pub(super) const SMALL_BYTES: usize = 16 * 1024;
/// For a request that finds no room; it holds nothing while it waits.
const TURN_WAIT: Duration = Duration::from_secs(2);
const UNIT_BYTES: usize = 1024;

pub(super) struct Room {
    units: Arc<Semaphore>,
    units_max: u32,
}

/// A part of a room, which is free again when all that hold it are gone.
#[derive(Clone)]
pub(super) struct Share {
    units: Arc<OwnedSemaphorePermit>,
}

impl Share {
    /// Gives back what is beyond it.
    pub(super) fn at_most(mut self, bytes: usize) -> Self {
        if let Some(own) = Arc::get_mut(&mut self.units) {
            let beyond = own.num_permits().saturating_sub(units(bytes) as usize);
            drop(own.split(beyond));
        }
        self
    }
}

impl Room {
    pub(super) fn new(bytes: usize) -> Self {
        let units_max = u32::try_from(bytes / UNIT_BYTES).unwrap_or(u32::MAX);
        Self { units: Arc::new(Semaphore::new(units_max as usize)), units_max }
    }

    /// In its turn, which comes soon or not at all. What is larger than the room has it alone.
    pub(super) async fn take(&self, bytes: usize) -> Result<Share, Refusal> {
        let units = Arc::clone(&self.units).acquire_many_owned(units(bytes).min(self.units_max));
        match tokio::time::timeout(TURN_WAIT, units).await {
            Ok(Ok(units)) => Ok(Share { units: Arc::new(units) }),
            Ok(Err(_)) | Err(_) => Err(Refusal::unanswered()),
        }
    }

    /// For what is in memory already, and must not wait there.
    pub(super) fn take_now(&self, bytes: usize) -> Result<Share, Refusal> {
        let units = Arc::clone(&self.units).try_acquire_many_owned(units(bytes).min(self.units_max));
        units.map(|units| Share { units: Arc::new(units) }).map_err(|_| Refusal::unanswered())
    }

    /// The answer, counted until the socket has all of it. One that has a share among its extensions is not refused.
    pub(super) fn hold(&self, mut response: Response) -> Response {
        let share = response.extensions_mut().remove::<Share>();
        let share = match (share, response.body().size_hint().exact()) {
            (_, Some(bytes)) if bytes <= SMALL_BYTES as u64 => return response,
            (Some(share), _) => share,
            (None, Some(bytes)) => match self.take_now(usize::try_from(bytes).unwrap_or(usize::MAX)) {
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
        let room = Room::new(64 * KIB);
        let mut held = room.hold(answer(40 * KIB));
        assert_eq!(held.body().size_hint().exact(), Some(40 * 1024));
        assert_eq!(room.hold(answer(40 * KIB)).status(), 503, "there is no room for both");
        assert_eq!(room.hold(answer(SMALL_BYTES)).status(), 200, "a small one needs none");
        let frame = held.body_mut().frame().await.expect("a part").expect("no error");
        let bytes = frame.into_data().expect("bytes");
        drop(held);
        assert_eq!(room.hold(answer(40 * KIB)).status(), 503, "the part is still there");
        drop(bytes);
        assert_eq!(room.hold(answer(40 * KIB)).status(), 200);
    }

    #[tokio::test]
    async fn an_answer_with_its_share_is_not_refused() {
        let room = Room::new(64 * KIB);
        let mut first = answer(60 * KIB);
        first.extensions_mut().insert(room.take(60 * KIB).await.expect("an empty room"));
        let first = room.hold(first);
        assert_eq!(first.status(), 200);
        assert!(room.take_now(60 * KIB).is_err(), "it is counted");
        drop(first);
        assert!(room.take_now(60 * KIB).is_ok(), "and given back");
    }

    #[tokio::test]
    async fn what_is_larger_than_the_room_has_it_alone() {
        let room = Room::new(64 * KIB);
        let alone = room.take(1024 * KIB).await.expect("an empty room");
        assert!(room.take_now(SMALL_BYTES + 1).is_err());
        assert!(room.take_now(SMALL_BYTES).is_ok(), "what is small needs no room");
        drop(alone);
        assert!(room.take_now(SMALL_BYTES + 1).is_ok());
    }
}
