//! Lag of the peers: items that they have not acknowledged, as gauges for operators.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::super::link::PeerLag;
use super::Routing;

/// Peers that have series of their own; further ones share those of [`OTHERS`].
const PEERS_MAX: usize = 256;
const OTHERS: &str = "others";

/// Peers that have metric series. A peer that has left keeps its series, at 0, and uses them again when it is back.
#[derive(Debug, Default)]
pub(super) struct ReportedLags(BTreeSet<Arc<str>>);

impl ReportedLags {
    /// Returns the lag of each peer: the sum over its incarnations, or 0 for a peer that has left.
    fn merge(&mut self, lags: Vec<PeerLag>) -> BTreeMap<Arc<str>, PeerLag> {
        let none = |id: &Arc<str>| (Arc::clone(id), PeerLag::none(Arc::clone(id)));
        let mut by_peer: BTreeMap<_, _> = self.0.iter().map(none).collect();
        for PeerLag { node_id, items, bytes, oldest } in lags {
            let is_own = self.0.contains(&node_id) || self.0.len() < PEERS_MAX;
            let label = if is_own { node_id } else { OTHERS.into() };
            self.0.insert(Arc::clone(&label));
            by_peer
                .entry(Arc::clone(&label))
                .or_insert_with(|| PeerLag::none(label))
                .add(items, bytes, oldest);
        }
        by_peer
    }
}

impl Routing {
    /// Sets the gauges of what each peer has not acknowledged.
    pub fn report_lag(&self) {
        let Some(links) = self.links.get() else { return };
        for PeerLag { node_id, items, bytes, oldest } in
            self.reported_lags.lock().merge(links.lags()).into_values()
        {
            let peer = &*node_id;
            metrics::gauge!("fanfare_peer_stream_waiting_items", "peer" => peer.to_owned()).set(items as f64);
            metrics::gauge!("fanfare_peer_stream_waiting_bytes", "peer" => peer.to_owned()).set(bytes as f64);
            metrics::gauge!("fanfare_peer_stream_lag_seconds", "peer" => peer.to_owned())
                .set(oldest.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn lag(node_id: &str, items: usize, oldest_s: u64) -> PeerLag {
        PeerLag { node_id: node_id.into(), items, bytes: 10 * items, oldest: Duration::from_secs(oldest_s) }
    }

    #[test]
    fn incarnations_of_a_peer_are_one_and_one_that_left_is_none() {
        let mut reported = ReportedLags::default();
        let by_peer = reported.merge(vec![lag("b", 2, 7), lag("b", 3, 5), lag("a", 0, 0)]);
        assert_eq!(by_peer.into_values().collect::<Vec<_>>(), [lag("a", 0, 0), lag("b", 5, 7)]);
        let by_peer = reported.merge(vec![lag("a", 1, 1)]);
        assert_eq!(by_peer.into_values().collect::<Vec<_>>(), [lag("a", 1, 1), lag("b", 0, 0)]);
    }

    #[test]
    fn peers_beyond_the_bound_share_a_series() {
        let mut reported = ReportedLags::default();
        reported.merge((0..PEERS_MAX).map(|number| lag(&format!("n{number}"), 0, 0)).collect());
        let by_peer = reported.merge(vec![lag("x", 1, 3), lag("y", 1, 2), lag("n0", 4, 1)]);
        assert_eq!(by_peer.len(), PEERS_MAX + 1);
        assert_eq!((&by_peer[OTHERS], &by_peer["n0"]), (&lag(OTHERS, 2, 3), &lag("n0", 4, 1)));
    }
}
