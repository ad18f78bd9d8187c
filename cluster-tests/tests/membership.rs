//! Nodes find each other by one seed, and notice within three seconds who is dead and who stands still.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, told};
use fanfare_cluster_tests::{Node, SOON, wait_until};

const ALIVE: &str = "a node is alive";
const DEAD: &str = "a node is dead";
const NOTICED_MAX: Duration = Duration::from_secs(3);
/// Who gets no time himself waits longer before he holds others for dead, as on a busy machine.
const TRIES: usize = 5;

fn times(node: &Node, other: &str, message: &str) -> usize {
    told(node).iter().filter(|(of, said)| of == other && said == message).count()
}

async fn until_told(nodes: &[&Node], other: &str, message: &str, count: usize) {
    let what = format!("{count} times `{message}` of {other}");
    wait_until(SOON, &what, async || nodes.iter().all(|node| times(node, other, message) >= count)).await;
}

async fn three() -> Cluster {
    let mut cluster = Cluster::start(3).await;
    let nodes = cluster.nodes();
    let (n0, n1, n2) = (&nodes[0], &nodes[1], &nodes[2]);
    until_told(&[n1, n2], "n0", ALIVE, 1).await;
    until_told(&[n0, n2], "n1", ALIVE, 1).await;
    until_told(&[n0, n1], "n2", ALIVE, 1).await;
    cluster
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_is_dead_within_three_seconds_and_back_when_it_runs_again() {
    let mut cluster = three().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    for attempt in 1.. {
        n2.kill();
        let killed = Instant::now();
        until_told(&[n0, n1], "n2", DEAD, attempt).await;
        let noticed = killed.elapsed();
        n2.restart().await;
        until_told(&[n0, n1], "n2", ALIVE, attempt + 1).await;
        until_told(&[n2], "n0", ALIVE, attempt + 1).await;
        if noticed < NOTICED_MAX {
            break;
        }
        assert!(attempt < TRIES, "{noticed:?}");
    }
    assert_eq!(times(n0, "n1", DEAD) + times(n1, "n0", DEAD), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_stands_still_is_dead_until_it_runs_on_and_says_so() {
    let mut cluster = three().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    for attempt in 1.. {
        n2.pause();
        let paused = Instant::now();
        until_told(&[n0, n1], "n2", DEAD, attempt).await;
        let noticed = paused.elapsed();
        // Two seconds without a pulse are what it takes to notice it oneself.
        let is_long = async || paused.elapsed() > Duration::from_millis(2_500);
        wait_until(SOON, "the pause to be long", is_long).await;
        n2.resume();
        until_told(&[n0, n1], "n2", ALIVE, attempt + 1).await;
        until_told(&[n2], "", "this node stood still, and others may have held it for dead", attempt).await;
        if noticed < NOTICED_MAX {
            break;
        }
        assert!(attempt < TRIES, "{noticed:?}");
    }
    assert_eq!(times(n2, "n0", DEAD) + times(n2, "n1", DEAD), 0, "its own pause is no silence of others");
}
