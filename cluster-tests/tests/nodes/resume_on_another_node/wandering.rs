//! Clients that move between nodes all the time.

use fanfare_cluster_tests::cluster::PEER_STREAM_LOST;
use tokio::time::Instant;

use super::*;

impl ReceivedSequences {
    /// Skips all published messages, after a reported loss.
    fn skip_to_published(&mut self, publishers: &Publishers) {
        self.loss_covers_below = publishers.next;
        self.next = (0..PUBLISHERS as u64).map(|from| (from, publishers.next)).collect();
    }

    /// Reads on over reported losses, and returns their number.
    async fn read_over_losses(&mut self, socket: &mut Socket, count: u64, publishers: &Publishers) -> u64 {
        let mut losses = 0;
        while !self.has_read_to(socket, count).await {
            self.skip_to_published(publishers);
            losses += 1;
        }
        losses
    }
}

/// Clients move between nodes at any moment while all publish. A loss may be reported if a node without CPU has lost a
/// peer stream.
#[tokio::test(flavor = "multi_thread")]
async fn wandering_clients_miss_nothing_and_get_nothing_twice() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let losses = count_losses_while_moving(nodes).await;
    let has_failed = |node: &Node| peer_log_events(node).iter().any(|(_, said)| said == PEER_STREAM_LOST);
    assert!(losses == 0 || nodes.iter().any(has_failed), "{losses} losses were told though no link failed");
}

/// Returns the number of reported losses.
async fn count_losses_while_moving(nodes: &[Node]) -> u64 {
    const CLIENTS: usize = 8;
    const FOR: Duration = Duration::from_secs(8);
    let mut publishers = Publishers::on(nodes).await;
    let mut wanderers = Vec::new();
    for client in 0..CLIENTS {
        wanderers.push(ReceivedSequences::begin(&nodes[client % 3]).await);
    }
    let (mut moves, mut losses, begun) = (0, 0, Instant::now());
    while begun.elapsed() < FOR || moves <= CLIENTS {
        publishers.publish(3).await;
        let client = moves % CLIENTS;
        let (socket, received) = &mut wanderers[client];
        // A part of the waiting messages, so that the client mostly leaves in the middle, and is never further behind
        // than replay buffers reach.
        let target = (received.count() + (moves as u64 % 7) * 50).min(publishers.published());
        losses += received.read_over_losses(socket, target, &publishers).await;
        let (fresh, attached) =
            attach_after(&nodes[(moves / CLIENTS + 2 * client) % 3], &received.serial).await;
        if attached["resumed"] == false {
            received.serial = attached["serial"].clone();
            received.skip_to_published(&publishers);
            losses += 1;
        }
        *socket = fresh;
        moves += 1;
    }
    for (socket, received) in &mut wanderers {
        losses += received.read_over_losses(socket, publishers.published(), &publishers).await;
    }
    losses
}
