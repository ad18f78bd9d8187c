use super::*;

#[test]
fn a_first_id_is_looked_up_numbered_and_kept() {
    let node = PublishTestNode::new();
    assert_eq!(node.acked("a", vec![given("x")]), [1]);
    assert_eq!(node.store.take_calls(), [find(&["x"]), append(&[1], Some(72))]);
    assert_eq!(node.delivered(), ["x"]);
}

#[test]
fn repeated_publish_has_first_stamp_without_delivery_or_store() {
    let node = PublishTestNode::new();
    let first = node.outcome(node.request("a", vec![given("x")])).unwrap();
    node.acked("a", vec![plain("1")]);
    node.store.take_calls();
    let again = node.outcome(node.request("a", vec![given("x")])).unwrap();
    assert_eq!(again, first);
    assert_eq!(node.store.take_calls(), [find(&["x"])]);
    assert_eq!(node.delivered().len(), 2);
    assert_eq!(node.acked("a", vec![plain("1")]), [3], "a repeat takes no number");
}

#[test]
fn a_repeat_within_one_array_is_one_message() {
    let node = PublishTestNode::new();
    let messages = vec![given("x"), given("y"), given("x"), plain("1"), given("y"), given("x")];
    assert_eq!(node.acked("a", messages), [1, 2, 1, 3, 2, 1]);
    assert_eq!(node.store.take_calls(), [find(&["x", "y"]), append(&[1, 2, 3], Some(72))]);
    assert_eq!(node.delivered()[..2], ["x", "y"]);
    assert_eq!(node.delivered().len(), 3);
}

#[test]
fn known_new_repeated_and_absent_ids_mix_in_one_array() {
    let node = PublishTestNode::new();
    assert_eq!(node.acked("a", vec![given("old"), given("older")]), [1, 2]);
    let messages =
        vec![plain("1"), given("older"), given("new"), given("old"), plain("2"), given("new"), given("old")];
    assert_eq!(node.acked("a", messages), [3, 2, 4, 1, 5, 4, 1]);
    let calls = node.store.take_calls();
    assert_eq!(calls[2..], [find(&["older", "new", "old"]), append(&[3, 4, 5], Some(72))]);
    let delivered = node.delivered();
    assert_eq!((delivered.len(), delivered[3].as_str()), (5, "new"));
}

#[test]
fn an_array_of_repeats_alone_is_acked_and_nothing_else() {
    let node = PublishTestNode::new();
    node.acked("a", vec![given("x"), given("y")]);
    node.store.take_calls();
    assert_eq!(node.acked("a", vec![given("y"), given("x"), given("y")]), [2, 1, 2]);
    assert_eq!(node.store.take_calls(), [find(&["y", "x"])]);
    assert_eq!(node.delivered().len(), 2);
}

#[test]
fn an_id_belongs_to_the_channel_the_key_and_the_client_id() {
    let node = PublishTestNode::new();
    assert_eq!(node.acked("a", vec![given("x")]), [1]);
    assert_eq!(node.acked("b", vec![given("x")]), [1], "another channel");
    let mut request = node.request("a", vec![given("x")]);
    request.key_name = "k2".into();
    assert_eq!(sequences(node.outcome(request)), [2], "another key");
    let mut request = node.request("a", vec![given("x")]);
    request.client_id = Some(ClientId::of("ann"));
    assert_eq!(sequences(node.outcome(request)), [3], "another client");
    let mut request = node.request("a", vec![given("x")]);
    request.connection_id = ConnectionId::from_bytes([2; 16]);
    assert_eq!(sequences(node.outcome(request)), [1], "another connection is the same publisher");
}

#[test]
fn a_message_without_an_id_gets_one_that_is_no_serial() {
    let node = PublishTestNode::new();
    let ack = node.outcome(node.request("a", vec![plain("1"), plain("1")])).unwrap();
    assert_eq!(ack.stamps.len(), 2);
    assert!(node.delivered().iter().all(|id| id.parse::<fanfare_proto::serial::Serial>().is_err()));
    let deliveries = node.target.deliveries.lock();
    assert!(deliveries[0].published().messages.iter().all(|message| !message.id_given));
}

#[test]
fn no_two_messages_of_a_node_share_an_id_that_it_gave() {
    let node = PublishTestNode::new();
    for channel in ["a", "b"] {
        node.acked(channel, vec![plain("1"), plain("2")]);
    }
    let ids: std::collections::HashSet<_> = node.delivered().into_iter().collect();
    assert_eq!(ids.len(), 4);
}
