use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

const PUBLISHERS: usize = 4;
const EACH: u64 = 2_000;
const SPANS: usize = 300;

#[test]
fn concurrent_publishers_yield_gapless_sequences_at_all_targets() {
    let (hub, targets) = hub_of(3, Clock::system());
    for target in 0..3 {
        hub.attach(&key("a"), target);
    }
    let count = std::thread::scope(|scope| {
        let publishers: Vec<_> = (0..PUBLISHERS as u64)
            .map(|publisher| {
                let hub = &hub;
                scope.spawn(move || {
                    let (mut last, mut count) = (0, 0);
                    for turn in 0..EACH {
                        let published = publish(hub, &key("a"), 1 + (publisher + turn) % 3);
                        assert!(published.messages[0].sequence > last, "a publisher's own order");
                        last = published.last().sequence;
                        count += published.messages.len() as u64;
                    }
                    count
                })
            })
            .collect();
        publishers.into_iter().map(|publisher| publisher.join().unwrap()).sum::<u64>()
    });
    for target in targets {
        assert!(target.sequences().into_iter().eq(1..=count), "each number once, in order");
        let deliveries = target.deliveries.lock();
        assert!(deliveries.is_sorted_by_key(|delivery| delivery.published().timestamp_ms));
    }
}

/// The part of sorted `sequences` that is above `begin` and not above `end`.
fn within(sequences: &[u64], begin: u64, end: u64) -> &[u64] {
    let below = |limit: u64| sequences.partition_point(|sequence| *sequence <= limit);
    &sequences[below(begin)..below(end)]
}

/// Attaches until a message arrives, and detaches; returns the sequences at attach and before each detach.
fn attach_and_detach(hub: &Hub, target: usize) -> Vec<(u64, u64)> {
    let once = |_| {
        let (channel, begin) = hub.attach(&key("a"), target);
        let mut end = hub.position(&key("a"));
        while end == begin {
            std::thread::yield_now();
            end = hub.position(&key("a"));
        }
        hub.detach(&channel, target);
        (begin.offset, end.offset)
    };
    (0..SPANS).map(once).collect()
}

/// Attaches and detaches during publishes, so that the channel is forgotten and created again all the time.
#[test]
fn attach_during_publishes_misses_nothing_and_sequences_unique() {
    let (hub, targets) = hub_without_buffers(2, Clock::system());
    let done = AtomicBool::new(false);
    let (hub, done) = (&hub, &done);
    let (mut published, spans) = std::thread::scope(|scope| {
        let publisher = move || {
            let mut sequences = Vec::new();
            while !done.load(Ordering::Relaxed) {
                sequences.push(publish(hub, &key("a"), 1).last().sequence);
            }
            sequences
        };
        let publishers: Vec<_> = (0..PUBLISHERS).map(|_| scope.spawn(publisher)).collect();
        let attachers: Vec<_> =
            (0..2).map(|target| scope.spawn(move || attach_and_detach(hub, target))).collect();
        let spans: Vec<_> = attachers.into_iter().map(|attacher| attacher.join()).collect();
        done.store(true, Ordering::Relaxed);
        let published: Vec<u64> =
            publishers.into_iter().flat_map(|publisher| publisher.join().unwrap()).collect();
        (published, spans)
    });
    published.sort_unstable();
    assert!(published.windows(2).all(|pair| pair[0] < pair[1]), "a number was given twice");
    assert_eq!(hub.channel_count(), 0);
    for (target, spans) in targets.iter().zip(spans) {
        let got = target.sequences();
        assert!(got.windows(2).all(|pair| pair[0] < pair[1]), "every target gets the numbers in order");
        for (begin, end) in spans.unwrap() {
            let expected = within(&published, begin, end);
            assert!(!expected.is_empty());
            assert_eq!(within(&got, begin, end), expected, "between {begin} and {end}");
        }
    }
}
