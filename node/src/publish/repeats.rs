//! The store asks before it takes an id for published.

use std::sync::{Arc, Weak};

use crate::cluster::routing::Routing;
use crate::model::{ChannelKey, Stamp};
use crate::origin::history::{BoxFuture, Deliveries};

/// Weak, since the routing has the store.
pub(super) struct Delivered(Weak<Routing>);

impl Delivered {
    pub(super) fn by(routing: &Arc<Routing>) -> Arc<Self> {
        Arc::new(Self(Arc::downgrade(routing)))
    }
}

impl Deliveries for Delivered {
    fn delivered(&self, key: ChannelKey, stamp: Stamp) -> BoxFuture<'static, ()> {
        let routing = self.0.upgrade();
        Box::pin(async move {
            if let Some(routing) = routing {
                routing.delivered(&key, stamp).await;
            }
        })
    }
}
