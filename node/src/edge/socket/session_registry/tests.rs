mod peers;

use std::sync::atomic::Ordering;
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

fn sessions(limits: &Limits) -> SessionRegistry {
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
    sessions(&Limits { resume_window_ms: window_ms, ..Limits::default() })
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

    fn take(
        &self,
        previous: Option<ResumableSession>,
        location: SessionLocation,
    ) -> (SessionOwnership, bool) {
        let OpenedSession { ownership, previous, .. } = self.open_session(previous, location);
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
    let sessions = within(60_000);
    let first = sessions.fresh(1);
    assert!(sessions.end(&first, false, Vec::new()));
    let previous = sessions.resumable(&first).expect("it can be taken up");
    assert!(!previous.is_open);
    let (second, resumed) = sessions.take(Some(previous), slot_of(2));
    assert!(resumed && second.epoch > first.epoch);
    assert_eq!((second.connection_id, second.location), (first.connection_id, slot_of(2)));
    assert_ne!(sessions.fresh(3).connection_id, first.connection_id);
    assert!(sessions.ended_generations().is_empty());
}

#[test]
fn open_session_is_taken_over_and_old_socket_ends_nothing() {
    let sessions = within(60_000);
    let first = sessions.fresh(1);
    let previous = sessions.resumable(&first).expect("it is open");
    assert!(previous.is_open);
    let (second, resumed) = sessions.take(Some(previous), slot_of(2));
    assert!(resumed);
    assert_eq!(sessions.ended_generations(), [1]);
    assert!(!sessions.end(&first, false, Vec::new()), "another socket has it");
    let previous = sessions.resumable(&first).expect("a key of an earlier epoch is good within the window");
    let (third, resumed) = sessions.take(Some(previous), slot_of(3));
    assert!(resumed && third.epoch > second.epoch);
    assert_eq!(sessions.ended_generations(), [2], "whoever holds it now");
    assert!(!sessions.end(&second, true, Vec::new()));
    assert!(sessions.end(&third, false, Vec::new()));
    assert!(sessions.resumable(&second).is_some());
}

#[test]
fn session_taken_over_twice_at_once_goes_to_the_later_socket() {
    let sessions = within(60_000);
    let first = sessions.fresh(1);
    sessions.end(&first, false, Vec::new());
    let (one, other) = (sessions.resumable(&first), sessions.resumable(&first));
    let (second, _) = sessions.take(one, slot_of(2));
    let (third, resumed) = sessions.take(other, slot_of(3));
    assert!(resumed && third.epoch > second.epoch);
    assert_eq!(sessions.ended_generations(), [2]);
}

#[test]
fn session_closed_for_good_cannot_be_resumed() {
    let sessions = within(60_000);
    let first = sessions.fresh(1);
    let previous = sessions.resumable(&first);
    assert!(sessions.end(&first, true, Vec::new()));
    assert!(sessions.resumable(&first).is_none());
    let (fresh, resumed) = sessions.take(previous, slot_of(2));
    assert!(!resumed && fresh.connection_id != first.connection_id, "it ended between look and begin");
}

#[test]
fn takeover_of_ended_socket_must_check_its_quota_slot() {
    for for_good in [false, true] {
        let sessions = within(60_000);
        let first = sessions.fresh(1);
        let previous = sessions.resumable(&first);
        sessions.end(&first, for_good, Vec::new());
        let second = sessions.open_session(previous, slot_of(2));
        assert_eq!((second.previous.is_none(), second.has_quota_slot), (for_good, false));
        let third = sessions.open_session(sessions.resumable(&second.ownership), slot_of(3));
        assert!(third.has_quota_slot && sessions.ended_generations() == [2]);
        sessions.end(&third.ownership, false, Vec::new());
        assert!(
            sessions.open_session(sessions.resumable(&third.ownership), slot_of(4)).has_quota_slot,
            "as anybody"
        );
    }
}

#[test]
fn lost_session_expires_and_open_session_keeps_latest_key() {
    let sessions = within(30);
    let first = sessions.fresh(1);
    let (second, _) = sessions.take(sessions.resumable(&first), slot_of(2));
    let lost = sessions.fresh(3);
    let since = Instant::now();
    sessions.end(&lost, false, Vec::new());
    while sessions.resumable(&lost).is_some() || sessions.resumable(&first).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= Duration::from_millis(30), "late it may be, early never");
    assert!(sessions.resumable(&second).is_some_and(|previous| previous.is_open));
    assert!(sessions.take(sessions.resumable(&second), slot_of(4)).1);
}

#[test]
fn session_of_earlier_incarnation_resumes_within_start_window() {
    let of = |incarnation, generation| {
        let location = SessionLocation { incarnation, ..slot_of(generation) };
        SessionOwnership { connection_id: ConnectionId::from_bytes([3; 16]), epoch: 9, location }
    };
    let sessions = within(60_000);
    assert!(sessions.resumable(&of(77, 1)).is_none(), "of a run that nobody knows");
    let previous = sessions.resumable(&of(EARLIER, 1)).expect("of a run that is known");
    assert!(!previous.is_open);
    let (ownership, resumed) = sessions.take(Some(previous), slot_of(1));
    assert!(resumed && ownership.epoch > 9 && ownership.connection_id == of(EARLIER, 1).connection_id);
    assert!(sessions.resumable(&of(EARLIEST, 1)).is_some());
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
        let sessions = sessions(&Limits { lost_connections, ..Limits::default() });
        let ownerships: Vec<SessionOwnership> =
            (1..=4).map(|generation| sessions.fresh(generation)).collect();
        assert!(ownerships.iter().all(|ownership| sessions.end(ownership, false, Vec::new())));
        let kept: Vec<bool> =
            ownerships.iter().map(|ownership| sessions.resumable(ownership).is_some()).collect();
        let expected: Vec<bool> = (0..4).map(|index| index + lost_connections >= 4).collect();
        assert_eq!(kept, expected, "the oldest is forgotten");
        assert_eq!(sessions.records.len(), lost_connections);
    }
}

#[test]
fn lost_session_remembers_its_channels_for_the_window() {
    let sessions = within(60_000);
    let first = sessions.fresh(1);
    let since = |channel| sessions.retained_since(first.connection_id, channel);
    assert!(sessions.end(&first, false, vec![(7, 70), (8, 80)]));
    assert_eq!((since(7), since(8), since(9)), (Some(70), Some(80), None));
    let (second, _) = sessions.take(sessions.resumable(&first), slot_of(2));
    assert_eq!(since(7), Some(70), "while it comes back");
    // The second socket attaches one channel only, from a later sequence, before it is lost.
    assert!(sessions.end(&second, false, vec![(7, 75), (9, 90)]));
    assert_eq!((since(7), since(8), since(9)), (Some(75), Some(80), Some(90)));
    assert_eq!(sessions.retained_total.load(Ordering::Relaxed), 3);
    let (third, _) = sessions.take(sessions.resumable(&first), slot_of(3));
    assert!(sessions.end(&third, true, vec![(7, 75)]));
    assert_eq!((since(7), sessions.retained_total.load(Ordering::Relaxed)), (None, 0), "it is over");
}

#[test]
fn taken_over_socket_reports_since_when_it_had_its_channels() {
    let sessions = within(60_000);
    let first = sessions.fresh(1);
    let since = |channel| sessions.retained_since(first.connection_id, channel);
    let (second, _) = sessions.take(sessions.resumable(&first), slot_of(2));
    assert_eq!(since(7), None, "nobody has told yet");
    assert!(!sessions.end(&first, false, vec![(7, 70)]));
    assert_eq!(since(7), Some(70));
    let (third, _) = sessions.take(sessions.resumable(&second), slot_of(3));
    assert!(sessions.end(&third, false, vec![(7, 90)]));
    assert!(!sessions.end(&second, true, vec![(7, 80), (8, 80)]));
    assert_eq!((since(7), since(8)), (Some(90), Some(80)), "what is newer is known already");
}

#[test]
fn session_channel_memory_is_bounded_and_ends_with_window() {
    let limits = Limits { lost_connections: 2, resume_window_ms: 30, ..Limits::default() };
    let sessions = sessions(&limits);
    let ownerships: Vec<SessionOwnership> = (1..=3).map(|generation| sessions.fresh(generation)).collect();
    let channels = |count: u64| (0..count).map(|number| (number, number)).collect::<Vec<_>>();
    let since = Instant::now();
    sessions.end(&ownerships[0], false, channels(15));
    sessions.end(&ownerships[1], false, channels(15));
    assert_eq!(sessions.retained_total.load(Ordering::Relaxed), 20, "10 for each connection that is kept");
    sessions.end(&ownerships[2], false, channels(15));
    let kept: usize = sessions.records.iter().map(|record| record.retained.channels.len()).sum();
    assert_eq!(
        sessions.retained_total.load(Ordering::Relaxed),
        kept,
        "what is forgotten gives its room back"
    );
    while sessions.retained_since(ownerships[1].connection_id, 1).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= Duration::from_millis(30), "late it may be, early never");
}

/// Incarnations of a peer, one live and one ended.
const OTHER: u64 = 10;
const ENDED: u64 = 11;
