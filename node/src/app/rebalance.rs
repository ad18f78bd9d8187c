//! Rebalancing: a node with far more connections than others, for example after nodes were added, asks a part of its
//! clients to reconnect elsewhere.

use std::sync::Arc;
use std::time::Duration;

use crate::cluster::routing::Routing;
use crate::edge::admin::RebalanceReport;
use crate::edge::socket::Shards;
use crate::tasks::{OnStop, Tasks};

/// Divisor of the connections: at most this part is asked at a time.
const SHARE: u64 = 4;
/// Divisor of the mean: within this part above it, a node does not count as overloaded.
const FAR: u64 = 10;
/// Time over which the asked clients reconnect.
const SPREAD: Duration = Duration::from_secs(10);

pub(super) async fn rebalance(routing: Option<&Routing>, shards: &Shards) -> RebalanceReport {
    let others = match routing {
        Some(routing) => routing.loads().await,
        None => Vec::new(),
    };
    let rebalanced = part(shards.connection_count() as u64, &others);
    if rebalanced.asked > 0 {
        tracing::info!(
            connections = rebalanced.connections,
            asked = rebalanced.asked,
            "rebalancing: clients asked to reconnect"
        );
        shards.ask_to_reconnect(usize::try_from(rebalanced.asked).unwrap_or(usize::MAX), SPREAD);
    }
    rebalanced
}

/// Rebalances every `every_ms`, unless that is 0.
pub(super) fn begin(every_ms: u64, routing: Option<&Arc<Routing>>, shards: &Arc<Shards>, tasks: &Tasks) {
    let (Some(routing), 1..) = (routing.map(Arc::clone), every_ms) else { return };
    let shards = Arc::clone(shards);
    tasks.spawn("rebalance", OnStop::Cancel, async move {
        loop {
            tokio::time::sleep(Duration::from_millis(every_ms)).await;
            rebalance(Some(&routing), &shards).await;
        }
    });
}

fn part(connections: u64, others: &[u64]) -> RebalanceReport {
    let mean = (connections + others.iter().sum::<u64>()).div_ceil(others.len() as u64 + 1);
    let above = connections.saturating_sub(mean);
    let asked = if above > mean / FAR { above.min(connections.div_ceil(SHARE)) } else { 0 };
    RebalanceReport { connections, mean, asked }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_what_is_above_the_mean_is_asked() {
        for (connections, others, mean, asked) in [
            (200, &[0, 0][..], 67, 50),
            (200, &[190, 0], 130, 50),
            (100, &[80], 90, 10),
            (99, &[82], 91, 0),
            (80, &[100], 90, 0),
            (200, &[], 200, 0),
            (0, &[0, 0], 0, 0),
            (1, &[0], 1, 0),
            (2, &[0], 1, 1),
        ] {
            assert_eq!(part(connections, others), RebalanceReport { connections, mean, asked }, "{others:?}");
        }
    }
}
