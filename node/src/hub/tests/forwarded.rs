//! Messages published at another node: in order with local ones, and in the positions of clients.

use bytes::Bytes;
use fanfare_proto::frame::Format;
use fanfare_proto::serial::Serial;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::hub::AnnounceResult;
use crate::hub::channels::OFFSETS_BEFORE;
use crate::model::{ForwardedMessages, ForwardedParts};

pub(super) const THERE: u64 = 77;

pub(super) fn from(incarnation: u64, first: u64, count: u64) -> ForwardedMessages {
    let text = |sequence| Bytes::from(format!(r#"{{"id":"f{sequence}"}}"#));
    let last = first + count - 1;
    let parts = ForwardedParts {
        incarnation,
        first,
        last,
        timestamp_ms: NOW_MS,
        connection_id: ConnectionId::from_bytes([2; 16]),
        client_id: None,
        messages: (first..=last).map(text).collect(),
        bytes: 10 * count,
    };
    ForwardedMessages::new(key("a"), parts)
}

/// The serial with this node's sequence `here` and the other node's `there`.
pub(super) fn position(hub: &Hub, here: u64, there: u64) -> Serial {
    let mut serial = Serial::single(hub.incarnation(), here);
    if there > 0 {
        serial.advance(THERE, there);
    }
    serial
}

/// A hub with a channel that other nodes forward.
pub(super) fn joined() -> (Hub, Vec<Arc<HubTestTarget>>, Arc<Channel>) {
    let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(TestAnnouncer::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    (hub, targets, channel.expect("there is nobody to wait for"))
}

fn text(delivery: &MessageDelivery) -> String {
    let frame = delivery.frame(Format::Json);
    let start = frame.iter().position(|byte| *byte == b'{').expect("a JSON frame");
    String::from_utf8(frame[start..].to_vec()).expect("a text frame")
}

#[test]
fn forwarded_message_has_this_nodes_position_as_serial() {
    let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 2);
    hub.deliver_forwarded(from(THERE, 5, 2));
    publish(&hub, &key("a"), 1);
    let deliveries = targets[0].deliveries.lock();
    let offsets: Vec<u64> = deliveries.iter().map(|delivery| delivery.offset()).collect();
    assert_eq!(offsets, [2, 4, 5]);
    let serials: Vec<Serial> = deliveries.iter().map(|delivery| delivery.position().serial()).collect();
    assert_eq!(serials, [position(&hub, 2, 0), position(&hub, 2, 6), position(&hub, 3, 6)]);
    let serial = position(&hub, 2, 6);
    let expected =
        format!(r#"{{"op":13,"channel":"a","serial":"{serial}","messages":[{{"id":"f5"}},{{"id":"f6"}}]}}"#);
    assert_eq!(text(&deliveries[1]), expected);
    assert_eq!((deliveries[1].count(), deliveries[1].counted_bytes()), (2, 20));
}

#[test]
fn forwarded_without_subscribers_or_received_before_is_ignored() {
    let (hub, targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.deliver_forwarded(from(THERE, 1, 1));
    assert_eq!(hub.channel_count(), 0);
    hub.attach(&key("a"), 0);
    hub.deliver_forwarded(from(THERE, 2, 2));
    hub.deliver_forwarded(from(THERE, 2, 2));
    hub.deliver_forwarded(from(THERE, 3, 1));
    assert_eq!(targets[0].deliveries.lock().len(), 1);
}

#[test]
fn resuming_client_replays_from_first_missed_message() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    let (channel, _) = hub.attach(&key("a"), 0);
    hub.deliver_forwarded(from(THERE, 1, 1));
    publish(&hub, &key("a"), 1);
    hub.deliver_forwarded(from(THERE, 2, 1));
    publish(&hub, &key("a"), 1);
    let start = |here, there| hub.resume_start(&key("a"), &position(&hub, here, there));
    assert_eq!(start(2, 2), ResumeStart::Live);
    assert_eq!(start(1, 2), ResumeStart::Replay { after: local_offset(3), is_exact: true });
    assert_eq!(start(0, 1), ResumeStart::Replay { after: local_offset(1), is_exact: true });
    assert_eq!(start(0, 0), ResumeStart::Replay { after: local_offset(0), is_exact: true });
    // The client was on a node where both had arrived in another order.
    assert_eq!(start(2, 1), ResumeStart::Replay { after: local_offset(2), is_exact: false });
    assert_eq!(start(0, 2), ResumeStart::Replay { after: local_offset(1), is_exact: false });
    assert_eq!(start(2, 3), ResumeStart::Unknown, "it has what has not come here yet");
    let pulled = channel.pull(local_offset(2), usize::MAX).expect("the ring has it");
    let received = position(&hub, 2, 1);
    let missed: Vec<_> =
        pulled.deliveries.iter().filter(|delivery| !delivery.is_included_in(&received)).collect();
    assert_eq!(missed.len(), 1, "the last one came from here, and it has that");
    assert_eq!(missed[0].position().serial().join(&received), position(&hub, 2, 2));
}

#[test]
fn position_with_unknown_incarnation_cannot_be_resumed() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.attach(&key("a"), 0);
    hub.deliver_forwarded(from(THERE, 1, 1));
    let mut unknown = position(&hub, 0, 1);
    unknown.advance(3, 1);
    assert_eq!(hub.resume_start(&key("a"), &unknown), ResumeStart::Unknown);
}

#[test]
fn channel_position_known_at_each_buffered_delivery_boundary() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    let (channel, _) = hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 1);
    hub.deliver_forwarded(from(THERE, 4, 3));
    publish(&hub, &key("a"), 1);
    assert_eq!(channel.position_at(LocalOffset::end(0)), position(&hub, 0, 0));
    assert_eq!(channel.position_at(LocalOffset::end(1)), position(&hub, 1, 0));
    assert_eq!(channel.position_at(LocalOffset::end(4)), position(&hub, 1, 6));
    assert_eq!(channel.position_at(LocalOffset::end(5)), position(&hub, 2, 6));
    assert_eq!(channel.position_at(LocalOffset::end(3)), Serial::default(), "in the midst of a delivery");
}

#[test]
fn earlier_messages_of_peer_break_continuity_of_replay_buffer() {
    let (hub, targets, channel) = joined();
    publish(&hub, &key("a"), 2);
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 0 });
    assert!(targets[0].lost.lock().is_empty(), "nothing was numbered there");
    hub.learn_peer_sequence(&key("a"), channel.number() + 1, Stamp { incarnation: THERE, sequence: 9 });
    assert!(targets[0].lost.lock().is_empty(), "of a former life of the channel");
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 9 });
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
    assert_eq!(hub.resume_start(&key("a"), &position(&hub, 1, 0)), ResumeStart::Unknown);
    assert_eq!(hub.resume_start(&key("a"), &position(&hub, 2, 9)), ResumeStart::Live);
    publish(&hub, &key("a"), 1);
    assert_eq!(
        hub.resume_start(&key("a"), &position(&hub, 2, 9)),
        ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 2), is_exact: true }
    );
}

#[test]
fn forward_before_peer_answer_does_not_hide_missing_messages() {
    let (hub, targets, channel) = joined();
    hub.deliver_forwarded(from(THERE, 7, 1));
    assert!(targets[0].deliveries.lock().is_empty(), "what was before it may be missing");
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 7 });
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
    assert_eq!(hub.resume_start(&key("a"), &position(&hub, 0, 5)), ResumeStart::Unknown);
    assert_eq!(hub.resume_start(&key("a"), &position(&hub, 0, 7)), ResumeStart::Live);
}

#[test]
fn after_peer_loss_no_resume_until_lost_sequence_is_known() {
    let (hub, targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 0 });
    hub.deliver_forwarded(from(THERE, 5, 1));
    let start = |there| hub.resume_start(&key("a"), &position(&hub, 0, there));
    assert_eq!(start(5), ResumeStart::Live);
    hub.mark_peer_loss(THERE);
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
    assert_eq!(start(5), ResumeStart::Unknown);
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!((start(5), start(6)), (ResumeStart::Unknown, ResumeStart::Live));
    hub.deliver_forwarded(from(THERE, 7, 1));
    let replay = ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 1), is_exact: true };
    assert_eq!((start(5), start(6)), (ResumeStart::Unknown, replay));
}

#[test]
fn backfill_is_taken_only_from_peer_as_far_in_each_incarnation() {
    let (hub, _targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 4 });
    hub.deliver_forwarded(from(THERE, 5, 2));
    let after = LocalOffset::end(channel.position().offset);
    let backfill = |there, missed| channel.backfill(&position(&hub, 0, there), after, missed);
    let backfilled =
        backfill(4, vec![from(THERE, 5, 1), from(THERE, 6, 1)]).expect("it has all that is here");
    let positions: Vec<Serial> = backfilled.deliveries.into_iter().map(|(_, position)| position).collect();
    assert_eq!(positions, [position(&hub, 0, 5), position(&hub, 0, 6)]);
    assert_eq!(backfilled.received, position(&hub, 0, 6));
    assert!(backfill(4, vec![from(THERE, 5, 1)]).is_none(), "6 has come here and was not known there");
    assert!(backfill(6, Vec::new()).is_some(), "it has it already");
    assert!(backfill(0, vec![from(THERE + 1, 1, 1)]).is_some(), "of this run it was never to have anything");
}

#[test]
fn position_with_an_unreceived_incarnation_does_not_resume() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    hub.attach(&key("a"), 0);
    publish(&hub, &key("a"), 2);
    assert_eq!(hub.resume_start(&key("a"), &position(&hub, 2, 0)), ResumeStart::Live);
    assert_eq!(hub.resume_start(&key("a"), &position(&hub, 2, 9)), ResumeStart::Unknown);
}

/// An announcer that counts the announcements.
#[derive(Default)]
pub(super) struct TestAnnouncer {
    has_lost: bool,
    waits: bool,
    unreachable: Vec<u64>,
    joins: AtomicUsize,
    leaves: AtomicUsize,
}

impl TestAnnouncer {
    pub(super) fn after_failure(has_lost: bool) -> Self {
        Self { has_lost, ..Self::default() }
    }

    pub(super) fn with_barrier() -> Self {
        Self { waits: true, ..Self::default() }
    }
}

impl InterestAnnouncer for TestAnnouncer {
    fn announce(&self, _key: &ChannelKey, _number: u64, _sequence: u64) -> AnnounceResult {
        self.joins.fetch_add(1, Ordering::SeqCst);
        AnnounceResult { is_done: !self.waits, unreachable: self.unreachable.clone() }
    }

    fn withdraw(&self, _key: &ChannelKey, _number: u64) {
        self.leaves.fetch_add(1, Ordering::SeqCst);
    }

    fn has_recent_loss(&self) -> bool {
        self.has_lost
    }
}

#[test]
fn no_resume_with_unreachable_peer_until_peer_is_given_up() {
    let (hub, targets) = hub_without_buffers(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(TestAnnouncer { unreachable: vec![THERE], ..TestAnnouncer::default() }));
    let channel = hub.join(&key("a"), 0, || unreachable!("nobody is waited for")).expect("it is joined");
    let position = channel.position().serial();
    assert_eq!(hub.resume_start(&key("a"), &position), ResumeStart::Unknown);
    hub.abandon_where_in_doubt(THERE + 1);
    assert_eq!(hub.resume_start(&key("a"), &position), ResumeStart::Unknown);
    hub.abandon_where_in_doubt(THERE);
    assert_eq!(hub.resume_start(&key("a"), &position), ResumeStart::Unknown, "what it had is lost");
    assert_eq!(hub.resume_start(&key("a"), &channel.position().serial()), ResumeStart::Live);
    assert_eq!(*targets[0].lost.lock(), [channel.number()], "who was attached is told");
}

#[test]
fn an_attach_waits_for_other_nodes_once() {
    let (hub, _targets) = hub_without_buffers(2, Clock::manual(NOW_MS));
    let others = Arc::new(TestAnnouncer::with_barrier());
    hub.set_interest(Arc::clone(&others) as Arc<dyn InterestAnnouncer>);
    let ran = Arc::new(AtomicUsize::new(0));
    let waiter = || {
        let ran = Arc::clone(&ran);
        Box::new(move || {
            ran.fetch_add(1, Ordering::SeqCst);
        }) as AttachWaiter
    };
    assert!(hub.join(&key("a"), 0, waiter).is_none() && hub.join(&key("a"), 1, waiter).is_none());
    assert_eq!((others.joins.load(Ordering::SeqCst), ran.load(Ordering::SeqCst)), (1, 0));
    let number = hub.live(&key("a")).expect("it is waited for").number();
    hub.pass_barrier(&key("a"), number + 1, true);
    assert_eq!(ran.load(Ordering::SeqCst), 0, "another channel");
    hub.pass_barrier(&key("a"), number, true);
    assert_eq!(ran.load(Ordering::SeqCst), 2);
    let channel = hub.join(&key("a"), 0, waiter).expect("they forward it");
    hub.detach(&channel, 0);
    assert_eq!(others.leaves.load(Ordering::SeqCst), 0, "another target is there");
    hub.detach(&channel, 1);
    assert_eq!((others.leaves.load(Ordering::SeqCst), hub.channel_count()), (1, 0));
    assert!(hub.join(&key("a"), 0, waiter).is_none(), "they are told anew");
    let channel = hub.live(&key("a")).expect("it is waited for");
    hub.detach(&channel, 0);
    assert_eq!(hub.channel_count(), 1, "until then it stays");
}
