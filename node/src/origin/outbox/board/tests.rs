use super::*;
use crate::model::AccountId;
use crate::origin::outbox::event::EventSource;

const TEN: BatchBounds = BatchBounds { events: 10, bytes: usize::MAX };

fn lineup() -> Arc<TargetLineup> {
    OutboxBoard::default().lineup(&TargetId::new(&AccountId::new("acme"), "orders"))
}

fn event(lineup: &TargetLineup, channel: &str) -> Arc<OutboxEvent> {
    Arc::new(OutboxEvent {
        written_ms: 1,
        source: EventSource::Message,
        node_id: "n1".into(),
        account: AccountId::new("acme"),
        channel: channel.into(),
        targets: vec![lineup.target.clone().into()],
        trace: None,
        record: (&b"{}"[..]).into(),
    })
}

fn arrive(lineup: &TargetLineup, channel: &str, sequence: u64) {
    lineup.add_event(sequence, &event(lineup, channel));
}

fn names(lineup: &TargetLineup, now: Instant) -> Vec<Box<str>> {
    std::iter::from_fn(|| lineup.next(now).ok().map(|next| next.channel)).collect()
}

fn sequences(lineup: &TargetLineup, channel: &str) -> Option<Vec<u64>> {
    let batch = lineup.batch(channel, TEN)?;
    Some(batch.events.iter().map(|(sequence, _)| *sequence).collect())
}

fn settled(from: u64) -> TurnOutcome {
    TurnOutcome::Settled { has_more: false, from, full: 10 }
}

#[test]
fn channels_take_turns_and_leave_after_their_rest() {
    let (lineup, now) = (lineup(), Instant::now());
    for (sequence, name) in (0..).zip(["a", "b", "a"]) {
        arrive(&lineup, name, sequence);
    }
    assert_eq!(names(&lineup, now), [Box::from("a"), Box::from("b")]);
    assert_eq!(sequences(&lineup, "a"), Some(vec![0, 2]));
    arrive(&lineup, "a", 3);
    assert!(names(&lineup, now).is_empty(), "it is being sent");
    lineup.end_turn("b".into(), settled(2), now);
    lineup.end_turn("a".into(), settled(3), now);
    assert_eq!(lineup.next(now), Err(Some(now + REST)), "they rest");
    assert_eq!(names(&lineup, now + REST), [Box::from("a")], "an event came meanwhile");
    assert_eq!(sequences(&lineup, "a"), Some(vec![3]));
    lineup.end_turn("a".into(), settled(4), now + REST);
    assert_eq!(lineup.next(now + 2 * REST), Err(None));
    assert!(lineup.state.lock().channels.is_empty());
}

#[test]
fn whole_batch_ends_a_rest() {
    let (lineup, now) = (lineup(), Instant::now());
    arrive(&lineup, "a", 0);
    assert_eq!(names(&lineup, now).len(), 1);
    arrive(&lineup, "a", 1);
    lineup.end_turn("a".into(), settled(1), now);
    (2..10).for_each(|sequence| arrive(&lineup, "a", sequence));
    assert!(names(&lineup, now).is_empty(), "nine wait");
    arrive(&lineup, "a", 10);
    assert_eq!(names(&lineup, now).len(), 1);
    assert_eq!(sequences(&lineup, "a"), Some((1..11).collect()));
    let one = TurnOutcome::Settled { has_more: false, from: 11, full: 1 };
    lineup.end_turn("a".into(), one, now);
    arrive(&lineup, "a", 11);
    assert_eq!(names(&lineup, now).len(), 1, "one is a whole batch");
    assert_eq!(names(&lineup, now + REST).len(), 0, "it has its turn already");
}

#[test]
fn failed_channel_lets_others_go_first_and_reads_the_tables() {
    let (lineup, now) = (lineup(), Instant::now());
    ["a", "b"].into_iter().for_each(|name| arrive(&lineup, name, 7));
    assert_eq!(lineup.next(now), Ok(ReadyChannel { channel: "a".into(), failures: 0, from: 7 }));
    assert_eq!(sequences(&lineup, "a"), Some(vec![7]));
    let not_before = now + Duration::from_secs(60);
    lineup.end_turn("a".into(), TurnOutcome::Failed { not_before }, now);
    assert_eq!(names(&lineup, now), [Box::from("b")]);
    assert_eq!(lineup.next(now), Err(Some(not_before)));
    assert_eq!(lineup.next(not_before), Ok(ReadyChannel { channel: "a".into(), failures: 1, from: 7 }));
    arrive(&lineup, "a", 8);
    assert_eq!(sequences(&lineup, "a"), None, "the batch that was sent has its events");
    lineup.end_turn("a".into(), settled(8), not_before);
    assert_eq!(names(&lineup, not_before + REST).len(), 1);
    lineup.end_turn("a".into(), settled(9), not_before + REST);
    arrive(&lineup, "a", 9);
    assert_eq!(sequences(&lineup, "a"), Some(vec![9]), "nothing else waits");
}

#[test]
fn late_word_of_an_event_that_was_sent_is_ignored() {
    let (lineup, now) = (lineup(), Instant::now());
    arrive(&lineup, "a", 0);
    assert_eq!(names(&lineup, now).len(), 1);
    lineup.end_turn("a".into(), settled(3), now);
    arrive(&lineup, "a", 2);
    assert_eq!(lineup.next(now + REST), Err(None));
}

#[test]
fn events_beyond_the_room_are_read_from_the_tables() {
    let (lineup, now) = (lineup(), Instant::now());
    (0..1_025).for_each(|sequence| arrive(&lineup, "a", sequence));
    assert_eq!(names(&lineup, now).len(), 1);
    for first in (0..1_020).step_by(10) {
        assert_eq!(sequences(&lineup, "a"), Some((first..first + 10).collect()));
        lineup.end_turn("a".into(), TurnOutcome::Settled { has_more: true, from: first + 10, full: 10 }, now);
        assert_eq!(names(&lineup, now).len(), 1);
    }
    assert_eq!(sequences(&lineup, "a"), None, "four are here, and one more waits");
}

#[test]
fn outbox_events_read_from_store_continue_with_arriving_events() {
    let (lineup, now) = (lineup(), Instant::now());
    let read = |sequences: std::ops::Range<u64>, is_complete| {
        let events = sequences.map(|sequence| (sequence, event(&lineup, "a"))).collect();
        lineup.load_prefetched("a", PrefetchedEvents { events, is_complete });
    };
    lineup.add_channels(vec!["a".into()], true);
    assert_eq!(names(&lineup, now).len(), 1);
    assert_eq!(sequences(&lineup, "a"), None);
    read(3..6, true);
    arrive(&lineup, "a", 5);
    arrive(&lineup, "a", 6);
    assert_eq!(sequences(&lineup, "a"), Some(vec![3, 4, 5, 6]), "word of 5 came late");
    read(3..6, true);
    assert_eq!(sequences(&lineup, "a"), None, "6 came after the read began");
    read(3..14, false);
    arrive(&lineup, "a", 20);
    let batch = lineup.batch("a", TEN).expect("a whole batch");
    assert_eq!((batch.end(), batch.has_more), (13, true));
}

#[test]
fn channels_beyond_the_bound_are_read_from_the_tables() {
    let (lineup, now) = (lineup(), Instant::now());
    (0..=CHANNELS_MAX).for_each(|number| arrive(&lineup, &format!("{number}"), 5));
    assert_eq!(lineup.next_scan(), None, "there is no room");
    for name in names(&lineup, now) {
        lineup.end_turn(name, settled(6), now);
    }
    assert_eq!(lineup.next(now + REST), Err(None));
    assert_eq!(lineup.next_scan(), Some((None, CHANNELS_MAX)));
    arrive(&lineup, "while reading", 6);
    lineup.add_channels(vec!["1024".into()], true);
    for name in ["while reading", "1024"] {
        let next = lineup.next(now).expect("a channel");
        assert_eq!((&*next.channel, next.from), (name, 0), "earlier events may wait");
        assert_eq!(sequences(&lineup, name), None);
    }
    arrive(&lineup, "afterwards", 8);
    assert_eq!(lineup.next(now).map(|next| next.from), Ok(8));
    assert_eq!(lineup.next_scan(), None);
}

#[test]
fn new_channels_leave_room_for_those_in_the_tables() {
    let (lineup, now) = (lineup(), Instant::now());
    (0..=CHANNELS_MAX).for_each(|number| arrive(&lineup, &format!("{number}"), 5));
    for (number, name) in (6..).zip(names(&lineup, now)) {
        lineup.end_turn(name, settled(6), now);
        lineup.state.lock().end_rests(now + REST);
        arrive(&lineup, &format!("new {number}"), number);
    }
    let taken = names(&lineup, now + REST);
    assert!(taken.len() <= CHANNELS_MAX / 2, "{}", taken.len());
    assert_eq!(lineup.next_scan(), Some((None, CHANNELS_MAX - taken.len())));
}

#[test]
fn failing_channels_leave_room_for_others() {
    let (lineup, now) = (lineup(), Instant::now());
    (0..=CHANNELS_MAX).for_each(|number| arrive(&lineup, &format!("{number}"), 5));
    let not_before = now + Duration::from_secs(60);
    let (failing, fine): (Vec<_>, Vec<_>) =
        names(&lineup, now).into_iter().enumerate().partition(|(number, _)| *number < 700);
    failing.into_iter().for_each(|(_, name)| lineup.end_turn(name, TurnOutcome::Failed { not_before }, now));
    fine.into_iter().for_each(|(_, name)| lineup.end_turn(name, settled(6), now));
    lineup.state.lock().end_rests(now + REST);
    assert_eq!(lineup.next_scan(), Some((None, CHANNELS_MAX)));
    let all: Vec<Box<str>> = (0..CHANNELS_MAX).map(|number| format!("{number}").into()).collect();
    lineup.add_channels(all, false);
    let until = format!("{}", CHANNELS_MAX - 1).into();
    names(&lineup, now).into_iter().for_each(|name| lineup.end_turn(name, settled(6), now));
    lineup.state.lock().end_rests(now + 2 * REST);
    assert_eq!(lineup.next_scan(), Some((Some(until), CHANNELS_MAX)), "the reading goes on");
    lineup.add_channels(vec![format!("{CHANNELS_MAX}").into()], true);
    assert_eq!(names(&lineup, now + REST).len(), 1);
    assert_eq!(lineup.next_scan(), None, "all were read");
    let state = lineup.state.lock();
    assert_eq!((state.failing, state.channels.len()), (700, 701));
}
