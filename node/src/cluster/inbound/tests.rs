use fanfare_proto::peer::Items;

use super::super::link::PeerItem;
use super::*;
use crate::model::ChannelName;

/// Changes a valid item by one fault at a time.
#[test]
fn malformed_items_of_a_peer_are_named() {
    let good = || v1::Forward {
        channel: Some(v1::Channel { account: "acme".to_owned(), name: "room".to_owned() }),
        first: 1,
        last: 2,
        connection_id: vec![3; 16].into(),
        client_id: Some("ada".to_owned()),
        messages: vec![Bytes::from_static(b"{}"), Bytes::from_static(b"{}")],
        ..v1::Forward::default()
    };
    assert!(forwarded(good()).is_ok());
    let channel =
        |account: &str, name: &str| Some(v1::Channel { account: account.to_owned(), name: name.to_owned() });
    let messages = |texts: [&'static [u8]; 2]| texts.map(Bytes::from_static).to_vec();
    for (forward, fault) in [
        (v1::Forward { channel: None, ..good() }, "no channel"),
        (v1::Forward { channel: channel("", "room"), ..good() }, "a bad account"),
        (v1::Forward { channel: channel("Acme", "room"), ..good() }, "a bad account"),
        (v1::Forward { channel: channel(&"a".repeat(65), "room"), ..good() }, "a bad account"),
        (v1::Forward { channel: channel("acme", ""), ..good() }, "a bad channel"),
        (v1::Forward { channel: channel("acme", "[room"), ..good() }, "a bad channel"),
        (v1::Forward { connection_id: vec![3; 15].into(), ..good() }, "a connection id of another length"),
        (v1::Forward { client_id: Some("\n".to_owned()), ..good() }, "a bad clientId"),
        (v1::Forward { first: 0, ..good() }, "no sequences"),
        (v1::Forward { first: 3, ..good() }, "no sequences"),
        (v1::Forward { last: 3, ..good() }, "not a message for each sequence"),
        (v1::Forward { messages: messages([b"{}", b"{"]), ..good() }, "a message that is no JSON object"),
        (v1::Forward { messages: messages([b"{}", b"[]"]), ..good() }, "a message that is no JSON object"),
        (
            v1::Forward { messages: messages([b"{}", b"{\"\xff\":1}"]), ..good() },
            "a message that is no JSON object",
        ),
    ] {
        assert_eq!(forwarded(forward.clone()), Err(MalformedItem(fault)), "{forward:?}");
    }
}

#[test]
fn a_message_does_not_keep_the_batch_that_it_came_in() {
    let batch = Bytes::from(b"{\"n\":1}{}".repeat(1_000));
    let forward = v1::Forward {
        channel: Some(v1::Channel { account: "acme".to_owned(), name: "room".to_owned() }),
        first: 1,
        last: 2,
        connection_id: vec![3; 16].into(),
        messages: vec![batch.slice(..7), batch.slice(7..9)],
        ..v1::Forward::default()
    };
    let forwarded = forwarded(forward).expect("it is as a node sends it");
    assert_eq!(forwarded.messages, [&b"{\"n\":1}"[..], b"{}"]);
    assert!(batch.is_unique());
}

#[test]
fn position_between_nodes_may_exceed_incarnations_for_clients() {
    let mut position = Serial::default();
    (1..=100).for_each(|incarnation| position.advance(incarnation << 40, u64::MAX));
    assert_eq!(position.to_string(), "~", "a client is given no such text");
    let key = ChannelKey::new(AccountId::new("acme"), ChannelName::stored("room"));
    for expected in [
        PeerRequest::Backfill { key: key.clone(), after: position.clone(), back_ms: 5 },
        PeerRequest::FetchReplay { key: key.clone(), after: Some(position.clone()) },
    ] {
        let item = Items::new(PeerItem::request(1, &expected).encoded())
            .next()
            .expect("an item")
            .expect("it can be read");
        let Some(v1::item::Kind::Request(v1::Request { kind: Some(kind), .. })) = item.kind else {
            panic!("it is no request")
        };
        assert_eq!(request(kind), Ok(expected));
    }
}

#[test]
fn handoff_with_more_incarnations_than_the_limit_is_refused() {
    let stamps = |count| (1..=count).map(|incarnation| v1::Stamp { incarnation, sequence: 1 }).collect();
    let taken = |begin: u64, end: u64| {
        let complete = v1::ReplayBuffer { complete: true, ..v1::ReplayBuffer::default() };
        replay_handoff(v1::ReplayBuffer { begin: stamps(begin), end: stamps(end), ..complete })
            .is_ok_and(|handed| handed.is_some())
    };
    let most = Serial::RUNS_MAX as u64;
    assert!(taken(most, most) && !taken(most + 1, most) && !taken(most, most + 1));
}
