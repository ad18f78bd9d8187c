//! Takeovers among several nodes.

use super::*;

fn among_others() -> SessionRegistry {
    let status_of = |incarnation| match incarnation {
        OTHER => Some(IncarnationStatus::Alive),
        ENDED => Some(IncarnationStatus::Ended),
        _ => None,
    };
    within(60_000).with_peer_incarnations(Box::new(status_of))
}

fn ownership_of(incarnation: u64, epoch: u64) -> SessionOwnership {
    let location = SessionLocation { incarnation, ..slot_of(1) };
    SessionOwnership { connection_id: ConnectionId::from_bytes([3; 16]), epoch, location }
}

#[test]
fn session_of_another_node_is_taken_over_above_its_epoch() {
    for (incarnation, is_open) in [(OTHER, true), (ENDED, false)] {
        let identities = among_others();
        let there = ownership_of(incarnation, NOW_MS + 7);
        let previous = identities.resumable(&there).expect("of a run that is known");
        assert_eq!(previous.is_open, is_open);
        let OpenedSession { ownership, previous, .. } = identities.open_session(Some(previous), slot_of(1));
        assert_eq!((ownership.connection_id, ownership.epoch), (there.connection_id, NOW_MS + 8));
        assert_eq!(previous, Some(there.location));
        assert!(identities.ended_generations().is_empty(), "its place means nothing here");
    }
    assert!(among_others().resumable(&ownership_of(12, 1)).is_none());
}

/// The client is faster than the other node's report.
#[test]
fn a_key_that_is_newer_than_what_is_known_here_says_where_it_is() {
    let identities = among_others();
    let (here, _) = identities.take(identities.resumable(&ownership_of(ENDED, 1)), slot_of(1));
    let there = ownership_of(OTHER, here.epoch + 7);
    let OpenedSession { ownership: back, previous, .. } =
        identities.open_session(identities.resumable(&there), slot_of(2));
    assert_eq!((back.epoch, previous), (there.epoch + 1, Some(there.location)));
    assert_eq!(
        identities.ended_generations(),
        [1],
        "that node may not know that it was here, or die before it says so"
    );
    let taken = SessionTakeover { ownership: there, previous: here.location };
    assert_eq!((identities.record_peer_takeover(&taken), identities.ended_generations()), (None, vec![]));
    identities.record_peer_close(&ClosedSession { connection_id: back.connection_id, owner: back.owner() });
    assert!(identities.resumable(&back).is_none());
    assert!(
        identities.resumable(&ownership_of(OTHER, back.epoch + 1)).is_some_and(|previous| previous.is_open)
    );
}

#[test]
fn new_owner_learns_of_missing_socket_via_owner_in_between() {
    let identities = among_others();
    let lost = identities.fresh(1);
    identities.end(&lost, false, Vec::new());
    let there = SessionOwnership { connection_id: lost.connection_id, ..ownership_of(OTHER, NOW_MS) };
    let previous = identities.resumable(&there).expect("within the window");
    assert!(previous.is_open, "there");
    let OpenedSession { ownership: back, previous, .. } = identities.open_session(Some(previous), slot_of(2));
    assert_eq!((back.epoch, previous), (NOW_MS + 1, Some(there.location)));
    let not_open = SocketlessTakeover { connection_id: lost.connection_id, epoch: there.epoch };
    let taken = SessionTakeover { ownership: there, previous: lost.location };
    assert_eq!(identities.record_peer_takeover(&taken), Some(not_open), "it had no seat to take along");
    assert!(identities.ended_generations().is_empty());
}

#[test]
fn open_session_keeps_quota_slot_with_key_of_ended_incarnation() {
    let identities = among_others();
    let (here, _) = identities.take(identities.resumable(&ownership_of(OTHER, 1)), slot_of(1));
    let previous = identities.resumable(&ownership_of(ENDED, here.epoch + 1)).expect("within the window");
    assert!(previous.is_open);
    identities.open_session(Some(previous), slot_of(2));
    assert_eq!(identities.ended_generations(), [1]);
}

#[test]
fn takeover_by_peer_ends_socket_once_and_client_can_resume() {
    let identities = among_others();
    let first = identities.fresh(1);
    let there = SessionOwnership { connection_id: first.connection_id, ..ownership_of(OTHER, 5) };
    let taken = SessionTakeover { ownership: there, previous: first.location };
    let says = [&taken, &taken].map(|taken| identities.record_peer_takeover(taken));
    assert_eq!((says, identities.ended_generations()), ([None, None], vec![1]));
    assert!(!identities.end(&first, false, Vec::new()), "it is another's");
    // Resumed with its earlier key: the present owner is told.
    let previous = identities.resumable(&first).expect("within the window");
    assert!(previous.is_open, "there");
    let OpenedSession { ownership: second, previous, .. } =
        identities.open_session(Some(previous), slot_of(2));
    assert!(second.epoch > there.epoch && previous == Some(there.location));
    identities.record_peer_takeover(&taken);
    assert!(identities.ended_generations().is_empty(), "that was before");
    assert!(identities.end(&second, false, Vec::new()));
}

#[test]
fn concurrent_takeovers_by_two_nodes_have_one_winner() {
    for (epoch_ahead, stays) in [(0, false), (1, false), (-1, true)] {
        let identities = among_others();
        let previous = identities.resumable(&ownership_of(ENDED, 1));
        let (here, _) = identities.take(previous, slot_of(1));
        let there = ownership_of(OTHER, here.epoch.checked_add_signed(epoch_ahead).unwrap());
        assert_eq!(here.owner() > there.owner(), stays);
        identities.record_peer_takeover(&SessionTakeover {
            ownership: there,
            previous: ownership_of(ENDED, 1).location,
        });
        assert_eq!(identities.ended_generations().is_empty(), stays);
        assert_eq!(identities.end(&here, false, Vec::new()), stays);
    }
}

#[test]
fn socket_ends_though_second_takeover_is_received_first() {
    let identities = among_others();
    let here = identities.fresh(1);
    let first = SessionOwnership { connection_id: here.connection_id, ..ownership_of(OTHER, 5) };
    let second = SessionOwnership { connection_id: here.connection_id, ..ownership_of(ENDED, 6) };
    identities.record_peer_takeover(&SessionTakeover { ownership: second, previous: first.location });
    assert!(identities.ended_generations().is_empty(), "nobody has said that it was here");
    identities.record_peer_takeover(&SessionTakeover { ownership: first, previous: here.location });
    assert_eq!(identities.ended_generations(), [1]);
    assert!(!identities.end(&here, false, Vec::new()), "it is another's");
}

#[test]
fn takeovers_from_one_socket_never_report_it_missing() {
    let identities = among_others();
    let here = identities.fresh(1);
    for epoch in [6, 5, 7] {
        let ownership = SessionOwnership { connection_id: here.connection_id, ..ownership_of(OTHER, epoch) };
        assert_eq!(
            identities.record_peer_takeover(&SessionTakeover { ownership, previous: here.location }),
            None
        );
    }
    assert_eq!(identities.ended_generations(), [1]);
}

#[test]
fn socket_ends_though_remote_end_comes_before_the_takeover() {
    let identities = among_others();
    let here = identities.fresh(1);
    let there = SessionOwnership { connection_id: here.connection_id, ..ownership_of(OTHER, 5) };
    identities.record_peer_close(&ClosedSession { connection_id: here.connection_id, owner: there.owner() });
    let taken = SessionTakeover { ownership: there, previous: here.location };
    assert_eq!((identities.record_peer_takeover(&taken), identities.ended_generations()), (None, vec![1]));
}

#[test]
fn takeover_of_session_without_local_socket_is_reported() {
    let taken = |of: &SessionOwnership, epoch| {
        let ownership = SessionOwnership { connection_id: of.connection_id, ..ownership_of(OTHER, epoch) };
        SessionTakeover { ownership, previous: of.location }
    };
    let says =
        |of: &SessionOwnership, epoch| Some(SocketlessTakeover { connection_id: of.connection_id, epoch });
    let identities = among_others();
    let (open, lost, over) = (identities.fresh(1), identities.fresh(2), identities.fresh(3));
    identities.end(&lost, false, Vec::new());
    identities.end(&over, true, Vec::new());
    assert_eq!(identities.record_peer_takeover(&taken(&open, 5)), None);
    assert_eq!(identities.record_peer_takeover(&taken(&lost, 5)), says(&lost, 5));
    assert_eq!(identities.record_peer_takeover(&taken(&over, 5)), says(&over, 5));
    assert_eq!(identities.record_peer_takeover(&taken(&lost, 6)), None, "it was on another node before");
    let remote = ownership_of(ENDED, 5);
    assert_eq!(identities.record_peer_takeover(&taken(&remote, 7)), None, "it was never here");
}

#[test]
fn session_owner_is_notified_that_there_was_no_socket() {
    let identities = among_others();
    let previous = identities.resumable(&ownership_of(OTHER, 1));
    let (first, _) = identities.take(previous, slot_of(4));
    let missed = || identities.drain_inputs().1;
    let of_first = SocketlessTakeover { connection_id: first.connection_id, epoch: first.epoch };
    assert_eq!((identities.handle_takeover_miss(of_first), missed()), (None, vec![4]));
    let (second, _) = identities.take(identities.resumable(&first), slot_of(5));
    let of_second = SocketlessTakeover { epoch: second.epoch, ..of_first };
    assert_eq!((identities.handle_takeover_miss(of_first), missed()), (None, vec![5]));
    assert_eq!(
        identities.handle_takeover_miss(SocketlessTakeover { epoch: second.epoch + 1, ..of_first }),
        None,
        "it is not known"
    );
    let third =
        SessionOwnership { connection_id: first.connection_id, ..ownership_of(OTHER, second.epoch + 7) };
    identities.record_peer_takeover(&SessionTakeover { ownership: third, previous: second.location });
    let of_third = SocketlessTakeover { epoch: third.epoch, ..of_first };
    assert_eq!(identities.handle_takeover_miss(of_second), Some((OTHER, of_third)));
    assert_eq!(
        identities.handle_takeover_miss(of_third),
        Some((OTHER, of_third)),
        "of two in one epoch it was the other"
    );
    let lesser =
        SessionOwnership { connection_id: ConnectionId::from_bytes([9; 16]), ..ownership_of(OWN - 1, 7) };
    identities.record_peer_takeover(&SessionTakeover { ownership: lesser, previous: second.location });
    let of_lesser = SocketlessTakeover { connection_id: lesser.connection_id, epoch: 7 };
    assert_eq!(identities.handle_takeover_miss(of_lesser), None, "it would come back");
    let (fourth, _) = identities.take(identities.resumable(&third), slot_of(6));
    identities.end(&fourth, false, Vec::new());
    missed();
    assert_eq!((identities.handle_takeover_miss(of_third), missed()), (None, vec![]), "it is lost");
}

#[test]
fn session_closed_for_good_by_peer_is_closed_here_too() {
    let over = |of: &SessionOwnership| ClosedSession { connection_id: of.connection_id, owner: of.owner() };
    for incarnation in [OTHER, ENDED] {
        let identities = among_others();
        let there = ownership_of(incarnation, 5);
        assert!(identities.resumable(&there).is_some());
        let previous = identities.resumable(&there);
        identities.record_peer_close(&over(&there));
        assert!(identities.resumable(&there).is_none());
        let OpenedSession { ownership: fresh, previous, .. } = identities.open_session(previous, slot_of(1));
        assert!(previous.is_none() && fresh.connection_id != there.connection_id, "it ended in between");
        // A node that had not heard of the close has taken the session over.
        let taken = SessionOwnership { epoch: 6, ..ownership_of(OTHER, 6) };
        identities.record_peer_takeover(&SessionTakeover { ownership: taken, previous: there.location });
        identities.record_peer_close(&over(&there));
        assert!(identities.resumable(&there).is_some_and(|previous| previous.is_open), "that was before");
        identities.record_peer_close(&over(&taken));
        assert!(identities.resumable(&there).is_none());
        assert_eq!(identities.records.len(), 1);
    }
}

#[test]
fn earlier_keys_fail_once_session_taken_over_here_is_closed() {
    for of in [ownership_of(OTHER, 1), ownership_of(ENDED, 1), ownership_of(EARLIER, 1)] {
        let identities = among_others();
        let OpenedSession { ownership: here, previous, .. } =
            identities.open_session(identities.resumable(&of), slot_of(1));
        assert!(previous.is_some());
        assert!(identities.end(&here, true, vec![(7, 70)]));
        assert!(identities.resumable(&of).is_none() && identities.resumable(&here).is_none());
        assert_eq!((identities.records.len(), identities.retained_total.load(Ordering::Relaxed)), (1, 0));
    }
}

#[test]
fn closed_session_records_are_bounded_and_evict_no_lost_one() {
    let identities = identities(&Limits { lost_connections: 3, ..Limits::default() });
    let lost = identities.fresh(1);
    identities.end(&lost, false, Vec::new());
    for number in 10..20 {
        let (connection_id, owner) = (ConnectionId::from_bytes([number; 16]), ownership_of(OTHER, 5).owner());
        identities.record_peer_close(&ClosedSession { connection_id, owner });
    }
    assert!(identities.resumable(&lost).is_some());
    assert_eq!(identities.records.len(), 1 + 3);
}
