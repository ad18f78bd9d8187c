//! Effects of another node's failure on positions and on attached clients.

use std::collections::HashSet;

use fanfare_proto::serial::Serial;

use super::forwarded::{THERE, from, position};
use super::*;
use crate::hub::channels::OFFSETS_BEFORE;

fn nowhere() -> HashSet<u64> {
    HashSet::new()
}

/// A hub with a channel that the other node forwards and where it had numbered nothing before.
fn joined() -> (Hub, Vec<Arc<HubTestTarget>>, Arc<Channel>) {
    with_peer_sequence(super::forwarded::joined())
}

fn with_peer_sequence(
    (hub, targets, channel): (Hub, Vec<Arc<HubTestTarget>>, Arc<Channel>),
) -> (Hub, Vec<Arc<HubTestTarget>>, Arc<Channel>) {
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 0 });
    (hub, targets, channel)
}

#[test]
fn subscribers_get_continuity_loss_in_channels_of_a_down_node() {
    let (hub, targets, channel) = joined();
    hub.report_node_failure(THERE, &nowhere());
    assert!(targets[0].lost.lock().is_empty(), "nothing came from there");
    hub.report_node_failure(THERE, &HashSet::from([channel.number()]));
    assert_eq!(targets[0].lost.lock().len(), 1, "what it had was never told");
    hub.deliver_forwarded(from(THERE, 5, 2));
    hub.report_node_failure(THERE + 1, &nowhere());
    assert_eq!(targets[0].lost.lock().len(), 1, "another one");
    hub.report_node_failure(THERE, &nowhere());
    assert_eq!(*targets[0].lost.lock(), [channel.number(); 2]);
    let start = |there| hub.resume_start(&key("a"), &position(&hub, 0, there));
    hub.deliver_forwarded(from(THERE, 7, 1));
    assert_eq!(
        (start(6), start(7)),
        (ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 2), is_exact: true }, ResumeStart::Live)
    );
}

#[test]
fn client_is_not_resumed_until_node_in_doubt_catches_up() {
    let (hub, targets, channel) = joined();
    hub.deliver_forwarded(from(THERE, 5, 2));
    let start = |there| hub.resume_start(&key("a"), &position(&hub, 0, there));
    hub.mark_in_doubt(THERE, &nowhere());
    assert_eq!(start(6), ResumeStart::Unknown);
    hub.confirm_contiguous(&key("a"), channel.number() + 1, Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!(start(6), ResumeStart::Unknown, "of a former life of the channel");
    hub.confirm_contiguous(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!(start(6), ResumeStart::Live);
    assert!(targets[0].lost.lock().is_empty());
}

#[test]
fn incarnation_in_doubt_may_have_published_where_it_forwards() {
    let (hub, targets, channel) = joined();
    let silent =
        || hub.channels_silent_from(THERE).iter().map(|channel| channel.number()).collect::<Vec<_>>();
    assert_eq!(silent(), [channel.number()]);
    let start = || hub.resume_start(&key("a"), &position(&hub, 0, 0));
    hub.mark_in_doubt(THERE + 1, &nowhere());
    assert_eq!(start(), ResumeStart::Live, "another one");
    hub.mark_in_doubt(THERE, &nowhere());
    assert_eq!(start(), ResumeStart::Unknown);
    hub.abandon_incarnation(THERE, &nowhere());
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
    assert_eq!(start(), ResumeStart::Unknown, "of before");
    hub.deliver_forwarded(from(THERE, 5, 1));
    assert!(silent().is_empty());
}

#[test]
fn incarnation_abandoned_in_doubt_ends_every_position() {
    let (hub, targets, channel) = joined();
    hub.deliver_forwarded(from(THERE, 5, 2));
    publish(&hub, &key("a"), 1);
    hub.mark_in_doubt(THERE, &nowhere());
    hub.abandon_incarnation(THERE, &nowhere());
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
    let start = |here, there| hub.resume_start(&key("a"), &position(&hub, here, there));
    assert_eq!(
        (start(0, 6), start(1, 5), start(1, 6)),
        (ResumeStart::Unknown, ResumeStart::Unknown, ResumeStart::Unknown)
    );
    assert_eq!(start(2, 6), ResumeStart::Live, "what is told from now on");
    publish(&hub, &key("a"), 1);
    assert_eq!(start(2, 6), ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 4), is_exact: true });
    assert_eq!(channel.position().serial(), position(&hub, 3, 6));
}

#[test]
fn sequence_gap_of_peer_is_known_once_the_peer_sends_it() {
    let (hub, targets, channel) = joined();
    hub.deliver_forwarded(from(THERE, 5, 1));
    let start = |there| hub.resume_start(&key("a"), &position(&hub, 0, there));
    assert_eq!(start(6), ResumeStart::Unknown, "it may be on its way");
    hub.confirm_contiguous(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!([5, 6, 7].map(start), [ResumeStart::Live, ResumeStart::Live, ResumeStart::Unknown]);
    hub.extend_contiguous(&key("a"), Stamp { incarnation: THERE, sequence: 7 });
    assert_eq!((start(7), channel.position().serial()), (ResumeStart::Live, Serial::single(THERE, 5)));
    hub.deliver_forwarded(from(THERE, 8, 1));
    let replay = ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 1), is_exact: true };
    assert_eq!([5, 8].map(start), [replay, ResumeStart::Live]);
    assert!(matches!(start(7), ResumeStart::Replay { after, .. } if after.offset == OFFSETS_BEFORE + 1));
    assert!(targets[0].lost.lock().is_empty());
}

/// The down incarnation is in no serial of this node, and a client from there misses nothing.
#[test]
fn down_incarnation_with_only_sequence_gaps_causes_no_loss() {
    let (hub, targets, channel) = joined();
    let start = |there| hub.resume_start(&key("a"), &position(&hub, 0, there));
    hub.extend_contiguous(&key("a"), Stamp { incarnation: THERE, sequence: 6 });
    hub.extend_contiguous(&key("a"), Stamp { incarnation: THERE + 1, sequence: 6 });
    hub.report_node_failure(THERE, &nowhere());
    assert!(targets[0].lost.lock().is_empty());
    assert_eq!([6, 7].map(start), [ResumeStart::Live, ResumeStart::Unknown]);
    let mut of_both = position(&hub, 0, 6);
    of_both.advance(THERE + 1, 6);
    assert_eq!(
        hub.resume_start(&key("a"), &of_both),
        ResumeStart::Unknown,
        "the other one does not forward it yet"
    );
    hub.learn_retired_sequences(&key("a"), channel.number(), &[Stamp { incarnation: THERE, sequence: 6 }]);
    assert!(targets[0].lost.lock().is_empty(), "another node has heard it to there");
}

#[test]
fn sequence_gap_reports_beside_a_loss_hide_nothing() {
    let (hub, _targets, channel) = joined();
    let start = |there| hub.resume_start(&key("a"), &position(&hub, 0, there));
    let numbered = |sequence| hub.extend_contiguous(&key("a"), Stamp { incarnation: THERE, sequence });
    hub.mark_in_doubt(THERE, &nowhere());
    numbered(6);
    hub.confirm_contiguous(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 5 });
    assert_eq!([5, 6].map(start), [ResumeStart::Live, ResumeStart::Unknown]);
    hub.mark_peer_loss(THERE);
    numbered(6);
    hub.confirm_contiguous(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!([5, 6].map(start), [ResumeStart::Unknown, ResumeStart::Live], "from there on it is heard");
}

#[test]
fn sequences_that_were_never_sent_to_peers_are_noticed() {
    let (hub, _targets, channel) = joined();
    assert!(!hub.take_unannounced_gap());
    hub.mark_in_doubt(THERE, &nowhere());
    hub.abandon_incarnation(THERE, &nowhere());
    assert!(hub.take_unannounced_gap() && !hub.take_unannounced_gap());
    hub.deliver_forwarded(from(THERE, 5, 1));
    hub.retire_incarnations(&[THERE + 1]);
    assert!(!hub.take_unannounced_gap(), "it stands nowhere");
    hub.retire_incarnations(&[THERE]);
    assert!(hub.take_unannounced_gap());
    hub.pass_barrier(&key("a"), channel.number(), false);
    assert!(!hub.take_unannounced_gap(), "it was let in before");
    let (waiting, _targets) = hub_of(1, Clock::manual(NOW_MS));
    waiting.set_interest(Arc::new(super::forwarded::TestAnnouncer::with_barrier()));
    waiting.join(&key("a"), 0, || Box::new(|| {}));
    waiting.pass_barrier(&key("a"), waiting.live(&key("a")).expect("it is joined").number(), false);
    assert!(waiting.take_unannounced_gap());
    assert_eq!(
        (hub.last_sequence(&key("a")), hub.last_sequence(&key("b"))),
        (channel.position().own.sequence, 0)
    );
}

/// Nothing of the incarnation is missing, and no recent messages were kept so far.
#[test]
fn client_without_messages_resumes_over_sequence_gaps() {
    let (hub, _targets, channel) = joined();
    let resumes = |position: &Serial| match hub.resume_start(&key("a"), position) {
        ResumeStart::Live => true,
        ResumeStart::Replay { after, is_exact: true } => {
            channel.pull(after, usize::MAX).is_some_and(|pulled| pulled.deliveries.is_empty())
        }
        _ => false,
    };
    let at_first = channel.position().serial();
    hub.confirm_contiguous(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert!(resumes(&at_first));
    let (hub, _targets, channel) = joined();
    hub.learn_peer_sequence(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    let serial = channel.position().serial();
    hub.retire_incarnations(&[THERE]);
    let start = hub.resume_start(&key("a"), &serial);
    assert!(matches!(start, ResumeStart::Live | ResumeStart::Replay { is_exact: true, .. }), "{start:?}");
    // A client came from there and kept its position in a channel without messages.
    let (hub, _targets, channel) = joined();
    let came = Serial::single(THERE, 6);
    hub.extend_contiguous(&key("a"), Stamp { incarnation: THERE, sequence: 6 });
    let here = channel.position().serial();
    hub.retire_incarnations(&[THERE]);
    for position in [&came, &here] {
        assert_ne!(hub.resume_start(&key("a"), position), ResumeStart::Unknown, "{position}");
    }
    assert_eq!(hub.resume_start(&key("a"), &Serial::single(THERE, 7)), ResumeStart::Unknown);
}

/// No message had a sequence when the client's serial was given.
#[test]
fn client_first_attached_at_a_peer_resumes_if_it_forwards() {
    let (hub, _targets, channel) = joined();
    let start = |incarnation| hub.resume_start(&key("a"), &Serial::single(incarnation, 0));
    assert_eq!((start(THERE), start(THERE + 1)), (ResumeStart::Live, ResumeStart::Unknown));
    let offset = channel.position().offset;
    publish(&hub, &key("a"), 1);
    assert_eq!(start(THERE), ResumeStart::Replay { after: local_offset(offset), is_exact: true });
    assert_eq!(start(THERE + 1), ResumeStart::Unknown);
}

/// Not even in a channel where no node is known to have numbered a message.
#[test]
fn the_empty_position_is_not_one_to_begin_at() {
    let (hub, _targets, channel) = joined();
    let empty = Serial::default();
    assert_eq!(hub.resume_start(&key("a"), &empty), ResumeStart::Unknown);
    for _ in 0..2 {
        hub.deliver_forwarded(from(THERE, channel.position().offset + 1, 1));
        assert_eq!(hub.resume_start(&key("a"), &empty), ResumeStart::Unknown);
        assert!(hub.replay_after(&key("a"), &empty).is_none());
    }
    let (alone, _targets) = hub_of(1, Clock::manual(NOW_MS));
    alone.attach(&key("a"), 0);
    assert_eq!(alone.resume_start(&key("a"), &empty), ResumeStart::Unknown);
}

#[test]
fn position_from_before_channel_was_forgotten_does_not_resume() {
    let (hub, _targets, channel) = joined_without_buffers();
    let earlier = channel.position().serial();
    hub.detach(&channel, 0);
    assert_eq!(hub.channel_count(), 0, "nothing is kept");
    // Other nodes may have published meanwhile and have failed.
    assert_eq!(hub.resume_start(&key("a"), &earlier), ResumeStart::Unknown);
}

fn joined_without_buffers() -> (Hub, Vec<Arc<HubTestTarget>>, Arc<Channel>) {
    let (hub, targets) = hub_without_buffers(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(super::forwarded::TestAnnouncer::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    with_peer_sequence((hub, targets, channel.expect("there is nobody to wait for")))
}

#[test]
fn retired_incarnation_leaves_positions_and_ends_none() {
    let (hub, targets, channel) = joined();
    hub.deliver_forwarded(from(THERE, 5, 2));
    publish(&hub, &key("a"), 1);
    hub.deliver_forwarded(from(THERE, 7, 1));
    hub.retire_incarnations(&[THERE + 1]);
    assert_eq!(channel.position().serial(), position(&hub, 1, 7), "another one");
    hub.retire_incarnations(&[THERE]);
    assert_eq!(channel.position().serial(), position(&hub, 2, 0));
    assert!(targets[0].lost.lock().is_empty());
    let start = |here, there| hub.resume_start(&key("a"), &position(&hub, here, there));
    assert_eq!(start(2, 0), ResumeStart::Live, "what is told from now on");
    assert_eq!(start(2, 7), ResumeStart::Live);
    assert_eq!(
        start(1, 7),
        ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 4), is_exact: true },
        "it has all"
    );
    assert_eq!(start(1, 6), ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 3), is_exact: true });
    assert_eq!(
        start(1, 0),
        ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE), is_exact: false },
        "it has heard nothing of it"
    );
    assert_eq!(start(1, 8), ResumeStart::Unknown);
    publish(&hub, &key("a"), 1);
    assert_eq!(channel.position().serial(), position(&hub, 3, 0));
    assert_eq!(start(2, 0), ResumeStart::Replay { after: local_offset(OFFSETS_BEFORE + 4), is_exact: false });
    let pulled = channel.pull(local_offset(OFFSETS_BEFORE + 4), usize::MAX).expect("it is there");
    assert!(pulled.is_end && pulled.deliveries.len() == 1);
}
