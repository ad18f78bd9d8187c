use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;

use super::super::super::tests::Node;
use super::*;
use crate::accounts::Seat;
use crate::auth::Principal;
use crate::edge::link::Link;

const REFUSED: &str = "42900";

/// A shard that does not run, of a node whose tenant has all that it may have.
struct Full {
    shard: Shard,
    node: Node,
    principal: Arc<Principal>,
    _seats: Vec<Seat>,
}

impl Full {
    fn new() -> Self {
        let (node, mut shards) = Node::at_rest();
        let principal = node.principal();
        let seats = node.all_seats(&principal.account);
        Self { shard: shards.remove(0), node, principal, _seats: seats }
    }

    /// The client that takes a connection up.
    fn takes_up(&mut self, former: Former) -> TcpStream {
        let (client, server) = self.node.pair();
        client.set_nonblocking(true).unwrap();
        let seat = self.node.successor(&self.principal.account);
        let opening = Node::opening(&self.principal, seat, Some(former));
        self.shard.adopt(Link::plain(server), self.node.permit(), Vec::new(), opening);
        client
    }

    /// What has come at `now_ms` to that client.
    fn told(&mut self, client: &mut TcpStream, now_ms: u64) -> String {
        self.shard.now_ms = now_ms;
        self.shard.look_at_seats();
        self.shard.input_turn();
        self.shard.flush_turn();
        let mut told = Vec::new();
        match client.read_to_end(&mut told) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        String::from_utf8_lossy(&told).into_owned()
    }
}

#[test]
fn quota_slot_is_checked_only_after_counts_have_settled() {
    let mut full = Full::new();
    full.shard.now_ms = 70;
    let mut client = full.takes_up(full.node.former_gone(&full.principal));
    assert_eq!(full.shard.seat_look_ms(), Some(570));
    assert!(!full.told(&mut client, 569).contains(REFUSED));
    assert!(full.told(&mut client, 570).contains(REFUSED));
    assert_eq!(full.shard.seat_look_ms(), None);
}

#[test]
fn second_takeover_before_quota_check_gets_no_quota_slot() {
    let mut full = Full::new();
    let mut first = full.takes_up(full.node.former_gone(&full.principal));
    let (_, tenure) = full.shard.unseated[0];
    let mut second = full.takes_up(full.node.former(&tenure, &full.principal));
    assert!(full.told(&mut first, 499).contains("taken up"));
    assert!(!full.told(&mut second, 499).contains(REFUSED));
    assert!(full.told(&mut second, 500).contains(REFUSED));
}
