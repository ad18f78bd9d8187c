use std::io::{ErrorKind, Read as _};
use std::net::TcpStream;

use super::super::super::tests::SocketTestNode;
use super::*;
use crate::accounts::QuotaSlot;
use crate::auth::Principal;
use crate::edge::link::ClientLink;

const REFUSED: &str = "42900";

/// A shard that does not run, of a node whose tenant has used all of its quota slots.
struct FullTenantShard {
    shard: Shard,
    node: SocketTestNode,
    principal: Arc<Principal>,
    _quota_slots: Vec<QuotaSlot>,
}

impl FullTenantShard {
    fn new() -> Self {
        let (node, mut shards) = SocketTestNode::at_rest();
        let principal = node.principal();
        let quota_slots = node.all_quota_slots(&principal.account);
        Self { shard: shards.remove(0), node, principal, _quota_slots: quota_slots }
    }

    /// Connects a client that takes the session over.
    fn takes_up(&mut self, resumable: ResumableSession) -> TcpStream {
        let (client, server) = self.node.pair();
        client.set_nonblocking(true).unwrap();
        let quota_slot = self.node.successor(&self.principal.account);
        let opening = SocketTestNode::opening(&self.principal, quota_slot, Some(resumable));
        self.shard.adopt(ClientLink::plain(server), self.node.permit(), Vec::new(), opening);
        client
    }

    /// Text that the client has received by `now_ms`.
    fn received(&mut self, client: &mut TcpStream, now_ms: u64) -> String {
        self.shard.now_ms = now_ms;
        self.shard.check_quota_slots();
        self.shard.input_turn();
        self.shard.flush_turn();
        let mut received = Vec::new();
        match client.read_to_end(&mut received) {
            Ok(_) => {}
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        String::from_utf8_lossy(&received).into_owned()
    }
}

#[test]
fn quota_slot_is_checked_only_after_counts_have_settled() {
    let mut full = FullTenantShard::new();
    full.shard.now_ms = 70;
    let mut client = full.takes_up(full.node.resumable_without_socket(&full.principal));
    assert_eq!(full.shard.quota_check_ms(), Some(570));
    assert!(!full.received(&mut client, 569).contains(REFUSED));
    assert!(full.received(&mut client, 570).contains(REFUSED));
    assert_eq!(full.shard.quota_check_ms(), None);
}

#[test]
fn second_takeover_before_quota_check_gets_no_quota_slot() {
    let mut full = FullTenantShard::new();
    let mut first = full.takes_up(full.node.resumable_without_socket(&full.principal));
    let (_, ownership) = full.shard.quota_slot_checks[0];
    let mut second = full.takes_up(full.node.resumable(&ownership, &full.principal));
    assert!(full.received(&mut first, 499).contains("taken up"));
    assert!(!full.received(&mut second, 499).contains(REFUSED));
    assert!(full.received(&mut second, 500).contains(REFUSED));
}
