//! Store backfill of messages that a failed incarnation stored and this node had not received.

use std::collections::HashSet;

use fanfare_proto::serial::Serial;

use super::forwarded::{THERE, TestAnnouncer, from, joined, position};
use super::*;
use crate::hub::channels::OFFSETS_BEFORE;

const FURTHER: u64 = THERE + 1;

fn stamp(incarnation: u64, sequence: u64) -> Stamp {
    Stamp { incarnation, sequence }
}

#[test]
fn store_backfill_follows_forwarded_messages_without_loss() {
    let (hub, targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 0));
    hub.deliver_forwarded(from(THERE, 5, 1));
    hub.mark_in_doubt(THERE, &HashSet::new());
    let start = |there| hub.resume_start(&key("a"), &position(&hub, 0, there));
    assert_eq!(start(5), ResumeStart::Unknown);
    hub.apply_store_backfill(
        &channel,
        THERE,
        vec![from(THERE, 5, 1), from(THERE, 6, 1), from(THERE, 9, 1)],
        false,
    );
    let offsets: Vec<u64> = targets[0].deliveries.lock().iter().map(|one| one.offset()).collect();
    assert_eq!(offsets, [1, 2, 3].map(|number| OFFSETS_BEFORE + number), "each once");
    assert_eq!(
        (start(9), start(5)),
        (ResumeStart::Live, ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 1), is_exact: true })
    );
    hub.apply_store_backfill(&channel, THERE, vec![from(THERE, 6, 1)], false);
    hub.deliver_forwarded(from(THERE, 9, 1));
    assert_eq!(targets[0].deliveries.lock().len(), 3);
    assert!(targets[0].lost.lock().is_empty());
}

#[test]
fn backfill_skips_messages_of_forgotten_incarnation_seen_before() {
    let (hub, targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 0));
    hub.deliver_forwarded(from(THERE, 5, 2));
    hub.retire_incarnations(&[THERE]);
    assert_eq!([THERE, FURTHER].map(|incarnation| channel.delivered_sequence(incarnation)), [6, 0]);
    hub.apply_store_backfill(
        &channel,
        THERE,
        vec![from(THERE, 5, 1), from(THERE, 6, 1), from(THERE, 7, 1)],
        true,
    );
    let deliveries = targets[0].deliveries.lock();
    let last: Vec<Stamp> = deliveries.iter().map(|one| one.last()).collect();
    assert_eq!(last, [6, 7].map(|sequence| stamp(THERE, sequence)));
    assert_eq!(channel.delivered_sequence(THERE), 7);
}

#[test]
fn rest_of_partly_stored_publish_is_delivered_when_forwarded() {
    let (hub, targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 0));
    hub.apply_store_backfill(&channel, THERE, vec![from(THERE, 5, 2)], false);
    hub.deliver_forwarded(from(THERE, 5, 4));
    let deliveries = targets[0].deliveries.lock();
    let counts: Vec<u64> = deliveries.iter().map(|one| one.count()).collect();
    assert_eq!(counts, [2, 2]);
    assert_eq!(deliveries[1].offset(), OFFSETS_BEFORE + 4);
}

#[test]
fn unreadable_store_reports_loss_only_in_affected_channels() {
    let (hub, targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 3));
    targets[0].lost.lock().clear();
    hub.report_node_failure_in(&HashSet::from([channel.number() + 1]));
    assert!(targets[0].lost.lock().is_empty());
    hub.report_node_failure_in(&HashSet::from([channel.number()]));
    assert_eq!(targets[0].lost.lock().len(), 1);
    let before = channel.position().serial();
    assert_eq!(hub.resume_start(&key("a"), &before), ResumeStart::Live);
    hub.abandon_incarnation_in(THERE, &HashSet::from([channel.number()]));
    assert_eq!(targets[0].lost.lock().len(), 2);
    assert_eq!(hub.resume_start(&key("a"), &before), ResumeStart::Unknown);
}

#[test]
fn client_short_of_down_incarnation_not_resumed_from_buffer() {
    let (hub, targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 0));
    hub.deliver_forwarded(from(THERE, 5, 1));
    let mut further = Serial::single(THERE, 5);
    further.advance(FURTHER, 8);
    assert_eq!(hub.resume_start(&key("a"), &further), ResumeStart::Unknown, "nothing is known of the run");
    channel.learn_sequences(&[stamp(FURTHER, 9)]);
    assert_eq!(hub.resume_start(&key("a"), &further), ResumeStart::Unknown, "it lacks one");
    further.advance(FURTHER, 9);
    assert_eq!(hub.resume_start(&key("a"), &further), ResumeStart::Live);
    hub.deliver_forwarded(from(THERE, 6, 1));
    let start = hub.resume_start(&key("a"), &further);
    assert_eq!(start, ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 1), is_exact: true });
    // Also when the first of the buffered messages is evicted.
    channel.state.lock().replay_buffer.as_mut().map(|buffer| buffer.evict(1, 1));
    let mut lacks = Serial::single(THERE, 5);
    lacks.advance(FURTHER, 8);
    assert_eq!(hub.resume_start(&key("a"), &lacks), ResumeStart::Unknown);
    assert_eq!(hub.resume_start(&key("a"), &further), start);
    assert!(targets[0].lost.lock().is_empty());
}

/// A channel with new interest cannot tell a complete serial from one that lacks the last messages of a failed node.
#[test]
fn channel_joined_after_node_failure_ends_older_positions() {
    for (has_lost, is_held) in [(false, false), (true, false), (false, true), (true, true)] {
        let (hub, _) = hub_of(1, Clock::manual(NOW_MS));
        hub.set_interest(Arc::new(TestAnnouncer::after_failure(has_lost)));
        let before = hub.position(&key("a")).serial();
        let waiter = || unreachable!("there is nobody to wait for");
        let joined =
            if is_held { hub.retain_channel(&key("a"), waiter) } else { hub.join(&key("a"), 0, waiter) };
        assert!(joined.is_some());
        let start = hub.resume_start(&key("a"), &before);
        assert_eq!(start == ResumeStart::Unknown, has_lost, "{start:?}");
    }
}

/// The same when a node fails for which the attach barrier waits.
#[test]
fn channel_let_in_without_an_answer_ends_older_positions() {
    for is_complete in [true, false] {
        let (hub, _) = hub_of(1, Clock::manual(NOW_MS));
        hub.set_interest(Arc::new(TestAnnouncer::with_barrier()));
        let before = hub.position(&key("a")).serial();
        assert!(hub.join(&key("a"), 0, || Box::new(|| {})).is_none());
        let number = hub.live(&key("a")).expect("it is waited for").number();
        hub.pass_barrier(&key("a"), number, is_complete);
        let expected = if is_complete { ResumeStart::Live } else { ResumeStart::Unknown };
        assert_eq!(hub.resume_start(&key("a"), &before), expected);
    }
}
