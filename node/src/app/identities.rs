//! Connections over their sockets, also over those of other nodes.

use std::sync::Arc;
use std::time::Duration;

use super::cluster::Gossip;
use super::{StartError, files};
use crate::cluster::routing::{Connections, Routing};
use crate::config::Config;
use crate::edge::socket::{Identities, Shards};
use crate::hub::Hub;
use crate::model::{Clock, NotOpen, Over, TakenUp};
use crate::origin::history::FormerRun;

/// Nodes of a cluster have the secret of connection keys in common; one that is alone keeps its own.
pub(super) fn open(
    config: &Config,
    hub: &Hub,
    former: &[FormerRun],
    shards: &Shards,
    clock: &Clock,
    cluster: Option<(&Gossip, &Arc<Routing>)>,
) -> Result<Arc<Identities>, StartError> {
    let keys = match cluster {
        Some((gossip, _)) => gossip.connection_keys(),
        None => {
            let at = StartError::in_data(&config.data_dir.join("connection-key"));
            files::connection_keys(&config.data_dir).map_err(at)?
        }
    };
    let former = FormerRun::with_passed_ms(former);
    let former = former.map(|(run, passed_ms)| (run.incarnation, passed_ms)).collect();
    let handles = shards.handles();
    let identities = Identities::new(keys, hub.incarnation(), former, handles, clock.clone(), &config.limits);
    let Some((_, routing)) = cluster else { return Ok(Arc::new(identities)) };
    let window = Duration::from_millis(config.limits.resume_window_ms);
    let runs = Arc::clone(routing);
    let identities =
        Arc::new(identities.with_runs(Box::new(move |incarnation| runs.run(incarnation, window))));
    routing.set_connections(Arc::clone(&identities) as Arc<dyn Connections>);
    Ok(identities)
}

impl Connections for Identities {
    fn taken_elsewhere(&self, taken: &TakenUp) -> Option<NotOpen> {
        self.taken_elsewhere(taken)
    }

    fn over_elsewhere(&self, over: &Over) {
        self.over_elsewhere(over);
    }

    fn not_open(&self, not_open: NotOpen) -> Option<(u64, NotOpen)> {
        self.not_open(not_open)
    }
}
