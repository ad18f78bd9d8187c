//! The names of the contact points, looked up beside all else: a name server that is gone may be waited for longer than anybody
//! waits for the store.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;

use tokio::net::lookup_host;
use tokio::sync::watch;

use crate::tasks::{OnStop, Tasks};

/// Where none is said, as the driver has it.
pub(super) const PORT: u16 = 9042;

pub(super) struct Names {
    points: Vec<String>,
    told: watch::Sender<Told>,
}

#[derive(Debug, Default)]
pub(super) struct Told {
    /// What each name stands for; while it is not answered, what it stood for last.
    nodes: HashMap<String, Vec<SocketAddr>>,
    under_way: HashSet<String>,
}

impl Told {
    pub(super) fn nodes(&self) -> impl Iterator<Item = SocketAddr> {
        self.nodes.values().flatten().copied()
    }

    pub(super) fn is_all(&self) -> bool {
        self.under_way.is_empty()
    }

    fn answer(&mut self, point: String, nodes: Vec<SocketAddr>) {
        self.under_way.remove(&point);
        if !nodes.is_empty() {
            self.nodes.insert(point, nodes);
        }
    }
}

impl Names {
    pub(super) fn new(points: Vec<String>) -> Arc<Self> {
        Arc::new(Self { points, told: watch::Sender::default() })
    }

    pub(super) fn look_up(self: &Arc<Self>, tasks: &Tasks) -> watch::Receiver<Told> {
        self.look_up_by(tasks, addresses)
    }

    /// Each that is not being looked up yet.
    fn look_up_by<F: Future<Output = Vec<SocketAddr>> + Send + 'static>(
        self: &Arc<Self>,
        tasks: &Tasks,
        look_up: impl Fn(String) -> F,
    ) -> watch::Receiver<Told> {
        for point in &self.points {
            let mut is_new = false;
            self.told.send_modify(|told| is_new = told.under_way.insert(point.clone()));
            if is_new {
                let (names, point, looked_up) = (Arc::clone(self), point.clone(), look_up(point.clone()));
                tasks.spawn("name of the database", OnStop::Cancel, async move {
                    let nodes = looked_up.await;
                    names.told.send_modify(|told| told.answer(point, nodes));
                });
            }
        }
        self.told.subscribe()
    }
}

async fn addresses(point: String) -> Vec<SocketAddr> {
    if let Ok(told) = lookup_host(&*point).await {
        return told.collect();
    }
    let told = lookup_host((&*point, PORT)).await;
    told.map_or_else(|_| Vec::new(), Iterator::collect)
}

#[cfg(test)]
mod tests {
    use tokio::runtime::Handle;
    use tokio::sync::Semaphore;

    use super::*;

    fn node(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    #[tokio::test]
    async fn a_contact_point_may_be_said_without_its_port() {
        assert_eq!(addresses("127.0.0.1:7".to_owned()).await, [node(7)]);
        assert_eq!(addresses("127.0.0.1".to_owned()).await, [node(PORT)]);
        assert_eq!(addresses("not a name".to_owned()).await, []);
    }

    #[tokio::test]
    async fn a_name_is_looked_up_by_one_at_a_time_and_a_late_answer_is_kept() {
        let (tasks, names) = (Tasks::new(Handle::current()), Names::new(vec!["a".to_owned()]));
        let (begun, answers) = (Semaphore::new(0), Arc::new(Semaphore::new(0)));
        let look_up = |nodes: &[u16]| {
            let nodes: Vec<_> = nodes.iter().copied().map(node).collect();
            names.look_up_by(&tasks, |_| {
                begun.add_permits(1);
                let (answers, nodes) = (Arc::clone(&answers), nodes.clone());
                async move {
                    answers.acquire().await.expect("never closed").forget();
                    nodes
                }
            })
        };
        for nodes in [&[1, 2][..], &[3], &[4]] {
            assert!(!look_up(nodes).borrow().is_all());
        }
        assert_eq!(begun.available_permits(), 1, "one is under way");
        let known = async |mut told: watch::Receiver<Told>| {
            answers.add_permits(1);
            told.wait_for(Told::is_all).await.expect("it is there").nodes().collect::<Vec<_>>()
        };
        assert_eq!(known(names.told.subscribe()).await, [1, 2].map(node));
        assert_eq!(known(look_up(&[])).await, [1, 2].map(node), "it is not known any more");
        assert_eq!(known(look_up(&[5])).await, [5].map(node));
    }
}
