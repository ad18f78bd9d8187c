use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

const PUBLISHERS: usize = 4;
const EACH: u64 = 2_000;

#[test]
fn sequences_rise_by_one_under_concurrent_publishers_for_every_target() {
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
        assert!(deliveries.is_sorted_by_key(|delivery| delivery.published.timestamp_ms));
    }
}

/// One attach with what its target had and got: all of it numbered by the same incarnation.
fn check_span(published: &[u64], mark: u64, end: u64, got: &[u64]) {
    let owed: Vec<u64> =
        published.iter().copied().filter(|sequence| *sequence > mark && *sequence <= end).collect();
    let got: Vec<u64> = got.iter().copied().filter(|sequence| *sequence > mark && *sequence <= end).collect();
    assert_eq!(got, owed, "between {mark} and {end}");
}

/// Attaches come and go while others publish, so that the channel is forgotten and made again all the time.
#[test]
fn nothing_above_the_mark_is_missed_and_no_number_is_given_twice() {
    let (hub, targets) = hub_of(2, Clock::system());
    let done = AtomicBool::new(false);
    let (published, spans) = std::thread::scope(|scope| {
        let publishers: Vec<_> = (0..PUBLISHERS)
            .map(|_| {
                scope.spawn(|| {
                    (0..EACH).map(|_| publish(&hub, &key("a"), 1).last().sequence).collect::<Vec<_>>()
                })
            })
            .collect();
        let (hub, done) = (&hub, &done);
        let attachers: Vec<_> = (0..2)
            .map(|target| {
                scope.spawn(move || {
                    let mut spans = Vec::new();
                    while !done.load(Ordering::Relaxed) {
                        let (channel, mark) = hub.attach(&key("a"), target);
                        std::thread::yield_now();
                        let end = hub.position(&key("a"));
                        hub.detach(&channel, target);
                        spans.push((mark.sequence, end.sequence));
                    }
                    spans
                })
            })
            .collect();
        let published: Vec<u64> =
            publishers.into_iter().flat_map(|publisher| publisher.join().unwrap()).collect();
        done.store(true, Ordering::Relaxed);
        let spans: Vec<_> = attachers.into_iter().map(|attacher| attacher.join().unwrap()).collect();
        (published, spans)
    });
    let mut sorted = published;
    sorted.sort_unstable();
    assert!(sorted.windows(2).all(|pair| pair[0] < pair[1]), "a number was given twice");
    assert_eq!(hub.channel_count(), 0);
    for (target, spans) in targets.iter().zip(spans) {
        let got = target.sequences();
        assert!(got.windows(2).all(|pair| pair[0] < pair[1]), "every target gets the numbers in order");
        assert!(spans.len() > 1);
        for (mark, end) in spans {
            check_span(&sorted, mark, end, &got);
        }
    }
}
