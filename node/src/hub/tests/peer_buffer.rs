//! Peer backfill: the replay buffer of a peer that stays is prepended to the local one.

use std::collections::HashSet;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::forwarded::{TestAnnouncer, from};
use super::handoff::{GONE, THERE, handoff_of, keeps, leaving, missed, position, stamp};
use super::*;
use crate::hub::channels::State;
use crate::hub::handoff::ReplayHandoff;

/// The sequence gap is of a third incarnation: one node learned it when it announced interest, the other later; and of the giving peer.
#[test]
fn known_sequence_gap_by_design_does_not_block_peer_backfill() {
    let hub = leaving();
    let own = hub.incarnation();
    let given = || {
        let mut given = handoff_of(&hub);
        given.end.advance(own, 4);
        given
    };
    let (other, channel) = keeps(&[stamp(THERE, 6), stamp(own, 3)]);
    assert!(!other.accept_peer_buffer(&channel, given(), |_| false));
    other.extend_contiguous(&key("a"), stamp(own, 4));
    assert!(!other.accept_peer_buffer(&channel, given(), |_| false), "more of the third run may be missing");
    hub.extend_contiguous(&key("a"), stamp(THERE, 6));
    assert!(other.accept_peer_buffer(&channel, given(), |_| false));
    assert_eq!(missed(&other, &[(own, 0)]), Some(vec![(own, 2), (THERE, 1), (own, 3)]));
}

/// The node had reserved a sequence without a message when it announced interest, and received nothing from peers since.
#[test]
fn client_resuming_at_publishing_node_receives_no_duplicates() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    let own = hub.incarnation();
    hub.set_interest(Arc::new(TestAnnouncer::after_failure(true)));
    publish(&hub, &key("a"), 3);
    let channel =
        hub.retain_channel(&key("a"), || unreachable!("there is nobody to wait for")).expect("there is room");
    assert!(channel.position().own.sequence > 3);
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 0));
    let begin = position(&[(THERE, 0)]);
    let messages = (1..=3).map(|sequence| (from(own, sequence, 1), 0)).collect();
    // A node that was attached all the time knows the sequence.
    let end = position(&[(THERE, 0), (own, channel.position().own.sequence)]);
    let handed = ReplayHandoff { begin, end, messages };
    assert!(hub.accept_peer_buffer(&channel, handed, |_| false));
    assert_eq!(missed(&hub, &[(own, 2)]), Some(vec![(own, 3)]));
    let ResumeStart::Replay { after, .. } = hub.resume_start(&key("a"), &position(&[(own, 2)])) else {
        panic!("it is brought on")
    };
    assert_eq!(channel.position_at(after), position(&[(THERE, 0), (own, 2)]));
    let pulled = channel.pull(after, usize::MAX).expect("it is there");
    assert_eq!(pulled.deliveries.iter().map(|one| one.last().sequence).collect::<Vec<_>>(), [3]);
}

#[test]
fn reset_replay_buffer_no_longer_covers_all_peers() {
    let is_of_all = |channel: &Channel| channel.rewind(1, 0).is_cluster_wide;
    for is_abandoned in [true, false] {
        let (hub, channel) = keeps(&[]);
        hub.begin_cluster_backfill(&channel);
        hub.end_cluster_backfill(&channel, true);
        hub.deliver_forwarded(from(THERE, 1, 1));
        assert!(is_of_all(&channel));
        if is_abandoned {
            hub.mark_in_doubt(THERE, &HashSet::new());
            hub.abandon_incarnation(THERE, &HashSet::new());
        } else {
            hub.mark_peer_loss(THERE);
        }
        assert!(!is_of_all(&channel));
    }
    let (hub, channel) = keeps(&[]);
    hub.begin_cluster_backfill(&channel);
    hub.mark_peer_loss(THERE);
    hub.end_cluster_backfill(&channel, true);
    assert!(!is_of_all(&channel), "they had begun anew when the others had answered");
}

/// A hub with an attached client that knows these sequences of peers and has received nothing since.
fn attached(numbered: &[Stamp]) -> (Hub, Arc<Channel>) {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(TestAnnouncer::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for")).expect("as said");
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 0));
    numbered.iter().for_each(|stamp| hub.learn_peer_sequence(&key("a"), channel.number(), *stamp));
    (hub, channel)
}

#[test]
fn peer_backfill_succeeds_before_any_message_arrived() {
    let stays = leaving();
    let incarnation = stays.incarnation();
    let (hub, channel) = attached(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    let from = position(&[(incarnation, 2)]);
    assert_eq!(hub.replay_after(&key("a"), &from), None);
    assert!(hub.can_prepend(&key("a")));
    let mut handed = handoff_of(&stays);
    handed.messages.iter_mut().for_each(|(_, age_ms)| *age_ms += 230_000);
    assert!(hub.accept_peer_buffer(&channel, handed, |_| false));
    assert_eq!(missed(&hub, &[(incarnation, 2)]), Some(vec![(THERE, 1), (incarnation, 3)]));
    let recent = hub.replay_after(&key("a"), &from).expect("it is there by now");
    assert_eq!((recent.after.offset, recent.is_exact), (channel.position().offset - 2, true));
    assert!(recent.missed_ms >= 230_000, "{recent:?}");
}

#[test]
fn backfill_accepts_retired_incarnation_messages_both_have() {
    let stays = leaving();
    let incarnation = stays.incarnation();
    let (hub, channel) = attached(&[stamp(incarnation, 3), stamp(THERE, 1), stamp(GONE, 0)]);
    [&stays, &hub].iter().for_each(|hub| hub.deliver_forwarded(from(GONE, 9, 1)));
    assert!(hub.accept_peer_buffer(&channel, handoff_of(&stays), |_| false));
    assert_eq!(missed(&hub, &[(incarnation, 2)]), Some(vec![(THERE, 1), (incarnation, 3), (GONE, 9)]));
}

/// The messages after an offset, in order.
fn pulled(channel: &Channel, after: LocalOffset) -> Vec<(u64, u64)> {
    let pulled = channel.pull(after, usize::MAX).expect("it is there");
    let stamp = |one: &Arc<MessageDelivery>| (one.last().incarnation, one.last().sequence);
    pulled.deliveries.iter().map(stamp).collect()
}

/// Nothing of the retired incarnation ever arrived here: the first client attached as it ended.
#[test]
fn retired_incarnation_messages_of_peer_are_backfilled_once() {
    let stays = leaving();
    let incarnation = stays.incarnation();
    stays.deliver_forwarded(from(GONE, 9, 1));
    let begun = [stamp(incarnation, 3), stamp(THERE, 1)];
    let (hub, channel) = attached(&begun);
    let recent = || pulled(&channel, channel.rewind(9, 0).after);
    assert!(!hub.accept_peer_buffer(&channel, handoff_of(&stays), |_| false) && recent().is_empty());
    // A handoff that reaches back less far than the other one.
    let mut late = handoff_of(&stays);
    late.messages.remove(0);
    late.begin = position(&[(incarnation, 2)]);
    let all = [(incarnation, 2), (THERE, 1), (incarnation, 3), (GONE, 9)];
    for (handed, first) in [(late.clone(), 1), (handoff_of(&stays), 0), (late, 0), (handoff_of(&stays), 0)] {
        assert!(hub.accept_peer_buffer(&channel, handed, |incarnation| incarnation == GONE));
        assert_eq!(recent(), all[first..]);
    }
    let serial = channel.position().serial();
    assert_eq!(missed(&stays, serial.entries()), Some(vec![]), "it is given nothing twice there");
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1), (GONE, 8)]), Some(vec![(GONE, 9)]));
    let (hub, channel) = attached(&[&begun[..], &[stamp(GONE, 8)]].concat());
    assert!(
        !hub.accept_peer_buffer(&channel, handoff_of(&stays), |incarnation| incarnation == GONE),
        "some of it came here"
    );
}

/// The state while it is not known yet whether another node failed: new messages are delivered here, the earlier ones are prepended later.
#[test]
fn backfill_adds_retired_incarnation_to_earlier_positions() {
    let stays = leaving();
    let (hub, channel) = attached(&[stamp(stays.incarnation(), 3), stamp(THERE, 1)]);
    stays.deliver_forwarded(from(GONE, 9, 1));
    let given = handoff_of(&stays);
    hub.deliver_forwarded(from(THERE, 2, 1));
    assert!(hub.accept_peer_buffer(&channel, given, |incarnation| incarnation == GONE));
    channel.learn_sequences(&[stamp(99, 7)]);
    let pulled = channel.pull(channel.rewind(9, 0).after, usize::MAX).expect("it is there");
    let serials: Vec<Serial> = pulled.deliveries.iter().map(|one| one.position().serial()).collect();
    assert!(serials.windows(2).all(|two| two[1].includes(&two[0])), "{serials:?}");
    let last = serials.last().expect("there are some");
    assert_eq!((last.sequence_of(GONE), last.sequence_of(99)), (Some(9), Some(7)));
    assert_eq!(channel.position().serial(), *last);
}

/// A third node gave a client more of the incarnation than this node has: it had messages that were not acknowledged.
#[test]
fn client_short_of_retired_incarnation_is_not_resumed() {
    let stays = leaving();
    let incarnation = stays.incarnation();
    stays.deliver_forwarded(from(GONE, 7, 1));
    let (hub, channel) = attached(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    assert!(hub.accept_peer_buffer(&channel, handoff_of(&stays), |incarnation| incarnation == GONE));
    hub.deliver_forwarded(from(THERE, 2, 1));
    channel.learn_sequences(&[stamp(GONE, 9)]);
    for position in
        [&[(incarnation, 2)][..], &[(incarnation, 3), (THERE, 1)], &[(incarnation, 3), (THERE, 1), (GONE, 7)]]
    {
        assert_eq!(missed(&hub, position), None);
    }
    let all = [(incarnation, 3), (THERE, 1), (GONE, 9)];
    assert_eq!(missed(&hub, &all), Some(vec![(THERE, 2)]));
    let first = channel.rewind(9, 0).after;
    let serial = channel.position_at(first);
    assert_eq!(missed(&hub, serial.entries()), Some(vec![(THERE, 2)]));
    assert_eq!(pulled(&channel, first), [(THERE, 2)], "what was before is not given without the rest");
}

#[test]
fn retired_incarnation_without_messages_does_not_block_resume() {
    let begun = [(88, 3), (THERE, 1)];
    let (begin, end) = (position(&[(88, 3), (GONE, 9)]), position(&[(88, 3), (THERE, 1), (GONE, 9)]));
    let none = ReplayHandoff { begin: begin.clone(), end: end.clone(), messages: Vec::new() };
    let (hub, channel) = attached(&begun.map(|(incarnation, sequence)| stamp(incarnation, sequence)));
    assert!(hub.accept_peer_buffer(&channel, none, |incarnation| incarnation == GONE));
    publish(&hub, &key("a"), 1);
    assert_eq!(missed(&hub, &begun), Some(vec![(hub.incarnation(), 1)]));
    // The handoff begins after the local messages, except for that incarnation.
    let messages = vec![(from(GONE, 10, 1), 0)];
    let begin = begin.join(&position(&[(THERE, 1)]));
    let behind = ReplayHandoff { begin, end: end.join(&position(&[(GONE, 10)])), messages };
    assert!(hub.accept_peer_buffer(&channel, behind, |incarnation| incarnation == GONE));
    assert_eq!(channel.rewind(9, 0).found, 2);
    assert_eq!(missed(&hub, &begun), None, "it may lack what was before");
    let end = [(88, 3), (THERE, 1), (GONE, 10)];
    assert_eq!(missed(&hub, &end), Some(vec![(hub.incarnation(), 1)]));
}

/// A slow reader is at an offset while its messages are evicted, and others take their place in another order.
#[test]
fn places_that_are_used_again_are_not_those_of_before() {
    const OTHER: u64 = 9;
    let (hub, channel) = attached(&[stamp(OTHER, 0)]);
    hub.deliver_forwarded(from(THERE, 1, 1));
    let ChannelPosition { offset, .. } = channel.position();
    (1..=2).for_each(|sequence| hub.deliver_forwarded(from(OTHER, sequence, 1)));
    let of_there = position(&[(THERE, 1)]);
    let ResumeStart::Replay { after, .. } = hub.resume_start(&key("a"), &of_there) else {
        panic!("it is brought on")
    };
    for local_offset in [after, LocalOffset::end(offset)] {
        assert_eq!((local_offset.offset, channel.position_at(local_offset)), (offset, of_there.clone()));
        assert_eq!(pulled(&channel, local_offset), [(OTHER, 1), (OTHER, 2)]);
    }
    let give_way =
        || channel.state.lock().replay_buffer.as_mut().map(|buffer| buffer.evict(usize::MAX, 9).len());
    assert_eq!(give_way(), Some(3));
    let messages = vec![(from(OTHER, 1, 1), 0), (from(THERE, 1, 1), 0), (from(OTHER, 2, 1), 0)];
    let end = position(&[(THERE, 1), (OTHER, 2)]);
    let given = ReplayHandoff { begin: Serial::default(), end, messages };
    assert!(hub.accept_peer_buffer(&channel, given, |_| false));
    for local_offset in [after, LocalOffset::end(offset)] {
        assert!(channel.pull(local_offset, usize::MAX).is_none());
        assert_eq!(channel.position_at(local_offset), Serial::default());
        // The peer had nothing else after that offset.
        let backfill =
            channel.backfill(&of_there, local_offset, Vec::new()).expect("nothing is known to be missing");
        assert_eq!(backfill.received, of_there.join(&position(&[(hub.incarnation(), 0)])));
    }
    let all = channel.rewind(9, 0).after;
    assert_eq!(pulled(&channel, all), [(OTHER, 1), (THERE, 1), (OTHER, 2)]);
    assert_eq!(channel.position_at(LocalOffset { offset, ..all }), position(&[(OTHER, 1)]));
    hub.deliver_forwarded(from(OTHER, 3, 1));
    let ChannelPosition { offset: end, .. } = channel.position();
    assert!(
        channel.pull(LocalOffset { offset: end - 1, ..after }, usize::MAX).is_some(),
        "it is what it was"
    );
}

/// The same where the buffer had restarted after the offset, and a peer had the messages before.
#[test]
fn local_offsets_before_reset_buffer_stay_invalid_on_backfill() {
    let reset: [fn(&mut State); 2] = [|state| state.replay_buffer = None, State::invalidate_positions];
    for (there, reset) in [1, 0].into_iter().zip(reset) {
        let (hub, channel) = attached(&[stamp(THERE, 0), stamp(GONE, 2)]);
        let end = channel.position().serial();
        let none = ReplayHandoff { begin: position(&[(THERE, 0)]), end, messages: Vec::new() };
        assert!(hub.accept_peer_buffer(&channel, none, |_| false));
        let local_offset = LocalOffset::end(channel.position().offset);
        (1..=there).for_each(|sequence| hub.deliver_forwarded(from(THERE, sequence, 1)));
        reset(&mut channel.state.lock());
        let end = channel.position().serial();
        let messages = vec![(from(GONE, 1, 1), 0), (from(GONE, 2, 1), 0)];
        let given = ReplayHandoff { begin: position(&[(THERE, there)]), end, messages };
        assert!(hub.accept_peer_buffer(&channel, given, |_| false));
        assert!(channel.pull(local_offset, usize::MAX).is_none());
    }
}

/// Messages of a retired incarnation that reached only other nodes: this node has some of its messages, and learns of these before it gets
/// them.
#[test]
fn known_messages_of_retired_incarnation_are_backfilled_once() {
    let (hub, channel) = attached(&[stamp(GONE, 0)]);
    (6..=9).for_each(|sequence| hub.deliver_forwarded(from(GONE, sequence, 1)));
    channel.learn_sequences(&[stamp(GONE, 10)]);
    let messages = (6..=10).map(|sequence| (from(GONE, sequence, 1), 0)).collect();
    let given = ReplayHandoff { begin: position(&[(GONE, 5)]), end: position(&[(GONE, 10)]), messages };
    assert!(hub.accept_peer_buffer(&channel, given, |incarnation| incarnation == GONE));
    assert_eq!(missed(&hub, &[(GONE, 9)]), Some(vec![(GONE, 10)]));
    assert_eq!(pulled(&channel, channel.rewind(9, 0).after).len(), 5);
}

#[test]
fn handoff_is_not_taken_if_either_node_lacks_a_message() {
    let stays = leaving();
    let incarnation = stays.incarnation();
    let refuses = |(hub, channel): (Hub, Arc<Channel>), handed| {
        assert!(!hub.accept_peer_buffer(&channel, handed, |_| false));
        assert_eq!(missed(&hub, &[(incarnation, 2)]), None);
    };
    refuses(attached(&[stamp(incarnation, 3), stamp(THERE, 2)]), handoff_of(&stays));
    refuses(attached(&[stamp(incarnation, 2), stamp(THERE, 1)]), handoff_of(&stays));
    refuses(attached(&[stamp(incarnation, 3)]), handoff_of(&stays));
    let in_doubt = attached(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    in_doubt.0.mark_peer_loss(THERE);
    refuses(in_doubt, handoff_of(&stays));
}

#[test]
fn backfill_refused_when_replay_buffer_was_reset_since_request() {
    let stays = leaving();
    let incarnation = stays.incarnation();
    for is_abandoned in [false, true] {
        let (hub, channel) = attached(&[stamp(incarnation, 3), stamp(THERE, 1)]);
        publish(&hub, &key("a"), 2);
        match is_abandoned {
            false => hub.learn_peer_sequence(&key("a"), channel.number(), stamp(88, 5)),
            true => hub.abandon_incarnation(THERE, &HashSet::new()),
        }
        assert!(!hub.accept_peer_buffer(&channel, handoff_of(&stays), |_| false));
        assert_eq!(missed(&hub, &[(incarnation, 2)]), None);
    }
}
