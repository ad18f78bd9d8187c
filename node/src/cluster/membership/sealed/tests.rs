use super::*;

const ONE: &str = "AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const OTHER: &str = "IAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

fn at(port: u16) -> SocketAddr {
    ([127, 0, 0, 1], port).into()
}

/// A node whose incarnation is its port.
fn node(port: u16, key: &str) -> DatagramSealer {
    DatagramSealer::new(ClusterKey::parse(key).expect("a good key"), port.into())
}

/// `a` at port 1 challenges port 2. In the end both have answered each other.
fn meet(a: &mut DatagramSealer, b: &mut DatagramSealer, now: Instant) {
    let challenge = a.challenge(at(2), now).expect("there is room");
    let replies = b.receive(&challenge, at(1), now).replies;
    let replies: Vec<_> = replies.iter().flat_map(|reply| a.receive(reply, at(2), now).replies).collect();
    assert_eq!(replies.len(), 1);
    assert_eq!(b.receive(&replies[0], at(1), now).dropped, None);
}

fn met() -> (DatagramSealer, DatagramSealer, Instant) {
    let (mut a, mut b, now) = (node(1, ONE), node(2, ONE), Instant::now());
    meet(&mut a, &mut b, now);
    (a, b, now)
}

fn dropped(node: &mut DatagramSealer, datagram: &[u8], now: Instant) -> Option<DatagramDropReason> {
    node.receive(datagram, at(1), now).dropped
}

#[test]
fn gossip_of_a_node_that_answered_a_challenge_is_accepted() {
    let (mut a, mut b, now) = met();
    assert_eq!((a.take_fresh(), b.take_fresh()), (vec![at(2)], vec![at(1)]));
    assert_eq!(a.peers_seen().map(|(incarnation, _)| incarnation).collect::<Vec<_>>(), [2]);
    let later = now + Duration::from_secs(1);
    let gossip = a.seal_gossip(b"hello", at(2)).expect("it is known");
    assert_eq!(b.receive(&gossip, at(1), later).gossip.as_deref(), Some(&b"hello"[..]));
    assert_eq!(b.last_seen_at(at(1)), Some(later));
    assert!(!gossip.windows(5).any(|part| part == b"hello"));
    assert!(node(3, ONE).seal_gossip(b"hello", at(2)).is_none());
}

#[test]
fn changed_or_cut_datagram_is_dropped() {
    let (mut a, mut b, now) = met();
    let gossip = a.seal_gossip(b"hello", at(2)).expect("it is known");
    for i in 0..gossip.len() {
        let mut changed = gossip.clone();
        changed[i] ^= 1;
        let received = b.receive(&changed, at(1), now);
        assert!(received.dropped.is_some() && received.gossip.is_none(), "byte {i}");
        assert!(received.replies.is_empty(), "byte {i}");
        assert!(b.receive(&gossip[..i], at(1), now).dropped.is_some(), "length {i}");
    }
    assert_eq!(dropped(&mut b, &gossip[..HEADER_BYTES + 2], now), Some(DatagramDropReason::Forged));
    assert_eq!(dropped(&mut b, b"", now), Some(DatagramDropReason::Malformed));
    assert_eq!(dropped(&mut b, &[0; 100], now), Some(DatagramDropReason::Version));
    assert_eq!(
        dropped(&mut b, &vec![VERSION; DATAGRAM_BYTES_MAX + 1], now),
        Some(DatagramDropReason::Oversize)
    );
    assert_eq!(dropped(&mut b, &gossip, now), None);
}

#[test]
fn node_with_another_key_gets_no_reply() {
    let (mut a, mut b, now) = (node(1, OTHER), node(2, ONE), Instant::now());
    let challenge = a.challenge(at(2), now).expect("there is room");
    let received = b.receive(&challenge, at(1), now);
    assert_eq!(received.dropped, Some(DatagramDropReason::Forged));
    assert!(received.replies.is_empty());
}

#[test]
fn repeated_datagram_is_dropped_as_stale() {
    let (mut a, mut b, now) = met();
    let challenge = a.challenge(at(2), now).expect("there is room");
    let gossip = a.seal_gossip(b"hello", at(2)).expect("it is known");
    for datagram in [&gossip, &challenge] {
        assert_eq!(dropped(&mut b, datagram, now), None);
        let again = b.receive(datagram, at(1), now);
        assert_eq!((again.dropped, again.replies.len()), (Some(DatagramDropReason::Stale), 0));
    }
}

#[test]
fn datagram_for_another_node_is_dropped() {
    let (mut a, mut b, now) = met();
    let gossip = a.seal_gossip(b"hello", at(2)).expect("it is known");
    assert_eq!(dropped(&mut a, &gossip, now), Some(DatagramDropReason::Misaddressed));
    assert_eq!(dropped(&mut node(3, ONE), &gossip, now), Some(DatagramDropReason::Misaddressed));
    let own = b.challenge(at(2), now).expect("there is room");
    assert_eq!(dropped(&mut b, &own, now), Some(DatagramDropReason::Misaddressed));
}

#[test]
fn replayed_datagrams_make_no_node_alive() {
    let (mut a, mut b, now) = met();
    let recorded = [
        a.challenge(at(2), now).expect("there is room"),
        a.seal_gossip(b"hello", at(2)).expect("it is known"),
        a.seal(DatagramKind::Answer, 2, &[7; CHALLENGE_BYTES]),
    ];
    // The receiver has restarted with the same incarnation, so that only the proof can refuse.
    let mut fresh = node(2, ONE);
    fresh.counter = b.counter;
    for datagram in &recorded {
        let received = fresh.receive(datagram, at(1), now);
        assert!(received.gossip.is_none());
        let bytes: usize = received.replies.iter().map(Vec::len).sum();
        assert!(bytes <= 3 * datagram.len());
    }
    assert_eq!(fresh.peers_seen().count(), 0);
    // Datagrams that the earlier process had sent before it was met again are stale.
    meet(&mut a, &mut fresh, now);
    for datagram in &recorded {
        assert_eq!(dropped(&mut fresh, datagram, now), Some(DatagramDropReason::Stale));
    }
    assert_eq!(dropped(&mut b, &recorded[1], now), None);
}

#[test]
fn new_incarnation_takes_over_the_address() {
    let (mut a, b, now) = met();
    let mut restarted = node(3, ONE);
    let gossip = a.seal_gossip(b"hello", at(2)).expect("it is known");
    assert_eq!(dropped(&mut restarted, &gossip, now), Some(DatagramDropReason::Misaddressed));
    meet(&mut a, &mut restarted, now);
    let gossip = a.seal_gossip(b"hello", at(2)).expect("it is known");
    assert_eq!(dropped(&mut restarted, &gossip, now), None);
    drop(b);
}

#[test]
fn an_answer_counts_once_and_in_time() {
    let (mut a, mut b, now) = (node(1, ONE), node(2, ONE), Instant::now());
    let challenge = a.challenge(at(2), now).expect("there is room");
    let answer = &b.receive(&challenge, at(1), now).replies[0];
    // An answer from another address proves nothing.
    assert_eq!(a.receive(answer, at(9), now).dropped, Some(DatagramDropReason::Stale));
    let late = now + CHALLENGE_LASTS;
    a.challenge(at(5), late);
    assert_eq!(a.receive(answer, at(2), late).dropped, Some(DatagramDropReason::Stale));
    assert_eq!(a.peers_seen().count(), 0);
}

#[test]
fn node_accepts_both_secrets_while_the_key_changes() {
    let both = [format!("{ONE}\n{OTHER}"), format!("{OTHER}\n{ONE}")];
    // The steps of a key rotation: the new secret is added, then first, then alone.
    for (one, other) in [(ONE, &both[0][..]), (&both[0], &both[1]), (&both[1], OTHER)] {
        for (one, other) in [(one, other), (other, one)] {
            let (mut a, mut b, now) = (node(1, one), node(2, other), Instant::now());
            meet(&mut a, &mut b, now);
            let gossip = a.seal_gossip(b"hello", at(2)).expect("it is known");
            assert_eq!(dropped(&mut b, &gossip, now), None);
        }
    }
}

#[test]
fn strangers_take_a_bounded_room() {
    let (mut a, now) = (node(1, ONE), Instant::now());
    for i in 0..2 * CHALLENGES_MAX {
        let mut stranger = DatagramSealer::new(ClusterKey::parse(ONE).expect("a good key"), 10 + i as u64);
        let challenge = stranger.challenge(at(1), now).expect("there is room");
        a.receive(&challenge, at(1000 + i as u16), now);
    }
    assert_eq!(a.challenges.len(), CHALLENGES_OF_STRANGERS_MAX);
    assert!(a.challenge(at(2), now).is_some());
    for port in 10_000..20_000 {
        a.challenge(at(port), now);
    }
    assert_eq!(a.challenges.len(), CHALLENGES_MAX);
    for i in 0..2 * PEERS_MAX {
        let (mut b, later) = (node(2, ONE), now + CHALLENGE_LASTS * (i as u32 + 1));
        b.incarnation = 1_000 + i as u64;
        b.key = keys_of(&b.cluster_key, b.incarnation).next().expect("a key");
        meet(&mut a, &mut b, later);
        assert!(a.by_address.len() == 1 && a.peers.len() <= PEERS_MAX);
    }
}

#[test]
fn too_much_gossip_is_not_sent() {
    let (mut a, _, _) = met();
    let bytes_max = DATAGRAM_BYTES_MAX - HEADER_BYTES - TAG_BYTES;
    assert_eq!(
        a.seal_gossip(&vec![0; bytes_max], at(2)).map(|sealed| sealed.len()),
        Some(DATAGRAM_BYTES_MAX)
    );
    assert!(a.seal_gossip(&vec![0; bytes_max + 1], at(2)).is_none());
}
