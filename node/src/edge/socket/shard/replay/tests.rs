use super::*;
use crate::hub::{Hub, Numbering};
use crate::model::{
    AccountId, ChannelKey, ChannelName, Clock, ConnectionId, Limits, Message, PublishedMessages,
};

const THERE: u64 = 77;

/// A hub without replay buffers, so that earlier positions are unknown.
fn attached() -> (Hub, ChannelKey, Arc<Channel>) {
    let limits = Limits { rings_bytes: 0, ..Limits::default() };
    let hub = Hub::new(Vec::new(), Clock::system(), &limits);
    let key = ChannelKey::new(AccountId::new("acme"), ChannelName::of("a"));
    let (channel, _) = hub.attach(&key, 0);
    hub.learn_peer_sequence(&key, channel.number(), Stamp { incarnation: THERE, sequence: 5 });
    (hub, key, channel)
}

fn publish(hub: &Hub, key: &ChannelKey) {
    let from = ConnectionId::from_bytes([1; 16]);
    hub.publish(key, 1, |Numbering { incarnation, first_sequence: sequence, timestamp_ms }| {
        let message =
            Message { id: "m".into(), id_given: false, sequence, name: None, data: None, extras: None };
        PublishedMessages::new(key.clone(), incarnation, timestamp_ms, from, None, "k".into(), vec![message])
    });
}

#[test]
fn client_takes_channel_position_or_keeps_own_if_unknown() {
    let (hub, key, channel) = attached();
    let before = channel.position();
    let at = LocalOffset::end(before.offset);
    let received = Serial::single(THERE, 5);
    let replay = || Replay::from_replay_buffer(&channel, at, received.clone(), true);
    assert_eq!(replay().position(), before.serial());
    publish(&hub, &key);
    assert_eq!(channel.position_at(at), Serial::default(), "it is not known any more");
    assert_eq!(replay().position(), received);
}

#[test]
fn client_with_part_of_what_follows_gets_joined_position() {
    let (_hub, _key, channel) = attached();
    let before = channel.position();
    let received = Serial::single(THERE, 7);
    let replay =
        Replay::from_replay_buffer(&channel, LocalOffset::end(before.offset), received.clone(), false);
    assert_eq!(replay.position(), before.serial().join(&received));
    assert!(
        matches!(&replay.after, ReplayPosition::Local { received: Some(kept), .. } if **kept == received)
    );
}
