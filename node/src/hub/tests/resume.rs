use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fanfare_proto::serial::Serial;

use super::*;

/// How far publishers may be ahead of who pulls.
const AHEAD_MAX: u64 = 100;

fn serial(hub: &Hub, sequence: u64) -> Serial {
    Serial::single(hub.incarnation(), sequence)
}

/// Pulls in small parts until nothing is left.
fn pulled(channel: &Channel, mut after: u64) -> Vec<u64> {
    let mut sequences = Vec::new();
    loop {
        let Pulled { deliveries, is_end } = channel.pull(after, 1_000).expect("the ring reaches back");
        let messages = deliveries.iter().flat_map(|delivery| &delivery.published.messages);
        sequences.extend(messages.map(|message| message.sequence).filter(|sequence| *sequence > after));
        after = sequences.last().copied().unwrap_or(after);
        if is_end {
            return sequences;
        }
    }
}

#[test]
fn a_channel_outlives_its_last_detach_and_gives_what_was_missed() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    let (channel, mark) = hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 3);
    hub.detach(&channel, 0);
    publish(&hub, &key("a"), 2);
    for _ in 0..50 {
        publish(&hub, &key("b"), 7);
    }
    let joined = hub.attach_after(&key("a"), 0, &serial(&hub, mark.sequence + 1));
    assert_eq!(joined.channel.number(), channel.number());
    assert_eq!(joined.start, Start::Replay { after: mark.sequence + 1 });
    assert_eq!(joined.mark.sequence, mark.sequence + 5);
    let missed: Vec<u64> = (mark.sequence + 2..=mark.sequence + 5).collect();
    assert_eq!(pulled(&joined.channel, mark.sequence + 1), missed);
    let live = hub.attach_after(&key("a"), 0, &serial(&hub, joined.mark.sequence));
    assert_eq!(live.start, Start::Live);
}

#[test]
fn a_position_that_is_not_of_the_channel_is_unknown() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    publish(&hub, &key("a"), 5);
    let (_, mark) = hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 1);
    let start = |position: &Serial| hub.attach_after(&key("a"), 0, position).start;
    assert_eq!(start(&serial(&hub, mark.sequence)), Start::Replay { after: mark.sequence });
    assert_eq!(start(&serial(&hub, mark.sequence - 1)), Start::Unknown, "before anybody attached");
    assert_eq!(start(&serial(&hub, mark.sequence + 2)), Start::Unknown, "not numbered yet");
    assert_eq!(start(&Serial::single(hub.incarnation() ^ 1, mark.sequence)), Start::Unknown);
    assert_eq!(start(&Serial::default()), Start::Unknown);
}

#[test]
fn after_twice_the_window_the_channel_is_forgotten() {
    let limits = Limits { resume_window_ms: 20, ..Limits::default() };
    let (hub, _targets) = hub_within(1, Clock::manual(NOW_MS), limits);
    let (channel, mark) = hub.attach(&key("a"), 0);
    let detached = Instant::now();
    hub.detach(&channel, 0);
    hub.sweep();
    let kept = hub.channel_count();
    assert!(kept == 1 || detached.elapsed() > Duration::from_millis(40));
    while hub.channel_count() > 0 {
        assert!(detached.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
        hub.sweep();
    }
    assert!(detached.elapsed() >= Duration::from_millis(40), "late it may be, early never");
    publish(&hub, &key("a"), 1);
    assert_eq!(hub.attach_after(&key("a"), 0, &serial(&hub, mark.sequence)).start, Start::Unknown);
}

#[test]
fn where_memory_is_scarce_those_attached_to_least_recently_go_first() {
    // Scarce with four publishes in three rings, and not with three.
    let held = 4 * delivery_of(1..=20).bytes() + 3 * 1024;
    let limits = Limits { rings_bytes: held * 8 / 7 - 200, ..Limits::default() };
    let (hub, _targets) = hub_within(1, Clock::manual(NOW_MS), limits);
    let mut marks = Vec::new();
    for name in ["first", "second", "third"] {
        let begun = hub.now_ms();
        marks.push(hub.attach(&key(name), 0).1);
        publish(&hub, &key(name), 20);
        while hub.now_ms() == begun {
            std::thread::yield_now();
        }
    }
    publish(&hub, &key("third"), 20);
    hub.sweep();
    let start = |name, mark: &Stamp| hub.look_after(&key(name), &serial(&hub, mark.sequence));
    assert_eq!(start("first", &marks[0]), Start::Unknown);
    assert_eq!(start("third", &marks[2]), Start::Replay { after: marks[2].sequence });
    let mark = publish(&hub, &key("first"), 1).last();
    publish(&hub, &key("first"), 1);
    assert_eq!(start("first", &mark), Start::Replay { after: mark.sequence }, "it is kept from there on");
}

/// Clients come and go, each from where it stands, while others publish: whoever goes live by the last pull has every
/// number once, from the pulls and then from the deliveries.
#[test]
fn a_replay_joins_the_live_deliveries_without_a_gap_or_a_double() {
    let (hub, targets) = hub_of(1, Clock::system());
    let (done, reached) = (AtomicBool::new(false), AtomicU64::new(0));
    let (hub, target, done, reached) = (&hub, &targets[0], &done, &reached);
    std::thread::scope(|scope| {
        for count in [1, 3] {
            scope.spawn(move || {
                while !done.load(Ordering::Relaxed) {
                    let last = publish(hub, &key("a"), count).last().sequence;
                    while last > reached.load(Ordering::Relaxed) + AHEAD_MAX && !done.load(Ordering::Relaxed)
                    {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let (channel, first) = hub.attach(&key("a"), 0);
        hub.detach(&channel, 0);
        let mut position = first.sequence;
        for _ in 0..500 {
            let joined = hub.attach_after(&key("a"), 0, &serial(hub, position));
            assert_ne!(joined.start, Start::Unknown);
            reached.store(position, Ordering::Relaxed);
            let missed = pulled(&joined.channel, position);
            assert!(missed.iter().copied().eq(position + 1..=position + missed.len() as u64));
            position += missed.len() as u64;
            reached.store(position, Ordering::Relaxed);
            let live = loop {
                let live = within(&target.sequences(), position);
                if !live.is_empty() {
                    break live;
                }
                std::thread::yield_now();
            };
            hub.detach(&joined.channel, 0);
            assert!(live.iter().copied().eq(position + 1..=position + live.len() as u64));
            position += live.len() as u64;
            target.deliveries.lock().clear();
        }
        done.store(true, Ordering::Relaxed);
    });
}

fn within(sequences: &[u64], after: u64) -> Vec<u64> {
    sequences.iter().copied().filter(|sequence| *sequence > after).collect()
}
