use super::*;
use crate::model::DraftError;
use crate::publish::{PublishAck, PublishError};

/// A client without rate limits, so that only the order and the bound of in-flight requests act.
fn unlimited() -> SessionTestClient {
    let limits = Limits { publishes_per_second: 0, controls_per_second: 0, ..Limits::default() };
    SessionTestClient::limited(limits)
}

fn with_message_id(id: &str, channel: &str) -> Value {
    json!({"op": 13, "id": id, "channel": channel, "messages": [{"id": "given"}]})
}

#[test]
fn answers_come_in_the_order_of_the_requests() {
    let mut client = unlimited();
    let seen = client.send_together(&[publish("p1", "a"), publish("p2", "a"), publish("p3", "b")]);
    assert_eq!(brief(&seen), ["publish 1", "publish 2", "publish 3"]);
    assert_eq!(client.acked(2), []);
    assert_eq!(brief(&client.acked(3)), ["1 p3"], "another channel is not held up");
    assert_eq!(brief(&client.acked(1)), ["1 p1", "1 p2"]);
}

#[test]
fn an_ack_has_a_serial_for_each_message() {
    let mut client = unlimited();
    client.send(&json!({"op": 13, "id": "p", "channel": "a", "messages": [{}, {}]}));
    let stamps = [5, 6].map(|sequence| Stamp { incarnation: 9, sequence });
    let seen = client.answered(1, PublishResult::Acked(stamps.to_vec()));
    assert_eq!(*frame(&seen), json!({"op": 1, "id": "p", "serials": stamps.map(serial)}));
}

#[test]
fn every_outcome_has_its_code() {
    let draft = |error| Err(PublishError::Draft(error));
    let cases: [(Result<PublishAck, PublishError>, u32); 3] = [
        (draft(DraftError::TooLarge { bytes: 2, bytes_max: 1 }), code::TOO_LARGE),
        (draft(DraftError::Bad("name is bad".into())), code::BAD_REQUEST),
        (Err(PublishError::Unavailable), code::UNAVAILABLE),
    ];
    for (result, code) in cases {
        let mut client = unlimited();
        client.send(&publish("p", "a"));
        let seen = client.answered(1, result.into());
        assert_eq!(brief(&seen), [format!("2 p {code}")]);
    }
}

#[test]
fn attach_and_detach_wait_for_answers_to_earlier_publishes() {
    let mut client = unlimited();
    client.send(&publish("p1", "a"));
    client.send(&publish("p2", "a"));
    assert_eq!(client.send(&attach("at", "a")), []);
    assert_eq!(client.send(&detach("de", "a")), []);
    assert_eq!(brief(&client.send(&attach("other", "b"))), ["deliver b true", "9 other"]);
    assert_eq!(brief(&client.acked(1)), ["1 p1"]);
    assert_eq!(brief(&client.acked(2)), ["1 p2", "deliver a true", "9 at", "11 de", "detach a"]);
    assert_eq!(brief(&client.send(&attach("at", "a"))), ["deliver a true", "9 at"], "nothing is left behind");
}

#[test]
fn publishes_behind_a_waiting_attach_wait_with_it() {
    let mut client = unlimited();
    client.send(&publish("p1", "a"));
    client.send(&attach("at", "a"));
    assert_eq!(client.send(&publish("p2", "a")), []);
    let seen = client.acked(1);
    assert_eq!(brief(&seen), ["1 p1", "deliver a true", "9 at", "publish 2"]);
    assert_eq!(brief(&client.acked(2)), ["1 p2"]);
}

#[test]
fn publishes_that_waited_go_on_together() {
    let mut client = unlimited();
    client.send(&publish("p1", "a"));
    client.send(&attach("at", "a"));
    for id in ["p2", "p3", "p4"] {
        assert_eq!(client.send(&publish(id, "a")), []);
    }
    client.send(&detach("de", "a"));
    client.send(&publish("p5", "a"));
    let seen = client.acked(1);
    let together = ["1 p1", "deliver a true", "9 at", "publish 2", "publish 3", "publish 4"];
    assert_eq!(brief(&seen), together);
    assert_eq!(client.acked(4), []);
    assert_eq!(client.acked(3), []);
    let seen = client.acked(2);
    assert_eq!(brief(&seen), ["1 p2", "1 p3", "1 p4", "11 de", "detach a", "publish 5"]);
    assert_eq!(brief(&client.acked(5)), ["1 p5"]);
}

#[test]
fn a_refused_publish_is_answered_in_its_turn() {
    let empty = json!({"op": 13, "id": "empty", "channel": "a", "messages": []});
    let mut client = unlimited();
    assert_eq!(brief(&client.send(&empty)), ["2 empty 40000"], "at once when nothing is before it");
    client.send(&publish("p1", "a"));
    let first = last_ticket(&client);
    assert_eq!(client.send(&empty), []);
    client.send(&publish("p2", "a"));
    let second = last_ticket(&client);
    assert_eq!(brief(&client.acked(first)), ["1 p1", "2 empty 40000"]);
    assert_eq!(brief(&client.acked(second)), ["1 p2"]);
}

#[test]
fn a_refused_publish_waits_behind_an_attach_too() {
    let mut client = unlimited();
    client.send(&publish("p1", "a"));
    client.send(&attach("at", "a"));
    client.send(&json!({"op": 13, "id": "empty", "channel": "a", "messages": []}));
    client.send(&publish("p2", "a"));
    let seen = client.acked(1);
    assert_eq!(brief(&seen)[..4], ["1 p1", "deliver a true", "9 at", "2 empty 40000"]);
    let last = last_ticket(&client);
    assert_eq!(brief(&seen)[4..], [format!("publish {last}")]);
    assert_eq!(brief(&client.acked(last)), ["1 p2"]);
    assert!(client.session.request_queues.is_empty() && client.session.in_flight == 0);
}

#[test]
fn a_control_over_the_rate_is_refused_in_its_turn() {
    let limits = Limits { control_burst: 1, ..Limits::default() };
    let mut client = SessionTestClient::limited(limits);
    client.send(&publish("p", "a"));
    client.send(&attach("at", "a"));
    assert_eq!(client.send(&detach("de", "a")), []);
    assert_eq!(brief(&client.send(&detach("de", "b"))), ["2 de 42900"], "nothing is before it");
    assert_eq!(brief(&client.acked(1)), ["1 p", "deliver a true", "9 at", "2 de 42900"]);
    assert_eq!(client.session.in_flight, 0);
}

#[test]
fn a_late_or_unknown_ticket_is_ignored() {
    let mut client = unlimited();
    client.send(&publish("p1", "a"));
    client.send(&publish("p2", "a"));
    assert_eq!(brief(&client.answered(1, PublishResult::Unavailable)), ["2 p1 50003"]);
    assert_eq!(client.acked(1), []);
    assert_eq!(client.answered(2, PublishResult::Unavailable).len(), 1);
    assert_eq!(client.acked(2), []);
    assert_eq!(client.acked(77), []);
    client.send(&publish("p3", "a"));
    client.send(&publish("p4", "a"));
    assert_eq!(client.answered(4, PublishResult::Unavailable), []);
    assert_eq!(client.acked(4), [], "the first answer stands");
    assert_eq!(brief(&client.acked(3)), ["1 p3", "2 p4 50003"]);
}

#[test]
fn publish_after_given_message_id_is_queued_until_all_answered() {
    let mut client = unlimited();
    let queued = |seen: &[SessionEffect]| match seen {
        [SessionEffect::Publish { queued, .. }] => *queued,
        _ => panic!("{seen:?}"),
    };
    assert!(!queued(&client.send(&publish("p1", "a"))));
    assert!(queued(&client.send(&with_message_id("p2", "a"))));
    assert!(queued(&client.send(&publish("p3", "a"))), "it may not overtake");
    assert!(!queued(&client.send(&publish("p4", "b"))), "another channel");
    client.acked(1);
    client.acked(2);
    assert!(queued(&client.send(&publish("p5", "a"))), "one is still on its way");
    client.acked(3);
    client.acked(5);
    assert!(!queued(&client.send(&publish("p6", "a"))));
}

#[test]
fn client_is_full_at_the_bound_of_unanswered_requests() {
    let mut client = unlimited();
    for number in 0..IN_FLIGHT_MAX - 1 {
        client.send(&publish(&number.to_string(), "a"));
    }
    assert!(!client.session.is_full());
    client.send(&attach("at", "a"));
    assert!(client.session.is_full(), "what waits counts");
    client.acked(2);
    assert!(client.session.is_full(), "its answer is still owed");
    assert_eq!(brief(&client.acked(1)), ["1 0", "1 1"]);
    assert_eq!(client.session.in_flight, IN_FLIGHT_MAX - 2);
    for ticket in 3..IN_FLIGHT_MAX as u64 {
        client.acked(ticket);
    }
    assert_eq!(client.session.in_flight, 0);
    assert!(client.session.request_queues.is_empty());
}

fn last_ticket(client: &SessionTestClient) -> u64 {
    client.session.next_ticket
}
