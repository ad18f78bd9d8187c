use std::time::Duration;

use super::super::Shards;
use super::*;
use crate::accounts::Account;

const NOW_MS: u64 = 1_767_225_600_500;
/// Of the runs whose connections are good here.
const OWN: u64 = 1;
const FORMER: u64 = 2;
/// Of a run before that, of whose time 50 seconds are over.
const BEFORE: u64 = 3;

fn identities(limits: &Limits) -> Identities {
    let (shards, _polls) = Shards::prepare(2).unwrap();
    let keys = ConnectionKeys::new(&[1; 32]);
    Identities::new(
        keys,
        OWN,
        vec![(FORMER, 0), (BEFORE, 50_000)],
        shards.handles(),
        Clock::manual(NOW_MS),
        limits,
    )
}

fn within(window_ms: u64) -> Identities {
    identities(&Limits { resume_window_ms: window_ms, ..Limits::default() })
}

fn place(generation: u32) -> Place {
    Place { incarnation: OWN, shard: (generation % 2) as u16, slot: generation / 2, generation }
}

fn anybody() -> Principal {
    Principal::anonymous(Arc::new(Account::plain("acme")))
}

impl Identities {
    fn key_of(&self, tenure: &Tenure) -> String {
        self.keys.seal(tenure, &anybody(), None)
    }

    fn former(&self, tenure: &Tenure) -> Option<Former> {
        self.look(&self.key_of(tenure), &anybody(), None)
    }

    fn take(&self, former: Option<Former>, place: Place) -> (Tenure, bool) {
        let Begun { tenure, former, .. } = self.begin(former, place);
        (tenure, former.is_some())
    }

    fn fresh(&self, generation: u32) -> Tenure {
        let (tenure, resumed) = self.take(None, place(generation));
        assert!(!resumed);
        tenure
    }

    /// Whose socket is to end, and who has taken up what had none.
    fn told(&self) -> (Vec<u32>, Vec<u32>) {
        let (mut to_end, mut not_open, mut inputs) = (Vec::new(), Vec::new(), Vec::new());
        for handle in &self.handles {
            handle.inbox.take(&mut inputs);
            for input in inputs.drain(..) {
                match input {
                    Input::TakenUp { generation, .. } => to_end.push(generation),
                    Input::NotOpen { generation, .. } => not_open.push(generation),
                    _ => unreachable!("nothing else is said"),
                }
            }
        }
        (to_end, not_open)
    }

    fn told_to_end(&self) -> Vec<u32> {
        self.told().0
    }
}

#[test]
fn a_lost_connection_is_taken_up_once_with_a_higher_epoch() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    assert!(identities.end(&first, false, Vec::new()));
    let former = identities.former(&first).expect("it can be taken up");
    assert!(!former.is_open);
    let (second, resumed) = identities.take(Some(former), place(2));
    assert!(resumed && second.epoch > first.epoch);
    assert_eq!((second.connection_id, second.place), (first.connection_id, place(2)));
    assert_ne!(identities.fresh(3).connection_id, first.connection_id);
    assert!(identities.told_to_end().is_empty());
}

#[test]
fn an_open_one_is_taken_over_and_its_end_says_nothing_more() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let former = identities.former(&first).expect("it is open");
    assert!(former.is_open);
    let (second, resumed) = identities.take(Some(former), place(2));
    assert!(resumed);
    assert_eq!(identities.told_to_end(), [1]);
    assert!(!identities.end(&first, false, Vec::new()), "another socket has it");
    let former = identities.former(&first).expect("a key of an earlier epoch is good within the window");
    let (third, resumed) = identities.take(Some(former), place(3));
    assert!(resumed && third.epoch > second.epoch);
    assert_eq!(identities.told_to_end(), [2], "whoever holds it now");
    assert!(!identities.end(&second, true, Vec::new()));
    assert!(identities.end(&third, false, Vec::new()));
    assert!(identities.former(&second).is_some());
}

#[test]
fn two_that_come_at_once_have_it_one_after_the_other() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    identities.end(&first, false, Vec::new());
    let (one, other) = (identities.former(&first), identities.former(&first));
    let (second, _) = identities.take(one, place(2));
    let (third, resumed) = identities.take(other, place(3));
    assert!(resumed && third.epoch > second.epoch);
    assert_eq!(identities.told_to_end(), [2]);
}

#[test]
fn session_closed_for_good_cannot_be_resumed() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let former = identities.former(&first);
    assert!(identities.end(&first, true, Vec::new()));
    assert!(identities.former(&first).is_none());
    let (fresh, resumed) = identities.take(former, place(2));
    assert!(!resumed && fresh.connection_id != first.connection_id, "it ended between look and begin");
}

#[test]
fn takeover_of_ended_socket_must_check_its_quota_slot() {
    for for_good in [false, true] {
        let identities = within(60_000);
        let first = identities.fresh(1);
        let former = identities.former(&first);
        identities.end(&first, for_good, Vec::new());
        let second = identities.begin(former, place(2));
        assert_eq!((second.former.is_none(), second.is_seated), (for_good, false));
        let third = identities.begin(identities.former(&second.tenure), place(3));
        assert!(third.is_seated && identities.told_to_end() == [2]);
        identities.end(&third.tenure, false, Vec::new());
        assert!(identities.begin(identities.former(&third.tenure), place(4)).is_seated, "as anybody");
    }
}

#[test]
fn lost_session_expires_and_open_session_keeps_latest_key() {
    let identities = within(30);
    let first = identities.fresh(1);
    let (second, _) = identities.take(identities.former(&first), place(2));
    let lost = identities.fresh(3);
    let since = Instant::now();
    identities.end(&lost, false, Vec::new());
    while identities.former(&lost).is_some() || identities.former(&first).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= Duration::from_millis(30), "late it may be, early never");
    assert!(identities.former(&second).is_some_and(|former| former.is_open));
    assert!(identities.take(identities.former(&second), place(4)).1);
}

#[test]
fn session_of_earlier_incarnation_resumes_within_start_window() {
    let of = |incarnation, generation| {
        let place = Place { incarnation, ..place(generation) };
        Tenure { connection_id: ConnectionId::from_bytes([3; 16]), epoch: 9, place }
    };
    let identities = within(60_000);
    assert!(identities.former(&of(77, 1)).is_none(), "of a run that nobody knows");
    let former = identities.former(&of(FORMER, 1)).expect("of a run that is known");
    assert!(!former.is_open);
    let (tenure, resumed) = identities.take(Some(former), place(1));
    assert!(resumed && tenure.epoch > 9 && tenure.connection_id == of(FORMER, 1).connection_id);
    assert!(identities.former(&of(BEFORE, 1)).is_some());
    assert!(within(49_000).former(&of(BEFORE, 1)).is_none(), "its time was over before the start");
    let short = within(1);
    let since = Instant::now();
    while short.former(&of(FORMER, 1)).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
}

#[test]
fn lost_connections_at_the_limit_and_one_past() {
    for lost_connections in [0, 3] {
        let identities = identities(&Limits { lost_connections, ..Limits::default() });
        let tenures: Vec<Tenure> = (1..=4).map(|generation| identities.fresh(generation)).collect();
        assert!(tenures.iter().all(|tenure| identities.end(tenure, false, Vec::new())));
        let kept: Vec<bool> = tenures.iter().map(|tenure| identities.former(tenure).is_some()).collect();
        let expected: Vec<bool> = (0..4).map(|place| place + lost_connections >= 4).collect();
        assert_eq!(kept, expected, "the oldest is forgotten");
        assert_eq!(identities.records.len(), lost_connections);
    }
}

#[test]
fn lost_session_remembers_its_channels_for_the_window() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let since = |channel| identities.since(first.connection_id, channel);
    assert!(identities.end(&first, false, vec![(7, 70), (8, 80)]));
    assert_eq!((since(7), since(8), since(9)), (Some(70), Some(80), None));
    let (second, _) = identities.take(identities.former(&first), place(2));
    assert_eq!(since(7), Some(70), "while it comes back");
    // It comes back to one channel only before it is lost again, further on.
    assert!(identities.end(&second, false, vec![(7, 75), (9, 90)]));
    assert_eq!((since(7), since(8), since(9)), (Some(75), Some(80), Some(90)));
    assert_eq!(identities.held.load(Ordering::Relaxed), 3);
    let (third, _) = identities.take(identities.former(&first), place(3));
    assert!(identities.end(&third, true, vec![(7, 75)]));
    assert_eq!((since(7), identities.held.load(Ordering::Relaxed)), (None, 0), "it is over");
}

#[test]
fn a_socket_that_was_taken_over_tells_what_it_had() {
    let identities = within(60_000);
    let first = identities.fresh(1);
    let since = |channel| identities.since(first.connection_id, channel);
    let (second, _) = identities.take(identities.former(&first), place(2));
    assert_eq!(since(7), None, "nobody has told yet");
    assert!(!identities.end(&first, false, vec![(7, 70)]));
    assert_eq!(since(7), Some(70));
    let (third, _) = identities.take(identities.former(&second), place(3));
    assert!(identities.end(&third, false, vec![(7, 90)]));
    assert!(!identities.end(&second, true, vec![(7, 80), (8, 80)]));
    assert_eq!((since(7), since(8)), (Some(90), Some(80)), "what is newer is known already");
}

#[test]
fn session_channel_memory_is_bounded_and_ends_with_window() {
    let limits = Limits { lost_connections: 2, resume_window_ms: 30, ..Limits::default() };
    let identities = identities(&limits);
    let tenures: Vec<Tenure> = (1..=3).map(|generation| identities.fresh(generation)).collect();
    let channels = |count: u64| (0..count).map(|number| (number, number)).collect::<Vec<_>>();
    let since = Instant::now();
    identities.end(&tenures[0], false, channels(15));
    identities.end(&tenures[1], false, channels(15));
    assert_eq!(identities.held.load(Ordering::Relaxed), 20, "10 for each connection that is kept");
    identities.end(&tenures[2], false, channels(15));
    let kept: usize = identities.records.iter().map(|record| record.held.channels.len()).sum();
    assert_eq!(identities.held.load(Ordering::Relaxed), kept, "what is forgotten gives its room back");
    while identities.since(tenures[1].connection_id, 1).is_some() {
        assert!(since.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(since.elapsed() >= Duration::from_millis(30), "late it may be, early never");
}

/// Another run of a node, of which it is known whether it lives.
const OTHER: u64 = 10;
const ENDED: u64 = 11;

fn among_others() -> Identities {
    let runs = |run| match run {
        OTHER => Some(Run::Alive),
        ENDED => Some(Run::Ended),
        _ => None,
    };
    within(60_000).with_runs(Box::new(runs))
}

fn of_run(incarnation: u64, epoch: u64) -> Tenure {
    let place = Place { incarnation, ..place(1) };
    Tenure { connection_id: ConnectionId::from_bytes([3; 16]), epoch, place }
}

#[test]
fn one_of_another_node_is_taken_up_above_its_epoch() {
    for (run, is_open) in [(OTHER, true), (ENDED, false)] {
        let identities = among_others();
        let there = of_run(run, NOW_MS + 7);
        let former = identities.former(&there).expect("of a run that is known");
        assert_eq!(former.is_open, is_open);
        let Begun { tenure, former, .. } = identities.begin(Some(former), place(1));
        assert_eq!((tenure.connection_id, tenure.epoch), (there.connection_id, NOW_MS + 8));
        assert_eq!(former, Some(there.place));
        assert!(identities.told_to_end().is_empty(), "its place means nothing here");
    }
    assert!(among_others().former(&of_run(12, 1)).is_none());
}

/// Its client is faster than what that node has to say.
#[test]
fn a_key_that_is_newer_than_what_is_known_here_says_where_it_is() {
    let identities = among_others();
    let (here, _) = identities.take(identities.former(&of_run(ENDED, 1)), place(1));
    let there = of_run(OTHER, here.epoch + 7);
    let Begun { tenure: back, former, .. } = identities.begin(identities.former(&there), place(2));
    assert_eq!((back.epoch, former), (there.epoch + 1, Some(there.place)));
    assert_eq!(
        identities.told_to_end(),
        [1],
        "that node may not know that it was here, or die before it says so"
    );
    let taken = TakenUp { tenure: there, former: here.place };
    assert_eq!((identities.taken_elsewhere(&taken), identities.told_to_end()), (None, vec![]));
    identities.over_elsewhere(&Over { connection_id: back.connection_id, owner: back.owner() });
    assert!(identities.former(&back).is_none());
    assert!(identities.former(&of_run(OTHER, back.epoch + 1)).is_some_and(|former| former.is_open));
}

#[test]
fn new_owner_learns_of_missing_socket_via_owner_in_between() {
    let identities = among_others();
    let lost = identities.fresh(1);
    identities.end(&lost, false, Vec::new());
    let there = Tenure { connection_id: lost.connection_id, ..of_run(OTHER, NOW_MS) };
    let former = identities.former(&there).expect("within the window");
    assert!(former.is_open, "there");
    let Begun { tenure: back, former, .. } = identities.begin(Some(former), place(2));
    assert_eq!((back.epoch, former), (NOW_MS + 1, Some(there.place)));
    let not_open = NotOpen { connection_id: lost.connection_id, epoch: there.epoch };
    let taken = TakenUp { tenure: there, former: lost.place };
    assert_eq!(identities.taken_elsewhere(&taken), Some(not_open), "it had no seat to take along");
    assert!(identities.told_to_end().is_empty());
}

#[test]
fn open_session_keeps_quota_slot_with_key_of_ended_incarnation() {
    let identities = among_others();
    let (here, _) = identities.take(identities.former(&of_run(OTHER, 1)), place(1));
    let former = identities.former(&of_run(ENDED, here.epoch + 1)).expect("within the window");
    assert!(former.is_open);
    identities.begin(Some(former), place(2));
    assert_eq!(identities.told_to_end(), [1]);
}

#[test]
fn takeover_by_peer_ends_socket_once_and_client_can_resume() {
    let identities = among_others();
    let first = identities.fresh(1);
    let there = Tenure { connection_id: first.connection_id, ..of_run(OTHER, 5) };
    let taken = TakenUp { tenure: there, former: first.place };
    let says = [&taken, &taken].map(|taken| identities.taken_elsewhere(taken));
    assert_eq!((says, identities.told_to_end()), ([None, None], vec![1]));
    assert!(!identities.end(&first, false, Vec::new()), "it is another's");
    // With its key of before: whoever has it now is told.
    let former = identities.former(&first).expect("within the window");
    assert!(former.is_open, "there");
    let Begun { tenure: second, former, .. } = identities.begin(Some(former), place(2));
    assert!(second.epoch > there.epoch && former == Some(there.place));
    identities.taken_elsewhere(&taken);
    assert!(identities.told_to_end().is_empty(), "that was before");
    assert!(identities.end(&second, false, Vec::new()));
}

#[test]
fn concurrent_takeovers_by_two_nodes_have_one_winner() {
    for (epoch_ahead, stays) in [(0, false), (1, false), (-1, true)] {
        let identities = among_others();
        let former = identities.former(&of_run(ENDED, 1));
        let (here, _) = identities.take(former, place(1));
        let there = of_run(OTHER, here.epoch.checked_add_signed(epoch_ahead).unwrap());
        assert_eq!(here.owner() > there.owner(), stays);
        identities.taken_elsewhere(&TakenUp { tenure: there, former: of_run(ENDED, 1).place });
        assert_eq!(identities.told_to_end().is_empty(), stays);
        assert_eq!(identities.end(&here, false, Vec::new()), stays);
    }
}

#[test]
fn socket_ends_though_second_takeover_is_heard_first() {
    let identities = among_others();
    let here = identities.fresh(1);
    let first = Tenure { connection_id: here.connection_id, ..of_run(OTHER, 5) };
    let second = Tenure { connection_id: here.connection_id, ..of_run(ENDED, 6) };
    identities.taken_elsewhere(&TakenUp { tenure: second, former: first.place });
    assert!(identities.told_to_end().is_empty(), "nobody has said that it was here");
    identities.taken_elsewhere(&TakenUp { tenure: first, former: here.place });
    assert_eq!(identities.told_to_end(), [1]);
    assert!(!identities.end(&here, false, Vec::new()), "it is another's");
}

#[test]
fn takeovers_from_one_socket_are_never_told_it_was_missing() {
    let identities = among_others();
    let here = identities.fresh(1);
    for epoch in [6, 5, 7] {
        let tenure = Tenure { connection_id: here.connection_id, ..of_run(OTHER, epoch) };
        assert_eq!(identities.taken_elsewhere(&TakenUp { tenure, former: here.place }), None);
    }
    assert_eq!(identities.told_to_end(), [1]);
}

#[test]
fn its_socket_here_ends_though_its_end_elsewhere_is_heard_first() {
    let identities = among_others();
    let here = identities.fresh(1);
    let there = Tenure { connection_id: here.connection_id, ..of_run(OTHER, 5) };
    identities.over_elsewhere(&Over { connection_id: here.connection_id, owner: there.owner() });
    let taken = TakenUp { tenure: there, former: here.place };
    assert_eq!((identities.taken_elsewhere(&taken), identities.told_to_end()), (None, vec![1]));
}

#[test]
fn takeover_of_session_without_socket_here_is_told_so() {
    let taken = |of: &Tenure, epoch| {
        let tenure = Tenure { connection_id: of.connection_id, ..of_run(OTHER, epoch) };
        TakenUp { tenure, former: of.place }
    };
    let says = |of: &Tenure, epoch| Some(NotOpen { connection_id: of.connection_id, epoch });
    let identities = among_others();
    let (open, lost, over) = (identities.fresh(1), identities.fresh(2), identities.fresh(3));
    identities.end(&lost, false, Vec::new());
    identities.end(&over, true, Vec::new());
    assert_eq!(identities.taken_elsewhere(&taken(&open, 5)), None);
    assert_eq!(identities.taken_elsewhere(&taken(&lost, 5)), says(&lost, 5));
    assert_eq!(identities.taken_elsewhere(&taken(&over, 5)), says(&over, 5));
    assert_eq!(identities.taken_elsewhere(&taken(&lost, 6)), None, "it was on another node before");
    let elsewhere = of_run(ENDED, 5);
    assert_eq!(identities.taken_elsewhere(&taken(&elsewhere, 7)), None, "it was never here");
}

#[test]
fn session_owner_is_told_that_there_was_no_socket() {
    let identities = among_others();
    let former = identities.former(&of_run(OTHER, 1));
    let (first, _) = identities.take(former, place(4));
    let told = || identities.told().1;
    let of_first = NotOpen { connection_id: first.connection_id, epoch: first.epoch };
    assert_eq!((identities.not_open(of_first), told()), (None, vec![4]));
    let (second, _) = identities.take(identities.former(&first), place(5));
    let of_second = NotOpen { epoch: second.epoch, ..of_first };
    assert_eq!((identities.not_open(of_first), told()), (None, vec![5]));
    assert_eq!(identities.not_open(NotOpen { epoch: second.epoch + 1, ..of_first }), None, "it is not known");
    let third = Tenure { connection_id: first.connection_id, ..of_run(OTHER, second.epoch + 7) };
    identities.taken_elsewhere(&TakenUp { tenure: third, former: second.place });
    let of_third = NotOpen { epoch: third.epoch, ..of_first };
    assert_eq!(identities.not_open(of_second), Some((OTHER, of_third)));
    assert_eq!(
        identities.not_open(of_third),
        Some((OTHER, of_third)),
        "of two in one epoch it was the other"
    );
    let lesser = Tenure { connection_id: ConnectionId::from_bytes([9; 16]), ..of_run(OWN - 1, 7) };
    identities.taken_elsewhere(&TakenUp { tenure: lesser, former: second.place });
    let of_lesser = NotOpen { connection_id: lesser.connection_id, epoch: 7 };
    assert_eq!(identities.not_open(of_lesser), None, "it would come back");
    let (fourth, _) = identities.take(identities.former(&third), place(6));
    identities.end(&fourth, false, Vec::new());
    told();
    assert_eq!((identities.not_open(of_third), told()), (None, vec![]), "it is lost");
}

#[test]
fn session_closed_for_good_by_peer_is_closed_here_too() {
    let over = |of: &Tenure| Over { connection_id: of.connection_id, owner: of.owner() };
    for run in [OTHER, ENDED] {
        let identities = among_others();
        let there = of_run(run, 5);
        assert!(identities.former(&there).is_some());
        let former = identities.former(&there);
        identities.over_elsewhere(&over(&there));
        assert!(identities.former(&there).is_none());
        let Begun { tenure: fresh, former, .. } = identities.begin(former, place(1));
        assert!(former.is_none() && fresh.connection_id != there.connection_id, "it ended in between");
        // Somebody who had not heard that has it.
        let taken = Tenure { epoch: 6, ..of_run(OTHER, 6) };
        identities.taken_elsewhere(&TakenUp { tenure: taken, former: there.place });
        identities.over_elsewhere(&over(&there));
        assert!(identities.former(&there).is_some_and(|former| former.is_open), "that was before");
        identities.over_elsewhere(&over(&taken));
        assert!(identities.former(&there).is_none());
        assert_eq!(identities.records.len(), 1);
    }
}

#[test]
fn earlier_keys_fail_once_session_taken_over_here_is_closed() {
    for of in [of_run(OTHER, 1), of_run(ENDED, 1), of_run(FORMER, 1)] {
        let identities = among_others();
        let Begun { tenure: here, former, .. } = identities.begin(identities.former(&of), place(1));
        assert!(former.is_some());
        assert!(identities.end(&here, true, vec![(7, 70)]));
        assert!(identities.former(&of).is_none() && identities.former(&here).is_none());
        assert_eq!((identities.records.len(), identities.held.load(Ordering::Relaxed)), (1, 0));
    }
}

#[test]
fn closed_session_records_are_bounded_and_evict_no_lost_one() {
    let identities = identities(&Limits { lost_connections: 3, ..Limits::default() });
    let lost = identities.fresh(1);
    identities.end(&lost, false, Vec::new());
    for number in 10..20 {
        let (connection_id, owner) = (ConnectionId::from_bytes([number; 16]), of_run(OTHER, 5).owner());
        identities.over_elsewhere(&Over { connection_id, owner });
    }
    assert!(identities.former(&lost).is_some());
    assert_eq!(identities.records.len(), 1 + 3);
}
