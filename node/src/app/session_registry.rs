//! Session registry of the node, with the sessions of other nodes.

use std::sync::Arc;
use std::time::Duration;

use super::cluster::BoundGossip;
use super::{StartError, files};
use crate::cluster::routing::{PeerSessionHandler, Routing};
use crate::config::Config;
use crate::edge::socket::{SessionRegistry, Shards};
use crate::hub::Hub;
use crate::model::{Clock, ClosedSession, SessionTakeover, SocketlessTakeover};
use crate::origin::history::PreviousIncarnation;

/// Opens the registry. Nodes of a cluster share the secret of connection keys; a single node keeps its own.
pub(super) fn open(
    config: &Config,
    hub: &Hub,
    previous: &[PreviousIncarnation],
    shards: &Shards,
    clock: &Clock,
    cluster: Option<(&BoundGossip, &Arc<Routing>)>,
) -> Result<Arc<SessionRegistry>, StartError> {
    let keys = match cluster {
        Some((gossip, _)) => gossip.connection_keys(),
        None => {
            let at = StartError::in_data(&config.data_dir.join("connection-key"));
            files::connection_keys(&config.data_dir).map_err(at)?
        }
    };
    let previous = PreviousIncarnation::with_passed_ms(previous);
    let previous = previous.map(|(followed, passed_ms)| (followed.incarnation, passed_ms)).collect();
    let handles = shards.handles();
    let session_registry =
        SessionRegistry::new(keys, hub.incarnation(), previous, handles, clock.clone(), &config.limits);
    let Some((_, routing)) = cluster else { return Ok(Arc::new(session_registry)) };
    let window = Duration::from_millis(config.limits.resume_window_ms);
    let peers = Arc::clone(routing);
    let session_registry =
        Arc::new(session_registry.with_peer_incarnations(Box::new(move |incarnation| {
            peers.incarnation_status(incarnation, window)
        })));
    routing.set_connections(Arc::clone(&session_registry) as Arc<dyn PeerSessionHandler>);
    Ok(session_registry)
}

impl PeerSessionHandler for SessionRegistry {
    fn taken_over_remotely(&self, taken: &SessionTakeover) -> Option<SocketlessTakeover> {
        self.record_peer_takeover(taken)
    }

    fn closed_remotely(&self, over: &ClosedSession) {
        self.record_peer_close(over);
    }

    fn not_open(&self, not_open: SocketlessTakeover) -> Option<(u64, SocketlessTakeover)> {
        self.handle_takeover_miss(not_open)
    }
}
