use std::io::Read as _;
use std::net::TcpStream;

use super::*;
use crate::edge::link::ClientLink;
use crate::edge::socket::tests::SocketTestNode;
use crate::hub::PriorWrite;

/// A shard that does not run, with this number of clients.
fn shard_of(clients: usize) -> (SocketTestNode, Shard, Vec<TcpStream>) {
    let (node, mut shards) = SocketTestNode::at_rest();
    let mut shard = shards.remove(0);
    let mut accept = || {
        let (client, server) = node.pair();
        shard.accept(ClientLink::plain(server), node.permit());
        client
    };
    let clients = std::iter::repeat_with(&mut accept).take(clients).collect();
    (node, shard, clients)
}

fn push(shard: &mut Shard, slot: u32, frame: &'static [u8]) {
    let mut connection = shard.slots[slot as usize].take().unwrap();
    shard.send(&mut connection, slot, Bytes::from_static(frame));
    shard.slots[slot as usize] = Some(connection);
}

fn came(client: &mut TcpStream) -> String {
    let mut came = String::new();
    client.read_to_string(&mut came).unwrap();
    came
}

#[test]
fn a_slot_that_is_dirty_twice_is_written_to_once() {
    for io_uring in [true, false] {
        let (_node, mut shard, clients) = shard_of(3);
        if io_uring {
            shard.open_ring();
        }
        for slot in [0, 1, 2] {
            push(&mut shard, slot, b"once");
        }
        shard.dirty = [0, 1, 0, 2, 1].into();
        shard.flush_turn();
        assert!(shard.dirty.is_empty());
        drop(shard);
        for mut client in clients {
            assert_eq!(came(&mut client), "once");
        }
    }
}

#[test]
fn write_result_counts_as_if_shard_had_written_itself() {
    let (_node, mut shard, clients) = shard_of(3);
    for slot in [0, 1, 2] {
        push(&mut shard, slot, b"all of it");
    }
    shard.dirty.clear();
    shard.now_ms = 5;
    for (slot, begun) in [(0, PriorWrite::Took(4)), (1, PriorWrite::Took(9)), (2, PriorWrite::Full)] {
        shard.flush_begun(slot, SocketWriteResult::Known(begun));
    }
    let connections = shard.slots.iter().flatten();
    let states = connections.map(|connection| {
        (connection.outbox.bytes(), connection.in_dirty, connection.blocked_ms, connection.sent_ms)
    });
    let expected = [(0, false, None, 5), (0, false, None, 5), (9, false, Some(5), 0)];
    assert!(states.eq(expected), "a socket that is full is waited for");
    drop(shard);
    let came: Vec<_> = clients.into_iter().map(|mut client| came(&mut client)).collect();
    assert_eq!(came, ["of it", "", ""]);
}

#[test]
fn connection_with_unknown_write_result_ends() {
    let (node, mut shard, mut clients) = shard_of(2);
    for slot in [0, 1] {
        push(&mut shard, slot, b"perhaps");
    }
    shard.flush_begun(1, SocketWriteResult::Unknown);
    assert_eq!((node.open_count(), shard.free.as_slice()), (1, [1].as_slice()));
    assert_eq!(came(&mut clients[1]), "", "nothing is written a second time");
    shard.flush_turn();
    drop(shard);
    assert_eq!(came(&mut clients[0]), "perhaps");
}
