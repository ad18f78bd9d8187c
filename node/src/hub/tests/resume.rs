use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use fanfare_proto::serial::Serial;
use tokio::time::Instant;

use super::*;

/// Bound of a publisher's lead over the replaying reader.
const AHEAD_MAX: u64 = 100;

fn serial(hub: &Hub, sequence: u64) -> Serial {
    Serial::single(hub.incarnation(), sequence)
}

/// Replays in small pages until nothing is left.
fn pulled(channel: &Channel, mut after: u64) -> Vec<u64> {
    let mut sequences = Vec::new();
    loop {
        let ReplayPage { deliveries, is_end } =
            channel.pull(local_offset(after), 1_000).expect("the ring reaches back");
        let messages = deliveries.iter().flat_map(|delivery| &delivery.published().messages);
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
    let (channel, position) = hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 3);
    hub.detach(&channel, 0);
    publish(&hub, &key("a"), 2);
    for _ in 0..50 {
        publish(&hub, &key("b"), 7);
    }
    let joined = hub.attach_resuming(&key("a"), 0, &serial(&hub, position.offset + 1));
    assert_eq!(joined.channel.number(), channel.number());
    assert_eq!(
        joined.start,
        ResumeStart::Replay { after: local_offset(position.offset + 1), is_exact: true }
    );
    assert_eq!(joined.position.offset, position.offset + 5);
    let missed: Vec<u64> = (position.offset + 2..=position.offset + 5).collect();
    assert_eq!(pulled(&joined.channel, position.offset + 1), missed);
    let live = hub.attach_resuming(&key("a"), 0, &serial(&hub, joined.position.offset));
    assert_eq!(live.start, ResumeStart::Live);
}

#[test]
fn a_position_that_is_not_of_the_channel_is_unknown() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    publish(&hub, &key("a"), 5);
    let (_, position) = hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 1);
    let start = |position: &Serial| hub.attach_resuming(&key("a"), 0, position).start;
    assert_eq!(
        start(&serial(&hub, position.offset)),
        ResumeStart::Replay { after: local_offset(position.offset), is_exact: true }
    );
    assert_eq!(start(&serial(&hub, position.offset - 1)), ResumeStart::Unknown, "before anybody attached");
    assert_eq!(start(&serial(&hub, position.offset + 2)), ResumeStart::Unknown, "not numbered yet");
    assert_eq!(start(&Serial::single(hub.incarnation() ^ 1, position.offset)), ResumeStart::Unknown);
    assert_eq!(start(&Serial::default()), ResumeStart::Unknown);
}

#[test]
fn after_twice_the_window_the_channel_is_forgotten() {
    let limits = Limits { resume_window_ms: 20, ..Limits::default() };
    let (hub, _targets) = hub_within(1, Clock::manual(NOW_MS), limits);
    let (channel, position) = hub.attach(&key("a"), 0);
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
    assert_eq!(hub.attach_resuming(&key("a"), 0, &serial(&hub, position.offset)).start, ResumeStart::Unknown);
}

/// Bursts between two sweeps: the messages of the least recently attached channel are evicted, whichever channel exceeds the bound.
#[test]
fn scarce_memory_evicts_least_recently_attached_channels_first() {
    // Six publishes fit in three buffers, and seven do not.
    let one = delivery_of(101..=120).bytes();
    let limits = Limits { rings_bytes: 6 * one + one / 2 + 3 * 1024, ..Limits::default() };
    let bound = limits.rings_bytes;
    let (hub, _targets) = hub_within(1, Clock::manual(NOW_MS), limits);
    let attach = |name| hub.attach(&key(name), 0);
    let (first, second, third) = (attach("first").1, attach("second").1, attach("third").1);
    // The order of first messages differs from the order of attaches.
    for name in ["third", "second", "first", "third", "second", "first"] {
        publish(&hub, &key(name), 20);
    }
    let start =
        |name, position: &ChannelPosition| hub.resume_start(&key(name), &serial(&hub, position.offset));
    let replay = |position: &ChannelPosition| ResumeStart::Replay {
        after: local_offset(position.offset),
        is_exact: true,
    };
    for (name, position) in [("first", &first), ("second", &second), ("third", &third)] {
        assert_eq!(start(name, position), replay(position), "within the bound");
    }
    publish(&hub, &key("third"), 20);
    assert_eq!(start("first", &first), ResumeStart::Unknown);
    assert_eq!(start("second", &second), replay(&second));
    assert_eq!(start("third", &third), replay(&third));
    // Attached again, it is the last to be evicted.
    let first = attach("first").1;
    for _ in 0..2 {
        publish(&hub, &key("first"), 20);
        assert_eq!(start("first", &first), replay(&first));
        assert_eq!(start("second", &second), ResumeStart::Unknown);
    }
    assert_eq!(start("third", &third), replay(&third));
    for _ in 0..9 {
        publish(&hub, &key("second"), 20);
        assert!(hub.replay_budget.held() <= bound);
    }
    assert_eq!(start("first", &first), replay(&first), "who publishes most gives way itself");
    assert_eq!(start("third", &third), replay(&third));
    let position = ChannelPosition::own(publish(&hub, &key("third"), 1).last());
    publish(&hub, &key("third"), 1);
    assert_eq!(start("third", &position), replay(&position), "it is kept from there on");
}

/// Under races of many publishers, attaches and short-lived channels the budget's count stays exact.
#[test]
fn replay_buffers_evicted_at_once_add_up_in_the_budget() {
    let limits = Limits { rings_bytes: 40_000, resume_window_ms: 1, ..Limits::default() };
    let (hub, _targets) = hub_within(1, Clock::system(), limits);
    let hub = &hub;
    std::thread::scope(|scope| {
        for own in 0..3 {
            scope.spawn(move || {
                for turn in 0..2_000 {
                    let name = key(["a", "b", "c", "d", "e"][(turn * 7 + own) % 5]);
                    let (channel, _) = hub.attach(&name, 0);
                    publish(hub, &name, 3);
                    publish(hub, &key("all"), 1);
                    hub.detach(&channel, 0);
                    if turn % 50 == own {
                        hub.sweep();
                    }
                }
            });
        }
    });
    assert!(hub.replay_budget.held() <= 40_000);
    let begun = Instant::now();
    while hub.channel_count() > 0 {
        assert!(begun.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
        hub.sweep();
    }
    assert_eq!(hub.replay_budget.held(), 0);
    assert!(hub.replay_budget.first().is_none(), "nothing is left in the order");
}

#[test]
fn many_replay_buffers_drop_messages_before_oldest_channels() {
    let limits = Limits { rings_bytes: 100 * 1024, ..Limits::default() };
    let (hub, _targets) = hub_within(1, Clock::manual(NOW_MS), limits);
    let name = |number: usize| key(&format!("c{number}"));
    let (kept, position) = hub.attach(&key("kept"), 0);
    publish(&hub, &key("kept"), 1);
    for number in 0..95 {
        let (channel, _) = hub.attach(&name(number), 0);
        hub.detach(&channel, 0);
    }
    assert_eq!(
        hub.resume_start(&key("kept"), &serial(&hub, position.offset)),
        ResumeStart::Replay { after: local_offset(position.offset), is_exact: true }
    );
    hub.sweep();
    let lives = |number: usize| hub.live(&name(number)).is_some();
    assert!((0..20).all(|number| !lives(number)) && (30..95).all(lives), "the first of them");
    assert_eq!(hub.resume_start(&key("kept"), &serial(&hub, position.offset)), ResumeStart::Unknown);
    assert_eq!(kept.position().offset, position.offset + 1, "it goes on with its numbers");
}

/// Clients come and go, each from its own position, during publishes. A client that goes live after its last page has every sequence once,
/// from the pages and then from deliveries.
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
        let mut position = first.offset;
        for _ in 0..500 {
            let joined = hub.attach_resuming(&key("a"), 0, &serial(hub, position));
            assert_ne!(joined.start, ResumeStart::Unknown);
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
