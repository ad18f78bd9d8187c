//! What another node has that stays, taken back before what is here.

use std::collections::HashSet;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::forwarded::{Others, from};
use super::hand_over::{GONE, THERE, handed, keeps, leaving, missed, position, stamp};
use super::*;
use crate::hub::channels::State;
use crate::hub::hand_over::HandedOver;

/// Of a third run, told the one when it began to want the channel, and the other one later; and of the one that gives.
#[test]
fn known_sequence_gap_by_design_does_not_block_peer_backfill() {
    let hub = leaving();
    let own = hub.incarnation();
    let given = || {
        let mut given = handed(&hub);
        given.end.advance(own, 4);
        given
    };
    let (other, channel) = keeps(&[stamp(THERE, 6), stamp(own, 3)]);
    assert!(!other.take_back(&channel, given(), |_| false));
    other.has_numbered(&key("a"), stamp(own, 4));
    assert!(!other.take_back(&channel, given(), |_| false), "more of the third run may be missing");
    hub.has_numbered(&key("a"), stamp(THERE, 6));
    assert!(other.take_back(&channel, given(), |_| false));
    assert_eq!(missed(&other, &[(own, 0)]), Some(vec![(own, 2), (THERE, 1), (own, 3)]));
}

/// It had a number without a message when it began to want the channel, and nothing came from others since.
#[test]
fn client_resuming_at_publishing_node_receives_no_duplicates() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    let own = hub.incarnation();
    hub.set_interest(Arc::new(Others::after_a_death(true)));
    publish(&hub, &key("a"), 3);
    let channel = hub.hold(&key("a"), || unreachable!("there is nobody to wait for")).expect("there is room");
    assert!(channel.mark().own.sequence > 3);
    hub.heard(&key("a"), channel.number(), stamp(THERE, 0));
    let begin = position(&[(THERE, 0)]);
    let messages = (1..=3).map(|sequence| (from(own, sequence, 1), 0)).collect();
    // Where it was attached to all the time the number is known.
    let end = position(&[(THERE, 0), (own, channel.mark().own.sequence)]);
    let handed = HandedOver { begin, end, messages };
    assert!(hub.take_back(&channel, handed, |_| false));
    assert_eq!(missed(&hub, &[(own, 2)]), Some(vec![(own, 3)]));
    let Start::Replay { after, .. } = hub.look_after(&key("a"), &position(&[(own, 2)])) else {
        panic!("it is brought on")
    };
    assert_eq!(channel.position_at(after), position(&[(THERE, 0), (own, 2)]));
    let pulled = channel.pull(after, usize::MAX).expect("it is there");
    assert_eq!(pulled.deliveries.iter().map(|one| one.last().sequence).collect::<Vec<_>>(), [3]);
}

#[test]
fn reset_replay_buffer_no_longer_covers_all_peers() {
    let is_of_all = |channel: &Channel| channel.recent_back(1, 0).is_of_all;
    for is_gone in [true, false] {
        let (hub, channel) = keeps(&[]);
        hub.asks_all(&channel);
        hub.asked_all(&channel, true);
        hub.forwarded(from(THERE, 1, 1));
        assert!(is_of_all(&channel));
        if is_gone {
            hub.doubt(THERE, &HashSet::new());
            hub.gone(THERE, &HashSet::new());
        } else {
            hub.lost(THERE);
        }
        assert!(!is_of_all(&channel));
    }
    let (hub, channel) = keeps(&[]);
    hub.asks_all(&channel);
    hub.lost(THERE);
    hub.asked_all(&channel, true);
    assert!(!is_of_all(&channel), "they had begun anew when the others had answered");
}

/// Somebody has attached, and was told what had been numbered before; nothing has come since.
fn attached(numbered: &[Stamp]) -> (Hub, Arc<Channel>) {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(Others::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for")).expect("as said");
    hub.heard(&key("a"), channel.number(), stamp(THERE, 0));
    numbered.iter().for_each(|stamp| hub.heard(&key("a"), channel.number(), *stamp));
    (hub, channel)
}

#[test]
fn peer_backfill_succeeds_before_any_message_arrived() {
    let stays = leaving();
    let run = stays.incarnation();
    let (hub, channel) = attached(&[stamp(run, 3), stamp(THERE, 1)]);
    let from = position(&[(run, 2)]);
    assert_eq!(hub.recent_after(&key("a"), &from), None);
    assert!(hub.has_room_before(&key("a")));
    let mut handed = handed(&stays);
    handed.messages.iter_mut().for_each(|(_, age_ms)| *age_ms += 230_000);
    assert!(hub.take_back(&channel, handed, |_| false));
    assert_eq!(missed(&hub, &[(run, 2)]), Some(vec![(THERE, 1), (run, 3)]));
    let recent = hub.recent_after(&key("a"), &from).expect("it is there by now");
    assert_eq!((recent.after.place, recent.is_exact), (channel.mark().place - 2, true));
    assert!(recent.missed_ms >= 230_000, "{recent:?}");
}

#[test]
fn backfill_accepts_retired_incarnation_messages_both_have() {
    let stays = leaving();
    let run = stays.incarnation();
    let (hub, channel) = attached(&[stamp(run, 3), stamp(THERE, 1), stamp(GONE, 0)]);
    [&stays, &hub].iter().for_each(|hub| hub.forwarded(from(GONE, 9, 1)));
    assert!(hub.take_back(&channel, handed(&stays), |_| false));
    assert_eq!(missed(&hub, &[(run, 2)]), Some(vec![(THERE, 1), (run, 3), (GONE, 9)]));
}

/// The messages after a place, in their order.
fn pulled(channel: &Channel, after: Spot) -> Vec<(u64, u64)> {
    let pulled = channel.pull(after, usize::MAX).expect("it is there");
    let stamp = |one: &Arc<Delivery>| (one.last().incarnation, one.last().sequence);
    pulled.deliveries.iter().map(stamp).collect()
}

/// Nothing of it ever came here, where somebody began to be attached as it ended.
#[test]
fn retired_incarnation_messages_of_peer_are_backfilled_once() {
    let stays = leaving();
    let run = stays.incarnation();
    stays.forwarded(from(GONE, 9, 1));
    let begun = [stamp(run, 3), stamp(THERE, 1)];
    let (hub, channel) = attached(&begun);
    let recent = || pulled(&channel, channel.recent_back(9, 0).after);
    assert!(!hub.take_back(&channel, handed(&stays), |_| false) && recent().is_empty());
    // One that does not reach as far back as the other one.
    let mut late = handed(&stays);
    late.messages.remove(0);
    late.begin = position(&[(run, 2)]);
    let all = [(run, 2), (THERE, 1), (run, 3), (GONE, 9)];
    for (handed, first) in [(late.clone(), 1), (handed(&stays), 0), (late, 0), (handed(&stays), 0)] {
        assert!(hub.take_back(&channel, handed, |run| run == GONE));
        assert_eq!(recent(), all[first..]);
    }
    let serial = channel.mark().serial();
    assert_eq!(missed(&stays, serial.entries()), Some(vec![]), "it is given nothing twice there");
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1), (GONE, 8)]), Some(vec![(GONE, 9)]));
    let (hub, channel) = attached(&[&begun[..], &[stamp(GONE, 8)]].concat());
    assert!(!hub.take_back(&channel, handed(&stays), |run| run == GONE), "some of it came here");
}

/// As while it is not known yet whether another one has died: what comes meanwhile is delivered here, and the rest before it later.
#[test]
fn backfill_adds_retired_incarnation_to_earlier_positions() {
    let stays = leaving();
    let (hub, channel) = attached(&[stamp(stays.incarnation(), 3), stamp(THERE, 1)]);
    stays.forwarded(from(GONE, 9, 1));
    let given = handed(&stays);
    hub.forwarded(from(THERE, 2, 1));
    assert!(hub.take_back(&channel, given, |run| run == GONE));
    channel.know(&[stamp(99, 7)]);
    let pulled = channel.pull(channel.recent_back(9, 0).after, usize::MAX).expect("it is there");
    let serials: Vec<Serial> = pulled.deliveries.iter().map(|one| one.mark().serial()).collect();
    assert!(serials.windows(2).all(|two| two[1].covers(&two[0])), "{serials:?}");
    let last = serials.last().expect("there are some");
    assert_eq!((last.sequence_of(GONE), last.sequence_of(99)), (Some(9), Some(7)));
    assert_eq!(channel.mark().serial(), *last);
}

/// More of it than is here was given to somebody by a third node, who had what was not acknowledged.
#[test]
fn client_short_of_retired_incarnation_is_not_resumed() {
    let stays = leaving();
    let run = stays.incarnation();
    stays.forwarded(from(GONE, 7, 1));
    let (hub, channel) = attached(&[stamp(run, 3), stamp(THERE, 1)]);
    assert!(hub.take_back(&channel, handed(&stays), |run| run == GONE));
    hub.forwarded(from(THERE, 2, 1));
    channel.know(&[stamp(GONE, 9)]);
    for position in [&[(run, 2)][..], &[(run, 3), (THERE, 1)], &[(run, 3), (THERE, 1), (GONE, 7)]] {
        assert_eq!(missed(&hub, position), None);
    }
    let all = [(run, 3), (THERE, 1), (GONE, 9)];
    assert_eq!(missed(&hub, &all), Some(vec![(THERE, 2)]));
    let first = channel.recent_back(9, 0).after;
    let serial = channel.position_at(first);
    assert_eq!(missed(&hub, serial.entries()), Some(vec![(THERE, 2)]));
    assert_eq!(pulled(&channel, first), [(THERE, 2)], "what was before is not given without the rest");
}

#[test]
fn retired_incarnation_without_messages_does_not_block_resume() {
    let begun = [(88, 3), (THERE, 1)];
    let (begin, end) = (position(&[(88, 3), (GONE, 9)]), position(&[(88, 3), (THERE, 1), (GONE, 9)]));
    let none = HandedOver { begin: begin.clone(), end: end.clone(), messages: Vec::new() };
    let (hub, channel) = attached(&begun.map(|(run, sequence)| stamp(run, sequence)));
    assert!(hub.take_back(&channel, none, |run| run == GONE));
    publish(&hub, &key("a"), 1);
    assert_eq!(missed(&hub, &begun), Some(vec![(hub.incarnation(), 1)]));
    // Its recent messages begin behind those that are here, but for that run.
    let messages = vec![(from(GONE, 10, 1), 0)];
    let begin = begin.join(&position(&[(THERE, 1)]));
    let behind = HandedOver { begin, end: end.join(&position(&[(GONE, 10)])), messages };
    assert!(hub.take_back(&channel, behind, |run| run == GONE));
    assert_eq!(channel.recent_back(9, 0).found, 2);
    assert_eq!(missed(&hub, &begun), None, "it may lack what was before");
    let end = [(88, 3), (THERE, 1), (GONE, 10)];
    assert_eq!(missed(&hub, &end), Some(vec![(hub.incarnation(), 1)]));
}

/// A reader that is slow stands there while they go, and others are put in their place in another order.
#[test]
fn places_that_are_used_again_are_not_those_of_before() {
    const OTHER: u64 = 9;
    let (hub, channel) = attached(&[stamp(OTHER, 0)]);
    hub.forwarded(from(THERE, 1, 1));
    let Mark { place, .. } = channel.mark();
    (1..=2).for_each(|sequence| hub.forwarded(from(OTHER, sequence, 1)));
    let of_there = position(&[(THERE, 1)]);
    let Start::Replay { after, .. } = hub.look_after(&key("a"), &of_there) else {
        panic!("it is brought on")
    };
    for spot in [after, Spot::end(place)] {
        assert_eq!((spot.place, channel.position_at(spot)), (place, of_there.clone()));
        assert_eq!(pulled(&channel, spot), [(OTHER, 1), (OTHER, 2)]);
    }
    let give_way = || channel.state.lock().ring.as_mut().map(|ring| ring.give_way(usize::MAX, 9).len());
    assert_eq!(give_way(), Some(3));
    let messages = vec![(from(OTHER, 1, 1), 0), (from(THERE, 1, 1), 0), (from(OTHER, 2, 1), 0)];
    let end = position(&[(THERE, 1), (OTHER, 2)]);
    let given = HandedOver { begin: Serial::default(), end, messages };
    assert!(hub.take_back(&channel, given, |_| false));
    for spot in [after, Spot::end(place)] {
        assert!(channel.pull(spot, usize::MAX).is_none());
        assert_eq!(channel.position_at(spot), Serial::default());
        // What another node had behind it is all that it has more.
        let refill = channel.refill(&of_there, spot, Vec::new()).expect("nothing is known to be missing");
        assert_eq!(refill.has, of_there.join(&position(&[(hub.incarnation(), 0)])));
    }
    let all = channel.recent_back(9, 0).after;
    assert_eq!(pulled(&channel, all), [(OTHER, 1), (THERE, 1), (OTHER, 2)]);
    assert_eq!(channel.position_at(Spot { place, ..all }), position(&[(OTHER, 1)]));
    hub.forwarded(from(OTHER, 3, 1));
    let Mark { place: end, .. } = channel.mark();
    assert!(channel.pull(Spot { place: end - 1, ..after }, usize::MAX).is_some(), "it is what it was");
}

/// Nor where they had begun behind it, and another one had what lies before.
#[test]
fn local_offsets_before_reset_buffer_stay_invalid_on_backfill() {
    let begin_anew: [fn(&mut State); 2] = [|state| state.ring = None, State::end_positions];
    for (there, begin_anew) in [1, 0].into_iter().zip(begin_anew) {
        let (hub, channel) = attached(&[stamp(THERE, 0), stamp(GONE, 2)]);
        let end = channel.mark().serial();
        let none = HandedOver { begin: position(&[(THERE, 0)]), end, messages: Vec::new() };
        assert!(hub.take_back(&channel, none, |_| false));
        let spot = Spot::end(channel.mark().place);
        (1..=there).for_each(|sequence| hub.forwarded(from(THERE, sequence, 1)));
        begin_anew(&mut channel.state.lock());
        let end = channel.mark().serial();
        let messages = vec![(from(GONE, 1, 1), 0), (from(GONE, 2, 1), 0)];
        let given = HandedOver { begin: position(&[(THERE, there)]), end, messages };
        assert!(hub.take_back(&channel, given, |_| false));
        assert!(channel.pull(spot, usize::MAX).is_none());
    }
}

/// What came to others only, of a run of which there is something here, and it is told of before it is had.
#[test]
fn known_messages_of_retired_incarnation_are_backfilled_once() {
    let (hub, channel) = attached(&[stamp(GONE, 0)]);
    (6..=9).for_each(|sequence| hub.forwarded(from(GONE, sequence, 1)));
    channel.know(&[stamp(GONE, 10)]);
    let messages = (6..=10).map(|sequence| (from(GONE, sequence, 1), 0)).collect();
    let given = HandedOver { begin: position(&[(GONE, 5)]), end: position(&[(GONE, 10)]), messages };
    assert!(hub.take_back(&channel, given, |run| run == GONE));
    assert_eq!(missed(&hub, &[(GONE, 9)]), Some(vec![(GONE, 10)]));
    assert_eq!(pulled(&channel, channel.recent_back(9, 0).after).len(), 5);
}

#[test]
fn nothing_is_taken_back_where_one_of_the_two_lacks_something() {
    let stays = leaving();
    let run = stays.incarnation();
    let refuses = |(hub, channel): (Hub, Arc<Channel>), handed| {
        assert!(!hub.take_back(&channel, handed, |_| false));
        assert_eq!(missed(&hub, &[(run, 2)]), None);
    };
    refuses(attached(&[stamp(run, 3), stamp(THERE, 2)]), handed(&stays));
    refuses(attached(&[stamp(run, 2), stamp(THERE, 1)]), handed(&stays));
    refuses(attached(&[stamp(run, 3)]), handed(&stays));
    let unsure = attached(&[stamp(run, 3), stamp(THERE, 1)]);
    unsure.0.lost(THERE);
    refuses(unsure, handed(&stays));
}

#[test]
fn backfill_refused_when_replay_buffer_was_reset_since_request() {
    let stays = leaving();
    let run = stays.incarnation();
    for is_gone in [false, true] {
        let (hub, channel) = attached(&[stamp(run, 3), stamp(THERE, 1)]);
        publish(&hub, &key("a"), 2);
        match is_gone {
            false => hub.heard(&key("a"), channel.number(), stamp(88, 5)),
            true => hub.gone(THERE, &HashSet::new()),
        }
        assert!(!hub.take_back(&channel, handed(&stays), |_| false));
        assert_eq!(missed(&hub, &[(run, 2)]), None);
    }
}
