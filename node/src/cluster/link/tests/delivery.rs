//! Delivery over peer streams: once and in order, also across cuts.

use super::relay::TcpRelay;
use super::*;

const PEERS: u64 = 3_000;

#[tokio::test]
async fn publish_arrives_unchanged_and_is_peer_acked() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    one.link_to(&[&two]).await;
    let ack = one.send(&two, "room", 41);
    assert_eq!(timeout(DEADLINE, ack).await, Ok(Ok(())));
    let seen = two.until("the publish came", |seen| !seen.forwarded.is_empty()).await;
    let (from, forwarded) = &seen.forwarded[0];
    assert_eq!((*from, forwarded.incarnation, forwarded.first, forwarded.last), (1, 1, 41, 41));
    assert_eq!((forwarded.key.account().as_str(), forwarded.key.channel()), ("acme", "room"));
    let connection_id = ConnectionId::from_bytes([3; 16]);
    let text = format!(
        r#"{{"id":"m","data":"{}","clientId":"ada","connectionId":"{connection_id}","timestamp":5}}"#,
        "x".repeat(16)
    );
    assert_eq!(forwarded.messages, [text]);
    assert_eq!(forwarded.client_id, Some(ClientId::of("ada")));
    assert_eq!((forwarded.timestamp_ms, forwarded.connection_id), (5, ConnectionId::from_bytes([3; 16])));
    // 18 bytes of data and 5 of the clientId.
    assert_eq!(forwarded.bytes, 23);
    assert_eq!(seen.batches.len(), 1);
}

#[tokio::test]
async fn items_soon_after_a_batch_are_coalesced() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    one.link_to(&[&two]).await;
    let send = |publisher, sequence| {
        let publisher = Some(ConnectionId::from_bytes([publisher; 16]));
        let item = PeerItem { publisher, ..forward(one.peer.incarnation, "room", sequence, 16) };
        one.links.send(two.peer.incarnation, 0, &item)
    };
    let coalesced = async {
        let mut batches = 0;
        for sequence in (1..).step_by(3) {
            assert_eq!(send(1, sequence).await, Ok(()));
            let next = send(2, sequence + 1);
            // Time enough for a stream that does not coalesce.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert_eq!(tokio::join!(next, send(3, sequence + 2)), (Ok(()), Ok(())));
            let before = std::mem::replace(&mut batches, two.seen.borrow().batches.len());
            // Three batches if the machine was too slow for the items to follow soon.
            if batches - before < 3 {
                break;
            }
        }
    };
    timeout(DEADLINE, coalesced).await.expect("two went together");
}

/// A node sends to a new peer at once, and the items are lost if the link is not found.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_can_be_sent_to_when_its_link_is_reported() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    let nobody = TcpListener::bind("127.0.0.1:0").await.expect("a port").local_addr().expect("bound");
    let away = |incarnation| PeerAddr { peer: Peer { node_id: "away".into(), incarnation }, addr: nobody };
    // The first peer answers while the other links are added.
    let members = || std::iter::once(two.at(two.addr)).chain((10..PEERS).map(away)).collect();
    for _ in 0..5 {
        one.links.set_peers(members());
        let seen = one.until("the link is up", |seen| seen.is_up(2)).await;
        assert!(seen.deaf.is_empty());
        one.links.set_peers(Vec::new());
        one.until("the link is down", |seen| !seen.is_up(2)).await;
    }
}

#[tokio::test]
async fn link_made_again_reports_possible_loss() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    one.link_to(&[&two]).await;
    for sequence in 1..=20 {
        assert_eq!(timeout(DEADLINE, one.send(&two, "room", sequence)).await, Ok(Ok(())));
    }
    one.link_to(&[]).await;
    one.link_to(&[&two]).await;
    assert_eq!(timeout(DEADLINE, one.send(&two, "room", 21)).await, Ok(Ok(())));
    let seen = two.until("it came", |seen| seen.sequences("room").len() >= 21).await;
    assert_eq!(seen.sequences("room"), (1..=21).collect::<Vec<_>>());
    assert!(seen.lost.contains(&1), "{:?}", seen.lost);
}

#[tokio::test]
async fn three_nodes_reach_whom_they_name_in_order() {
    let (one, two, three) =
        (LinkTestNode::start(1).await, LinkTestNode::start(2).await, LinkTestNode::start(3).await);
    one.link_to(&[&two, &three]).await;
    two.link_to(&[&one, &three]).await;
    for sequence in 1..=2000 {
        for channel in ["a", "b", "c"] {
            one.send(&three, channel, sequence);
        }
        two.send(&three, "d", sequence);
        two.send(&one, "e", sequence);
    }
    let seen = three.until("all came", |seen| seen.forwarded.len() >= 8000).await;
    for channel in ["a", "b", "c", "d"] {
        assert_eq!(seen.sequences(channel), (1..=2000).collect::<Vec<_>>(), "{channel}");
    }
    let seen = one.until("all came", |seen| seen.forwarded.len() >= 2000).await;
    assert_eq!(seen.sequences("e"), (1..=2000).collect::<Vec<_>>());
    assert_eq!(two.seen.borrow().forwarded.len(), 0);
}

#[tokio::test]
async fn cuts_lose_nothing_and_double_nothing() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    let relay = TcpRelay::to(two.addr).await;
    one.links.set_peers(vec![two.at(relay.addr)]);
    let mut acks = Vec::new();
    let mut sequence = 0;
    for round in 0..4 {
        one.until("the link is up", |seen| seen.is_up(2) && seen.downs >= round).await;
        // Received, but the ack is held back, so the batch is sent again.
        relay.hold_answers(true);
        let until = sequence + 500;
        while sequence < until {
            sequence += 1;
            acks.push(one.send(&two, "room", sequence));
        }
        two.until("they came", |seen| seen.forwarded.len() as u64 >= until).await;
        relay.cut();
        relay.hold_answers(false);
        one.until("the link is down", |seen| seen.downs > round).await;
    }
    for ack in acks {
        assert_eq!(timeout(DEADLINE, ack).await, Ok(Ok(())));
    }
    let seen = two.seen.borrow().clone();
    assert_eq!(seen.sequences("room"), (1..=sequence).collect::<Vec<_>>());
    assert_eq!(seen.lost, [0; 0]);
}

#[tokio::test]
async fn a_silent_link_is_reported_down_and_comes_back() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    let relay = TcpRelay::to(two.addr).await;
    one.links.set_peers(vec![two.at(relay.addr)]);
    one.until("the link is up", |seen| seen.is_up(2)).await;
    assert!(one.links.is_up(2));
    // The sockets stay open: only the missing pong shows that the peer is silent.
    relay.hold(true);
    one.until("the link is down", |seen| !seen.is_up(2)).await;
    let ack = one.send(&two, "room", 1);
    relay.hold(false);
    one.until("the link is up", |seen| seen.is_up(2)).await;
    assert_eq!(timeout(DEADLINE, ack).await, Ok(Ok(())));
    assert_eq!(two.until("it came", |seen| !seen.forwarded.is_empty()).await.sequences("room"), [1]);
}

#[tokio::test]
async fn a_peer_that_left_loses_what_waits_for_it() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    assert_eq!(one.send(&two, "room", 1).await, Err(LostItem), "it is no member yet");
    let nobody = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    one.links.set_peers(vec![two.at(nobody.local_addr().expect("bound"))]);
    let ack = one.send(&two, "room", 2);
    one.links.set_peers(Vec::new());
    assert_eq!(timeout(DEADLINE, ack).await, Ok(Err(LostItem)));
}

#[tokio::test]
async fn other_incarnation_is_not_linked_as_the_named_one() {
    let (one, two) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    let other = Peer { node_id: two.peer.node_id.clone(), incarnation: 1002 };
    one.links.set_peers(vec![PeerAddr { peer: other, addr: two.addr }, two.at(two.addr)]);
    one.until("the link is up", |seen| seen.is_up(2)).await;
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(!one.seen.borrow().is_up(1002));
}
