//! The probe by which the store asks whether an id was delivered before it treats it as published.

use std::sync::{Arc, Weak};

use crate::cluster::routing::Routing;
use crate::model::{ChannelKey, Stamp};
use crate::origin::history::{BoxFuture, Deliveries};

/// Weak, since the routing owns the store.
pub(super) struct DeliveryProbe(Weak<Routing>);

impl DeliveryProbe {
    pub(super) fn by(routing: &Arc<Routing>) -> Arc<Self> {
        Arc::new(Self(Arc::downgrade(routing)))
    }
}

impl Deliveries for DeliveryProbe {
    fn wait_delivered(&self, key: ChannelKey, stamp: Stamp) -> BoxFuture<'static, ()> {
        let routing = self.0.upgrade();
        Box::pin(async move {
            if let Some(routing) = routing {
                routing.deliver_on_all_nodes(&key, stamp).await;
            }
        })
    }
}
