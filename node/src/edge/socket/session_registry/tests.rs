use std::time::Duration;

use super::super::Shards;
use super::*;
use crate::accounts::Account;

const NOW_MS: u64 = 1_767_225_600_500;
/// Incarnations whose sessions can be resumed here.
const OWN: u64 = 1;
const EARLIER: u64 = 2;
/// Incarnation before [`EARLIER`], with 50 s of its resume window over.
const EARLIEST: u64 = 3;

fn identities(limits: &Limits) -> SessionRegistry {
    let (shards, _polls) = Shards::prepare(2).unwrap();
    let keys = ConnectionKeys::new(&[1; 32]);
    SessionRegistry::new(
        keys,
        OWN,
        vec![(EARLIER, 0), (EARLIEST, 50_000)],
        shards.handles(),
        Clock::manual(NOW_MS),
        limits,
    )
}

fn within(window_ms: u64) -> SessionRegistry {
    identities(&Limits { resume_window_ms: window_ms, ..Limits::default() })
}

fn slot_of(generation: u32) -> SessionLocation {
    SessionLocation { incarnation: OWN, shard: (generation % 2) as u16, slot: generation / 2, generation }
}

fn anybody() -> Principal {
    Principal::anonymous(Arc::new(Account::plain("acme")))
}

impl SessionRegistry {
    fn key_of(&self, ownership: &SessionOwnership) -> String {
        self.keys.seal(ownership, &anybody(), None)
    }

    fn resumable(&self, ownership: &SessionOwnership) -> Option<ResumableSession> {
        self.find_resumable(&self.key_of(ownership), &anybody(), None)
    }

    fn take(&self, previous: Option<ResumableSession>, place: SessionLocation) -> (SessionOwnership, bool) {
        let OpenedSession { ownership, previous, .. } = self.open_session(previous, place);
        (ownership, previous.is_some())
    }

    fn fresh(&self, generation: u32) -> SessionOwnership {
        let (ownership, resumed) = self.take(None, slot_of(generation));
        assert!(!resumed);
        ownership
    }

    /// Generations of sockets that were told to end, and of those whose takeover found no open socket.
    fn drain_inputs(&self) -> (Vec<u32>, Vec<u32>) {
        let (mut to_end, mut not_open, mut inputs) = (Vec::new(), Vec::new(), Vec::new());
        for handle in &self.handles {
            handle.inbox.take(&mut inputs);
            for input in inputs.drain(..) {
                match input {
                    Input::TakenOver { generation, .. } => to_end.push(generation),
                    Input::TakeoverMiss { generation, .. } => not_open.push(generation),
                    _ => unreachable!("nothing else is said"),
                }
            }
        }
        (to_end, not_open)
    }

    fn ended_generations(&self) -> Vec<u32> {
        self.drain_inputs().0
    }
}

#[test]
fn lost_session_is_taken_over_once_with_a_higher_epoch() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    assert!(identities.end(&first, false, Vec::new()));
    let previous = identities.resumable(&first).expect("it can be taken up");
    assert!(!previous.is_open);
    let (second, resumed) = identities.take(Some(previous), slot_of(2));
    assert!(resumed && second.epoch > first.epoch);
    assert_eq!((second.connection_id, second.location), (first.connection_id, slot_of(2)));
    assert_ne!(identities.fresh(3).connection_id, first.connection_id);
    assert!(identities.ended_generations().is_empty());
}

#[test]
fn an_open_one_is_taken_over_and_its_end_says_nothing_more() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let previous = identities.resumable(&first).expect("it is open");
    assert!(previous.is_open);
    let (second, resumed) = identities.take(Some(previous), slot_of(2));
    assert!(resumed);
    assert_eq!(identities.ended_generations(), [1]);
    assert!(!identities.end(&first, false, Vec::new()), "another socket has it");
    let previous = identities.resumable(&first).expect("a key of an earlier epoch is good within the window");
    let (third, resumed) = identities.take(Some(previous), slot_of(3));
    assert!(resumed && third.epoch > second.epoch);
    assert_eq!(identities.ended_generations(), [2], "whoever holds it now");
    assert!(!identities.end(&second, true, Vec::new()));
    assert!(identities.end(&third, false, Vec::new()));
    assert!(identities.resumable(&second).is_some());
}

#[test]
fn two_that_come_at_once_have_it_one_after_the_other() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    identities.end(&first, false, Vec::new());
    let (one, other) = (identities.resumable(&first), identities.resumable(&first));
    let (second, _) = identities.take(one, slot_of(2));
    let (third, resumed) = identities.take(other, slot_of(3));
    assert!(resumed && third.epoch > second.epoch);
    assert_eq!(identities.ended_generations(), [2]);
}

#[test]
fn session_closed_for_good_cannot_be_resumed() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let previous = identities.resumable(&first);
    assert!(identities.end(&first, true, Vec::new()));
    assert!(identities.resumable(&first).is_none());
    let (fresh, resumed) = identities.take(previous, slot_of(2));
    assert!(!resumed && fresh.connection_id != first.connection_id, "it ended between look and begin");
}

#[test]
fn takeover_of_ended_socket_must_check_its_quota_slot() {
    for for_good in [false, true] {
        let identities = within(60_000);
        let first = identities.fresh(1);
        let previous = identities.resumable(&first);
        identities.end(&first, for_good, Vec::new());
        let second = identities.open_session(previous, slot_of(2));
        assert_eq!((second.previous.is_none(), second.has_quota_slot), (for_good, false));
        let third = identities.open_session(identities.resumable(&second.ownership), slot_of(3));
        assert!(third.has_quota_slot && identities.ended_generations() == [2]);
        identities.end(&third.ownership, false, Vec::new());
        assert!(
            identities.open_session(identities.resumable(&third.ownership), slot_of(4)).has_quota_slot,
            "as anybody"
        );
    }
}

#[test]
fn lost_session_expires_and_open_session_keeps_latest_key() {
    let identities = within(30);
    let first = identities.fresh(1);
    let (second, _) = identities.take(identities.resumable(&first), slot_of(2));
    let lost = identities.fresh(3);
    let since = Instant::now();
    identities.end(&lost, false, Vec::new());
    while identities.resumable(&lost).is_some() || identities.resumable(&first).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= Duration::from_millis(30), "late it may be, early never");
    assert!(identities.resumable(&second).is_some_and(|previous| previous.is_open));
    assert!(identities.take(identities.resumable(&second), slot_of(4)).1);
}

#[test]
fn session_of_earlier_incarnation_resumes_within_start_window() {
    let of = |incarnation, generation| {
        let place = SessionLocation { incarnation, ..slot_of(generation) };
        SessionOwnership { connection_id: ConnectionId::from_bytes([3; 16]), epoch: 9, location: place }
    };
    let identities = within(60_000);
    assert!(identities.resumable(&of(77, 1)).is_none(), "of a run that nobody knows");
    let previous = identities.resumable(&of(EARLIER, 1)).expect("of a run that is known");
    assert!(!previous.is_open);
    let (ownership, resumed) = identities.take(Some(previous), slot_of(1));
    assert!(resumed && ownership.epoch > 9 && ownership.connection_id == of(EARLIER, 1).connection_id);
    assert!(identities.resumable(&of(EARLIEST, 1)).is_some());
    assert!(within(49_000).resumable(&of(EARLIEST, 1)).is_none(), "its time was over before the start");
    let short = within(1);
    let since = Instant::now();
    while short.resumable(&of(EARLIER, 1)).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
}

#[test]
fn lost_connections_at_the_limit_and_one_past() {
    for lost_connections in [0, 3] {
        let identities = identities(&Limits { lost_connections, ..Limits::default() });
        let tenures: Vec<SessionOwnership> = (1..=4).map(|generation| identities.fresh(generation)).collect();
        assert!(tenures.iter().all(|ownership| identities.end(ownership, false, Vec::new())));
        let kept: Vec<bool> =
            tenures.iter().map(|ownership| identities.resumable(ownership).is_some()).collect();
        let expected: Vec<bool> = (0..4).map(|place| place + lost_connections >= 4).collect();
        assert_eq!(kept, expected, "the oldest is forgotten");
        assert_eq!(identities.records.len(), lost_connections);
    }
}

#[test]
fn lost_session_remembers_its_channels_for_the_window() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let since = |channel| identities.retained_since(first.connection_id, channel);
    assert!(identities.end(&first, false, vec![(7, 70), (8, 80)]));
    assert_eq!((since(7), since(8), since(9)), (Some(70), Some(80), None));
    let (second, _) = identities.take(identities.resumable(&first), slot_of(2));
    assert_eq!(since(7), Some(70), "while it comes back");
    // The second socket attaches one channel only, from a later sequence, before it is lost.
    assert!(identities.end(&second, false, vec![(7, 75), (9, 90)]));
    assert_eq!((since(7), since(8), since(9)), (Some(75), Some(80), Some(90)));
    assert_eq!(identities.retained_total.load(Ordering::Relaxed), 3);
    let (third, _) = identities.take(identities.resumable(&first), slot_of(3));
    assert!(identities.end(&third, true, vec![(7, 75)]));
    assert_eq!((since(7), identities.retained_total.load(Ordering::Relaxed)), (None, 0), "it is over");
}

#[test]
fn taken_over_socket_reports_since_when_it_had_its_channels() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let since = |channel| identities.retained_since(first.connection_id, channel);
    let (second, _) = identities.take(identities.resumable(&first), slot_of(2));
    assert_eq!(since(7), None, "nobody has told yet");
    assert!(!identities.end(&first, false, vec![(7, 70)]));
    assert_eq!(since(7), Some(70));
    let (third, _) = identities.take(identities.resumable(&second), slot_of(3));
    assert!(identities.end(&third, false, vec![(7, 90)]));
    assert!(!identities.end(&second, true, vec![(7, 80), (8, 80)]));
    assert_eq!((since(7), since(8)), (Some(90), Some(80)), "what is newer is known already");
}

#[test]
fn session_channel_memory_is_bounded_and_ends_with_window() {
    let limits = Limits { lost_connections: 2, resume_window_ms: 30, ..Limits::default() };
    let identities = identities(&limits);
    let tenures: Vec<SessionOwnership> = (1..=3).map(|generation| identities.fresh(generation)).collect();
    let channels = |count: u64| (0..count).map(|number| (number, number)).collect::<Vec<_>>();
    let since = Instant::now();
    identities.end(&tenures[0], false, channels(15));
    identities.end(&tenures[1], false, channels(15));
    assert_eq!(identities.retained_total.load(Ordering::Relaxed), 20, "10 for each connection that is kept");
    identities.end(&tenures[2], false, channels(15));
    let kept: usize = identities.records.iter().map(|record| record.retained.channels.len()).sum();
    assert_eq!(
        identities.retained_total.load(Ordering::Relaxed),
        kept,
        "what is forgotten gives its room back"
    );
    while identities.retained_since(tenures[1].connection_id, 1).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= Duration::from_millis(30), "late it may be, early never");
}

/// Incarnations of a peer, one live and one ended.
const OTHER: u64 = 10;
const ENDED: u64 = 11;

fn among_others() -> SessionRegistry {
    let runs = |run| match run {
        OTHER => Some(IncarnationStatus::Alive),
        ENDED => Some(IncarnationStatus::Ended),
        _ => None,
    };
    within(60_000).with_peer_incarnations(Box::new(runs))
}

fn ownership_of(incarnation: u64, epoch: u64) -> SessionOwnership {
    let place = SessionLocation { incarnation, ..slot_of(1) };
    SessionOwnership { connection_id: ConnectionId::from_bytes([3; 16]), epoch, location: place }
}

#[test]
fn session_of_another_node_is_taken_over_above_its_epoch() {
    for (run, is_open) in [(OTHER, true), (ENDED, false)] {
        let identities = among_others();
        let there = ownership_of(run, NOW_MS + 7);
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
    for run in [OTHER, ENDED] {
        let identities = among_others();
        let there = ownership_of(run, 5);
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
