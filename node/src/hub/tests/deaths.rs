//! What becomes of positions and of who is attached when a run of another node has died.

use std::collections::HashSet;

use fanfare_proto::serial::Serial;

use super::forwarded::{THERE, from, position};
use super::*;
use crate::hub::channels::PLACES_BEFORE;

fn nowhere() -> HashSet<u64> {
    HashSet::new()
}

/// With a channel that the other node forwards, of which it had numbered nothing before.
fn joined() -> (Hub, Vec<Arc<Target>>, Arc<Channel>) {
    heard(super::forwarded::joined())
}

fn heard(
    (hub, targets, channel): (Hub, Vec<Arc<Target>>, Arc<Channel>),
) -> (Hub, Vec<Arc<Target>>, Arc<Channel>) {
    hub.heard(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 0 });
    (hub, targets, channel)
}

#[test]
fn subscribers_are_told_of_loss_in_channels_of_a_down_node() {
    let (hub, targets, channel) = joined();
    hub.died(THERE, &nowhere());
    assert!(targets[0].lost.lock().is_empty(), "nothing came from there");
    hub.died(THERE, &HashSet::from([channel.number()]));
    assert_eq!(targets[0].lost.lock().len(), 1, "what it had was never told");
    hub.forwarded(from(THERE, 5, 2));
    hub.died(THERE + 1, &nowhere());
    assert_eq!(targets[0].lost.lock().len(), 1, "another one");
    hub.died(THERE, &nowhere());
    assert_eq!(*targets[0].lost.lock(), [channel.number(); 2]);
    let start = |there| hub.look_after(&key("a"), &position(&hub, 0, there));
    hub.forwarded(from(THERE, 7, 1));
    assert_eq!(
        (start(6), start(7)),
        (Start::Replay { after: spot(PLACES_BEFORE + 2), is_exact: true }, Start::Live)
    );
}

#[test]
fn client_is_not_resumed_until_doubtful_node_catches_up() {
    let (hub, targets, channel) = joined();
    hub.forwarded(from(THERE, 5, 2));
    let start = |there| hub.look_after(&key("a"), &position(&hub, 0, there));
    hub.doubt(THERE, &nowhere());
    assert_eq!(start(6), Start::Unknown);
    hub.caught_up(&key("a"), channel.number() + 1, Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!(start(6), Start::Unknown, "of a former life of the channel");
    hub.caught_up(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!(start(6), Start::Live);
    assert!(targets[0].lost.lock().is_empty());
}

#[test]
fn a_doubtful_one_may_have_published_wherever_it_forwards() {
    let (hub, targets, channel) = joined();
    let silent = || hub.silent_with(THERE).iter().map(|channel| channel.number()).collect::<Vec<_>>();
    assert_eq!(silent(), [channel.number()]);
    let start = || hub.look_after(&key("a"), &position(&hub, 0, 0));
    hub.doubt(THERE + 1, &nowhere());
    assert_eq!(start(), Start::Live, "another one");
    hub.doubt(THERE, &nowhere());
    assert_eq!(start(), Start::Unknown);
    hub.gone(THERE, &nowhere());
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
    assert_eq!(start(), Start::Unknown, "of before");
    hub.forwarded(from(THERE, 5, 1));
    assert!(silent().is_empty());
}

#[test]
fn a_doubtful_one_that_is_gone_ends_every_position() {
    let (hub, targets, channel) = joined();
    hub.forwarded(from(THERE, 5, 2));
    publish(&hub, &key("a"), 1);
    hub.doubt(THERE, &nowhere());
    hub.gone(THERE, &nowhere());
    assert_eq!(*targets[0].lost.lock(), [channel.number()]);
    let start = |here, there| hub.look_after(&key("a"), &position(&hub, here, there));
    assert_eq!((start(0, 6), start(1, 5), start(1, 6)), (Start::Unknown, Start::Unknown, Start::Unknown));
    assert_eq!(start(2, 6), Start::Live, "what is told from now on");
    publish(&hub, &key("a"), 1);
    assert_eq!(start(2, 6), Start::Replay { after: spot(PLACES_BEFORE + 4), is_exact: true });
    assert_eq!(channel.mark().serial(), position(&hub, 3, 6));
}

#[test]
fn sequence_gap_of_peer_is_known_once_the_peer_tells_it() {
    let (hub, targets, channel) = joined();
    hub.forwarded(from(THERE, 5, 1));
    let start = |there| hub.look_after(&key("a"), &position(&hub, 0, there));
    assert_eq!(start(6), Start::Unknown, "it may be on its way");
    hub.caught_up(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!([5, 6, 7].map(start), [Start::Live, Start::Live, Start::Unknown]);
    hub.has_numbered(&key("a"), Stamp { incarnation: THERE, sequence: 7 });
    assert_eq!((start(7), channel.mark().serial()), (Start::Live, Serial::single(THERE, 5)));
    hub.forwarded(from(THERE, 8, 1));
    let replay = Start::Replay { after: spot(PLACES_BEFORE + 1), is_exact: true };
    assert_eq!([5, 8].map(start), [replay, Start::Live]);
    assert!(matches!(start(7), Start::Replay { after, .. } if after.place == PLACES_BEFORE + 1));
    assert!(targets[0].lost.lock().is_empty());
}

/// It stands in no serial here, and whoever comes from there misses nothing.
#[test]
fn down_incarnation_with_only_sequence_gaps_causes_no_loss() {
    let (hub, targets, channel) = joined();
    let start = |there| hub.look_after(&key("a"), &position(&hub, 0, there));
    hub.has_numbered(&key("a"), Stamp { incarnation: THERE, sequence: 6 });
    hub.has_numbered(&key("a"), Stamp { incarnation: THERE + 1, sequence: 6 });
    hub.died(THERE, &nowhere());
    assert!(targets[0].lost.lock().is_empty());
    assert_eq!([6, 7].map(start), [Start::Live, Start::Unknown]);
    let mut of_both = position(&hub, 0, 6);
    of_both.advance(THERE + 1, 6);
    assert_eq!(hub.look_after(&key("a"), &of_both), Start::Unknown, "the other one does not forward it yet");
    hub.heard_of(&key("a"), channel.number(), &[Stamp { incarnation: THERE, sequence: 6 }]);
    assert!(targets[0].lost.lock().is_empty(), "another node has heard it to there");
}

#[test]
fn sequence_gap_reports_beside_a_loss_hide_nothing() {
    let (hub, _targets, channel) = joined();
    let start = |there| hub.look_after(&key("a"), &position(&hub, 0, there));
    let numbered = |sequence| hub.has_numbered(&key("a"), Stamp { incarnation: THERE, sequence });
    hub.doubt(THERE, &nowhere());
    numbered(6);
    hub.caught_up(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 5 });
    assert_eq!([5, 6].map(start), [Start::Live, Start::Unknown]);
    hub.lost(THERE);
    numbered(6);
    hub.caught_up(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert_eq!([5, 6].map(start), [Start::Unknown, Start::Live], "from there on it is heard");
}

#[test]
fn numbers_that_nobody_was_told_of_are_noticed() {
    let (hub, _targets, channel) = joined();
    assert!(!hub.has_skipped());
    hub.doubt(THERE, &nowhere());
    hub.gone(THERE, &nowhere());
    assert!(hub.has_skipped() && !hub.has_skipped());
    hub.forwarded(from(THERE, 5, 1));
    hub.forget_runs(&[THERE + 1]);
    assert!(!hub.has_skipped(), "it stands nowhere");
    hub.forget_runs(&[THERE]);
    assert!(hub.has_skipped());
    hub.joined(&key("a"), channel.number(), false);
    assert!(!hub.has_skipped(), "it was let in before");
    let (waiting, _targets) = hub_of(1, Clock::manual(NOW_MS));
    waiting.set_interest(Arc::new(super::forwarded::Others::waited_for()));
    waiting.join(&key("a"), 0, || Box::new(|| {}));
    waiting.joined(&key("a"), waiting.live(&key("a")).expect("it is joined").number(), false);
    assert!(waiting.has_skipped());
    assert_eq!((hub.numbered(&key("a")), hub.numbered(&key("b"))), (channel.mark().own.sequence, 0));
}

/// Nothing is missing of it, and no recent messages were kept so far.
#[test]
fn client_without_messages_resumes_over_sequence_gaps() {
    let (hub, _targets, channel) = joined();
    let resumes = |position: &Serial| match hub.look_after(&key("a"), position) {
        Start::Live => true,
        Start::Replay { after, is_exact: true } => {
            channel.pull(after, usize::MAX).is_some_and(|pulled| pulled.deliveries.is_empty())
        }
        _ => false,
    };
    let at_first = channel.mark().serial();
    hub.caught_up(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    assert!(resumes(&at_first));
    let (hub, _targets, channel) = joined();
    hub.heard(&key("a"), channel.number(), Stamp { incarnation: THERE, sequence: 6 });
    let told = channel.mark().serial();
    hub.forget_runs(&[THERE]);
    let start = hub.look_after(&key("a"), &told);
    assert!(matches!(start, Start::Live | Start::Replay { is_exact: true, .. }), "{start:?}");
    // It came from there, and in a channel without messages has kept its position.
    let (hub, _targets, channel) = joined();
    let came = Serial::single(THERE, 6);
    hub.has_numbered(&key("a"), Stamp { incarnation: THERE, sequence: 6 });
    let here = channel.mark().serial();
    hub.forget_runs(&[THERE]);
    for position in [&came, &here] {
        assert_ne!(hub.look_after(&key("a"), position), Start::Unknown, "{position}");
    }
    assert_eq!(hub.look_after(&key("a"), &Serial::single(THERE, 7)), Start::Unknown);
}

/// Nobody had numbered anything when it was given.
#[test]
fn client_first_attached_elsewhere_resumes_if_peer_forwards() {
    let (hub, _targets, channel) = joined();
    let start = |run| hub.look_after(&key("a"), &Serial::single(run, 0));
    assert_eq!((start(THERE), start(THERE + 1)), (Start::Live, Start::Unknown));
    let place = channel.mark().place;
    publish(&hub, &key("a"), 1);
    assert_eq!(start(THERE), Start::Replay { after: spot(place), is_exact: true });
    assert_eq!(start(THERE + 1), Start::Unknown);
}

/// Not even of a channel in which nobody has numbered anything that is known here.
#[test]
fn the_empty_position_is_not_one_to_begin_at() {
    let (hub, _targets, channel) = joined();
    let empty = Serial::default();
    assert_eq!(hub.look_after(&key("a"), &empty), Start::Unknown);
    for _ in 0..2 {
        hub.forwarded(from(THERE, channel.mark().place + 1, 1));
        assert_eq!(hub.look_after(&key("a"), &empty), Start::Unknown);
        assert!(hub.recent_after(&key("a"), &empty).is_none());
    }
    let (alone, _targets) = hub_of(1, Clock::manual(NOW_MS));
    alone.attach(&key("a"), 0);
    assert_eq!(alone.look_after(&key("a"), &empty), Start::Unknown);
}

#[test]
fn position_from_former_life_of_channel_does_not_resume() {
    let (hub, _targets, channel) = joined_without_rings();
    let former = channel.mark().serial();
    hub.detach(&channel, 0);
    assert_eq!(hub.channel_count(), 0, "nothing is kept");
    // Others may have published meanwhile, and be gone.
    assert_eq!(hub.look_after(&key("a"), &former), Start::Unknown);
}

fn joined_without_rings() -> (Hub, Vec<Arc<Target>>, Arc<Channel>) {
    let (hub, targets) = hub_without_rings(1, Clock::manual(NOW_MS));
    hub.set_interest(Arc::new(super::forwarded::Others::default()));
    let channel = hub.join(&key("a"), 0, || unreachable!("there is nobody to wait for"));
    heard((hub, targets, channel.expect("there is nobody to wait for")))
}

#[test]
fn a_run_that_is_long_gone_stands_in_no_position_and_ends_none() {
    let (hub, targets, channel) = joined();
    hub.forwarded(from(THERE, 5, 2));
    publish(&hub, &key("a"), 1);
    hub.forwarded(from(THERE, 7, 1));
    hub.forget_runs(&[THERE + 1]);
    assert_eq!(channel.mark().serial(), position(&hub, 1, 7), "another one");
    hub.forget_runs(&[THERE]);
    assert_eq!(channel.mark().serial(), position(&hub, 2, 0));
    assert!(targets[0].lost.lock().is_empty());
    let start = |here, there| hub.look_after(&key("a"), &position(&hub, here, there));
    assert_eq!(start(2, 0), Start::Live, "what is told from now on");
    assert_eq!(start(2, 7), Start::Live);
    assert_eq!(start(1, 7), Start::Replay { after: spot(PLACES_BEFORE + 4), is_exact: true }, "it has all");
    assert_eq!(start(1, 6), Start::Replay { after: spot(PLACES_BEFORE + 3), is_exact: true });
    assert_eq!(
        start(1, 0),
        Start::Replay { after: spot(PLACES_BEFORE), is_exact: false },
        "it has heard nothing of it"
    );
    assert_eq!(start(1, 8), Start::Unknown);
    publish(&hub, &key("a"), 1);
    assert_eq!(channel.mark().serial(), position(&hub, 3, 0));
    assert_eq!(start(2, 0), Start::Replay { after: spot(PLACES_BEFORE + 4), is_exact: false });
    let pulled = channel.pull(spot(PLACES_BEFORE + 4), usize::MAX).expect("it is there");
    assert!(pulled.is_end && pulled.deliveries.len() == 1);
}
