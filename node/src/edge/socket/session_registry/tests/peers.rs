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
        let sessions = among_others();
        let there = ownership_of(incarnation, NOW_MS + 7);
        let previous = sessions.resumable(&there).expect("of a run that is known");
        assert_eq!(previous.is_open, is_open);
        let OpenedSession { ownership, previous, .. } = sessions.open_session(Some(previous), slot_of(1));
        assert_eq!((ownership.connection_id, ownership.epoch), (there.connection_id, NOW_MS + 8));
        assert_eq!(previous, Some(there.location));
        assert!(sessions.ended_generations().is_empty(), "its place means nothing here");
    }
    assert!(among_others().resumable(&ownership_of(12, 1)).is_none());
}

/// The client is faster than the other node's report.
#[test]
fn a_key_that_is_newer_than_what_is_known_here_says_where_it_is() {
    let sessions = among_others();
    let (here, _) = sessions.take(sessions.resumable(&ownership_of(ENDED, 1)), slot_of(1));
    let there = ownership_of(OTHER, here.epoch + 7);
    let OpenedSession { ownership: back, previous, .. } =
        sessions.open_session(sessions.resumable(&there), slot_of(2));
    assert_eq!((back.epoch, previous), (there.epoch + 1, Some(there.location)));
    assert_eq!(
        sessions.ended_generations(),
        [1],
        "that node may not know that it was here, or die before it says so"
    );
    let taken = SessionTakeover { ownership: there, previous: here.location };
    assert_eq!((sessions.record_peer_takeover(&taken), sessions.ended_generations()), (None, vec![]));
    sessions.record_peer_close(&ClosedSession { connection_id: back.connection_id, owner: back.owner() });
    assert!(sessions.resumable(&back).is_none());
    assert!(
        sessions.resumable(&ownership_of(OTHER, back.epoch + 1)).is_some_and(|previous| previous.is_open)
    );
}

#[test]
fn new_owner_learns_of_missing_socket_via_owner_in_between() {
    let sessions = among_others();
    let lost = sessions.fresh(1);
    sessions.end(&lost, false, Vec::new());
    let there = SessionOwnership { connection_id: lost.connection_id, ..ownership_of(OTHER, NOW_MS) };
    let previous = sessions.resumable(&there).expect("within the window");
    assert!(previous.is_open, "there");
    let OpenedSession { ownership: back, previous, .. } = sessions.open_session(Some(previous), slot_of(2));
    assert_eq!((back.epoch, previous), (NOW_MS + 1, Some(there.location)));
    let not_open = SocketlessTakeover { connection_id: lost.connection_id, epoch: there.epoch };
    let taken = SessionTakeover { ownership: there, previous: lost.location };
    assert_eq!(sessions.record_peer_takeover(&taken), Some(not_open), "it had no seat to take along");
    assert!(sessions.ended_generations().is_empty());
}

#[test]
fn open_session_keeps_quota_slot_with_key_of_ended_incarnation() {
    let sessions = among_others();
    let (here, _) = sessions.take(sessions.resumable(&ownership_of(OTHER, 1)), slot_of(1));
    let previous = sessions.resumable(&ownership_of(ENDED, here.epoch + 1)).expect("within the window");
    assert!(previous.is_open);
    sessions.open_session(Some(previous), slot_of(2));
    assert_eq!(sessions.ended_generations(), [1]);
}

#[test]
fn takeover_by_peer_ends_socket_once_and_client_can_resume() {
    let sessions = among_others();
    let first = sessions.fresh(1);
    let there = SessionOwnership { connection_id: first.connection_id, ..ownership_of(OTHER, 5) };
    let taken = SessionTakeover { ownership: there, previous: first.location };
    let says = [&taken, &taken].map(|taken| sessions.record_peer_takeover(taken));
    assert_eq!((says, sessions.ended_generations()), ([None, None], vec![1]));
    assert!(!sessions.end(&first, false, Vec::new()), "it is another's");
    // Resumed with its earlier key: the present owner is told.
    let previous = sessions.resumable(&first).expect("within the window");
    assert!(previous.is_open, "there");
    let OpenedSession { ownership: second, previous, .. } = sessions.open_session(Some(previous), slot_of(2));
    assert!(second.epoch > there.epoch && previous == Some(there.location));
    sessions.record_peer_takeover(&taken);
    assert!(sessions.ended_generations().is_empty(), "that was before");
    assert!(sessions.end(&second, false, Vec::new()));
}

#[test]
fn concurrent_takeovers_by_two_nodes_have_one_winner() {
    for (epoch_ahead, stays) in [(0, false), (1, false), (-1, true)] {
        let sessions = among_others();
        let previous = sessions.resumable(&ownership_of(ENDED, 1));
        let (here, _) = sessions.take(previous, slot_of(1));
        let there = ownership_of(OTHER, here.epoch.checked_add_signed(epoch_ahead).unwrap());
        assert_eq!(here.owner() > there.owner(), stays);
        sessions.record_peer_takeover(&SessionTakeover {
            ownership: there,
            previous: ownership_of(ENDED, 1).location,
        });
        assert_eq!(sessions.ended_generations().is_empty(), stays);
        assert_eq!(sessions.end(&here, false, Vec::new()), stays);
    }
}

#[test]
fn socket_ends_though_second_takeover_is_received_first() {
    let sessions = among_others();
    let here = sessions.fresh(1);
    let first = SessionOwnership { connection_id: here.connection_id, ..ownership_of(OTHER, 5) };
    let second = SessionOwnership { connection_id: here.connection_id, ..ownership_of(ENDED, 6) };
    sessions.record_peer_takeover(&SessionTakeover { ownership: second, previous: first.location });
    assert!(sessions.ended_generations().is_empty(), "nobody has said that it was here");
    sessions.record_peer_takeover(&SessionTakeover { ownership: first, previous: here.location });
    assert_eq!(sessions.ended_generations(), [1]);
    assert!(!sessions.end(&here, false, Vec::new()), "it is another's");
}

#[test]
fn takeovers_from_one_socket_never_report_it_missing() {
    let sessions = among_others();
    let here = sessions.fresh(1);
    for epoch in [6, 5, 7] {
        let ownership = SessionOwnership { connection_id: here.connection_id, ..ownership_of(OTHER, epoch) };
        assert_eq!(
            sessions.record_peer_takeover(&SessionTakeover { ownership, previous: here.location }),
            None
        );
    }
    assert_eq!(sessions.ended_generations(), [1]);
}

#[test]
fn socket_ends_though_remote_end_comes_before_the_takeover() {
    let sessions = among_others();
    let here = sessions.fresh(1);
    let there = SessionOwnership { connection_id: here.connection_id, ..ownership_of(OTHER, 5) };
    sessions.record_peer_close(&ClosedSession { connection_id: here.connection_id, owner: there.owner() });
    let taken = SessionTakeover { ownership: there, previous: here.location };
    assert_eq!((sessions.record_peer_takeover(&taken), sessions.ended_generations()), (None, vec![1]));
}

#[test]
fn takeover_of_session_without_local_socket_is_reported() {
    let taken = |of: &SessionOwnership, epoch| {
        let ownership = SessionOwnership { connection_id: of.connection_id, ..ownership_of(OTHER, epoch) };
        SessionTakeover { ownership, previous: of.location }
    };
    let says =
        |of: &SessionOwnership, epoch| Some(SocketlessTakeover { connection_id: of.connection_id, epoch });
    let sessions = among_others();
    let (open, lost, over) = (sessions.fresh(1), sessions.fresh(2), sessions.fresh(3));
    sessions.end(&lost, false, Vec::new());
    sessions.end(&over, true, Vec::new());
    assert_eq!(sessions.record_peer_takeover(&taken(&open, 5)), None);
    assert_eq!(sessions.record_peer_takeover(&taken(&lost, 5)), says(&lost, 5));
    assert_eq!(sessions.record_peer_takeover(&taken(&over, 5)), says(&over, 5));
    assert_eq!(sessions.record_peer_takeover(&taken(&lost, 6)), None, "it was on another node before");
    let remote = ownership_of(ENDED, 5);
    assert_eq!(sessions.record_peer_takeover(&taken(&remote, 7)), None, "it was never here");
}

#[test]
fn session_owner_is_notified_that_there_was_no_socket() {
    let sessions = among_others();
    let previous = sessions.resumable(&ownership_of(OTHER, 1));
    let (first, _) = sessions.take(previous, slot_of(4));
    let missed = || sessions.drain_inputs().1;
    let of_first = SocketlessTakeover { connection_id: first.connection_id, epoch: first.epoch };
    assert_eq!((sessions.handle_takeover_miss(of_first), missed()), (None, vec![4]));
    let (second, _) = sessions.take(sessions.resumable(&first), slot_of(5));
    let of_second = SocketlessTakeover { epoch: second.epoch, ..of_first };
    assert_eq!((sessions.handle_takeover_miss(of_first), missed()), (None, vec![5]));
    assert_eq!(
        sessions.handle_takeover_miss(SocketlessTakeover { epoch: second.epoch + 1, ..of_first }),
        None,
        "it is not known"
    );
    let third =
        SessionOwnership { connection_id: first.connection_id, ..ownership_of(OTHER, second.epoch + 7) };
    sessions.record_peer_takeover(&SessionTakeover { ownership: third, previous: second.location });
    let of_third = SocketlessTakeover { epoch: third.epoch, ..of_first };
    assert_eq!(sessions.handle_takeover_miss(of_second), Some((OTHER, of_third)));
    assert_eq!(
        sessions.handle_takeover_miss(of_third),
        Some((OTHER, of_third)),
        "of two in one epoch it was the other"
    );
    let lesser =
        SessionOwnership { connection_id: ConnectionId::from_bytes([9; 16]), ..ownership_of(OWN - 1, 7) };
    sessions.record_peer_takeover(&SessionTakeover { ownership: lesser, previous: second.location });
    let of_lesser = SocketlessTakeover { connection_id: lesser.connection_id, epoch: 7 };
    assert_eq!(sessions.handle_takeover_miss(of_lesser), None, "it would come back");
    let (fourth, _) = sessions.take(sessions.resumable(&third), slot_of(6));
    sessions.end(&fourth, false, Vec::new());
    missed();
    assert_eq!((sessions.handle_takeover_miss(of_third), missed()), (None, vec![]), "it is lost");
}

#[test]
fn session_closed_for_good_by_peer_is_closed_here_too() {
    let over = |of: &SessionOwnership| ClosedSession { connection_id: of.connection_id, owner: of.owner() };
    for incarnation in [OTHER, ENDED] {
        let sessions = among_others();
        let there = ownership_of(incarnation, 5);
        assert!(sessions.resumable(&there).is_some());
        let previous = sessions.resumable(&there);
        sessions.record_peer_close(&over(&there));
        assert!(sessions.resumable(&there).is_none());
        let OpenedSession { ownership: fresh, previous, .. } = sessions.open_session(previous, slot_of(1));
        assert!(previous.is_none() && fresh.connection_id != there.connection_id, "it ended in between");
        // A node that had not heard of the close has taken the session over.
        let taken = SessionOwnership { epoch: 6, ..ownership_of(OTHER, 6) };
        sessions.record_peer_takeover(&SessionTakeover { ownership: taken, previous: there.location });
        sessions.record_peer_close(&over(&there));
        assert!(sessions.resumable(&there).is_some_and(|previous| previous.is_open), "that was before");
        sessions.record_peer_close(&over(&taken));
        assert!(sessions.resumable(&there).is_none());
        assert_eq!(sessions.records.len(), 1);
    }
}

#[test]
fn earlier_keys_fail_once_session_taken_over_here_is_closed() {
    for of in [ownership_of(OTHER, 1), ownership_of(ENDED, 1), ownership_of(EARLIER, 1)] {
        let sessions = among_others();
        let OpenedSession { ownership: here, previous, .. } =
            sessions.open_session(sessions.resumable(&of), slot_of(1));
        assert!(previous.is_some());
        assert!(sessions.end(&here, true, vec![(7, 70)]));
        assert!(sessions.resumable(&of).is_none() && sessions.resumable(&here).is_none());
        assert_eq!((sessions.records.len(), sessions.retained_total.load(Ordering::Relaxed)), (1, 0));
    }
}

#[test]
fn closed_session_records_are_bounded_and_evict_no_lost_one() {
    let sessions = sessions(&Limits { lost_connections: 3, ..Limits::default() });
    let lost = sessions.fresh(1);
    sessions.end(&lost, false, Vec::new());
    for number in 10..20 {
        let (connection_id, owner) = (ConnectionId::from_bytes([number; 16]), ownership_of(OTHER, 5).owner());
        sessions.record_peer_close(&ClosedSession { connection_id, owner });
    }
    assert!(sessions.resumable(&lost).is_some());
    assert_eq!(sessions.records.len(), 1 + 3);
}
