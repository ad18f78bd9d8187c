use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::*;
use crate::dns_cache::system_lookup;

const ONE: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const OTHER: &str = "IAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const WAIT_MAX: Duration = Duration::from_secs(20);

struct MembershipTestNode {
    membership: Membership,
    incarnation: u64,
    address: SocketAddr,
    tasks: Tasks,
}

impl MembershipTestNode {
    fn start(name: &str, key: &str, seeds: &[SocketAddr], now_ms: u64) -> Self {
        let seeds = seeds.iter().map(SocketAddr::to_string).collect();
        Self::seeking(name, key, (seeds, DnsCache::new()), now_ms)
    }

    fn seeking(name: &str, key: &str, (seeds, names): (Vec<String>, DnsCache), now_ms: u64) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").expect("a free port");
        let address = socket.local_addr().expect("it is bound");
        let incarnation = u64::from_be_bytes(crate::model::random_bytes());
        let tasks = Tasks::new(Handle::current());
        let options = Options {
            node_id: name.into(),
            incarnation,
            socket,
            advertise: address,
            seeds,
            names,
            key: ClusterKey::parse(key).expect("a good key"),
            facts: Facts { listen: format!("{name}:1"), version: "0.1.0".to_owned(), ..Facts::default() },
            clock: Clock::manual(now_ms),
        };
        let membership = Membership::start(options, &tasks).expect("a thread");
        Self { membership, incarnation, address, tasks }
    }

    async fn until(&self, what: &str, reached: impl Fn(&ClusterMembers) -> bool) {
        let mut members = self.membership.members();
        let seen = tokio::time::timeout(WAIT_MAX, members.wait_for(|members| reached(members))).await;
        let reached = matches!(seen, Ok(Ok(_)));
        assert!(reached, "{what}: {:?}", self.membership.members().borrow());
    }

    async fn until_alive(&self, others: &[(&str, &Self)]) {
        self.until("others are alive", |members| {
            members.0.len() == others.len()
                && others.iter().all(|(name, node)| {
                    let alive = |member: &ClusterMember| (member.incarnation, member.state);
                    members.get(name).map(alive) == Some((node.incarnation, LivenessState::Alive))
                })
        })
        .await;
    }

    /// Ends the node without a goodbye, as if it were killed.
    async fn end(self) -> SocketAddr {
        self.tasks.stop(Duration::ZERO).await;
        self.address
    }
}

async fn three() -> [MembershipTestNode; 3] {
    let a = MembershipTestNode::start("a", ONE, &[], 1);
    let b = MembershipTestNode::start("b", ONE, &[a.address], 1);
    let c = MembershipTestNode::start("c", ONE, &[a.address], 1);
    a.until_alive(&[("b", &b), ("c", &c)]).await;
    b.until_alive(&[("a", &a), ("c", &c)]).await;
    c.until_alive(&[("a", &a), ("b", &b)]).await;
    [a, b, c]
}

#[tokio::test]
async fn nodes_find_each_other_by_one_seed_and_tell_what_changes() {
    let [a, b, c] = three().await;
    assert_eq!(b.membership.members().borrow().get("c").expect("it is known").facts.listen, "c:1");
    c.membership.update(|facts| {
        facts.draining = true;
        facts.peer = Some("c:2".to_owned());
    });
    for node in [&a, &b] {
        node.until("c drains", |members| {
            let facts = &members.get("c").expect("it is known").facts;
            facts.draining && facts.peer.as_deref() == Some("c:2")
        })
        .await;
    }
    for node in [a, b, c] {
        node.end().await;
    }
}

#[tokio::test]
async fn vanished_node_is_down_in_3s_and_restarts_as_another() {
    let [a, b, c] = three().await;
    let generation = a.membership.members().borrow().get("c").expect("it is known").generation;
    c.end().await;
    let ended = Instant::now();
    for node in [&a, &b] {
        let is_down =
            |members: &ClusterMembers| members.get("c").expect("it is known").state == LivenessState::Down;
        node.until("c is dead", is_down).await;
    }
    assert!(ended.elapsed() < Duration::from_secs(3), "{:?}", ended.elapsed());
    assert!(ended.elapsed() > Duration::from_millis(1_500), "{:?}", ended.elapsed());

    // The clock of the next incarnation reads what the earlier one's did.
    let c = MembershipTestNode::start("c", ONE, &[b.address], generation);
    a.until_alive(&[("b", &b), ("c", &c)]).await;
    b.until_alive(&[("a", &a), ("c", &c)]).await;
    for node in [a, b, c] {
        node.end().await;
    }
}

#[tokio::test]
async fn incarnation_with_clock_behind_gets_a_higher_generation() {
    let a = MembershipTestNode::start("a", ONE, &[], 1);
    let b = MembershipTestNode::start("b", ONE, &[a.address], 1_000);
    let c = MembershipTestNode::start("c", ONE, &[a.address], 1);
    a.until_alive(&[("b", &b), ("c", &c)]).await;
    b.end().await;
    let b = MembershipTestNode::start("b", ONE, &[a.address], 10);
    a.until_alive(&[("b", &b), ("c", &c)]).await;
    b.until_alive(&[("a", &a), ("c", &c)]).await;
    // A node that was down by then stays down.
    c.end().await;
    let state = |members: &ClusterMembers| members.get("c").map(|member| member.state);
    b.until("c is dead", |members| state(members) == Some(LivenessState::Down)).await;
    let mut views = b.membership.members();
    views.mark_unchanged();
    let seen = Arc::new(Mutex::new(Vec::new()));
    let collected = Arc::clone(&seen);
    let collecting = async move {
        while views.changed().await.is_ok() {
            collected.lock().push(state(&views.borrow()));
        }
    };
    let generation =
        |members: &ClusterMembers| members.get("b").map(|member| (member.incarnation, member.generation));
    let raised = async {
        a.until("b is above its former run", |members| generation(members) == Some((b.incarnation, 1_001)))
            .await;
        // By then the node knows the others and watches them.
        tokio::time::sleep(Duration::from_secs(1)).await;
    };
    tokio::select! {
        () = raised => {}
        () = collecting => unreachable!("b has ended"),
    }
    assert!(seen.lock().iter().all(|state| *state == Some(LivenessState::Down)), "{:?}", seen.lock());
    for node in [a, b] {
        node.end().await;
    }
}

#[tokio::test]
async fn newcomer_with_id_of_a_live_node_ends_and_takes_no_place() {
    let [a, b, c] = three().await;
    b.membership.update(|facts| facts.ready = true);
    let is_ready = |members: &ClusterMembers| members.get("b").is_some_and(|member| member.facts.ready);
    a.until("b is ready", is_ready).await;
    // Whether its clock is ahead or behind.
    for now_ms in [1_000, 0] {
        let other = MembershipTestNode::start("b", ONE, &[c.address], now_ms);
        let ended = tokio::time::timeout(WAIT_MAX, other.tasks.failed().cancelled_owned()).await;
        assert!(ended.is_ok(), "{:?}", other.membership.members().borrow());
        other.end().await;
        a.until_alive(&[("b", &b), ("c", &c)]).await;
        c.until_alive(&[("a", &a), ("b", &b)]).await;
    }
    // A later node finds the one that was there first.
    let d = MembershipTestNode::start("d", ONE, &[a.address], 1);
    d.until_alive(&[("a", &a), ("b", &b), ("c", &c)]).await;
    b.until_alive(&[("a", &a), ("c", &c), ("d", &d)]).await;
    assert!(!b.tasks.failed().is_cancelled());
    for node in [a, b, c, d] {
        node.end().await;
    }
}

#[tokio::test]
async fn later_of_two_unmet_nodes_with_one_id_goes_on() {
    static FOUND: Mutex<Vec<SocketAddr>> = Mutex::new(Vec::new());
    let names =
        DnsCache::with_resolver(|name| Box::pin(std::future::ready((name, Ok(FOUND.lock().clone())))));
    let earlier = MembershipTestNode::start("b", ONE, &[], 1);
    let later = MembershipTestNode::seeking("b", ONE, (vec!["nodes.example:1".to_owned()], names), 2);
    for node in [&earlier, &later] {
        node.membership.update(|facts| (facts.ready, facts.met) = (true, true));
    }
    FOUND.lock().push(earlier.address);
    let ended = tokio::time::timeout(WAIT_MAX, earlier.tasks.failed().cancelled_owned()).await;
    assert!(ended.is_ok() && !later.tasks.failed().is_cancelled());
    // Draining, as before a stop.
    earlier.membership.update(|facts| facts.draining = true);
    let a = MembershipTestNode::start("a", ONE, &[earlier.address, later.address], 1);
    a.until_alive(&[("b", &later)]).await;
    for node in [a, earlier, later] {
        node.end().await;
    }
}

#[tokio::test]
async fn changed_facts_of_a_node_are_known_at_once() {
    let [a, b, c] = three().await;
    let mut took = Vec::new();
    for draining in [true, false, true, false, true] {
        let begun = Instant::now();
        b.membership.update(|facts| facts.draining = draining);
        for node in [&a, &c] {
            let is_known =
                |members: &ClusterMembers| members.get("b").expect("it is known").facts.draining == draining;
            node.until("b is heard", is_known).await;
        }
        took.push(begun.elapsed());
    }
    took.sort_unstable();
    // Views are published every 100 ms. By the turns of gossip alone it takes 240 ms on average.
    assert!(took[2] < Duration::from_millis(130), "{took:?}");
    for node in [a, b, c] {
        node.end().await;
    }
}

#[tokio::test]
async fn strangers_are_not_members_change_nothing_and_are_counted() {
    let metrics = crate::telemetry::metrics();
    let a = MembershipTestNode::start("a", ONE, &[], 1);
    let stranger = MembershipTestNode::start("x", OTHER, &[a.address], 1);
    let b = MembershipTestNode::start("b", &format!("{OTHER}\n{ONE}"), &[a.address, stranger.address], 1);
    let flood = UdpSocket::bind("127.0.0.1:0").expect("a free port");
    for length in [0, 1, 25, 26, 42, 50, 1_000, 60_001] {
        flood.send_to(&vec![9; length], a.address).expect("it can be sent");
    }
    // The stranger seals with a secret that `a` does not have, so only `b` meets it.
    b.until_alive(&[("x", &stranger)]).await;
    let c = MembershipTestNode::start("c", ONE, &[a.address], 1);
    a.until_alive(&[("c", &c)]).await;
    flood.set_nonblocking(true).expect("a socket");
    assert!(flood.recv(&mut [0; 100]).is_err(), "a stranger was answered");
    let shown = metrics.render();
    for reason in ["forged", "malformed", "version", "oversize"] {
        let line = format!("fanfare_gossip_dropped_total{{reason=\"{reason}\"}} ");
        let count = shown.lines().find_map(|shown| shown.strip_prefix(&line)).map(str::parse::<u64>);
        assert!(matches!(count, Some(Ok(1..))), "{reason}: {count:?}");
    }
    for node in [a, b, c, stranger] {
        node.end().await;
    }
}

#[tokio::test]
async fn a_cluster_changes_its_key_one_node_after_the_other() {
    let (both, turned) = (format!("{ONE}\n{OTHER}"), format!("{OTHER}\n{ONE}"));
    let a = MembershipTestNode::start("a", &both, &[], 1);
    let b = MembershipTestNode::start("b", &turned, &[a.address], 1);
    let c = MembershipTestNode::start("c", &both, &[b.address], 1);
    a.until_alive(&[("b", &b), ("c", &c)]).await;
    let c = {
        c.end().await;
        MembershipTestNode::start("c", &turned, &[a.address], 2)
    };
    a.until_alive(&[("b", &b), ("c", &c)]).await;
    b.until_alive(&[("a", &a), ("c", &c)]).await;
    for node in [a, b, c] {
        node.end().await;
    }
}

#[tokio::test]
async fn a_name_that_hangs_holds_up_no_other_seed() {
    let names = || {
        DnsCache::with_resolver(|name| match name.starts_with("hangs") {
            true => Box::pin(std::future::pending()),
            false => system_lookup(name),
        })
    };
    let a = MembershipTestNode::start("a", ONE, &[], 1);
    let hanging = || (1..4).map(|number| format!("hangs{number}.example:1"));
    let with = |seed| hanging().chain([seed]).collect::<Vec<_>>();
    let begun = Instant::now();
    let b =
        MembershipTestNode::seeking("b", ONE, (with(format!("localhost:{}", a.address.port())), names()), 1);
    let c = MembershipTestNode::seeking("c", ONE, (with(a.address.to_string()), names()), 1);
    b.until_alive(&[("a", &a), ("c", &c)]).await;
    c.until_alive(&[("a", &a), ("b", &b)]).await;
    // Far less than the three names that hang would take, even on a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    for node in [a, b, c] {
        node.end().await;
    }
}

#[tokio::test]
async fn a_name_stands_for_many_nodes_and_for_others_later() {
    static FOUND: Mutex<Vec<SocketAddr>> = Mutex::new(Vec::new());
    let names =
        DnsCache::with_resolver(|name| Box::pin(std::future::ready((name, Ok(FOUND.lock().clone())))));
    let [a, b, later] = ["a", "b", "later"].map(|name| MembershipTestNode::start(name, ONE, &[], 1));
    FOUND.lock().extend([a.address, b.address]);
    let seeking = MembershipTestNode::seeking("seeking", ONE, (vec!["nodes.example:1".to_owned()], names), 1);
    seeking.until_alive(&[("a", &a), ("b", &b)]).await;
    a.until_alive(&[("b", &b), ("seeking", &seeking)]).await;
    *FOUND.lock() = vec![later.address];
    a.until_alive(&[("b", &b), ("later", &later), ("seeking", &seeking)]).await;
    for node in [a, b, later, seeking] {
        node.end().await;
    }
}
