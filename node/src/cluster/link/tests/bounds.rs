//! A peer that does not read costs bounded memory and delays no publisher, and its losses are reported.

use std::time::Instant;

use super::relay::TcpRelay;
use super::*;

#[tokio::test]
async fn a_peer_that_does_not_read_is_cut_and_learns_of_its_loss() {
    let (one, two) = (LinkTestNode::start_with(1, &[SECRET], ONE_STREAM).await, LinkTestNode::start(2).await);
    let relay = TcpRelay::to(two.addr).await;
    one.links.set_peers(vec![two.at(relay.addr)]);
    one.until("the link is up", |seen| seen.is_up(2)).await;
    assert_eq!(timeout(DEADLINE, one.send(&two, "room", 1)).await, Ok(Ok(())));
    relay.hold(true);
    let link = Arc::clone(&one.links.links.read()[&2]);
    let begun = Instant::now();
    let mut acks = Vec::new();
    for sequence in 2..=3000 {
        acks.push(one.send_bytes(&two, "room", sequence, 4096));
        assert!(link.queues[0].held_bytes() <= ONE_STREAM.queue.bytes);
    }
    assert!(begun.elapsed() < Duration::from_secs(5), "nothing may wait for the peer");
    // The first overflow dropped it.
    assert_eq!(timeout(DEADLINE, acks.remove(0)).await, Ok(Err(LostItem)));
    relay.hold(false);
    let seen = two.until("the loss is told", |seen| !seen.lost.is_empty()).await;
    assert!(seen.lost.iter().all(|&from| from == 1));
    one.until("the link is up", |seen| seen.is_up(2)).await;
    assert_eq!(timeout(DEADLINE, one.send(&two, "room", 3001)).await, Ok(Ok(())));
    let sequences = two.seen.borrow().sequences("room");
    assert!(sequences.is_sorted_by(|a, b| a < b), "no double, in order: {sequences:?}");
    assert_eq!(sequences.last(), Some(&3001));
}

#[tokio::test]
async fn loss_before_first_peer_stream_is_reported_when_it_opens() {
    let (one, two) = (LinkTestNode::start_with(1, &[SECRET], ONE_STREAM).await, LinkTestNode::start(2).await);
    let relay = TcpRelay::to(two.addr).await;
    relay.hold(true);
    one.links.set_peers(vec![two.at(relay.addr)]);
    for sequence in 1..=1 + ONE_STREAM.queue.items as u64 {
        one.send(&two, "room", sequence);
    }
    relay.hold(false);
    one.until("the link is up", |seen| seen.is_up(2)).await;
    let last = 2 + ONE_STREAM.queue.items as u64;
    assert_eq!(timeout(DEADLINE, one.send(&two, "room", last)).await, Ok(Ok(())));
    let seen = two.seen.borrow();
    assert_eq!((seen.sequences("room"), &seen.lost[..]), (vec![last], &[1][..]));
}

#[tokio::test]
async fn peer_stream_with_lost_queued_items_is_not_contiguous() {
    for is_lost in [false, true] {
        let (one, two) =
            (LinkTestNode::start_with(1, &[SECRET], ONE_STREAM).await, LinkTestNode::start(2).await);
        let relay = TcpRelay::to(two.addr).await;
        one.links.set_peers(vec![two.at(relay.addr)]);
        one.until("the link is up", |seen| seen.is_up(2)).await;
        // Enough time for one ping, and not for a late second one.
        tokio::time::sleep(PING * 3 / 2).await;
        match is_lost {
            false => relay.cut(),
            // No other task runs meanwhile.
            true => (0..=ONE_STREAM.queue.items as u64).for_each(|n| drop(one.send(&two, "room", n))),
        }
        let seen = two.until("the lane ended", |seen| !seen.ended.is_empty()).await;
        assert_eq!(seen.ended[0], !is_lost, "as when a process dies, or not");
    }
}

#[tokio::test]
async fn a_queue_is_bounded_in_items_too() {
    let queue = PeerQueue::new(QueueBounds { bytes: 1 << 20, items: 3 });
    let acks: Vec<_> = (0..3).map(|_| queue.push(Bytes::from_static(b"item"), None)).collect();
    let before = queue.next();
    assert_eq!(timeout(DEADLINE, queue.push(Bytes::from_static(b"item"), None)).await, Ok(Err(LostItem)));
    for ack in acks {
        assert_eq!(timeout(DEADLINE, ack).await, Ok(Err(LostItem)));
    }
    assert_eq!((queue.held_bytes(), queue.next()), (0, before + 1), "the gap tells the peer");
    let too_long = Bytes::from(vec![0; queue::ITEM_BYTES_MAX + 1]);
    let roomy = PeerQueue::new(QueueBounds { bytes: usize::MAX, items: 3 });
    assert_eq!(timeout(DEADLINE, roomy.push(too_long, None)).await, Ok(Err(LostItem)));
}

#[tokio::test]
async fn messages_numbered_by_another_incarnation_count_as_lost() {
    let (a, b) = (LinkTestNode::start(1).await, LinkTestNode::start(2).await);
    a.link_to(&[&b]).await;
    a.links.send(2, 0, &forward(3, "room", 1, 16)).await.expect("it comes");
    a.send(&b, "room", 1).await.expect("it comes");
    let seen = b.until("what it numbered itself", |seen| !seen.forwarded.is_empty()).await;
    assert_eq!((seen.sequences("room"), &seen.lost[..]), (vec![1], &[1][..]));
    assert_eq!(seen.forwarded[0].1.incarnation, 1);
}

#[tokio::test]
async fn panicking_item_counts_as_lost_and_later_items_are_taken() {
    let (sender, taker) =
        (LinkTestNode::start_with(1, &[SECRET], ONE_STREAM).await, LinkTestNode::start(2).await);
    sender.link_to(&[&taker]).await;
    for (channel, sequence) in [("a", 1), (PANICS, 1), ("a", 2)] {
        drop(sender.send(&taker, channel, sequence));
    }
    taker.until("all that can be taken", |seen| seen.sequences("a") == [1, 2]).await;
    taker.until("the loss", |seen| seen.lost == [1]).await;
    sender.until("the lane to be another one", |seen| seen.downs == 1 && seen.is_up(2)).await;
}
