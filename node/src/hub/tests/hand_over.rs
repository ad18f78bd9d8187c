//! A channel that a node which leaves hands over to another one.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::forwarded::{Others, from};
use super::*;
use crate::hub::hand_over::HandedOver;
use crate::model::Forwarded;

pub(super) const THERE: u64 = 77;
/// A run that has ended before.
pub(super) const GONE: u64 = 5;

/// What it has is what comes over the wire.
pub(super) fn handed(hub: &Hub) -> HandedOver<Forwarded> {
    let HandedOver { begin, end, messages } = hub.hand_over(&key("a"), usize::MAX).expect("it is whole");
    let again = |delivery: Arc<Delivery>| {
        let Stamp { incarnation, sequence } = delivery.last();
        from(incarnation, sequence + 1 - delivery.count(), delivery.count())
    };
    HandedOver { begin, end, messages: messages.into_iter().map(|(one, age)| (again(one), age)).collect() }
}

/// Has numbered 1 and 2 at once and 3, with one message of another run in between, and is attached to.
pub(super) fn leaving() -> Hub {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(Others::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    let number = channel.expect("there is nobody to wait for").number();
    [THERE, GONE].iter().for_each(|run| hub.heard(&key("a"), number, stamp(*run, 0)));
    publish(&hub, &key("a"), 2);
    hub.forwarded(from(THERE, 1, 1));
    publish(&hub, &key("a"), 1);
    hub
}

/// Holds the channel, and was told what had been numbered before.
pub(super) fn keeps(numbered: &[Stamp]) -> (Hub, Arc<Channel>) {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(Others::default()));
    let channel = hub.hold(&key("a"), || unreachable!("there is nobody to wait for"));
    let channel = channel.expect("there is room");
    hub.heard(&key("a"), channel.number(), stamp(THERE, 0));
    numbered.iter().for_each(|stamp| hub.heard(&key("a"), channel.number(), *stamp));
    (hub, channel)
}

pub(super) fn position(entries: &[(u64, u64)]) -> Serial {
    let mut serial = Serial::default();
    entries.iter().for_each(|(run, sequence)| serial.advance(*run, *sequence));
    serial
}

pub(super) fn stamp(incarnation: u64, sequence: u64) -> Stamp {
    Stamp { incarnation, sequence }
}

pub(super) fn missed(hub: &Hub, entries: &[(u64, u64)]) -> Option<Vec<(u64, u64)>> {
    let missed = hub.missed(&key("a"), &position(entries), u64::MAX)?;
    let last = |delivery: Arc<Delivery>| (delivery.last().incarnation, delivery.last().sequence);
    Some(missed.into_iter().map(last).collect())
}

/// Its recent messages begin where it stands, and what it knows of others beside that is no part of the positions of its clients.
#[test]
fn handoff_of_empty_replay_buffer_begins_at_client_positions() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(Others::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    let number = channel.expect("there is nobody to wait for").number();
    hub.heard(&key("a"), number, stamp(THERE, 0));
    hub.has_numbered(&key("a"), stamp(THERE, 4));
    let HandedOver { begin, end, .. } = handed(&hub);
    assert_eq!((begin.sequence_of(THERE), end.sequence_of(THERE)), (None, Some(4)));
}

#[test]
fn resuming_client_after_handoff_replays_from_first_missed() {
    let leaving = leaving();
    let run = leaving.incarnation();
    let (hub, channel) = keeps(&[stamp(run, 3), stamp(THERE, 1)]);
    assert_eq!(missed(&hub, &[(run, 2)]), None);
    hub.forwarded(from(run, 4, 1));
    publish(&hub, &key("a"), 1);
    assert!(hub.take_over(&channel, handed(&leaving), |_| false));
    let own = (hub.incarnation(), 1);
    assert_eq!(missed(&hub, &[(run, 2)]), Some(vec![(THERE, 1), (run, 3), (run, 4), own]));
    assert_eq!(missed(&hub, &[(run, 0)]), Some(vec![(run, 2), (THERE, 1), (run, 3), (run, 4), own]));
    assert_eq!(missed(&hub, &[(run, 3)]), Some(vec![(THERE, 1), (run, 4), own]));
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1)]), Some(vec![(run, 4), own]));
    assert_eq!(missed(&hub, &[(run, 4), (THERE, 1)]), Some(vec![own]));
    assert_eq!(missed(&hub, &[(run, 4), (THERE, 1), own]), Some(vec![]));
    assert_eq!(missed(&hub, &[(run, 5), (THERE, 1)]), None, "ahead of all that is known");
}

#[test]
fn handoff_of_messages_already_buffered_keeps_each_once() {
    let leaving = leaving();
    let run = leaving.incarnation();
    let (hub, channel) = keeps(&[stamp(run, 2)]);
    hub.forwarded(from(THERE, 1, 1));
    hub.forwarded(from(run, 3, 1));
    assert!(hub.take_over(&channel, handed(&leaving), |_| false));
    assert_eq!(missed(&hub, &[(run, 0)]), Some(vec![(run, 2), (THERE, 1), (run, 3)]));
    assert!(hub.take_over(&channel, handed(&leaving), |_| false), "again it changes nothing");
    assert_eq!(missed(&hub, &[(run, 0)]), Some(vec![(run, 2), (THERE, 1), (run, 3)]));
}

#[test]
fn handoff_with_gap_to_own_replay_buffer_is_refused() {
    let leaving = leaving();
    let run = leaving.incarnation();
    let (hub, channel) = keeps(&[stamp(run, 3), stamp(THERE, 1)]);
    let later = HandedOver { begin: position(&[(run, 4)]), ..handed(&leaving) };
    assert!(!hub.take_over(&channel, later, |_| false));
    assert_eq!(missed(&hub, &[(run, 2)]), None);
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1)]), Some(vec![]));
}

#[test]
fn a_run_that_is_gone_is_known_here_as_it_was_there() {
    let leaving = leaving();
    let run = leaving.incarnation();
    leaving.forwarded(from(GONE, 9, 1));
    let (hub, channel) = keeps(&[stamp(run, 3), stamp(THERE, 1)]);
    hub.heard_of(&key("a"), channel.number(), &[stamp(GONE, 9)]);
    assert!(hub.take_over(&channel, handed(&leaving), |run| run == GONE));
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1)]), Some(vec![(GONE, 9)]));
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1), (GONE, 9)]), Some(vec![]));
    let (hub, channel) = keeps(&[stamp(run, 3), stamp(THERE, 1)]);
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1), (GONE, 9)]), None);
    assert!(
        !hub.take_over(&channel, handed(&leaving), |run| run == GONE),
        "what it had last has not come here"
    );
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1), (GONE, 9)]), Some(vec![]));
    assert_eq!(missed(&hub, &[(run, 3), (THERE, 1)]), None, "nor will it");
    let (hub, channel) = keeps(&[stamp(run, 3), stamp(THERE, 1)]);
    assert!(!hub.take_over(&channel, handed(&leaving), |_| false), "it does not forward the channel to here");
    assert_eq!(missed(&hub, &[(run, 2)]), None);
}

#[test]
fn attached_client_told_of_loss_if_incarnation_not_fully_heard() {
    let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(Others::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for")).expect("as said");
    hub.heard(&key("a"), channel.number(), stamp(GONE, 0));
    hub.forwarded(from(GONE, 8, 1));
    hub.heard_of(&key("a"), channel.number(), &[stamp(GONE, 8)]);
    assert!(targets[0].lost.lock().is_empty());
    hub.heard_of(&key("a"), channel.number(), &[stamp(GONE, 9)]);
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
}

#[test]
fn a_channel_without_messages_is_handed_over_too() {
    let (leaving, _targets) = hub_of(1, Clock::manual(NOW_MS));
    leaving.set_interest(Arc::new(Others::default()));
    leaving.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    let at = leaving.position(&key("a")).serial();
    assert_eq!(leaving.channels_heard().len(), 1);
    let (hub, channel) = keeps(&[stamp(THERE, 7)]);
    assert!(hub.take_over(&channel, handed(&leaving), |_| false));
    assert_eq!(missed(&hub, at.entries()), Some(vec![]));
    hub.forwarded(from(THERE, 8, 1));
    assert_eq!(missed(&hub, at.entries()), Some(vec![(THERE, 8)]));
}

/// The node that leaves has lost sight of what a run had published that is gone, and somebody lacks it.
#[test]
fn client_lacking_messages_before_handoff_is_not_resumed() {
    let (hub, channel) = keeps(&[stamp(88, 3)]);
    let end = position(&[(88, 3), (GONE, 9)]);
    let nothing = HandedOver { begin: end.clone(), end, messages: Vec::new() };
    assert!(hub.take_over(&channel, nothing, |run| run == GONE));
    publish(&hub, &key("a"), 1);
    assert_eq!(missed(&hub, &[(88, 3)]), None);
    assert_eq!(missed(&hub, &[(88, 3), (GONE, 9)]), Some(vec![(hub.incarnation(), 1)]));
}

/// The node that leaves has lost sight of less than has come here.
#[test]
fn buffered_messages_of_retired_incarnation_survive_handoff() {
    let (hub, channel) = keeps(&[stamp(GONE, 5)]);
    (6..=8).for_each(|sequence| hub.forwarded(from(GONE, sequence, 1)));
    let begin = position(&[(GONE, 7)]);
    let given = HandedOver { begin, end: position(&[(GONE, 9)]), messages: vec![(from(GONE, 8, 1), 0)] };
    hub.take_over(&channel, given, |run| run == GONE);
    assert_eq!(missed(&hub, &[(GONE, 5)]), Some(vec![(GONE, 6), (GONE, 7), (GONE, 8)]));
    assert_eq!(channel.mark().serial().sequence_of(GONE), Some(9), "a number without a message");
}

#[test]
fn a_channel_that_has_much_has_no_room_before_it() {
    let (hub, channel) = keeps(&[]);
    let limits = Limits::default();
    while hub.has_room_before(&key("a")) {
        assert!(hub.rings.held() < limits.ring_bytes);
        publish(&hub, &key("a"), 100);
    }
    assert!(hub.rings.held() > limits.ring_bytes / 2 && channel.mark().place > 0);
}
