//! Handoff of a channel by a draining node to a peer.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::forwarded::{TestAnnouncer, from};
use super::*;
use crate::hub::handoff::ReplayHandoff;
use crate::model::ForwardedMessages;

pub(super) const THERE: u64 = 77;
/// An incarnation that has ended.
pub(super) const GONE: u64 = 5;

/// The handoff of channel `a` as it arrives over the wire.
pub(super) fn handoff_of(hub: &Hub) -> ReplayHandoff<ForwardedMessages> {
    let ReplayHandoff { begin, end, messages } =
        hub.make_handoff(&key("a"), usize::MAX).expect("it is whole");
    let again = |delivery: Arc<MessageDelivery>| {
        let Stamp { incarnation, sequence } = delivery.last();
        from(incarnation, sequence + 1 - delivery.count(), delivery.count())
    };
    ReplayHandoff { begin, end, messages: messages.into_iter().map(|(one, age)| (again(one), age)).collect() }
}

/// A draining node with an attached client: sequences 1 and 2 in one publish, then one message of another incarnation, then 3.
pub(super) fn leaving() -> Hub {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(TestAnnouncer::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    let number = channel.expect("there is nobody to wait for").number();
    [THERE, GONE]
        .iter()
        .for_each(|incarnation| hub.learn_peer_sequence(&key("a"), number, stamp(*incarnation, 0)));
    publish(&hub, &key("a"), 2);
    hub.deliver_forwarded(from(THERE, 1, 1));
    publish(&hub, &key("a"), 1);
    hub
}

/// A node that holds the channel and knows these sequences of peers.
pub(super) fn keeps(numbered: &[Stamp]) -> (Hub, Arc<Channel>) {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(TestAnnouncer::default()));
    let channel = hub.retain_channel(&key("a"), || unreachable!("there is nobody to wait for"));
    let channel = channel.expect("there is room");
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(THERE, 0));
    numbered.iter().for_each(|stamp| hub.learn_peer_sequence(&key("a"), channel.number(), *stamp));
    (hub, channel)
}

pub(super) fn position(entries: &[(u64, u64)]) -> Serial {
    let mut serial = Serial::default();
    entries.iter().for_each(|(incarnation, sequence)| serial.advance(*incarnation, *sequence));
    serial
}

pub(super) fn stamp(incarnation: u64, sequence: u64) -> Stamp {
    Stamp { incarnation, sequence }
}

pub(super) fn missed(hub: &Hub, entries: &[(u64, u64)]) -> Option<Vec<(u64, u64)>> {
    let missed = hub.missed_deliveries(&key("a"), &position(entries), u64::MAX)?;
    let last = |delivery: Arc<MessageDelivery>| (delivery.last().incarnation, delivery.last().sequence);
    Some(missed.into_iter().map(last).collect())
}

/// The handoff begins at the channel's position. Sequences known only from announcements are in no client's serial.
#[test]
fn handoff_of_empty_replay_buffer_begins_at_client_positions() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(TestAnnouncer::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    let number = channel.expect("there is nobody to wait for").number();
    hub.learn_peer_sequence(&key("a"), number, stamp(THERE, 0));
    hub.extend_contiguous(&key("a"), stamp(THERE, 4));
    let ReplayHandoff { begin, end, .. } = handoff_of(&hub);
    assert_eq!((begin.sequence_of(THERE), end.sequence_of(THERE)), (None, Some(4)));
}

#[test]
fn resuming_client_after_handoff_replays_from_first_missed() {
    let leaving = leaving();
    let incarnation = leaving.incarnation();
    let (hub, channel) = keeps(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    assert_eq!(missed(&hub, &[(incarnation, 2)]), None);
    hub.deliver_forwarded(from(incarnation, 4, 1));
    publish(&hub, &key("a"), 1);
    assert!(hub.accept_handoff(&channel, handoff_of(&leaving), |_| false));
    let own = (hub.incarnation(), 1);
    assert_eq!(
        missed(&hub, &[(incarnation, 2)]),
        Some(vec![(THERE, 1), (incarnation, 3), (incarnation, 4), own])
    );
    assert_eq!(
        missed(&hub, &[(incarnation, 0)]),
        Some(vec![(incarnation, 2), (THERE, 1), (incarnation, 3), (incarnation, 4), own])
    );
    assert_eq!(missed(&hub, &[(incarnation, 3)]), Some(vec![(THERE, 1), (incarnation, 4), own]));
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1)]), Some(vec![(incarnation, 4), own]));
    assert_eq!(missed(&hub, &[(incarnation, 4), (THERE, 1)]), Some(vec![own]));
    assert_eq!(missed(&hub, &[(incarnation, 4), (THERE, 1), own]), Some(vec![]));
    assert_eq!(missed(&hub, &[(incarnation, 5), (THERE, 1)]), None, "ahead of all that is known");
}

#[test]
fn handoff_of_messages_already_buffered_keeps_each_once() {
    let leaving = leaving();
    let incarnation = leaving.incarnation();
    let (hub, channel) = keeps(&[stamp(incarnation, 2)]);
    hub.deliver_forwarded(from(THERE, 1, 1));
    hub.deliver_forwarded(from(incarnation, 3, 1));
    assert!(hub.accept_handoff(&channel, handoff_of(&leaving), |_| false));
    assert_eq!(missed(&hub, &[(incarnation, 0)]), Some(vec![(incarnation, 2), (THERE, 1), (incarnation, 3)]));
    assert!(hub.accept_handoff(&channel, handoff_of(&leaving), |_| false), "again it changes nothing");
    assert_eq!(missed(&hub, &[(incarnation, 0)]), Some(vec![(incarnation, 2), (THERE, 1), (incarnation, 3)]));
}

#[test]
fn handoff_with_gap_to_own_replay_buffer_is_refused() {
    let leaving = leaving();
    let incarnation = leaving.incarnation();
    let (hub, channel) = keeps(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    let later = ReplayHandoff { begin: position(&[(incarnation, 4)]), ..handoff_of(&leaving) };
    assert!(!hub.accept_handoff(&channel, later, |_| false));
    assert_eq!(missed(&hub, &[(incarnation, 2)]), None);
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1)]), Some(vec![]));
}

#[test]
fn retired_incarnation_is_known_as_at_the_leaving_node() {
    let leaving = leaving();
    let incarnation = leaving.incarnation();
    leaving.deliver_forwarded(from(GONE, 9, 1));
    let (hub, channel) = keeps(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    hub.learn_retired_sequences(&key("a"), channel.number(), &[stamp(GONE, 9)]);
    assert!(hub.accept_handoff(&channel, handoff_of(&leaving), |incarnation| incarnation == GONE));
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1)]), Some(vec![(GONE, 9)]));
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1), (GONE, 9)]), Some(vec![]));
    let (hub, channel) = keeps(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1), (GONE, 9)]), None);
    assert!(
        !hub.accept_handoff(&channel, handoff_of(&leaving), |incarnation| incarnation == GONE),
        "what it had last has not come here"
    );
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1), (GONE, 9)]), Some(vec![]));
    assert_eq!(missed(&hub, &[(incarnation, 3), (THERE, 1)]), None, "nor will it");
    let (hub, channel) = keeps(&[stamp(incarnation, 3), stamp(THERE, 1)]);
    assert!(
        !hub.accept_handoff(&channel, handoff_of(&leaving), |_| false),
        "it does not forward the channel to here"
    );
    assert_eq!(missed(&hub, &[(incarnation, 2)]), None);
}

#[test]
fn attached_client_gets_loss_if_incarnation_not_fully_received() {
    let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(TestAnnouncer::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for")).expect("as said");
    hub.learn_peer_sequence(&key("a"), channel.number(), stamp(GONE, 0));
    hub.deliver_forwarded(from(GONE, 8, 1));
    hub.learn_retired_sequences(&key("a"), channel.number(), &[stamp(GONE, 8)]);
    assert!(targets[0].lost.lock().is_empty());
    hub.learn_retired_sequences(&key("a"), channel.number(), &[stamp(GONE, 9)]);
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
}

#[test]
fn handoff_includes_a_channel_without_messages() {
    let (leaving, _targets) = hub_of(1, Clock::manual(NOW_MS));
    leaving.set_interest(Arc::new(TestAnnouncer::default()));
    leaving.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    let at = leaving.position(&key("a")).serial();
    assert_eq!(leaving.active_channels().len(), 1);
    let (hub, channel) = keeps(&[stamp(THERE, 7)]);
    assert!(hub.accept_handoff(&channel, handoff_of(&leaving), |_| false));
    assert_eq!(missed(&hub, at.entries()), Some(vec![]));
    hub.deliver_forwarded(from(THERE, 8, 1));
    assert_eq!(missed(&hub, at.entries()), Some(vec![(THERE, 8)]));
}

/// The draining node no longer has the messages of a retired incarnation, which a client lacks.
#[test]
fn client_lacking_messages_before_handoff_is_not_resumed() {
    let (hub, channel) = keeps(&[stamp(88, 3)]);
    let end = position(&[(88, 3), (GONE, 9)]);
    let nothing = ReplayHandoff { begin: end.clone(), end, messages: Vec::new() };
    assert!(hub.accept_handoff(&channel, nothing, |incarnation| incarnation == GONE));
    publish(&hub, &key("a"), 1);
    assert_eq!(missed(&hub, &[(88, 3)]), None);
    assert_eq!(missed(&hub, &[(88, 3), (GONE, 9)]), Some(vec![(hub.incarnation(), 1)]));
}

/// The draining node lacks fewer messages than this node has received.
#[test]
fn buffered_messages_of_retired_incarnation_survive_handoff() {
    let (hub, channel) = keeps(&[stamp(GONE, 5)]);
    (6..=8).for_each(|sequence| hub.deliver_forwarded(from(GONE, sequence, 1)));
    let begin = position(&[(GONE, 7)]);
    let given = ReplayHandoff { begin, end: position(&[(GONE, 9)]), messages: vec![(from(GONE, 8, 1), 0)] };
    hub.accept_handoff(&channel, given, |incarnation| incarnation == GONE);
    assert_eq!(missed(&hub, &[(GONE, 5)]), Some(vec![(GONE, 6), (GONE, 7), (GONE, 8)]));
    assert_eq!(channel.position().serial().sequence_of(GONE), Some(9), "a number without a message");
}

#[test]
fn a_channel_that_has_much_has_no_room_before_it() {
    let (hub, channel) = keeps(&[]);
    let limits = Limits::default();
    while hub.can_prepend(&key("a")) {
        assert!(hub.replay_budget.held() < limits.ring_bytes);
        publish(&hub, &key("a"), 100);
    }
    assert!(hub.replay_budget.held() > limits.ring_bytes / 2 && channel.position().offset > 0);
}
