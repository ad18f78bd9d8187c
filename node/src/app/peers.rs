//! Peer streams to the members, and the consequences of membership changes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use crate::cluster::inbound::Peer;
use crate::cluster::link::PeerAddr;
use crate::cluster::membership::{ClusterMember, ClusterMembers, LivenessState};
use crate::cluster::routing::{GossipStatus, Routing};
use crate::dns_cache::DnsCache;

/// Interval of retries after a failed look-up of a peer's name.
const LOOKUP_RETRY: Duration = Duration::from_secs(1);
/// Interval of look-ups for a peer without a stream: its address may be outdated.
const LOOKUP_AGAIN: Duration = Duration::from_secs(5);

/// Follows the membership until it ends. Down and leaving members are handled at once, independent of DNS.
pub(super) async fn follow(
    routing: Arc<Routing>,
    mut members: watch::Receiver<Arc<ClusterMembers>>,
    mut names: DnsCache,
) {
    let mut logged = HashSet::new();
    let mut again = tokio::time::interval_at(tokio::time::Instant::now() + LOOKUP_AGAIN, LOOKUP_AGAIN);
    again.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let now = Arc::clone(&members.borrow_and_update());
        let named: HashSet<_> = now.0.iter().filter_map(|member| member.facts.peer.as_deref()).collect();
        names.retain(|name| named.contains(name));
        logged.retain(|name: &String| named.contains(&**name));
        // The name of a down node may be gone too.
        let is_there =
            |member: &&ClusterMember| member.state != LivenessState::Down && !has_ended(&routing, member);
        let there = || now.0.iter().filter(is_there);
        there().filter_map(|member| member.facts.peer.as_deref()).for_each(|name| names.look_up(name));
        let mut failed = HashSet::new();
        update_routing(&routing, &now, &names);
        loop {
            tokio::select! {
                changed = members.changed() => match changed {
                    Ok(()) => break,
                    Err(_) => return,
                },
                (name, found) = names.next_answer() => match found {
                    Ok(()) => {
                        logged.remove(&name);
                        update_routing(&routing, &now, &names);
                    }
                    Err(error) if named.contains(&*name) => {
                        // A lasting failure is logged once, not for each attempt.
                        if logged.insert(name.clone()) {
                            tracing::warn!(address = name, %error, "peer name lookup failed");
                        }
                        failed.insert(name);
                    }
                    Err(_) => {}
                },
                () = tokio::time::sleep(LOOKUP_RETRY), if !failed.is_empty() => {
                    failed.drain().for_each(|name| names.look_up(&name));
                }
                _ = again.tick() => {
                    let unlinked = there().filter(|member| !routing.peer_status(member.incarnation).is_up);
                    unlinked.filter_map(|member| member.facts.peer.as_deref()).for_each(|name| names.look_up(name));
                }
            }
        }
    }
}

/// Whether a member, known only from other nodes, has ended: no node hears it, and this one never did.
fn has_ended(routing: &Routing, member: &ClusterMember) -> bool {
    let is_seen = member.state == LivenessState::Alive || member.is_seen_by_others;
    !is_seen && !routing.is_known(member.incarnation)
}

fn update_routing(routing: &Routing, members: &ClusterMembers, names: &DnsCache) {
    let all = || members.0.iter();
    let peers = all().filter(|member| !has_ended(routing, member)).filter_map(
        |ClusterMember { node_id, incarnation, gossip, facts, .. }| {
            let found = names.addresses(facts.peer.as_deref()?);
            // The node listens on one family, the one of its gossip.
            let same = found.iter().find(|found| found.is_ipv4() == gossip.is_ipv4());
            let addr = same.or(found.first()).copied()?;
            let peer = Peer { node_id: Arc::clone(node_id), incarnation: *incarnation };
            Some(PeerAddr { peer, addr })
        },
    );
    let peers = peers.collect();
    let alive = all().filter(|member| member.state == LivenessState::Alive);
    let survivors = alive.clone().filter(|member| !member.facts.draining);
    let ready = survivors.clone().filter(|member| member.facts.ready).map(|member| member.incarnation);
    routing.set_survivors(survivors.map(|member| member.incarnation).collect(), ready.collect());
    routing.set_peers(peers, alive.map(|member| member.incarnation).collect());
    let not_down = all().filter(|member| member.state != LivenessState::Down);
    routing.count_members(&not_down.map(|member| member.incarnation).collect::<Vec<_>>());
    let statuses =
        all().map(|ClusterMember { incarnation, facts, state, is_seen_by_others, .. }| GossipStatus {
            incarnation: *incarnation,
            is_down: *state == LivenessState::Down,
            is_draining: facts.draining,
            is_seen_by_others: *is_seen_by_others,
            has_clients: facts.ready || facts.met,
        });
    routing.update_node_failures(&statuses.collect::<Vec<_>>());
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use parking_lot::Mutex;
    use tokio::runtime::Handle;

    use super::*;
    use crate::cluster::link::{PeerAck, PeerItem, PeerLinks};
    use crate::cluster::membership::Facts;
    use crate::cluster::routing::KeptNodes;
    use crate::hub::Hub;
    use crate::model::{Clock, Limits};
    use crate::tasks::{OnStop, Tasks};

    const DEADLINE: Duration = Duration::from_secs(10);

    /// Records the peers that have streams.
    struct PeersTestLinks(watch::Sender<Vec<(u64, SocketAddr)>>);

    impl PeerLinks for PeersTestLinks {
        fn set_peers(&self, peers: Vec<PeerAddr>) {
            self.0.send_replace(
                peers.iter().map(|PeerAddr { peer, addr }| (peer.incarnation, *addr)).collect(),
            );
        }

        fn stream_count(&self) -> usize {
            1
        }

        fn send(&self, _: u64, _: u64, _: &PeerItem) -> PeerAck {
            unreachable!("there are no lanes")
        }

        fn is_up(&self, _: u64) -> bool {
            false
        }
    }

    fn member(incarnation: u64, peer: &str, state: LivenessState) -> ClusterMember {
        ClusterMember {
            node_id: format!("n{incarnation}").into(),
            incarnation,
            generation: 1,
            gossip: SocketAddr::from(([127, 0, 0, 1], 1)),
            facts: Facts { peer: Some(peer.to_owned()), ready: true, ..Facts::default() },
            state,
            is_seen_by_others: false,
        }
    }

    fn at(port: u16) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], port))
    }

    /// A node with these members and this resolver.
    struct PeersTestNode {
        members: watch::Sender<Arc<ClusterMembers>>,
        links: watch::Receiver<Vec<(u64, SocketAddr)>>,
        routing: Arc<Routing>,
        _tasks: Arc<Tasks>,
    }

    impl PeersTestNode {
        fn new(names: DnsCache) -> Self {
            let hub = Arc::new(Hub::new(Vec::new(), Clock::system(), &Limits::default()).with_incarnation(1));
            let tasks = Arc::new(Tasks::new(Handle::current()));
            let routing = Routing::new(&hub, &"n1".into(), KeptNodes::default(), &tasks);
            let (linked, links) = watch::channel(Vec::new());
            routing.begin(PeersTestLinks(linked));
            let (sender, members) = watch::channel(Arc::default());
            tasks.spawn("peers", OnStop::Cancel, follow(Arc::clone(&routing), members, names));
            Self { members: sender, links, routing, _tasks: tasks }
        }

        fn sees(&self, members: Vec<ClusterMember>) {
            self.members.send_replace(Arc::new(ClusterMembers(members)));
        }

        async fn is_linked_to(&mut self, expected: &[(u64, SocketAddr)], alive: usize) {
            let linked = self.links.wait_for(|linked| *linked == expected);
            let linked = tokio::time::timeout(DEADLINE, linked).await.is_ok();
            assert!(linked, "{:?} are linked to, not {expected:?}", self.links.borrow());
            assert_eq!(self.routing.expected(), alive);
        }
    }

    #[tokio::test]
    async fn hanging_resolver_does_not_hide_down_peers() {
        let mut node = PeersTestNode::new(DnsCache::with_resolver(|_| Box::pin(std::future::pending())));
        let named = || member(2, "a.example:1", LivenessState::Alive);
        node.sees(vec![named(), member(3, "127.0.0.1:3", LivenessState::Alive)]);
        node.is_linked_to(&[(3, at(3))], 2).await;
        node.sees(vec![
            named(),
            member(3, "127.0.0.1:3", LivenessState::Down),
            member(4, "127.0.0.1:4", LivenessState::Alive),
        ]);
        node.is_linked_to(&[(3, at(3)), (4, at(4))], 2).await;
        node.sees(vec![named()]);
        node.is_linked_to(&[], 1).await;
    }

    #[tokio::test]
    async fn peer_name_briefly_unresolved_keeps_address_and_is_retried() {
        static ANSWERS: Mutex<Vec<u16>> = Mutex::new(Vec::new());
        let mut node = PeersTestNode::new(DnsCache::with_resolver(|name| {
            let found = ANSWERS.lock().pop().map(|port| vec![at(port)]);
            Box::pin(async { (name, found.ok_or_else(|| std::io::ErrorKind::NotFound.into())) })
        }));
        node.sees(vec![member(2, "a.example:1", LivenessState::Alive)]);
        let known = tokio::time::timeout(DEADLINE, async {
            while node.routing.expected() == 0 {
                tokio::task::yield_now().await;
            }
        });
        known.await.expect("it is alive before it is found");
        ANSWERS.lock().push(5);
        node.is_linked_to(&[(2, at(5))], 1).await;
        node.sees(vec![
            member(2, "a.example:1", LivenessState::Alive),
            member(3, "127.0.0.1:3", LivenessState::Alive),
        ]);
        node.is_linked_to(&[(2, at(5)), (3, at(3))], 2).await;
        ANSWERS.lock().push(6);
        node.is_linked_to(&[(2, at(6)), (3, at(3))], 2).await;
    }

    #[tokio::test]
    async fn the_name_of_one_without_a_link_is_looked_up_again() {
        static LATER: Mutex<bool> = Mutex::new(false);
        let mut node = PeersTestNode::new(DnsCache::with_resolver(|name| {
            let port = if *LATER.lock() { 6 } else { 5 };
            Box::pin(std::future::ready((name, Ok(vec![at(port)]))))
        }));
        node.sees(vec![member(2, "a.example:1", LivenessState::Alive)]);
        node.is_linked_to(&[(2, at(5))], 1).await;
        *LATER.lock() = true;
        node.is_linked_to(&[(2, at(6))], 1).await;
    }

    #[tokio::test]
    async fn peer_without_a_heartbeat_is_neither_looked_up_nor_linked() {
        static LOOKED_UP: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let mut node = PeersTestNode::new(DnsCache::with_resolver(|name| {
            LOOKED_UP.lock().push(name.clone());
            Box::pin(std::future::ready((name, Ok(vec![at(2)]))))
        }));
        let there = |incarnation, peer| member(incarnation, peer, LivenessState::Alive);
        let (three, four, five) = ("127.0.0.1:3", "127.0.0.1:4", "127.0.0.1:5");
        node.sees(vec![member(2, "a.example:1", LivenessState::Suspect), there(3, three)]);
        node.is_linked_to(&[(3, at(3))], 1).await;
        node.sees(vec![member(2, "a.example:1", LivenessState::Down), there(3, three), there(4, four)]);
        node.is_linked_to(&[(3, at(3)), (4, at(4))], 2).await;
        // Except one that was heard.
        node.sees(vec![member(3, three, LivenessState::Suspect), there(4, four), there(5, five)]);
        node.is_linked_to(&[(3, at(3)), (4, at(4)), (5, at(5))], 2).await;
        assert_eq!(*LOOKED_UP.lock(), [""; 0]);
    }

    #[tokio::test]
    async fn peer_address_is_chosen_by_the_family_of_its_gossip() {
        let mut node = PeersTestNode::new(DnsCache::with_resolver(|name| {
            let found = vec![SocketAddr::from((std::net::Ipv6Addr::LOCALHOST, 5)), at(5)];
            Box::pin(std::future::ready((name, Ok(found))))
        }));
        node.sees(vec![member(2, "a.example:5", LivenessState::Alive)]);
        node.is_linked_to(&[(2, at(5))], 1).await;
    }
}
